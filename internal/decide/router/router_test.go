package router

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/radixtest"
)

// NewTestRouter returns a router over that many workers, all up and idle.
func NewTestRouter(t testing.TB, rule string, workers int) *Router {
	t.Helper()
	r := New(testkit.Defaults[Settings](), Deps{Index: radix.NewTree(), Policy: policytest.MustPolicy(t, rule), BlockSize: testkit.BlockSize, Seed: 1})
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: "http://worker", Models: []string{"m"}})
	}
	return r
}

// Hold puts the full blocks of a prompt into worker w's cache.
func Hold(r *Router, w uint64, tokens []uint32) {
	local := kv.HashBlocks(nil, tokens, r.Unit(), "", "")
	blocks := make([]kv.StoredBlock, len(local))
	for i, engine := range kv.SequenceHashes(nil, local) {
		blocks[i] = kv.StoredBlock{Engine: engine, Local: local[i]}
	}
	radixtest.Store(r.Index(), kv.WorkerKey{Worker: w}, 0, false, blocks)
}

func TestRouteTakesTheWorkerThatHoldsThePrefix(t *testing.T) {
	r := NewTestRouter(t, "standalone", 4)
	prompt := testkit.Tokens(1, 42)
	Hold(r, 2, prompt)
	for range 20 {
		d, err := r.Route(t.Context(), Request{Tokens: prompt})
		if err != nil {
			t.Fatal(err)
		}
		if d.Target.Key.Worker != 2 || d.OverlapTokens != 40 || d.Tokens != 42 {
			t.Fatalf("worker %d, overlap %d of %d tokens; want worker 2, 40 of 42", d.Target.Key.Worker, d.OverlapTokens, d.Tokens)
		}
		d.Booking.End()
		r.Publish(kv.WorkerKey{Worker: 2}, policy.Published{At: time.Now()})
	}
}

func TestOverlapLeavesTheLastTokenToTheEngine(t *testing.T) {
	r := NewTestRouter(t, "standalone", 1)
	prompt := testkit.Tokens(1, 3*testkit.BlockSize)
	Hold(r, 0, prompt)
	d, err := r.Route(t.Context(), Request{Tokens: prompt})
	if err != nil {
		t.Fatal(err)
	}
	if d.OverlapTokens != 2*testkit.BlockSize {
		t.Errorf("overlap of a prompt of exactly 3 cached blocks is %d tokens, want %d", d.OverlapTokens, 2*testkit.BlockSize)
	}
}

// TestOverlapOfWorkersThatHoldTheTokenBehindABlock, as SGLang with EAGLE does, beside one
// that does not.
func TestOverlapOfWorkersThatHoldTheTokenBehindABlock(t *testing.T) {
	const size = testkit.BlockSize
	r := NewTestRouter(t, "standalone", 3)
	prompt := testkit.Tokens(1, 4*size)
	Hold(r, 0, prompt)
	for i, local := range kv.HashLookaheadBlocks(nil, prompt, size, 1, "", "", nil) {
		radixtest.Store(r.Index(), kv.WorkerKey{Worker: 2}, uint64(i), i > 0, []kv.StoredBlock{{Engine: uint64(i + 1), Local: local}})
	}
	_, _ = r.Index().Apply(kv.WorkerKey{Worker: 2}, &radix.Change{Kind: radix.LookaheadStored, Set: &radix.Setting{Lookahead: kv.Lookahead{Tokens: 1, Cut: 1}}})
	parts := func(end int, other ...uint32) []uint32 { return append(slices.Clone(prompt[:end]), other...) }
	for name, c := range map[string]struct {
		request      Request
		plain, ahead int // blocks
	}{
		"goes on as before":               {Request{Tokens: parts(3*size+2, 5000, 5000)}, 3, 3},
		"differs behind a block":          {Request{Tokens: parts(2*size, 5000, 5000)}, 2, 1},
		"differs one later":               {Request{Tokens: parts(2*size+1, 5000, 5000)}, 2, 2},
		"ends with a block":               {Request{Tokens: parts(2 * size)}, 1, 1},
		"ends behind a block":             {Request{Tokens: parts(2*size + 1)}, 2, 1},
		"ends two behind a block":         {Request{Tokens: parts(2*size + 2)}, 2, 2},
		"its end is not known":            {Request{Tokens: parts(2*size + 1), NumTokens: 5 * size}, 2, 2},
		"hashes, without tokens":          {Request{Local: kv.HashBlocks(nil, prompt, size, "", ""), NumTokens: 5 * size}, 4, 0},
		"another cache salt":              {Request{Tokens: prompt, Salt: "s"}, 0, 0},
		"one token":                       {Request{Tokens: prompt[:1]}, 0, 0},
		"no tokens, routed by load alone": {Request{NumTokens: 100}, 0, 0},
	} {
		for worker, want := range []int{c.plain, 0, c.ahead} {
			c.request.Pinned = &kv.WorkerKey{Worker: uint64(worker)}
			d, err := r.Route(t.Context(), c.request)
			if err != nil {
				t.Fatal(err)
			}
			d.Booking.End()
			if d.Overlap != want {
				t.Errorf("%s: worker %d has %d blocks, want %d", name, worker, d.Overlap, want)
			}
		}
		overlaps, _, _ := r.Overlaps(c.request)
		for _, o := range overlaps {
			if o.Worker.Worker == 2 && o.Blocks != c.ahead {
				t.Errorf("%s: Overlaps has %d blocks, want %d", name, o.Blocks, c.ahead)
			}
		}
	}
}

// TestStandaloneAlwaysTakesTheHolderOfAWholePrompt, as the example does, whose overlap
// goes up to 1: capped at what an engine can use, a prompt of one cached block went to
// any worker.
func TestStandaloneAlwaysTakesTheHolderOfAWholePrompt(t *testing.T) {
	for _, blocks := range []int{1, 2, 8} {
		r := NewTestRouter(t, "standalone", 4)
		prompt := testkit.Tokens(1, blocks*testkit.BlockSize)
		Hold(r, 3, prompt)
		for range 24 {
			d := MustRoute(t, r, Request{Tokens: prompt, ChooseOnly: true})
			if d.Target.Key.Worker != 3 || d.OverlapTokens != (blocks-1)*testkit.BlockSize {
				t.Fatalf("%d blocks: worker %d, which can use %d tokens; want worker 3 and all but the last block", blocks, d.Target.Key.Worker, d.OverlapTokens)
			}
		}
	}
}

func TestSaltAndAdapterNeverShareBlocks(t *testing.T) {
	r := NewTestRouter(t, "standalone", 1)
	prompt := testkit.Tokens(1, 20)
	Hold(r, 0, prompt)
	for _, request := range []Request{{Tokens: prompt, Salt: "s"}, {Tokens: prompt, LoRA: "a"}} {
		d, err := r.Route(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		if d.OverlapTokens != 0 {
			t.Errorf("salt %q adapter %q match %d tokens of the plain prompt", request.Salt, request.LoRA, d.OverlapTokens)
		}
	}
}

func TestConcurrentRequestsSeeEachOther(t *testing.T) {
	// Ten equal requests at once must not all fall on one worker.
	r := NewTestRouter(t, "least-loaded", 5)
	var together sync.WaitGroup
	for range 10 {
		together.Go(func() {
			if _, err := r.Route(t.Context(), Request{Tokens: testkit.Tokens(1, 8)}); err != nil {
				t.Error(err)
			}
		})
	}
	together.Wait()
	for i := range uint64(5) {
		if n := r.Load(kv.WorkerKey{Worker: i}).InFlight; n != 2 {
			t.Errorf("worker %d has %d in flight, want 2", i, n)
		}
	}
}

func TestExcludedDownAndForeignModelsAreNotChosen(t *testing.T) {
	r := NewTestRouter(t, "round-robin", 3)
	r.Up(kv.Target{Key: kv.WorkerKey{Worker: 3}, Models: []string{"other"}})
	r.Down(kv.WorkerKey{Worker: 0})
	for range 6 {
		d, err := r.Route(t.Context(), Request{Model: "m", Exclude: []uint64{1}})
		if err != nil {
			t.Fatal(err)
		}
		if d.Target.Key.Worker != 2 {
			t.Fatalf("worker %d was chosen, want 2", d.Target.Key.Worker)
		}
	}
	if _, err := r.Route(t.Context(), Request{Model: "m", Exclude: []uint64{1, 2}}); !errors.Is(err, ErrNoWorker) {
		t.Errorf("no worker left: %v, want ErrNoWorker", err)
	}
	if r.Has(func(t *kv.Target) bool { return t.Serves("nothing") }) {
		t.Error("a worker serves an unknown model")
	}
}

func TestUnbookedRequestsCountUntilTheWorkerPublishes(t *testing.T) {
	r := NewTestRouter(t, "standalone", 1)
	w := kv.WorkerKey{}
	r.Publish(w, policy.Published{Waiting: 2, At: time.Now()})
	if _, err := r.Route(t.Context(), Request{Local: []uint64{1}, NumTokens: 8, ChooseOnly: true}); err != nil {
		t.Fatal(err)
	}
	if l := r.Load(w); l.QueueLength() != 3 || l.InFlight != 0 {
		t.Errorf("queue %d, in flight %d; want 3, 0", l.QueueLength(), l.InFlight)
	}
	r.Publish(w, policy.Published{Waiting: 2, At: time.Now()})
	if l := r.Load(w); l.QueueLength() != 2 {
		t.Errorf("queue %d after the message, want 2", l.QueueLength())
	}
}

func TestAStaleLoadIsNotBelieved(t *testing.T) {
	r := NewTestRouter(t, "standalone", 1)
	w := kv.WorkerKey{}
	r.Publish(w, policy.Published{Waiting: 50, At: time.Now().Add(-2 * loadFreshFor)})
	if l := r.Load(w); l.Fresh || l.QueueLength() != 0 {
		t.Errorf("fresh %v, queue %d; want false, 0", l.Fresh, l.QueueLength())
	}
}

// TestBooksAreEvenAfterAnyOrderOfCalls drives bookings at random and compares
// the books with a plain count.
func TestBooksAreEvenAfterAnyOrderOfCalls(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := New(testkit.Defaults[Settings](), Deps{Index: radix.NewTree(), Policy: policytest.MustPolicy(t, "random"), BlockSize: testkit.BlockSize, Seed: rapid.Uint64().Draw(t, "seed")})
		for i := range 3 {
			r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}})
		}
		type open struct {
			booking *Booking
			worker  kv.WorkerKey
			prefill int
		}
		var running []open
		var ended []*Booking
		t.Repeat(map[string]func(*rapid.T){
			"route": func(t *rapid.T) {
				n := rapid.IntRange(1, 40).Draw(t, "tokens")
				d, err := r.Route(t.Context(), Request{Tokens: testkit.Tokens(1, n)})
				if err != nil {
					t.Fatal(err)
				}
				running = append(running, open{d.Booking, d.Target.Key, n - d.OverlapTokens})
			},
			"first token": func(t *rapid.T) {
				if len(running) > 0 {
					i := rapid.IntRange(0, len(running)-1).Draw(t, "which")
					running[i].booking.FirstToken()
					running[i].prefill = 0
				}
			},
			"end": func(t *rapid.T) {
				if len(running) > 0 {
					i := rapid.IntRange(0, len(running)-1).Draw(t, "which")
					running[i].booking.End()
					ended = append(ended, running[i].booking)
					running = append(running[:i], running[i+1:]...)
				}
			},
			"end again": func(t *rapid.T) {
				if len(ended) > 0 {
					b := rapid.SampledFrom(ended).Draw(t, "which")
					b.End()
					b.FirstToken()
				}
			},
			"": func(t *rapid.T) {
				for i := range 3 {
					w := kv.WorkerKey{Worker: uint64(i)}
					inFlight, prefill := 0, 0
					for _, o := range running {
						if o.worker == w {
							inFlight++
							prefill += o.prefill
						}
					}
					if l := r.Load(w); l.InFlight != inFlight || l.PrefillTokens != prefill {
						t.Fatalf("worker %d: in flight %d, prefill %d; want %d, %d", i, l.InFlight, l.PrefillTokens, inFlight, prefill)
					}
				}
			},
		})
	})
}

func TestWithoutIndexOnlyWhatIsCountedIsHashed(t *testing.T) {
	for _, track := range []bool{true, false} {
		knobs, zero := testkit.Defaults[Settings](), 0.0
		knobs.RouterTrackActiveBlocks = track
		rule := testkit.Defaults[policy.Settings]()
		rule.OverlapScoreWeight = &zero
		keys, err := policy.New("kv", rule)
		if err != nil {
			t.Fatal(err)
		}
		index, _ := NewIndex(testkit.Defaults[IndexSettings](), "kv", rule, testkit.BlockSize, time.Now)
		r := New(knobs, Deps{Index: index, Policy: keys, BlockSize: testkit.BlockSize, Seed: 1})
		r.Up(kv.Target{Key: testkit.W0})
		Hold(r, 0, testkit.Tokens(1, 40))
		d, err := r.Route(t.Context(), Request{Tokens: testkit.Tokens(1, 42)})
		if err != nil {
			t.Fatal(err)
		}
		blocks := 0
		if track {
			blocks = 10
		}
		if d.Tokens != 42 || d.Overlap != 0 || len(d.Sequence) != blocks || d.Booking.uncached != 42 {
			t.Errorf("tracking %v: %+v", track, d)
		}
		d.Booking.End()
	}
}

func TestAnApproximateIndexIsToldWhatWasRouted(t *testing.T) {
	config := testkit.Defaults[IndexSettings]()
	config.NoKVEvents = true
	index, assumer := NewIndex(config, "standalone", testkit.Defaults[policy.Settings](), testkit.BlockSize, time.Now)
	r := New(testkit.Defaults[Settings](), Deps{Index: index, Assumer: assumer, Policy: policytest.MustPolicy(t, "standalone"), BlockSize: testkit.BlockSize, Seed: 1})
	r.Up(kv.Target{Key: testkit.W0, TotalBlocks: 20})
	route := func(request Request) Decision {
		t.Helper()
		d, err := r.Route(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		if err := index.(*radix.Approx).Check(); err != nil {
			t.Fatal(err)
		}
		return d
	}
	asked := route(Request{Tokens: testkit.Tokens(1, 42), QueryOnly: true})
	if d := route(Request{Tokens: testkit.Tokens(1, 42)}); asked.Overlap != 0 || d.Overlap != 0 {
		t.Errorf("a dry run left %d blocks", d.Overlap)
	} else {
		d.Booking.Finish(9)
	}
	if n := index.Blocks(testkit.W0); n != 10 || index.(*radix.Approx).Caches[testkit.W0].Pool.Held() != 12 {
		t.Errorf("%d blocks of the prompt, %d with the answer's; want 10 and 12", n, index.(*radix.Approx).Caches[testkit.W0].Pool.Held())
	}
	route(Request{Tokens: testkit.Tokens(100, 16), ChooseOnly: true})
	d := route(Request{Tokens: testkit.Tokens(1, 50)})
	if d.Overlap != 10 || route(Request{Tokens: testkit.Tokens(100, 20), QueryOnly: true}).Overlap != 4 {
		t.Errorf("overlap %d, want 10", d.Overlap)
	}
	route(Request{Tokens: testkit.Tokens(200, 4), ChooseOnly: true})
	d.Booking.Cached(0, kv.TierTokens{}) // all of before was gone
	d.Booking.End()
	if overlap := route(Request{Tokens: testkit.Tokens(200, 8), QueryOnly: true}).Overlap; overlap != 1 {
		t.Errorf("overlap %d with what was routed later, want 1", overlap)
	}
}

// BenchmarkRoute measures a decision from the prompt's tokens on (hash, look up,
// schedule and book), and with the end of the booking (ns/op). Worker i of n
// holds the first (i+1)/n of every prompt and has eight of them in flight.
func BenchmarkRoute(b *testing.B) {
	for _, size := range []struct{ tokens, workers int }{{4_000, 8}, {100_000, 64}} {
		for _, rule := range []string{"standalone", "kv", "work"} {
			for _, index := range []string{"exact", "approximate"} {
				b.Run(fmt.Sprintf("tokens=%d/workers=%d/%s/%s", size.tokens, size.workers, rule, index), func(b *testing.B) {
					config := testkit.Defaults[IndexSettings]()
					config.NoKVEvents = index == "approximate"
					const block, prompts = 64, 16
					index, assumer := NewIndex(config, rule, testkit.Defaults[policy.Settings](), block, time.Now)
					r := New(testkit.Defaults[Settings](), Deps{Index: index, Assumer: assumer, Policy: policytest.MustPolicy(b, rule), BlockSize: block, Seed: 1})
					for w := range size.workers {
						r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(w)}, TotalBlocks: 1 << 15})
					}
					var asked []Request
					for i := range prompts {
						asked = append(asked, Request{Tokens: testkit.Tokens(uint32(i*size.tokens), size.tokens)})
						for w := range size.workers {
							part := asked[i].Tokens[:size.tokens*(w+1)/size.workers]
							if config.NoKVEvents {
								r.decider.assumes.Routed(kv.WorkerKey{Worker: uint64(w)}, kv.HashBlocks(nil, part, block, "", "")).End(0, -1)
							} else {
								Hold(r, uint64(w), part)
							}
						}
					}
					for i := range 8 * size.workers {
						if _, err := r.Book(asked[i%prompts], kv.WorkerKey{Worker: uint64(i % size.workers)}); err != nil {
							b.Fatal(err)
						}
					}
					var deciding time.Duration
					i := 0
					b.ReportAllocs()
					for b.Loop() {
						began := time.Now()
						d, err := r.Route(context.Background(), asked[i%prompts])
						deciding += time.Since(began)
						if err != nil {
							b.Fatal(err)
						}
						d.Booking.End()
						i++
					}
					b.ReportMetric(float64(deciding.Nanoseconds())/float64(i)/1000, "us/decision")
				})
			}
		}
	}
}

func TestSiblingsInFlightCountAsCachedForWork(t *testing.T) {
	for policy, want := range map[string]int{"work": 4000, "kv": 0} {
		r := NewTestRouter(t, policy, 4)
		prompt := testkit.Tokens(1, 4002)
		first, err := r.Route(t.Context(), Request{Tokens: prompt})
		if err != nil {
			t.Fatal(err)
		}
		second, err := r.Route(t.Context(), Request{Tokens: prompt})
		if err != nil {
			t.Fatal(err)
		}
		if second.OverlapTokens != want {
			t.Errorf("%s: overlap with a sibling in flight is %d tokens, want %d", policy, second.OverlapTokens, want)
		}
		if met := first.Target.Key == second.Target.Key; policy == "work" && !met {
			t.Errorf("work sent siblings to %v and %v", first.Target.Key, second.Target.Key)
		}
		first.Booking.End()
		second.Booking.End()
		third, err := r.Route(t.Context(), Request{Tokens: prompt})
		if err != nil {
			t.Fatal(err)
		}
		if third.OverlapTokens != 0 {
			t.Errorf("%s: overlap is %d tokens, but both siblings ended without a store event", policy, third.OverlapTokens)
		}
		third.Booking.End()
	}
}

// TestPromptsOfOnePassCountItOnce: an engine sends the first tokens of a pass together.
func TestPromptsOfOnePassCountItOnce(t *testing.T) {
	rule := &pupil{}
	r := New(testkit.Defaults[Settings](), Deps{Index: radix.NewTree(), Policy: rule, BlockSize: testkit.BlockSize, Seed: 1})
	r.Up(kv.Target{Key: kv.WorkerKey{}})
	now := time.Unix(1000, 0)
	r.now = func() time.Time { return now }
	decodes := MustRoute(t, r, Request{NumTokens: 100})
	decodes.Booking.FirstToken()
	for _, after := range []time.Duration{50 * time.Millisecond, time.Millisecond, 30 * time.Millisecond, 0} {
		now = now.Add(after)
		MustRoute(t, r, Request{NumTokens: 100}).Booking.FirstToken()
	}
	now = now.Add(time.Second)
	decodes.Booking.Finish(20)
	if got := rule.outcomes[0].During; got.Prompts != 4 || got.Passes != 2 {
		t.Errorf("%d prompts in %d passes, want 4 in 2", got.Prompts, got.Passes)
	}
}

// pupil is a policy that keeps what it is told.
type pupil struct {
	policy.RoundRobin
	outcomes []policy.Outcome
}

func (p *pupil) Learn(o policy.Outcome) { p.outcomes = append(p.outcomes, o) }

func TestOutcomesTellWhatAWorkerDidMeanwhile(t *testing.T) {
	rule := &pupil{}
	r := New(testkit.Defaults[Settings](), Deps{Index: radix.NewTree(), Policy: rule, BlockSize: testkit.BlockSize, Seed: 1})
	r.Up(kv.Target{Key: kv.WorkerKey{}})
	now := time.Unix(1000, 0)
	r.now = func() time.Time { return now }
	send := func(tokens int, silent bool) *Booking {
		d, err := r.Route(t.Context(), Request{NumTokens: tokens, AnsweredWhole: silent})
		if err != nil {
			t.Fatal(err)
		}
		return d.Booking
	}
	after := func(ms int) { now = now.Add(time.Duration(ms) * time.Millisecond) }

	a := send(100, false)
	after(50)
	a.FirstToken()
	b := send(300, false)
	after(100)
	b.FirstToken()
	after(100)
	a.Finish(11)
	want := policy.Outcome{
		Prompt: 100, Uncached: 100, Output: 11, Alone: true, FirstToken: 50 * time.Millisecond, Decode: 200 * time.Millisecond,
		Before: policy.Meanwhile{Prompts: 1, Passes: 1, Tokens: 100}, During: policy.Meanwhile{Prompts: 1, Passes: 1, Tokens: 300, Context: (100*0.1 + 400*0.1) / 0.2},
	}
	if len(rule.outcomes) != 1 || rule.outcomes[0] != want {
		t.Fatalf("told %+v, want %+v", rule.outcomes, want)
	}

	a.Finish(11) // a second time
	b.End()      // without an answer
	c := send(100, true)
	after(10)
	c.Finish(5) // nobody heard its first token
	send(100, false).Finish(5)
	if len(rule.outcomes) != 1 {
		t.Errorf("told %+v of requests that say nothing", rule.outcomes[1:])
	}
	if l := r.Load(kv.WorkerKey{}); l.InFlight != 0 || len(l.Prefills) != 0 || l.PrefillTokens != 0 || l.ContextTokens != 0 {
		t.Errorf("left in the books: %+v", l)
	}
}

// TestARouterKnowsThatItHasHadSeveralWorkers holds that a worker that is alone for a while, as
// after the crash of the other, still counts as one of several.
func TestARouterKnowsThatItHasHadSeveralWorkers(t *testing.T) {
	r := NewTestRouter(t, "round-robin", 1)
	r.Up(kv.Target{Key: testkit.W0, Generation: 2}) // itself again
	if r.Several() {
		t.Error("one worker counts as several")
	}
	r.Up(kv.Target{Key: testkit.W1})
	r.Down(testkit.W0)
	if !r.Several() || r.Count() != 1 {
		t.Errorf("several %v, %d up", r.Several(), r.Count())
	}
}
