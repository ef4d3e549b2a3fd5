package events

import (
	"context"
	"fmt"
	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
	"kvrouter/internal/testkit"
	"log/slog"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// following is a stream that runs, with short waits.
type following struct {
	*Stream
	from   Source
	holder radix.Index
	log    *testkit.LogBuffer
	stop   func()
}

// followStream starts a stream; it is stopped, and checked for what it leaves
// behind, at the end of the test or by stop.
func followStream(t *testing.T, src Source, tweak func(*Stream)) *following {
	t.Helper()
	before := goleak.IgnoreCurrent()
	src.Worker = testkit.TestWorker
	if src.BlockSize == 0 {
		src.BlockSize = testkit.TestBlockSize
	}
	log := new(testkit.LogBuffer)
	index := radix.NewTree()
	s := NewStream(src, index, slog.New(slog.NewTextHandler(log, nil)))
	s.Timing.BackoffMin, s.Timing.BackoffMax = 5*time.Millisecond, 100*time.Millisecond
	s.Timing.ReplayLimit = 2 * time.Second
	if tweak != nil {
		tweak(s)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Run(ctx)
	}()
	var once sync.Once
	f := &following{s, src, index, log, nil}
	f.stop = func() {
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
	t.Cleanup(f.stop)
	return f
}

// holds waits until the worker holds exactly so many leading blocks of the
// first n of a prompt.
func (f *following) holds(t *testing.T, number, n, want int) {
	t.Helper()
	local := kv.HashBlocks(nil, testkit.PromptTokens(number, n), testkit.TestBlockSize, "", "")
	got := -1
	f.until(t, func() bool {
		got = 0
		for _, m := range f.holder.Match(local, nil) {
			if m.Worker == testkit.TestWorker {
				got = m.Blocks
			}
		}
		return got == want
	}, func() string { return fmt.Sprintf("prompt %d: holds %d blocks of %d, want %d", number, got, n, want) })
}

func (f *following) until(t *testing.T, condition func() bool, otherwise func() string) {
	t.Helper()
	limit := time.After(20 * time.Second)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-limit:
			t.Fatalf("%s\nstats: %+v\nlog:\n%s", otherwise(), f.counts(), f.log)
		case <-tick.C:
		}
	}
}

// reaches waits until the counters named have at least the values given.
func (f *following) reaches(t *testing.T, want map[string]uint64) {
	t.Helper()
	f.until(t, func() bool {
		got := f.counts()
		for name, n := range want {
			if got[name] < n {
				return false
			}
		}
		return true
	}, func() string { return fmt.Sprintf("want at least %v", want) })
}

// has checks the counters named.
func (f *following) has(t *testing.T, want map[string]uint64) {
	t.Helper()
	got := f.counts()
	for name, n := range want {
		if got[name] != n {
			t.Errorf("%s is %d, want %d\nstats: %v\nlog:\n%s", name, got[name], n, got, f.log)
		}
	}
}

func (f *following) counts() map[string]uint64 {
	s := f.Stats()
	flag := map[bool]uint64{true: 1}
	counts := s.Counts()
	counts["connected"], counts["cold"], counts["last_seq"] = flag[s.Connected.Load()], flag[s.Cold.Load()], s.LastSeq.Load()
	return counts
}

// sourceOf is where a publisher's events are.
func sourceOf(p *testkit.FakePublisher) Source {
	return Source{Endpoint: p.Pub.Endpoint(), Replay: p.Router.Endpoint(), Topic: "kv"}
}

// subscribed waits for so many subscribers and for the first replay after it.
func (f *following) subscribed(t *testing.T, p *testkit.FakePublisher) {
	t.Helper()
	f.until(t, func() (done bool) {
		p.Locked(func() { done = len(p.Subs) > 0 && (f.from.Replay == "" || len(p.Replayed) > 0) })
		return done
	}, func() string { return "no subscription" })
}
