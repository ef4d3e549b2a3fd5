package main

import (
	"fmt"
	"kvrouter/internal/policy"
	"kvrouter/internal/simulate"
	"path/filepath"
	"strings"
	"testing"
)

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
	for _, policy := range policy.Names {
		run := simulation(requests, policy, 0)
		run.Workers, run.Concurrency = 3, 1
		reuse[policy] = mustRun(t, run).Reuse
	}
	if want := float64(cached) / float64(prompted); reuse["kv"] != want {
		t.Errorf("simulated reuse %v, the workers' %v", reuse["kv"], want)
	}
	if reuse["round-robin"] >= reuse["kv"] {
		t.Errorf("reuse by policy %v", reuse)
	}
}
