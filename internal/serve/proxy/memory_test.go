package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// memory is a transport to workers of this process, by host: a synctest bubble cannot
// wait for sockets. Where it has none, connections are refused.
type memory map[string]http.HandlerFunc

func (m memory) RoundTrip(r *http.Request) (*http.Response, error) {
	serve := m[r.URL.Host]
	if serve == nil {
		return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	}
	ctx, cancel := context.WithCancel(r.Context())
	body, into := io.Pipe()
	stop := context.AfterFunc(ctx, func() { into.CloseWithError(context.Cause(ctx)) })
	w := &memoryWriter{header: http.Header{}, body: into, headed: make(chan int, 1)}
	broke := make(chan struct{})
	go func() { // until the handler ends, with ctx at the latest
		defer func() {
			if recover() != nil {
				into.CloseWithError(io.ErrUnexpectedEOF)
				close(broke)
			}
		}()
		serve(w, r.WithContext(ctx))
		if ctx.Err() == nil {
			w.WriteHeader(http.StatusOK)
		}
		into.CloseWithError(context.Cause(ctx)) // nil: the end of the answer
	}()
	select {
	case status := <-w.headed:
		return &http.Response{
			StatusCode: status, Status: fmt.Sprintf("%d %s", status, http.StatusText(status)), Header: w.sent, ContentLength: -1, Request: r,
			Body: memoryBody{body, func() { stop(); cancel(); body.Close() }},
		}, nil
	case <-broke:
		cancel()
		return nil, io.ErrUnexpectedEOF
	case <-ctx.Done():
		cancel()
		return nil, context.Cause(r.Context())
	}
}

// memoryBody is an answer's body whose end ends the worker's handler.
type memoryBody struct {
	io.Reader
	end func()
}

func (b memoryBody) Close() error {
	b.end()
	return nil
}

// memoryWriter hands an answer to its reader piece by piece.
type memoryWriter struct {
	header, sent http.Header
	body         *io.PipeWriter
	headed       chan int // gets the status, once
	once         sync.Once
}

func (w *memoryWriter) Header() http.Header { return w.header }

func (w *memoryWriter) WriteHeader(status int) {
	w.once.Do(func() {
		w.sent = w.header.Clone()
		w.headed <- status
	})
}

func (w *memoryWriter) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.body.Write(b)
}

func (w *memoryWriter) Flush() { w.WriteHeader(http.StatusOK) }

// TestWorkersInMemoryAnswerLikeServers holds memory against net/http.
func TestWorkersInMemoryAnswerLikeServers(t *testing.T) {
	for name, serve := range map[string]http.HandlerFunc{
		"whole": says(429, "Retry-After", "5"), "nothing": func(http.ResponseWriter, *http.Request) {}, "a stream that breaks": breaks,
		"none": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		server := httptest.NewServer(serve)
		ask := func(url string, transport http.RoundTripper) string {
			client := http.Client{Transport: transport}
			defer client.CloseIdleConnections()
			response, err := client.Get(url)
			if err != nil {
				return "no answer"
			}
			defer response.Body.Close()
			body, err := io.ReadAll(response.Body)
			return fmt.Sprintf("%d %s %s %v", response.StatusCode, response.Header.Get("Retry-After"), body, err)
		}
		if got, want := ask("http://w", memory{"w": serve}), ask(server.URL, nil); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
		server.Close()
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		request, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://w", nil)
		if _, err := (memory{"w": silent}).RoundTrip(request); err != nil {
			t.Error(err)
		}
		hangs := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
		if _, err := (memory{"w": hangs}).RoundTrip(request); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	})
}
