package main

import (
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
	if n := r.loads.active.len(); n != 0 {
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
