package policy

import (
	"math/rand/v2"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// kvLoad is the load that policy kv looks at: uncached tokens queued, blocks in
// use and requests in flight.
func kvLoad(prefill, active, inFlight int) Load {
	return Load{PrefillTokens: prefill, ActiveBlocks: active, InFlight: inFlight}
}

func TestKVFollowsDynamosFormula(t *testing.T) {
	query := Query{Tokens: 640, BlockSize: 64} // 10 blocks
	knobs := func(change func(*Settings)) Settings {
		k := testkit.Defaults[Settings]()
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
	lower := func(p *pool, overlap int, blocks kv.LowerBlocks) *pool {
		return add(p, overlap, 10, kvLoad(0, 0, 0)).lower(blocks, broken(20, blocks)) // what came of them does not count
	}
	tests := []struct {
		name  string
		knobs Settings
		pool  *pool
		want  int // -1: a tie of all
	}{
		{"four blocks in host memory are worth three on the device", knobs(nil), add(lower(new(pool), 0, kv.LowerBlocks{Host: 4}), 3, 10, kvLoad(0, 0, 0)), -1},
		{"four blocks on disk are worth one", knobs(nil), add(lower(new(pool), 0, kv.LowerBlocks{Disk: 4}), 1, 10, kvLoad(0, 0, 0)), -1},
		{"a store counts like a disk", knobs(nil), lower(lower(new(pool), 2, kv.LowerBlocks{External: 4}), 2, kv.LowerBlocks{Disk: 3, External: 1}), -1},
		{"lower tiers add to the device", knobs(nil), lower(lower(new(pool), 2, kv.LowerBlocks{Host: 2, Disk: 3}), 2, kv.LowerBlocks{Host: 2, Disk: 2}), 0},
		{"their weights are settings", knobs(func(k *Settings) { k.RouterHostCacheHitWeight, k.RouterDiskCacheHitWeight = 0.2, 1 }), lower(lower(new(pool), 0, kv.LowerBlocks{Host: 8}), 0, kv.LowerBlocks{Disk: 2}), 1},
		{"the credit of the device is not theirs", knobs(func(k *Settings) { k.OverlapScoreCredit = 0 }), lower(add(new(pool), 9, 10, kvLoad(0, 0, 0)), 0, kv.LowerBlocks{Host: 1}), 1},
		{"cached blocks are not computed", knobs(nil), add(add(new(pool), 3, 10, kvLoad(0, 0, 0)), 4, 10, kvLoad(0, 0, 0)), 1},
		{"queued prompt tokens count like the prompt's own", knobs(nil), add(add(new(pool), 4, 10, kvLoad(320, 0, 0)), 0, 10, kvLoad(0, 0, 0)), 1},
		{"a block in use counts like one to compute", knobs(nil), add(add(new(pool), 4, 10, kvLoad(0, 4, 0)), 0, 10, kvLoad(0, 0, 0)), -1},
		{"a block that others use already counts once", knobs(nil), add(add(new(pool), 0, 7, kvLoad(0, 12, 0)), 0, 10, kvLoad(0, 10, 0)), 0},
		{"requests in flight count only if asked", knobs(nil), add(add(new(pool), 0, 10, kvLoad(0, 0, 9)), 0, 10, kvLoad(0, 0, 0)), -1},
		{"requests in flight count as blocks", knobs(func(k *Settings) { k.DecodeActiveRequestWeight = 2 }), add(add(new(pool), 5, 10, kvLoad(0, 0, 3)), 0, 10, kvLoad(0, 0, 0)), 1},
		{"prompt work can weigh more than blocks in use", knobs(func(k *Settings) { k.PrefillLoadScale = 8 }), add(add(new(pool), 2, 10, kvLoad(0, 15, 0)), 0, 10, kvLoad(0, 0, 0)), 0},
		{"a credit above 1 outweighs a queue", knobs(func(k *Settings) { k.OverlapScoreCredit = 2 }), add(add(new(pool), 4, 10, kvLoad(448, 0, 0)), 0, 10, kvLoad(0, 0, 0)), 0},
		{"the credit never makes the work negative", knobs(func(k *Settings) { k.OverlapScoreCredit = 4 }), add(add(new(pool), 3, 10, kvLoad(0, 1, 0)), 9, 10, kvLoad(0, 2, 0)), 0},
		{"the credit decays with the queue", knobs(func(k *Settings) { k.OverlapScoreCredit, k.OverlapScoreCreditDecay = 2, 9 }), add(add(new(pool), 4, 10, kvLoad(448, 0, 0)), 0, 10, kvLoad(0, 0, 0)), 1},
		{"the older weight overrules the scale", knobs(func(k *Settings) { k.PrefillLoadScale = 8; k.OverlapScoreWeight = &zero }), add(add(new(pool), 9, 10, kvLoad(0, 1, 0)), 0, 10, kvLoad(0, 0, 0)), 1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			policy, err := New("kv", test.knobs)
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
		knobs := testkit.Defaults[Settings]()
		knobs.OverlapScoreCreditDecay = test.decay
		policy, err := New("kv", knobs)
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
	knobs := testkit.Defaults[Settings]()
	knobs.RouterTemperature = 1
	policy, err := New("kv", knobs)
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

func TestKVBreaksTiesByTheSmallestTreeWhereAsked(t *testing.T) {
	worker := func(p *pool, overlap, tree int) *pool {
		p.add(overlap, Load{})
		p.candidates[len(p.candidates)-1].TreeBlocks = tree
		return p
	}
	for _, test := range []struct {
		name        string
		ties        string
		temperature float64
		pool        *pool
		want        []bool // who is drawn at all
	}{
		{"the smallest of those that are equal", tiesSmallestTree, 0, worker(worker(worker(new(pool), 2, 30), 2, 20), 2, 40), []bool{false, true, false}},
		{"cost goes before size", tiesSmallestTree, 0, worker(worker(new(pool), 3, 99), 2, 20), []bool{true, false}},
		{"a smaller tree at a higher cost does not count", tiesSmallestTree, 0, worker(worker(worker(new(pool), 2, 30), 1, 5), 2, 40), []bool{true, false, false}},
		{"equal trees are drawn among", tiesSmallestTree, 0, worker(worker(worker(new(pool), 2, 20), 2, 20), 2, 40), []bool{true, true, false}},
		{"a temperature draws", tiesSmallestTree, 1, worker(worker(new(pool), 2, 20), 2, 40), []bool{true, true}},
		{"at random otherwise", tiesRandom, 0, worker(worker(new(pool), 2, 20), 2, 40), []bool{true, true}},
	} {
		t.Run(test.name, func(t *testing.T) {
			settings := testkit.Defaults[Settings]()
			settings.Ties, settings.RouterTemperature = test.ties, test.temperature
			policy, err := New("kv", settings)
			if err != nil {
				t.Fatal(err)
			}
			for i, n := range draws(policy, Query{Tokens: 640, BlockSize: 64}, test.pool.candidates) {
				if test.want[i] != (n > 300) || !test.want[i] && n > 0 {
					t.Errorf("candidate %d was chosen %d of 1000 times, want it chosen: %v", i, n, test.want[i])
				}
			}
		})
	}
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
				counts[softmaxOfCosts(candidates, test.temperature, random, func(c *Candidate) float64 { return test.costs[c.Overlap] }, nil)]++
			}
			for i, n := range counts {
				if n < test.least[i] || n > test.most[i] {
					t.Errorf("drawn %v times, want %v to %v", counts, test.least, test.most)
				}
			}
		})
	}
}
