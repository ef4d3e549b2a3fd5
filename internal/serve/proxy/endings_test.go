package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/routertest"
)

const usageEvent = `{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}`

// TestEveryEndOfARequestIsToldOnce pins what a policy hears for each way in
// which a request can end on the OpenAI side.
func TestEveryEndOfARequestIsToldOnce(t *testing.T) {
	type (
		ends    = []policytest.ToldEnding
		workers = []http.HandlerFunc
	)
	failed, left := policytest.ToldEnding{Ending: policy.Failed}, policytest.ToldEnding{Ending: policy.Abandoned}
	done := func(tokens int) policytest.ToldEnding {
		return policytest.ToldEnding{Ending: policy.Finished, TokensOut: tokens}
	}
	status := func(status int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			io.WriteString(w, body)
		}
	}
	then := func(first http.HandlerFunc, next func(http.ResponseWriter, *http.Request)) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			first(w, r)
			http.NewResponseController(w).Flush()
			next(w, r)
		}
	}
	abort := func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
	silence := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	raw := func(stream string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, stream)
		}
	}
	announced := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "1000")
		status(200, `{"choices":`)(w, r)
	}
	const (
		stopped = `{"choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":3}}`
		lastOne = `{"choices":[{"delta":{},"finish_reason":"length"}]}`
		notLast = `{"choices":[{"delta":{"content":"hi"},"finish_reason":null}]}`
	)
	for _, c := range []struct {
		name    string
		path    string // empty: chat
		timeout time.Duration
		workers workers // nil: nothing listens
		want    ends
	}{
		{"whole answer", "", 0, workers{status(200, stopped)}, ends{done(3)}},
		{"whole answer without usage", "", 0, workers{status(200, `{}`)}, ends{done(0)}},
		{"whole stream", "", 0, workers{testkit.StreamOf(testkit.TokenEvent, usageEvent, "[DONE]")}, ends{done(1)}},
		{"whole stream without usage", "", 0, workers{testkit.StreamOf(testkit.TokenEvent, "[DONE]")}, ends{done(0)}},
		{"stream with a reason and no last event", "", 0, workers{testkit.StreamOf(notLast, lastOne)}, ends{done(0)}},
		{"stream that breaks off after its last event", "", 0, workers{then(testkit.StreamOf(testkit.TokenEvent, "[DONE]"), abort)}, ends{done(0)}},
		{"stream of the messages API", "/v1/messages", 0, workers{raw(testkit.MessagesStream)}, ends{done(3)}},
		{"stream of the responses API", "/v1/responses", 0, workers{raw(testkit.ResponsesStream)}, ends{done(2)}},
		{"stream of which no end is known", "/v1/audio/transcriptions", 0, workers{testkit.StreamOf(testkit.TokenEvent)}, ends{done(0)}},

		{"client's mistake", "", 0, workers{status(400, `{"error":{"code":400}}`)}, ends{left}},
		{"client's mistake in a stream", "", 0, workers{testkit.StreamOf(`{"error":{"message":"too long","code":400}}`, "[DONE]")}, ends{left}},
		{"what no worker can", "", 0, workers{status(501, `{}`)}, ends{left}},
		{"aborted at the engine", "", 0, workers{status(200, `{"choices":[{"finish_reason":"abort"}]}`)}, ends{left}},
		{"stream aborted at the engine", "", 0, workers{testkit.StreamOf(testkit.TokenEvent, `{"choices":[{"finish_reason":"abort"}]}`, "[DONE]")}, ends{left}},

		{"engine error", "", 0, workers{status(500, `{}`)}, ends{failed}},
		{"bad gateway and the like", "", 0, workers{status(504, `{}`)}, ends{failed}},
		{"engine error as the reason", "", 0, workers{status(200, `{"choices":[{"finish_reason":"error"}]}`)}, ends{failed}},
		{"nothing listens", "", 0, workers{nil}, ends{failed}},
		{"connection closed without an answer", "", 0, workers{hangUp}, ends{failed}},
		{"stream that breaks off", "", 0, workers{then(testkit.StreamOf(testkit.TokenEvent), abort)}, ends{failed}},
		{"stream that ends without saying so", "", 0, workers{testkit.StreamOf(notLast, notLast)}, ends{failed}},
		{"stream of the messages API that ends without saying so", "/v1/messages", 0, workers{raw("event: message_start\ndata: {}\n\n")}, ends{failed}},
		{"stream with an engine error", "", 0, workers{testkit.StreamOf(`{"error":{"code":500}}`, "[DONE]")}, ends{failed}},
		{"stream with an engine error in its middle", "", 0, workers{testkit.StreamOf(notLast, `{"error":{"code":500}}`, "[DONE]")}, ends{failed}},
		{"half an answer", "", 0, workers{then(status(200, `{"choices"`), abort)}, ends{failed}},
		{"long answer that breaks off", "", 0, workers{then(status(200, strings.Repeat(" ", 8<<20+1)), abort)}, ends{failed}},
		{"silence", "", 50 * time.Millisecond, workers{silence}, ends{failed}},
		{"silence in mid-stream", "", 50 * time.Millisecond, workers{then(testkit.StreamOf(testkit.TokenEvent), silence)}, ends{failed}},

		{"answered by the second", "", 0, workers{nil, status(200, stopped)}, ends{failed, done(3)}},
		{"answered by the second after an engine error", "", 0, workers{status(503, ``), status(200, stopped)}, ends{failed, done(3)}},
		{"answered by the second after the connection is closed", "", 0, workers{hangUp, testkit.StreamOf(testkit.TokenEvent, "[DONE]")}, ends{failed, done(0)}},
		{"answered by the second after a stream's head", "", 0, workers{then(testkit.StreamOf(), abort), testkit.StreamOf(testkit.TokenEvent, "[DONE]")}, ends{failed, done(0)}},
		{"answered by the second after a stream that begins with an engine error", "", 0, workers{testkit.StreamOf(`{"error":{"message":"EngineCore died","code":500}}`, "[DONE]"), testkit.StreamOf(testkit.TokenEvent, "[DONE]")}, ends{failed, done(0)}},
		{"answered by the second after half an answer", "", 0, workers{then(announced, abort), testkit.StreamOf(testkit.TokenEvent, "[DONE]")}, ends{failed, done(0)}},
		{"answered by none", "", 0, workers{hangUp, status(500, ``)}, ends{failed, failed}},
		{"client's mistake at the second", "", 0, workers{hangUp, status(400, `{}`)}, ends{failed, left}},
	} {
		t.Run(c.name, func(t *testing.T) {
			policy := new(policytest.Clerk)
			h := newFrontedFleet(t, Settings{RequestTimeout: c.timeout}, routertest.WithPolicy(policy))
			for i, serve := range c.workers {
				url := "http://" + testkit.DeadAddress(t)
				if serve != nil {
					url = testkit.NewFakeWorker(t, serve).URL
				}
				h.router.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: url})
			}
			if c.path == "" {
				c.path = testkit.ChatPath
			}
			// An answer that was announced longer than it is ends with an error here, too.
			request, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, h.URL+c.path, strings.NewReader(`{"messages":[]}`))
			if response, err := h.Client().Do(request); err == nil {
				io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
			testkit.Eventually(t, 5*time.Second, "the request is off the books", func() bool { return len(policy.Told()) >= len(c.want) && routertest.InFlight(h.router) == 0 })
			if got := policy.Endings(); !slices.Equal(got, c.want) {
				t.Errorf("told %v, want %v", got, c.want)
			}
			policy.OncePerDecision(t)
			if blamed := h.blamed(); len(c.want) > 1 && (len(blamed) == 0 || blamed[0] != 0) {
				t.Errorf("blamed are %v", blamed)
			}
		})
	}
}

func TestAClientThatLeavesIsNobodysFault(t *testing.T) {
	for _, c := range []struct {
		name    string
		serve   http.HandlerFunc
		started bool // leave after the first event
	}{
		{"before the first byte", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, false},
		{"in mid-stream", func(w http.ResponseWriter, r *http.Request) {
			testkit.StreamOf(testkit.TokenEvent)(w, r)
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			worker := testkit.NewFakeWorker(t, c.serve)
			rule := new(policytest.Clerk)
			h := newFrontedFleet(t, Settings{RequestTimeout: time.Minute}, routertest.WithPolicy(rule))
			h.router.Up(kv.Target{URL: worker.URL})
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			request, _ := http.NewRequestWithContext(ctx, http.MethodPost, h.URL+testkit.ChatPath, strings.NewReader(`{"stream":true}`))
			if c.started {
				response, err := h.Client().Do(request)
				if err != nil {
					t.Fatal(err)
				}
				defer response.Body.Close()
			} else {
				done := make(chan struct{})
				go func() {
					defer close(done)
					if response, err := h.Client().Do(request); err == nil {
						response.Body.Close()
					}
				}()
				defer func() { <-done }()
				testkit.Eventually(t, 5*time.Second, "the request reached the worker", func() bool { return len(worker.Received()) == 1 })
			}
			leave()
			testkit.Eventually(t, 5*time.Second, "told", func() bool { return len(rule.Told()) > 0 })
			if got := rule.Endings(); !slices.Equal(got, []policytest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}) {
				t.Errorf("told %v", got)
			}
		})
	}
}

// TestEveryEndOfAPairIsTold pins what of a pair's end the policy hears of both
// bookings, in any order, and what metrics count.
func TestEveryEndOfAPairIsTold(t *testing.T) {
	type ends = []policytest.ToldEnding
	done, failed, left := policytest.ToldEnding{Ending: policy.Finished, TokensOut: 1}, policytest.ToldEnding{Ending: policy.Failed, TokensOut: 0}, policytest.ToldEnding{Ending: policy.Abandoned, TokensOut: 0}
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
		{"answered", kv.KindNIXL, false, nil, nil, SharedOK, "10", 200, ends{done, done}},
		{"prefill broken, answered whole", kv.KindNIXL, false, hangsUp, nil, SharedPrefillFailed, "10", 200, ends{failed, left, done}},
		{"prefill broken", kv.KindNIXL, true, hangsUp, nil, SharedPrefillFailed, "0", 502, ends{failed, left}},
		{"prefill error", kv.KindSGLang, false, answersStatus(500), neverAnswers, SharedPrefillFailed, "0", 502, ends{failed, left}},
		{"prefill refuses", kv.KindSGLang, false, answersStatus(400), neverAnswers, SharedRefused, "0", 400, ends{left, left}},
		{"prefill hangs", kv.KindNIXL, true, neverAnswers, nil, SharedPrefillTimeout, "0", 504, ends{failed, left}},
		{"decode broken", kv.KindNIXL, false, nil, hangsUp, SharedDecodeFailed, "10", 502, ends{done, failed}},
		{"decode error", kv.KindNIXL, true, nil, answersStatus(500), SharedDecodeFailed, "10", 500, ends{done, failed}},
		{"decode refuses", kv.KindNIXL, false, nil, answersStatus(400), SharedRefused, "10", 400, ends{done, left}},
		{"decode hangs", kv.KindNIXL, false, nil, neverAnswers, SharedHandoverTimeout, "10", 504, ends{done, left}},
	} {
		t.Run(c.name, func(t *testing.T) {
			policy := new(policytest.Clerk)
			config := Settings{RequestTimeout: 20 * time.Second, DisaggPrefillTimeout: time.Second, DisaggHandoverTimeout: time.Second, EnforceDisagg: c.enforce}
			h := newPairFleet(t, config, c.kind, 1, 1, func(id uint64, serve engineServe) engineServe {
				if own := map[uint64]engineServe{0: c.prefill, 10: c.decode}[id]; own != nil {
					return own
				}
				return serve
			}, routertest.WithPolicy(policy))
			response, answer := h.post(t, testkit.ChatPath, sharedChat(true))
			if response.StatusCode != c.status {
				t.Errorf("%s: %s", response.Status, answer)
			}
			h.settled(t)
			order := func(a, b policytest.ToldEnding) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) }
			if got := slices.SortedFunc(slices.Values(policy.Endings()), order); !slices.Equal(got, slices.SortedFunc(slices.Values(c.want), order)) {
				t.Errorf("told %v, want %v", got, c.want)
			}
			policy.OncePerDecision(t)
			h.counts(t, 1, c.kind, c.result)
			if x := <-h.ended; x.Status != c.status || x.Worker != c.worker {
				t.Errorf("status %d of worker %s", x.Status, x.Worker)
			}
			prefilled := slices.Contains(c.want, done) && c.result != SharedPrefillFailed
			for name, want := range map[string]bool{"prefill": prefilled, "transfer": prefilled && c.status < 500} {
				if c.kind == kv.KindNIXL && h.counted(c.kind, name) == 1 != want {
					t.Errorf("%s is told: %v", name, !want)
				}
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
			h := newPairFleet(t, Settings{}, kind, 1, 1, func(id uint64, serve engineServe) engineServe {
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
			var h *pairFleet
			h = newPairFleet(t, Settings{}, c.kind, 1, 1, func(id uint64, _ engineServe) engineServe {
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
			total, none := "", false
			for range c.answers {
				if u := (<-h.ended).Usage; u.CachedKnown {
					none = none || u.CachedTokens == 0
					if u.CachedTokens > 0 {
						total = strconv.Itoa(u.CachedTokens)
					}
				}
			}
			if total != c.total || none != c.none {
				t.Errorf("%q cached, none of one request: %v; want %q and %v", total, none, c.total, c.none)
			}
			if h.router.ReportsCached(kv.WorkerKey{Worker: 10}) {
				t.Error("the decode worker counts as one that tells of its cache")
			}
		})
	}
}

// TestOverlapOfAPairIsThePrefillWorkers: the header tells what of the prompt was
// cached where it was computed.
func TestOverlapOfAPairIsThePrefillWorkers(t *testing.T) {
	for _, kind := range fakeKinds {
		h := newPairFleet(t, Settings{}, kind, 1, 1, nil)
		routertest.Hold(h.router, 0, testkit.Tokens(1, 3*testkit.BlockSize))
		response, answer := h.post(t, testkit.ChatPath, sharedChat(false))
		if got := response.Header.Get(web.HeaderOverlap); got != strconv.Itoa(3*testkit.BlockSize) {
			t.Errorf("%s: %s tokens cached: %s", kind, got, answer)
		}
	}
}

func TestNamedEventsAreReadLikeOthers(t *testing.T) {
	for stream, want := range map[string]Usage{
		testkit.MessagesStream:  {Known: true, PromptTokens: 9, OutputTokens: 3, CachedKnown: true, CachedTokens: 4},
		testkit.ResponsesStream: {Known: true, PromptTokens: 9, OutputTokens: 2, CachedKnown: true, CachedTokens: 4},
	} {
		for _, text := range []string{stream, strings.ReplaceAll(stream, "\n", "\r\n")} {
			var events eventScanner
			if out := events.Scan([]byte(text)); string(out) != text {
				t.Errorf("passed on as %q", out)
			}
			if events.Usage != want || events.Count != 1 || !events.done {
				t.Errorf("%q: usage %+v, %d parts of the answer, done %t", text, events.Usage, events.Count, events.done)
			}
		}
	}
}

func TestAPanicOverARequestLeavesNothingBooked(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf(testkit.TokenEvent, "[DONE]"))
	rule := new(policytest.Clerk)
	rt := routertest.New(t, "", 0, routertest.WithPolicy(rule))
	rt.Up(kv.Target{Key: kv.WorkerKey{}, URL: worker.URL})
	proxy := newTestProxy(t, 0)
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Header: http.Header{web.HeaderRequest: {"r"}}}
		proxy.Forward(t.Context(), panickingWriter{httptest.NewRecorder()}, u, &Exchange{}, chooseOne(func([]uint64) (router.Decision, error) {
			return rt.Route(t.Context(), router.Request{})
		}))
	}()
	if got := rule.Endings(); !slices.Equal(got, []policytest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}) || routertest.InFlight(rt) != 0 {
		t.Errorf("told %v, %d in flight", got, routertest.InFlight(rt))
	}
}

type panickingWriter struct{ http.ResponseWriter }

func (panickingWriter) Write([]byte) (int, error) { panic("no paper") }
