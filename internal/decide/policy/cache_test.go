package policy

import (
	"slices"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

// queue is the load that the policies of cache.go look at.
func queue(inFlight int) Load { return Load{InFlight: inFlight} }

// cachePolicy is a policy with changed knobs.
func cachePolicy(t testing.TB, name string, change func(*CacheSettings)) Policy {
	t.Helper()
	knobs := testkit.Defaults[Settings]()
	if change != nil {
		change(&knobs.CacheSettings)
	}
	policy, err := New(name, knobs)
	if err != nil {
		t.Fatal(err)
	}
	return policy
}

func TestCachePoliciesFollowTheirRules(t *testing.T) {
	query := Query{Tokens: 640, BlockSize: 64} // 10 blocks
	threshold := func(share float64) func(*CacheSettings) {
		return func(k *CacheSettings) { k.CacheThreshold = share }
	}
	deviations := func(k float64) func(*CacheSettings) { return func(c *CacheSettings) { c.VarianceK = k } }
	gate := func(abs, rel float64) func(*CacheSettings) {
		return func(k *CacheSettings) { k.BalanceAbsThreshold, k.BalanceRelThreshold, k.VarianceK = abs, rel, 100 }
	}
	for _, test := range []struct {
		name   string
		policy string
		change func(*CacheSettings)
		pool   *pool
		want   []int // any of these
	}{
		{"the longest match wins", "cache-threshold", nil, new(pool).add(6, queue(9)).add(7, queue(20)).add(0, queue(0)), []int{1}},
		{"exactly the threshold is not enough", "cache-threshold", nil, new(pool).add(5, queue(9)).add(0, queue(1)), []int{1}},
		{"one block more is", "cache-threshold", nil, new(pool).add(6, queue(9)).add(0, queue(1)), []int{0}},
		{"a higher threshold", "cache-threshold", threshold(0.8), new(pool).add(8, queue(9)).add(0, queue(1)), []int{1}},
		{"a threshold of 0 takes any match", "cache-threshold", threshold(0), new(pool).add(1, queue(9)).add(0, queue(1)), []int{0}},
		{"but no match is none", "cache-threshold", threshold(0), new(pool).add(0, queue(9)).add(0, queue(1)), []int{1}},
		{"a threshold of 1 never matches", "cache-threshold", threshold(1), new(pool).add(10, queue(9)).add(0, queue(1)), []int{1}},
		{"of equal matches the shorter queue", "cache-threshold", nil, new(pool).add(8, queue(9)).add(8, queue(3)).add(8, queue(3)), []int{1, 2}},
		{"of equal queues without a match any", "cache-threshold", nil, new(pool).add(1, queue(3)).add(0, queue(3)).add(0, queue(4)), []int{0, 1}},

		{"a queue far above the mean gets nothing", "variance", deviations(1), new(pool).add(9, queue(9)).add(6, queue(2)).add(0, queue(1)), []int{1}},
		{"within K deviations the match decides", "variance", nil, new(pool).add(9, queue(9)).add(6, queue(2)).add(0, queue(1)), []int{0}},
		{"nobody else has a match", "variance", deviations(1), new(pool).add(9, queue(9)).add(5, queue(2)).add(0, queue(1)), []int{2}},
		{"the block that all share does not count", "variance", nil, new(pool).add(1, queue(9)).add(1, queue(9)).add(0, queue(0)), []int{2}},
		{"it does with a threshold of 0", "variance", threshold(0), new(pool).add(1, queue(9)).add(1, queue(9)).add(0, queue(0)), []int{0, 1}},
		{"equal queues: nobody is left out", "variance", nil, new(pool).add(6, queue(7)).add(9, queue(7)).add(0, queue(7)), []int{1}},
		{"equal queues and K of 0", "variance", deviations(0), new(pool).add(6, queue(7)).add(9, queue(7)).add(0, queue(7)), []int{1}},
		{"one worker is all there is", "variance", deviations(0), new(pool).add(3, queue(7)), []int{0}},
		{"of equal matches the shorter queue ", "variance", nil, new(pool).add(6, queue(5)).add(6, queue(4)).add(6, queue(4)), []int{1, 2}},

		{"both thresholds exceeded", "cache-threshold", gate(10, 2), new(pool).add(9, queue(31)).add(0, queue(2)).add(0, queue(3)), []int{1}},
		{"not the absolute one", "cache-threshold", gate(20, 2), new(pool).add(9, queue(31)).add(0, queue(2)).add(0, queue(3)), []int{0}},
		{"not the relative one", "cache-threshold", gate(10, 3), new(pool).add(9, queue(31)).add(0, queue(2)).add(0, queue(3)), []int{0}},
		{"the same with variance", "variance", gate(10, 2), new(pool).add(9, queue(31)).add(0, queue(2)).add(0, queue(3)), []int{1}},
		{"switched off", "variance", gate(1e9, 2), new(pool).add(9, queue(3100)).add(0, queue(2)).add(0, queue(3)), []int{0}},
	} {
		t.Run(test.policy+"/"+test.name, func(t *testing.T) {
			for i, n := range draws(cachePolicy(t, test.policy, test.change), query, test.pool.candidates) {
				if wanted := slices.Contains(test.want, i); wanted && n < 900/len(test.want) || !wanted && n > 0 {
					t.Errorf("candidate %d was chosen %d of 1000 times, want one of %v", i, n, test.want)
				}
			}
		})
	}
}

func TestCachePoliciesRouteUnknownPromptsByLoad(t *testing.T) {
	p := new(pool).add(0, queue(3)).add(0, queue(1)).add(0, queue(2))
	for _, name := range []string{"cache-threshold", "variance"} {
		if counts := draws(cachePolicy(t, name, nil), Query{BlockSize: 64}, p.candidates); counts[1] != 1000 {
			t.Errorf("%s: chosen %v times, want always the idle one", name, counts)
		}
	}
}

// TestAffinityIsKeptWhileOnePairIsImbalanced is the failure of sgl-project/sglang
// issue 32195: one busy worker made all requests go by load.
func TestAffinityIsKeptWhileOnePairIsImbalanced(t *testing.T) {
	query := Query{Tokens: 640, BlockSize: 64}
	p := new(pool).add(0, queue(0)).add(0, queue(400)).add(9, queue(20)).add(0, queue(1))
	for _, name := range []string{"cache-threshold", "variance"} {
		if counts := draws(cachePolicy(t, name, nil), query, p.candidates); counts[2] != 1000 {
			t.Errorf("%s: chosen %v times, want always the worker with the prompt", name, counts)
		}
	}
}

func TestFailuresAreForgotten(t *testing.T) {
	p := newCacheRouting(testkit.Defaults[CacheSettings]())
	candidates := new(pool).add(0, queue(0)).add(0, queue(3)).candidates
	now := time.Unix(1000, 0)
	for range 8 {
		p.Judge(Feedback{Worker: testkit.W0, Now: now, Ending: Failed})
		p.Judge(Feedback{Worker: testkit.W1, Now: now, Ending: Finished})
		p.Judge(Feedback{Worker: testkit.W1, Now: now, Ending: Abandoned})
	}
	for _, step := range []struct {
		after time.Duration
		want  float64
	}{{0, 8}, {10 * time.Second, 4}, {30 * time.Second, 1}} {
		if p.measure(now.Add(step.after), candidates); p.queues[0] != step.want || p.queues[1] != 3 {
			t.Errorf("queues %v after %v, want %v and 3", p.queues, step.after, step.want)
		}
	}
	p.Judge(Feedback{Worker: testkit.W2, Now: now.Add(time.Hour), Ending: Failed})
	if len(p.failed) != 1 {
		t.Errorf("%d workers are remembered, want 1", len(p.failed))
	}
}
