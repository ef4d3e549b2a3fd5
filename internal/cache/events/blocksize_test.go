package events_test

import (
	"log/slog"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/eventstest"
)

func TestEventStreamNamesBothBlockSizesOnce(t *testing.T) {
	e := testkit.StoredEvent(1, 0, 2)
	e["block_size"] = 6
	e["stored"] = testkit.BlockIDs(1, 0, 1)
	f := eventstest.Applied(t, testkit.Payload(t, 1, e, e), testkit.Payload(t, 1, e))
	f.Holds(t, 1, 2, 0)
	f.Has(t, map[string]uint64{"block_size_mismatch": 3, "stored_blocks": 0})
	if log := f.Log.String(); strings.Count(log, "level=WARN") != 1 || !strings.Contains(log, "engine=6") || !strings.Contains(log, "expected=4") {
		t.Errorf("log:\n%s", log)
	}
}

// TestBlockSizesOfEventsThatCannotBeAreNotFollowed: nor are their blocks taken.
func TestBlockSizesOfEventsThatCannotBeAreNotFollowed(t *testing.T) {
	for size, want := range map[int64][]int{0: nil, -1: nil, 1 << 31: nil, 1 << 40: nil, -1 << 63: nil, 1: {1}, 6: {6}, 1 << 20: {1 << 20}} {
		var sizes []int
		index := radix.NewTree()
		s := events.NewStream(events.Source{Worker: testkit.EventWorker, BlockSize: testkit.BlockSize}, index,
			events.Options{OnBlockSize: func(tokens int) { sizes = append(sizes, tokens) }}, slog.New(slog.DiscardHandler))
		s.Begin(0)
		e := testkit.StoredEvent(1, 0, 2)
		e["block_size"] = size
		s.Apply(0, testkit.Payload(t, 1, e), true)
		if !slices.Equal(sizes, want) || index.Blocks(testkit.EventWorker) != 0 {
			t.Errorf("%d: follows %v with %d blocks, want %v with none", size, sizes, index.Blocks(testkit.EventWorker), want)
		}
	}
}
