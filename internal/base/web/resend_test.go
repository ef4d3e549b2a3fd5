package web_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"kvrouter/internal/base/web"
)

// closing is a server that closes connections in ways of its own.
type closing struct {
	*httptest.Server
	mu     sync.Mutex // guards the rest
	bodies []string
	conns  map[string]int // requests by client address
}

// newClosing returns a server that answers the first request of each connection, and calls later
// with each further one and its connection, which is closed then.
func newClosing(t *testing.T, later func(net.Conn)) *closing {
	s := &closing{conns: map[string]int{}}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		s.mu.Lock()
		s.bodies = append(s.bodies, string(body))
		s.conns[r.RemoteAddr]++
		first := s.conns[r.RemoteAddr] == 1
		s.mu.Unlock()
		if first {
			io.WriteString(w, "well")
			return
		}
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		later(conn)
		conn.Close()
	}))
	t.Cleanup(s.Close)
	return s
}

// post sends a body and returns the answer.
func post(client *http.Client, url, body string) (string, error) {
	response, err := client.Post(url, "", strings.NewReader(body))
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	return string(answer), err
}

func TestAConnectionThatEndsBetweenTwoRequestsCostsNoAnswer(t *testing.T) {
	server := newClosing(t, func(net.Conn) {})
	client := web.NewClient(web.NewTransport(nil))
	defer client.CloseIdleConnections()
	long := strings.Repeat("b", 1<<20)
	for _, body := range []string{"a", long, "c", ""} {
		if answer, err := post(client, server.URL, body); err != nil || answer != "well" {
			t.Fatalf("%d bytes: %q, %v", len(body), answer, err)
		}
	}
	server.mu.Lock()
	defer server.mu.Unlock()
	if last := server.bodies[len(server.bodies)-1]; len(server.bodies) < 5 || last != "" {
		t.Errorf("%d requests came", len(server.bodies))
	}
}

func TestARequestIsSentAgainOnceOnly(t *testing.T) {
	var requests atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if requests.Add(1); r.URL.Path == "/well" {
			return
		}
		conn, _, _ := http.NewResponseController(w).Hijack()
		conn.Close()
	}))
	defer server.Close()
	client := web.NewClient(web.NewTransport(nil))
	defer client.CloseIdleConnections()
	for _, test := range []struct {
		name   string
		reused bool
		may    bool
		sent   int64
	}{{"on a new connection", false, true, 1}, {"on a used one", true, true, 2}, {"on a used one, where that is not allowed", true, false, 1}} {
		if test.reused {
			if _, err := post(client, server.URL+"/well", "a"); err != nil {
				t.Fatal(err)
			}
		}
		requests.Store(0)
		asked := 0
		ctx := web.WithResends(t.Context(), func() bool {
			asked++
			return test.may
		})
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL, strings.NewReader("a"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Do(request); err == nil || requests.Load() != test.sent || asked > 0 != test.reused {
			t.Errorf("%s: sent %d times, want %d; asked %d times; error %v", test.name, requests.Load(), test.sent, asked, err)
		}
	}
}

func TestAnAnswerThatHasBegunIsNotAskedForAgain(t *testing.T) {
	server := newClosing(t, func(conn net.Conn) { io.WriteString(conn, "HTTP/1.1 2") })
	client := web.NewClient(web.NewTransport(nil))
	defer client.CloseIdleConnections()
	if _, err := post(client, server.URL, "a"); err != nil {
		t.Fatal(err)
	}
	if answer, err := post(client, server.URL, "b"); err == nil {
		t.Errorf("answer %q", answer)
	}
	server.mu.Lock()
	defer server.mu.Unlock()
	if len(server.bodies) != 2 {
		t.Errorf("%d requests came", len(server.bodies))
	}
}

// TestAnEarlyRefusalIsRead: a server may answer and close before it has read the body.
func TestAnEarlyRefusalIsRead(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() { // ends with the listener
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			io.ReadFull(conn, make([]byte, 1024))
			io.WriteString(conn, "HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
			conn.Close()
		}
	}()
	client := web.NewClient(web.NewTransport(nil))
	for range 20 {
		response, err := client.Post("http://"+listener.Addr().String(), "", bytes.NewReader(make([]byte, 8<<20)))
		if err != nil {
			t.Fatal(err)
		}
		if response.StatusCode != http.StatusRequestEntityTooLarge {
			t.Fatal(response.Status)
		}
		response.Body.Close()
	}
}

func TestARequestThatCannotBeSentIsNobodysFault(t *testing.T) {
	server := newClosing(t, func(net.Conn) {})
	client := web.NewClient(web.NewTransport(nil))
	defer client.CloseIdleConnections()
	request, err := http.NewRequest(http.MethodPost, server.URL, strings.NewReader("a"))
	if err != nil {
		t.Fatal(err)
	}
	request.Header["X-Odd"] = []string{"\x00"}
	if response, err := client.Do(request); !errors.Is(err, web.ErrUnsendable) {
		t.Errorf("%v, %v", response, err)
	}
	if _, err := post(client, "http://127.0.0.1:1", "a"); err == nil || errors.Is(err, web.ErrUnsendable) {
		t.Errorf("nobody listens: %v", err)
	}
}

func BenchmarkRoundTrip(b *testing.B) {
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer server.Close()
	transport := web.NewTransport(nil)
	for _, of := range []struct {
		name   string
		client *http.Client
	}{{"transport", &http.Client{Transport: transport}}, {"client", web.NewClient(transport)}} {
		b.Run(of.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				post(of.client, server.URL, "a")
			}
		})
	}
	transport.CloseIdleConnections()
}
