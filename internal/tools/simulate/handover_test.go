package simulate

import (
	"math"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/tools/mocker"
)

// apart turns a simulation into one whose first workers compute only prompts.
func apart(s Simulation, prefills int) Simulation {
	config := testkit.Defaults[mocker.Settings]()
	s.Prefills, s.Handover, s.LeastUncached = prefills, config.Handover(), 256
	return s
}

// TestAPairsTimesAddUp is one case by hand: a pass of the prefill worker, the
// transfer, then passes of the decode worker that compute no prompt. The same
// prompt once more is short of uncached tokens, so the decode worker does it all.
func TestAPairsTimesAddUp(t *testing.T) {
	ids := []uint64{1, 2}
	requests := []TraceRequest{
		{Prompt: 1000, Output: 3, Hashes: ids, Part: traceBlock, known: 1000},
		{Prompt: 1000, Output: 2, Hashes: ids, Part: traceBlock, known: 1000},
	}
	s := apart(simulation(requests, "kv", 64), 1)
	s.Workers, s.Concurrency = 2, 1
	run := finishedRun(t, s)

	prefill := func(n float64) float64 { return 16.50142 + 1.518344e-02*n + 4.209989e-07*n*n }
	decode := func(context float64) float64 {
		u := context / (16384 * 64)
		return 5.74 + 54.01*u - 25.74*u*u
	}
	const transfer = 1000 * 131072 / 64e9 * 1000 // ms
	same := func(what string, got time.Duration, want float64) {
		t.Helper()
		if math.Abs(milliseconds(got)-want) > 1e-4 {
			t.Errorf("%s after %v ms, want %v", what, milliseconds(got), want)
		}
	}
	pair, whole := run.ledger[0], run.ledger[1]
	if pair.prefill == nil || pair.prefill.worker != 0 || pair.worker != 1 {
		t.Fatalf("the first request went to worker %d, its prompt: %+v", pair.worker, pair.prefill)
	}
	same("the prompt", pair.prefill.end-pair.sent, prefill(1000))
	first := prefill(1000) + transfer + decode(1000)
	same("the first token", pair.first-pair.sent, first)
	same("the end", pair.end-pair.sent, first+decode(1001)+decode(1002))
	if pair.Missing != 1000 {
		t.Errorf("%d tokens were fetched, want 1000", pair.Missing)
	}
	if whole.prefill != nil || whole.worker != 1 || whole.Cached != 960 {
		t.Fatalf("the second request: worker %d, %d tokens cached, prompt elsewhere: %v", whole.worker, whole.Cached, whole.prefill != nil)
	}
	same("the first token of the second", whole.first-whole.sent, prefill(40))
	same("its end", whole.end-whole.sent, prefill(40)+decode(1001))
}

// TestLegsTogetherSaveOneRoundTrip is one pair by hand, its workers 5 ms away: one
// leg after the other takes two round trips, both at once take one.
func TestLegsTogetherSaveOneRoundTrip(t *testing.T) {
	prefill := 16.50142 + 1.518344e-02*1000 + 4.209989e-07*1000*1000
	const transfer = 1000 * 131072 / 64e9 * 1000 // ms
	u := 1000. / (16384 * 64)
	decode := 5.74 + 54.01*u - 25.74*u*u
	for kind, ways := range map[kv.Kind]float64{kv.KindNIXL: 4, kv.KindSGLang: 2} {
		s := apart(simulation([]TraceRequest{{Prompt: 1000, Output: 1, Hashes: []uint64{1, 2}, Part: traceBlock, known: 1000}}, "kv", 64), 1)
		s.Workers, s.Concurrency, s.Kind, s.Way = 2, 1, kind, 5*time.Millisecond
		pair := finishedRun(t, s).ledger[0]
		if pair.prefill == nil {
			t.Fatalf("%v: one worker does it all", kind)
		}
		if got, want := milliseconds(pair.first-pair.sent), prefill+transfer+decode+5*ways; math.Abs(got-want) > 1e-4 {
			t.Errorf("%v: the first token came after %v ms, want %v", kind, got, want)
		}
	}
}

// TestWhatIsCachedIsNotFetched: a decode worker that has the start of a prompt
// asks for the rest alone.
func TestWhatIsCachedIsNotFetched(t *testing.T) {
	requests := []TraceRequest{
		{Prompt: 1024, Output: 1, Hashes: []uint64{1, 2}, Part: traceBlock, known: 1024},
		{Prompt: 1536, Output: 1, Hashes: []uint64{1, 2, 3}, Part: traceBlock, known: 1536},
	}
	s := apart(simulation(requests, "kv", 64), 1)
	s.Workers, s.Concurrency = 2, 1
	run := finishedRun(t, s)
	if second := run.ledger[1]; second.Missing != 512 || second.prefill.Cached != 1024 {
		t.Errorf("%d tokens fetched, want 512; the prefill worker found %d, want 1024", second.Missing, second.prefill.Cached)
	}
}

func TestEveryPairOfARunEnds(t *testing.T) {
	requests := loadTraces(t)["synthetic"][:400]
	for _, policy := range policies.Names {
		for _, blocks := range []int{16384, 2200} { // the latter fill up: requests are preempted
			s := apart(simulation(requests, policy, 64), 3)
			s.Engine.Blocks = blocks
			run := finishedRun(t, s)
			if len(run.ledger) != len(requests) {
				t.Errorf("%s: %d requests ended, want %d", policy, len(run.ledger), len(requests))
			}
			pairs := 0
			for _, f := range run.ledger {
				if f.end < f.first || f.first <= f.sent || f.Generated != f.Output {
					t.Fatalf("%s: sent %v, first token %v, end %v, %d tokens of %d", policy, f.sent, f.first, f.end, f.Generated, f.Output)
				}
				if f.prefill != nil {
					pairs++
					if f.prefill.worker >= s.Prefills || f.prefill.end >= f.first {
						t.Fatalf("%s: worker %d computed the prompt until %v, first token %v", policy, f.prefill.worker, f.prefill.end, f.first)
					}
				}
				if f.worker < s.Prefills {
					t.Fatalf("%s: worker %d answered", policy, f.worker)
				}
			}
			if pairs < len(requests)/2 {
				t.Errorf("%s: %d pairs of %d requests", policy, pairs, len(requests))
			}
			run.checkNothingIsLeft(t)
		}
	}
}

func TestTwoRunsApartAreEqual(t *testing.T) {
	requests := loadTraces(t)["synthetic"][:400]
	for _, policy := range []string{"kv", "work", "random"} {
		s := apart(simulation(requests, policy, 64), 4)
		s.EventLag = 20 * time.Millisecond
		checkRunsAreEqual(t, s)
	}
}

// TestAPromptComputedElsewhereIsAwaited: its decode worker has nothing of it to
// compute, but will decode it.
func TestAPromptComputedElsewhereIsAwaited(t *testing.T) {
	r := router.New(testkit.Defaults[router.Settings](), router.Deps{Index: radix.NewTree(), Policy: policytest.MustPolicy(t, "kv"), BlockSize: 4, Seed: 1})
	prefill, decode := kv.WorkerKey{Worker: 1}, kv.WorkerKey{Worker: 2}
	r.Up(kv.Target{Key: prefill, Disagg: kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindNIXL}})
	r.Up(kv.Target{Key: decode, Disagg: kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindNIXL}})
	route := func() router.Pair {
		pair, err := r.RoutePair(t.Context(), router.Request{NumTokens: 100}, router.PairRule{})
		if err != nil || pair.Whole != "" {
			t.Fatal(pair.Whole, err)
		}
		return pair
	}
	check := func(when string, awaited, context int) {
		t.Helper()
		l := r.Load(decode)
		if l.AwaitedTokens != awaited || l.ContextTokens != context || l.PrefillTokens != 0 || len(l.Prefills) != 0 {
			t.Errorf("%s: %d tokens awaited, want %d; %d decode, want %d; %d prompts to compute", when, l.AwaitedTokens, awaited, l.ContextTokens, context, len(l.Prefills))
		}
	}
	first, second := route(), route()
	check("two are on their way", 200, 0)
	if l := r.Load(prefill); l.PrefillTokens != 200 || l.AwaitedTokens != 0 {
		t.Errorf("the prefill worker has %d tokens to compute and awaits %d", l.PrefillTokens, l.AwaitedTokens)
	}
	first.Decode.Booking.FirstToken()
	check("one decodes", 100, 100)
	second.End()
	check("the other was given up", 0, 100)
	first.End()
	check("both have ended", 0, 0)
}
