package events

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/zeebo/xxh3"
)

// replayRounds bounds how often one catch-up repeats its request because the publisher
// dropped batches out of the middle of a replay. Its ROUTER socket queues 1,000
// messages and drops more without a word, so each round brings at least that.
const replayRounds = 64

// replayRetries is the number of times that a failed replay is requested again in quick
// succession.
const replayRetries = 8

// retryPause is the wait after a failure with that many before it.
func (t streamTiming) retryPause(failures int) time.Duration {
	if failures >= replayRetries {
		return t.Retry
	}
	return min(t.retryFirst<<failures, t.Retry)
}

// ReplayEnd is the sequence number that ends a replay: -1 in 64 bits.
const ReplayEnd = ^uint64(0)

// Reasons why a replay did not bring the stream up to date.
var (
	errRestarted  = errors.New("the publisher has restarted")
	errReplayHole = errors.New("the replay has a gap")
	errStalled    = errors.New("the connection delivers no messages")
	errEndless    = errors.New("the replay does not end")
	// errForeign ends a connection that may be to the publisher before a restart: what is
	// under way on it would be taken for batches of the new one.
	errForeign = errors.New("the connection may be to the publisher before a restart")
)

// catchUp brings the index up to the last published batch. After an
// error it retries later, and what the index holds is as old as before, or
// nothing.
func (s *Stream) catchUp(ctx context.Context) error {
	fromStart := s.resync || !s.sure
	whole := fromStart // the result of all rounds together
	applied := s.stats.ReplayedBatches.Load()
	until := time.Now().Add(s.Timing.ReplayWhole)
	s.foreign = s.live > 0 // until the replay brings the same batch as the connection
	for round := 0; ; round++ {
		before := s.next
		err := s.replay(ctx, fromStart, until)
		switch {
		case err == nil:
			s.resync, s.seeded = s.resync && !whole, false
			s.failures = 0
			s.foreign = s.foreign && whole
			s.history.reach(s.position())
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, errRestarted) && round < replayRounds:
			s.restarted()
			fromStart, whole, s.foreign = true, true, true
			continue
		case errors.Is(err, errReplayHole) && round < replayRounds && s.sure && (fromStart || s.next > before):
			fromStart = false
			continue
		}
		s.stats.ReplayFailures.Add(1)
		s.foreign = false
		if s.sure && s.stats.ReplayedBatches.Load() != applied {
			s.forget("its history could be replayed in part only")
		}
		s.resync, s.retryAt = true, time.Now().Add(s.Timing.retryPause(s.failures))
		s.failures++
		if errors.Is(err, errEndless) { // the live events have waited for long enough
			s.log.Warn("the replay of the worker's KV events does not end: replay is disabled for it", "replay", s.replayAt,
				"after", s.Timing.ReplayWhole)
			s.replayAt = ""
		}
		s.warnOnce("replay", "cannot replay the worker's KV events", "replay", s.replayAt, "error", err)
		return err
	}
}

// replay requests once the batches from the last applied one on, or from the
// start of the publisher's buffer, and applies new ones. They must come in
// order, and all before the time until.
func (s *Stream) replay(ctx context.Context, fromStart bool, until time.Time) error {
	s.stats.Replays.Add(1)
	verify := !fromStart && s.sure && s.next > 0
	from := uint64(0)
	if verify {
		from = s.next - 1
	}
	conn, err := s.Dial.Dial(ctx, s.replayAt, zmq4.Dealer)
	if err != nil {
		return err
	}
	defer conn.Close()
	// A REQ socket would send the empty frame; vLLM requires it.
	if err := conn.Send(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return fmt.Errorf("request a replay from %s: %w", s.replayAt, err)
	}
	s.kept = false
	limit, last := s.Timing.ReplayLimit, uint64(0)
	for first := true; ; first = false {
		if !time.Now().Before(until) {
			return errEndless
		}
		ready, err := conn.Wait(time.Now().Add(limit))
		if err == nil && !ready && first {
			return fmt.Errorf("%s sent no replay within %v", s.replayAt, limit)
		}
		if err == nil && !ready {
			return errReplayHole // the end mark was dropped
		}
		var frames [][]byte
		if err == nil {
			frames, err = conn.Recv()
		}
		if err != nil {
			return fmt.Errorf("replay from %s: %w", s.replayAt, err)
		}
		limit = s.Timing.ReplayPause
		seq, payload, err := BatchFrames(frames)
		s.kept = s.kept || err == nil && seq != ReplayEnd
		if err == nil && seq+1 == s.live && xxh3.Hash(payload) == s.liveSum {
			s.foreign = false
		}
		previous := last
		last = seq
		switch {
		case err != nil:
			return fmt.Errorf("replay from %s: %w", s.replayAt, err)
		case seq == ReplayEnd && first && verify:
			return errRestarted // it does not know the batch we have
		case seq == ReplayEnd && first:
			s.Begin(0) // nothing was published yet
			return nil
		case seq == ReplayEnd:
			return nil
		case first && seq < from:
			return fmt.Errorf("replay from %s begins at %d, requested was %d", s.replayAt, seq, from)
		case !first && seq <= previous:
			return fmt.Errorf("replay from %s is out of order: batch %d is followed by %d", s.replayAt, previous, seq)
		case first && verify && seq == from:
			if xxh3.Hash(payload) != s.sum {
				return errRestarted
			}
			s.restore()
			continue
		case first && verify:
			s.stats.ReplayFailures.Add(1)
			s.forget("missed events have left the publisher's replay buffer")
			s.Begin(seq)
		case first:
			s.Begin(seq)
		}
		if seq > s.next {
			return errReplayHole
		}
		if seq == s.next {
			s.stats.ReplayedBatches.Add(1)
			s.Apply(seq, payload, false)
		}
	}
}

// BatchFrames splits a message: topic, sequence number (8 bytes big-endian),
// payload. A replay has an empty frame before them, and SGLang's replay has no
// topic.
func BatchFrames(frames [][]byte) (seq uint64, payload []byte, err error) {
	n := len(frames)
	if n < 2 || len(frames[n-2]) != 8 {
		return 0, nil, fmt.Errorf("%d frames, want topic, 8-byte sequence number, payload", n)
	}
	return binary.BigEndian.Uint64(frames[n-2]), frames[n-1], nil
}
