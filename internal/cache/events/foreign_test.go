package events_test

import (
	"slices"
	"testing"
	"time"

	"kvrouter/internal/cache/events"
	"kvrouter/internal/testkit"
)

// neverChecks lets a quiet connection be.
func neverChecks(s *events.Stream) {
	s.Timing.Quiet = [3]time.Duration{time.Minute, time.Minute, time.Minute}
}

// TestEventStreamMixesNoBatchOfAnEndedPublisherIn has the replay endpoint belong to a new
// engine, while the connection still delivers what the old one has sent.
func TestEventStreamMixesNoBatchOfAnEndedPublisherIn(t *testing.T) {
	for name, late := range map[string]uint64{"with the number that comes next": 2, "with a later number": 7} {
		t.Run(name, func(t *testing.T) {
			p, f := followFirst(t, 2, neverChecks)
			batch := func(number int) []byte {
				return testkit.Payload(t, float64(time.Now().UnixNano())/1e9, testkit.StoredEvent(number, 0, 2))
			}
			p.Locked(func() {
				p.History = [][]byte{batch(2), batch(3)}
				p.Send(late, batch(4))
				p.Subs = nil // the next subscription is that of the new connection
			})
			f.Holds(t, 2, 2, 2)
			f.Reaches(t, map[string]uint64{"reconnects": 1, "restarts": 1})
			f.Subscribed(t, p)
			p.Batch(false, testkit.StoredEvent(5, 0, 2))
			f.Holds(t, 5, 2, 2)
			for number, want := range map[int]int{1: 0, 3: 2, 4: 0} {
				f.Holds(t, number, 2, want)
			}
			f.Has(t, map[string]uint64{"cold": 0})
		})
	}
}

// TestEventStreamKeepsAConnectionThatLeadsToTheNewPublisher restarts the engine behind a
// proxy that keeps connections.
func TestEventStreamKeepsAConnectionThatLeadsToTheNewPublisher(t *testing.T) {
	p, f := followFirst(t, 2, neverChecks)
	p.Locked(func() { p.History = nil })
	p.Batch(false, testkit.StoredEvent(2, 0, 2))
	p.Batch(false, testkit.StoredEvent(3, 0, 2))
	for number, want := range map[int]int{1: 0, 2: 2, 3: 2} {
		f.Holds(t, number, 2, want)
	}
	f.Has(t, map[string]uint64{"reconnects": 0, "restarts": 1, "cold": 0})
}

// TestEventStreamAsksAgainWhenTheEndOfAReplayIsLost leaves the newest batches out of one
// replay, as a full queue does.
func TestEventStreamAsksAgainWhenTheEndOfAReplayIsLost(t *testing.T) {
	p, f := followFirst(t, 2, neverChecks)
	p.Locked(func() {
		p.Replay = func(from uint64) (seqs []uint64, end bool) {
			p.Replay = nil
			return []uint64{from}, true
		}
	})
	p.Batch(true, testkit.StoredEvent(2, 0, 2))
	p.Batch(false, testkit.StoredEvent(3, 0, 2))
	for number := range 3 {
		f.Holds(t, number+1, 2, 2)
	}
	f.Has(t, map[string]uint64{"gaps": 1, "cold": 0})
	p.Batch(true, testkit.RemovedEvent(1, 0, 2))
	p.Batch(false, testkit.StoredEvent(4, 0, 2))
	f.Holds(t, 4, 2, 2)
	f.Holds(t, 1, 2, 0)
	f.Has(t, map[string]uint64{"gaps": 2, "cold": 0})
	p.Locked(func() {
		if !slices.Contains(p.Replayed, 2) {
			t.Errorf("replays asked for: %v", p.Replayed)
		}
	})
}
