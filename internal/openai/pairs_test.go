package openai

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/hints"
	"kvrouter/internal/jsonbody"
	"kvrouter/internal/keys"
	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/proxy"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/routertest"
	"kvrouter/internal/web"
)

var fakeKinds = []kv.Kind{kv.KindNIXL, kv.KindSGLang, kv.KindMooncake}

func TestBothLegsServeARequest(t *testing.T) {
	for _, kind := range fakeKinds {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s stream=%v", kind, stream), func(t *testing.T) {
				h := newTestPairAPI(t, setup{CollectUsage: true}, kind, 1, 1, nil)
				response, answer := h.post(t, testkit.ChatPath, sharedChat(stream), web.HeaderRequest, "my-id")
				if response.StatusCode != http.StatusOK || !strings.Contains(answer, "decoded") || strings.Contains(answer, `"prefill"`) {
					t.Fatalf("%s: %s", response.Status, answer)
				}
				if stream && strings.Contains(answer, "usage") {
					t.Errorf("the client got usage that it did not ask for: %s", answer)
				}
				header := response.Header
				if header.Get(web.HeaderWorker) != "10" || header.Get(proxy.HeaderPrefillWorker) != "0" || header.Get(web.HeaderRequest) != "my-id" {
					t.Errorf("headers %v", header)
				}
				if kind != kv.KindSGLang && header.Get(proxy.HeaderPrefillTime) == "" || (kind != kv.KindSGLang) != (header.Get(proxy.HeaderHandoverTime) != "") {
					t.Errorf("times in headers %v", header)
				}
				if ids := append(h.prefill[0].ids, h.decode[0].ids...); len(ids) != 2 || ids[0] != "my-id" || ids[1] != "my-id" {
					t.Errorf("the legs' request ids are %q", ids)
				}
				h.settled(t)
				page := h.metrics(t)
				for _, want := range []string{
					fmt.Sprintf(`kvrouter_disagg_requests_total{kind="%s",result="ok"} 1`, kind),
					fmt.Sprintf(`kvrouter_requests_total{route="%s",status="200",worker_id="10"} 1`, testkit.ChatPath),
					`kvrouter_cached_tokens_reported_total{worker_id="0"} 4`,
				} {
					if !strings.Contains(page, want) && !(strings.HasPrefix(want, "kvrouter_cached") && kind == kv.KindSGLang) {
						t.Errorf("metrics lack %s", want)
					}
				}
				if kind != kv.KindSGLang && !strings.Contains(page, fmt.Sprintf(`kvrouter_disagg_handover_seconds_count{kind="%s"} 1`, kind)) {
					t.Error("no hand-over was timed")
				}
			})
		}
	}
}

// TestRoomsMatchAndNeverRepeat: neither of the two SGLang servers answers before
// the other has the request too, and both look for each other by room.
func TestRoomsMatchAndNeverRepeat(t *testing.T) {
	requests := 3000
	if testing.Short() {
		requests = 300
	}
	h := newTestPairAPI(t, setup{}, kv.KindSGLang, 2, 2, nil)
	var group sync.WaitGroup
	left := make(chan struct{}, requests)
	for range requests {
		left <- struct{}{}
	}
	close(left)
	for range 16 {
		group.Go(func() {
			for range left {
				if response, answer := h.post(t, testkit.ChatPath, sharedChat(false)); response.StatusCode != http.StatusOK || !strings.Contains(answer, "decoded") {
					t.Errorf("%s: %s", response.Status, answer)
				}
			}
		})
	}
	group.Wait()
	h.settled(t)
	if n := len(h.protocol.meets); n != requests {
		t.Errorf("%d rooms for %d requests", n, requests)
	}
	rids := map[string]bool{}
	for _, engine := range h.prefill {
		for _, body := range engine.received() {
			rids[gjson.Get(body, "rid").Str] = true
		}
		if n := len(engine.received()); n != requests/2 {
			t.Errorf("prefill worker %d got %d of %d requests", engine.id, n, requests)
		}
	}
	if len(rids) != requests {
		t.Errorf("%d ids to abort by for %d requests", len(rids), requests)
	}
}

// TestRanksOfSGLangWorkersAreThoseChosen: each leg names its rank, and the decode
// worker learns that of the prompt.
func TestRanksOfSGLangWorkersAreThoseChosen(t *testing.T) {
	var mu sync.Mutex // guards asked
	asked := map[string]int{}
	h := newTestPairAPI(t, setup{}, kv.KindSGLang, 1, 1, func(id uint64, serve engineServe) engineServe {
		return func(w http.ResponseWriter, r *http.Request, body gjson.Result) {
			rank := r.Header.Get(web.HeaderRank)
			room := strconv.FormatUint(body.Get("bootstrap_room").Uint()%2, 10)
			if of := body.Get("disagg_prefill_dp_rank").Raw; id == 0 && (room != rank || of != "") || id == 10 && room != of {
				t.Errorf("worker %d rank %s got %s", id, rank, body.Raw)
			}
			mu.Lock()
			asked[fmt.Sprintf("%d.%s", id, rank)]++
			mu.Unlock()
			serve(w, r, body)
		}
	})
	for _, target := range h.router.Targets() {
		for rank := range uint32(2) {
			target.Ranks, target.Key.Rank = 2, rank
			h.router.Up(target)
		}
	}
	for range 20 {
		if response, answer := h.post(t, testkit.ChatPath, sharedChat(false)); response.StatusCode != http.StatusOK || !strings.Contains(answer, "decoded") {
			t.Fatalf("%s: %s", response.Status, answer)
		}
	}
	h.settled(t)
	if want := map[string]int{"0.0": 10, "0.1": 10, "10.0": 10, "10.1": 10}; !maps.Equal(asked, want) {
		t.Errorf("requests by worker and rank %v, want %v", asked, want)
	}
}

func TestEveryAttemptHasItsOwnRoom(t *testing.T) {
	for _, kind := range []kv.Kind{kv.KindSGLang, kv.KindMooncake} {
		t.Run(kind.String(), func(t *testing.T) {
			h := newTestPairAPI(t, setup{}, kind, 1, 2, func(id uint64, serve engineServe) engineServe {
				if id == 10 {
					return breaks
				}
				return serve
			})
			response, answer := h.post(t, testkit.ChatPath, sharedChat(false))
			if response.StatusCode != http.StatusOK || !strings.Contains(answer, "decoded") || response.Header.Get(web.HeaderWorker) != "11" {
				t.Fatalf("%s: %s", response.Status, answer)
			}
			h.settled(t)
			name := "bootstrap_room"
			if kind == kv.KindMooncake {
				name = "kv_transfer_params.transfer_id"
			}
			first, second := gjson.Get(h.decode[0].received()[0], name).Raw, gjson.Get(h.decode[1].received()[0], name).Raw
			if first == second {
				t.Errorf("both attempts have %s %s", name, first)
			}
			if first, second := gjson.Get(h.decode[0].received()[0], "rid").Raw, gjson.Get(h.decode[1].received()[0], "rid").Raw; kind == kv.KindSGLang && first == second {
				t.Errorf("both attempts have rid %s", first)
			}
			if blamed := h.blamed(); len(blamed) != 1 || blamed[0] != 10 {
				t.Errorf("blamed are %v", blamed)
			}
		})
	}
}

func TestWhatStaysWhole(t *testing.T) {
	tests := []struct {
		name, path, body string
		why              string // empty: it is shared
	}{
		{"a long prompt", testkit.ChatPath, sharedChat(false), ""},
		{"one answer", testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "n", Raw: "1"}), ""},
		{"a short prompt", testkit.ChatPath, `{"model":"m","messages":[{"role":"user","content":"Hi"}]}`, router.WholeShort},
		{"several answers", testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "n", Raw: "2"}), "answers"},
		{"the best of several answers", "/v1/completions", fmt.Sprintf(`{"prompt":%q,"best_of":2}`, strings.Repeat("a", 400)), "answers"},
		{"beams", testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "use_beam_search", Raw: "true"}), "answers"},
		{"several prompts", "/v1/completions", fmt.Sprintf(`{"prompt":[%[1]q,%[1]q]}`, strings.Repeat("a", 400)), "answers"},
		{"one prompt", "/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":5}`, strings.Repeat("a", 400)), ""},
		{"log probabilities of the prompt", testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "prompt_logprobs", Raw: "1"}), "prompt"},
		{"echo", "/v1/completions", fmt.Sprintf(`{"prompt":%q,"echo":true}`, strings.Repeat("a", 400)), "prompt"},
		{"no echo", "/v1/completions", fmt.Sprintf(`{"prompt":%q,"echo":false}`, strings.Repeat("a", 400)), ""},
		{"a leg already", testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "kv_transfer_params", Raw: `{"do_remote_prefill":true}`}), "own"},
		{"a leg of SGLang's already", testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "bootstrap_room", Raw: "1"}), "own"},
		{"a stored answer", "/v1/responses", `{"model":"m","input":"x","previous_response_id":"r"}`, "stored"},
		{"not generated at once", "/v1/responses", `{"model":"m","input":"x","background":true}`, "stored"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			h := newTestPairAPI(t, setup{Keys: directing, Proxy: proxy.Settings{DisaggMinUncachedTokens: 256}}, kv.KindNIXL, 1, 1, nil)
			response, _ := h.post(t, test.path, test.body)
			h.settled(t)
			if shared := len(h.prefill[0].received()) == 1; shared != (test.why == "") {
				t.Errorf("shared is %v", shared)
			}
			if len(h.decode[0].received()) != 1 {
				t.Error("the decode worker did not get it once")
			}
			want := fmt.Sprintf(`kvrouter_disagg_requests_total{kind="none",result="%s"} 1`, test.why)
			if test.why == "" {
				want = `kvrouter_disagg_requests_total{kind="nixl",result="ok"} 1`
			} else if got := h.decode[0].received()[0]; got != test.body {
				t.Errorf("sent\n%s\nreceived\n%s", test.body, got)
			} else if response.Header.Get(proxy.HeaderPrefillWorker) != "" {
				t.Error("a prefill worker is named")
			}
			if page := h.metrics(t); !strings.Contains(page, want) {
				t.Errorf("metrics lack %s", want)
			}
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
				h := newTestPairAPI(t, setup{Proxy: proxy.Settings{DisaggMinUncachedTokens: 256}}, kv.KindSGLang, 1, 1, nil)
				both := newFakeEngine(t, 20, func(w http.ResponseWriter, _ *http.Request, body gjson.Result) { fakeAnswer(w, body, "whole") })
				if whole {
					h.router.Up(kv.Target{Key: kv.WorkerKey{Worker: 20}, URL: both.URL, Engine: kv.EngineSGLang, Generation: 1})
				}
				response, answer := h.post(t, test.path, test.body)
				h.settled(t)
				prefills, decodes, others := len(h.prefill[0].received()), len(h.decode[0].received()), len(both.received())
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
	h := newTestPairAPI(t, setup{}, kv.KindSGLang, 1, 0, nil)
	if response, answer := h.post(t, testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "n", Raw: "2"})); response.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("%s: %s", response.Status, answer)
	}
}

// TestRequestsThatAreLegsAlreadyAreNotPairedAgain: nor is any other worker a
// place for them where none takes requests whole.
func TestRequestsThatAreLegsAlreadyAreNotPairedAgain(t *testing.T) {
	h := newTestPairAPI(t, setup{Keys: directing}, kv.KindSGLang, 1, 1, nil)
	for _, field := range []jsonbody.Field{{Key: "bootstrap_room", Raw: "1"}, {Key: "kv_transfer_params", Raw: "{}"}, {Key: "nvext", Raw: `{"backend_instance_id":10}`}} {
		if response, answer := h.post(t, testkit.ChatPath, sharedChat(false, field)); response.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("%s: %s: %s", field.Key, response.Status, answer)
		}
	}
	if n := len(h.prefill[0].received()) + len(h.decode[0].received()); n != 0 {
		t.Errorf("%d were sent", n)
	}
}

// TestClientsNameToAbortByIsKept: it may use it.
func TestClientsNameToAbortByIsKept(t *testing.T) {
	h := newTestPairAPI(t, setup{}, kv.KindSGLang, 1, 1, nil)
	h.post(t, testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "rid", Raw: `"my-rid"`}))
	for _, engine := range []*fakeEngine{h.prefill[0], h.decode[0]} {
		if body := engine.received()[0]; strings.Count(body, `"rid"`) != 1 || gjson.Get(body, "rid").Str != keys.Owner(0).Scoped("my-rid") {
			t.Errorf("worker %d got %s", engine.id, body)
		}
	}
}

func TestPromptThatADecodeWorkerHasStaysWhole(t *testing.T) {
	for _, has := range []uint64{10, 11} {
		h := newTestPairAPI(t, setup{Proxy: proxy.Settings{DisaggMinUncachedTokens: 256}}, kv.KindNIXL, 1, 2, nil)
		h.store(t, kv.WorkerKey{Worker: has}, sharedChat(false), 1000)
		h.post(t, testkit.ChatPath, sharedChat(false))
		if n := len(h.prefill[0].received()); n != 0 {
			t.Errorf("worker %d has it: %d prefill legs", has, n)
		}
	}
}

// TestTransferParametersReachTheDecodeWorkerVerbatim also holds that the client's
// members keep their order and bytes; fakeProtocol compares the parameters.
func TestTransferParametersReachTheDecodeWorkerVerbatim(t *testing.T) {
	tests := []struct {
		name          string
		stream        bool
		more          []jsonbody.Field
		prefill, drop string // what the prefill leg's body must have, and not
	}{
		{"plain", false, nil, `"stream":false,`, ""},
		{"stream", true, []jsonbody.Field{{Key: "stream_options", Raw: `{"include_usage":true}`}}, `"stream":false,`, "stream_options"},
		{"limits", false, []jsonbody.Field{{Key: "max_tokens", Raw: "50"}, {Key: "min_tokens", Raw: "9"}, {Key: "temperature", Raw: "0.50"}}, `"max_tokens":1,`, "min_tokens"},
		{"newer limit", false, []jsonbody.Field{{Key: "max_completion_tokens", Raw: "50"}, {Key: "max_tokens", Raw: "60"}}, `"max_completion_tokens":1,`, `"max_tokens"`},
		{"unknown members", false, []jsonbody.Field{{Key: "zeta", Raw: `{"b": 1, "a":1e400}`}, {Key: "alpha", Raw: `"\u00e9"`}}, `"zeta":{"b": 1, "a":1e400},"alpha":"\u00e9"`, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			h := newTestPairAPI(t, setup{}, kv.KindNIXL, 1, 1, nil)
			sent := sharedChat(test.stream, test.more...)
			response, answer := h.post(t, testkit.ChatPath, sent)
			if response.StatusCode != http.StatusOK || !strings.Contains(answer, "decoded") {
				t.Fatalf("%s: %s", response.Status, answer)
			}
			prefill, decode := h.prefill[0].received()[0], h.decode[0].received()[0]
			if !strings.Contains(prefill, test.prefill) || test.drop != "" && strings.Contains(prefill, test.drop) {
				t.Errorf("prefill leg %s", prefill)
			}
			if want := sent[1:]; !strings.HasSuffix(decode, want) || !strings.HasPrefix(decode, `{"kv_transfer_params":{ "do_remote_prefill"`) {
				t.Errorf("decode leg\n%s\ndoes not end as\n%s", decode, want)
			}
		})
	}
}

func TestWhereNothingIsKeptTheDecodeWorkerComputesThePrompt(t *testing.T) {
	for _, test := range []struct {
		kind   kv.Kind
		answer string
	}{
		{kv.KindNIXL, `{"choices":[]}`},
		{kv.KindNIXL, `{"kv_transfer_params":null}`},
		{kv.KindMooncake, `{"choices":[{"finish_reason":"stop"}]}`},
	} {
		h := newTestPairAPI(t, setup{}, test.kind, 1, 1, func(id uint64, serve engineServe) engineServe {
			if id == 0 {
				return func(w http.ResponseWriter, _ *http.Request, _ gjson.Result) { fmt.Fprint(w, test.answer) }
			}
			return serve
		})
		if response, answer := h.post(t, testkit.ChatPath, sharedChat(false)); response.StatusCode != http.StatusOK || !strings.Contains(answer, "whole") {
			t.Errorf("%s: %s", response.Status, answer)
		}
		if page := h.metrics(t); !strings.Contains(page, fmt.Sprintf(`kvrouter_disagg_requests_total{kind="%s",result="recomputed"} 1`, test.kind)) {
			t.Error("not counted")
		}
	}
}

func TestRefusalOfEitherLegReachesTheClient(t *testing.T) {
	for _, kind := range fakeKinds {
		for _, refuses := range []uint64{0, 10} {
			t.Run(fmt.Sprintf("%s worker %d", kind, refuses), func(t *testing.T) {
				h := newTestPairAPI(t, setup{}, kind, 1, 1, func(id uint64, serve engineServe) engineServe {
					if id == refuses {
						return func(w http.ResponseWriter, _ *http.Request, _ gjson.Result) { fakeRefusal(w, "too long") }
					}
					return serve
				})
				response, answer := h.post(t, testkit.ChatPath, sharedChat(true))
				if response.StatusCode != http.StatusBadRequest || gjson.Get(answer, "error.message").Str != "too long" {
					t.Errorf("%s: %s", response.Status, answer)
				}
				h.settled(t)
				if blamed := h.blamed(); len(blamed) != 0 {
					t.Errorf("blamed are %v", blamed)
				}
				if want := fmt.Sprintf(`kvrouter_disagg_requests_total{kind="%s",result="refused"} 1`, kind); !strings.Contains(h.metrics(t), want) {
					t.Errorf("metrics lack %s", want)
				}
				if other := map[uint64]*fakeEngine{0: h.decode[0], 10: h.prefill[0]}[refuses]; kind == kv.KindSGLang && len(other.received()) > 0 {
					testkit.Eventually(t, 5*time.Second, "the other leg was told to abort", func() bool { return len(other.aborted()) > 0 })
				}
			})
		}
	}
}

func TestEnforcedPairs(t *testing.T) {
	enforced := setup{Proxy: proxy.Settings{DisaggMinUncachedTokens: 256, EnforceDisagg: true}}
	t.Run("no prefill worker", func(t *testing.T) {
		for _, enforce := range []bool{false, true} {
			config := enforced
			config.Proxy.EnforceDisagg = enforce
			h := newTestPairAPI(t, config, kv.KindNIXL, 0, 1, nil)
			response, answer := h.post(t, testkit.ChatPath, sharedChat(false))
			if enforce && (response.StatusCode != http.StatusServiceUnavailable || !strings.Contains(answer, "--enforce-disagg") || response.Header.Get("Retry-After") == "") {
				t.Errorf("enforced: %s: %s", response.Status, answer)
			}
			if !enforce && (response.StatusCode != http.StatusOK || !strings.Contains(answer, "whole")) {
				t.Errorf("not enforced: %s: %s", response.Status, answer)
			}
		}
	})
	t.Run("no worker with a role", func(t *testing.T) {
		worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
		h := newTestAPI(t, enforced, worker.URL)
		if response, answer := h.post(t, testkit.ChatPath, sharedChat(false)); response.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("%s: %s", response.Status, answer)
		}
	})
	t.Run("short prompts need none", func(t *testing.T) {
		h := newTestPairAPI(t, enforced, kv.KindNIXL, 1, 1, nil)
		if response, answer := h.post(t, testkit.ChatPath, `{"messages":[{"role":"user","content":"Hi"}]}`); response.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", response.Status, answer)
		}
	})
	t.Run("another prefill worker takes over", func(t *testing.T) {
		h := newTestPairAPI(t, enforced, kv.KindNIXL, 2, 1, func(id uint64, serve engineServe) engineServe {
			if id == 0 {
				return breaks
			}
			return serve
		})
		response, answer := h.post(t, testkit.ChatPath, sharedChat(false))
		if response.StatusCode != http.StatusOK || !strings.Contains(answer, "decoded") || response.Header.Get(proxy.HeaderPrefillWorker) != "1" {
			t.Errorf("%s: %s", response.Status, answer)
		}
	})
}

func TestClientThatLeavesEndsBothLegs(t *testing.T) {
	for _, kind := range fakeKinds {
		for _, stage := range []string{"prefill", "decode"} {
			t.Run(fmt.Sprintf("%s in %s", kind, stage), func(t *testing.T) {
				begun := make(chan struct{}, 2)
				hang := func(w http.ResponseWriter, r *http.Request, _ gjson.Result) {
					begun <- struct{}{}
					<-r.Context().Done()
				}
				h := newTestPairAPI(t, setup{}, kind, 1, 1, func(id uint64, serve engineServe) engineServe {
					if stage == "prefill" && id == 0 || stage == "decode" && id == 10 {
						return hang
					}
					return serve
				})
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				request, err := http.NewRequestWithContext(ctx, http.MethodPost, h.URL+testkit.ChatPath, strings.NewReader(sharedChat(true)))
				if err != nil {
					t.Fatal(err)
				}
				ended := make(chan struct{})
				go func() { // ends when the client leaves
					defer close(ended)
					if response, err := h.Client().Do(request); err == nil {
						response.Body.Close()
					}
				}()
				<-begun
				leave()
				<-ended
				h.settled(t)
				if blamed := h.blamed(); len(blamed) != 0 {
					t.Errorf("blamed are %v", blamed)
				}
				if kind != kv.KindSGLang && stage == "prefill" && len(h.decode[0].received()) != 0 {
					t.Error("a decode worker waits for a prompt that nobody computes")
				}
				if kind == kv.KindSGLang {
					for _, engine := range []*fakeEngine{h.prefill[0], h.decode[0]} {
						testkit.Eventually(t, 5*time.Second, fmt.Sprintf("worker %d was told to abort", engine.id), func() bool { return len(engine.aborted()) > 0 || len(engine.received()) == 0 })
					}
				}
				testkit.Eventually(t, 5*time.Second, "counted", func() bool {
					return strings.Contains(h.metrics(t), fmt.Sprintf(`kvrouter_disagg_requests_total{kind="%s",result="abandoned"} 1`, kind))
				})
			})
		}
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
			h := newTestPairAPI(t, setup{Proxy: proxy.Settings{DisaggMinUncachedTokens: 256}}, kv.KindNIXL, 2, 2, nil)
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
			h.settled(t)
		})
	}
	t.Run("short prompts, too", func(t *testing.T) {
		h := newTestPairAPI(t, setup{Proxy: proxy.Settings{DisaggMinUncachedTokens: 256}}, kv.KindNIXL, 1, 1, nil)
		response, answer := h.post(t, testkit.ChatPath, `{"model":"m","messages":[{"role":"user","content":"Hi"}],"nvext":{"prefill_worker_id":0}}`)
		if response.Header.Get(proxy.HeaderPrefillWorker) != "0" {
			t.Errorf("%s: %s", response.Status, answer)
		}
	})
	t.Run("nobody takes the place of one that fails", func(t *testing.T) {
		h := newTestPairAPI(t, setup{}, kv.KindNIXL, 2, 1, func(id uint64, serve engineServe) engineServe {
			if id == 1 {
				return breaks
			}
			return serve
		})
		response, answer := h.post(t, testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "nvext", Raw: `{"prefill_worker_id":1}`}))
		if response.StatusCode != http.StatusBadGateway || !strings.Contains(answer, "prefill worker 1") {
			t.Errorf("%s: %s", response.Status, answer)
		}
		if n := len(h.decode[0].received()) + len(h.prefill[0].received()); n != 0 {
			t.Errorf("%d others got it", n)
		}
		h.settled(t)
	})
}

func TestQueryTellsBothWorkers(t *testing.T) {
	h := newTestPairAPI(t, setup{}, kv.KindNIXL, 1, 1, nil)
	_, answer := h.post(t, testkit.ChatPath, sharedChat(false, jsonbody.Field{Key: "nvext", Raw: `{"annotations":["query_instance_id"]}`}))
	ids := gjson.Get(answer, "nvext.worker_id")
	if ids.Get("prefill_worker_id").Int() != 0 || ids.Get("decode_worker_id").Int() != 10 {
		t.Errorf("answered %s", answer)
	}
	if len(h.prefill[0].received())+len(h.decode[0].received()) != 0 {
		t.Error("it was sent")
	}
	h.settled(t)
}

// TestPrefillWorkersAreForPromptsOnly: what is not shared goes past them.
func TestPrefillWorkersAreForPromptsOnly(t *testing.T) {
	h := newTestPairAPI(t, setup{}, kv.KindNIXL, 2, 1, nil)
	for range 3 {
		h.post(t, "/v1/embeddings", `{"model":"m","input":"x"}`)
	}
	if n := len(h.decode[0].received()); n != 3 {
		t.Errorf("the decode worker got %d", n)
	}
}

// newTestPairs returns a proxy apart from the port's.
func newTestPairs() *proxy.Proxy {
	return proxy.New(testkit.Defaults[proxy.Settings](), proxy.Deps{Observer: testkit.SilentObserver{}, Failed: func(uint64) {}, Log: slog.New(slog.DiscardHandler)})
}

// choosePair is a proxy.Chooser of requests that two workers serve.
type choosePair func(exclude []uint64, why string) (router.Pair, error)

func (choosePair) Route([]uint64) (router.Decision, error) { panic("two workers serve it") }

func (choosePair) Continue([]uint64, []uint32) (router.Decision, error) {
	panic("two workers serve it")
}

func (choosePair) Beside(context.Context, []uint64) (router.Pair, error) {
	return router.Pair{}, router.ErrNoWorker
}

func (choosePair) Answers(router.Pair) {}

func (f choosePair) RoutePair(exclude []uint64, why string) (router.Pair, error) {
	return f(exclude, why)
}

func (choosePair) Rebook(router.Decision, kv.WorkerKey) (router.Decision, error) { panic("no gateway") }

func (choosePair) IsUp(kv.Target) bool { return true }

// TestAbortsFollowAClientThatTakesNothing: its connection broke, but the context
// of its request does not say so yet.
func TestAbortsFollowAClientThatTakesNothing(t *testing.T) {
	h := newTestPairAPI(t, setup{}, kv.KindSGLang, 1, 1, func(id uint64, _ engineServe) engineServe {
		return func(w http.ResponseWriter, r *http.Request, _ gjson.Result) {
			if id == 10 {
				streamHead(w)
			}
			<-r.Context().Done()
		}
	})
	s := newTestPairs()
	parsed, _ := jsonbody.Parse([]byte(sharedChat(true)))
	u := proxy.Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Header: http.Header{}, Body: parsed, Route: testkit.ChatPath, Paired: true}
	err := s.Forward(t.Context(), brokenWriter{httptest.NewRecorder()}, u, &proxy.Exchange{}, choosePair(func([]uint64, string) (router.Pair, error) {
		return h.router.RoutePair(t.Context(), router.Request{}, router.PairRule{})
	}))
	if !errors.Is(err, proxy.ErrAnswered) {
		t.Errorf("%v", err)
	}
	s.Close()
	for _, engine := range []*fakeEngine{h.prefill[0], h.decode[0]} {
		if n := len(engine.aborted()); n != 1 && len(engine.received()) > 0 {
			t.Errorf("worker %d was told to abort %d times", engine.id, n)
		}
	}
	h.settled(t)
}

// TestEveryTryOfASharedRequestHasItsReceipt: also one whose prefill leg failed.
func TestEveryTryOfASharedRequestHasItsReceipt(t *testing.T) {
	for _, test := range []struct {
		name             string
		kind             kv.Kind
		broken, receipts int
	}{
		{"one after the other", kv.KindNIXL, 0, 2},
		{"one after the other, then whole", kv.KindNIXL, 1, 3},
		{"both at once", kv.KindSGLang, 0, 2},
		{"both at once, then another pair", kv.KindSGLang, 1, 4},
		{"the prefill worker's name is not to be had, then whole", kv.KindMooncake, 1, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newTestPairAPI(t, setup{}, test.kind, 1+test.broken, 1, func(id uint64, serve engineServe) engineServe {
				if id < uint64(test.broken) {
					return breaks
				}
				return serve
			}, routertest.WithSettings(func(s *router.Settings) { s.RecordDecisions = true }))
			if test.kind != kv.KindSGLang && test.broken > 0 {
				h.router.Down(kv.WorkerKey{Worker: 1})
			}
			s, x := newTestPairs(), &proxy.Exchange{}
			parsed, _ := jsonbody.Parse([]byte(sharedChat(false)))
			u := proxy.Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Header: http.Header{}, Body: parsed, Route: testkit.ChatPath, MaxRetries: 2, Paired: true}
			err := s.Forward(t.Context(), httptest.NewRecorder(), u, x, choosePair(func(exclude []uint64, why string) (router.Pair, error) {
				return h.router.RoutePair(t.Context(), router.Request{Exclude: exclude}, router.PairRule{Whole: why})
			}))
			s.Close()
			if err != nil || x.Status != http.StatusOK || len(x.Receipts) != test.receipts {
				t.Errorf("status %d, %v, %d receipts; want %d", x.Status, err, len(x.Receipts), test.receipts)
			}
			h.settled(t)
		})
	}
}

// brokenWriter is a connection that takes no more.
type brokenWriter struct{ http.ResponseWriter }

func (brokenWriter) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func TestMooncakeWithoutBootstrapServerStaysWhole(t *testing.T) {
	rule := new(policytest.Clerk)
	h := newTestPairAPI(t, setup{}, kv.KindMooncake, 1, 1, nil, routertest.WithPolicy(rule))
	target := h.router.Targets()[0]
	target.Bootstrap.Port = 1
	h.router.Up(target)
	response, answer := h.post(t, testkit.ChatPath, sharedChat(false))
	if response.StatusCode != http.StatusOK || !strings.Contains(answer, "whole") {
		t.Errorf("%s: %s", response.Status, answer)
	}
	h.settled(t)
	if page := h.metrics(t); !strings.Contains(page, `kvrouter_disagg_requests_total{kind="mooncake",result="prefill_failed"} 1`) {
		t.Error("not counted")
	}
	ends := rule.Endings()
	for _, want := range []policytest.ToldEnding{{Ending: policy.Failed, TokensOut: 0}, {Ending: policy.Abandoned, TokensOut: 0}, {Ending: policy.Finished, TokensOut: 1}} { // prefill, decode and all of it
		if !slices.Contains(ends, want) || len(ends) != 3 {
			t.Errorf("told %v, want %v", ends, want)
		}
	}
}

// TestPrefillWorkerThatGoesDuringTheTransfer: the decode worker would wait for it
// for minutes, and gets the request again without a transfer.
func TestPrefillWorkerThatGoesDuringTheTransfer(t *testing.T) {
	for _, again := range []bool{false, true} { // it has come back when its absence is looked for
		for _, stream := range []bool{false, true} {
			waits := make(chan struct{}, 1)
			h := newTestPairAPI(t, setup{}, kv.KindMooncake, 1, 1, func(id uint64, serve engineServe) engineServe {
				return func(w http.ResponseWriter, r *http.Request, body gjson.Result) {
					if id == 0 || !body.Get("kv_transfer_params").Exists() {
						serve(w, r, body)
						return
					}
					waits <- struct{}{}
					<-r.Context().Done()
				}
			})
			prefill := h.router.Targets()[0]
			go func() { // ends once the decode leg has come
				<-waits
				h.router.Down(prefill.Key)
				if again {
					prefill.Generation++
					h.router.Up(prefill)
				}
			}()
			response, answer := h.post(t, testkit.ChatPath, sharedChat(stream))
			if response.StatusCode != http.StatusOK || !strings.Contains(answer, "whole") {
				t.Errorf("%s: %s", response.Status, answer)
			}
			h.settled(t)
			if blamed := h.blamed(); !slices.Equal(blamed, []uint64{0}) {
				t.Errorf("blamed are %v", blamed)
			}
			if page := h.metrics(t); !strings.Contains(page, `kvrouter_disagg_requests_total{kind="mooncake",result="prefill_failed"} 1`) {
				t.Error("not counted")
			}
		}
	}
}

// BenchmarkHandover is what passes from a prefill worker's answer to the decode
// request: inside is from the answer's last byte read to the request's last byte
// written, outside from the prefill worker's last write to the decode worker's
// handler, the way over both sockets included. Medians, and the 99th percentile
// of the inside.
func BenchmarkHandover(b *testing.B) {
	for _, size := range []int{2_000, 200_000} {
		b.Run(fmt.Sprintf("%dKB", size/1000), func(b *testing.B) {
			var answered time.Time
			var outside []float64
			h := newTestPairAPI(b, setup{}, kv.KindNIXL, 1, 1, func(id uint64, serve engineServe) engineServe {
				if id == 0 {
					return func(w http.ResponseWriter, r *http.Request, body gjson.Result) {
						serve(w, r, body)
						answered = time.Now()
					}
				}
				return func(w http.ResponseWriter, r *http.Request, body gjson.Result) {
					outside = append(outside, float64(time.Since(answered))/float64(time.Millisecond))
					serve(w, r, body)
				}
			})
			body := fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":%q}]}`, strings.Repeat("word ", size/5))
			var inside []float64
			for b.Loop() {
				response, answer := h.post(b, testkit.ChatPath, body)
				took, err := strconv.ParseFloat(response.Header.Get(proxy.HeaderHandoverTime), 64)
				if err != nil {
					b.Fatalf("%s: %s", response.Status, answer)
				}
				inside = append(inside, took)
			}
			slices.Sort(inside)
			slices.Sort(outside)
			b.ReportMetric(inside[len(inside)/2]*1000, "inside-p50-µs")
			b.ReportMetric(inside[len(inside)*99/100]*1000, "inside-p99-µs")
			b.ReportMetric(outside[len(outside)/2]*1000, "outside-p50-µs")
		})
	}
}
