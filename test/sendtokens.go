package test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"
)

// TokenRecorder is a server in front of a worker that counts the requests which have their
// prompt as tokens.
type TokenRecorder struct {
	URL string

	mu     sync.Mutex // guards tokens
	tokens []int      // of the prompts of requests with them
}

// Sent returns the numbers of tokens of such requests.
func (r *TokenRecorder) Sent() []int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.tokens)
}

// forget forgets the requests so far.
func (r *TokenRecorder) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tokens = nil
}

// RecordTokens starts a TokenRecorder.
func RecordTokens(t testing.TB, worker string) *TokenRecorder {
	target, err := url.Parse(worker)
	if err != nil {
		t.Fatal(err)
	}
	r := &TokenRecorder{}
	between := httputil.NewSingleHostReverseProxy(target)
	between.FlushInterval = -1
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		body, _ := io.ReadAll(request.Body)
		request.Body = io.NopCloser(strings.NewReader(string(body)))
		for _, path := range []string{"kv_transfer_params.prompt_token_ids", "input_ids", "prompt"} {
			if ids := gjson.GetBytes(body, path); ids.IsArray() {
				r.mu.Lock()
				r.tokens = append(r.tokens, len(ids.Array()))
				r.mu.Unlock()
			}
		}
		between.ServeHTTP(w, request)
	}))
	t.Cleanup(server.Close)
	r.URL = server.URL
	return r
}

// alike returns an answer without what differs between any two: names, times, what was cached,
// and where a stream is cut into events.
func alike(answer []byte) string {
	joined, rest := map[string]string{}, ""
	for line := range strings.Lines(string(answer)) {
		v := gjson.Parse(strings.TrimPrefix(strings.TrimSpace(line), "data: "))
		for _, choice := range v.Get("choices").Array() {
			message := choice.Get("delta")
			if !message.Exists() {
				message = choice.Get("message")
			}
			for _, key := range []string{"role", "content", "reasoning", "reasoning_content", "refusal"} {
				joined[key] += message.Get(key).Str
			}
			for _, call := range message.Get("tool_calls").Array() {
				joined["calls"] += call.Get("function.name").Str + call.Get("function.arguments").Str
			}
			joined["text"] += choice.Get("text").Str
			joined["reason"] += choice.Get("finish_reason").Str + choice.Get("stop_reason").String() + choice.Get("matched_stop").String()
			for _, one := range choice.Get("logprobs.content").Array() {
				joined["logprobs"] += one.Raw
			}
			for _, one := range []string{"tokens", "token_logprobs", "top_logprobs", "text_offset"} {
				joined[one] += strings.Trim(choice.Get("logprobs."+one).Raw, "[]")
			}
		}
		for _, key := range []string{"error", "usage.prompt_tokens", "usage.completion_tokens"} {
			rest += v.Get(key).Raw + " "
		}
	}
	return fmt.Sprint(joined, strings.Fields(rest))
}
