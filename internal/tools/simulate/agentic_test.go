package simulate

import (
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"

	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
)

// agenticSettings are the defaults of the flags.
func agenticSettings(t testing.TB) AgenticSettings {
	t.Helper()
	var settings AgenticSettings
	flags, err := kong.New(&settings)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := flags.Parse(nil); err != nil {
		t.Fatal(err)
	}
	return settings
}

func mustAgents(t testing.TB, settings AgenticSettings, seed uint64) []TraceRequest {
	t.Helper()
	requests, err := syntheticAgents(settings, seed, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	return requests
}

// agentRuns takes workflows apart into the calls of each run, which have one
// prefix id.
func agentRuns(requests []TraceRequest) (runs [][]*TraceRequest) {
	for i := range requests {
		for r := &requests[i]; r != nil; r = r.Next {
			if last := len(runs) - 1; last >= 0 && runs[last][0].Hints.ID == r.Hints.ID {
				runs[last] = append(runs[last], r)
			} else {
				runs = append(runs, []*TraceRequest{r})
			}
		}
	}
	return runs
}

func TestCallsOfARunRepeatAllBeforeThem(t *testing.T) {
	ids, prefixes, tasks := map[string]bool{}, map[uint64]bool{}, map[uint64]bool{}
	settings := agenticSettings(t)
	runs := agentRuns(mustAgents(t, settings, 1))
	for _, run := range runs {
		if id := run[0].Hints.ID; ids[id] {
			t.Fatalf("two runs have the id %s", id)
		} else {
			ids[id] = true
		}
		for k, call := range run[1:] {
			before := run[k]
			_, said := before.Blocks(16)
			_, all := call.Blocks(16)
			if call.Prompt <= before.Prompt+before.Output || !slices.Equal(all[:len(said)], said) {
				t.Fatalf("a call of %d tokens does not repeat the %d + %d before", call.Prompt, before.Prompt, before.Output)
			}
		}
		_, blocks := run[0].Blocks(16)
		inside := settings.PrefixTokens / 16
		prefixes[blocks[inside-1].Engine] = true
		if len(blocks) > inside {
			tasks[blocks[inside].Engine] = true
		}
	}
	if len(prefixes) != settings.Kinds || len(tasks) < len(runs)*9/10 {
		t.Errorf("%d prefixes of %d kinds, %d tasks of %d runs", len(prefixes), settings.Kinds, len(tasks), len(runs))
	}
}

func TestSyntheticAgentsHaveTheirSizes(t *testing.T) {
	settings := agenticSettings(t)
	settings.Workflows, settings.Rate = 10_000, 4
	requests := mustAgents(t, settings, 1)
	runs := agentRuns(requests)
	var calls, task, output, result, latency float64
	fewest, most := runs[0], runs[0]
	kinds := map[uint64]float64{}
	for _, run := range runs {
		kinds[run[0].Hashes[0]>>32]++
		task += float64(run[0].Prompt - settings.PrefixTokens)
		for k, call := range run {
			calls++
			output += float64(call.Output)
			latency += call.Think.Seconds()
			if call.Think < settings.MinLatency || call.Think > settings.MaxLatency {
				t.Fatalf("a tool takes %v", call.Think)
			}
			if k > 0 {
				result += float64(call.Prompt - run[k-1].Prompt - run[k-1].Output)
			}
		}
		if len(run) < len(fewest) {
			fewest = run
		}
		if len(run) > len(most) {
			most = run
		}
	}
	within := func(what string, got, want float64) {
		if math.Abs(got/want-1) > 0.03 {
			t.Errorf("%s: mean %v, want %v", what, got, want)
		}
	}
	n := float64(len(runs))
	within("runs", n/float64(len(requests)), 2)
	within("calls", calls/n, 12.5)
	within("task tokens", task/n, 300)
	within("output tokens", output/calls, 0.9*80+0.1*600)
	within("tokens of results", result/(calls-n), 500)
	within("latency, s", latency/calls, (2-0.05)/math.Log(40))
	within("workflows a second", float64(len(requests))/requests[len(requests)-1].Arrival.Seconds(), 4)
	within("share of the most popular kind", kinds[0]/n, 1/(1+1/2.+1/3.+1/4.+1/5.+1/6.))
	if len(fewest) != 5 || len(most) != 20 {
		t.Errorf("runs of %d to %d calls", len(fewest), len(most))
	}
}

func TestSyntheticAgentsFollowFromTheSeed(t *testing.T) {
	settings := agenticSettings(t)
	settings.Workflows = 50
	first := mustAgents(t, settings, 1)
	if !reflect.DeepEqual(first, mustAgents(t, settings, 1)) || reflect.DeepEqual(first, mustAgents(t, settings, 2)) {
		t.Error("workflows do not follow from the seed")
	}
	settings.Rate = 3
	timed := mustAgents(t, settings, 1)
	for i := range timed {
		if i > 0 && timed[i].Arrival < timed[i-1].Arrival {
			t.Fatalf("workflow %d begins before the one before", i)
		}
		timed[i].Arrival = 0
	}
	if !reflect.DeepEqual(first, timed) {
		t.Error("workflows change with their rate")
	}
}

func TestSyntheticAgentsFitTheCache(t *testing.T) {
	settings := agenticSettings(t)
	requests, err := syntheticAgents(settings, 1, 9000)
	if err != nil {
		t.Fatal(err)
	}
	for _, run := range agentRuns(requests) {
		last := run[len(run)-1]
		if last.Prompt+last.Output > 9000 || last.Hints.Total != len(run) {
			t.Fatalf("a run of %d calls, %d by its hints, ends with %d + %d tokens", len(run), last.Hints.Total, last.Prompt, last.Output)
		}
	}
	if _, err := syntheticAgents(settings, 1, 4000); err == nil || !strings.Contains(err.Error(), "--agentic-prefix-tokens") {
		t.Errorf("no call fits: error %v", err)
	}
}

func TestAgentsHintAtTheirRun(t *testing.T) {
	levels := map[hints.Level]int{}
	for _, run := range agentRuns(mustAgents(t, agenticSettings(t), 1)) {
		output, latency := 0.0, 0.0
		for _, call := range run {
			output += float64(call.Output)
			latency += milliseconds(call.Think)
		}
		n := float64(len(run))
		for _, call := range run {
			h := call.Hints
			if h.Total != len(run) || h.Budget != nil || (h.OSL == hints.LevelLow) != (output/n < 256) || (h.IAT == hints.LevelHigh) != (latency/n >= 500) || h.IAT == hints.LevelLow {
				t.Fatalf("%d calls, %.0f tokens and %.0f ms each: hints %+v", len(run), output/n, latency/n, h)
			}
			levels[h.IAT]++
		}
	}
	if len(levels) < 2 {
		t.Errorf("levels of the time between calls: %v", levels)
	}
}

// listener is a policy that keeps the hints that it gets.
type listener struct{ heard []hints.Prefix }

func (l *listener) Traits() policy.Traits { return policy.Traits{} }

func (l *listener) Choose(q policy.Query, candidates []policy.Candidate, _ *rand.Rand) int {
	l.heard = append(l.heard, q.Prefix)
	return 0
}

func TestHintsReachThePolicyUnlessSwitchedOff(t *testing.T) {
	settings := agenticSettings(t)
	settings.Workflows, settings.MinLatency, settings.MaxLatency = 3, time.Millisecond, time.Millisecond
	requests := mustAgents(t, settings, 1)
	for _, unhinted := range []bool{false, true} {
		s := simulation(requests, "random", 0)
		s.Concurrency, s.WithoutHints = 1, unhinted
		policy := &listener{}
		if err := newSimulator(s, policy).loop(); err != nil {
			t.Fatal(err)
		}
		var want []hints.Prefix
		for i := range requests {
			for r := &requests[i]; r != nil; r = r.Next {
				if unhinted {
					want = append(want, hints.Prefix{})
				} else {
					want = append(want, r.Hints)
				}
			}
		}
		if !slices.Equal(policy.heard, want) {
			t.Errorf("unhinted %v: heard %v, want %v", unhinted, policy.heard, want)
		}
	}
}

// TestThompsonGainsFromHints compares mean times to the first token: what the
// hints of agents are worth to policy thompson, and what it costs beside policies
// that need none.
func TestThompsonGainsFromHints(t *testing.T) {
	settings, seeds, loads := agenticSettings(t), []uint64{1, 2, 3}, []float64{64, 256}
	if testing.Short() {
		seeds, loads = seeds[:1], loads[:1]
	}
	for _, load := range loads {
		policies := []string{"thompson", "round-robin", "random", "kv", "work"}
		var sums [5]float64 // ms, by policy
		blind := 0.0        // the same of thompson without hints
		for _, seed := range seeds {
			requests := mustAgents(t, settings, seed)
			ttft := func(policy string, unhinted bool) float64 {
				s := simulation(requests, policy, load)
				s.Seed, s.WithoutHints = seed, unhinted
				return mustRun(t, s).TTFT.Mean
			}
			var means [5]float64
			for i, policy := range policies {
				means[i] = ttft(policy, false)
				sums[i] += means[i]
			}
			blind += ttft("thompson", true)
			if means[0] > 0.8*means[1] || means[0] > 0.8*means[2] {
				t.Errorf("%g workflows, seed %d: %.1f ms with hints, round-robin %.1f, random %.1f", load, seed, means[0], means[1], means[2])
			}
		}
		t.Logf("%g workflows: %.3f times the mean TTFT of round-robin, %.3f of random, %.3f of kv, %.3f of work; without hints %.3f of random",
			load, sums[0]/sums[1], sums[0]/sums[2], sums[0]/sums[3], sums[0]/sums[4], blind/sums[2])
		if blind > sums[2] {
			t.Errorf("%g workflows: without hints mean TTFT is %.3f times that of random", load, blind/sums[2])
		}
	}
}
