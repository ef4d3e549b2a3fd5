package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
)

func TestReplayEventsIsACommand(t *testing.T) {
	config, command, err := ParseConfig([]string{"replay-events", "FILE", "--max-count=3", "--prompt-tokens=1,2", "--block-size=16"})
	if err != nil || command != CommandReplay || config.BlockSize != 16 {
		t.Fatal(command, err)
	}
	if diff := cmp.Diff(events.ReplayCommand{File: "FILE", MaxCount: 3, MaxErrors: 20, PromptTokens: []uint32{1, 2}}, config.Replay); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if _, _, err := ParseConfig([]string{"replay-events", "FILE", "--max-count=-1"}); err == nil || !strings.Contains(err.Error(), "--max-count") {
		t.Errorf("error %v", err)
	}
}

// TestARecordingOfAFleetReplaysToWhatTheIndexHeld: of --record-events, also in a
// second run of the router.
func TestARecordingOfAFleetReplaysToWhatTheIndexHeld(t *testing.T) {
	held := func(index radix.Index) (all []string) {
		index.Dump(func(w kv.WorkerKey, parent uint64, hasParent bool, b kv.StoredBlock) bool {
			all = append(all, fmt.Sprint(w, parent, hasParent, b))
			return true
		})
		slices.Sort(all)
		return all
	}
	for _, args := range [][]string{nil, {"--mock-data-parallel-size=2"}, {"--policy=kv", "--router-predicted-ttl-secs=60", "--mock-delay-events=3ms"}} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "events.jsonl")
			for range 2 {
				s := startMockSite(t, 2, append(args, "--record-events="+file, "--mock-num-gpu-blocks=60")...) // few, so that blocks are removed
				for i := range 30 {
					if _, err := s.chat(t.Context(), say(fmt.Sprint("topic ", i%5, strings.Repeat(" lorem ipsum", 40+9*i))), true, 20); err != nil {
						t.Fatal(err)
					}
				}
				s.settle()
				want := held(s.app.index)
				removed := uint64(0)
				for _, stats := range s.app.fleet.Streams() {
					removed += stats.RemovedBlocks.Load()
				}
				if err := s.end(); err != nil {
					t.Fatal(err)
				}
				if len(want) == 0 || removed == 0 || s.app.recording.Lost() > 0 {
					t.Errorf("%d blocks were held, %d removed, %d lines lost", len(want), removed, s.app.recording.Lost())
				}
				recording, err := os.Open(file)
				if err != nil {
					t.Fatal(err)
				}
				defer recording.Close()
				index := radix.NewTree()
				if _, err := new(events.ReplayCommand).Replay(recording, index); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(want, held(index)); diff != "" {
					t.Errorf("(-held +replayed):\n%s", diff)
				}
			}
		})
	}
}
