package main

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/jsonbody"
	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
	"kvrouter/internal/web"

	"github.com/tidwall/gjson"
)

// streamHead begins an answer's stream with its first event.
func streamHead(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprintf(w, "data: %s\n\n", testkit.TokenEvent)
	http.NewResponseController(w).Flush()
}

// TestEveryEndOfAPairIsTold pins what of a pair's end the policy hears of both
// bookings, in any order, and what metrics count.
func TestEveryEndOfAPairIsTold(t *testing.T) {
	type ends = []routertest.ToldEnding
	done, failed, left := routertest.ToldEnding{Ending: policy.Finished, TokensOut: 1}, routertest.ToldEnding{Ending: policy.Failed, TokensOut: 0}, routertest.ToldEnding{Ending: policy.Abandoned, TokensOut: 0}
	for _, c := range []struct {
		name            string
		kind            kv.Kind
		enforce         bool
		prefill, decode engineServe // nil: by the protocol
		result          string      // of the shared attempt
		worker          string      // that the request is counted for
		status          int
		want            ends
	}{
		{"answered", kv.KindNIXL, false, nil, nil, proxy.SharedOK, "10", 200, ends{done, done}},
		{"prefill broken, answered whole", kv.KindNIXL, false, breaks, nil, proxy.SharedPrefillFailed, "10", 200, ends{failed, left, done}},
		{"prefill broken", kv.KindNIXL, true, breaks, nil, proxy.SharedPrefillFailed, "0", 502, ends{failed, left}},
		{"prefill error", kv.KindSGLang, false, answersStatus(500), hangs, proxy.SharedPrefillFailed, "0", 502, ends{failed, left}},
		{"prefill refuses", kv.KindSGLang, false, answersStatus(400), hangs, proxy.SharedRefused, "0", 400, ends{left, left}},
		{"prefill hangs", kv.KindNIXL, true, hangs, nil, proxy.SharedPrefillTimeout, "0", 504, ends{failed, left}},
		{"decode broken", kv.KindNIXL, false, nil, breaks, proxy.SharedDecodeFailed, "10", 502, ends{done, failed}},
		{"decode error", kv.KindNIXL, true, nil, answersStatus(500), proxy.SharedDecodeFailed, "10", 502, ends{done, failed}},
		{"decode refuses", kv.KindNIXL, false, nil, answersStatus(400), proxy.SharedRefused, "10", 400, ends{done, left}},
		{"decode hangs", kv.KindNIXL, false, nil, hangs, proxy.SharedHandoverTimeout, "10", 504, ends{done, left}},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := Config{CollectUsage: true, RequestTimeout: 20 * time.Second, Disagg: proxy.Settings{DisaggPrefillTimeout: time.Second, DisaggHandoverTimeout: time.Second, EnforceDisagg: c.enforce}}
			h := newTestPairAPI(t, config, c.kind, 1, 1, func(id uint64, serve engineServe) engineServe {
				if own := map[uint64]engineServe{0: c.prefill, 10: c.decode}[id]; own != nil {
					return own
				}
				return serve
			})
			policy := new(routertest.Clerk)
			h.router.Policy = policy
			response, answer := h.post(t, testkit.ChatPath, sharedChat(true))
			if response.StatusCode != c.status {
				t.Errorf("%s: %s", response.Status, answer)
			}
			h.settled(t)
			order := func(a, b routertest.ToldEnding) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) }
			if got := slices.SortedFunc(slices.Values(policy.Endings()), order); !slices.Equal(got, slices.SortedFunc(slices.Values(c.want), order)) {
				t.Errorf("told %v, want %v", got, c.want)
			}
			policy.OncePerDecision(t)
			page := h.metrics(t)
			for _, want := range []string{
				fmt.Sprintf(`kvrouter_disagg_requests_total{kind="%s",result="%s"} 1`, c.kind, c.result),
				fmt.Sprintf(`kvrouter_requests_total{route="%s",status="%d",worker_id="%s"} 1`, testkit.ChatPath, c.status, c.worker),
			} {
				if !strings.Contains(page, want) {
					t.Errorf("metrics lack %s", want)
				}
			}
			prefilled := slices.Contains(c.want, done) && c.result != proxy.SharedPrefillFailed
			for name, want := range map[string]bool{"prefill": prefilled, "transfer": prefilled && c.status < 500} {
				series := fmt.Sprintf(`kvrouter_disagg_%s_seconds_count{kind="%s"} 1`, name, c.kind)
				if c.kind == kv.KindNIXL && strings.Contains(page, series) != want {
					t.Errorf("%s is told: %v", series, !want)
				}
			}
		})
	}
}

// TestErrorThatIsPassedOnIsAFailure: the last attempt's answer is the client's.
func TestErrorThatIsPassedOnIsAFailure(t *testing.T) {
	h := newTestPairAPI(t, Config{}, kv.KindNIXL, 1, 2, func(id uint64, serve engineServe) engineServe {
		if id == 0 {
			return serve
		}
		return answersStatus(http.StatusInternalServerError)
	})
	if response, answer := h.post(t, testkit.ChatPath, sharedChat(false)); response.StatusCode != http.StatusInternalServerError {
		t.Errorf("%s: %s", response.Status, answer)
	}
	if want := `kvrouter_disagg_requests_total{kind="nixl",result="decode_failed"} 2`; !strings.Contains(h.metrics(t), want) {
		t.Errorf("metrics lack %s", want)
	}
}

// TestFailuresOfLegsAreEngineErrors is about a counter of policy thompson.
func TestFailuresOfLegsAreEngineErrors(t *testing.T) {
	for _, c := range []struct {
		name   string
		kind   kv.Kind
		broken uint64 // worker
		status int    // that it answers
		lost   bool   // the bootstrap server is
		want   int
	}{
		{"prefill error", kv.KindNIXL, 0, 500, false, 1},
		{"prefill refusal", kv.KindNIXL, 0, 400, false, 0},
		{"decode error", kv.KindNIXL, 10, 500, false, 1},
		{"no bootstrap server", kv.KindMooncake, 0, 500, true, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newTestPairAPI(t, Config{}, c.kind, 1, 1, func(id uint64, serve engineServe) engineServe {
				if id == c.broken {
					return answersStatus(c.status)
				}
				return serve
			})
			h.router.Policy = routertest.NewTestRouter(t, "thompson", 0).Policy
			h.telemetry.WatchThompson(h.router, func() []uint64 { return nil })
			if target := h.router.Targets()[0]; c.lost {
				target.Bootstrap.Port = 1
				h.router.Up(target)
			}
			h.post(t, testkit.ChatPath, sharedChat(false))
			h.settled(t)
			if want := fmt.Sprintf("thompson_processor_engine_errors_total %d\n", c.want); !strings.Contains(h.metrics(t), want) {
				t.Errorf("metrics lack %s", want)
			}
		})
	}
}

// TestPrefillWorkerIsFreeOnceItHasAnswered: its booking does not wait for the
// answer's end.
func TestPrefillWorkerIsFreeOnceItHasAnswered(t *testing.T) {
	for _, kind := range fakeKinds {
		t.Run(kind.String(), func(t *testing.T) {
			release := make(chan struct{})
			h := newTestPairAPI(t, Config{}, kind, 1, 1, func(id uint64, serve engineServe) engineServe {
				return func(w http.ResponseWriter, r *http.Request, body gjson.Result) {
					if id == 0 {
						fakeAnswer(w, body, "prefill")
						return
					}
					streamHead(w)
					<-release
					io.WriteString(w, "data: [DONE]\n\n")
				}
			})
			answered := make(chan struct{})
			go func() {
				defer close(answered)
				h.post(t, testkit.ChatPath, sharedChat(true))
			}()
			testkit.Eventually(t, 10*time.Second, "the decode worker streams", func() bool { return len(h.decode[0].received()) > 0 })
			testkit.Eventually(t, 10*time.Second, "the prefill worker is free", func() bool { return h.router.Load(kv.WorkerKey{}).InFlight == 0 })
			if n := h.router.Load(kv.WorkerKey{Worker: 10}).InFlight; n != 1 {
				t.Errorf("%d on the decode worker", n)
			}
			close(release)
			<-answered
		})
	}
}

// TestCachedTokensOfAPairAreThePrefillWorkers: what the decode worker reports as
// cached came from the other.
func TestCachedTokensOfAPairAreThePrefillWorkers(t *testing.T) {
	const told, untold = `{"cached_tokens":4}`, "null"
	for _, c := range []struct {
		name    string
		kind    kv.Kind
		answers []string // of the prefill worker, one for each request
		body    string   // of the first request; the others' is plain
		total   string   // tokens that were reported; empty: none
		none    bool     // of one request it is known that nothing was cached
	}{
		{"told", kv.KindNIXL, []string{told}, sharedChat(false), "4", false},
		{"told by SGLang", kv.KindSGLang, []string{told}, sharedChat(false), "4", false},
		{"never told", kv.KindNIXL, []string{untold}, sharedChat(false), "", false},
		{"left out by a worker that tells", kv.KindNIXL, []string{told, untold}, sharedChat(false), "4", true},
		{"left out by a worker that told of a prompt computed anew", kv.KindSGLang, []string{told, untold}, sharedChat(false, jsonbody.Field{Key: "prompt_logprobs", Raw: "1"}), "4", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			answers := make(chan string, len(c.answers))
			var h *pairHouse
			h = newTestPairAPI(t, Config{CollectUsage: true}, c.kind, 1, 1, func(id uint64, _ engineServe) engineServe {
				return func(w http.ResponseWriter, r *http.Request, _ gjson.Result) {
					cached := `{"cached_tokens":64}`
					if id == 0 {
						cached = <-answers
					}
					for id == 10 && h.router.Load(kv.WorkerKey{}).InFlight > 0 && r.Context().Err() == nil { // the prompt is computed first
						<-time.After(time.Millisecond)
					}
					w.Header().Set("Content-Type", "application/json")
					fmt.Fprintf(w, `{"choices":[{"finish_reason":"stop"}],"kv_transfer_params":{"a":1},"usage":{"prompt_tokens":99,"completion_tokens":1,"prompt_tokens_details":%s}}`, cached)
				}
			})
			for i, answer := range c.answers {
				answers <- answer
				body := c.body
				if i > 0 {
					body = sharedChat(false)
				}
				h.post(t, testkit.ChatPath, body)
			}
			h.settled(t)
			page := h.metrics(t)
			_, total, _ := strings.Cut(page, `kvrouter_cached_tokens_reported_total{worker_id="0"} `)
			total, _, _ = strings.Cut(total, "\n")
			if none := strings.Contains(page, `kvrouter_predictions_total{result="exact"} 1`); total != c.total || none != c.none {
				t.Errorf("%q cached, none of one request: %v; want %q and %v", total, none, c.total, c.none)
			}
			if h.router.TellsCached(kv.WorkerKey{Worker: 10}) {
				t.Error("the decode worker counts as one that tells of its cache")
			}
		})
	}
}

// TestOverlapOfAPairIsThePrefillWorkers: the header tells what of the prompt was
// cached where it was computed.
func TestOverlapOfAPairIsThePrefillWorkers(t *testing.T) {
	for _, kind := range fakeKinds {
		h := newTestPairAPI(t, Config{}, kind, 1, 1, nil)
		h.store(t, kv.WorkerKey{}, sharedChat(false), 3)
		response, answer := h.post(t, testkit.ChatPath, sharedChat(false))
		if got := response.Header.Get(web.HeaderOverlap); got != strconv.Itoa(3*testkit.TestBlock) {
			t.Errorf("%s: %s tokens cached: %s", kind, got, answer)
		}
	}
}
