package main

import (
	"io"
	"kvrouter/internal/testkit"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// TestCachedTokensThatSayNothingOfTheCacheAreLeftOut is about requests for which
// which an engine computes a prompt anew.
func TestCachedTokensThatSayNothingOfTheCacheAreLeftOut(t *testing.T) {
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"usage":{"prompt_tokens":3,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}`)
	}))
	defer worker.Close()
	for _, test := range []struct {
		fields string
		heard  bool
	}{
		{`"prompt":[1,2,3]`, true},
		{`"prompt":[1,2,3],"prompt_logprobs":null,"logprobs":1`, true},
		{`"prompt":[1,2,3],"prompt_logprobs":0`, false},
		{`"prompt":[1,2,3],"echo":true,"logprobs":1`, false},
		{`"prompt":[1,2,3],"echo":true`, true},
	} {
		h := newTestAPI(t, Config{}, worker.URL)
		if response, answer := h.post(t, "/v1/completions", "{"+test.fields+"}"); response.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", response.Status, answer)
		}
		testkit.Eventually(t, 10*time.Second, "the booking has ended", func() bool { return h.router.Load(testkit.W0).InFlight == 0 })
		if heard := h.router.TellsCached(testkit.W0); heard != test.heard {
			t.Errorf("%s: heard of cached tokens %v, want %v", test.fields, heard, test.heard)
		}
	}
}
