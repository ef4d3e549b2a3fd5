package events

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"log/slog"
	"slices"
	"testing"
	"time"

	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
)

// eventsOf returns the events of an answer as they are written.
func eventsOf(a Answer) (all []peerEvent) {
	for id, c := range a.all {
		all = append(all, peerEvent{id, textOf(c, false)})
	}
	return all
}

func TestEventLogAnswersRangesAndElseAllBlocks(t *testing.T) {
	f := NewStream(Source{Worker: testkit.EventWorker, BlockSize: testkit.BlockSize}, radix.NewTree(), Options{}, slog.New(slog.DiscardHandler))
	f.Begin(0)
	from := func(n uint64) *uint64 { return &n }
	if a := f.History().Query(nil, nil, nil); a.Kind != kindDump || a.Last != nil || len(eventsOf(a)) != 0 {
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
		told := eventsOf(a)
		if a.Kind != c.kind || len(told) != c.events || *a.Last != c.last || a.LastDigest == nil || (a.BeforeDigest != nil) != c.before || a.Complete != c.complete {
			t.Errorf("%v to %v: %s, %d events, last %d, %v", c.start, c.end, a.Kind, len(told), *a.Last, a)
		}
		if c.events > 0 && told[0].ID != c.first {
			t.Errorf("%v to %v begins at %d", c.start, c.end, told[0].ID)
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
	timing := NewStream(Source{}, radix.NewTree(), Options{}, slog.New(slog.DiscardHandler)).Timing
	for failures, want := range map[int]time.Duration{0: 200 * time.Millisecond, 1: 400 * time.Millisecond, 7: 25600 * time.Millisecond, 8: 30 * time.Second, 1000: 30 * time.Second} {
		if got := timing.retryPause(failures); got != want {
			t.Errorf("after %d failures %s, want %s", failures, got, want)
		}
	}
}

// TestEventLogIsBoundedByEvents: events without blocks take memory as well, and one
// batch can have more of them than all batches may.
func TestEventLogIsBoundedByEvents(t *testing.T) {
	cleared := testkit.Event{"cleared": true}
	removals := func(n int) []byte { // of one block each
		head := binary.BigEndian.AppendUint32([]byte("\x92\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\xdd"), uint32(n))
		return append(head, bytes.Repeat([]byte("\x92\xacBlockRemoved\x91\x01"), n)...)
	}
	repeat := func(n int, e ...testkit.Event) []testkit.Event { return slices.Repeat(e, n) }
	f := NewStream(Source{Worker: testkit.EventWorker, BlockSize: testkit.BlockSize}, radix.NewTree(), Options{}, slog.New(slog.DiscardHandler))
	f.Begin(0)
	seq := uint64(0)
	applyPayload := func(payload []byte) {
		f.Apply(seq, payload, true)
		seq++
	}
	apply := func(events ...testkit.Event) { applyPayload(testkit.Payload(t, 1, events...)) }
	events := func() (n int) {
		for _, b := range f.History().batches {
			n += len(b.changes)
		}
		return n
	}
	apply(repeat(1000, cleared)...)
	apply(repeat(1000, testkit.Event{"removed": []uint64{}})...)
	if n := events(); n != 1 {
		t.Errorf("%d events are kept of clearings and of removals of nothing", n)
	}
	apply(testkit.StoredEvent(1, 0, 2), testkit.StoredEvent(2, 0, 2), cleared, testkit.StoredEvent(3, 0, 1))
	if a := eventsOf(f.History().Query(&[]uint64{2}[0], nil, nil)); len(a) != 2 || !a[0].Data.Cleared || a[1].Data.Stored == nil {
		t.Errorf("before and after a clearing: %+v", a)
	}
	for range 6 {
		applyPayload(removals(loggedBlocks / 4))
	}
	if n, blocks := events(), f.History().blocks; n > loggedBlocks || blocks > loggedBlocks {
		t.Errorf("%d events with %d blocks are kept", n, blocks)
	}

	// One batch that is too large for itself: only its digest stays.
	applyPayload(removals(loggedBlocks + 1))
	apply(testkit.StoredEvent(4, 0, 1))
	start, check := seq-2, seq-1
	if a := f.History().Query(&start, nil, &check); a.Kind != kindDump || a.CheckDigest == nil || a.BeforeDigest == nil || *a.Last != seq-1 {
		t.Errorf("of a batch that is not kept: %+v", a)
	}
	start++
	if a := f.History().Query(&start, nil, nil); a.Kind != kindEvents || len(eventsOf(a)) != 1 || a.BeforeDigest == nil {
		t.Errorf("after it: %+v", a)
	}
	if n := events(); n > loggedBlocks {
		t.Errorf("%d events are kept", n)
	}
}

func TestAnswersAreWrittenAsTheyAreRead(t *testing.T) {
	f := NewStream(Source{Worker: testkit.EventWorker, BlockSize: testkit.BlockSize}, radix.NewTree(), Options{}, slog.New(slog.DiscardHandler))
	f.Begin(0)
	f.Apply(0, testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 3*dumpedTogether), testkit.StoredEvent(50, 0, 1), testkit.StoredEvent(50, 1, 2)), true)
	f.Apply(1, testkit.Payload(t, 1, testkit.RemovedEvent(50, 1, 2)), true)
	zero := uint64(0)
	for _, start := range []*uint64{nil, &zero} {
		answer := f.History().Query(start, nil, &zero)
		want := eventsOf(answer)
		var text bytes.Buffer
		if err := answer.Write(&text); err != nil {
			t.Fatal(err)
		}
		var read struct {
			Answer
			Events []peerEvent `json:"events"`
		}
		if err := json.Unmarshal(text.Bytes(), &read); err != nil {
			t.Fatalf("%v: %.200s", err, &text)
		}
		got, _ := json.Marshal(read.Events)
		expected, _ := json.Marshal(want)
		if !bytes.Equal(got, expected) || read.Kind != answer.Kind || *read.Last != 1 || *read.LastDigest != *answer.LastDigest || *read.CheckDigest != *answer.CheckDigest || !read.Complete {
			t.Errorf("from %v: %+v of %+v", start, read, answer)
		}
		blocks := 0
		for _, e := range read.Events {
			if e.Data.Stored != nil {
				blocks += len(e.Data.Stored.Blocks)
				if start == nil && len(e.Data.Stored.Blocks) > dumpedTogether {
					t.Errorf("%d blocks in one event of a dump", len(e.Data.Stored.Blocks))
				}
			}
		}
		if want := 3*dumpedTogether + map[bool]int{true: 1, false: 2}[start == nil]; blocks != want {
			t.Errorf("%d blocks, want %d", blocks, want)
		}
	}
	var nothing bytes.Buffer
	empty := (&Log{index: radix.NewTree(), stats: new(Stats)}).Query(nil, nil, nil)
	if err := empty.Write(&nothing); err != nil || !json.Valid(nothing.Bytes()) || !bytes.HasSuffix(nothing.Bytes(), []byte(`"events":[]}`)) {
		t.Errorf("%s, %v", &nothing, err)
	}
}
