package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
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

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/routertest"
)

var fakeKinds = []kv.Kind{kv.KindNIXL, kv.KindSGLang, kv.KindMooncake}

func TestBothLegsServeARequest(t *testing.T) {
	for _, kind := range fakeKinds {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s stream=%v", kind, stream), func(t *testing.T) {
				h := newPairFleet(t, Settings{}, kind, 1, 1, nil)
				response, answer := h.post(t, testkit.ChatPath, sharedChat(stream), web.HeaderRequest, "my-id")
				if response.StatusCode != http.StatusOK || !strings.Contains(answer, "decoded") || strings.Contains(answer, `"prefill"`) {
					t.Fatalf("%s: %s", response.Status, answer)
				}
				if stream && strings.Contains(answer, "usage") {
					t.Errorf("the client got usage that it did not ask for: %s", answer)
				}
				header := response.Header
				if header.Get(web.HeaderWorker) != "10" || header.Get(HeaderPrefillWorker) != "0" || header.Get(web.HeaderRequest) != "my-id" {
					t.Errorf("headers %v", header)
				}
				if kind != kv.KindSGLang && header.Get(HeaderPrefillTime) == "" || (kind != kv.KindSGLang) != (header.Get(HeaderHandoverTime) != "") {
					t.Errorf("times in headers %v", header)
				}
				if ids := append(h.prefill[0].ids, h.decode[0].ids...); len(ids) != 2 || ids[0] != "my-id" || ids[1] != "my-id" {
					t.Errorf("the legs' request ids are %q", ids)
				}
				h.settled(t)
				h.counts(t, 1, kind, SharedOK)
				x := <-h.ended
				if cached := x.Usage.CachedTokens; x.Status != http.StatusOK || x.Worker != "10" || cached != 4 && kind != kv.KindSGLang {
					t.Errorf("status %d of worker %s, %d tokens cached", x.Status, x.Worker, cached)
				}
				if kind != kv.KindSGLang && h.counted(kind, "handover") != 1 {
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
	h := newPairFleet(t, Settings{}, kv.KindSGLang, 2, 2, nil)
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
	h := newPairFleet(t, Settings{}, kv.KindSGLang, 1, 1, func(id uint64, serve engineServe) engineServe {
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
			h := newPairFleet(t, Settings{}, kind, 1, 2, func(id uint64, serve engineServe) engineServe {
				if id == 10 {
					return hangsUp
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

func TestWhereNothingIsKeptTheDecodeWorkerComputesThePrompt(t *testing.T) {
	for _, test := range []struct {
		kind   kv.Kind
		answer string
	}{
		{kv.KindNIXL, `{"choices":[]}`},
		{kv.KindNIXL, `{"kv_transfer_params":null}`},
		{kv.KindMooncake, `{"choices":[{"finish_reason":"stop"}]}`},
	} {
		h := newPairFleet(t, Settings{}, test.kind, 1, 1, func(id uint64, serve engineServe) engineServe {
			if id == 0 {
				return func(w http.ResponseWriter, _ *http.Request, _ gjson.Result) { fmt.Fprint(w, test.answer) }
			}
			return serve
		})
		if response, answer := h.post(t, testkit.ChatPath, sharedChat(false)); response.StatusCode != http.StatusOK || !strings.Contains(answer, "whole") {
			t.Errorf("%s: %s", response.Status, answer)
		}
		h.counts(t, 1, test.kind, sharedRecomputed)
	}
}

func TestRefusalOfEitherLegReachesTheClient(t *testing.T) {
	for _, kind := range fakeKinds {
		for _, refuses := range []uint64{0, 10} {
			t.Run(fmt.Sprintf("%s worker %d", kind, refuses), func(t *testing.T) {
				h := newPairFleet(t, Settings{}, kind, 1, 1, func(id uint64, serve engineServe) engineServe {
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
				h.counts(t, 1, kind, SharedRefused)
				if other := map[uint64]*fakeEngine{0: h.decode[0], 10: h.prefill[0]}[refuses]; kind == kv.KindSGLang && len(other.received()) > 0 {
					testkit.Eventually(t, 5*time.Second, "the other leg was told to abort", func() bool { return len(other.aborted()) > 0 })
				}
			})
		}
	}
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
				h := newPairFleet(t, Settings{}, kind, 1, 1, func(id uint64, serve engineServe) engineServe {
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
				h.counts(t, 1, kind, SharedAbandoned)
			})
		}
	}
}

// TestAbortsFollowAClientThatTakesNothing: its connection broke, but the context
// of its request does not say so yet.
func TestAbortsFollowAClientThatTakesNothing(t *testing.T) {
	h := newPairFleet(t, Settings{}, kv.KindSGLang, 1, 1, func(id uint64, _ engineServe) engineServe {
		return func(w http.ResponseWriter, r *http.Request, _ gjson.Result) {
			if id == 10 {
				streamHead(w)
			}
			<-r.Context().Done()
		}
	})
	s := newTestProxy(t, 0)
	u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Header: http.Header{}, Body: parsed(t, sharedChat(true)), Route: testkit.ChatPath, Paired: true}
	err := s.Forward(t.Context(), brokenWriter{httptest.NewRecorder()}, u, &Exchange{}, &fleetChooser{router: h.router, ctx: t.Context()})
	if !errors.Is(err, ErrAnswered) {
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
			h := newPairFleet(t, Settings{}, test.kind, 1+test.broken, 1, func(id uint64, serve engineServe) engineServe {
				if id < uint64(test.broken) {
					return hangsUp
				}
				return serve
			}, routertest.WithSettings(func(s *router.Settings) { s.RecordDecisions = true }))
			if test.kind != kv.KindSGLang && test.broken > 0 {
				h.router.Down(kv.WorkerKey{Worker: 1})
			}
			s, x, body := newTestProxy(t, 0), &Exchange{}, parsed(t, sharedChat(false))
			u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Header: http.Header{}, Body: body, Route: testkit.ChatPath, MaxRetries: 2, Paired: true}
			err := s.Forward(t.Context(), httptest.NewRecorder(), u, x, &fleetChooser{router: h.router, ctx: t.Context()})
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
	h := newPairFleet(t, Settings{}, kv.KindMooncake, 1, 1, nil, routertest.WithPolicy(rule))
	target := h.router.Targets()[0]
	target.Bootstrap.Port = 1
	h.router.Up(target)
	response, answer := h.post(t, testkit.ChatPath, sharedChat(false))
	if response.StatusCode != http.StatusOK || !strings.Contains(answer, "whole") {
		t.Errorf("%s: %s", response.Status, answer)
	}
	h.settled(t)
	h.counts(t, 1, kv.KindMooncake, SharedPrefillFailed)
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
			h := newPairFleet(t, Settings{}, kv.KindMooncake, 1, 1, func(id uint64, serve engineServe) engineServe {
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
			h.counts(t, 1, kv.KindMooncake, SharedPrefillFailed)
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
			h := newPairFleet(b, Settings{}, kv.KindNIXL, 1, 1, func(id uint64, serve engineServe) engineServe {
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
				took, err := strconv.ParseFloat(response.Header.Get(HeaderHandoverTime), 64)
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

// TestTheRoutersMemberIsTheOneThatCounts: a client that writes out its nulls is disaggregated as
// another.
func TestTheRoutersMemberIsTheOneThatCounts(t *testing.T) {
	nulls := []string{
		`"kv_transfer_params":null,"bootstrap_host":null,"bootstrap_port":null,"bootstrap_room":null,"bootstrap_info":null,"rid":null`,
		`"\u006bv_transfer_params":null,"kv_transfer_params":null,"bootstrap_r\u006fom":null,"bootstrap_room":null`,
	}
	for kind, name := range map[kv.Kind]string{kv.KindNIXL: "kv_transfer_params", kv.KindMooncake: "kv_transfer_params", kv.KindSGLang: "bootstrap_room"} {
		h := newPairFleet(t, Settings{}, kind, 1, 1, nil)
		for _, more := range nulls {
			for _, stream := range []bool{false, true} {
				body := strings.TrimSuffix(sharedChat(stream), "}") + `,"stream_options":null,"max_completion_tokens":null,"return_token_ids":null,` + more + `}`
				response, answer := h.post(t, testkit.ChatPath, body)
				if response.StatusCode != http.StatusOK || !strings.Contains(answer, "decoded") {
					t.Errorf("%s: %d %s", kind, response.StatusCode, answer)
				}
				for leg, received := range map[string][]string{"prefill": h.prefill[0].received(), "decode": h.decode[0].received()} {
					last := received[len(received)-1]
					got, ok := jsonbody.Parse([]byte(last))
					if v := got.Get(name); !ok || v.Type == gjson.Null || strings.Count(last, `"`+name+`"`) != 1 && kind != kv.KindSGLang {
						t.Errorf("%s, %s: %s", kind, leg, last)
					}
				}
			}
		}
	}
}

// TestWhyWhole: why a request stays whole, and the kinds of workers that share it all the same.
func TestWhyWhole(t *testing.T) {
	none, sglang := kv.KindsOf(kv.KindNone), kv.KindsOf(kv.KindSGLang)
	for _, test := range []struct {
		path, body      string
		whole, multiple bool
		why             string
		kinds           kv.Kinds
	}{
		{chatRoute, `{"messages":[]}`, false, false, "", 0},
		{chatRoute, `{"messages":[]}`, true, false, wholePinned, none},
		{chatRoute, `{"n":1}`, false, false, "", 0},
		{chatRoute, `{"n":2}`, false, false, wholeAnswers, none},
		{completionRoute, `{"prompt":"a","best_of":2}`, false, false, wholeAnswers, none},
		{chatRoute, `{"use_beam_search":true}`, false, false, wholeAnswers, none},
		{generateRoute, `{"sampling_params":{"n":2}}`, false, false, wholeAnswers, none},
		{generateRoute, `{"sampling_params":{"n":1}}`, false, false, "", 0},
		{completionRoute, `{"prompt":["a","a"]}`, false, true, wholeAnswers, sglang},
		{completionRoute, `{"prompt":"a","max_tokens":5}`, false, false, "", 0},
		{chatRoute, `{"prompt_logprobs":1}`, false, false, wholePrompt, sglang},
		{completionRoute, `{"echo":true}`, false, false, wholePrompt, sglang},
		{completionRoute, `{"echo":false}`, false, false, "", 0},
		{chatRoute, `{"kv_transfer_params":{"do_remote_prefill":true}}`, false, false, wholeOwn, none},
		{chatRoute, `{"bootstrap_room":1}`, false, false, wholeOwn, none},
		{ResponsesRoute, `{"input":"x","previous_response_id":"r"}`, false, false, wholeStored, none},
		{ResponsesRoute, `{"input":"x","background":true}`, false, false, wholeStored, none},
	} {
		if why, kinds := WhyWhole(test.path, parsed(t, test.body), test.whole, test.multiple); why != test.why || kinds != test.kinds {
			t.Errorf("%s %s: %q, %v", test.path, test.body, why, kinds)
		}
	}
}

// TestAnotherPrefillWorkerTakesOverWherePairsAreEnforced: no decode worker does.
func TestAnotherPrefillWorkerTakesOverWherePairsAreEnforced(t *testing.T) {
	h := newPairFleet(t, Settings{EnforceDisagg: true}, kv.KindNIXL, 2, 1, func(id uint64, serve engineServe) engineServe {
		if id == 0 {
			return hangsUp
		}
		return serve
	})
	response, answer := h.post(t, testkit.ChatPath, sharedChat(false))
	if response.StatusCode != http.StatusOK || !strings.Contains(answer, "decoded") || response.Header.Get(HeaderPrefillWorker) != "1" {
		t.Errorf("%s: %s", response.Status, answer)
	}
}
