package mocker

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/eventstest"
)

// startMockEvents publishes blocks of testBlockSize tokens until the test ends.
func startMockEvents(t *testing.T, tweak func(*Events)) *Events {
	t.Helper()
	e, err := NewEvents("127.0.0.1:0", "127.0.0.1:0", testkit.BlockSize)
	if err != nil {
		t.Fatal(err)
	}
	if tweak != nil {
		tweak(e)
	}
	e.start()
	t.Cleanup(e.Close)
	return e
}

func (e *Events) source() events.Source {
	return events.Source{Endpoint: e.Pub.Endpoint(), Replay: e.router.Endpoint(), Topic: process.KVEventsTopic}
}

// storing is the event that stores blocks from to below to of a prompt.
func storing(number, from, to int) Event {
	e := Event{Tokens: testkit.PromptTokens(number, to)[from*testkit.BlockSize:]}
	for _, id := range testkit.BlockIDs(number, from, to) {
		e.Stored = append(e.Stored, kv.StoredBlock{Engine: id})
	}
	if from > 0 {
		e.Parent, e.HasParent = testkit.BlockIDs(number, from-1, from)[0], true
	}
	return e
}

func TestMockEventsAreReadInBothForms(t *testing.T) {
	for _, array := range []bool{false, true} {
		t.Run(fmt.Sprint("array ", array), func(t *testing.T) {
			e := startMockEvents(t, func(e *Events) { e.array = array })
			f := eventstest.Follow(t, e.source(), nil)
			f.Reaches(t, map[string]uint64{"connected": 1, "replays": 1})
			e.add([]Event{storing(1, 0, 3), storing(2, 0, 2)})
			f.Holds(t, 1, 3, 3)
			e.add([]Event{{Removed: testkit.BlockIDs(1, 1, 3)}, storing(1, 1, 4)})
			f.Holds(t, 1, 4, 4)
			f.Holds(t, 2, 2, 2)
			e.add([]Event{{Cleared: true}, storing(3, 0, 1)})
			f.Holds(t, 3, 1, 1)
			f.Holds(t, 2, 2, 0)
			f.Has(t, map[string]uint64{"stored": 4, "removed": 1, "cleared": 1, "decode_errors": 0, "ignored": 0, "unknown_removed": 0, "batches": 3, "cold": 0})
		})
	}
}

func TestMockEventsReplayWhatWasDropped(t *testing.T) {
	lost := 0.5
	e := startMockEvents(t, func(e *Events) {
		e.drop, e.duplicate = lost, 0.3
		e.random = newTestRandom()
	})
	f := eventstest.Follow(t, e.source(), func(s *events.Stream) {
		s.Timing.Quiet = [3]time.Duration{50 * time.Millisecond, 100 * time.Millisecond, 100 * time.Millisecond}
	})
	f.Until(t, func() bool { return !f.Stats().Cold.Load() && e.Pub.Subscribers() == 1 }, func() string { return "not followed" })
	for i := range 100 {
		e.add([]Event{storing(1, i, i+1)})
		if i%10 == 9 {
			e.add([]Event{{Removed: testkit.BlockIDs(1, i-2, i)}})
			e.add([]Event{storing(1, i-2, i)})
		}
	}
	f.Holds(t, 1, 100, 100)
	f.Reaches(t, map[string]uint64{"batches": 120})
	f.Has(t, map[string]uint64{"cold": 0, "unknown_parent": 0, "unknown_removed": 0, "batches": 120, "restarts": 0})
	if counts := f.Counters(); counts["gaps"] == 0 || counts["duplicates"] == 0 {
		t.Errorf("nothing was dropped or sent twice: %v", counts)
	}
}

func TestMockReplayKeepsTheNewestBatches(t *testing.T) {
	const keep = 100
	e := startMockEvents(t, func(e *Events) { e.Keep = keep })
	for range keep + 10 {
		e.add([]Event{{Removed: []uint64{1}}})
	}
	testkit.Eventually(t, 20*time.Second, "all published", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.seq == keep+10
	})
	for from, want := range map[uint64][2]uint64{0: {10, keep}, keep + 8: {keep + 8, 2}, keep + 10: {events.ReplayEnd, 0}, events.ReplayEnd: {events.ReplayEnd, 0}} {
		var seqs []uint64
		request := [][]byte{nil, {byte(from >> 56), byte(from >> 48), byte(from >> 40), byte(from >> 32), byte(from >> 24), byte(from >> 16), byte(from >> 8), byte(from)}}
		e.replay(request, func(frames ...[]byte) error {
			seq, _, err := events.BatchFrames(frames)
			seqs = append(seqs, seq)
			return err
		})
		if seqs[0] != want[0] || uint64(len(seqs)) != want[1]+1 || seqs[len(seqs)-1] != events.ReplayEnd {
			t.Errorf("from %d: %d batches from %d on", from, len(seqs)-1, seqs[0])
		}
	}
}

func newTestRandom() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }
