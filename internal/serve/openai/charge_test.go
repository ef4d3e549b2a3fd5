package openai

import (
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
	"pgregory.net/rapid"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

// tokenLimit is the limit of a meteredAPI's key, tokens a minute.
const tokenLimit = 600

// meteredAPI is a port with one key and one worker. The worker tokenizes a text into one
// token a byte and answers everything else with serve.
type meteredAPI struct {
	*testAPI
	byGateway bool // requests come from a gateway
	worker    string
}

func newMeteredAPI(t *testing.T, engine kv.Engine, byGateway bool, serve http.HandlerFunc) *meteredAPI {
	t.Helper()
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/render") && r.Header.Get("X-Request-Id") == "" {
			http.NotFound(w, r)
			return
		}
		if r.URL.Path != "/tokenize" {
			serve(w, r)
			return
		}
		body, _ := io.ReadAll(r.Body)
		text := gjson.GetBytes(body, "prompt").Str
		for _, m := range gjson.GetBytes(body, "messages").Array() {
			text += m.Get("content").Str
		}
		if strings.Contains(string(body), "?") {
			http.Error(w, `{"error":"no"}`, http.StatusInternalServerError)
			return
		}
		io.WriteString(w, `{"tokens":[`+strings.TrimSuffix(strings.Repeat("1,", len(text)), ",")+`]}`)
	}))
	t.Cleanup(worker.Close)
	flag := strings.TrimPrefix(keysFile(t, fmt.Sprintf("- {name: a, key: k, limits: {prompt-tokens-per-minute: %d}}", tokenLimit)), "--api-keys-file=")
	told := true
	target := kv.Target{Key: kv.WorkerKey{Worker: 0}, URL: worker.URL, Models: []string{"m"}, Engine: engine, Generation: 1}
	return &meteredAPI{newTestAPIOf(t, setup{Keys: keys.Settings{APIKeysFile: flag, DecisionHeaders: &told}, CollectUsage: true}, nil, target), byGateway, worker.URL}
}

// serve sends a request with the key.
func (m *meteredAPI) serve(method, path, body string) *http.Response {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Header.Set("Authorization", "Bearer k")
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	if !m.byGateway || method == http.MethodGet {
		m.api.ServeHTTP(w, r)
		return w.Result()
	}
	m.api.ServeGateway(w, r, &proxy.Gateway{Send: func(routed proxy.Routed) (*http.Response, string, error) {
		answer, err := http.DefaultTransport.RoundTrip(routed.Request)
		return answer, "", err
	}})
	return w.Result()
}

// used returns the tokens that the key has used of its limit; a debt is part of it.
func (m *meteredAPI) used(t *testing.T) int {
	t.Helper()
	left, err := strconv.Atoi(m.serve(http.MethodGet, "/v1/models", "").Header.Get("X-Ratelimit-Remaining-Tokens"))
	if err != nil {
		t.Fatal(err)
	}
	if left > 0 {
		return tokenLimit - left
	}
	refused := m.serve(http.MethodPost, "/v1/embeddings", `{"input":[]}`)
	wait, _ := strconv.Atoi(refused.Header.Get("Retry-After"))
	if refused.StatusCode != http.StatusTooManyRequests {
		t.Errorf("let in with nothing left: %d", refused.StatusCode)
	}
	return tokenLimit + wait*tokenLimit/60
}

// repeated is a JSON list of n times a value.
func repeated(value string, n int) string {
	return "[" + strings.TrimSuffix(strings.Repeat(value+",", n), ",") + "]"
}

// TestChargeIsWhatIsComputed: the sum of all prompts is charged before a request is sent,
// and what the worker reports after it, on every route and in every shape of a body.
func TestChargeIsWhatIsComputed(t *testing.T) {
	hundred := `"` + strings.Repeat("x", 100) + `"`
	ids := repeated("7", 100)
	usage := func(prompt int) string {
		return fmt.Sprintf(`{"usage":{"prompt_tokens":%d,"completion_tokens":1}}`, prompt)
	}
	input := func(prompt int) string {
		return fmt.Sprintf(`{"usage":{"input_tokens":%d,"output_tokens":1}}`, prompt)
	}
	generated := func(prompt, answers int) string {
		return repeated(fmt.Sprintf(`{"text":"","meta_info":{"prompt_tokens":%d,"completion_tokens":1,"finish_reason":{"type":"stop"}}}`, prompt), answers)
	}
	chat := `{"messages":[{"role":"user","content":` + hundred + `}]`
	const refused = 0
	for _, test := range []struct {
		name, route, body string
		before            int    // charged when the worker gets it; refused: it never does
		answer            string // the worker's
		after             int    // charged at the end
		sglang            bool
	}{
		{name: "chat", route: testkit.ChatPath, body: chat + `}`, before: 100, answer: usage(100), after: 100},
		{name: "chat, n", route: testkit.ChatPath, body: chat + `,"n":3}`, before: 300, answer: usage(100), after: 300},
		{name: "chat, n beyond the limit", route: testkit.ChatPath, body: chat + `,"n":7}`, before: refused},
		{name: "chat, endless n", route: testkit.ChatPath, body: chat + `,"n":1e300}`, before: refused},
		{name: "chat, n as a text", route: testkit.ChatPath, body: chat + `,"n":"7"}`, before: refused},
		{name: "chat, negative n", route: testkit.ChatPath, body: chat + `,"n":-7}`, before: 100, answer: usage(100), after: 100},
		{name: "chat, unknown prompt", route: testkit.ChatPath, body: `{"messages":[{"content":"` + strings.Repeat("?", 360) + `"}]}`, before: 90, answer: usage(350), after: 350},
		{name: "chat, with a picture", route: testkit.ChatPath, body: `{"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:` + strings.Repeat("A", 5000) + `"}},{"text":"` + strings.Repeat("?", 360) + `"}]}]}`, before: 100, answer: usage(900), after: 900},
		{name: "chat, unknown prompt beside what other routes read", route: testkit.ChatPath, body: `{"query":"","documents":[],"messages":[{"content":"` + strings.Repeat("?", 360) + `"}]}`, before: 90, answer: usage(350), after: 350},
		{name: "chat, as a stream", route: testkit.ChatPath, body: chat + `,"stream":true}`, before: 100, answer: "data: " + usage(130) + "\n\ndata: [DONE]\n\n", after: 130},
		{name: "chat, a report of nothing", route: testkit.ChatPath, body: chat + `}`, before: 100, answer: usage(-5), after: 100},
		{name: "completion", route: completionsPath, body: `{"prompt":` + hundred + `}`, before: 100, answer: usage(100), after: 100},
		{name: "completion, texts", route: completionsPath, body: `{"prompt":` + repeated(hundred, 5) + `}`, before: 500, answer: usage(500), after: 500},
		{name: "completion, more texts", route: completionsPath, body: `{"prompt":` + repeated(hundred, 7) + `}`, before: refused},
		{name: "completion, ids", route: completionsPath, body: `{"prompt":` + ids + `}`, before: 100, answer: usage(100), after: 100},
		{name: "completion, lists of ids", route: completionsPath, body: `{"prompt":` + repeated(ids, 4) + `}`, before: 400, answer: usage(400), after: 400},
		{name: "completion, more lists of ids", route: completionsPath, body: `{"prompt":` + repeated(ids, 7) + `}`, before: refused},
		{name: "completion, n of several", route: completionsPath, body: `{"prompt":` + repeated(ids, 2) + `,"n":2}`, before: 400, answer: usage(200), after: 400},
		{name: "completion, best_of", route: completionsPath, body: `{"prompt":` + hundred + `,"n":1,"best_of":4}`, before: 400, answer: usage(100), after: 400},
		{name: "completion, too many texts to ask for", route: completionsPath, body: `{"prompt":` + repeated(`"`+strings.Repeat("x", 12)+`"`, 100) + `}`, before: 300, answer: usage(1200), after: 1200},
		{name: "responses", route: "/v1/responses", body: `{"input":"` + strings.Repeat("x", 400) + `","instructions":"` + strings.Repeat("x", 40) + `"}`, before: 110, answer: input(200), after: 200},
		{name: "responses in the background", route: "/v1/responses", body: `{"input":"` + strings.Repeat("x", 400) + `","background":true}`, before: 100, answer: `{"status":"queued","usage":null}`, after: 100},
		{name: "messages", route: "/v1/messages", body: `{"system":"` + strings.Repeat("x", 40) + `","messages":[{"role":"user","content":"` + strings.Repeat("x", 344) + `"}]}`, before: 97, answer: `{"usage":{"input_tokens":50,"cache_read_input_tokens":150,"output_tokens":1}}`, after: 200},
		{name: "tokens of a message", route: "/v1/messages/count_tokens", body: `{"messages":[{"role":"user","content":"` + strings.Repeat("x", 3440) + `"}]}`, before: 0, answer: `{"input_tokens":860}`, after: 0},
		{name: "embeddings", route: "/v1/embeddings", body: `{"input":"` + strings.Repeat("x", 400) + `"}`, before: 100, answer: usage(130), after: 130},
		{name: "embeddings of a list", route: "/v1/embeddings", body: `{"input":` + repeated(hundred, 20) + `}`, before: 500, answer: usage(300), after: 300},
		{name: "embeddings of ids", route: "/v1/embeddings", body: `{"input":` + repeated(ids, 3) + `}`, before: 300, answer: usage(300), after: 300},
		{name: "embeddings, estimated beyond the limit", route: "/v1/embeddings", body: `{"input":` + repeated(hundred, 100) + `}`, before: 600, answer: usage(2400), after: 2400},
		{name: "embeddings, no usage", route: "/v1/embeddings", body: `{"input":"` + strings.Repeat("x", 400) + `"}`, before: 100, answer: `{}`, after: 100},
		{name: "Cohere's embeddings", route: "/v2/embed", body: `{"texts":` + repeated(hundred, 4) + `}`, before: 100, answer: `{}`, after: 100},
		{name: "pooling", route: "/pooling", body: `{"input":` + ids + `}`, before: 100, answer: usage(100), after: 100},
		{name: "classify", route: "/classify", body: `{"input":` + repeated(hundred, 4) + `}`, before: 100, answer: usage(120), after: 120},
		{name: "score", route: "/v1/score", body: `{"text_1":` + hundred + `,"text_2":` + repeated(hundred, 4) + `}`, before: 200, answer: usage(210), after: 210},
		{name: "score of pairs", route: "/score", body: `{"text_1":` + repeated(hundred, 4) + `,"text_2":` + repeated(hundred, 4) + `}`, before: 200, answer: usage(210), after: 210},
		{name: "rerank", route: "/v1/rerank", body: `{"query":` + hundred + `,"documents":` + repeated(hundred, 3) + `}`, before: 150, answer: usage(160), after: 160},
		{name: "ids of the engine's own route", route: "/inference/v1/generate", body: `{"token_ids":` + ids + `,"sampling_params":{"n":2}}`, before: 200, answer: `{"choices":[]}`, after: 200},
		{name: "generate", route: generateRoute, body: `{"text":` + hundred + `}`, before: 100, answer: generated(100, 1), after: 100, sglang: true},
		{name: "generate, texts", route: generateRoute, body: `{"text":` + repeated(hundred, 3) + `}`, before: 300, answer: generated(100, 3), after: 300, sglang: true},
		{name: "generate, more texts", route: generateRoute, body: `{"text":` + repeated(hundred, 7) + `}`, before: refused, sglang: true},
		{name: "generate, lists of ids", route: generateRoute, body: `{"input_ids":` + repeated(ids, 3) + `}`, before: 300, answer: generated(100, 3), after: 300, sglang: true},
		{name: "generate, n", route: generateRoute, body: `{"text":` + hundred + `,"sampling_params":{"n":4}}`, before: 400, answer: generated(100, 4), after: 400, sglang: true},
		{name: "generate, n of several", route: generateRoute, body: `{"text":` + repeated(hundred, 2) + `,"sampling_params":[{"n":2},{"n":2}]}`, before: 400, answer: generated(100, 4), after: 400, sglang: true},
		{name: "generate, n beyond the limit", route: generateRoute, body: `{"text":` + hundred + `,"sampling_params":{"n":7}}`, before: refused, sglang: true},
		{name: "SGLang's completion", route: completionsPath, body: `{"prompt":` + repeated(hundred, 2) + `,"n":2}`, before: 400, answer: usage(200), after: 400, sglang: true},
		{name: "SGLang's chat", route: testkit.ChatPath, body: chat + `,"n":2}`, before: 200, answer: usage(100), after: 200, sglang: true},
	} {
		for _, byGateway := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, gateway %v", test.name, byGateway), func(t *testing.T) {
				engine, reached, before := kv.EngineVLLM, false, 0
				if test.sglang {
					engine = kv.EngineSGLang
				}
				var m *meteredAPI
				m = newMeteredAPI(t, engine, byGateway, func(w http.ResponseWriter, r *http.Request) {
					if r.Method == http.MethodGet {
						return
					}
					if !reached { // not what used asks
						before = tokenLimit - remaining(m)
					}
					reached = true
					if strings.HasPrefix(test.answer, "data: ") {
						w.Header().Set("Content-Type", "text/event-stream")
					}
					io.WriteString(w, test.answer)
				})
				response := m.serve(http.MethodPost, test.route, test.body)
				want := http.StatusOK
				if test.answer == "" {
					want = http.StatusTooManyRequests
				}
				if text, _ := io.ReadAll(response.Body); response.StatusCode != want || reached != (want == http.StatusOK) {
					t.Fatalf("%d %.200s", response.StatusCode, text)
				}
				const slack = 45 // tokens that come back meanwhile: 4 s
				near := func(got, want int) bool { return got <= want+tokenLimit/60 && got >= min(want, max(0, want-slack)) }
				if !near(before, test.before) {
					t.Errorf("%d tokens were charged before, want %d", before, test.before)
				}
				if got := m.used(t); !near(got, test.after) {
					t.Errorf("%d tokens were charged after, want %d", got, test.after)
				}
			})
		}
	}
}

// remaining is the rest of the limit, at least 0.
func remaining(m *meteredAPI) int {
	left, _ := strconv.Atoi(m.serve(http.MethodGet, "/v1/models", "").Header.Get("X-Ratelimit-Remaining-Tokens"))
	return left
}

// TestRequestThatNoWorkerComputedIsNotCharged, however it ended.
func TestRequestThatNoWorkerComputedIsNotCharged(t *testing.T) {
	body := `{"prompt":` + repeated("7", 300) + `}`
	for _, test := range []struct {
		name   string
		serve  http.HandlerFunc
		down   bool // no worker is up
		dead   bool // the worker's port is closed
		status int
		after  int
	}{
		{name: "no worker", down: true, status: 503},
		{name: "no connection", dead: true, status: 502},
		{name: "refused by the worker", status: 400, serve: func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "{}", 400) }},
		{name: "failed by the worker", status: 500, after: 300, serve: func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "{}", 500) }},
		{name: "cut by the worker", status: 502, after: 300, serve: hangUp},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := newMeteredAPI(t, kv.EngineVLLM, false, test.serve)
			switch target := m.router.Targets()[0]; {
			case test.down:
				m.router.Down(target.Key)
			case test.dead:
				m.router.Down(target.Key)
				target.URL, target.Generation = deadURL(t), 2
				m.router.Up(target)
			}
			response := m.serve(http.MethodPost, completionsPath, body)
			if response.StatusCode != test.status {
				t.Errorf("%d, want %d", response.StatusCode, test.status)
			}
			if got := tokenLimit - remaining(m); got > test.after || got < test.after-45 {
				t.Errorf("%d tokens were charged, want %d", got, test.after)
			}
		})
	}
}

// TestLeavingEarlyIsNoRefund: of a stream with several answers, the usage so far is less
// than what was computed.
func TestLeavingEarlyIsNoRefund(t *testing.T) {
	left := make(chan struct{})
	m := newMeteredAPI(t, kv.EngineSGLang, false, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, `data: {"text":"a","meta_info":{"prompt_tokens":100,"completion_tokens":1},"index":0}`+"\n\n")
		http.NewResponseController(w).Flush()
		<-left
		<-r.Context().Done()
	})
	ctx, leave := context.WithCancel(t.Context())
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, m.URL+generateRoute, strings.NewReader(`{"stream":true,"text":`+repeated(`"`+strings.Repeat("x", 100)+`"`, 5)+`}`))
	request.Header.Set("Authorization", "Bearer k")
	response, err := m.Client().Do(request)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Read(make([]byte, 10))
	leave()
	response.Body.Close()
	close(left)
	testkit.Eventually(t, 10*time.Second, "the request ends", func() bool { return m.router.Load(kv.WorkerKey{}).InFlight == 0 })
	if got := m.used(t); got < 450 {
		t.Errorf("%d tokens were charged, want 500", got)
	}
}

func TestDryRunIsNotCharged(t *testing.T) {
	m := newMeteredAPI(t, kv.EngineVLLM, false, http.NotFound)
	response := m.serve(http.MethodPost, completionsPath, `{"prompt":`+repeated("7", 300)+`,"nvext":{"annotations":["query_instance_id"]}}`)
	if left := remaining(m); response.StatusCode != http.StatusOK || left != tokenLimit {
		t.Errorf("%d, %d are left", response.StatusCode, left)
	}
}

func TestEstimateCountsTextsAndIDs(t *testing.T) {
	for text, want := range map[string]int{
		``: 0, `null`: 0, `true`: 0, `""`: 0, `"a"`: 1, `"abcd"`: 1, `"abcde"`: 2, `7`: 1, `[1,-2.5e3,3]`: 3, `[[1,2],[3]]`: 3,
		`{"name":"abcd"}`: 1, `{"na\"me" : "abcd"}`: 1, `["a\"b\\","c"]`: 3, `"data:AAAAAAAA"`: 0, `{"a":{"b":["abcdefgh"]}}`: 2,
	} {
		if got := countIn(text); got != want {
			t.Errorf("%s: %d, want %d", text, got, want)
		}
	}
	deep := strings.Repeat("[", 1<<20) + `"abcd"` + strings.Repeat("]", 1<<20)
	if got := countIn(deep); got != 1 {
		t.Errorf("deep: %d", got)
	}
}

func FuzzEstimate(f *testing.F) {
	for _, seed := range []string{`{"input":["a"]}`, `{"query":"a","documents":["b","c"]}`, `{"text_1":["a"],"text_2":[1]}`, `{"input":"\u00e4\\`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		countIn(string(raw)) // of what is no JSON, too
		if body, ok := jsonbody.Parse(raw); ok {
			if got := estimate("/v1/rerank", body) + estimate("/v1/embeddings", body); got < 0 || got > 2*len(raw)*len(raw) {
				t.Errorf("%d of %q", got, raw)
			}
		}
	})
}

func TestAnswersAreBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Float64().Draw(t, "n")
		if math.IsInf(n, 0) || math.IsNaN(n) {
			t.Skip()
		}
		body, ok := jsonbody.Parse(fmt.Appendf(nil, `{"n":%g,"sampling_params":{"n":%g}}`, n, n))
		if !ok {
			t.Skip()
		}
		for _, path := range []string{testkit.ChatPath, generateRoute} {
			if got := proxy.Answers(path, body); got < 1 || got > 1<<16 || n >= 1 && n < 1<<16 && n == math.Trunc(n) && got != int(n) {
				t.Fatalf("%s: %d of %g", path, got, n)
			}
		}
	})
}
