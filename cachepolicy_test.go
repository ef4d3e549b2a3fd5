package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// queue is the load that the policies of cachepolicy.go look at.
func queue(inFlight int) Load { return Load{InFlight: inFlight} }

// cachePolicy is a policy with changed knobs.
func cachePolicy(t testing.TB, name string, change func(*CacheKnobs)) Policy {
	t.Helper()
	knobs := DefaultPolicyKnobs()
	if change != nil {
		change(&knobs.CacheKnobs)
	}
	policy, err := NewPolicyWith(name, knobs)
	if err != nil {
		t.Fatal(err)
	}
	return policy
}

func TestCachePoliciesFollowTheirRules(t *testing.T) {
	query := Query{Tokens: 640, BlockSize: 64} // 10 blocks
	threshold := func(share float64) func(*CacheKnobs) {
		return func(k *CacheKnobs) { k.CacheThreshold = share }
	}
	deviations := func(k float64) func(*CacheKnobs) { return func(c *CacheKnobs) { c.VarianceK = k } }
	gate := func(abs, rel float64) func(*CacheKnobs) {
		return func(k *CacheKnobs) { k.BalanceAbsThreshold, k.BalanceRelThreshold, k.VarianceK = abs, rel, 100 }
	}
	for _, test := range []struct {
		name   string
		policy string
		change func(*CacheKnobs)
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

// cacheRouter is a router with workers, a prefix source and a clock.
func cacheRouter(t testing.TB, policy, source string, workers int) (*Router, *standingClock) {
	t.Helper()
	clock := new(standingClock)
	config := DefaultIndexConfig()
	config.PrefixSource = source
	r := NewRouter(NewIndex(config, policy, DefaultPolicyKnobs(), testBlock, clock.now), mustPolicy(t, policy), testBlock, 1)
	r.now = clock.now
	for i := range workers {
		r.Up(Target{Key: WorkerKey{Worker: uint64(i)}})
	}
	return r, clock
}

// bothSources runs a test for both policies and both sources.
func bothSources(t *testing.T, run func(t *testing.T, policy, source string)) {
	for _, policy := range []string{"cache-threshold", "variance"} {
		for _, source := range []string{PrefixApprox, PrefixEvents} {
			t.Run(policy+"/"+source, func(t *testing.T) { run(t, policy, source) })
		}
	}
}

// TestHotSpotSpreads is the failure of vllm-project/router issue 179: 480
// requests with one prefix, all on one engine.
func TestHotSpotSpreads(t *testing.T) {
	bothSources(t, func(t *testing.T, policy, source string) {
		r, _ := cacheRouter(t, policy, source, 8)
		shared := count(1, 30*testBlock)
		for i := range 480 {
			mustRoute(t, r, Request{Tokens: append(shared[:len(shared):len(shared)], uint32(5000+i))})
		}
		most, busy := 0, 0
		for i := range uint64(8) {
			n := r.Load(WorkerKey{Worker: i}).InFlight
			most = max(most, n)
			if n > 0 {
				busy++
			}
		}
		if most > 480/8+32+1 || busy < 5 {
			t.Errorf("%d on one worker, %d workers have any", most, busy)
		}
	})
}

// TestConcurrentTwinsMeet is the reason for speculation: the first one's answer
// need not have come, nor its events.
func TestConcurrentTwinsMeet(t *testing.T) {
	for _, source := range []string{PrefixApprox, PrefixEvents} {
		r, _ := cacheRouter(t, "cache-threshold", source, 8)
		for i := range uint32(20) {
			request := Request{Tokens: count(1000*i, 20*testBlock)}
			first := mustRoute(t, r, request).Target.Key
			if twin := mustRoute(t, r, request).Target.Key; twin != first {
				t.Errorf("%s: twins on %v and %v", source, first, twin)
			}
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

// TestDeathSpiral is the failure of sgl-project/sglang issues 14305 and 15473: a
// worker that fails at once looks idle and gets everything.
func TestDeathSpiral(t *testing.T) {
	share := func(t *testing.T, policy, source string) int {
		r, clock := cacheRouter(t, policy, source, 4)
		var running []*Booking
		failed := 0
		for i := range uint32(400) {
			if i%100 == 99 {
				clock.advance(time.Second)
			}
			tokens := count(5000*(i%5), 20*testBlock) // one of five prefixes that are more than half of it
			d := mustRoute(t, r, Request{Tokens: append(tokens, count(100_000+100*i, 5*testBlock)...)})
			if d.Target.Key.Worker == 0 {
				d.Booking.Fail()
				failed++
				continue
			}
			if running = append(running, d.Booking); len(running) > 30 {
				running[0].Finish(10)
				running = running[1:]
			}
		}
		if n := r.Index().Blocks(w0); n > 0 {
			t.Errorf("%d blocks count as cached on the worker that fails", n)
		}
		return failed
	}
	bothSources(t, func(t *testing.T, policy, source string) {
		if failed := share(t, policy, source); failed > 60 {
			t.Errorf("%d of 400 requests went to the worker that fails, its share would be 100", failed)
		}
	})
	if failed := share(t, "least-loaded", ""); failed < 300 {
		t.Errorf("least-loaded, which does not count failures, sent it only %d: this test shows nothing", failed)
	}
}

func TestFailuresAreForgotten(t *testing.T) {
	p := newCacheRouting(defaultCacheKnobs())
	candidates := new(pool).add(0, queue(0)).add(0, queue(3)).candidates
	now := time.Unix(1000, 0)
	for range 8 {
		p.Judge(Feedback{Worker: w0, Now: now, Ending: Failed})
		p.Judge(Feedback{Worker: w1, Now: now, Ending: Finished})
		p.Judge(Feedback{Worker: w1, Now: now, Ending: Abandoned})
	}
	for _, step := range []struct {
		after time.Duration
		want  float64
	}{{0, 8}, {10 * time.Second, 4}, {30 * time.Second, 1}} {
		if p.measure(now.Add(step.after), candidates); p.queues[0] != step.want || p.queues[1] != 3 {
			t.Errorf("queues %v after %v, want %v and 3", p.queues, step.after, step.want)
		}
	}
	p.Judge(Feedback{Worker: w2, Now: now.Add(time.Hour), Ending: Failed})
	if len(p.failed) != 1 {
		t.Errorf("%d workers are remembered, want 1", len(p.failed))
	}
}

func TestCacheFlagsAreChecked(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"--policy cache-threshold", ""},
		{"--policy variance --prefix-source approx --max-tree-size 1000 --eviction-interval 0.5 --no-cache-correction", ""},
		{"--policy variance --no-kv-events --prefix-source approx", ""},
		{"--policy cache-threshold --prefix-source events --router-predicted-ttl-secs 5", ""},
		{"--policy cache-threshold --cache-threshold 1.5", "--cache-threshold 1.5: give a share"},
		{"--policy cache-threshold --cache-threshold NaN", "--cache-threshold NaN: give a share"},
		{"--policy variance --variance-k=-1", "--variance-k -1: give a number"},
		{"--policy variance --balance-abs-threshold=-1", "--balance-abs-threshold -1"},
		{"--policy variance --balance-rel-threshold Inf", "--balance-rel-threshold"},
		{"--policy variance --prefix-source tree", "--prefix-source tree: give events or approx"},
		{"--policy kv --prefix-source approx", "goes with --policy cache-threshold or variance"},
		{"--policy variance --no-kv-events --prefix-source events", "exclude each other"},
		{"--policy variance --router-predicted-ttl-secs 5 --prefix-source approx", "all is predicted"},
		{"--policy variance --no-kv-events --router-predicted-ttl-secs 5", "all is predicted"},
		{"--policy variance --max-tree-size 0", "--max-tree-size 0: give 1 to"},
		{"--policy variance --eviction-interval 0", "--eviction-interval 0: give more than 0"},
	} {
		_, _, err := ParseConfig(append([]string{"--engine=mocker"}, strings.Fields(test.args)...))
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.args, err, test.want)
		}
	}
	if _, _, err := ParseConfig(strings.Fields("simulate --trace t --concurrency 1 --policy round-robin,variance --prefix-source approx")); err != nil {
		t.Error(err)
	}
}

func TestThePrefixSourceDecidesWhetherEventsAreFollowed(t *testing.T) {
	for _, test := range []struct {
		policy, source string
		noEvents       bool
		trees, follows bool
	}{
		{"cache-threshold", "", false, false, true},
		{"cache-threshold", PrefixEvents, false, false, true},
		{"variance", PrefixApprox, false, true, false},
		{"variance", "", true, true, false},
		{"variance", PrefixApprox, true, true, false},
		{"kv", PrefixApprox, false, false, true}, // beside one of the two in a simulation
	} {
		config := Config{Policy: test.policy, PolicyKnobs: DefaultPolicyKnobs(), IndexConfig: DefaultIndexConfig()}
		config.PrefixSource, config.NoKVEvents = test.source, test.noEvents
		config.MaxTreeSize = 1000
		trees, is := NewIndex(config.IndexConfig, config.Policy, config.PolicyKnobs, 64, time.Now).(*PrefixTrees)
		if is != test.trees || config.KVEvents() != test.follows {
			t.Errorf("%+v: trees %v, follows %v", test, is, config.KVEvents())
		}
		if !is {
			continue
		}
		if blocks, every := trees.Limits(); blocks != 15 || every != time.Minute {
			t.Errorf("trees of %d blocks, evicted every %v", blocks, every)
		}
	}
}

// TestNoWorkerStaysIdle is about a block that all prompts share: a worker that
// missed it at the start would never match any.
func TestNoWorkerStaysIdle(t *testing.T) {
	requests := loadTraces(t)["conversation"][:1000]
	bothSources(t, func(t *testing.T, policy, source string) {
		s := simulation(requests, policy, 64)
		s.Index.PrefixSource = source
		for _, w := range mustRun(t, s).Balance {
			if w.Requests < 1000/8/2 {
				t.Errorf("worker %d got %d of 1000 requests", w.Worker, w.Requests)
			}
		}
	})
}

// sharedPrompts is the shape of the benchmark of SGLang's pull request: long
// system prompts, several turns. Round robin would need the memory of eight
// workers in each.
func sharedPrompts(t testing.TB, conversations, blocks int) Simulation {
	t.Helper()
	engine := DefaultSimConfig()
	engine.Blocks = blocks
	requests, err := SyntheticChat(SyntheticSettings{
		Conversations: conversations, Turns: 5, Groups: 128, PrefixTokens: 6000, UserTokens: 128, OutputTokens: 50,
	}, 1, engine.Blocks*engine.BlockSize)
	if err != nil {
		t.Fatal(err)
	}
	return Simulation{Requests: requests, Policy: "round-robin", Knobs: DefaultPolicyKnobs(), Index: DefaultIndexConfig(), Workers: 8, Engine: engine, Concurrency: 128, Seed: 1}
}

func TestSharedSystemPromptsAreFoundTwiceAsOften(t *testing.T) {
	s := sharedPrompts(t, 800, 3072)
	baseline := mustRun(t, s)
	bothSources(t, func(t *testing.T, policy, source string) {
		s := s
		s.Policy, s.Index.PrefixSource = policy, source
		r := mustRun(t, s)
		t.Logf("reuse %.3f, %.0f tokens/s; round robin %.3f, %.0f", r.Reuse, r.OutputPerSec, baseline.Reuse, baseline.OutputPerSec)
		if r.Reuse < 2*baseline.Reuse || r.OutputPerSec < 1.3*baseline.OutputPerSec {
			t.Errorf("reuse %.3f, %.0f tokens/s; round robin %.3f, %.0f", r.Reuse, r.OutputPerSec, baseline.Reuse, baseline.OutputPerSec)
		}
	})
}

// TestCorrectionHalvesThePredictionsError has caches that are too small for the
// prefixes alone.
func TestCorrectionHalvesThePredictionsError(t *testing.T) {
	for _, blocks := range []int{1024, 768, 1536} {
		if blocks != 1024 && (testing.Short() || raceDetector) {
			continue
		}
		for _, policy := range []string{"cache-threshold", "variance"} {
			t.Run(fmt.Sprintf("%s/%d", policy, blocks), func(t *testing.T) {
				s := sharedPrompts(t, 800, blocks)
				s.Policy, s.Index.PrefixSource = policy, PrefixApprox
				s.Concurrency = 64
				on := mustRun(t, s)
				s.Index.CacheCorrection = false
				off := mustRun(t, s)
				t.Logf("mean error %.0f tokens, without correction %.0f; reuse %.3f, %.3f", on.PredictionError, off.PredictionError, on.Reuse, off.Reuse)
				if on.PredictionError > off.PredictionError/2 {
					t.Errorf("mean error %.0f tokens, without correction %.0f", on.PredictionError, off.PredictionError)
				}
			})
		}
	}
}
