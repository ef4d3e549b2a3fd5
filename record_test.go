package main

import (
	"kvrouter/internal/hints"
	"kvrouter/internal/simulate"
	"path/filepath"
	"testing"
)

func TestHintsOfARequestAreRecorded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "recording.jsonl")
	s := startMockSite(t, 1, "--record="+file)
	s.ask(t, []byte(`{"max_tokens":2,"messages":[{"role":"user","content":"hi"}],
		"nvext":{"agent_hints":{"prefix_id":"bob","total_requests":7,"osl":2000,"iat":50}}}`))
	if err := s.end(); err != nil {
		t.Fatal(err)
	}
	requests, err := simulate.ReadTrace(file)
	if err != nil || len(requests) != 1 {
		t.Fatal(requests, err)
	}
	hinted := requests[0].Hints
	if want := (hints.Prefix{ID: hinted.ID, Total: 7, OSL: hints.LevelHigh, IAT: hints.LevelLow}); hinted != want || hinted.ID == "" || hinted.ID == "bob" {
		t.Errorf("hints %+v", hinted)
	}
}
