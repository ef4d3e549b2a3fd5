package main

import (
	"errors"
	"math/rand/v2"
	"testing"
)

// kvLoad is the load that policy kv looks at: uncached tokens queued, blocks in
// use and requests in flight.
func kvLoad(prefill, active, inFlight int) Load {
	return Load{PrefillTokens: prefill, ActiveBlocks: active, InFlight: inFlight}
}

func TestKVFollowsDynamosFormula(t *testing.T) {
	query := Query{Tokens: 640, BlockSize: 64} // 10 blocks
	knobs := func(change func(*PolicyKnobs)) PolicyKnobs {
		k := DefaultPolicyKnobs()
		if change != nil {
			change(&k)
		}
		return k
	}
	zero := 0.0
	add := func(p *pool, overlap, fresh int, load Load) *pool {
		p.add(overlap, load)
		p.candidates[len(p.candidates)-1].NewBlocks = fresh
		return p
	}
	tests := []struct {
		name  string
		knobs PolicyKnobs
		pool  *pool
		want  int // -1: a tie of all
	}{
		{"cached blocks are not computed", knobs(nil), add(add(new(pool), 3, 10, kvLoad(0, 0, 0)), 4, 10, kvLoad(0, 0, 0)), 1},
		{"queued prompt tokens count like the prompt's own", knobs(nil), add(add(new(pool), 4, 10, kvLoad(320, 0, 0)), 0, 10, kvLoad(0, 0, 0)), 1},
		{"a block in use counts like one to compute", knobs(nil), add(add(new(pool), 4, 10, kvLoad(0, 4, 0)), 0, 10, kvLoad(0, 0, 0)), -1},
		{"a block that others use already counts once", knobs(nil), add(add(new(pool), 0, 7, kvLoad(0, 12, 0)), 0, 10, kvLoad(0, 10, 0)), 0},
		{"requests in flight count only if asked", knobs(nil), add(add(new(pool), 0, 10, kvLoad(0, 0, 9)), 0, 10, kvLoad(0, 0, 0)), -1},
		{"requests in flight count as blocks", knobs(func(k *PolicyKnobs) { k.DecodeActiveRequestWeight = 2 }), add(add(new(pool), 5, 10, kvLoad(0, 0, 3)), 0, 10, kvLoad(0, 0, 0)), 1},
		{"prompt work can weigh more than blocks in use", knobs(func(k *PolicyKnobs) { k.PrefillLoadScale = 8 }), add(add(new(pool), 2, 10, kvLoad(0, 15, 0)), 0, 10, kvLoad(0, 0, 0)), 0},
		{"a credit above 1 outweighs a queue", knobs(func(k *PolicyKnobs) { k.OverlapScoreCredit = 2 }), add(add(new(pool), 4, 10, kvLoad(448, 0, 0)), 0, 10, kvLoad(0, 0, 0)), 0},
		{"the credit never makes the work negative", knobs(func(k *PolicyKnobs) { k.OverlapScoreCredit = 4 }), add(add(new(pool), 3, 10, kvLoad(0, 1, 0)), 9, 10, kvLoad(0, 2, 0)), 0},
		{"the credit decays with the queue", knobs(func(k *PolicyKnobs) { k.OverlapScoreCredit, k.OverlapScoreCreditDecay = 2, 9 }), add(add(new(pool), 4, 10, kvLoad(448, 0, 0)), 0, 10, kvLoad(0, 0, 0)), 1},
		{"the older weight overrules the scale", knobs(func(k *PolicyKnobs) { k.PrefillLoadScale = 8; k.OverlapScoreWeight = &zero }), add(add(new(pool), 9, 10, kvLoad(0, 1, 0)), 0, 10, kvLoad(0, 0, 0)), 1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			policy, err := NewPolicyWith("kv", test.knobs)
			if err != nil {
				t.Fatal(err)
			}
			counts := draws(policy, query, test.pool.candidates)
			if test.want >= 0 && counts[test.want] != 1000 {
				t.Errorf("chosen %v times, want always candidate %d", counts, test.want)
			}
			if test.want < 0 && (counts[0] < 400 || counts[0] > 600) {
				t.Errorf("chosen %v times, want a tie", counts)
			}
		})
	}
}

// TestKVCreditDecaysByWholeBlocksOfThePrompt has choices that Dynamo 1.6.1's
// service made: worker 0 holds 9 blocks of the prompt and has a queue, worker 1
// holds 3 and has none.
func TestKVCreditDecaysByWholeBlocksOfThePrompt(t *testing.T) {
	for _, test := range []struct {
		tokens, queued int
		decay          float64
		want           int
	}{
		{43, 12, 1.6, 0}, {43, 12, 1.73, 0}, {43, 12, 1.81, 0}, {43, 12, 1.9, 1},
		{44, 13, 1.1, 0}, {44, 13, 1.3, 0}, {44, 13, 1.55, 1}, {44, 13, 1.7, 1},
	} {
		knobs := DefaultPolicyKnobs()
		knobs.OverlapScoreCreditDecay = test.decay
		policy, err := NewPolicyWith("kv", knobs)
		if err != nil {
			t.Fatal(err)
		}
		p := new(pool).add(9, kvLoad(test.queued, 3, 1)).add(3, kvLoad(0, 3, 1))
		if counts := draws(policy, Query{Tokens: test.tokens, BlockSize: 4}, p.candidates); counts[test.want] != 1000 {
			t.Errorf("%+v: chosen %v times", test, counts)
		}
	}
}

func TestKVTemperatureDrawsByCost(t *testing.T) {
	knobs := DefaultPolicyKnobs()
	knobs.RouterTemperature = 1
	policy, err := NewPolicyWith("kv", knobs)
	if err != nil {
		t.Fatal(err)
	}
	// Costs 10 and 20 differ by the whole range: e^0 : e^-1 = 731 : 269.
	p := new(pool).add(10, kvLoad(0, 10, 0)).add(0, kvLoad(0, 10, 0))
	if counts := draws(policy, Query{Tokens: 640, BlockSize: 64}, p.candidates); counts[0] < 690 || counts[0] > 770 {
		t.Errorf("chosen %v times, want about 731 and 269", counts)
	}
	if counts := draws(policy, Query{Tokens: 640, BlockSize: 64}, new(pool).add(0, Load{}).add(0, Load{}).candidates); counts[0] < 430 || counts[0] > 570 {
		t.Errorf("equal costs: chosen %v times", counts)
	}
}

func TestActiveBlocksAreSharedAndFreed(t *testing.T) {
	r := newTestRouter(t, "kv", 1)
	w := WorkerKey{}
	route := func(prompt []uint32) *Booking {
		t.Helper()
		d, err := r.Route(t.Context(), Request{Tokens: prompt})
		if err != nil {
			t.Fatal(err)
		}
		return d.Booking
	}
	expect := func(want int) {
		t.Helper()
		if got := r.Load(w).ActiveBlocks; got != want {
			t.Errorf("%d active blocks, want %d", got, want)
		}
	}
	shared := count(1, 4*testBlock)
	a := route(shared)
	expect(4)
	b := route(append(shared[:2*testBlock:2*testBlock], count(99, testBlock)...))
	expect(5)
	a.End()
	expect(3)
	a.End()
	expect(3)
	b.FirstToken()
	expect(3)
	b.End()
	expect(0)
	n := 0
	for _, load := range r.Loads() {
		n += load.PotentialDecodeBlocks
	}
	if n != 0 {
		t.Errorf("%d entries are left", n)
	}
}

func TestTheSearchForActiveBlocksFindsTheirEnd(t *testing.T) {
	sequence := SequenceHashes(nil, []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11})
	w := WorkerKey{Worker: 7}
	for active := range len(sequence) + 1 {
		loads := NewLoads()
		loads.Activate(w, sequence[:active])
		for asked := range len(sequence) + 1 {
			if got, want := loads.Active(w, sequence[:asked]), min(active, asked); got != want {
				t.Errorf("%d of %d active: found %d", active, asked, got)
			}
		}
		if got := loads.Active(WorkerKey{Worker: 8}, sequence); got != 0 {
			t.Errorf("another worker has %d active", got)
		}
	}
}

func TestSchedulerOverridesOfARequest(t *testing.T) {
	number := func(f float64) *float64 { return &f }
	flag := func(b bool) *bool { return &b }
	// Worker 0 holds half the prompt and has as many tokens queued; worker 1 has
	// one block more in use than worker 0.
	for _, test := range []struct {
		name     string
		override *Override
		want     int // -1: either
	}{
		{"none", nil, 0},
		{"an empty one", &Override{}, 0},
		{"a weight of 0 leaves the blocks in use", &Override{OverlapScoreWeight: number(0)}, 0},
		{"no credit", &Override{OverlapScoreCredit: number(0)}, 1},
		{"more credit", &Override{OverlapScoreCredit: number(2)}, 0},
		{"queued tokens weigh nothing", &Override{PrefillLoadScale: number(0)}, 0},
		{"prompts that are not tracked", &Override{TrackPrefillTokens: flag(false)}, 0},
		{"chance", &Override{RouterTemperature: number(1e9)}, -1},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, _ := newClockedRouter(t, 2, DefaultRouterKnobs())
			hold(r, 0, count(1, 40))
			if _, err := r.Book(Request{NumTokens: 40}, WorkerKey{Worker: 0}); err != nil {
				t.Fatal(err)
			}
			b, err := r.Book(Request{Tokens: count(900, 4)}, WorkerKey{Worker: 1})
			if err != nil {
				t.Fatal(err)
			}
			b.FirstToken()
			counts := [2]int{}
			for range 200 {
				d := mustRoute(t, r, Request{Tokens: count(1, 80), Override: test.override, QueryOnly: true})
				counts[d.Target.Key.Worker]++
			}
			if test.want >= 0 && counts[test.want] != 200 {
				t.Errorf("chosen %v times, want always worker %d", counts, test.want)
			}
			if test.want < 0 && (counts[0] < 60 || counts[1] < 60) {
				t.Errorf("chosen %v times, want both", counts)
			}
		})
	}
}

func TestSchedulerAllowedIDs(t *testing.T) {
	r, _ := newClockedRouter(t, 4, DefaultRouterKnobs())
	hold(r, 0, count(1, 40))
	hold(r, 2, count(1, 20))
	for _, test := range []struct {
		allowed []uint64
		want    uint64
	}{{nil, 0}, {[]uint64{2, 3}, 2}, {[]uint64{3}, 3}, {[]uint64{3, 99}, 3}} {
		if d := mustRoute(t, r, Request{Tokens: count(1, 41), Allowed: test.allowed, QueryOnly: true}); d.Target.Key.Worker != test.want {
			t.Errorf("of %v worker %d was chosen, want %d", test.allowed, d.Target.Key.Worker, test.want)
		}
	}
	if _, err := r.Route(t.Context(), Request{Tokens: count(1, 41), Allowed: []uint64{}}); !errors.Is(err, ErrNoWorker) {
		t.Errorf("none allowed: %v, want ErrNoWorker", err)
	}
}

func TestSchedulerQueriesChangeNothing(t *testing.T) {
	r, _ := newClockedRouter(t, 2, DefaultRouterKnobs())
	hold(r, 1, count(1, 8))
	for range 50 {
		d := mustRoute(t, r, Request{ID: "same", Tokens: count(1, 12), QueryOnly: true})
		if d.Target.Key.Worker != 1 || d.EffectivePrefillTokens != 4 || d.PotentialDecodeBlocks != 3 || d.Booking != nil || len(d.Sequence) != 3 {
			t.Fatalf("%+v", d)
		}
	}
	for _, load := range r.Loads() {
		if load != (WorkerLoad{Key: load.Key}) || r.Load(load.Key).Bumped != 0 {
			t.Errorf("a query left %+v", load)
		}
	}
}

func TestSchedulerSwitchesSayWhatIsCounted(t *testing.T) {
	// The loads of one worker with two bookings of 3 equal blocks, 2 of which it
	// holds, and the answer to a third.
	flag := func(b bool) *bool { return &b }
	for _, test := range []struct {
		name                    string
		change                  func(*RouterKnobs)
		override                *Override
		prefill, blocks         int
		withPrefill, withBlocks int // with one more
	}{
		{"all", func(*RouterKnobs) {}, nil, 8, 3, 12, 3},
		{"no active blocks", func(k *RouterKnobs) { k.RouterTrackActiveBlocks = false }, nil, 8, 0, 12, 0},
		{"no prompt tokens", func(k *RouterKnobs) { k.RouterTrackPrefillTokens = false }, nil, 0, 3, 0, 3},
		{"no reuse", func(k *RouterKnobs) { k.RouterAssumeKVReuse = false }, nil, 8, 6, 12, 9},
		{"no reuse by override", func(*RouterKnobs) {}, &Override{AssumeKVReuse: flag(false)}, 8, 6, 12, 9},
		{"reuse by override", func(k *RouterKnobs) { k.RouterAssumeKVReuse = false }, &Override{AssumeKVReuse: flag(true)}, 8, 3, 12, 3},
		{"no prompt tokens by override", func(*RouterKnobs) {}, &Override{TrackPrefillTokens: flag(false)}, 0, 3, 0, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			knobs := DefaultRouterKnobs()
			test.change(&knobs)
			r, _ := newClockedRouter(t, 1, knobs)
			hold(r, 0, count(1, 8))
			request := Request{Tokens: count(1, 12), Override: test.override}
			var bookings []*Booking
			for range 2 {
				bookings = append(bookings, mustRoute(t, r, request).Booking)
			}
			expectLoad(t, r, test.prefill, test.blocks, 2)
			want := WorkerLoad{PotentialPrefillTokens: test.withPrefill, PotentialDecodeBlocks: test.withBlocks, ActiveRequests: 2}
			if got := r.PotentialLoads(request); got[0] != want {
				t.Errorf("with one more %+v, want %+v", got[0], want)
			}
			for _, b := range bookings {
				b.End()
			}
			expectLoad(t, r, 0, 0, 0)
		})
	}
}

func TestKVCountsAPromptThatIsCachedAsAWhole(t *testing.T) {
	// Dynamo takes all of it for saved work; what the engine can use is less.
	r, _ := newClockedRouter(t, 1, DefaultRouterKnobs())
	hold(r, 0, count(1, 8))
	if d := mustRoute(t, r, Request{Tokens: count(1, 8)}); d.EffectivePrefillTokens != 0 || d.OverlapTokens != 4 {
		t.Errorf("%d tokens to compute, %d usable in the cache; want 0 and 4", d.EffectivePrefillTokens, d.OverlapTokens)
	}
	expectLoad(t, r, 0, 2, 1)
}

func TestSchedulerSoftmax(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, test := range []struct {
		name        string
		costs       []float64
		temperature float64
		least, most []int // draws of 1000 for each
	}{
		{"single key", []float64{5}, 1, []int{1000}, []int{1000}},
		{"nearly no temperature takes the lowest", []float64{3, 1, 2}, 0.01, []int{0, 1000, 0}, []int{0, 1000, 0}},
		{"ties are random", []float64{2, 2}, 0.01, []int{430, 430}, []int{570, 570}},
		{"negative logits", []float64{-10, -20}, 1, []int{220, 680}, []int{320, 780}},
		{"a high temperature draws nearly evenly", []float64{0, 1000}, 100, []int{430, 430}, []int{570, 570}},
	} {
		t.Run(test.name, func(t *testing.T) {
			candidates := make([]Candidate, len(test.costs))
			for i := range candidates {
				candidates[i].Overlap = i
			}
			counts := make([]int, len(candidates))
			for range 1000 {
				counts[softmaxOfCosts(candidates, test.temperature, random, func(c *Candidate) float64 { return test.costs[c.Overlap] })]++
			}
			for i, n := range counts {
				if n < test.least[i] || n > test.most[i] {
					t.Errorf("drawn %v times, want %v to %v", counts, test.least, test.most)
				}
			}
		})
	}
}
