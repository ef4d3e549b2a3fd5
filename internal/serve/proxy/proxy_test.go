package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// TestUnusedConnectionsAreClosedBeforeTheWorkerDoes holds the wait of uvicorn,
// vLLM's HTTP server, against ours.
func TestUnusedConnectionsAreClosedBeforeTheWorkerDoes(t *testing.T) {
	const uvicornWaits = 5 * time.Second
	synctest.Test(t, func(t *testing.T) {
		transport := web.NewTransport(nil)
		proxy := New(Settings{}, Deps{Transport: transport})
		dialed := 0
		unused := make(chan time.Duration, 2) // how long before a connection was closed
		transport.DialContext = func(context.Context, string, string) (net.Conn, error) {
			dialed++
			ours, theirs := net.Pipe()
			go func() { // ends when ours is closed
				answered := time.Now()
				for requests := bufio.NewReader(theirs); ; answered = time.Now() {
					if _, err := http.ReadRequest(requests); err != nil {
						unused <- time.Since(answered)
						return
					}
					io.WriteString(theirs, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
				}
			}()
			return ours, nil
		}
		for range 3 {
			if _, _, err := proxy.Ask(t.Context(), kv.Target{URL: "http://worker"}, http.MethodGet, "/health", nil, nil); err != nil {
				t.Fatal(err)
			}
			synctest.Wait() // the connection is back in the pool
		}
		if dialed != 1 {
			t.Errorf("%d connections for three requests in turn", dialed)
		}
		if waited := <-unused; waited < time.Second || waited >= uvicornWaits {
			t.Errorf("an unused connection was kept for %s, want less than the worker's %s", waited, uvicornWaits)
		}
	})
}

// TestNoDelayOnBothSides: a chunk must not wait for the acknowledgement of the
// one before.
func TestNoDelayOnBothSides(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	accepted := make(chan net.Conn, 1)
	go func() { // ends with the listener
		if conn, err := listener.Accept(); err == nil {
			accepted <- conn
		}
	}()
	dial := web.NewTransport(nil).DialContext
	toWorker, err := dial(t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	fromClient := <-accepted
	for side, conn := range map[string]net.Conn{"to the worker": toWorker, "from the client": fromClient} {
		defer conn.Close()
		raw, err := conn.(syscall.Conn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		raw.Control(func(fd uintptr) {
			if on, err := syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_NODELAY); err != nil || on == 0 {
				t.Errorf("the connection %s has TCP_NODELAY %d, %v", side, on, err)
			}
		})
	}
}

func TestOutputBlocksAreBookedAsAStreamGrows(t *testing.T) {
	proceed := make(chan struct{})
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for range 3 {
			for range testkit.BlockSize {
				fmt.Fprintf(w, "data: %s\n\n", testkit.TokenEvent)
			}
			w.(http.Flusher).Flush()
			<-proceed
		}
	})
	for _, tracked := range []bool{true, false} {
		rt, _ := routertest.NewClocked(t, 0)
		rt.Up(kv.Target{Key: kv.WorkerKey{}, URL: worker.URL})
		proxy := New(Settings{RequestTimeout: time.Minute, OutputBlocks: tracked}, Deps{Observer: testkit.SilentObserver{}})
		done := make(chan error, 1)
		go func() {
			u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Header: http.Header{web.HeaderRequest: {"r"}}}
			done <- proxy.Forward(t.Context(), httptest.NewRecorder(), u, &Exchange{}, chooseOne(func([]uint64) (router.Decision, error) {
				return rt.Route(t.Context(), router.Request{Tokens: testkit.Tokens(1, 2*testkit.BlockSize)})
			}))
		}()
		for i := range 3 {
			want := router.WorkerLoad{PotentialDecodeBlocks: 2, ActiveRequests: 1}
			if tracked {
				want.PotentialDecodeBlocks += i + 1
			}
			testkit.Eventually(t, 5*time.Second, fmt.Sprintf("%+v", want), func() bool { return rt.Loads()[0] == want })
			proceed <- struct{}{}
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		routertest.ExpectLoad(t, rt, 0, 0, 0)
		proxy.Close()
	}
}

func TestUsageSaysWhetherCachedTokensWereLeftOut(t *testing.T) {
	for _, test := range []struct {
		name, answer string
		want         Usage
	}{
		{"told", `{"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}`, Usage{Known: true, PromptTokens: 9, OutputTokens: 2, CachedKnown: true, CachedTokens: 4}},
		{"told none", `{"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0}}}`, Usage{Known: true, PromptTokens: 9, OutputTokens: 2, CachedKnown: true}},
		{"told by tier", `{"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}},"sglext":{"cached_tokens_details":{"device":1,"host":3}}}`, Usage{Known: true, PromptTokens: 9, OutputTokens: 2, CachedKnown: true, CachedTokens: 4, CachedByTier: kv.TierTokens{Device: 1, Host: 3}}},
		{"null", `{"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":null}}`, Usage{Known: true, PromptTokens: 9, OutputTokens: 2, CachedUntold: true}},
		{"left out", `{"usage":{"prompt_tokens":9,"completion_tokens":2}}`, Usage{Known: true, PromptTokens: 9, OutputTokens: 2, CachedUntold: true}},
		{"null inside", `{"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":null}}}`, Usage{Known: true, PromptTokens: 9, OutputTokens: 2, CachedUntold: true}},
		{"responses", `{"response":{"usage":{"input_tokens":9,"output_tokens":2,"input_tokens_details":{"cached_tokens":4}}}}`, Usage{Known: true, PromptTokens: 9, OutputTokens: 2, CachedKnown: true, CachedTokens: 4}},
		{"embeddings generate nothing", `{"usage":{"prompt_tokens":9,"completion_tokens":0,"prompt_tokens_details":null}}`, Usage{Known: true, PromptTokens: 9}},
		{"messages have no place for them", `{"usage":{"input_tokens":9,"output_tokens":2}}`, Usage{Known: true, PromptTokens: 9, OutputTokens: 2}},
		{"nothing", `{"usage":null}`, Usage{}},
	} {
		if got := ReadUsage([]byte(test.answer)); got != test.want {
			t.Errorf("%s: %+v, want %+v", test.name, got, test.want)
		}
	}
}
