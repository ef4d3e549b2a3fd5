package policy_test

import (
	"kvrouter/internal/engine"
	"kvrouter/internal/policy"
	"kvrouter/internal/router"
	"kvrouter/internal/simulate"
	"testing"
)

// loadTraces reads the traces of testdata.
func loadTraces(t testing.TB) map[string][]simulate.TraceRequest {
	t.Helper()
	traces := map[string][]simulate.TraceRequest{}
	for _, name := range []string{"conversation", "synthetic"} {
		requests, err := simulate.ReadTrace("../../testdata/traces/" + name + "_trace.jsonl.gz")
		if err != nil {
			t.Fatal(err)
		}
		traces[name] = requests
	}
	return traces
}

// simulation is a run with 8 workers of the default engine; a load from 64 on is
// a number of requests in flight, a smaller one a speedup.
func simulation(requests []simulate.TraceRequest, rule string, load float64) simulate.Simulation {
	s := simulate.Simulation{Requests: requests, Policy: rule, Knobs: policy.DefaultSettings(), Index: router.DefaultIndexSettings(), Workers: 8, Engine: engine.DefaultSettings(), Seed: 1}
	if load >= 64 {
		s.Concurrency = int(load)
	} else {
		s.Speedup = load
	}
	return s
}

func mustRun(t testing.TB, s simulate.Simulation) *simulate.Report {
	t.Helper()
	report, err := s.Run()
	if err != nil {
		t.Fatal(err)
	}
	return report
}
