package events_test

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/eventstest"
)

// badEvent has no type, so that it may have been a removal.
var badEvent = testkit.Event{}

// TestEventStreamTellsOfABadBatchOnce: half a megabyte of bad events made 91 MB of
// log.
func TestEventStreamTellsOfABadBatchOnce(t *testing.T) {
	const cleared = "cleared the worker's blocks"
	for _, c := range []struct {
		name, want string
		events     []testkit.Event
	}{
		{"bad events", "bad_events=5000", slices.Repeat([]testkit.Event{badEvent}, 5000)},
		{"bad events between good ones", "bad_events=500", slices.Repeat([]testkit.Event{testkit.StoredEvent(2, 0, 1), badEvent}, 500)},
		{"unknown parents after clearings", "times=500", slices.Repeat([]testkit.Event{{"cleared": true}, testkit.StoredEvent(3, 1, 2)}, 500)},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := eventstest.Applied(t, testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 2)), testkit.Payload(t, 1, c.events...))
			f.Holds(t, 1, 2, 0)
			f.Holds(t, 2, 1, 0)
			f.Has(t, map[string]uint64{"cold": 1})
			if log := f.Log.String(); strings.Count(log, cleared) != 1 || strings.Count(log, "\n") != 1 || !strings.Contains(log, c.want) {
				t.Errorf("log:\n%.2000s", log)
			}
		})
	}
}

// What is stored after a bad event may be what the next bad event has removed.
func TestEventStreamClearsAtEachBadEventWhatWasStoredBefore(t *testing.T) {
	f := eventstest.Applied(t, testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 1), badEvent, testkit.StoredEvent(2, 0, 1), badEvent, testkit.StoredEvent(3, 0, 1)))
	f.Holds(t, 1, 1, 0)
	f.Holds(t, 2, 1, 0)
	f.Holds(t, 3, 1, 1)
	f.Has(t, map[string]uint64{"decode_errors": 2, "cold": 1})
}

func TestEventStreamHoldsNoMoreThanTheWorkersCacheCan(t *testing.T) {
	f := eventstest.Applied(t, testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 900)))
	f.SetCapacity(10) // twice that and 1,024 are believed
	f.Apply(1, testkit.Payload(t, 1, testkit.StoredEvent(2, 0, 100)), true)
	f.Holds(t, 1, 900, 900)
	f.Has(t, map[string]uint64{"overflows": 0, "cold": 0})
	f.Apply(2, testkit.Payload(t, 1, testkit.StoredEvent(3, 0, 100), testkit.StoredEvent(4, 0, 1)), true)
	f.Holds(t, 1, 900, 0)
	f.Holds(t, 3, 100, 0)
	f.Holds(t, 4, 1, 1)
	f.Has(t, map[string]uint64{"overflows": 1, "cold": 1})
	if log := f.Log.String(); strings.Count(log, "remove too few") != 1 {
		t.Errorf("log:\n%s", log)
	}
	f.SetCapacity(0)
	f.Apply(3, testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 900), testkit.StoredEvent(2, 0, 900)), true)
	f.Holds(t, 2, 900, 900)
	f.SetCapacity(math.MaxInt)
	f.Apply(4, testkit.Payload(t, 1, testkit.StoredEvent(5, 0, 900)), true)
	f.Has(t, map[string]uint64{"overflows": 1})
}

func TestEventStreamAsksForTheHistoryAgainAfterAnOverflow(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	f := eventstest.Follow(t, eventstest.SourceOf(p), func(s *events.Stream) { s.Timing.Retry = 20 * time.Millisecond })
	f.SetCapacity(1)
	f.Subscribed(t, p)
	p.Batch(false, testkit.StoredEvent(1, 0, 900))
	f.Holds(t, 1, 900, 900)
	replays := f.Stats().Replays.Load()
	p.Batch(false, testkit.StoredEvent(2, 0, 900))
	f.Reaches(t, map[string]uint64{"overflows": 1, "replays": replays + 1})
	p.Batch(false, testkit.StoredEvent(3, 0, 1)) // and then it is not asked for ever
	f.Holds(t, 3, 1, 1)
}

// TestEventStreamGoesOnWhereAReplayGoesInCircles: the live events stood still.
func TestEventStreamGoesOnWhereAReplayGoesInCircles(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	p.Batch(true, testkit.StoredEvent(1, 0, 1))
	p.Replay = func(uint64) ([]uint64, bool) { return slices.Repeat([]uint64{0}, 1000), false }
	f := eventstest.Follow(t, eventstest.SourceOf(p), func(s *events.Stream) {
		s.Timing.ReplayLimit, s.Timing.ReplayPause = time.Hour, time.Hour
	})
	f.Subscribed(t, p)
	f.Reaches(t, map[string]uint64{"replay_failures": 1})
	p.Batch(false, testkit.StoredEvent(2, 0, 1))
	f.Holds(t, 2, 1, 1)
	if log := f.Log.String(); !strings.Contains(log, "batch 0 is followed by 0") {
		t.Errorf("log:\n%s", log)
	}
}

func TestEventStreamGivesUpAReplayThatDoesNotEnd(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	for i := range 100 {
		p.Batch(true, testkit.StoredEvent(i, 0, 1))
	}
	f := eventstest.Follow(t, eventstest.SourceOf(p), func(s *events.Stream) { s.Timing.ReplayWhole = time.Nanosecond })
	f.Subscribed(t, p)
	f.Reaches(t, map[string]uint64{"replay_failures": 1})
	p.Batch(false, testkit.StoredEvent(200, 0, 1))
	f.Holds(t, 200, 1, 1)
	p.Batch(false, testkit.StoredEvent(201, 0, 1))
	f.Holds(t, 201, 1, 1)
	f.Has(t, map[string]uint64{"replays": 1, "cold": 1})
	if log := f.Log.String(); strings.Count(log, "does not end: replay is disabled for it") != 1 {
		t.Errorf("log:\n%s", log)
	}
}

func TestEventStreamLivesOnAfterAPanicInABatch(t *testing.T) {
	f := eventstest.Applied(t, testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 2)))
	f.Edges = guard.New()
	f.OnLag = func(time.Duration) { panic("a parser's") }
	f.Apply(1, testkit.Payload(t, 1, testkit.StoredEvent(2, 0, 1)), true)
	f.Holds(t, 1, 2, 0) // it may have been removed
	f.OnLag = nil
	f.Apply(2, testkit.Payload(t, 1, testkit.StoredEvent(3, 0, 1)), true)
	f.Holds(t, 3, 1, 1)
	f.Has(t, map[string]uint64{"decode_errors": 1, "cold": 1})
	if n := f.Edges.Panics()[guard.KVEventBatch]; n != 1 {
		t.Errorf("%d panics are counted", n)
	}
	if events := f.History().Query(nil, nil, nil); *events.Last != 2 {
		t.Errorf("the log ends at %d", *events.Last)
	}
}

// The engine's clock is the engine's.
func TestEventStreamBelievesNoImpossibleAge(t *testing.T) {
	f := eventstest.Applied(t)
	f.Now = func() time.Time { return time.Unix(100, 0) }
	var lags []time.Duration
	f.OnLag = func(d time.Duration) { lags = append(lags, d) }
	for i, ts := range []float64{1000, -1e300, 1e300, math.Inf(-1), math.Inf(1), math.NaN()} {
		f.Apply(uint64(i), testkit.Payload(t, ts), true)
	}
	day := 24 * time.Hour
	testkit.WantEqual(t, "lags", lags, []time.Duration{0, day, 0, day, 0})
}

func TestEventStreamRefusesEventsThatAreTooLarge(t *testing.T) {
	many := testkit.Event{"removed": make([]uint16, 1<<20+1)}
	f := eventstest.Applied(t, testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 2)), testkit.Payload(t, 1, many, testkit.StoredEvent(2, 0, 1)))
	f.Holds(t, 1, 2, 0)
	f.Holds(t, 2, 1, 1)
	f.Has(t, map[string]uint64{"decode_errors": 1, "removed": 0})
}
