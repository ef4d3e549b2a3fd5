package web

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

// quick is a time of stall for tests.
const quick = 600 * time.Millisecond

// dialSmall connects a client that keeps next to nothing unread.
func dialSmall(t *testing.T, p *Port) net.Conn {
	t.Helper()
	small := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) error {
		return raw.Control(func(fd uintptr) { syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4096) })
	}}
	conn, err := small.Dial("tcp", strings.TrimPrefix(p.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	return conn
}

// onlyH2 is a client of HTTP/2 without TLS.
func onlyH2(t *testing.T) *http.Client {
	t.Helper()
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// readsAll answers with the length of the body, or the refusal of its reader.
func readsAll(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var bad *BodyError
	if errors.As(err, &bad) {
		http.Error(w, bad.Message, bad.Status)
		return
	}
	fmt.Fprint(w, len(body))
}

// TestAnAnswerDoesNotWaitForABodyThatDoesNotCome: 401 is said at once, and the place is free
// for others.
func TestAnAnswerDoesNotWaitForABodyThatDoesNotCome(t *testing.T) {
	for name, answer := range map[string]string{"short": "no", "long": strings.Repeat("no", 10_000)} {
		t.Run(name, func(t *testing.T) {
			p := serveListened(t, func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(http.StatusUnauthorized)
				io.WriteString(w, answer)
			}, nil, 2, Stall)
			for range 6 {
				conn := dialSmall(t, p)
				began := time.Now()
				fmt.Fprint(conn, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
				response, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err != nil || response.StatusCode != http.StatusUnauthorized || time.Since(began) > Stall/2 {
					t.Fatalf("%v, %v after %s", response, err, time.Since(began))
				}
			}
		})
	}
}

// TestAConnectionWhoseBodyWasNotReadIsKept where all of it has come.
func TestAConnectionWhoseBodyWasNotReadIsKept(t *testing.T) {
	p := serveListened(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }, nil, 2, Stall)
	conn := dialSmall(t, p)
	reader := bufio.NewReader(conn)
	for range 3 {
		fmt.Fprint(conn, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}")
		response, err := http.ReadResponse(reader, nil)
		if err != nil || response.StatusCode != http.StatusUnauthorized || response.Close {
			t.Fatalf("%v, %v", response, err)
		}
	}
}

// TestABodyThatStopsComingEnds over both versions of HTTP, and says why.
func TestABodyThatStopsComingEnds(t *testing.T) {
	p := serveListened(t, readsAll, nil, 4, quick)
	for name, client := range map[string]*http.Client{"HTTP/1": http.DefaultClient, "HTTP/2": onlyH2(t)} {
		body, send := io.Pipe()
		go send.Write([]byte("{")) // until the request ends
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.URL(), body)
		if err != nil {
			t.Fatal(err)
		}
		request.ContentLength = 100
		response, err := client.Do(request)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		text, _ := io.ReadAll(response.Body)
		response.Body.Close()
		send.Close()
		if response.StatusCode != http.StatusRequestTimeout || !strings.Contains(string(text), "no byte of the request body arrived for "+quick.String()+": it ended after 1 bytes") {
			t.Errorf("%s: %d %s", name, response.StatusCode, text)
		}
	}
}

// TestASlowBodyIsReadToItsEnd: it takes many times the time of stall.
func TestASlowBodyIsReadToItsEnd(t *testing.T) {
	p := serveListened(t, readsAll, nil, 4, quick)
	for name, client := range map[string]*http.Client{"HTTP/1": http.DefaultClient, "HTTP/2": onlyH2(t)} {
		body, send := io.Pipe()
		go func() { // until all is sent
			for tick := time.NewTicker(quick / 4); ; <-tick.C {
				if _, err := send.Write([]byte("x")); err != nil {
					tick.Stop()
					return
				}
			}
		}()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.URL(), io.LimitReader(body, 12))
		if err != nil {
			t.Fatal(err)
		}
		response, err := client.Do(request)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		text, _ := io.ReadAll(response.Body)
		response.Body.Close()
		body.Close()
		if response.StatusCode != http.StatusOK || string(text) != "12" {
			t.Errorf("%s: %d %s", name, response.StatusCode, text)
		}
	}
}

// floods writes until that fails.
func floods(ended chan<- struct{}) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		defer close(ended)
		if r.URL.Path == "/unsent" {
			LimitUnsent(r, 32<<10)
		}
		for part := make([]byte, 200_000); ; {
			if _, err := w.Write(part); err != nil {
				return
			}
		}
	}
}

// TestAnAnswerThatNobodyTakesEnds over both versions of HTTP, whatever its size.
func TestAnAnswerThatNobodyTakesEnds(t *testing.T) {
	for _, path := range []string{"/", "/unsent"} {
		ended := make(chan struct{})
		p := serveListened(t, floods(ended), nil, 4, quick)
		conn := dialSmall(t, p)
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: a\r\n\r\n", path)
		waitFor(t, ended, "the answer over HTTP/1"+path)
	}
	ended := make(chan struct{})
	p := serveListened(t, floods(ended), nil, 4, quick)
	response, err := onlyH2(t).Get(p.URL()) // the stream's window is full; the connection is not
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	waitFor(t, ended, "the answer over HTTP/2")
}

func waitFor(t *testing.T, ended <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Fatalf("%s goes on", what)
	}
}

// TestASlowReaderGetsAll: it takes a part of the answer in each time of stall.
func TestASlowReaderGetsAll(t *testing.T) {
	const size = 120_000
	p := serveListened(t, func(w http.ResponseWriter, r *http.Request) {
		LimitUnsent(r, 4<<10)
		w.Write(make([]byte, size))
	}, nil, 4, quick)
	conn := dialSmall(t, p)
	fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	got := 0
	for tick := time.NewTicker(quick / 6); got < size; <-tick.C {
		n, err := io.CopyN(io.Discard, response.Body, min(6_000, int64(size-got)))
		if got += int(n); err != nil {
			t.Fatalf("%v after %d bytes", err, got)
		}
	}
}

// TestPipelinedQuestionsWithoutAReaderEnd: their connection is closed.
func TestPipelinedQuestionsWithoutAReaderEnd(t *testing.T) {
	p := serveListened(t, func(w http.ResponseWriter, _ *http.Request) { w.Write(make([]byte, 50_000)) }, nil, 1, quick)
	conn := dialSmall(t, p)
	conn.Write(bytes.Repeat([]byte("GET / HTTP/1.1\r\nHost: a\r\n\r\n"), 200))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	request, _ := http.NewRequestWithContext(ctx, http.MethodGet, p.URL(), nil)
	response, err := http.DefaultClient.Do(request) // in the place of that one
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
}

// TestTLSKeepsItsLimits: a stalled body ends there, too.
func TestTLSKeepsItsLimits(t *testing.T) {
	dir := t.TempDir()
	newAuthority(t).issue(t, "a", dir+"/cert", dir+"/key")
	certificates := NewCertificates(TLSSettings{TLSCert: dir + "/cert", TLSKey: dir + "/key"})
	use, err := certificates.Read()
	if err != nil {
		t.Fatal(err)
	}
	use()
	p := serveListened(t, readsAll, certificates.Config(), 2, quick)
	conn, err := tls.Dial("tcp", strings.TrimPrefix(p.URL(), "https://"), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	fmt.Fprint(conn, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{")
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || response.StatusCode != http.StatusRequestTimeout {
		t.Errorf("%v, %v", response, err)
	}
}
