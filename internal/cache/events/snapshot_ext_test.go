package events_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/eventstest"
)

// keepSnapshot follows p until its index is in the file that it returns: prompt 1
// with 4 blocks, prompt 2 with 2.
func keepSnapshot(t *testing.T, p *testkit.FakePublisher) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "index")
	f := eventstest.Follow(t, eventstest.SourceOf(p), nil)
	f.Subscribed(t, p)
	p.Batch(false, testkit.StoredEvent(1, 0, 4))
	p.Batch(false, testkit.StoredEvent(2, 0, 2))
	f.Holds(t, 2, 2, 2)
	snapshot := events.OpenSnapshot(events.Settings{IndexSnapshot: name, IndexSnapshotInterval: 10 * time.Millisecond}, testkit.BlockSize, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { // ends with ctx
		defer close(done)
		snapshot.Run(ctx, func() []*events.Stream { return []*events.Stream{f.Stream} })
	}()
	testkit.Settles(t, func() error {
		_, err := os.Stat(name)
		return err
	})
	cancel()
	<-done
	f.Stop()
	return name
}

// resume follows p from the snapshot on.
func resume(t *testing.T, p *testkit.FakePublisher, name string, tweak func(*events.Stream)) *eventstest.Follower {
	t.Helper()
	snapshot := events.OpenSnapshot(events.Settings{IndexSnapshot: name}, testkit.BlockSize, slog.New(slog.DiscardHandler))
	return eventstest.FollowInto(t, eventstest.SourceOf(p), radix.NewTree(), func(s *events.Stream) {
		if tweak != nil {
			tweak(s)
		}
		snapshot.Resume(s)
	})
}

// from answers replays from batch oldest on.
func from(p *testkit.FakePublisher, oldest uint64) {
	p.Replay = func(from uint64) (seqs []uint64, end bool) {
		for seq := max(from, oldest); seq < uint64(len(p.History)); seq++ {
			seqs = append(seqs, seq)
		}
		return seqs, true
	}
}

func TestAStreamGoesOnFromASnapshot(t *testing.T) {
	for name, oldest := range map[string]uint64{"whole history": 0, "from the snapshot's batch on": 1} {
		t.Run(name, func(t *testing.T) {
			p := testkit.NewFakePublisher(t)
			file := keepSnapshot(t, p)
			p.Batch(true, testkit.RemovedEvent(1, 2, 4), testkit.StoredEvent(3, 0, 1))
			p.Locked(func() { from(p, oldest) })
			f := resume(t, p, file, nil)
			f.Holds(t, 3, 1, 1)
			f.Holds(t, 1, 4, 2)
			f.Holds(t, 2, 2, 2)
			f.Has(t, map[string]uint64{"restarts": 0, "replayed_batches": 1, "cold": 0, "replay_failures": 0})
			p.Batch(false, testkit.StoredEvent(1, 2, 3), testkit.RemovedEvent(2, 0, 2))
			f.Holds(t, 2, 2, 0)
			f.Holds(t, 1, 4, 3)
		})
	}
}

// What a snapshot holds of an engine that is another now, or that cannot show that it
// is the same, does not count.
func TestAStreamStartsEmptyWhereASnapshotIsNotProved(t *testing.T) {
	// past swaps the publisher's history for one that was made at another time.
	past := func(p *testkit.FakePublisher, events ...testkit.Event) {
		p.Locked(func() {
			p.History = nil
			for _, e := range events {
				p.History = append(p.History, testkit.Payload(t, 2, e))
			}
		})
	}
	a, b, c := testkit.StoredEvent(9, 0, 1), testkit.StoredEvent(2, 0, 2), testkit.StoredEvent(8, 0, 1)
	for name, change := range map[string]func(p *testkit.FakePublisher){
		"it has restarted and published nothing": func(p *testkit.FakePublisher) { past(p) },
		"it has restarted and published less":    func(p *testkit.FakePublisher) { past(p, a) },
		// The snapshot's last batch is of number 1 and the same events.
		"it has restarted and published as much": func(p *testkit.FakePublisher) { past(p, a, b) },
		"it has restarted and published more":    func(p *testkit.FakePublisher) { past(p, a, c, testkit.StoredEvent(7, 0, 1)) },
		"its buffer begins later": func(p *testkit.FakePublisher) {
			p.Batch(true, c)
			p.Batch(true, a)
			p.Locked(func() { from(p, 2) })
		},
		"it keeps no history": func(p *testkit.FakePublisher) {
			p.Locked(func() { p.Replay = func(uint64) ([]uint64, bool) { return nil, true } })
		},
		"it does not answer": func(p *testkit.FakePublisher) {
			p.Locked(func() { p.Replay = func(uint64) ([]uint64, bool) { return nil, false } })
		},
		"its replay cannot be reached": func(p *testkit.FakePublisher) { p.Router.Close() },
		"a batch is missing in its replay": func(p *testkit.FakePublisher) {
			p.Batch(true, a)
			p.Batch(true, c)
			p.Locked(func() { p.Replay = func(uint64) ([]uint64, bool) { return []uint64{1, 3}, true } })
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := testkit.NewFakePublisher(t)
			file := keepSnapshot(t, p)
			change(p)
			f := resume(t, p, file, func(s *events.Stream) { s.Timing.ReplayLimit = 100 * time.Millisecond })
			f.Until(t, func() bool { // what comes later counts
				p.Batch(false, testkit.StoredEvent(6, 0, 1))
				return f.Counters()["stored"] > 0 && f.Counters()["replays"] > 0
			}, func() string { return "is not followed" })
			f.Holds(t, 6, 1, 1)
			f.Holds(t, 1, 4, 0)
		})
	}
}

func TestAStreamForgetsASnapshotOfAWorkerThatStaysAway(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	file := keepSnapshot(t, p)
	p.Pub.Close()
	f := resume(t, p, file, func(s *events.Stream) { s.Timing.Grace = 20 * time.Millisecond })
	testkit.Settles(t, func() error {
		if !strings.Contains(f.Log.String(), "no connection to its KV events") {
			return errors.New("keeps waiting")
		}
		return nil
	})
}
