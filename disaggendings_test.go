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

	"github.com/tidwall/gjson"
)

// streamHead begins an answer's stream with its first event.
func streamHead(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprintf(w, "data: %s\n\n", tokenEvent)
	http.NewResponseController(w).Flush()
}

// TestEveryEndOfAPairIsTold pins what of a pair's end the policy hears of both
// bookings, in any order, and what metrics count.
func TestEveryEndOfAPairIsTold(t *testing.T) {
	type ends = []toldEnding
	done, failed, left := toldEnding{Finished, 1}, toldEnding{Failed, 0}, toldEnding{Abandoned, 0}
	for _, c := range []struct {
		name            string
		kind            Kind
		enforce         bool
		prefill, decode engineServe // nil: by the protocol
		result          string      // of the shared attempt
		worker          string      // that the request is counted for
		status          int
		want            ends
	}{
		{"answered", KindNIXL, false, nil, nil, sharedOK, "10", 200, ends{done, done}},
		{"prefill broken, answered whole", KindNIXL, false, breaks, nil, sharedPrefillFailed, "10", 200, ends{failed, left, done}},
		{"prefill broken", KindNIXL, true, breaks, nil, sharedPrefillFailed, "0", 502, ends{failed, left}},
		{"prefill error", KindSGLang, false, answersStatus(500), hangs, sharedPrefillFailed, "0", 502, ends{failed, left}},
		{"prefill refuses", KindSGLang, false, answersStatus(400), hangs, sharedRefused, "0", 400, ends{left, left}},
		{"prefill hangs", KindNIXL, true, hangs, nil, sharedPrefillTimeout, "0", 504, ends{failed, left}},
		{"decode broken", KindNIXL, false, nil, breaks, sharedDecodeFailed, "10", 502, ends{done, failed}},
		{"decode error", KindNIXL, true, nil, answersStatus(500), sharedDecodeFailed, "10", 502, ends{done, failed}},
		{"decode refuses", KindNIXL, false, nil, answersStatus(400), sharedRefused, "10", 400, ends{done, left}},
		{"decode hangs", KindNIXL, false, nil, hangs, sharedHandoverTimeout, "10", 504, ends{done, left}},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := Config{CollectUsage: true, RequestTimeout: 20 * time.Second, DisaggKnobs: DisaggKnobs{DisaggPrefillTimeout: time.Second, DisaggHandoverTimeout: time.Second, EnforceDisagg: c.enforce}}
			h := newPairHouse(t, config, c.kind, 1, 1, func(id uint64, serve engineServe) engineServe {
				if own := map[uint64]engineServe{0: c.prefill, 10: c.decode}[id]; own != nil {
					return own
				}
				return serve
			})
			policy := new(clerk)
			h.router.policy = policy
			response, answer := h.post(t, chatPath, sharedChat(true))
			if response.StatusCode != c.status {
				t.Errorf("%s: %s", response.Status, answer)
			}
			h.settled(t)
			order := func(a, b toldEnding) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) }
			if got := slices.SortedFunc(slices.Values(policy.endings()), order); !slices.Equal(got, slices.SortedFunc(slices.Values(c.want), order)) {
				t.Errorf("told %v, want %v", got, c.want)
			}
			policy.oncePerDecision(t)
			page := h.metrics(t)
			for _, want := range []string{
				fmt.Sprintf(`kvrouter_disagg_requests_total{kind="%s",result="%s"} 1`, c.kind, c.result),
				fmt.Sprintf(`kvrouter_requests_total{route="%s",status="%d",worker_id="%s"} 1`, chatPath, c.status, c.worker),
			} {
				if !strings.Contains(page, want) {
					t.Errorf("metrics lack %s", want)
				}
			}
			prefilled := slices.Contains(c.want, done) && c.result != sharedPrefillFailed
			for name, want := range map[string]bool{"prefill": prefilled, "transfer": prefilled && c.status < 500} {
				series := fmt.Sprintf(`kvrouter_disagg_%s_seconds_count{kind="%s"} 1`, name, c.kind)
				if c.kind == KindNIXL && strings.Contains(page, series) != want {
					t.Errorf("%s is told: %v", series, !want)
				}
			}
		})
	}
}

// TestErrorThatIsPassedOnIsAFailure: the last attempt's answer is the client's.
func TestErrorThatIsPassedOnIsAFailure(t *testing.T) {
	h := newPairHouse(t, Config{}, KindNIXL, 1, 2, func(id uint64, serve engineServe) engineServe {
		if id == 0 {
			return serve
		}
		return answersStatus(http.StatusInternalServerError)
	})
	if response, answer := h.post(t, chatPath, sharedChat(false)); response.StatusCode != http.StatusInternalServerError {
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
		kind   Kind
		broken uint64 // worker
		status int    // that it answers
		lost   bool   // the bootstrap server is
		want   int
	}{
		{"prefill error", KindNIXL, 0, 500, false, 1},
		{"prefill refusal", KindNIXL, 0, 400, false, 0},
		{"decode error", KindNIXL, 10, 500, false, 1},
		{"no bootstrap server", KindMooncake, 0, 500, true, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := newPairHouse(t, Config{}, c.kind, 1, 1, func(id uint64, serve engineServe) engineServe {
				if id == c.broken {
					return answersStatus(c.status)
				}
				return serve
			})
			h.router.policy = newTestRouter(t, "thompson", 0).policy
			h.telemetry.WatchThompson(h.router, func() []uint64 { return nil })
			if target := h.router.Targets()[0]; c.lost {
				target.Bootstrap.Port = 1
				h.router.Up(target)
			}
			h.post(t, chatPath, sharedChat(false))
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
			h := newPairHouse(t, Config{}, kind, 1, 1, func(id uint64, serve engineServe) engineServe {
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
				h.post(t, chatPath, sharedChat(true))
			}()
			eventually(t, 10*time.Second, "the decode worker streams", func() bool { return len(h.decode[0].received()) > 0 })
			eventually(t, 10*time.Second, "the prefill worker is free", func() bool { return h.router.Load(WorkerKey{}).InFlight == 0 })
			if n := h.router.Load(WorkerKey{Worker: 10}).InFlight; n != 1 {
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
		kind    Kind
		answers []string // of the prefill worker, one for each request
		body    string   // of the first request; the others' is plain
		total   string   // tokens that were reported; empty: none
		none    bool     // of one request it is known that nothing was cached
	}{
		{"told", KindNIXL, []string{told}, sharedChat(false), "4", false},
		{"told by SGLang", KindSGLang, []string{told}, sharedChat(false), "4", false},
		{"never told", KindNIXL, []string{untold}, sharedChat(false), "", false},
		{"left out by a worker that tells", KindNIXL, []string{told, untold}, sharedChat(false), "4", true},
		{"left out by a worker that told of a prompt computed anew", KindSGLang, []string{told, untold}, sharedChat(false, jsonField{"prompt_logprobs", "1"}), "4", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			answers := make(chan string, len(c.answers))
			var h *pairHouse
			h = newPairHouse(t, Config{CollectUsage: true}, c.kind, 1, 1, func(id uint64, _ engineServe) engineServe {
				return func(w http.ResponseWriter, r *http.Request, _ gjson.Result) {
					cached := `{"cached_tokens":64}`
					if id == 0 {
						cached = <-answers
					}
					for id == 10 && h.router.Load(WorkerKey{}).InFlight > 0 && r.Context().Err() == nil { // the prompt is computed first
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
				h.post(t, chatPath, body)
			}
			h.settled(t)
			page := h.metrics(t)
			_, total, _ := strings.Cut(page, `kvrouter_cached_tokens_reported_total{worker_id="0"} `)
			total, _, _ = strings.Cut(total, "\n")
			if none := strings.Contains(page, `kvrouter_predictions_total{result="exact"} 1`); total != c.total || none != c.none {
				t.Errorf("%q cached, none of one request: %v; want %q and %v", total, none, c.total, c.none)
			}
			h.router.mu.Lock()
			defer h.router.mu.Unlock()
			if h.router.TellsCached(WorkerKey{Worker: 10}) {
				t.Error("the decode worker counts as one that tells of its cache")
			}
		})
	}
}

// TestOverlapOfAPairIsThePrefillWorkers: the header tells what of the prompt was
// cached where it was computed.
func TestOverlapOfAPairIsThePrefillWorkers(t *testing.T) {
	for _, kind := range fakeKinds {
		h := newPairHouse(t, Config{}, kind, 1, 1, nil)
		h.store(t, WorkerKey{}, sharedChat(false), 3)
		response, answer := h.post(t, chatPath, sharedChat(false))
		if got := response.Header.Get(headerOverlap); got != strconv.Itoa(3*testBlock) {
			t.Errorf("%s: %s tokens cached: %s", kind, got, answer)
		}
	}
}
