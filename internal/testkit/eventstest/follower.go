// Package eventstest follows event streams for the tests of several packages; only
// tests import it.
package eventstest

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
)

// Follower is an event stream of testkit.EventWorker with short waits. It fills an
// index of its own.
type Follower struct {
	*events.Stream
	Log    *testkit.LogBuffer
	Stop   func() // ends the stream and fails the test if goroutines are left
	source events.Source
	index  radix.Index
}

// SourceOf returns where a publisher's events are.
func SourceOf(p *testkit.FakePublisher) events.Source {
	return events.Source{Endpoint: p.Pub.Endpoint(), Replay: p.Router.Endpoint(), Topic: "kv"}
}

// Follow starts a stream. tweak, if not nil, changes the stream before it runs. The
// stream stops at the end of the test or by Stop.
func Follow(t *testing.T, src events.Source, tweak func(*events.Stream)) *Follower {
	t.Helper()
	return FollowInto(t, src, radix.NewTree(), tweak)
}

// FollowInto is Follow into an index that may hold blocks already.
func FollowInto(t *testing.T, src events.Source, index *radix.Tree, tweak func(*events.Stream)) *Follower {
	t.Helper()
	before := goleak.IgnoreCurrent()
	src.Worker = testkit.EventWorker
	if src.BlockSize == 0 {
		src.BlockSize = testkit.BlockSize
	}
	f := newFollower(src, index)
	f.Timing.BackoffMin, f.Timing.BackoffMax = 5*time.Millisecond, 100*time.Millisecond
	f.Timing.ReplayLimit = 2 * time.Second
	if tweak != nil {
		tweak(f.Stream)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { // ends with ctx
		defer close(done)
		f.Run(ctx)
	}()
	var once sync.Once
	f.Stop = func() {
		once.Do(func() {
			cancel()
			select {
			case <-done:
			case <-time.After(10 * time.Second):
				t.Fatal("Run did not end with its context")
			}
			goleak.VerifyNone(t, before)
		})
	}
	t.Cleanup(f.Stop)
	return f
}

// Applied returns a stream that does not run: it has applied the batches, one after
// another, as a complete history.
func Applied(t *testing.T, batches ...[]byte) *Follower {
	t.Helper()
	f := newFollower(events.Source{Worker: testkit.EventWorker, BlockSize: testkit.BlockSize}, radix.NewTree())
	f.Begin(0)
	for i, b := range batches {
		f.Apply(uint64(i), b, true)
	}
	return f
}

func newFollower(src events.Source, index radix.Index) *Follower {
	log := new(testkit.LogBuffer)
	s := events.NewStream(src, index, events.Options{}, slog.New(slog.NewTextHandler(log, nil)))
	return &Follower{Stream: s, Log: log, source: src, index: index}
}

// Holds waits until the worker holds exactly want leading blocks of the first n of
// a prompt.
func (f *Follower) Holds(t *testing.T, number, n, want int) {
	t.Helper()
	local := kv.HashBlocks(nil, testkit.PromptTokens(number, n), testkit.BlockSize, "", "")
	got := -1
	f.Until(t, func() bool {
		got = 0
		for _, m := range f.index.Match(local, len(local), 0, nil) {
			if m.Worker == testkit.EventWorker {
				got = m.Blocks
			}
		}
		return got == want
	}, func() string { return fmt.Sprintf("prompt %d: holds %d blocks of %d, want %d", number, got, n, want) })
}

// Until polls condition for up to 20 s. If it does not hold by then, the test fails
// with the text of otherwise, the counters and the log.
func (f *Follower) Until(t *testing.T, condition func() bool, otherwise func() string) {
	t.Helper()
	limit := time.After(20 * time.Second)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-limit:
			t.Fatalf("%s\nstats: %+v\nlog:\n%s", otherwise(), f.Counters(), f.Log)
		case <-tick.C:
		}
	}
}

// Reaches waits until the counters named have at least the values given.
func (f *Follower) Reaches(t *testing.T, want map[string]uint64) {
	t.Helper()
	f.Until(t, func() bool {
		got := f.Counters()
		for name, n := range want {
			if got[name] < n {
				return false
			}
		}
		return true
	}, func() string { return fmt.Sprintf("want at least %v", want) })
}

// Has checks that the counters named have the values given.
func (f *Follower) Has(t *testing.T, want map[string]uint64) {
	t.Helper()
	got := f.Counters()
	for name, n := range want {
		if got[name] != n {
			t.Errorf("%s is %d, want %d\nstats: %v\nlog:\n%s", name, got[name], n, got, f.Log)
		}
	}
}

// Counters returns the stream's counters by name, and beside them "connected",
// "cold" (each 0 or 1) and "last_seq".
func (f *Follower) Counters() map[string]uint64 {
	s := f.Stats()
	flag := map[bool]uint64{true: 1}
	counts := s.Counts()
	counts["connected"], counts["cold"], counts["last_seq"] = flag[s.Connected.Load()], flag[s.Cold.Load()], s.LastSeq.Load()
	return counts
}

// Subscribed waits until the stream has subscribed and, if its source has a replay
// address, has asked for a first replay.
func (f *Follower) Subscribed(t *testing.T, p *testkit.FakePublisher) {
	t.Helper()
	f.Until(t, func() (done bool) {
		p.Locked(func() { done = len(p.Subs) > 0 && (f.source.Replay == "" || len(p.Replayed) > 0) })
		return done
	}, func() string { return "no subscription" })
}
