package main

import (
	"encoding/json"
	"fmt"
	"kvrouter/internal/policy"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestThompsonKeepsItsStateAndTraces(t *testing.T) {
	dir := t.TempDir()
	state, traces := filepath.Join(dir, "state.json"), filepath.Join(dir, "traces.jsonl")
	args := []string{"--policy=thompson", "--thompson-state=" + state, "--thompson-traces=" + traces}
	site := startMockSite(t, 2, args...)
	for i := range 6 {
		if _, err := site.chat(t.Context(), []map[string]string{{"role": "user", "content": fmt.Sprintf("question %d", i)}}, true, 8); err != nil {
			t.Fatal(err)
		}
	}
	if err := site.end(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(state)
	if err != nil {
		t.Fatal(err)
	}
	var kept struct {
		Workers   []struct{} `json:"workers"`
		Baselines []struct{} `json:"baselines"`
	}
	if err := json.Unmarshal(data, &kept); err != nil || len(kept.Workers) != 2 || len(kept.Baselines) == 0 {
		t.Errorf("%v: %s", err, data)
	}
	lines, err := os.ReadFile(traces)
	if err != nil {
		t.Fatal(err)
	}
	if decisions, feedbacks := strings.Count(string(lines), `"kind":"decision"`), strings.Count(string(lines), `"kind":"feedback"`); decisions < 6 || feedbacks != decisions {
		t.Errorf("%d decisions and %d feedbacks:\n%s", decisions, feedbacks, lines)
	}
	again := startMockSite(t, 2, args...)
	var stats policy.ThompsonStats
	again.rooms.router.WithThompson(func(p *policy.Thompson) { stats = p.Stats() })
	if len(stats.Workers) != 2 || stats.Workers[0].Alpha <= 0 {
		t.Errorf("after the restart %+v", stats)
	}
}
