package openai

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/testkit"
)

// echo is a worker that accepts an upgrade and sends back what it gets.
func echo(t *testing.T) *httptest.Server {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" || r.URL.RequestURI() != realtimeRoute+"?model=m" || r.Header.Get("Sec-WebSocket-Key") != "a" {
			t.Errorf("%s %v", r.URL, r.Header)
		}
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		io.Copy(conn, buffered)
	}))
	t.Cleanup(server.Close)
	return server
}

// dialRealtime opens a connection and returns the status of the answer.
func dialRealtime(t *testing.T, h *testAPI, model string) (conn net.Conn, text *bufio.Reader, status int) {
	conn, err := net.Dial("tcp", h.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	fmt.Fprintf(conn, "GET %s?model=%s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n\r\n", realtimeRoute, model)
	text = bufio.NewReader(conn)
	response, err := http.ReadResponse(text, nil)
	if err != nil {
		t.Fatal(err)
	}
	return conn, text, response.StatusCode
}

func TestWebSocketsPassThrough(t *testing.T) {
	h := newTestAPI(t, setup{RequestTimeout: time.Second}, echo(t).URL)
	inFlight := func() int { return h.router.Load(kv.WorkerKey{}).InFlight }
	conn, text, status := dialRealtime(t, h, "m")
	if status != http.StatusSwitchingProtocols {
		t.Fatalf("status %d", status)
	}
	for _, said := range []string{"a", strings.Repeat("b", 100_000)} {
		go io.WriteString(conn, said+"\n")
		if got, err := text.ReadString('\n'); err != nil || got != said+"\n" {
			t.Fatalf("%d bytes came back of %d: %v", len(got), len(said), err)
		}
	}
	if n := inFlight(); n != 1 {
		t.Errorf("%d are booked", n)
	}
	if _, err := text.ReadString('\n'); err == nil { // it is idle
		t.Error("the idle connection was not ended")
	}
	testkit.Eventually(t, 5*time.Second, "the booking has ended", func() bool { return inFlight() == 0 })

	conn, _, _ = dialRealtime(t, h, "m")
	conn.Close()
	testkit.Eventually(t, 5*time.Second, "the booking has ended with its client", func() bool { return inFlight() == 0 })

	if _, _, status := dialRealtime(t, h, "other"); status != http.StatusNotFound {
		t.Errorf("another model: %d", status)
	}
	response, err := http.Get(h.URL + realtimeRoute + "?model=m")
	if err != nil || response.StatusCode != http.StatusUpgradeRequired {
		t.Errorf("no WebSocket: %v %v", response, err)
	}
	response.Body.Close()
	none := newTestAPI(t, setup{}, "http://127.0.0.1:1")
	if _, _, status := dialRealtime(t, none, "m"); status != http.StatusBadGateway {
		t.Errorf("no worker answers: %d", status)
	}
}

// TestKeysOfWebSocketsStayAtTheRouter: a browser gets back a protocol that it has offered, or it
// closes the connection.
func TestKeysOfWebSocketsStayAtTheRouter(t *testing.T) {
	chosen := "" // by the worker
	got := make(chan *http.Request, 1)
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got <- r
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+chosen+"\r\n")
	}))
	defer worker.Close()
	keyed, open := newTestAPI(t, setup{APIKey: []string{"secret"}}, worker.URL), newTestAPI(t, setup{}, worker.URL)
	open.router.Down(open.router.Targets()[0].Key)
	open.router.Up(kv.Target{URL: worker.URL, Models: []string{"m"}, Bearer: "of-the-worker"})
	for _, test := range []struct {
		name, path, headers string
		sent, chosen, want  string // protocols
	}{
		{"OpenAI in a browser", "?model=m", "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.secret, openai-beta.realtime-v1\r\n", "realtime, openai-beta.realtime-v1", "", "realtime"},
		{"the worker chooses", "?model=m", "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.secret, b\r\n", "realtime, b", "b", "b"},
		{"the key comes first", "?model=m", "Sec-WebSocket-Protocol: openai-insecure-api-key.secret,realtime\r\n", "realtime", "", "realtime"},
		{"Azure in a browser", "?model=m&api-key=secret", "", "", "", ""},
		{"Azure elsewhere", "?model=m", "api-key: secret\r\n", "", "", ""},
		{"OpenAI elsewhere", "?model=m", "Authorization: Bearer secret\r\n", "", "", ""},
	} {
		for _, h := range []*testAPI{keyed, open} {
			if chosen = ""; test.chosen != "" {
				chosen = "Sec-WebSocket-Protocol: " + test.chosen + "\r\n"
			}
			conn, err := net.Dial("tcp", h.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(conn, "GET %s%s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n%s\r\n", realtimeRoute, test.path, test.headers)
			response, err := http.ReadResponse(bufio.NewReader(conn), nil)
			conn.Close()
			if err != nil || response.StatusCode != http.StatusSwitchingProtocols || response.Header.Get(web.HeaderProtocol) != test.want {
				t.Fatalf("%s: %v, %v", test.name, response, err)
			}
			r := <-got
			if text := fmt.Sprint(r.URL, r.Header); strings.Contains(text, "secret") || r.Header.Get(web.HeaderProtocol) != test.sent || r.URL.Query().Get("model") != "m" {
				t.Errorf("%s: the worker gets %s", test.name, text)
			}
			if want := map[bool]string{true: "Bearer of-the-worker"}[h == open]; r.Header.Get("Authorization") != want {
				t.Errorf("%s: the worker gets the key %q, want %q", test.name, r.Header.Get("Authorization"), want)
			}
		}
	}
	conn, err := net.Dial("tcp", keyed.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Protocol: realtime, openai-insecure-api-key.wrong\r\n\r\n", realtimeRoute)
	if response, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || response.StatusCode != http.StatusUnauthorized {
		t.Errorf("a wrong key: %v, %v", response, err)
	}
	for _, h := range []*testAPI{keyed, open} {
		testkit.Eventually(t, 5*time.Second, "the bookings have ended", func() bool { return h.router.Load(kv.WorkerKey{}).InFlight == 0 })
	}
}

// TestNoHandshakeEjectsWorkers: a worker does not count handshakes that it never sees, or that it
// drops, as failures.
func TestNoHandshakeEjectsWorkers(t *testing.T) {
	var seen atomic.Int64
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		seen.Add(1)
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			conn.Close()
		}
	}))
	defer worker.Close()
	h := newTestAPI(t, setup{}, worker.URL, worker.URL)
	for _, test := range []struct {
		headers string
		status  int
		reaches bool
	}{
		{"Connection: Upgrade\r\nUpgrade: \xc3\xa9\r\n", http.StatusBadRequest, false},
		{"Connection: Upgrade\r\nUpgrade: h2c\r\n", http.StatusBadRequest, false},
		{"Connection: keep-alive\r\nUpgrade: websocket\r\n", http.StatusBadRequest, false},
		{"Connection: keep-alive, upgrade\r\nUpgrade: WebSocket, \xc3\xa9\r\n", http.StatusBadGateway, true},
	} {
		before := seen.Load()
		for range 10 {
			conn, err := net.Dial("tcp", h.Listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(conn, "GET %s?model=m HTTP/1.1\r\nHost: x\r\n%s\r\n", realtimeRoute, test.headers)
			response, err := http.ReadResponse(bufio.NewReader(conn), nil)
			conn.Close()
			if err != nil || response.StatusCode != test.status {
				t.Fatalf("%q: %v, %v; want %d", test.headers, response, err, test.status)
			}
		}
		if reached := seen.Load() > before; reached != test.reaches {
			t.Errorf("%q: reached a worker: %v", test.headers, reached)
		}
		if records, _ := h.router.Health.Records(); records[0].State != health.StateIn || records[1].State != health.StateIn {
			t.Errorf("%q: %s, %s", test.headers, records[0].State, records[1].State)
		}
	}
}

func TestWebSocketsEndWithTheirWorker(t *testing.T) {
	h := newTestAPI(t, setup{}, echo(t).URL)
	conn, text, status := dialRealtime(t, h, "m")
	if status != http.StatusSwitchingProtocols {
		t.Fatalf("status %d", status)
	}
	target := h.router.Targets()[0]
	h.router.Down(target.Key)
	h.proxy.Abort(target.Key.Worker, target.Generation, "it is down")
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := text.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection goes on: %v", err)
	}
}

// upgrade asks for a connection with further headers and returns it with the status.
func upgrade(t *testing.T, h *testAPI, headers string) (conn net.Conn, text *bufio.Reader, response *http.Response) {
	t.Helper()
	conn, err := net.Dial("tcp", h.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	fmt.Fprintf(conn, "GET %s?model=m HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n%s\r\n", realtimeRoute, headers)
	text = bufio.NewReader(conn)
	if response, err = http.ReadResponse(text, nil); err != nil {
		t.Fatal(err)
	}
	return conn, text, response
}

// TestWebSocketsOfOtherPagesAreRefused: browsers hold them back by no rule of CORS.
func TestWebSocketsOfOtherPagesAreRefused(t *testing.T) {
	none := newTestAPI(t, setup{}, echo(t).URL)
	listed := newTestAPI(t, setup{CORSOrigins: []string{"https://chat.example.com"}}, echo(t).URL)
	all := newTestAPI(t, setup{CORSOrigins: []string{"*"}}, echo(t).URL)
	for _, test := range []struct {
		h       *testAPI
		headers string
		status  int
	}{
		{none, "", 101}, // no page
		{none, "Origin: http://127.0.0.1:8000\r\n", 101},
		{none, "Origin: http://127.0.0.1:9000\r\n", 403},
		{none, "Origin: http://evil.example\r\n", 403},
		{none, "Origin: null\r\n", 403},
		{none, "Origin: \r\n", 403},
		{listed, "Origin: https://chat.example.com\r\n", 101},
		{listed, "Origin: http://127.0.0.1:8000\r\n", 101},
		{listed, "Origin: https://chat.example.com.evil.example\r\n", 403},
		{listed, "Origin: https://chat.example.com\r\nOrigin: https://chat.example.com\r\n", 403},
		{all, "Origin: http://evil.example\r\n", 101},
	} {
		conn, _, response := upgrade(t, test.h, test.headers)
		if response.StatusCode != test.status {
			t.Errorf("%q: %s, want %d", test.headers, response.Status, test.status)
		}
		conn.Close()
		testkit.Eventually(t, 10*time.Second, "the booking has ended", func() bool { return test.h.router.Load(kv.WorkerKey{}).InFlight == 0 })
	}
}

// TestWebSocketsAreChargedToTheirKey: a connection ends, with the reason, once the key owes tokens,
// and no other is opened.
func TestWebSocketsAreChargedToTheirKey(t *testing.T) {
	const message = `{"type":"transcription.done","usage":{"prompt_tokens":400,"completion_tokens":1}}`
	goOn := make(chan bool)
	m := newMeteredAPI(t, kv.EngineVLLM, false, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Sec-WebSocket-Extensions") != "" {
			t.Error("the worker may compress what is to be read")
		}
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		for range 2 {
			conn.Write(append([]byte{0x81, byte(len(message))}, message...))
			<-goOn
		}
		io.Copy(io.Discard, conn)
	})
	_, text, response := upgrade(t, m.testAPI, "Authorization: Bearer k\r\nSec-WebSocket-Extensions: permessage-deflate\r\n")
	if response.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(response.Status)
	}
	frame := make([]byte, 2+len(message))
	for range 2 {
		if _, err := io.ReadFull(text, frame); err != nil {
			t.Fatal(err)
		}
		goOn <- true
	}
	if end, err := io.ReadAll(text); err != nil || len(end) < 4 || end[0] != 0x88 || !strings.Contains(string(end), "rate limit of this key") {
		t.Errorf("the connection ends with %q, %v", end, err)
	}
	testkit.Eventually(t, 10*time.Second, "the booking has ended", func() bool { return m.router.Load(kv.WorkerKey{}).InFlight == 0 })
	if _, _, response := upgrade(t, m.testAPI, "Authorization: Bearer k\r\n"); response.StatusCode != http.StatusTooManyRequests || response.Header.Get("Retry-After") == "" {
		t.Errorf("a key in debt: %s %v", response.Status, response.Header)
	}
}
