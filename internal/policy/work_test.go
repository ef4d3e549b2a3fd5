package policy

import (
	"math"
	"testing"
	"time"
)

// waiting is a load of prompts of so many uncached tokens that were sent at once,
// ago before testNow.
func waiting(ago time.Duration, tokens ...int) Load {
	l := Load{InFlight: len(tokens)}
	for _, n := range tokens {
		l.PrefillTokens += n
		l.Prefills = append(l.Prefills, Prefill{Tokens: n, Sent: testNow.Add(-ago)})
	}
	return l
}

var testNow = time.Unix(1_000_000, 0)

func TestWorkWeighsWaitsAgainstEachOther(t *testing.T) {
	query := Query{Now: testNow, Tokens: 6400, BlockSize: 64}
	tests := []struct {
		name string
		pool *pool
		want int // -1: a tie of all
	}{
		{"equal workers tie", new(pool).add(0, Load{}).add(0, Load{}), -1},
		{"the longer prefix wins among idle workers", new(pool).add(10, Load{}).add(50, Load{}), 1},
		{"own tokens cost more than queued ones", new(pool).add(50, waiting(0, 3200)).add(0, Load{}), 0},
		{"a queue of several prompts outweighs a prefix", new(pool).add(50, waiting(0, 9000, 9000, 9000, 9000)).add(0, Load{}), 1},
		{"the shorter queue wins without a prefix", new(pool).add(0, waiting(0, 640)).add(0, Load{}), 1},
		{"the queue that is nearly done wins", new(pool).add(0, waiting(0, 6400)).add(0, waiting(100*time.Millisecond, 6400)), 1},
		{"less context to decode wins", new(pool).add(0, Load{ContextTokens: 90000}).add(0, Load{ContextTokens: 80000}), 1},
		{"fewer requests to delay win", new(pool).add(0, Load{ContextTokens: 9000, InFlight: 9}).add(0, Load{ContextTokens: 9000, InFlight: 2}), 1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			counts := draws(NewWork(), query, test.pool.candidates)
			if test.want >= 0 && counts[test.want] != 1000 {
				t.Errorf("chosen %v times, want always candidate %d", counts, test.want)
			}
			if test.want < 0 && (counts[0] < 400 || counts[0] > 600) {
				t.Errorf("chosen %v times, want a tie", counts)
			}
		})
	}
}

func TestWorkPlaysComingPassesThrough(t *testing.T) {
	p := NewWork()
	p.Timing.Pass, p.Timing.Token, p.Timing.decode, p.Timing.context = 10, 0.01, 5, 0.0001
	heard := func(l Load, ago time.Duration) Load { l.FirstToken = testNow.Add(-ago); return l }
	silent := waiting(time.Second, 1000, 1000)
	for i := range silent.Prefills {
		silent.Prefills[i].AnsweredWhole = true
	}
	for _, test := range []struct {
		name          string
		load          Load
		uncached      int
		first, pushed float64 // ms
	}{
		{"an idle worker begins at once", Load{}, 1000, 20, 0},
		{"a cached prompt still takes a pass", Load{}, 1, 10.01, 0},
		{"a long prompt takes several passes", Load{}, 8192 + 1000, 91.92 + 20, 0},
		{"a decoding worker ends its pass first, and decodes on", Load{ContextTokens: 10000}, 1000, 3 + 20 + 6, 0},
		{"prompts sent at one time share a pass, and end with it", waiting(0, 1000), 1000, 30, 10},
		{"a pass that runs is not joined", waiting(5*time.Millisecond, 1000), 1000, 15 + 20, 0},
		{"the rest of a pass is filled up", waiting(0, 8000), 1000, 91.92 + 10 + 8.08, 1.92},
		{"a pass began with the last first token", heard(waiting(time.Second, 1000), 5*time.Millisecond), 1000, 15 + 20, 0},
		{"a late first token is expected any moment", waiting(time.Second, 1000), 1000, 20, 0},
		{"nobody waits for tokens that nobody tells of", silent, 1000, 20, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			first, pushed := p.coming(testNow, &test.load, test.uncached)
			if math.Abs(first-test.first) > 1e-3 || math.Abs(pushed-test.pushed) > 1e-3 {
				t.Errorf("first token in %.3f ms, %.3f ms pushed; want %.3f and %.3f", first, pushed, test.first, test.pushed)
			}
		})
	}
}

func TestWorkRoutesUnknownPromptsByLoad(t *testing.T) {
	p := new(pool).add(0, waiting(0, 900)).add(0, Load{})
	if counts := draws(NewWork(), Query{Now: testNow, BlockSize: 64}, p.candidates); counts[1] != 1000 {
		t.Errorf("chosen %v times, want always the idle one", counts)
	}
}
