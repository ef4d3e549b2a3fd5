package main

import (
	"fmt"
	"kvrouter/internal/hints"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
	"net/http"
	"testing"
)

func TestPrefixHintsReachThePolicy(t *testing.T) {
	worker := newFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	h := newTestAPI(t, Config{}, worker.URL)
	policy := new(routertest.Clerk)
	h.router.Policy = policy
	body := `{"prompt":"p","messages":[],"nvext":{"agent_hints":{"prefix_id":"s","osl":2000},"annotations":["iat:LOW"]}}`
	for _, path := range []string{testkit.ChatPath, completionsPath, "/v1/responses", "/v1/messages", "/v1/embeddings"} {
		if response, answer := h.post(t, path, body, "x-prefix-total-requests", "4"); response.StatusCode != 200 {
			t.Fatalf("%s: %s", path, answer)
		}
		queries := policy.Queries()
		if got, want := queries[len(queries)-1].Prefix, (hints.Prefix{ID: "s", Total: 4, OSL: hints.LevelHigh, IAT: hints.LevelLow}); got != want {
			t.Errorf("%s: the policy saw %+v, want %+v", path, got, want)
		}
	}
	for _, got := range worker.Received() {
		if got != body {
			t.Errorf("the worker got %s", got)
		}
	}
}
