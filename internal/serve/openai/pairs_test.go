package openai

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/nativetest"
	"kvrouter/internal/testkit/routertest"
	"kvrouter/internal/tools/mocker"
)

// builtinModel opens the built-in model once for all tests: it is the dearest part of a
// fixture.
var builtinModel = sync.OnceValues(mocker.OpenBuiltinModel)

// pairAPI is a router over prefill workers 0, 1, ... and decode workers 10, 11, ..., of one kind.
// How legs are sent to them is tested in proxy.
type pairAPI struct {
	*testAPI
	prefill, decode []*testkit.FakeWorker
}

// newTestPairAPI starts the router and its workers. broken prefill workers, the first ones,
// answer nothing but 500.
func newTestPairAPI(t testing.TB, config setup, kind kv.Kind, prefills, decodes, broken int) *pairAPI {
	t.Helper()
	nativetest.Library(t)
	model, err := builtinModel()
	if err != nil {
		t.Fatal(err)
	}
	config.Proxy.DisaggPrefillTimeout, config.Proxy.DisaggHandoverTimeout = time.Minute, time.Minute
	h := &pairAPI{}
	asked := make(chan struct{}, 100) // has a token for each prompt that a prefill worker has got
	var targets []kv.Target
	add := func(workers *[]*testkit.FakeWorker, id int, d kv.Disagg, serve http.HandlerFunc) {
		worker := testkit.NewFakeWorker(t, serve)
		*workers = append(*workers, worker)
		targets = append(targets, kv.Target{Key: kv.WorkerKey{Worker: uint64(id)}, URL: worker.URL, Ranks: 1, Generation: 1, Models: []string{"m"}, Disagg: d})
	}
	for i := range prefills {
		add(&h.prefill, i, kv.Disagg{Role: kv.RolePrefill, Kind: kind, Bootstrap: kv.Bootstrap{Host: "h", Port: 1}}, func(w http.ResponseWriter, _ *http.Request) {
			asked <- struct{}{}
			if i < broken {
				w.WriteHeader(http.StatusInternalServerError)
			}
			io.WriteString(w, `{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true},"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}`)
		})
	}
	for i := range decodes {
		add(&h.decode, 10+i, kv.Disagg{Role: kv.RoleDecode, Kind: kind}, func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			if gjson.GetBytes(body, "bootstrap_room").Exists() { // SGLang's wait for the other leg
				select {
				case <-asked:
				case <-r.Context().Done():
					return
				}
			}
			if gjson.GetBytes(body, "stream").Bool() {
				testkit.StreamOf(testkit.TokenEvent, usageEvent, "[DONE]")(w, r)
				return
			}
			io.WriteString(w, `{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}]}`)
		})
	}
	h.testAPI = newTestAPIWith(t, routertest.New(t, "round-robin", 0), config, model, targets...)
	return h
}

// sharedChat is a request whose prompt is long enough to be shared.
func sharedChat(stream bool, more ...jsonbody.Field) string {
	messages, _ := json.Marshal([]map[string]any{{"role": "user", "content": strings.Repeat("Why is the sky blue? ", 30)}})
	fields := append([]jsonbody.Field{{Key: "model", Raw: `"m"`}, {Key: "stream", Raw: strconv.FormatBool(stream)}, {Key: "messages", Raw: string(messages)}}, more...)
	return string(jsonbody.AppendObject(nil, fields))
}

func TestBothLegsServeARequest(t *testing.T) {
	h := newTestPairAPI(t, setup{CollectUsage: true}, kv.KindNIXL, 1, 1, 0)
	response, answer := h.post(t, testkit.ChatPath, sharedChat(true), web.HeaderRequest, "my-id")
	if response.StatusCode != http.StatusOK || !strings.Contains(answer, testkit.TokenEvent) || strings.Contains(answer, "usage") {
		t.Fatalf("%s: %s", response.Status, answer)
	}
	for _, header := range []http.Header{response.Header, h.prefill[0].Header, h.decode[0].Header} {
		if id := header.Get(web.HeaderRequest); id != "my-id" {
			t.Errorf("request id %q", id)
		}
	}
	if header := response.Header; header.Get(web.HeaderWorker) != "10" || header.Get(proxy.HeaderPrefillWorker) != "0" {
		t.Errorf("headers %v", header)
	}
	h.counts(t, testkit.MetricsLines{
		`kvrouter_disagg_requests_total{kind="nixl",result="ok"}`:                           1,
		`kvrouter_requests_total{route="/v1/chat/completions",status="200",worker_id="10"}`: 1,
		`kvrouter_cached_tokens_reported_total{worker_id="0"}`:                              4,
		`kvrouter_disagg_prefill_seconds_count{kind="nixl"}`:                                1,
		`kvrouter_disagg_handover_seconds_count{kind="nixl"}`:                               1,
		`kvrouter_disagg_transfer_seconds_count{kind="nixl"}`:                               1,
	})
}

// TestFailedPrefillLegsAreCounted: the decode worker computes the prompt.
func TestFailedPrefillLegsAreCounted(t *testing.T) {
	h := newTestPairAPI(t, setup{}, kv.KindNIXL, 1, 1, 1)
	if response, answer := h.post(t, testkit.ChatPath, sharedChat(false)); response.StatusCode != http.StatusOK {
		t.Errorf("%s: %s", response.Status, answer)
	}
	h.counts(t, testkit.MetricsLines{
		`kvrouter_disagg_requests_total{kind="nixl",result="prefill_failed"}`: 1,
		`kvrouter_disagg_requests_total{kind="none",result="prefill"}`:        1,
		`kvrouter_retries_total{worker_id="0"}`:                               1,
	})
}

// TestWhatStaysWhole by what the port knows of a request; proxy.WhyWhole has the other reasons.
func TestWhatStaysWhole(t *testing.T) {
	for _, test := range []struct{ name, path, body, why string }{
		{"a long prompt", testkit.ChatPath, sharedChat(false), ""},
		{"a short prompt", testkit.ChatPath, `{"model":"m","messages":[{"role":"user","content":"Hi"}]}`, router.WholeShort},
		{"several prompts", "/v1/completions", fmt.Sprintf(`{"prompt":[%[1]q,%[1]q]}`, strings.Repeat("a", 400)), "answers"},
		{"a leg already", testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "kv_transfer_params", Raw: `{"do_remote_prefill":true}`}), "own"},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newTestPairAPI(t, setup{Keys: directing, Proxy: proxy.Settings{PrefillSettings: proxy.PrefillSettings{DisaggMinUncachedTokens: 256}}}, kv.KindNIXL, 1, 1, 0)
			h.post(t, test.path, test.body)
			if shared := len(h.prefill[0].Received()) == 1; shared != (test.why == "") || len(h.decode[0].Received()) != 1 {
				t.Errorf("shared is %v", shared)
			}
			if test.why == "" {
				return
			}
			if got := h.decode[0].Received()[0]; got != test.body {
				t.Errorf("sent\n%s\nreceived\n%s", test.body, got)
			}
			h.counts(t, testkit.MetricsLines{fmt.Sprintf(`kvrouter_disagg_requests_total{kind="none",result="%s"}`, test.why): 1})
		})
	}
}

// TestSGLangPairsGetNoSeveralAnswers: their decode worker would never answer. Several
// prompts, or one that is short, they share.
func TestSGLangPairsGetNoSeveralAnswers(t *testing.T) {
	long := strings.Repeat("a", 400)
	for _, test := range []struct {
		name, path, body string
		refused          bool
	}{
		{"several answers", testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "n", Raw: "2"}), true},
		{"several answers, streamed", testkit.ChatPath, sharedChat(true, jsonbody.Field{Key: "n", Raw: "2"}), true},
		{"the best of several", "/v1/completions", fmt.Sprintf(`{"prompt":%q,"best_of":2}`, long), true},
		{"several answers of /generate", generateRoute, fmt.Sprintf(`{"text":%q,"sampling_params":{"n":2}}`, long), true},
		{"one answer of /generate", generateRoute, fmt.Sprintf(`{"text":%q,"sampling_params":{"n":1}}`, long), false},
		{"several prompts of /generate", generateRoute, fmt.Sprintf(`{"text":[%[1]q,%[1]q]}`, long), false},
		{"several prompts", "/v1/completions", fmt.Sprintf(`{"prompt":[%[1]q,%[1]q]}`, long), false},
		{"a short prompt", testkit.ChatPath, `{"model":"m","messages":[{"role":"user","content":"Hi"}]}`, false},
	} {
		for _, whole := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, another takes it whole: %v", test.name, whole), func(t *testing.T) {
				h := newTestPairAPI(t, setup{Proxy: proxy.Settings{PrefillSettings: proxy.PrefillSettings{DisaggMinUncachedTokens: 256}}}, kv.KindSGLang, 1, 1, 0)
				both := testkit.NewFakeWorker(t, testkit.StreamOf(testkit.TokenEvent, "[DONE]"))
				if whole {
					h.router.Up(kv.Target{Key: kv.WorkerKey{Worker: 20}, URL: both.URL, Engine: kv.EngineSGLang, Generation: 1})
				}
				response, answer := h.post(t, test.path, test.body)
				prefills, decodes, others := len(h.prefill[0].Received()), len(h.decode[0].Received()), len(both.Received())
				switch {
				case test.refused && whole:
					if response.StatusCode != http.StatusOK || prefills+decodes != 0 || others != 1 {
						t.Errorf("%s, %d + %d + %d requests: %s", response.Status, prefills, decodes, others, answer)
					}
				case test.refused:
					if response.StatusCode != http.StatusBadRequest || prefills+decodes != 0 || !strings.Contains(answer, "one request for each") {
						t.Errorf("%s, %d + %d requests: %s", response.Status, prefills, decodes, answer)
					}
				default:
					if response.StatusCode != http.StatusOK || !whole && (prefills != 1 || decodes != 1) {
						t.Errorf("%s, %d + %d requests: %s", response.Status, prefills, decodes, answer)
					}
				}
			})
		}
	}
}

// TestWithoutWorkersSeveralAnswersAreNotRefused: they may come.
func TestWithoutWorkersSeveralAnswersAreNotRefused(t *testing.T) {
	h := newTestPairAPI(t, setup{}, kv.KindSGLang, 1, 0, 0)
	if response, answer := h.post(t, testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "n", Raw: "2"})); response.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("%s: %s", response.Status, answer)
	}
}

// TestRequestsThatAreLegsAlreadyAreNotPairedAgain: nor is any other worker a
// place for them where none takes requests whole.
func TestRequestsThatAreLegsAlreadyAreNotPairedAgain(t *testing.T) {
	h := newTestPairAPI(t, setup{Keys: directing}, kv.KindSGLang, 1, 1, 0)
	for _, field := range []jsonbody.Field{{Key: "bootstrap_room", Raw: "1"}, {Key: "kv_transfer_params", Raw: "{}"}, {Key: "nvext", Raw: `{"backend_instance_id":10}`}} {
		if response, answer := h.post(t, testkit.ChatPath, sharedChat(false, field)); response.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("%s: %s: %s", field.Key, response.Status, answer)
		}
	}
	if n := len(h.prefill[0].Received()) + len(h.decode[0].Received()); n != 0 {
		t.Errorf("%d were sent", n)
	}
}

// TestEnforcedPairs: without a prefill worker a long prompt is refused, a short one is not.
func TestEnforcedPairs(t *testing.T) {
	for _, test := range []struct {
		enforce  bool
		prefills int
		body     string
		status   int
	}{
		{true, 0, sharedChat(false), http.StatusServiceUnavailable},
		{false, 0, sharedChat(false), http.StatusOK},
		{true, 1, `{"messages":[{"role":"user","content":"Hi"}]}`, http.StatusOK},
	} {
		h := newTestPairAPI(t, setup{Proxy: proxy.Settings{PrefillSettings: proxy.PrefillSettings{DisaggMinUncachedTokens: 256}, EnforceDisagg: test.enforce}}, kv.KindNIXL, test.prefills, 1, 0)
		response, answer := h.post(t, testkit.ChatPath, test.body)
		refused := strings.Contains(answer, "--enforce-disagg") && response.Header.Get("Retry-After") != ""
		if response.StatusCode != test.status || refused != (test.status != http.StatusOK) {
			t.Errorf("%+v: %s: %s", test, response.Status, answer)
		}
	}
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	h := newTestAPI(t, setup{Proxy: proxy.Settings{PrefillSettings: proxy.PrefillSettings{DisaggMinUncachedTokens: 256}, EnforceDisagg: true}}, worker.URL)
	if response, answer := h.post(t, testkit.ChatPath, sharedChat(false)); response.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("without a role: %s: %s", response.Status, answer)
	}
}

// TestNamedPair: the workers that a request names share it, or it fails; what is
// left unnamed is chosen. 3 names nobody.
func TestNamedPair(t *testing.T) {
	for _, test := range []struct {
		name, nvext     string
		headers         []string
		prefill, decode string // who serves it; no prefill: the decode worker all of it; neither: it fails with 503
	}{
		{name: "both", nvext: `{"prefill_worker_id":1,"decode_worker_id":11}`, prefill: "1", decode: "11"},
		{name: "both by headers", nvext: `{}`, headers: []string{hints.HeaderPinnedPrefill, "1", hints.HeaderPinnedWorker, "11"}, prefill: "1", decode: "11"},
		{name: "the decode worker", nvext: `{"decode_worker_id":11}`, prefill: "any", decode: "11"},
		{name: "the prefill worker", nvext: `{"prefill_worker_id":1}`, prefill: "1", decode: "any"},
		{name: "one for all of it", nvext: `{"backend_instance_id":11}`, decode: "11"},
		{name: "one, as told of what stays whole", nvext: `{"prefill_worker_id":11,"decode_worker_id":11}`, decode: "11"},
		{name: "an unknown prefill worker", nvext: `{"prefill_worker_id":3}`},
		{name: "an unknown decode worker", nvext: `{"prefill_worker_id":1,"decode_worker_id":3}`},
		{name: "a decode worker to prefill", nvext: `{"prefill_worker_id":10,"decode_worker_id":11}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newTestPairAPI(t, setup{Proxy: proxy.Settings{PrefillSettings: proxy.PrefillSettings{DisaggMinUncachedTokens: 256}}}, kv.KindNIXL, 2, 2, 0)
			for range 4 {
				response, answer := h.post(t, testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "nvext", Raw: test.nvext}), test.headers...)
				prefill, decode := response.Header.Get(proxy.HeaderPrefillWorker), response.Header.Get(web.HeaderWorker)
				if test.prefill == "" && test.decode == "" {
					if response.StatusCode != http.StatusServiceUnavailable || !strings.Contains(answer, "no other worker is used") {
						t.Errorf("%s: %s", response.Status, answer)
					}
					continue
				}
				is := func(got, want string) bool { return got == want || want == "any" && got != "" }
				if response.StatusCode != http.StatusOK || !is(prefill, test.prefill) || !is(decode, test.decode) {
					t.Errorf("%s: prefill %q, decode %q: %s", response.Status, prefill, decode, answer)
				}
			}
		})
	}
	t.Run("short prompts, too", func(t *testing.T) {
		h := newTestPairAPI(t, setup{Proxy: proxy.Settings{PrefillSettings: proxy.PrefillSettings{DisaggMinUncachedTokens: 256}}}, kv.KindNIXL, 1, 1, 0)
		response, answer := h.post(t, testkit.ChatPath, `{"model":"m","messages":[{"role":"user","content":"Hi"}],"nvext":{"prefill_worker_id":0}}`)
		if response.Header.Get(proxy.HeaderPrefillWorker) != "0" {
			t.Errorf("%s: %s", response.Status, answer)
		}
	})
	t.Run("nobody takes the place of one that fails", func(t *testing.T) {
		h := newTestPairAPI(t, setup{}, kv.KindNIXL, 2, 1, 1)
		response, answer := h.post(t, testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "nvext", Raw: `{"prefill_worker_id":0}`}))
		if response.StatusCode != http.StatusBadGateway || !strings.Contains(answer, "prefill worker 0") {
			t.Errorf("%s: %s", response.Status, answer)
		}
		if n := len(h.decode[0].Received()) + len(h.prefill[1].Received()); n != 0 {
			t.Errorf("%d others got it", n)
		}
	})
}

func TestQueryTellsBothWorkers(t *testing.T) {
	h := newTestPairAPI(t, setup{}, kv.KindNIXL, 1, 1, 0)
	_, answer := h.post(t, testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "nvext", Raw: `{"annotations":["query_instance_id"]}`}))
	ids := gjson.Get(answer, "nvext.worker_id")
	if ids.Get("prefill_worker_id").Int() != 0 || ids.Get("decode_worker_id").Int() != 10 {
		t.Errorf("answered %s", answer)
	}
	if len(h.prefill[0].Received())+len(h.decode[0].Received()) != 0 {
		t.Error("it was sent")
	}
}

// TestPrefillWorkersAreForPromptsOnly: what is not shared goes past them.
func TestPrefillWorkersAreForPromptsOnly(t *testing.T) {
	h := newTestPairAPI(t, setup{}, kv.KindNIXL, 2, 1, 0)
	for range 3 {
		h.post(t, "/v1/embeddings", `{"model":"m","input":"x"}`)
	}
	if n := len(h.decode[0].Received()); n != 3 {
		t.Errorf("the decode worker got %d", n)
	}
}
