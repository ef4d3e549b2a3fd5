package main

import (
	"io"
	"kvrouter/internal/kv"
	"kvrouter/internal/router"
	"net/http"
	"strings"
	"testing"
	"time"
)

// occupy gives a worker so many prompt tokens to compute.
func occupy(t testing.TB, r *router.Router, w uint64, tokens int) *router.Booking {
	t.Helper()
	b, err := r.Book(router.Request{NumTokens: tokens}, kv.WorkerKey{Worker: w})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestQueueErrorsReachTheClient(t *testing.T) {
	h := newTestAPI(t, Config{}, "http://127.0.0.1:1")
	threshold := 0.5
	h.router.Knobs.QueueSettings = router.QueueSettings{RouterQueueThreshold: &threshold, RouterQueueTimeout: time.Millisecond, RouterQueueLimit: 1}
	h.router.Up(kv.Target{Key: kv.WorkerKey{}, URL: "http://127.0.0.1:1", Models: []string{"m"}, MaxBatchedTokens: 16})
	full := occupy(t, h.router, 0, 9)
	defer full.End()
	for _, test := range []struct{ limit, status int }{{1, 503}, {0, 529}} {
		h.router.Knobs.RouterQueueLimit = test.limit
		response, err := http.Post(h.URL+"/v1/embeddings", "application/json", strings.NewReader(`{"model":"m","input":"x"}`))
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != test.status || response.Header.Get("Retry-After") == "" || !strings.Contains(string(body), `"service_unavailable"`) {
			t.Errorf("a queue of at most %d: %d, Retry-After %q, %s; want %d and a time", test.limit, response.StatusCode, response.Header.Get("Retry-After"), body, test.status)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}
