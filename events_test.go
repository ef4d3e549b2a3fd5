package main

import (
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
)

func TestEventStreamFetchesAGapBeforeItGoesOn(t *testing.T) {
	p := newFakePublisher(t)
	f := followStream(t, sourceOf(p), nil)
	f.subscribed(t, p)
	p.batch(false, storedEvent(1, 0, 2))
	f.holds(t, 1, 5, 2)
	p.batch(true, storedEvent(1, 2, 3))
	p.batch(true, removedEvent(1, 1, 3))
	p.batch(false, storedEvent(1, 1, 5))
	f.holds(t, 1, 5, 5)
	f.has(t, map[string]uint64{"gaps": 1, "replays": 2, "replayed_batches": 3, "batches": 4, "cold": 0, "last_seq": 3, "unknown_parent": 0})
	p.locked(func() { wantSameEvents(t, "replays asked for", p.replayed, []uint64{0, 0}) })
	f.reaches(t, map[string]uint64{"duplicates": 1}) // the batch that showed the gap
}

func TestEventStreamClearsAfterAGapWithoutReplay(t *testing.T) {
	p := newFakePublisher(t)
	src := sourceOf(p)
	src.Replay = ""
	f := followStream(t, src, nil)
	f.subscribed(t, p)
	p.batch(false, storedEvent(1, 0, 2))
	f.holds(t, 1, 2, 2)
	f.has(t, map[string]uint64{"cold": 0})
	p.batch(true, removedEvent(1, 0, 2))
	p.batch(false, storedEvent(2, 0, 2))
	f.holds(t, 2, 2, 2)
	f.holds(t, 1, 2, 0)
	f.has(t, map[string]uint64{"gaps": 1, "replays": 0, "cold": 1})
	p.batch(false, testEvent{"cleared": true}, storedEvent(3, 0, 1))
	f.holds(t, 3, 1, 1)
	f.holds(t, 2, 1, 0)
	f.has(t, map[string]uint64{"cleared": 1, "cold": 0})

	// Nobody can tell what was missed while the connection was down.
	p.drop()
	f.holds(t, 3, 1, 0)
	f.has(t, map[string]uint64{"cold": 1})
}

func TestEventStreamClearsWhenAReplayIsNotAnswered(t *testing.T) {
	p := newFakePublisher(t)
	f := followStream(t, sourceOf(p), func(s *EventStream) {
		s.timing.replayLimit, s.timing.retry = 20*time.Millisecond, 100*time.Millisecond
	})
	f.subscribed(t, p)
	p.batch(false, storedEvent(1, 0, 2))
	f.holds(t, 1, 2, 2)
	p.locked(func() { p.replay = func(uint64) ([]uint64, bool) { return nil, false } })
	p.batch(true, removedEvent(1, 0, 2))
	p.batch(false, storedEvent(2, 0, 2))
	f.holds(t, 2, 2, 2)
	f.holds(t, 1, 2, 0)
	f.has(t, map[string]uint64{"cold": 1, "gaps": 1})
	f.reaches(t, map[string]uint64{"replay_failures": 1})
	// It is asked again, and then the history is whole.
	p.locked(func() { p.replay = nil })
	f.until(t, func() bool {
		p.batch(false, testEvent{"removed": []int{}})
		return !f.Stats().Cold.Load()
	}, func() string { return "stays cold" })
	f.holds(t, 2, 2, 2)
	f.holds(t, 1, 2, 0)
}

func TestEventStreamAsksAgainAfterAHoleInAReplay(t *testing.T) {
	p := newFakePublisher(t)
	for i := range 6 {
		p.batch(true, storedEvent(1, i, i+1))
	}
	round := 0
	p.replay = func(from uint64) ([]uint64, bool) {
		round++
		switch round {
		case 1:
			return []uint64{0, 1, 4, 5}, true // dropped in the middle
		case 2:
			return []uint64{1, 2, 3}, false // end mark dropped
		}
		return []uint64{3, 4, 5}, true
	}
	f := followStream(t, sourceOf(p), func(s *EventStream) { s.timing.replayPause = 500 * time.Millisecond })
	f.holds(t, 1, 6, 6)
	f.has(t, map[string]uint64{"batches": 6, "replay_failures": 0, "cold": 0})
	p.locked(func() { wantSameEvents(t, "replays asked for", p.replayed, []uint64{0, 1, 3}) })
}

func TestEventStreamStartsColdWhereTheBufferBegins(t *testing.T) {
	p := newFakePublisher(t)
	for i := range 6 {
		p.batch(true, storedEvent(i, 0, 1))
	}
	oldest := uint64(3)
	p.replay = func(from uint64) (seqs []uint64, end bool) {
		for seq := max(from, oldest); seq < uint64(len(p.history)); seq++ {
			seqs = append(seqs, seq)
		}
		return seqs, true
	}
	f := followStream(t, sourceOf(p), nil)
	f.holds(t, 5, 1, 1)
	f.holds(t, 3, 1, 1)
	f.holds(t, 2, 1, 0)
	f.has(t, map[string]uint64{"cold": 1, "batches": 3})

	// A gap that has left the buffer: what was known is not to be trusted.
	f.subscribed(t, p)
	p.batch(true, removedEvent(5, 0, 1))
	p.batch(true, storedEvent(6, 0, 1))
	p.locked(func() { oldest = 7 })
	p.batch(false, storedEvent(7, 0, 1))
	f.holds(t, 7, 1, 1)
	f.holds(t, 6, 1, 1)
	f.holds(t, 5, 1, 0)
	f.has(t, map[string]uint64{"cold": 1, "gaps": 1, "restarts": 0, "replay_failures": 1})
}

func TestEventStreamGivesUpAReplayWithoutHistory(t *testing.T) {
	p := newFakePublisher(t)
	p.replay = func(uint64) ([]uint64, bool) { return nil, true }
	p.batch(true, storedEvent(1, 0, 1))
	f := followStream(t, sourceOf(p), func(s *EventStream) { s.timing.quiet = [3]time.Duration{time.Hour, time.Millisecond, time.Millisecond} })
	f.subscribed(t, p)
	p.batch(false, storedEvent(2, 0, 1))
	f.holds(t, 2, 1, 1)
	f.has(t, map[string]uint64{"cold": 1, "gaps": 1})
	replays := f.Stats().Replays.Load()
	p.batch(false, storedEvent(2, 1, 2))
	f.holds(t, 2, 2, 2)
	f.has(t, map[string]uint64{"replays": replays, "restarts": 0})
}

func TestEventStreamFindsWhatASilentConnectionMissed(t *testing.T) {
	p := newFakePublisher(t)
	f := followStream(t, sourceOf(p), func(s *EventStream) {
		s.timing.quiet = [3]time.Duration{20 * time.Millisecond, 20 * time.Millisecond, 20 * time.Millisecond}
	})
	f.subscribed(t, p)
	p.batch(true, storedEvent(1, 0, 1))
	f.holds(t, 1, 1, 1)
	// By now the connection has had its time: what it does not bring shows
	// that it is dead.
	f.reaches(t, map[string]uint64{"replays": 3})
	p.batch(true, storedEvent(1, 1, 2))
	f.holds(t, 1, 2, 2)
	f.reaches(t, map[string]uint64{"reconnects": 1})
	f.has(t, map[string]uint64{"gaps": 0, "restarts": 0, "cold": 0})
}

func TestEventStreamNoticesANewPublisher(t *testing.T) {
	// restart swaps the publisher's past.
	restart := func(t *testing.T, p *fakePublisher, events ...testEvent) {
		p.locked(func() {
			p.history = nil
			for _, e := range events {
				p.history = append(p.history, payloadOf(t, 2, e))
			}
		})
	}
	for name, c := range map[string]struct {
		past []testEvent
		drop bool
		send bool
	}{
		"that has published nothing":          {nil, true, false},
		"that has published less":             {[]testEvent{storedEvent(9, 0, 1)}, true, false},
		"that has published as much":          {[]testEvent{storedEvent(9, 0, 1), storedEvent(8, 0, 1)}, true, false},
		"that has published more":             {[]testEvent{storedEvent(9, 0, 1), storedEvent(8, 0, 1), storedEvent(7, 0, 1)}, true, false},
		"behind a proxy":                      {[]testEvent{storedEvent(9, 0, 1)}, false, true},
		"behind a proxy, as far as the last":  {[]testEvent{storedEvent(9, 0, 1), storedEvent(8, 0, 1)}, false, true},
		"behind a proxy, farther than before": {[]testEvent{storedEvent(9, 0, 1), storedEvent(8, 0, 1), storedEvent(7, 0, 1), storedEvent(6, 0, 1)}, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			p := newFakePublisher(t)
			f := followStream(t, sourceOf(p), nil)
			f.subscribed(t, p)
			p.batch(false, storedEvent(1, 0, 1))
			p.batch(false, storedEvent(2, 0, 1))
			f.holds(t, 2, 1, 1)
			restart(t, p, c.past...)
			if c.drop {
				p.drop()
			}
			if c.send {
				last := len(c.past) - 1
				p.locked(func() { p.send(uint64(last), p.history[last]) })
			}
			f.holds(t, 2, 1, 0)
			f.holds(t, 1, 1, 0)
			if len(c.past) > 0 {
				f.holds(t, 9, 1, 1)
			}
			f.until(t, func() bool { return !f.Stats().Cold.Load() }, func() string { return "stays cold" })
			f.has(t, map[string]uint64{"restarts": 1, "replay_failures": 0})
		})
	}
}

func TestEventStreamKeepsItsBlocksOverALostConnection(t *testing.T) {
	p := newFakePublisher(t)
	f := followStream(t, sourceOf(p), nil)
	f.subscribed(t, p)
	p.batch(false, storedEvent(1, 0, 1))
	f.holds(t, 1, 1, 1)
	p.drop()
	p.batch(true, storedEvent(1, 1, 2))
	f.holds(t, 1, 2, 2)
	f.has(t, map[string]uint64{"restarts": 0, "cold": 0, "batches": 2})
	f.reaches(t, map[string]uint64{"reconnects": 1})
}

func TestEventStreamForgetsAWorkerThatStaysAway(t *testing.T) {
	p := newFakePublisher(t)
	f := followStream(t, sourceOf(p), func(s *EventStream) { s.timing.grace = 50 * time.Millisecond })
	f.subscribed(t, p)
	p.batch(false, storedEvent(1, 0, 1))
	f.holds(t, 1, 1, 1)
	p.pub.Close()
	f.holds(t, 1, 1, 0)
	f.has(t, map[string]uint64{"cold": 1, "connected": 0})
}

func TestEventStreamSurvivesMessagesThatAreNoBatches(t *testing.T) {
	p := newFakePublisher(t)
	f := followStream(t, sourceOf(p), nil)
	f.subscribed(t, p)
	p.locked(func() {
		_ = p.subs[0].Send([]byte("kv-events"))
		_ = p.subs[0].Send([]byte("kv-events"), []byte("short"), nil)
		_ = p.subs[0].conn.SendCmd(zmq4.CmdPing, []byte("\x00\x01context"))
	})
	p.batch(false, storedEvent(1, 0, 1))
	f.holds(t, 1, 1, 1)
	f.has(t, map[string]uint64{"decode_errors": 2, "reconnects": 0})
	f.until(t, func() (ok bool) {
		p.locked(func() { ok = len(p.pongs) == 1 && p.pongs[0] == "context" })
		return ok
	}, func() string { return "no answer to the heartbeat" })
	// A frame of 2^62 bytes ends the connection, not the process.
	p.locked(func() { _, _ = p.subs[0].raw.Write([]byte{2, 0x40, 0, 0, 0, 0, 0, 0, 0}) })
	f.reaches(t, map[string]uint64{"reconnects": 1})
	f.subscribed(t, p)
	p.batch(true, storedEvent(1, 1, 2))
	f.holds(t, 1, 2, 1+1)
}

func TestEventStreamEndsWhereverItWaits(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	for name, place := range map[string]func(p *fakePublisher) EventSource{
		"for a publisher":    func(*fakePublisher) EventSource { return EventSource{Endpoint: "tcp://127.0.0.1:1"} },
		"for a greeting":     func(*fakePublisher) EventSource { return EventSource{Endpoint: "tcp://" + silent.Addr().String()} },
		"for a replay":       func(p *fakePublisher) EventSource { return sourceOf(p) },
		"for a message":      func(p *fakePublisher) EventSource { return EventSource{Endpoint: sourceOf(p).Endpoint, Topic: "kv"} },
		"with a bad address": func(*fakePublisher) EventSource { return EventSource{Endpoint: "tcp:nowhere"} },
	} {
		t.Run(name, func(t *testing.T) {
			p := newFakePublisher(t)
			p.replay = func(uint64) ([]uint64, bool) { return nil, false }
			src := place(p)
			f := followStream(t, src, func(s *EventStream) { s.timing.replayLimit = time.Hour })
			if src.Topic != "" {
				f.subscribed(t, p)
			}
			f.stop()
		})
	}
}

// appliedStream returns a stream that has applied one batch of events after another
// from a complete history.
func appliedStream(t *testing.T, batches ...[]byte) *following {
	t.Helper()
	log := new(logBuffer)
	index := NewRadix()
	s := NewEventStream(EventSource{Worker: testWorker, BlockSize: testBlockSize}, index, slog.New(slog.NewTextHandler(log, nil)))
	s.begin(0)
	for i, b := range batches {
		s.apply(uint64(i), b, true)
	}
	return &following{s, s.src, index, log, nil}
}

func TestEventStreamLeavesOutABadEventAlone(t *testing.T) {
	bad := storedEvent(2, 0, 1)
	bad["tokens"] = []any{1, nil, 3, 4}
	f := appliedStream(t, payloadOf(t, 1, storedEvent(1, 0, 2), bad, storedEvent(1, 2, 3)))
	f.holds(t, 1, 3, 3)
	f.has(t, map[string]uint64{"decode_errors": 1, "stored": 2, "stored_blocks": 3, "cold": 1})
}

func TestEventStreamClearsWhenARemovalMayHaveBeenMissed(t *testing.T) {
	for name, c := range map[string]testEvent{
		"bad removal": {"removed": []any{"x", nil}},
		"no type":     {"as is": map[string]any{"block_hashes": []int{1}}},
	} {
		t.Run(name, func(t *testing.T) {
			f := appliedStream(t, payloadOf(t, 1, storedEvent(1, 0, 2), c, storedEvent(2, 0, 1)))
			f.holds(t, 1, 2, 0)
			f.holds(t, 2, 1, 1)
			f.has(t, map[string]uint64{"decode_errors": 1, "cold": 1})
		})
	}
	t.Run("payload cut short", func(t *testing.T) {
		whole := payloadOf(t, 1, storedEvent(1, 0, 2), storedEvent(2, 0, 1))
		f := appliedStream(t, payloadOf(t, 1, storedEvent(3, 0, 1)), whole[:len(whole)-20], payloadOf(t, 1, storedEvent(4, 0, 1)))
		f.holds(t, 3, 1, 0)
		f.holds(t, 1, 2, 0)
		f.holds(t, 4, 1, 1)
		f.has(t, map[string]uint64{"decode_errors": 1, "cold": 1})
	})
	t.Run("payload no batch", func(t *testing.T) {
		f := appliedStream(t, payloadOf(t, 1, storedEvent(3, 0, 1)), []byte("\x01"))
		f.holds(t, 3, 1, 0)
		f.has(t, map[string]uint64{"decode_errors": 1, "cold": 1})
	})
}

func TestEventStreamNamesBothBlockSizesOnce(t *testing.T) {
	e := storedEvent(1, 0, 2)
	e["block_size"] = 8
	e["stored"] = blockIDs(1, 0, 1)
	f := appliedStream(t, payloadOf(t, 1, e, e), payloadOf(t, 1, e))
	f.holds(t, 1, 2, 0)
	f.has(t, map[string]uint64{"block_size_mismatch": 3, "stored_blocks": 0})
	if log := f.log.String(); strings.Count(log, "level=ERROR") != 1 || !strings.Contains(log, "engine=8") || !strings.Contains(log, "router=4") {
		t.Errorf("log:\n%s", log)
	}
}

func TestEventStreamCountsOneFullAttentionGroupOnly(t *testing.T) {
	in := func(e testEvent, group any, kind any) testEvent {
		e["group_idx"] = group
		if kind != nil {
			e["kv_cache_spec_kind"] = kind
		}
		return e
	}
	t.Run("kinds", func(t *testing.T) {
		f := appliedStream(t, payloadOf(t, 1,
			in(storedEvent(1, 0, 2), 0, "sliding_window"), in(storedEvent(2, 0, 2), 1, "mla_attention"), in(storedEvent(2, 0, 2), 2, "full_attention"),
			in(removedEvent(2, 0, 2), 0, nil), in(removedEvent(2, 0, 2), 2, nil), in(storedEvent(3, 0, 1), 3, "mamba")))
		f.holds(t, 1, 2, 0)
		f.holds(t, 2, 2, 2)
		f.has(t, map[string]uint64{"ignored": 5, "stored_blocks": 2})
		f.apply(1, payloadOf(t, 1, in(removedEvent(2, 1, 2), 1, nil)), true)
		f.holds(t, 2, 2, 1)
	})
	t.Run("no kinds", func(t *testing.T) {
		f := appliedStream(t, payloadOf(t, 1, in(storedEvent(1, 0, 2), 1, nil), in(storedEvent(2, 0, 2), 0, nil), in(removedEvent(2, 1, 2), 1, nil)))
		f.holds(t, 1, 2, 0)
		f.holds(t, 2, 2, 2)
	})
	t.Run("unknown kind", func(t *testing.T) {
		f := appliedStream(t, payloadOf(t, 1, in(storedEvent(1, 0, 2), 0, "unknown")))
		f.holds(t, 1, 2, 0)
	})
}

func TestEventStreamTakesTheEnginesOwnCacheOnly(t *testing.T) {
	tier := func(e testEvent, key, value string) testEvent {
		e[key] = value
		return e
	}
	f := appliedStream(t, payloadOf(t, 1, storedEvent(1, 0, 2), tier(removedEvent(1, 0, 2), "medium", "CPU"), tier(storedEvent(2, 0, 1), "medium", "STORAGE"),
		tier(storedEvent(3, 0, 1), "locality", "REMOTE"), testEvent{"as is": []any{"BlockMoved", 1}}))
	f.holds(t, 1, 2, 2)
	f.holds(t, 2, 1, 0)
	f.holds(t, 3, 1, 0)
	f.has(t, map[string]uint64{"ignored": 4, "decode_errors": 0})
}

func TestEventStreamNeverRootsBlocksOfAnUnknownParent(t *testing.T) {
	t.Run("in a whole history", func(t *testing.T) {
		f := appliedStream(t, payloadOf(t, 1, storedEvent(3, 0, 1), storedEvent(1, 2, 4), storedEvent(2, 0, 1), removedEvent(5, 0, 3)))
		f.holds(t, 3, 1, 0) // doubtful: cleared
		f.holds(t, 2, 1, 1)
		f.has(t, map[string]uint64{"unknown_parent": 1, "unknown_removed": 3, "cold": 1})
	})
	t.Run("in a history with a hole", func(t *testing.T) {
		f := appliedStream(t)
		f.begin(7)
		f.apply(7, payloadOf(t, 1, storedEvent(3, 0, 1), storedEvent(1, 2, 4)), true)
		f.holds(t, 3, 1, 1)
		f.has(t, map[string]uint64{"unknown_parent": 1, "stored_blocks": 1})
	})
	t.Run("with a replay", func(t *testing.T) {
		p := newFakePublisher(t)
		f := followStream(t, sourceOf(p), nil)
		f.subscribed(t, p)
		p.batch(false, storedEvent(3, 0, 1))
		f.holds(t, 3, 1, 1)
		p.batch(false, storedEvent(1, 2, 4))
		f.reaches(t, map[string]uint64{"replays": 2, "replayed_batches": 2})
		// The engine did publish it so: asked once, not for ever.
		p.batch(false, storedEvent(4, 0, 1), storedEvent(1, 2, 4))
		f.holds(t, 4, 1, 1)
		f.holds(t, 1, 4, 0)
		f.has(t, map[string]uint64{"replays": 2, "unknown_parent": 3, "cold": 1})
	})
}

func TestEventStreamReportsLag(t *testing.T) {
	var lags []time.Duration
	f := appliedStream(t)
	f.now = func() time.Time { return time.Unix(100, 0) }
	f.OnLag = func(d time.Duration) { lags = append(lags, d.Round(time.Millisecond)) }
	f.apply(0, payloadOf(t, 99.25), true)
	f.apply(1, payloadOf(t, 1), false) // replayed: its age says nothing
	wantSameEvents(t, "lags", lags, []time.Duration{750 * time.Millisecond})
}

func BenchmarkEventStreamApply(b *testing.B) {
	s := NewEventStream(EventSource{Worker: testWorker, BlockSize: 16}, NewRadix(), slog.New(slog.NewTextHandler(io.Discard, nil)))
	s.begin(0)
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
		payload := payloadOf(b, 1, testEvent{"stored": hashes, "tokens": tokens, "block_size": 16, "lora_id": nil, "lora_name": nil,
			"extra_keys": make([]any, 8), "group_idx": 0, "kv_cache_spec_kind": "full_attention"})
		b.StartTimer()
		s.apply(uint64(number), payload, true)
	}
	if s.Stats().StoredBlocks.Load() != uint64(number*8) {
		b.Fatal("not all stored")
	}
}
