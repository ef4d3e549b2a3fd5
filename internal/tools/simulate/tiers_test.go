package simulate

import (
	"encoding/json"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/tools/engine"
)

// tiered is a run of the synthetic trace whose workers have a host tier of four times
// their cache, with loads at that many GB/s.
func tiered(t *testing.T, policy string, requests int, bandwidth float64) Simulation {
	t.Helper()
	s := simulation(loadTraces(t)["synthetic"][:requests], policy, 64)
	s.Engine.Blocks = 3072
	s.Tiers = []engine.TierSettings{{Tier: kv.Host, Blocks: 12288, Loads: engine.Loads{Bandwidth: bandwidth, BytesPerToken: 131072}}}
	return s
}

func TestEvictedBlocksAreReusedFromTheHost(t *testing.T) {
	with := tiered(t, "work", 1500, 25)
	without := with
	without.Tiers = nil
	a, b := mustRun(t, with), mustRun(t, without)
	if a.Reuse <= b.Reuse || a.Lower == nil || a.Lower.Host <= 0 || b.Lower != nil {
		t.Errorf("reuse %v with a host tier (%+v), %v without", a.Reuse, a.Lower, b.Reuse)
	}
	slow := with
	slow.Tiers = []engine.TierSettings{with.Tiers[0]}
	slow.Tiers[0].Loads.Bandwidth = 0.05
	if c := mustRun(t, slow); c.TTFT.Mean <= a.TTFT.Mean {
		t.Errorf("TTFT %v ms at 0.05 GB/s, %v at 25", c.TTFT.Mean, a.TTFT.Mean)
	}
}

// TestKnowingSlowTiersDoesNotHurt: loads that take longer than computing delay each other
// and are worth less than nothing, which a policy must see that knows of them.
func TestKnowingSlowTiersDoesNotHurt(t *testing.T) {
	for _, bandwidth := range []float64{1, 5, 25} {
		known := tiered(t, "work", 1500, bandwidth)
		known.Workers = 4
		unknown := known
		unknown.UnpublishedTiers = true
		a, b := mustRun(t, known), mustRun(t, unknown)
		if a.EndToEnd.Mean > 1.01*b.EndToEnd.Mean {
			t.Errorf("%v GB/s: %.0f ms end to end with the tiers known, %.0f without", bandwidth, a.EndToEnd.Mean, b.EndToEnd.Mean)
		}
	}
}

func TestRunsWithTiersAreEqual(t *testing.T) {
	s := tiered(t, "work", 500, 1)
	s.Tiers = append(s.Tiers, engine.TierSettings{Tier: kv.Disk, Blocks: 20000, Loads: engine.Loads{Bandwidth: 1, BytesPerToken: 131072}, Shared: true, Unpublished: true})
	repeats(t, s)
}

// repeats checks that two runs of a simulation have the same report.
func repeats(t *testing.T, s Simulation) {
	t.Helper()
	var texts [2]string
	for i := range texts {
		text, err := json.Marshal(mustRun(t, s))
		if err != nil {
			t.Fatal(err)
		}
		texts[i] = string(text)
	}
	if texts[0] != texts[1] {
		t.Errorf("%s\n%s", texts[0], texts[1])
	}
}

func TestTheRouterPredictsWhatLowerTiersHave(t *testing.T) {
	// With a request at a time nothing comes between decision and admission.
	s := tiered(t, "work", 300, 25)
	s.Concurrency = 1
	if r := mustRun(t, s); r.Predicted != r.Reuse || r.Lower.Host == 0 {
		t.Errorf("predicted reuse %v, actual %v, %+v", r.Predicted, r.Reuse, r.Lower)
	}
	s.UnpublishedTiers = true
	if r := mustRun(t, s); r.Predicted >= r.Reuse {
		t.Errorf("predicted reuse %v without the tiers' events, actual %v", r.Predicted, r.Reuse)
	}
}
