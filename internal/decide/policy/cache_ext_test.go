package policy_test

import (
	"fmt"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/routertest"
	"kvrouter/internal/testkit/simulatetest"
	"kvrouter/internal/tools/simulate"
)

// cacheRouter is a router with workers, a prefix source and a clock.
func cacheRouter(t testing.TB, rule, source string, workers int) (*router.Router, *testkit.StandingClock) {
	t.Helper()
	clock := new(testkit.StandingClock)
	config := testkit.Defaults[router.IndexSettings]()
	config.PrefixSource = source
	knobs := testkit.Defaults[router.Settings]()
	knobs.EjectAfter = 0 // the policies are to do without
	index, assumer := router.NewIndex(config, rule, testkit.Defaults[policy.Settings](), testkit.BlockSize, clock.Now)
	r := router.New(knobs, router.Deps{Index: index, Assumer: assumer, Policy: policytest.MustPolicy(t, rule), BlockSize: testkit.BlockSize, Seed: 1, Now: clock.Now})
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}})
	}
	return r, clock
}

// bothSources runs a test for both policies and both sources.
func bothSources(t *testing.T, run func(t *testing.T, policy, source string)) {
	for _, policy := range []string{"cache-threshold", "variance"} {
		for _, source := range []string{router.PrefixApprox, router.PrefixEvents} {
			t.Run(policy+"/"+source, func(t *testing.T) { run(t, policy, source) })
		}
	}
}

// TestHotSpotSpreads is the failure of vllm-project/router issue 179: 480
// requests with one prefix, all on one engine.
func TestHotSpotSpreads(t *testing.T) {
	bothSources(t, func(t *testing.T, policy, source string) {
		r, _ := cacheRouter(t, policy, source, 8)
		shared := testkit.Tokens(1, 30*testkit.BlockSize)
		for i := range 480 {
			routertest.MustRoute(t, r, router.Request{Tokens: append(shared[:len(shared):len(shared)], uint32(5000+i))})
		}
		most, busy := 0, 0
		for i := range uint64(8) {
			n := r.Load(kv.WorkerKey{Worker: i}).InFlight
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
	for _, source := range []string{router.PrefixApprox, router.PrefixEvents} {
		r, _ := cacheRouter(t, "cache-threshold", source, 8)
		for i := range uint32(20) {
			request := router.Request{Tokens: testkit.Tokens(1000*i, 20*testkit.BlockSize)}
			first := routertest.MustRoute(t, r, request).Target.Key
			if twin := routertest.MustRoute(t, r, request).Target.Key; twin != first {
				t.Errorf("%s: twins on %v and %v", source, first, twin)
			}
		}
	}
}

// TestDeathSpiral is the failure of sgl-project/sglang issues 14305 and 15473: a
// worker that fails at once looks idle and gets everything.
func TestDeathSpiral(t *testing.T) {
	share := func(t *testing.T, policy, source string) int {
		r, clock := cacheRouter(t, policy, source, 4)
		var running []*router.Booking
		failed := 0
		for i := range uint32(400) {
			if i%100 == 99 {
				clock.Advance(time.Second)
			}
			tokens := testkit.Tokens(5000*(i%5), 20*testkit.BlockSize) // one of five prefixes that are more than half of it
			d := routertest.MustRoute(t, r, router.Request{Tokens: append(tokens, testkit.Tokens(100_000+100*i, 5*testkit.BlockSize)...)})
			if d.Target.Key.Worker == 0 {
				d.Booking.FailAs(health.Reported, "test")
				failed++
				continue
			}
			if running = append(running, d.Booking); len(running) > 30 {
				running[0].Finish(10)
				running = running[1:]
			}
		}
		if n := r.Index().Blocks(testkit.W0); n > 0 {
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

// TestNoWorkerStaysIdle is about a block that all prompts share: a worker that
// missed it at the start would never match any.
func TestNoWorkerStaysIdle(t *testing.T) {
	requests := loadTraces(t)["conversation"][:1000]
	bothSources(t, func(t *testing.T, policy, source string) {
		s := simulatetest.New(requests, policy, 64)
		s.Index.PrefixSource = source
		for _, w := range simulatetest.MustRun(t, s).Balance {
			if w.Requests < 1000/8/2 {
				t.Errorf("worker %d got %d of 1000 requests", w.Worker, w.Requests)
			}
		}
	})
}

// sharedPrompts is the shape of the benchmark of SGLang's pull request: long
// system prompts, several turns. Round robin would need the memory of eight
// workers in each.
func sharedPrompts(t testing.TB, conversations, blocks int) simulate.Simulation {
	t.Helper()
	engine := testkit.Engine()
	engine.Blocks = blocks
	requests, err := simulate.SyntheticChat(simulate.SyntheticSettings{
		Conversations: conversations, Turns: 5, Groups: 128, PrefixTokens: 6000, UserTokens: 128, OutputTokens: 50,
	}, 1, engine.Blocks*engine.BlockSize)
	if err != nil {
		t.Fatal(err)
	}
	return simulate.Simulation{Requests: requests, Policy: "round-robin", Scoring: testkit.Defaults[policies.Settings](), Index: testkit.Defaults[router.IndexSettings](), Workers: 8, Engine: engine, Concurrency: 128, Seed: 1}
}

func TestSharedSystemPromptsAreFoundTwiceAsOften(t *testing.T) {
	s := sharedPrompts(t, 800, 3072)
	baseline := simulatetest.MustRun(t, s)
	bothSources(t, func(t *testing.T, policy, source string) {
		s := s
		s.Policy, s.Index.PrefixSource = policy, source
		r := simulatetest.MustRun(t, s)
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
		if blocks != 1024 && (testing.Short()) {
			continue
		}
		for _, policy := range []string{"cache-threshold", "variance"} {
			t.Run(fmt.Sprintf("%s/%d", policy, blocks), func(t *testing.T) {
				s := sharedPrompts(t, 800, blocks)
				s.Policy, s.Index.PrefixSource = policy, router.PrefixApprox
				s.Concurrency = 64
				on := simulatetest.MustRun(t, s)
				s.Index.CacheCorrection = false
				off := simulatetest.MustRun(t, s)
				t.Logf("mean error %.0f tokens, without correction %.0f; reuse %.3f, %.3f", on.PredictionError, off.PredictionError, on.Reuse, off.Reuse)
				if on.PredictionError > off.PredictionError/2 {
					t.Errorf("mean error %.0f tokens, without correction %.0f", on.PredictionError, off.PredictionError)
				}
			})
		}
	}
}

// loadTraces reads the traces of testdata.
func loadTraces(t testing.TB) map[string][]simulate.TraceRequest {
	t.Helper()
	traces := map[string][]simulate.TraceRequest{}
	for _, name := range []string{"conversation", "synthetic"} {
		requests, err := simulate.ReadTrace("../../../testdata/traces/" + name + "_trace.jsonl.gz")
		if err != nil {
			t.Fatal(err)
		}
		traces[name] = requests
	}
	return traces
}
