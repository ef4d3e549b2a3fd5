package policy

import (
	"cmp"
	"math/rand/v2"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
)

// pool builds candidates 0, 1, ... from loads and overlaps.
type pool struct{ candidates []Candidate }

func (p *pool) add(overlap int, load Load) *pool {
	id := uint64(len(p.candidates))
	p.candidates = append(p.candidates, Candidate{Target: &kv.Target{Key: kv.WorkerKey{Worker: id}}, Overlap: overlap, Load: &load})
	return p
}

// published is a fresh load message.
func published(waiting int, usage float64) Load {
	return Load{Published: Published{Waiting: waiting, KVUsage: usage, At: time.Unix(1, 0)}, Fresh: true}
}

// unnamed returns candidates whose workers have said nothing of themselves.
func unnamed(candidates ...Candidate) []Candidate {
	for i := range candidates {
		candidates[i].Target = &kv.Target{}
		candidates[i].Load = cmp.Or(candidates[i].Load, &Load{})
	}
	return candidates
}

// draws returns how often the policy chooses each candidate in 1,000 calls.
func draws(policy Policy, q Query, candidates []Candidate) []int {
	random := rand.New(rand.NewPCG(1, 2))
	counts := make([]int, len(candidates))
	for range 1000 {
		counts[policy.Choose(q, candidates, random)]++
	}
	return counts
}

func TestStandaloneFollowsTheExamplesFormula(t *testing.T) {
	query := Query{Tokens: 640, BlockSize: 64}
	bumped := func(l Load, n int32) Load { l.Bumped = n; return l }
	tests := []struct {
		name string
		pool *pool
		want int // -1: a tie of all
	}{
		{"the longer prefix wins among idle workers", new(pool).add(2, published(0, 0)).add(5, published(0, 0)), 1},
		{"half the prompt outweighs a nearly full cache", new(pool).add(5, published(0, 0.9)).add(0, published(0, 0)), 0},
		{"the longest queue costs as much as half the prompt", new(pool).add(5, published(4, 0.1)).add(0, published(0, 0)), 1},
		{"queues count relative to the longest", new(pool).add(0, published(100, 0)).add(0, published(99, 0)), 1},
		{"cache usage decides between equals", new(pool).add(1, published(0, 0.5)).add(1, published(0, 0.4)), 1},
		{"requests sent since the last message count as waiting", new(pool).add(0, bumped(published(0, 0), 1)).add(0, published(0, 0)), 1},
		{"a worker that publishes nothing counts by what is in flight", new(pool).add(0, Load{InFlight: 3}).add(0, published(1, 0)), 1},
		{"nobody waiting drops the queue term", new(pool).add(0, published(0, 0)).add(0, published(0, 0)), -1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			counts := draws(standalone{}, query, test.pool.candidates)
			if test.want >= 0 && counts[test.want] != 1000 {
				t.Errorf("chosen %v times, want always candidate %d", counts, test.want)
			}
			if test.want < 0 {
				for i, n := range counts {
					if n < 400 || n > 600 {
						t.Errorf("candidate %d of a tie was chosen %d of 1000 times", i, n)
					}
				}
			}
		})
	}
}

func TestStandaloneRoutesUnknownPromptsByLoad(t *testing.T) {
	p := new(pool).add(0, published(3, 0.2)).add(0, published(0, 0.2))
	if counts := draws(standalone{}, Query{BlockSize: 64}, p.candidates); counts[1] != 1000 {
		t.Errorf("chosen %v times, want always the idle one", counts)
	}
}

func TestLeastLoadedTakesTheFewestInFlight(t *testing.T) {
	p := new(pool).add(9, Load{InFlight: 2}).add(0, Load{InFlight: 1}).add(0, Load{InFlight: 1})
	counts := draws(leastLoaded{}, Query{}, p.candidates)
	if counts[0] != 0 || counts[1] < 400 || counts[2] < 400 {
		t.Errorf("chosen %v times, want a tie of the last two", counts)
	}
}

func TestPowerOfTwoNeverTakesTheBusiest(t *testing.T) {
	p := new(pool).add(0, Load{InFlight: 5}).add(0, Load{InFlight: 1}).add(0, Load{InFlight: 2})
	counts := draws(powerOfTwo{}, Query{}, p.candidates)
	if counts[0] != 0 || counts[1] < 600 || counts[2] < 270 {
		t.Errorf("chosen %v times, want 0, about 667, about 333", counts)
	}
	if got := draws(powerOfTwo{}, Query{}, p.candidates[:1]); got[0] != 1000 {
		t.Errorf("one candidate: %v", got)
	}
}

func TestRoundRobinGoesOnWhenWorkersComeAndGo(t *testing.T) {
	all := new(pool).add(0, Load{}).add(0, Load{}).add(0, Load{}).candidates
	policy := &RoundRobin{}
	var got []uint64
	choose := func(candidates []Candidate) {
		got = append(got, candidates[policy.Choose(Query{}, candidates, nil)].Target.Key.Worker)
	}
	choose(all)
	choose(all)
	choose([]Candidate{all[0], all[2]}) // worker 1 is gone, 2 is next
	choose(all)
	choose([]Candidate{all[2], all[1]}) // not in order
	choose(all)
	want := []uint64{0, 1, 2, 0, 1, 2}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("order %v, want %v", got, want)
		}
	}
}

func TestRandomSpreadsEvenly(t *testing.T) {
	p := new(pool).add(0, Load{InFlight: 9}).add(0, Load{})
	if counts := draws(randomChoice{}, Query{}, p.candidates); counts[0] < 430 || counts[0] > 570 {
		t.Errorf("chosen %v times", counts)
	}
}
