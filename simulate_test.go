package main

import (
	"kvrouter/internal/engine"
	"kvrouter/internal/policy"
	"kvrouter/internal/router"
	"kvrouter/internal/simulate"
	"testing"
)

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

func TestTheEngineToSimulateIsThatOfTheMocksFlags(t *testing.T) {
	parse := func(args ...string) engine.Settings {
		config, command, err := ParseConfig(append([]string{"simulate", "--trace=t", "--concurrency=1"}, args...))
		if err != nil || command != CommandSimulate {
			t.Fatal(command, err)
		}
		return config.Mock.SimConfig(config.BlockSize)
	}
	if got := parse(); got != engine.DefaultSettings() {
		t.Errorf("without flags %+v", got)
	}
	got := parse("--block-size=16", "--mock-num-gpu-blocks=100", "--mock-max-num-seqs=5", "--mock-max-num-batched-tokens=512",
		"--mock-prefill-ms=1,2,3", "--mock-decode-ms=4,5,6", "--speedup-ratio=7")
	want := engine.Settings{Blocks: 100, BlockSize: 16, MaxSeqs: 5, MaxBatchedTokens: 512,
		Timing: engine.Timing{Prefill: [3]float64{1, 2, 3}, Decode: [3]float64{4, 5, 6}, MinDecode: 1, Speedup: 7}}
	if got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
