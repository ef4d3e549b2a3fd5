package events_test

import (
	"io"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/eventstest"
	"kvrouter/internal/testkit/radixtest"
)

// followFirst starts a publisher, and a stream that has its first batch: that many blocks
// of prompt 1. tweak is as for eventstest.Follow.
func followFirst(t *testing.T, blocks int, tweak func(*events.Stream)) (*testkit.FakePublisher, *eventstest.Follower) {
	t.Helper()
	p := testkit.NewFakePublisher(t)
	f := eventstest.Follow(t, eventstest.SourceOf(p), tweak)
	f.Subscribed(t, p)
	p.Batch(false, testkit.StoredEvent(1, 0, blocks))
	f.Holds(t, 1, blocks, blocks)
	return p, f
}

func TestEventStreamFetchesAGapBeforeItGoesOn(t *testing.T) {
	p, f := followFirst(t, 2, nil)
	p.Batch(true, testkit.StoredEvent(1, 2, 3))
	p.Batch(true, testkit.RemovedEvent(1, 1, 3))
	p.Batch(false, testkit.StoredEvent(1, 1, 5))
	f.Holds(t, 1, 5, 5)
	f.Has(t, map[string]uint64{"gaps": 1, "replays": 2, "replayed_batches": 3, "batches": 4, "cold": 0, "last_seq": 3, "unknown_parent": 0})
	p.Locked(func() { testkit.WantEqual(t, "replays asked for", p.Replayed, []uint64{0, 0}) })
	f.Reaches(t, map[string]uint64{"duplicates": 1}) // the batch that showed the gap
}

func TestEventStreamClearsAfterAGapWithoutReplay(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	src := eventstest.SourceOf(p)
	src.Replay = ""
	f := eventstest.Follow(t, src, nil)
	f.Subscribed(t, p)
	p.Batch(false, testkit.StoredEvent(1, 0, 2))
	f.Holds(t, 1, 2, 2)
	f.Has(t, map[string]uint64{"cold": 0})
	p.Batch(true, testkit.RemovedEvent(1, 0, 2))
	p.Batch(false, testkit.StoredEvent(2, 0, 2))
	f.Holds(t, 2, 2, 2)
	f.Holds(t, 1, 2, 0)
	f.Has(t, map[string]uint64{"gaps": 1, "replays": 0, "cold": 1})
	p.Batch(false, testkit.Event{"cleared": true}, testkit.StoredEvent(3, 0, 1))
	f.Holds(t, 3, 1, 1)
	f.Holds(t, 2, 1, 0)
	f.Has(t, map[string]uint64{"cleared": 1, "cold": 0})

	// Nobody can tell what was missed while the connection was down.
	p.Drop()
	f.Holds(t, 3, 1, 0)
	f.Has(t, map[string]uint64{"cold": 1})
}

func TestEventStreamClearsWhenAReplayIsNotAnswered(t *testing.T) {
	p, f := followFirst(t, 2, func(s *events.Stream) {
		s.Timing.ReplayLimit, s.Timing.Retry = 20*time.Millisecond, 100*time.Millisecond
	})
	p.Locked(func() { p.Replay = func(uint64) ([]uint64, bool) { return nil, false } })
	p.Batch(true, testkit.RemovedEvent(1, 0, 2))
	p.Batch(false, testkit.StoredEvent(2, 0, 2))
	f.Holds(t, 2, 2, 2)
	f.Holds(t, 1, 2, 0)
	f.Has(t, map[string]uint64{"cold": 1, "gaps": 1})
	f.Reaches(t, map[string]uint64{"replay_failures": 1})
	// It is asked again, and then the history is whole.
	p.Locked(func() { p.Replay = nil })
	f.Until(t, func() bool {
		p.Batch(false, testkit.Event{"removed": []int{}})
		return !f.Stats().Cold.Load()
	}, func() string { return "stays cold" })
	f.Holds(t, 2, 2, 2)
	f.Holds(t, 1, 2, 0)
}

func TestEventStreamAsksAgainAfterAHoleInAReplay(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	for i := range 6 {
		p.Batch(true, testkit.StoredEvent(1, i, i+1))
	}
	round := 0
	p.Replay = func(from uint64) ([]uint64, bool) {
		round++
		switch round {
		case 1:
			return []uint64{0, 1, 4, 5}, true // dropped in the middle
		case 2:
			return []uint64{1, 2, 3}, false // end mark dropped
		}
		return []uint64{3, 4, 5}, true
	}
	f := eventstest.Follow(t, eventstest.SourceOf(p), func(s *events.Stream) { s.Timing.ReplayPause = 500 * time.Millisecond })
	f.Holds(t, 1, 6, 6)
	f.Has(t, map[string]uint64{"batches": 6, "replay_failures": 0, "cold": 0})
	p.Locked(func() { testkit.WantEqual(t, "replays asked for", p.Replayed, []uint64{0, 1, 3}) })
}

func TestEventStreamStartsColdWhereTheBufferBegins(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	for i := range 6 {
		p.Batch(true, testkit.StoredEvent(i, 0, 1))
	}
	oldest := uint64(3)
	p.Replay = func(from uint64) (seqs []uint64, end bool) {
		for seq := max(from, oldest); seq < uint64(len(p.History)); seq++ {
			seqs = append(seqs, seq)
		}
		return seqs, true
	}
	f := eventstest.Follow(t, eventstest.SourceOf(p), nil)
	f.Holds(t, 5, 1, 1)
	f.Holds(t, 3, 1, 1)
	f.Holds(t, 2, 1, 0)
	f.Has(t, map[string]uint64{"cold": 1, "batches": 3})

	// A gap that has left the buffer: what was known is not to be trusted.
	f.Subscribed(t, p)
	p.Batch(true, testkit.RemovedEvent(5, 0, 1))
	p.Batch(true, testkit.StoredEvent(6, 0, 1))
	p.Locked(func() { oldest = 7 })
	p.Batch(false, testkit.StoredEvent(7, 0, 1))
	f.Holds(t, 7, 1, 1)
	f.Holds(t, 6, 1, 1)
	f.Holds(t, 5, 1, 0)
	f.Has(t, map[string]uint64{"cold": 1, "gaps": 1, "restarts": 0, "replay_failures": 1})
}

func TestEventStreamGivesUpAReplayWithoutHistory(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	p.Replay = func(uint64) ([]uint64, bool) { return nil, true }
	p.Batch(true, testkit.StoredEvent(1, 0, 1))
	f := eventstest.Follow(t, eventstest.SourceOf(p), func(s *events.Stream) {
		s.Timing.Quiet = [3]time.Duration{time.Hour, time.Millisecond, time.Millisecond}
	})
	f.Subscribed(t, p)
	p.Batch(false, testkit.StoredEvent(2, 0, 1))
	f.Holds(t, 2, 1, 1)
	f.Has(t, map[string]uint64{"cold": 1, "gaps": 1})
	replays := f.Stats().Replays.Load()
	p.Batch(false, testkit.StoredEvent(2, 1, 2))
	f.Holds(t, 2, 2, 2)
	f.Has(t, map[string]uint64{"replays": replays, "restarts": 0})
}

func TestEventStreamFindsWhatASilentConnectionMissed(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	f := eventstest.Follow(t, eventstest.SourceOf(p), func(s *events.Stream) {
		s.Timing.Quiet = [3]time.Duration{20 * time.Millisecond, 20 * time.Millisecond, 20 * time.Millisecond}
	})
	f.Subscribed(t, p)
	p.Batch(true, testkit.StoredEvent(1, 0, 1))
	f.Holds(t, 1, 1, 1)
	// By now the connection has had its time: what it does not bring shows
	// that it is dead.
	f.Reaches(t, map[string]uint64{"replays": 3})
	p.Batch(true, testkit.StoredEvent(1, 1, 2))
	f.Holds(t, 1, 2, 2)
	f.Reaches(t, map[string]uint64{"reconnects": 1})
	f.Has(t, map[string]uint64{"gaps": 0, "restarts": 0, "cold": 0})
}

func TestEventStreamOfManyIsCheckedMoreRarely(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	var many atomic.Int64
	many.Store(int64(time.Hour / time.Millisecond))
	f := eventstest.Follow(t, eventstest.SourceOf(p), func(s *events.Stream) {
		s.Timing.Quiet = [3]time.Duration{time.Millisecond, time.Millisecond, time.Millisecond}
		s.Rarer = func() int { return int(many.Load()) }
	})
	f.Subscribed(t, p)
	p.Batch(false, testkit.StoredEvent(1, 0, 1))
	f.Holds(t, 1, 1, 1)
	f.Reaches(t, map[string]uint64{"replays": 2}) // after connecting, and after the last message
	p.Batch(true, testkit.StoredEvent(1, 1, 2))
	many.Store(1)
	p.Batch(false, testkit.StoredEvent(1, 2, 3)) // wakes it
	f.Holds(t, 1, 3, 3)
	before := f.Stats().Replays.Load()
	f.Reaches(t, map[string]uint64{"replays": before + 3})
}

func TestEventStreamNoticesANewPublisher(t *testing.T) {
	// restart swaps the publisher's past.
	restart := func(t *testing.T, p *testkit.FakePublisher, events ...testkit.Event) {
		p.Locked(func() {
			p.History = nil
			for _, e := range events {
				p.History = append(p.History, testkit.Payload(t, 2, e))
			}
		})
	}
	for name, c := range map[string]struct {
		past []testkit.Event
		drop bool
		send bool
	}{
		"that has published nothing":          {nil, true, false},
		"that has published less":             {[]testkit.Event{testkit.StoredEvent(9, 0, 1)}, true, false},
		"that has published as much":          {[]testkit.Event{testkit.StoredEvent(9, 0, 1), testkit.StoredEvent(8, 0, 1)}, true, false},
		"that has published more":             {[]testkit.Event{testkit.StoredEvent(9, 0, 1), testkit.StoredEvent(8, 0, 1), testkit.StoredEvent(7, 0, 1)}, true, false},
		"behind a proxy":                      {[]testkit.Event{testkit.StoredEvent(9, 0, 1)}, false, true},
		"behind a proxy, as far as the last":  {[]testkit.Event{testkit.StoredEvent(9, 0, 1), testkit.StoredEvent(8, 0, 1)}, false, true},
		"behind a proxy, farther than before": {[]testkit.Event{testkit.StoredEvent(9, 0, 1), testkit.StoredEvent(8, 0, 1), testkit.StoredEvent(7, 0, 1), testkit.StoredEvent(6, 0, 1)}, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			p := testkit.NewFakePublisher(t)
			f := eventstest.Follow(t, eventstest.SourceOf(p), nil)
			f.Subscribed(t, p)
			p.Batch(false, testkit.StoredEvent(1, 0, 1))
			p.Batch(false, testkit.StoredEvent(2, 0, 1))
			f.Holds(t, 2, 1, 1)
			restart(t, p, c.past...)
			if c.drop {
				p.Drop()
			}
			if c.send {
				last := len(c.past) - 1
				p.Locked(func() { p.Send(uint64(last), p.History[last]) })
			}
			f.Holds(t, 2, 1, 0)
			f.Holds(t, 1, 1, 0)
			if len(c.past) > 0 {
				f.Holds(t, 9, 1, 1)
			}
			f.Until(t, func() bool { return !f.Stats().Cold.Load() }, func() string { return "stays cold" })
			f.Has(t, map[string]uint64{"restarts": 1, "replay_failures": 0})
		})
	}
}

func TestEventStreamKeepsItsBlocksOverALostConnection(t *testing.T) {
	p, f := followFirst(t, 1, nil)
	p.Drop()
	p.Batch(true, testkit.StoredEvent(1, 1, 2))
	f.Holds(t, 1, 2, 2)
	f.Has(t, map[string]uint64{"restarts": 0, "cold": 0, "batches": 2})
	f.Reaches(t, map[string]uint64{"reconnects": 1})
}

func TestEventStreamForgetsAWorkerThatStaysAway(t *testing.T) {
	p, f := followFirst(t, 1, func(s *events.Stream) { s.Timing.Grace = 50 * time.Millisecond })
	p.Pub.Close()
	f.Holds(t, 1, 1, 0)
	f.Has(t, map[string]uint64{"cold": 1, "connected": 0})
}

func TestEventStreamSurvivesMessagesThatAreNoBatches(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	f := eventstest.Follow(t, eventstest.SourceOf(p), nil)
	f.Subscribed(t, p)
	p.Locked(func() {
		_ = p.Subs[0].Send([]byte("kv-events"))
		_ = p.Subs[0].Send([]byte("kv-events"), []byte("short"), nil)
		_ = p.Subs[0].Conn.SendCmd(zmq4.CmdPing, []byte("\x00\x01context"))
	})
	p.Batch(false, testkit.StoredEvent(1, 0, 1))
	f.Holds(t, 1, 1, 1)
	f.Has(t, map[string]uint64{"decode_errors": 2, "reconnects": 0})
	f.Until(t, func() (ok bool) {
		p.Locked(func() { ok = len(p.Pongs) == 1 && p.Pongs[0] == "context" })
		return ok
	}, func() string { return "no answer to the heartbeat" })
	// A frame of 2^62 bytes ends the connection, not the process.
	p.Locked(func() { _, _ = p.Subs[0].Raw.Write([]byte{2, 0x40, 0, 0, 0, 0, 0, 0, 0}) })
	f.Reaches(t, map[string]uint64{"reconnects": 1})
	f.Subscribed(t, p)
	p.Batch(true, testkit.StoredEvent(1, 1, 2))
	f.Holds(t, 1, 2, 1+1)
}

func TestEventStreamEndsWhereverItWaits(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for name, place := range map[string]func(p *testkit.FakePublisher) events.Source{
		"for a publisher": func(*testkit.FakePublisher) events.Source {
			return events.Source{Endpoint: "tcp://127.0.0.1:1"}
		},
		"for a greeting": func(*testkit.FakePublisher) events.Source {
			return events.Source{Endpoint: "tcp://" + silent.Addr().String()}
		},
		"for a replay": func(p *testkit.FakePublisher) events.Source { return eventstest.SourceOf(p) },
		"for a message": func(p *testkit.FakePublisher) events.Source {
			return events.Source{Endpoint: eventstest.SourceOf(p).Endpoint, Topic: "kv"}
		},
		"with a bad address": func(*testkit.FakePublisher) events.Source { return events.Source{Endpoint: "tcp:nowhere"} },
	} {
		t.Run(name, func(t *testing.T) {
			p := testkit.NewFakePublisher(t)
			p.Replay = func(uint64) ([]uint64, bool) { return nil, false }
			src := place(p)
			f := eventstest.Follow(t, src, func(s *events.Stream) { s.Timing.ReplayLimit = time.Hour })
			if src.Topic != "" {
				f.Subscribed(t, p)
			}
			f.Stop()
		})
	}
}

func TestEventStreamLeavesOutABadEventAlone(t *testing.T) {
	bad := testkit.StoredEvent(2, 0, 1)
	bad["tokens"] = []any{1, nil, 3, 4}
	f := eventstest.Applied(t, testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 2), bad, testkit.StoredEvent(1, 2, 3)))
	f.Holds(t, 1, 3, 3)
	f.Has(t, map[string]uint64{"decode_errors": 1, "stored": 2, "stored_blocks": 3, "cold": 1})
}

func TestEventStreamClearsWhenARemovalMayHaveBeenMissed(t *testing.T) {
	for name, c := range map[string]testkit.Event{
		"bad removal": {"removed": []any{"x", nil}},
		"no type":     {"as is": map[string]any{"block_hashes": []int{1}}},
	} {
		t.Run(name, func(t *testing.T) {
			f := eventstest.Applied(t, testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 2), c, testkit.StoredEvent(2, 0, 1)))
			f.Holds(t, 1, 2, 0)
			f.Holds(t, 2, 1, 1)
			f.Has(t, map[string]uint64{"decode_errors": 1, "cold": 1})
		})
	}
	t.Run("payload cut short", func(t *testing.T) {
		whole := testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 2), testkit.StoredEvent(2, 0, 1))
		f := eventstest.Applied(t, testkit.Payload(t, 1, testkit.StoredEvent(3, 0, 1)), whole[:len(whole)-20], testkit.Payload(t, 1, testkit.StoredEvent(4, 0, 1)))
		f.Holds(t, 3, 1, 0)
		f.Holds(t, 1, 2, 0)
		f.Holds(t, 4, 1, 1)
		f.Has(t, map[string]uint64{"decode_errors": 1, "cold": 1})
	})
	t.Run("payload no batch", func(t *testing.T) {
		f := eventstest.Applied(t, testkit.Payload(t, 1, testkit.StoredEvent(3, 0, 1)), []byte("\x01"))
		f.Holds(t, 3, 1, 0)
		f.Has(t, map[string]uint64{"decode_errors": 1, "cold": 1})
	})
}

// inGroup names the KV-cache group of an event; of a store also its kind, and its window if not 0.
func inGroup(e testkit.Event, group int, kind string, window int) testkit.Event {
	e["group_idx"] = group
	if kind != "" {
		e["kv_cache_spec_kind"] = kind
	}
	if window > 0 {
		e["kv_cache_spec_sliding_window"] = window
	}
	return e
}

// sparse leaves out the engine hashes of a prompt's first blocks, as a group that does
// not keep them.
func sparse(e testkit.Event, from int) testkit.Event {
	e["stored"] = e["stored"].([]uint64)[from:]
	return e
}

func TestEventStreamFindsWhatAllCacheGroupsHold(t *testing.T) {
	const full, window, state = "full_attention", "sliding_window", "mamba"
	stored, removed := testkit.StoredEvent, testkit.RemovedEvent
	type step struct {
		event testkit.Event
		holds int // of the six blocks of prompt 1
	}
	for name, steps := range map[string][]step{
		"two groups of full attention": {
			{inGroup(stored(1, 0, 6), 0, "mla_attention", 0), 6},
			{inGroup(stored(1, 0, 4), 1, full, 0), 4},
			{inGroup(removed(1, 2, 3), 1, "", 0), 2},
			{inGroup(removed(1, 5, 6), 0, "", 0), 2},
		},
		"a window of two blocks": {
			{inGroup(stored(1, 0, 6), 1, full, 0), 6},
			{inGroup(sparse(stored(1, 0, 6), 3), 0, window, 9), 6},
			{inGroup(removed(1, 3, 4), 0, "", 0), 6}, // before the window of the whole
			{inGroup(removed(1, 5, 6), 0, "", 0), 0}, // the rest ends in block 4, whose window begins in 3
			{inGroup(stored(1, 3, 4), 0, window, 9), 5},
			{inGroup(removed(1, 4, 6), 1, "", 0), 0},
		},
		"the beginning is a window": {
			{inGroup(stored(1, 0, 6), 0, full, 0), 6},
			{inGroup(stored(1, 0, 2), 1, window, 100), 2},
		},
		"a state": {
			{inGroup(stored(1, 0, 6), 0, full, 0), 6},
			{inGroup(sparse(stored(1, 0, 6), 6), 1, state, 0), 0}, // without any hash
			{inGroup(sparse(stored(1, 0, 5), 4), 1, state, 0), 5},
			{inGroup(sparse(stored(1, 0, 2), 1), 1, state, 0), 5},
			{inGroup(removed(1, 4, 5), 1, "", 0), 2},
		},
		"copies of a window": {
			{inGroup(stored(1, 0, 6), 0, full, 0), 6},
			{inGroup(stored(1, 0, 6), 1, window, 5), 6},
			{inGroup(stored(1, 4, 6), 1, window, 5), 6},
			{inGroup(removed(1, 5, 6), 1, "", 0), 6},
			{inGroup(removed(1, 5, 6), 1, "", 0), 5},
		},
		"a window without a size": {
			{inGroup(stored(1, 0, 6), 1, full, 0), 6},
			{inGroup(stored(1, 0, 2), 0, window, 0), 6},
			{inGroup(removed(1, 0, 2), 0, "", 0), 6},
		},
		"windows only": {
			{inGroup(stored(1, 0, 6), 0, window, 9), 6},
			{inGroup(removed(1, 0, 4), 0, "", 0), 6},
			{inGroup(removed(1, 5, 6), 0, "", 0), 0},
		},
		"no kinds, the first group counts": {
			{inGroup(stored(1, 0, 2), 1, "", 0), 0},
			{inGroup(stored(1, 0, 2), 0, "", 0), 2},
			{inGroup(removed(1, 1, 2), 1, "", 0), 2},
		},
		"an unknown kind": {{inGroup(stored(1, 0, 2), 0, "unknown", 0), 0}},
	} {
		t.Run(name, func(t *testing.T) {
			f := eventstest.Applied(t)
			for i, s := range steps {
				f.Apply(uint64(i), testkit.Payload(t, 1, s.event), true)
				f.Holds(t, 1, 6, s.holds)
			}
		})
	}
	t.Run("the window comes first in its batch", func(t *testing.T) {
		f := eventstest.Applied(t, testkit.Payload(t, 1,
			inGroup(sparse(stored(1, 0, 6), 4), 0, window, 9), inGroup(stored(1, 0, 6), 1, full, 0),
			inGroup(removed(1, 0, 1), 0, "", 0)))
		f.Holds(t, 1, 6, 6)
		f.Has(t, map[string]uint64{"unknown_parent": 0, "unknown_groups": 0, "unknown_removed": 1})
	})
	t.Run("a group with a block of twice the size", func(t *testing.T) {
		large := inGroup(testkit.StoredEvent(1, 0, 4), 1, window, 9)
		large["block_size"], large["stored"] = 2*testkit.BlockSize, []uint64{testkit.BlockIDs(1, 1, 2)[0], testkit.BlockIDs(1, 3, 4)[0]}
		f := eventstest.Applied(t, testkit.Payload(t, 1, inGroup(stored(1, 0, 6), 0, full, 0), large))
		f.Holds(t, 1, 6, 4)
		f.Holds(t, 1, 3, 2)
	})
	t.Run("an engine's block of three of ours", func(t *testing.T) {
		e := inGroup(stored(1, 0, 6), 0, full, 0)
		e["block_size"], e["stored"] = 3*testkit.BlockSize, testkit.BlockIDs(1, 0, 2)
		f := eventstest.Applied(t, testkit.Payload(t, 1, e))
		f.Holds(t, 1, 6, 6)
		f.Holds(t, 1, 5, 3)
		f.Apply(1, testkit.Payload(t, 1, inGroup(removed(1, 1, 2), 0, "", 0)), true)
		f.Holds(t, 1, 6, 3)
		f.Has(t, map[string]uint64{"block_size_mismatch": 0, "unknown_removed": 0, "removed_blocks": 1})
	})
	t.Run("an engine's block of three of ours, without groups", func(t *testing.T) {
		e := stored(1, 0, 6)
		e["block_size"], e["stored"] = 3*testkit.BlockSize, testkit.BlockIDs(1, 0, 2)
		f := eventstest.Applied(t, testkit.Payload(t, 1, e))
		f.Holds(t, 1, 6, 6)
		f.Apply(1, testkit.Payload(t, 1, removed(1, 1, 2)), true)
		f.Holds(t, 1, 6, 3)
		f.Apply(2, testkit.Payload(t, 1, removed(1, 0, 1)), true)
		f.Holds(t, 1, 6, 0)
		f.Has(t, map[string]uint64{"unknown_removed": 0})
	})
	t.Run("the last block is computed again", func(t *testing.T) {
		f := eventstest.Applied(t)
		f.SetTraits(kv.Traits{DropsLast: true})
		f.Apply(0, testkit.Payload(t, 1, inGroup(stored(1, 0, 6), 0, full, 0)), true)
		f.Holds(t, 1, 6, 5)
	})
}

func TestEventStreamKeepsOtherTiersApartFromTheDevice(t *testing.T) {
	tier := func(e testkit.Event, key, value string) testkit.Event {
		e[key] = value
		return e
	}
	f := eventstest.Applied(t, testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 2), tier(testkit.RemovedEvent(1, 0, 2), "medium", "CPU"), tier(testkit.StoredEvent(2, 0, 1), "medium", "STORAGE"),
		tier(testkit.StoredEvent(3, 0, 1), "locality", "REMOTE"), testkit.Event{"as is": []any{"BlockMoved", 1}}))
	f.Holds(t, 1, 2, 2)
	f.Holds(t, 2, 1, 0)
	f.Holds(t, 3, 1, 0)
	f.Has(t, map[string]uint64{"ignored": 2, "unknown_media": 1, "decode_errors": 0})
	if got := f.Stats().Lower[kv.Disk].Stored.Load(); got != 1 {
		t.Errorf("%d blocks are stored on disk, want 1", got)
	}
	if got := f.Stats().Lower[kv.Host].UnknownRemoved.Load(); got != 2 {
		t.Errorf("%d removed blocks of the host were unknown, want 2", got)
	}
}

func TestEventStreamNeverRootsBlocksOfAnUnknownParent(t *testing.T) {
	t.Run("in a whole history", func(t *testing.T) {
		f := eventstest.Applied(t, testkit.Payload(t, 1, testkit.StoredEvent(3, 0, 1), testkit.StoredEvent(1, 2, 4), testkit.StoredEvent(2, 0, 1), testkit.RemovedEvent(5, 0, 3)))
		f.Holds(t, 3, 1, 0) // doubtful: cleared
		f.Holds(t, 2, 1, 1)
		f.Has(t, map[string]uint64{"unknown_parent": 1, "unknown_removed": 3, "cold": 1})
	})
	t.Run("in a history with a hole", func(t *testing.T) {
		f := eventstest.Applied(t)
		f.Begin(7)
		f.Apply(7, testkit.Payload(t, 1, testkit.StoredEvent(3, 0, 1), testkit.StoredEvent(1, 2, 4)), true)
		f.Holds(t, 3, 1, 1)
		f.Has(t, map[string]uint64{"unknown_parent": 1, "stored_blocks": 1})
	})
	t.Run("with a replay", func(t *testing.T) {
		p := testkit.NewFakePublisher(t)
		f := eventstest.Follow(t, eventstest.SourceOf(p), nil)
		f.Subscribed(t, p)
		p.Batch(false, testkit.StoredEvent(3, 0, 1))
		f.Holds(t, 3, 1, 1)
		p.Batch(false, testkit.StoredEvent(1, 2, 4))
		f.Reaches(t, map[string]uint64{"replays": 2, "replayed_batches": 2})
		// The engine did publish it so: asked once, not for ever.
		p.Batch(false, testkit.StoredEvent(4, 0, 1), testkit.StoredEvent(1, 2, 4))
		f.Holds(t, 4, 1, 1)
		f.Holds(t, 1, 4, 0)
		f.Has(t, map[string]uint64{"replays": 2, "unknown_parent": 3, "cold": 1})
	})
}

func TestEventStreamReportsLag(t *testing.T) {
	var lags []time.Duration
	f := eventstest.Applied(t)
	f.Now = func() time.Time { return time.Unix(100, 0) }
	f.OnLag = func(d time.Duration) { lags = append(lags, d.Round(time.Millisecond)) }
	f.Apply(0, testkit.Payload(t, 99.25), true)
	f.Apply(1, testkit.Payload(t, 1), false) // replayed: its age says nothing
	testkit.WantEqual(t, "lags", lags, []time.Duration{750 * time.Millisecond})
}

func BenchmarkEventStreamApply(b *testing.B) {
	s := events.NewStream(events.Source{Worker: testkit.EventWorker, BlockSize: 16}, radix.NewTree(), events.Options{}, slog.New(slog.NewTextHandler(io.Discard, nil)))
	s.Begin(0)
	b.ReportAllocs()
	number := 0
	for b.Loop() {
		b.StopTimer()
		number++
		tokens, hashes := make([]uint32, 128), make([]uint64, 8)
		for i := range tokens {
			tokens[i] = uint32(number*31 + i)
		}
		for i := range hashes {
			hashes[i] = 1<<63 + uint64(number*8+i)
		}
		payload := testkit.Payload(b, 1, testkit.Event{"stored": hashes, "tokens": tokens, "block_size": 16, "lora_id": nil, "lora_name": nil,
			"extra_keys": make([]any, 8), "group_idx": 0, "kv_cache_spec_kind": "full_attention"})
		b.StartTimer()
		s.Apply(uint64(number), payload, true)
	}
	if s.Stats().StoredBlocks.Load() != uint64(number*8) {
		b.Fatal("not all stored")
	}
}

// A stream that begins on a peer's blocks keeps those that its replay does not
// touch, and only while a replay proves that nothing was missed.
func TestEventStreamGoesOnFromAPeersBlocks(t *testing.T) {
	for _, c := range []struct {
		name          string
		replay        bool
		oldest        uint64 // batch in the replay buffer
		before, after int    // blocks held of the prompt before and after a batch that removes its second
	}{
		{"whole history", true, 0, 2, 2}, // stored twice, removed once
		{"end of the history", true, 1, 4, 1},
		{"no replay", false, 0, 4, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := testkit.NewFakePublisher(t)
			p.Batch(true, testkit.StoredEvent(1, 0, 2))
			p.Batch(true, testkit.StoredEvent(1, 1, 2))
			p.Replay = func(from uint64) (seqs []uint64, end bool) {
				for seq := max(from, c.oldest); seq < uint64(len(p.History)); seq++ {
					seqs = append(seqs, seq)
				}
				return seqs, true
			}
			src := eventstest.SourceOf(p)
			src.Seeded = true
			if !c.replay {
				src.Replay = ""
			}
			var blocks []kv.StoredBlock
			for i, local := range kv.HashBlocks(nil, testkit.PromptTokens(1, 4), testkit.BlockSize, "", "") {
				blocks = append(blocks, kv.StoredBlock{Engine: testkit.BlockIDs(1, i, i+1)[0], Local: local})
			}
			index := radix.NewTree()
			if err := radixtest.Store(index, testkit.EventWorker, 0, false, blocks); err != nil {
				t.Fatal(err)
			}
			f := eventstest.FollowInto(t, src, index, nil)
			f.Subscribed(t, p)
			if c.replay {
				f.Reaches(t, map[string]uint64{"batches": 2 - c.oldest})
			}
			f.Holds(t, 1, 4, c.before)
			p.Batch(false, testkit.RemovedEvent(1, 1, 2), testkit.StoredEvent(2, 0, 1))
			f.Holds(t, 2, 1, 1)
			f.Holds(t, 1, 4, c.after)
		})
	}
}
