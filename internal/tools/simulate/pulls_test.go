package simulate

import (
	"testing"

	"kvrouter/internal/tools/engine"
)

// peered is a run of chats whose workers pull from each other at that many GB/s.
func peered(t *testing.T, policy string, bandwidth float64) Simulation {
	t.Helper()
	s := tiered(t, policy, 1500, 25)
	s.Peers = engine.PeerSettings{Loads: engine.Loads{Bandwidth: bandwidth, BytesPerToken: 131072}}
	return s
}

// TestPullingDoesNotHurt: on a trace whose prefixes outgrow the caches, pulling is no worse
// than affinity alone, and both beat placement by load that pulls all it can.
func TestPullingDoesNotHurt(t *testing.T) {
	if testing.Short() {
		t.Skip("three long runs")
	}
	pull := peered(t, "work", 25)
	pull.Requests = loadTraces(t)["synthetic"]
	affinity, loadFirst := pull, pull
	affinity.WithoutPulls, loadFirst.Policy = true, LoadFirst
	a, b, c := mustRun(t, pull), mustRun(t, affinity), mustRun(t, loadFirst)
	if a.Lower.Pulls == 0 || b.Lower.Pulls != 0 || c.Lower.Peer == 0 {
		t.Errorf("%d, %d and %d pulls", a.Lower.Pulls, b.Lower.Pulls, c.Lower.Pulls)
	}
	if a.TTFT.Mean > b.TTFT.Mean || a.EndToEnd.Mean > 1.01*b.EndToEnd.Mean || a.TTFT.Mean > c.TTFT.Mean {
		t.Errorf("first token after %.0f ms with pulls, %.0f without, %.0f by load; end to end %.0f, %.0f, %.0f", a.TTFT.Mean, b.TTFT.Mean, c.TTFT.Mean, a.EndToEnd.Mean, b.EndToEnd.Mean, c.EndToEnd.Mean)
	}
}

// TestPullsThatAllFailCostLittle: they are computed, and priced.
func TestPullsThatAllFailCostLittle(t *testing.T) {
	fails := peered(t, "work", 25)
	fails.Peers.Failures = 1
	without := fails
	without.WithoutPulls = true
	a, b := mustRun(t, fails), mustRun(t, without)
	if a.Lower.Peer != 0 || a.Lower.Pulls == 0 || a.TTFT.Mean > 1.1*b.TTFT.Mean {
		t.Errorf("%d pulls, first token after %.0f ms; %.0f without pulls", a.Lower.Pulls, a.TTFT.Mean, b.TTFT.Mean)
	}
}

// TestASlowNetworkIsNotUsed: one that takes ten times as long as computing.
func TestASlowNetworkIsNotUsed(t *testing.T) {
	s := peered(t, "work", 1)
	if r := mustRun(t, s); r.Lower.Pulls > 20 {
		t.Errorf("%d pulls at 1 GB/s", r.Lower.Pulls)
	}
}

func TestRunsWithPullsAreEqual(t *testing.T) {
	s := peered(t, "work", 25)
	s.Requests = s.Requests[:500]
	s.Peers.Failures = 0.3
	repeats(t, s)
}
