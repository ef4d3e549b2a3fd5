package events

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// TestARecordingPassesEachKindOfChange to the index that it records.
func TestARecordingPassesEachKindOfChange(t *testing.T) {
	index, r := openRecording(t, filepath.Join(t.TempDir(), "events.jsonl"))
	defer r.Close()
	radixtest.PassesEachKind(t, index)
}

// TestEachKindOfChangeIsRecorded: after each change, the recording so far replays to the same
// index.
func TestEachKindOfChangeIsRecorded(t *testing.T) {
	for n := range len(radixtest.EachKind()) + 1 {
		file := filepath.Join(t.TempDir(), "events.jsonl")
		index, r := openRecording(t, file)
		for _, c := range radixtest.EachKind()[:n] {
			if _, err := index.Apply(testkit.EventWorker, &c); err != nil {
				t.Fatal(err)
			}
		}
		r.Close()
		replayed, again := replayFile(t, file, ReplayCommand{MaxErrors: 9})
		if replayed.wrong > 0 {
			t.Fatalf("after %d changes: %q", n, replayed.errors)
		}
		testkit.WantEqual(t, fmt.Sprintf("contents after %d changes", n), radixtest.Contents(again), radixtest.Contents(index))
		local := []uint64{0, 1, 2, 3, 4, 5, 6, 7, 8}
		testkit.WantEqual(t, "match", again.Match(local, len(local), kv.AllParts, nil), index.Match(local, len(local), kv.AllParts, nil))
	}
}

// between is an index that calls then once it has made a change of a shared store, before who
// made it knows.
type between struct {
	radix.Reader
	index radix.Applier
	then  func()
}

func (b *between) Apply(w kv.WorkerKey, c *radix.Change) (radix.Applied, error) {
	done, err := b.index.Apply(w, c)
	if c.Shared {
		b.then()
	}
	return done, err
}

// TestARecordingHasTheOrderOfTheIndex: a doubt that is settled right after a store takes what was
// stored, also in a replay.
func TestARecordingHasTheOrderOfTheIndex(t *testing.T) {
	file, tree, w := filepath.Join(t.TempDir(), "events.jsonl"), radix.NewTree(), testkit.EventWorker
	inner := &between{Reader: tree, index: tree}
	index, r, err := OpenRecording(Settings{RecordEvents: file, RecordEventsMaxBytes: 1 << 30}, inner, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	settled := make(chan struct{})
	inner.then = func() {
		go func() {
			defer close(settled)
			radixtest.Settle(index, w, index.LowerOf(w).Doubt, false)
		}()
		select {
		case <-settled:
		case <-time.After(50 * time.Millisecond): // it waits for the store
		}
	}
	radixtest.StoreLower(index, w, radix.LowerTier{Tier: kv.Host}, 0, false, []kv.StoredBlock{{Engine: 1, Local: 1}})
	radixtest.ClearDevice(index, w)
	radixtest.StoreLower(index, w, radix.LowerTier{Tier: kv.External, Shared: true}, 0, false, []kv.StoredBlock{{Engine: 2, Local: 2}})
	<-settled
	r.Close()
	_, again := replayFile(t, file, ReplayCommand{})
	testkit.WantEqual(t, "contents", radixtest.Contents(again), radixtest.Contents(tree))
}

// TestChangesAreReadAsTheyAreWritten, in both forms, except that a doubt has no number and that
// nothing is left of a rank that is forgotten.
func TestChangesAreReadAsTheyAreWritten(t *testing.T) {
	for _, c := range radixtest.EachKind() {
		for _, recorded := range []bool{true, false} {
			text, err := json.Marshal(textOf(&c, recorded))
			if err != nil {
				t.Fatal(err)
			}
			want := c.Clone()
			switch {
			case c.Kind == radix.Forgotten:
				want.Kind = radix.Cleared
			case c.Kind == radix.DoubtSettled:
				want.Set = &radix.Setting{Held: c.Set.Held}
			}
			var read changeText
			if err := json.Unmarshal(text, &read); err != nil {
				t.Fatalf("%s: %v", text, err)
			}
			got, err := read.change()
			if diff := cmp.Diff(want, got); err != nil || diff != "" {
				t.Errorf("%s: %v (-want +got):\n%s", text, err, diff)
			}
		}
	}
}
