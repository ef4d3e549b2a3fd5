package events

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
)

// versionFrames is what vLLM's publisher sends a subscriber, and as a replay from batch 1
// on; see testdata/versions.py.
type versionFrames struct {
	Live   [][][]byte `json:"live"`
	Replay [][][]byte `json:"replay"`
}

func versionsOf(t *testing.T) map[string]versionFrames {
	t.Helper()
	files, err := filepath.Glob("testdata/versions/*.json")
	if err != nil || len(files) < 9 {
		t.Fatalf("%d versions, want at least 9: %v", len(files), err)
	}
	versions := map[string]versionFrames{}
	for _, name := range files {
		text, err := os.ReadFile(name)
		var frames versionFrames
		if err == nil {
			err = json.Unmarshal(text, &frames)
		}
		if err != nil || len(frames.Live) != 4 {
			t.Fatalf("%s: %d batches: %v", name, len(frames.Live), err)
		}
		versions[strings.TrimSuffix(filepath.Base(name), ".json")] = frames
	}
	return versions
}

// TestEventsOfEveryVLLMSince0_9: vLLM 0.9 is the first with KV events. Its events are arrays
// of five fields with integers for hashes. 0.10 has the rank of a batch, 0.11 digests and
// the medium, 0.15 adapter names, 0.20 extra keys and groups, 0.23 the kind of a group, 0.24
// maps, and 0.32 the topic in replays.
func TestEventsOfEveryVLLMSince0_9(t *testing.T) {
	worker := kv.WorkerKey{Worker: 3}
	prompt := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
	branch := append(slices.Clone(prompt[:8]), 21, 22, 23, 24)
	for version, frames := range versionsOf(t) {
		t.Run(version, func(t *testing.T) {
			index := radix.NewTree()
			var log testkit.LogBuffer
			s := NewStream(Source{Worker: worker, BlockSize: 4}, index, Options{}, slog.New(slog.NewTextHandler(&log, nil)))
			s.Begin(0)
			for i, want := range []struct{ prompt, branch, all int }{{3, 2, 4}, {2, 2, 3}, {2, 3, 4}, {0, 0, 0}} {
				seq, payload, err := BatchFrames(frames.Live[i])
				if err != nil || seq != uint64(i) {
					t.Fatalf("batch %d is number %d: %v", i, seq, err)
				}
				s.Apply(seq, payload, true)
				for tokens, want := range map[*[]uint32]int{&prompt: want.prompt, &branch: want.branch} {
					local := kv.HashBlocks(nil, *tokens, 4, "", "")
					found := 0
					for _, m := range index.Match(local, len(local), kv.AllParts, nil) {
						found = m.Blocks
					}
					if found != want {
						t.Errorf("after batch %d: %d blocks of %v, want %d", i, found, *tokens, want)
					}
				}
				if all := index.AllBlocks(worker); all != want.all {
					t.Errorf("after batch %d: %d blocks, want %d", i, all, want.all)
				}
			}
			for name, n := range s.Stats().Counts() {
				if n > 0 && !slices.Contains([]string{"batches", "stored", "stored_blocks", "removed", "removed_blocks", "cleared"}, name) {
					t.Errorf("%s: %d", name, n)
				}
			}
			if log.String() != "" || s.Stats().Cold.Load() {
				t.Errorf("cold %v, log:\n%s", s.Stats().Cold.Load(), &log)
			}

			if len(frames.Replay) != 4 {
				t.Fatalf("a replay of %d messages, want 4", len(frames.Replay))
			}
			for i, message := range frames.Replay {
				seq, payload, err := BatchFrames(message)
				if i == 3 {
					if err != nil || seq != ReplayEnd {
						t.Errorf("the replay ends with %d: %v", seq, err)
					}
					continue
				}
				if _, live, _ := BatchFrames(frames.Live[i+1]); err != nil || seq != uint64(i+1) || string(payload) != string(live) {
					t.Errorf("replayed batch %d, %v, does not equal batch %d", seq, err, i+1)
				}
			}
		})
	}
}
