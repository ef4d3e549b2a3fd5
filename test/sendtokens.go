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
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

// tokenPairs are members of requests with a long prompt, by route, that must have the same
// answer whether the worker gets the text of the prompt or its tokens.
var tokenPairs = []struct{ path, members string }{
	{testkit.ChatPath, `"temperature":0`},
	{testkit.ChatPath, `"temperature":0.9,"seed":5,"top_p":0.9`},
	{testkit.ChatPath, `"temperature":0,"logprobs":true,"top_logprobs":2`},
	{testkit.ChatPath, `"temperature":0,"stop":["e"]`},
	{testkit.ChatPath,
		`"temperature":0,"tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}],"tool_choice":"none"`},
	{testkit.ChatPath,
		`"temperature":0,"tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}]`},
	{testkit.ChatPath,
		`"temperature":0,"tools":[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}],"tool_choice":{"type":"function","function":{"name":"get_weather"}}`},
	{testkit.ChatPath,
		`"temperature":0,"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}}}`},
	{testkit.ChatPath, `"temperature":0,"max_completion_tokens":3`},
	{testkit.ChatPath, `"temperature":-1`},
	{testkit.ChatPath, `"temperature":0,"max_tokens":1000000`},
	{"/v1/completions", `"temperature":0`},
	{"/v1/completions", `"temperature":0,"logprobs":2`},
	{"/v1/completions", `"temperature":0,"stop":["e"]`},
	{"/v1/completions", `"temperature":0,"presence_penalty":1.5,"repetition_penalty":1.3`},
	{"/v1/completions", `"temperature":-1`},
}

// CompareTokens sends requests to a real worker by routers with and without --send-tokens
// and compares the answers: streamed and whole. seeds means that the worker answers a seed
// alike each time. args are flags of both routers.
func CompareTokens(t *testing.T, worker string, seeds bool, args ...string) {
	r := RecordTokens(t, worker)
	attach := append([]string{"--engine=none", "--model=" + ModelFolder(), "--worker=url=" + r.URL, "--no-kv-events"}, args...)
	auto, never := Start(t, attach...), Start(t, append(attach, "--send-tokens=never")...)
	auto.WaitReady(1, time.Minute)
	never.WaitReady(1, time.Minute)
	testkit.Eventually(t, time.Minute, "the worker shows that it takes tokens", func() bool {
		return slices.Equal(auto.Workers()[0].TakesTokens, []string{testkit.ChatPath, "/v1/completions"})
	})
	long := strings.Repeat("The capital of France is a city on a river. ", 110)
	sent := 0
	for _, c := range tokenPairs {
		if !seeds && strings.Contains(c.members, `"seed"`) {
			continue
		}
		prompt := `"prompt":` + proxy.Quoted(long+"It is called")
		if c.path == testkit.ChatPath {
			prompt = `"messages":[{"role":"system","content":` + proxy.Quoted(long) + `},{"role":"user","content":"What is the capital of France?"}]`
		}
		if !strings.Contains(c.members, "max_") {
			prompt += `,"max_tokens":12`
		}
		for _, stream := range []string{"", `,"stream":true,"stream_options":{"include_usage":true}`} {
			body := "{" + prompt + "," + c.members + stream + "}"
			Post(t, never.OpenAI+c.path, body) // so that both find the prompt cached
			plainStatus, plain := Post(t, never.OpenAI+c.path, body)
			before := len(r.Sent())
			status, answer := Post(t, auto.OpenAI+c.path, body)
			got, want := alike(answer), alike(plain)
			if tokens := r.Sent()[before:]; len(tokens) > 0 {
				sent++
			} else if !strings.Contains(c.members, "1000000") {
				t.Errorf("%s %s%s: no tokens were sent", c.path, c.members, stream)
			}
			if status != plainStatus || got != want {
				t.Errorf("%s %s%s: with tokens %d\n%s\nwithout %d\n%s", c.path, c.members, stream, status, got, plainStatus, want)
			}
		}
	}
	t.Logf("%d pairs with tokens", sent)
}

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
				for _, each := range choice.Get("logprobs." + one).Array() { // a busy engine puts several into an event
					joined[one] += each.Raw + " "
				}
			}
		}
		for _, key := range []string{"error", "usage.prompt_tokens", "usage.completion_tokens"} {
			rest += v.Get(key).Raw + " "
		}
	}
	return fmt.Sprint(joined, strings.Fields(rest))
}
