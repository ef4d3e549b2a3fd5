package main

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"kvrouter/internal/engine"
	"kvrouter/internal/policies"
	"kvrouter/internal/simulate"
	"kvrouter/internal/testkit/simulatetest"
)

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

func TestSimulatedPartsAreCheckedBeforeTheRun(t *testing.T) {
	for args, says := range map[string]string{
		"--workers=4 --prefill-workers=2 --decode-workers=2":                                 "give either --workers",
		"--prefill-workers=2":                                                                "at least 1 of each",
		"--prefill-workers=2 --decode-workers=-1":                                            "at least 1 of each",
		"--prefill-workers=600 --decode-workers=600":                                         "1200 workers",
		"--prefill-workers=1 --decode-workers=1 --enforce-disagg":                            "leave it out",
		"--prefill-workers=1 --decode-workers=1 --mock-kv-transfer-bandwidth=0":              "more than 0",
		"--prefill-workers=1 --decode-workers=1 --mock-kv-lease=0s":                          "more than 0",
		"--prefill-workers=1 --decode-workers=1 --disagg-min-uncached-tokens=-1":             "negative",
		"--prefill-workers=2 --decode-workers=6 --mock-kv-transfer-bandwidth=25 --policy=kv": "",
		"--prefill-workers=1 --decode-workers=1 --mock-disagg-kind=sglang --round-trip=5":    "",
		"--round-trip=-1":    "0 to 3.6e+06 ms",
		"--event-lag=NaN":    "0 to 3.6e+06 ms",
		"--round-trip=1e300": "0 to 3.6e+06 ms",
		"--prefill-workers=1 --decode-workers=1 --mock-slow-worker=2=3 --speedup-ratio=2":       "0 to 1",
		"--prefill-workers=1 --decode-workers=1 --mock-slow-worker=1=3 --mock-disagg-kind=both": "mock-disagg-kind",
	} {
		_, _, err := ParseConfig(append([]string{"simulate", "--trace=t", "--concurrency=1"}, strings.Fields(args)...))
		if says == "" && err != nil || says != "" && (err == nil || !strings.Contains(err.Error(), says)) {
			t.Errorf("%s: %v, want %q", args, err, says)
		}
	}
}

// TestARecordingReplaysAsItWent holds the simulator against the workers that the
// recording was made of: what they found cached, it must find.
func TestARecordingReplaysAsItWent(t *testing.T) {
	file := filepath.Join(t.TempDir(), "recording.jsonl")
	s := startMockSite(t, 3, "--record="+file, "--policy=kv")
	chats := make([][]map[string]string, 5)
	for i := range chats {
		chats[i] = []map[string]string{
			message("system", strings.Repeat(fmt.Sprint("Rule ", i%2, " of the house. "), 40)), message("user", fmt.Sprint("I am guest ", i)),
		}
	}
	prompted, cached := 0, 0
	for range 4 {
		for i, chat := range chats {
			a, err := s.chat(t.Context(), chat, true, 150)
			if err != nil || !a.finished {
				t.Fatal(err, a)
			}
			s.settle()
			prompted += a.prompt
			cached += a.cached
			chats[i] = append(chat, message("assistant", a.text), message("user", strings.Repeat("go on ", 10+i)))
		}
	}
	if err := s.end(); err != nil {
		t.Fatal(err)
	}

	requests, err := simulate.ReadTrace(file)
	if err != nil {
		t.Fatal(err)
	}
	reuse := map[string]float64{}
	for _, policy := range policies.Names {
		run := simulatetest.New(requests, policy, 0)
		run.Workers, run.Concurrency = 3, 1
		reuse[policy] = simulatetest.MustRun(t, run).Reuse
	}
	if want := float64(cached) / float64(prompted); reuse["kv"] != want {
		t.Errorf("simulated reuse %v, the workers' %v", reuse["kv"], want)
	}
	if reuse["round-robin"] >= reuse["kv"] {
		t.Errorf("reuse by policy %v", reuse)
	}
}
