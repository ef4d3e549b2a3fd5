package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
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
			counts := draws(newWork(), query, test.pool.candidates)
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
	p := newWork()
	p.timing.pass, p.timing.token, p.timing.decode, p.timing.context = 10, 0.01, 5, 0.0001
	heard := func(l Load, ago time.Duration) Load { l.FirstToken = testNow.Add(-ago); return l }
	silent := waiting(time.Second, 1000, 1000)
	for i := range silent.Prefills {
		silent.Prefills[i].Silent = true
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
	if counts := draws(newWork(), Query{Now: testNow, BlockSize: 64}, p.candidates); counts[1] != 1000 {
		t.Errorf("chosen %v times, want always the idle one", counts)
	}
}

// workAlone is work that does not count blocks of requests in flight as cached.
type workAlone struct{ work *work }

func (workAlone) Traits() Traits    { return Traits{} }
func (p workAlone) Learn(o Outcome) { p.work.Learn(o) }
func (p workAlone) Choose(q Query, candidates []Candidate, random *rand.Rand) int {
	return p.work.Choose(q, candidates, random)
}

// workUntaught is work with an engine's timing that is three times as fast as
// the true one in prefill, and never learned.
type workUntaught struct{ *work }

func (p workUntaught) Learn(o Outcome) {
	timing := newEngineTiming()
	timing.token, timing.pass = timing.token/3, timing.pass/3
	p.work.timing = timing
	p.work.learnUsual(o)
}

// compareWithTuned runs both traces at all loads with the policies and with
// Dynamo's rule at its best knobs, and returns for each the geometric means of
// the ratios (TTFT, ITL, end to end, makespan) and the worst of all ratios.
func compareWithTuned(t *testing.T, policies []func() Policy, change func(*Simulation)) (means [][4]float64, worst []float64) {
	traces := loadTraces(t)
	means, worst = make([][4]float64, len(policies)), make([]float64, len(policies))
	tuned := DefaultPolicyKnobs()
	tuned.PrefillLoadScale, tuned.OverlapScoreCredit = 8, 2
	for _, row := range kvTunedRows {
		s := simulation(traces[row.trace], "kv", row.load)
		s.Knobs = tuned
		if change != nil {
			change(&s)
		}
		base := mustRun(t, s)
		for p, policy := range policies {
			run := newSimulator(s, policy())
			if err := run.loop(); err != nil {
				t.Fatal(err)
			}
			got := run.report()
			for i, ratio := range []float64{
				got.TTFT.Mean / base.TTFT.Mean, got.ITL.Mean / base.ITL.Mean,
				got.EndToEnd.Mean / base.EndToEnd.Mean, got.MakespanS / base.MakespanS,
			} {
				means[p][i] += math.Log(ratio) / float64(len(kvTunedRows))
				worst[p] = max(worst[p], ratio)
			}
		}
	}
	for p := range means {
		for i := range means[p] {
			means[p][i] = math.Exp(means[p][i])
		}
	}
	return means, worst
}

// TestWorkBeatsDynamosBestKnobs holds what was reached: no mean is more than 1 %
// worse on any trace and load, and together they are better.
func TestWorkBeatsDynamosBestKnobs(t *testing.T) {
	if testing.Short() || raceDetector {
		t.Skip("20 runs")
	}
	means, worsts := compareWithTuned(t, []func() Policy{func() Policy { return newWork() }}, nil)
	mean, worst := means[0], worsts[0]
	if worst > 1.02 || mean[0] > 0.972 || mean[2] > 0.953 {
		t.Errorf("TTFT %.4f, end to end %.4f, worst %.4f of Dynamo's best; want at most 0.972, 0.953, 1.02", mean[0], mean[2], worst)
	}
}

// TestWorkAblation prints the figures with each term left out, with older events
// and with other numbers of workers, the load scaled along, for the README:
// KVROUTER_ABLATION=1 go test -v -run WorkAblation .
func TestWorkAblation(t *testing.T) {
	if os.Getenv("KVROUTER_ABLATION") == "" {
		t.Skip("set KVROUTER_ABLATION=1 to print the table")
	}
	names := []string{"nothing", "coming passes", "pushed", "later", "queued", "decode", "others", "count"}
	var policies []func() Policy
	for skip := range names {
		policies = append(policies, func() Policy { p := newWork(); p.skip = workTerm(skip); return p })
	}
	names = append(names, "siblings", "learned timing")
	policies = append(policies, func() Policy { return workAlone{newWork()} }, func() Policy { return workUntaught{newWork()} })
	table := func(title string, n int, change func(*Simulation)) {
		means, worst := compareWithTuned(t, policies[:n], change)
		for i, mean := range means {
			fmt.Printf("| %s | %s | %.3f | %.3f | %.3f | %.3f | %.3f |\n", title, names[i], mean[0], mean[1], mean[2], mean[3], worst[i])
		}
	}
	workers := func(n int) func(*Simulation) {
		return func(s *Simulation) {
			s.Concurrency, s.Speedup, s.Workers = s.Concurrency*n/8, s.Speedup*float64(n)/8, n
		}
	}
	table("8 workers", len(policies), nil)
	table("event lag 50 ms", 1, func(s *Simulation) { s.EventLag = 50 * time.Millisecond })
	table("4 workers", 1, workers(4))
	table("32 workers", 1, workers(32))
}
