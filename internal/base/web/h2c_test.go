package web

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// TestHTTP2WithoutTLSHasTheLimitsOfThePort: idle connections make room, those with requests do
// not, and neither headers nor requests are without bound.
func TestHTTP2WithoutTLSHasTheLimitsOfThePort(t *testing.T) {
	release := make(chan struct{})
	p := serveListened(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			w.WriteHeader(http.StatusOK)
			http.NewResponseController(w).Flush()
			<-release
		}
		io.WriteString(w, r.Proto)
	}, nil, 2, Stall)
	get := func(client *http.Client, path string) (string, error) {
		response, err := client.Get(p.URL() + path)
		if err != nil {
			return "", err
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		return string(text), err
	}
	for range 4 {
		if got, err := get(onlyH2(t), "/"); got != "HTTP/2.0" {
			t.Fatalf("%q, %v", got, err)
		}
	}
	request, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, p.URL(), nil)
	request.Header.Set("X-Long", strings.Repeat("x", 2*headerLimit))
	if response, err := onlyH2(t).Do(request); err == nil && response.StatusCode < 400 {
		t.Errorf("long headers: %s", response.Status)
	}
	var slow []*http.Response
	for range 2 {
		response, err := onlyH2(t).Get(p.URL() + "/slow")
		if err != nil {
			t.Fatal(err)
		}
		slow = append(slow, response)
	}
	late := onlyH2(t)
	late.Timeout = 100 * time.Millisecond
	if got, err := get(late, "/"); err == nil {
		t.Errorf("a third connection was served: %q", got)
	}
	close(release)
	for _, response := range slow {
		response.Body.Close()
	}
}

// TestResetsOnHTTP2WithoutTLSAreBounded: a client that opens streams and resets them at once gets
// no more handlers than it may have streams, and others are served meanwhile.
func TestResetsOnHTTP2WithoutTLSAreBounded(t *testing.T) {
	var running, most atomic.Int64
	release := make(chan struct{})
	p := serveListened(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			n := running.Add(1)
			defer running.Add(-1)
			for was := most.Load(); n > was && !most.CompareAndSwap(was, n); was = most.Load() {
			}
			<-release
		}
	}, nil, 2, Stall)
	defer close(release)
	conn, err := net.Dial("tcp", strings.TrimPrefix(p.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	io.WriteString(conn, http2.ClientPreface)
	framer := http2.NewFramer(conn, conn)
	framer.WriteSettings()
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for _, f := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":authority", "a"}, {":path", "/slow"}} {
		encoder.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]})
	}
	ended := make(chan http2.ErrCode, 1)
	go func() { // until the connection ends
		for {
			frame, err := framer.ReadFrame()
			if err != nil {
				ended <- 0
				return
			}
			if away, ok := frame.(*http2.GoAwayFrame); ok {
				ended <- away.ErrCode
				return
			}
		}
	}()
	for id := uint32(1); id < 20_000; id += 2 {
		if framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block.Bytes(), EndStream: true, EndHeaders: true}) != nil || framer.WriteRSTStream(id, http2.ErrCodeCancel) != nil {
			break
		}
	}
	if code := <-ended; code != http2.ErrCodeEnhanceYourCalm {
		t.Errorf("the connection ends with %s", code)
	}
	if n := most.Load(); n == 0 || n > maxStreams {
		t.Errorf("%d handlers ran at once", n)
	}
	response, err := http.Get(p.URL())
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("another client: %v, %v", response, err)
	}
	response.Body.Close()
}
