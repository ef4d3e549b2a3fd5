package workers

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/testkit"
)

// snapshotEngine is an attached worker with a cache of prompts of up to 8 blocks. Its
// replay has the last replayed batches only.
type snapshotEngine struct {
	id     uint64
	events *testkit.FakePublisher
	held   map[int]int // blocks in the cache, by prompt
	random *rand.Rand
}

const (
	snapshotPrompts, snapshotBlocks = 200, 8
	snapshotReplayed                = 100
)

func newSnapshotEngine(t *testing.T, id uint64) *snapshotEngine {
	e := &snapshotEngine{id: id, events: testkit.NewFakePublisher(t), held: map[int]int{}, random: rand.New(rand.NewPCG(id, 1))}
	e.events.Replay = func(from uint64) (seqs []uint64, end bool) {
		n := uint64(len(e.events.History))
		for seq := max(from, n-min(n, snapshotReplayed)); seq < n; seq++ {
			seqs = append(seqs, seq)
		}
		return seqs, true
	}
	return e
}

// step stores or removes some blocks.
func (e *snapshotEngine) step() {
	number := e.random.IntN(snapshotPrompts)
	has := e.held[number]
	if has > 0 && e.random.IntN(3) == 0 {
		e.held[number] = e.random.IntN(has)
		e.events.Batch(false, testkit.RemovedEvent(number, e.held[number], has))
		return
	}
	if e.held[number] = min(has+1+e.random.IntN(4), snapshotBlocks); e.held[number] > has {
		e.events.Batch(false, testkit.StoredEvent(number, has, e.held[number]))
	}
}

func (e *snapshotEngine) steps(n int) {
	for range n {
		e.step()
	}
}

// published returns the number of batches so far.
func (e *snapshotEngine) published() (n int) {
	e.events.Locked(func() { n = len(e.events.History) })
	return n
}

// restart is the end of the engine and the start of another behind the same ports.
func (e *snapshotEngine) restart() {
	e.events.Locked(func() { e.events.History = nil })
	e.events.Drop()
	clear(e.held)
}

// compare returns how many blocks of prompts the index promises that the engine does
// not hold, and how many it holds and the index knows.
func (e *snapshotEngine) compare(index radix.Index) (wrong, known, all int) {
	for number := range snapshotPrompts {
		local := kv.HashBlocks(nil, testkit.PromptTokens(number, snapshotBlocks), testkit.BlockSize, "", "")
		for _, match := range index.Match(local, len(local), kv.AllParts, nil) {
			if match.Worker.Worker == e.id {
				wrong += max(0, match.Blocks-e.held[number])
				known += min(match.Blocks, e.held[number])
			}
		}
		all += e.held[number]
	}
	return wrong, known, all
}

// TestAWorkerThatEndsIsNotInASnapshotAsEmpty: it ends between the look at who is there
// and the writing of what they hold.
func TestAWorkerThatEndsIsNotInASnapshotAsEmpty(t *testing.T) {
	all := fakeConfig(t, 0)
	e := newSnapshotEngine(t, 7)
	server := newAttachedServer(t, fmt.Sprintf(`{"0":{"enable_kv_cache_events":true,"endpoint":%q,"replay_endpoint":%q,"topic":"kv"}}`, e.events.Pub.Endpoint(), e.events.Router.Endpoint()))
	server.start()
	defer server.server.Close()
	all.fleet.BlockSize, all.fleet.Attached = testkit.BlockSize, []Attached{{Server: probe.Server{ID: 7, URL: "http://" + server.address}}}
	for range 10 {
		e.events.Batch(true, testkit.StoredEvent(e.random.IntN(snapshotPrompts), 0, 1))
	}
	f := newFakeFleet(t, all)
	f.start()
	testkit.Settles(t, func() error {
		if f.index.Blocks(kv.WorkerKey{Worker: 7}) == 0 {
			return errors.New("nothing is known of it")
		}
		return nil
	})
	seen := f.eventStreams()
	f.stop()
	name := filepath.Join(t.TempDir(), "index")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	events.OpenSnapshot(events.Settings{IndexSnapshot: name, IndexSnapshotInterval: time.Hour}, testkit.BlockSize, slog.New(slog.DiscardHandler)).
		Run(ended, func() []*events.Stream { return seen })
	if _, err := os.Stat(name); !errors.Is(err, fs.ErrNotExist) || len(seen) != 1 {
		t.Errorf("%d streams, and a file was written of what they held: %v", len(seen), err)
	}
}

// TestAKilledRoutersIndexLivesOnInItsSnapshot: a router dies in the middle of its work
// and without a last write, while its workers continue. Three of them: one continues
// within its short replay buffer, one beyond it, one restarts.
func TestAKilledRoutersIndexLivesOnInItsSnapshot(t *testing.T) {
	var engines []*snapshotEngine
	all := fakeConfig(t, 0)
	cfg := &all.fleet
	cfg.BlockSize = testkit.BlockSize
	cfg.Snapshot = events.Settings{IndexSnapshot: filepath.Join(t.TempDir(), "index"), IndexSnapshotInterval: 20 * time.Millisecond}
	for id := range uint64(3) {
		e := newSnapshotEngine(t, id)
		engines = append(engines, e)
		server := newAttachedServer(t, fmt.Sprintf(`{"0":{"enable_kv_cache_events":true,"endpoint":%q,"replay_endpoint":%q,"topic":"kv"}}`, e.events.Pub.Endpoint(), e.events.Router.Endpoint()))
		server.start()
		defer server.server.Close()
		cfg.Attached = append(cfg.Attached, Attached{Server: probe.Server{ID: id, URL: "http://" + server.address}})
	}
	// follows waits until a fleet has applied what the engines have published.
	follows := func(f *fakeFleet) {
		testkit.Settles(t, func() error {
			for _, e := range engines {
				stats := f.Streams()[kv.WorkerKey{Worker: e.id}]
				if stats == nil || !stats.Connected.Load() || stats.LastSeq.Load()+1 != uint64(e.published()) {
					return fmt.Errorf("worker %d is behind; log:\n%s", e.id, f.out.String())
				}
			}
			return nil
		})
	}

	first := newFakeFleet(t, all)
	first.start()
	testkit.Settles(t, func() error {
		for _, e := range engines {
			subscribed := false
			e.events.Locked(func() { subscribed = len(e.events.Subs) > 0 })
			if stats := first.Streams()[kv.WorkerKey{Worker: e.id}]; !subscribed || stats == nil || stats.Cold.Load() { // cold: before the first replay
				return fmt.Errorf("worker %d is not followed", e.id)
			}
		}
		return nil
	})
	for _, e := range engines {
		e.steps(1000) // ten times what can be replayed
	}
	follows(first)
	for _, e := range engines {
		if wrong, known, all := e.compare(first.index); wrong != 0 || known != all || all < snapshotPrompts {
			t.Fatalf("worker %d before: %d wrong, knows %d of %d", e.id, wrong, known, all)
		}
	}
	var file []byte
	for range 2 { // the second is certainly written after all that
		if err := os.Remove(cfg.Snapshot.IndexSnapshot); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		engines[0].step() // nothing is written where nothing has changed
		testkit.Settles(t, func() (err error) {
			file, err = os.ReadFile(cfg.Snapshot.IndexSnapshot)
			return err
		})
	}
	engines[0].steps(25)
	engines[1].steps(25)
	first.stop()
	if err := os.WriteFile(cfg.Snapshot.IndexSnapshot, file, 0o600); err != nil { // as a kill leaves it
		t.Fatal(err)
	}
	engines[0].steps(25)
	engines[1].steps(300)
	engines[2].restart()
	engines[2].steps(30)

	second := newFakeFleet(t, all)
	second.start()
	follows(second)
	for _, e := range engines {
		e.steps(50)
	}
	follows(second)
	for i, e := range engines {
		wrong, known, all := e.compare(second.index)
		t.Logf("worker %d: %d wrong, knows %d of %d blocks", e.id, wrong, known, all)
		if wrong != 0 {
			t.Errorf("worker %d: %d blocks count that it does not hold", e.id, wrong)
		}
		if whole := known == all; whole != (i != 1) {
			t.Errorf("worker %d: knows %d of %d blocks", e.id, known, all)
		}
	}
	second.stop()
}
