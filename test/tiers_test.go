package test

import (
	"testing"
	"time"
)

// TestTiersOfMockWorkersArePredicted has workers load evicted blocks from host memory,
// with the events of each engine, and compares each prediction with the answer.
func TestTiersOfMockWorkersArePredicted(t *testing.T) {
	for name, args := range map[string][]string{
		"vLLM":              {"--mock=host-blocks=300"},
		"vLLM's default":    {"--mock=host-blocks=300", "--mock=tier-events=placeholder"},
		"a small host tier": {"--mock=host-blocks=70"},
		"SGLang":            {"--mock=host-blocks=300", "--mock=api=sglang"},
	} {
		t.Run(name, func(t *testing.T) {
			if testing.Short() && name != "vLLM" {
				t.Skip("one form is enough for a short run")
			}
			s := NewTierSite(StartMocks(t, 2, append(args, "--mock=num-gpu-blocks=60", "--speedup-ratio=0")...).Router)
			s.Quiet = 40 * time.Millisecond
			s.WaitReady(2, time.Minute)
			s.Load(90, "fresh load", false)
			s.Loaded("host")
		})
	}
}

// TestFilesOfMockWorkersArePredictedAtMost: what is deleted from files is announced
// nowhere, so that none of it may be promised.
func TestFilesOfMockWorkersArePredictedAtMost(t *testing.T) {
	s := NewTierSite(StartMocks(t, 2, "--mock=host-blocks=70", "--mock=disk-blocks=200", "--mock=disk-shared=true", "--mock=num-gpu-blocks=60", "--speedup-ratio=0").Router)
	s.Quiet = 40 * time.Millisecond
	s.WaitReady(2, time.Minute)
	s.Load(90, "fresh load", true)
	s.Loaded("disk")
}
