package radix

import (
	"slices"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// TestMixedIndex has the ways in which prompts that were routed to a worker count beside its events.
func TestMixedIndex(t *testing.T) {
	p, other := testkit.Prompt(1, 6), testkit.Prompt(2, 6)
	const bridged = 5 * time.Second // how long the prompts of exact workers count
	type step func(x Index, a Assumer, clock *time.Time)
	apply := func(w kv.WorkerKey, c Change) step {
		return func(x Index, _ Assumer, _ *time.Time) { _, _ = x.Apply(w, &c) }
	}
	store := func(w kv.WorkerKey, local []uint64) step {
		return apply(w, Change{Kind: Stored, Blocks: testkit.Chain(local)})
	}
	assume := func(w kv.WorkerKey, assumed bool) step {
		return func(_ Index, a Assumer, _ *time.Time) { a.Assume(w, assumed) }
	}
	route := func(w kv.WorkerKey, local []uint64, cached int) step {
		return func(_ Index, a Assumer, _ *time.Time) { a.Routed(w, local).End(0, cached) }
	}
	size := func(w kv.WorkerKey, blocks int) step {
		return func(_ Index, a Assumer, _ *time.Time) { a.SetCapacity(w, blocks) }
	}
	wait := func(d time.Duration) step {
		return func(_ Index, _ Assumer, clock *time.Time) { *clock = clock.Add(d) }
	}
	w0, w1 := testkit.W0, testkit.W1
	for name, c := range map[string]struct {
		bridges bool
		steps   []step
		want    []kv.Match
	}{
		"nothing is assumed of exact workers": {steps: []step{route(w0, p, -1)}},
		"a prompt counts at once":             {steps: []step{assume(w0, true), route(w0, p, -1)}, want: []kv.Match{{Worker: w0, Blocks: 6}}},
		"of one worker only":                  {steps: []step{assume(w0, true), route(w0, p, -1), route(w1, p, -1)}, want: []kv.Match{{Worker: w0, Blocks: 6}}},
		"until the worker is exact":           {steps: []step{assume(w0, true), route(w0, p, -1), assume(w0, false)}},
		"which says nothing of another": {steps: []step{assume(w0, true), assume(w1, true), route(w0, p, -1), route(w1, p[:2], -1),
			assume(w0, false)}, want: []kv.Match{{Worker: w1, Blocks: 2}}},
		"what events report stays": {steps: []step{store(w0, p[:2]), assume(w0, true), route(w0, p, -1), assume(w0, false)},
			want: []kv.Match{{Worker: w0, Blocks: 2}}},
		"the prompt that is longer counts": {steps: []step{store(w0, p[:2]), assume(w0, true), route(w0, p[:4], -1)},
			want: []kv.Match{{Worker: w0, Blocks: 4}}},
		"the events that are longer count": {steps: []step{store(w0, p[:5]), assume(w0, true), route(w0, p[:3], -1)},
			want: []kv.Match{{Worker: w0, Blocks: 5}}},
		"both kinds of workers": {steps: []step{store(w0, p[:5]), assume(w1, true), route(w1, p[:3], -1)},
			want: []kv.Match{{Worker: w0, Blocks: 5}, {Worker: w1, Blocks: 3}}},
		"the begin of an event stream empties only what events reported": {steps: []step{store(w0, p), assume(w0, true), route(w0, p[:3], -1),
			apply(w0, Change{Kind: Cleared})}, want: []kv.Match{{Worker: w0, Blocks: 3}}},
		"a reset empties both": {steps: []step{store(w0, p), assume(w0, true), route(w0, p, -1), apply(w0, Change{Kind: DeviceCleared})}},
		"a worker that is forgotten is empty, and exact": {steps: []step{assume(w0, true), route(w0, p, -1),
			apply(w0, Change{Kind: Forgotten}), route(w0, p, -1)}},
		"another that is forgotten is another": {steps: []step{assume(w0, true), route(w0, p, -1), apply(w1, Change{Kind: Forgotten}),
			route(w0, p, -1)}, want: []kv.Match{{Worker: w0, Blocks: 6}}},
		"answers correct what is assumed": {steps: []step{assume(w0, true), route(w0, p, -1), route(w0, other, -1), route(w0, other, 0)}},
		"a cache that is full drops the oldest": {steps: []step{size(w0, 7), assume(w0, true), route(w0, p, -1), route(w0, other, -1)},
			want: []kv.Match{{Worker: w0, Blocks: 1}}},
		"prompts bridge the time until events come": {bridges: true, steps: []step{store(w0, p[:2]), route(w0, p, -1)},
			want: []kv.Match{{Worker: w0, Blocks: 6}}},
		"and no longer": {bridges: true, steps: []step{store(w0, p[:2]), route(w0, p, -1), wait(bridged)}, want: []kv.Match{{Worker: w0, Blocks: 2}}},
		"where events never come they stay": {bridges: true, steps: []step{assume(w0, true), route(w0, p, -1), wait(bridged)},
			want: []kv.Match{{Worker: w0, Blocks: 6}}},
		"the begin of an event stream empties what bridges": {bridges: true, steps: []step{route(w0, p, -1), apply(w0, Change{Kind: Cleared})}},
	} {
		t.Run(name, func(t *testing.T) {
			clock := time.Unix(1000, 0)
			now := func() time.Time { return clock }
			var recent *Approx
			if c.bridges {
				recent = NewApprox(bridged, 1<<20, 0.8, now)
			}
			x, a := NewMixed(NewTree(), NewApprox(time.Hour, 1<<20, 0.8, now), recent)
			for _, do := range c.steps {
				do(x, a, &clock)
			}
			before := kv.Match{Worker: testkit.W2, Blocks: 99}
			got := x.Match(p, len(p), kv.AllParts, []kv.Match{before})
			if !slices.Equal(got[1:], c.want) || got[0] != before {
				t.Errorf("%v, want %v", got[1:], c.want)
			}
			for _, m := range c.want {
				if blocks := x.Blocks(m.Worker); blocks < m.Blocks && !c.bridges {
					t.Errorf("worker %d: %d blocks, of which %d match", m.Worker.Worker, blocks, m.Blocks)
				}
			}
			if err := x.(*mixed).Check(); err != nil {
				t.Error(err)
			}
		})
	}
}
