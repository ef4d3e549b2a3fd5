package main

import (
	"io"
	"kvrouter/internal/kv"
	"kvrouter/internal/router"
	"net/http"
	"strings"
	"testing"
)

// overload gives a worker's rank more than the threshold of newBusyRouter.
func overload(t *testing.T, r *router.Router, w kv.WorkerKey) *router.Booking {
	t.Helper()
	b, err := r.Book(router.Request{NumTokens: 11}, w)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestBusyThresholdEndpoint(t *testing.T) {
	h := newTestAPI(t, Config{}, "http://127.0.0.1:1")
	for _, step := range []struct {
		method, body string
		status       int
		answer       string
	}{
		{"GET", "", 200, `{"thresholds":[]}`},
		{"POST", `{"model":"m"}`, 200, `{"model":"m","active_decode_blocks_threshold":null,"active_prefill_tokens_threshold":null,"active_prefill_tokens_threshold_frac":null}`},
		{"POST", `{"model":"m","active_prefill_tokens_threshold":0}`, 200, `{"model":"m","active_decode_blocks_threshold":null,"active_prefill_tokens_threshold":0,"active_prefill_tokens_threshold_frac":null}`},
		{"POST", `{"model":"m","active_decode_blocks_threshold":0.85}`, 200, `{"model":"m","active_decode_blocks_threshold":0.85,"active_prefill_tokens_threshold":0,"active_prefill_tokens_threshold_frac":null}`},
		{"GET", "", 200, `{"thresholds":[{"model":"m","active_decode_blocks_threshold":0.85,"active_prefill_tokens_threshold":0,"active_prefill_tokens_threshold_frac":null}]}`},
		{"POST", `{"model":"other","active_decode_blocks_threshold":0.5}`, 404, ""},
		{"POST", `{"active_decode_blocks_threshold":0.5}`, 404, ""},
		{"POST", `{"model":"m","active_decode_blocks_threshold":1.5}`, 400, ""},
		{"POST", `{`, 400, ""},
	} {
		request, _ := http.NewRequest(step.method, h.URL+"/busy_threshold", strings.NewReader(step.body))
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != step.status || step.answer != "" && string(body) != step.answer {
			t.Errorf("%s %s: %d %s, want %d %s", step.method, step.body, response.StatusCode, body, step.status, step.answer)
		}
	}
	booking := overload(t, h.router, kv.WorkerKey{})
	response, err := http.Post(h.URL+"/v1/embeddings", "application/json", strings.NewReader(`{"model":"m","input":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" {
		t.Errorf("all busy: %d, Retry-After %q; want 503 and a time", response.StatusCode, response.Header.Get("Retry-After"))
	}
	booking.End()
	http.DefaultClient.CloseIdleConnections()
}
