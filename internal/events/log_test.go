package events

import (
	"log/slog"
	"testing"
	"time"

	"kvrouter/internal/radix"
	"kvrouter/internal/testkit"
)

func TestEventLogAnswersRangesAndElseAllBlocks(t *testing.T) {
	f := NewStream(Source{Worker: testkit.EventWorker, BlockSize: testkit.BlockSize}, radix.NewTree(), slog.New(slog.DiscardHandler))
	f.Begin(0)
	from := func(n uint64) *uint64 { return &n }
	if a := f.History().Query(nil, nil, nil); a.Kind != kindDump || a.Last != nil || len(a.Events) != 0 {
		t.Errorf("nothing yet: %+v", a)
	}
	for i := range LoggedBatches + 10 {
		f.Apply(uint64(i), testkit.Payload(t, float64(i), testkit.StoredEvent(i, 0, 2), testkit.RemovedEvent(i, 1, 2)), true)
	}
	const newest, oldest = LoggedBatches + 9, 10
	for _, c := range []struct {
		start, end       *uint64
		kind             string
		events           int
		first, last      uint64
		before, complete bool
	}{
		{nil, nil, kindDump, LoggedBatches + 10, 0, newest, false, true},
		{from(0), nil, kindDump, LoggedBatches + 10, 0, newest, false, true},
		{from(oldest - 1), nil, kindDump, LoggedBatches + 10, 0, newest, false, true},
		{from(oldest), nil, kindEvents, 2 * LoggedBatches, oldest, newest, false, true},
		{from(newest), nil, kindEvents, 2, newest, newest, true, true},
		{from(newest - 1), from(newest - 1), kindEvents, 2, newest - 1, newest - 1, true, true},
		{from(newest - 1), from(newest + 50), kindEvents, 4, newest - 1, newest, true, true},
		{from(newest + 1), nil, kindTooNew, 0, 0, newest, true, true},
		{from(newest + 9), nil, kindTooNew, 0, 0, newest, false, true},
	} {
		a := f.History().Query(c.start, c.end, nil)
		if a.Kind != c.kind || len(a.Events) != c.events || *a.Last != c.last || a.LastDigest == nil || (a.BeforeDigest != nil) != c.before || a.Complete != c.complete {
			t.Errorf("%v to %v: %s, %d events, last %d, %v", c.start, c.end, a.Kind, len(a.Events), *a.Last, a)
		}
		if c.events > 0 && a.Events[0].ID != c.first {
			t.Errorf("%v to %v begins at %d", c.start, c.end, a.Events[0].ID)
		}
	}
	if n := len(f.History().batches); n != LoggedBatches {
		t.Errorf("%d batches kept", n)
	}

	// A few large batches push out many small ones.
	large := testkit.Event{"removed": make([]uint64, loggedBlocks/2)}
	f.Apply(newest+1, testkit.Payload(t, 1, large), true)
	f.Apply(newest+2, testkit.Payload(t, 1, large), true)
	f.Apply(newest+3, testkit.Payload(t, 1, large), true)
	if n, blocks := len(f.History().batches), f.History().blocks; n != 2 || blocks != loggedBlocks {
		t.Errorf("%d batches with %d blocks kept", n, blocks)
	}

	// What was forgotten is not vouched for.
	f.forget("a test")
	if a := f.History().Query(from(newest), nil, nil); a.Kind != kindDump || a.Last != nil || a.Complete {
		t.Errorf("after all was forgotten: %+v", a)
	}
}

func TestReplaysAreAskedForAgainEverMoreSeldom(t *testing.T) {
	timing := NewStream(Source{}, radix.NewTree(), slog.New(slog.DiscardHandler)).Timing
	for failures, want := range map[int]time.Duration{0: 200 * time.Millisecond, 1: 400 * time.Millisecond, 7: 25600 * time.Millisecond, 8: 30 * time.Second, 1000: 30 * time.Second} {
		if got := timing.retryPause(failures); got != want {
			t.Errorf("after %d failures %s, want %s", failures, got, want)
		}
	}
}
