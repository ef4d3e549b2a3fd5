package policy

import (
	"math"
	"testing"

	"kvrouter/internal/base/kv"
)

// TestCountersShowHowManyAssumedBlocksWereThere: each step sends, answers and then reads the counter.
func TestCountersShowHowManyAssumedBlocksWereThere(t *testing.T) {
	type step struct{ sent, answered, hits int }
	repeat := func(n int, s step) (steps []step) {
		for range n {
			steps = append(steps, s)
		}
		return steps
	}
	for _, c := range []struct {
		name  string
		steps []step
		trust float64
	}{
		{"all were there", repeat(20, step{1000, 1000, 1000}), 1},
		{"half of them", repeat(20, step{1000, 1000, 500}), 0.5},
		{"none", repeat(20, step{1000, 1000, 0}), 0},
		{"other clients add hits", repeat(20, step{1000, 1000, 3000}), 1},
		{"too few to tell", repeat(3, step{1000, 1000, 0}), 1},
		{"no counter", repeat(20, step{1000, 1000, -1}), 1},
		{"counted long before the first token", append([]step{{9000, 0, 9000}, {0, 0, 0}, {0, 9000, 0}}, repeat(5, step{1000, 1000, 1000})...), 1},
		{"counted just after it", append([]step{{9000, 9000, 0}, {9000, 9000, 9000}, {0, 0, 9000}}, repeat(5, step{9000, 9000, 9000})...), 1},
		{"a new process", append(repeat(20, step{1000, 1000, 500}), step{0, 0, math.MinInt}, step{9000, 9000, 9000}), 0.77},
	} {
		tiers, total := new(Tiers), 10_000
		tiers.Count(Transfers{Hits: float64(total)})
		for _, s := range c.steps {
			tiers.Expect(s.sent)
			tiers.Expected(s.answered, true)
			switch {
			case s.hits == math.MinInt:
				total = 0
				tiers.Count(Transfers{})
			case s.hits < 0:
				tiers.Count(Transfers{Hits: -1})
			default:
				total += s.hits
				tiers.Count(Transfers{Hits: float64(total)})
			}
		}
		if got := tiers.Trust(kv.Device); math.Abs(got-c.trust) > 0.01 {
			t.Errorf("%s: trust %v, want %v", c.name, got, c.trust)
		}
	}
}

func TestAnswersWinOverCounters(t *testing.T) {
	tiers := new(Tiers)
	tiers.Count(Transfers{})
	tiers.Expect(50_000)
	tiers.Expected(50_000, true)
	tiers.Count(Transfers{Hits: 0})
	if got := tiers.Trust(kv.Device); got != 0 || !tiers.Asked(kv.Device) {
		t.Fatalf("by the counter: trust %v", got)
	}
	tiers.Assumed(1)
	tiers.Expect(50_000)
	tiers.Expected(50_000, true)
	tiers.Count(Transfers{Hits: 0})
	if got := tiers.Trust(kv.Device); got != 1 {
		t.Errorf("an answer had all: trust %v", got)
	}
}
