package simulate

import (
	"testing"
	"time"

	"kvrouter/internal/tools/engine"
)

// adapted is a run of chats of 16 groups over 4 workers, with 8 adapters of which each
// worker has two loaded at a time.
func adapted(t *testing.T, rate float64) Simulation {
	t.Helper()
	settings := syntheticSettings()
	settings.Conversations, settings.Groups, settings.Adapters, settings.Rate, settings.Skew = 1000, 16, 8, rate, 0.5
	settings.ThinkTime = 2 * time.Second
	s := simulation(mustChat(t, settings, 1), "work", 0)
	s.Workers, s.Speedup = 4, 1
	s.Engine.Adapters = engine.AdapterSettings{Slots: 2, LoadMS: 200}
	return s
}

// TestAdaptersGather compares policy work with one that does not know the adapters.
func TestAdaptersGather(t *testing.T) {
	for name, rate := range map[string]float64{"light": 2, "heavy": 8} {
		with := adapted(t, rate)
		without := with
		without.UntoldAdapters = true
		a, b := mustRun(t, with), mustRun(t, without)
		t.Logf("%s: %.0f loads per 1,000 requests, each adapter on %.2f workers, first token after %.0f ms, whole answer %.0f; untold %.0f, %.2f, %.0f, %.0f",
			name, a.Adapters.Loads, a.Adapters.Spread, a.TTFT.Mean, a.EndToEnd.Mean, b.Adapters.Loads, b.Adapters.Spread, b.TTFT.Mean, b.EndToEnd.Mean)
		if a.Adapters.Loads > 0.5*b.Adapters.Loads || a.Adapters.Spread > b.Adapters.Spread || a.TTFT.Mean > b.TTFT.Mean || a.EndToEnd.Mean > b.EndToEnd.Mean {
			t.Errorf("%s: adapters do not gather", name)
		}
	}
}

// TestSlotsForAllAdaptersCostNothing: requests spread as if there were no adapters.
func TestSlotsForAllAdaptersCostNothing(t *testing.T) {
	with := adapted(t, 10)
	with.Engine.Adapters.Slots = 8
	without := with
	without.UntoldAdapters = true
	a, b := mustRun(t, with), mustRun(t, without)
	if a.EndToEnd.Mean > 1.02*b.EndToEnd.Mean || a.Adapters.Loads > b.Adapters.Loads {
		t.Errorf("whole answer after %.0f ms, %.1f loads per 1,000 requests; untold %.0f, %.1f", a.EndToEnd.Mean, a.Adapters.Loads, b.EndToEnd.Mean, b.Adapters.Loads)
	}
}

func TestRunsWithAdaptersAreEqual(t *testing.T) {
	s := adapted(t, 4)
	s.Requests = s.Requests[:200]
	repeats(t, s)
}
