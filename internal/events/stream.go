// Package events follows the KV-cache events of workers and keeps an index in step
// with them.
//
// A Stream reads one worker rank. It applies every batch once and in order, fetches
// missed ones from the worker or from another router, and clears the rank's blocks
// where neither can help. A Log keeps the last batches for other routers; a dump
// holds all blocks of an index.
package events

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
	"kvrouter/internal/zmq"
)

// Source names the KV events of one worker rank.
type Source struct {
	Worker    kv.WorkerKey
	Endpoint  string // PUB socket, e.g. tcp://127.0.0.1:5557; vLLM adds the rank to the port
	Replay    string // ROUTER socket that replays what was published; empty: none
	Topic     string // prefix of the topics to take; empty: all
	BlockSize int    // tokens a block, the same as the engine's
	Seeded    bool   // the index has the rank's blocks from a peer
}

// Stats counts what one stream saw. It may be read at any time.
type Stats struct {
	Connected atomic.Bool // subscribed right now
	// Cold: blocks of the worker may be missing in the index, because the
	// history since its start or since its last reset is not known in full.
	Cold atomic.Bool

	Batches           atomic.Uint64 // applied, replayed ones included
	ReplayedBatches   atomic.Uint64 // applied out of a replay
	LastSeq           atomic.Uint64 // of the last applied batch; 0 before the first
	Stored            atomic.Uint64 // store events applied
	StoredBlocks      atomic.Uint64 // blocks in them
	Removed           atomic.Uint64 // remove events applied
	RemovedBlocks     atomic.Uint64 // blocks in them that the index held
	Cleared           atomic.Uint64 // AllBlocksCleared events
	Gaps              atomic.Uint64 // times a live batch was not the next one
	Duplicates        atomic.Uint64 // live batches already known from a replay
	PeerEvents        atomic.Uint64 // events taken over from another router after a gap
	PeerDumps         atomic.Uint64 // times all blocks were taken over from another router
	Replays           atomic.Uint64 // replays asked for
	ReplayFailures    atomic.Uint64 // unanswered, or without what was asked for
	Restarts          atomic.Uint64 // times the publisher turned out to be a new one
	Reconnects        atomic.Uint64 // connections after the first
	DecodeErrors      atomic.Uint64 // events or batches that made no sense
	UnknownParent     atomic.Uint64 // store events whose parent is not held: dropped
	UnknownRemoved    atomic.Uint64 // removed blocks that the index did not hold
	RemovedIncomplete atomic.Uint64 // remove events with such blocks
	InvalidStored     atomic.Uint64 // store events that made no sense: left out
	Ignored           atomic.Uint64 // events of another medium, group, kind or type
	BlockSizeMismatch atomic.Uint64 // store events with another block size: dropped
}

// Counts returns the counters by name, for the metrics page.
func (s *Stats) Counts() map[string]uint64 {
	counts := map[string]uint64{}
	for name, counter := range map[string]*atomic.Uint64{
		"batches": &s.Batches, "replayed_batches": &s.ReplayedBatches, "stored": &s.Stored, "stored_blocks": &s.StoredBlocks,
		"removed": &s.Removed, "removed_blocks": &s.RemovedBlocks, "cleared": &s.Cleared, "gaps": &s.Gaps, "duplicates": &s.Duplicates,
		"replays": &s.Replays, "replay_failures": &s.ReplayFailures, "restarts": &s.Restarts, "reconnects": &s.Reconnects,
		"decode_errors": &s.DecodeErrors, "unknown_parent": &s.UnknownParent, "unknown_removed": &s.UnknownRemoved,
		"peer_events": &s.PeerEvents, "peer_dumps": &s.PeerDumps, "removed_incomplete": &s.RemovedIncomplete, "invalid_stored": &s.InvalidStored,
		"ignored": &s.Ignored, "block_size_mismatch": &s.BlockSizeMismatch,
	} {
		counts[name] = counter.Load()
	}
	return counts
}

// streamTiming holds the waits of a stream.
type streamTiming struct {
	BackoffMin, BackoffMax time.Duration // between attempts to connect

	// Quiet says after how long without a message the replay endpoint is asked
	// whether one was missed: the first after connecting (what was published
	// while the subscription travelled is not sent), the second after the last
	// message (the publisher drops the tail of what a slow reader does not
	// take), the third from then on (a half-open connection).
	Quiet [3]time.Duration

	ReplayLimit time.Duration // for the first answer to a replay request
	ReplayPause time.Duration // between answers
	// After a replay has failed it is asked for again: replayRetries times after
	// retryFirst, each time doubled, then every retry.
	retryFirst, Retry time.Duration
	Grace             time.Duration // without a connection until the blocks are forgotten
}

// Stream keeps the index in step with one worker rank: it subscribes to
// the rank's KV events and applies them strictly in order of their sequence
// numbers, each once.
//
// A missed batch is fetched from the replay endpoint; meanwhile live ones wait
// in the connection (first TCP's buffers, then the publisher's queue of 100,000).
// Each replay starts at the last applied batch, whose bytes must come back
// unchanged: that proves that the publisher is still the same and tells a
// restarted engine that has counted up to the same number. What cannot be made
// good ends with the rank's blocks cleared, never with a wrong index.
type Stream struct {
	// OnLag, if set before Run, gets the age of every live batch when it is
	// applied, by the two machines' clocks.
	OnLag func(time.Duration)

	// Peers, if set before Run, are asked for what the worker cannot replay.
	Peers *Peers

	Src     Source
	index   radix.Index
	history *Log
	log     *slog.Logger
	Now     func() time.Time // for OnLag
	Timing  streamTiming
	stats   Stats

	// The rest belongs to Run's goroutine.

	replayAt string // src.Replay, until it proves useless
	// seeded says that the blocks are a peer's, and may contain what the batches
	// to be replayed bring again; what those do not touch stays as it is.
	seeded bool
	// sure says that next is the batch that must come next: all before it were
	// applied or are known to be lost. Otherwise any number may come.
	sure bool
	next uint64
	sum  uint64 // hash of batch next-1 as received; valid if next > 0
	// resync says that the history is to be asked for again from its beginning,
	// at retryAt; a replay that has just done that leaves it off.
	resync   bool
	retryAt  time.Time
	failures int // of replays, since the last that brought what was asked for
	// live is the highest sequence number + 1 that this connection has
	// delivered; owed is what it should have delivered by the next check.
	live, owed uint64
	liveSum    uint64 // hash of batch live-1; valid if live > 0
	asked      bool   // peers were asked during this connection

	group      int // KV-cache group whose events count; valid if groupKnown
	groupKnown bool
	dec        *batchDecoder
	blocks     []kv.StoredBlock
	warned     map[string]bool // reasons already logged
}

// NewStream returns a stream for src that feeds index. Run starts it.
func NewStream(src Source, index radix.Index, log *slog.Logger) *Stream {
	s := &Stream{
		Src:   src,
		index: index,
		log:   log.With("worker", src.Worker.Worker, "rank", src.Worker.Rank, "endpoint", src.Endpoint),
		Now:   time.Now,
		Timing: streamTiming{
			BackoffMin:  100 * time.Millisecond,
			BackoffMax:  5 * time.Second,
			Quiet:       [3]time.Duration{500 * time.Millisecond, 2 * time.Second, 15 * time.Second},
			ReplayLimit: 5 * time.Second,
			ReplayPause: time.Second,
			retryFirst:  200 * time.Millisecond,
			Retry:       30 * time.Second,
			Grace:       5 * time.Second,
		},
		replayAt: src.Replay,
		seeded:   src.Seeded,
		dec:      newBatchDecoder(),
		warned:   make(map[string]bool),
	}
	s.stats.Cold.Store(true)
	s.history = &Log{worker: src.Worker, index: index, stats: &s.stats}
	return s
}

// History returns what the stream keeps for other routers.
func (s *Stream) History() *Log { return s.history }

// Stats returns the stream's counters.
func (s *Stream) Stats() *Stats { return &s.stats }

// Run follows the events until ctx ends, connecting again whenever the
// connection is lost. When it returns, all that it started has ended; the
// rank's blocks stay in the index. Call it once.
func (s *Stream) Run(ctx context.Context) {
	backoff := s.Timing.BackoffMin
	lost, connected := time.Now(), false
	for ctx.Err() == nil {
		began := time.Now()
		conn, err := zmq.DialSub(ctx, s.Src.Endpoint, s.Src.Topic)
		if err == nil {
			if connected {
				s.stats.Reconnects.Add(1)
			}
			connected = true
			s.log.Debug("following KV events")
			s.stats.Connected.Store(true)
			err = s.follow(ctx, conn)
			s.stats.Connected.Store(false)
			conn.Close()
			lost = time.Now()
			if lost.Sub(began) > backoff {
				backoff = s.Timing.BackoffMin
			}
			if ctx.Err() == nil {
				s.log.Warn("lost the connection to the worker's KV events", "error", err)
			}
		} else {
			s.log.Debug("cannot connect to the worker's KV events", "error", err)
		}
		if ctx.Err() != nil {
			return
		}
		// Without a replay nothing can prove that no event was missed.
		if s.sure && (s.replayAt == "" || time.Since(lost) >= s.Timing.Grace) {
			s.forget("no connection to its KV events")
		}
		s.pause(ctx, backoff/2+rand.N(backoff/2+1))
		backoff = min(2*backoff, s.Timing.BackoffMax)
	}
}

// follow applies what one connection delivers, until that fails.
func (s *Stream) follow(ctx context.Context, conn *zmq.Conn) error {
	s.live, s.owed, s.asked = 0, 0, false
	if s.replayAt != "" {
		if err := s.catchUp(ctx); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if s.sure {
				s.forget("its history cannot be verified after a new connection")
			}
		}
	}
	level, heard := 0, time.Now()
	for {
		due := heard.Add(s.Timing.Quiet[level])
		retry := s.resync && s.replayAt != ""
		if retry && s.retryAt.Before(due) {
			due = s.retryAt
		}
		ready, err := conn.Wait(due)
		if err != nil {
			return err
		}
		now := time.Now()
		if retry && !now.Before(s.retryAt) {
			if s.catchUp(ctx) != nil && ctx.Err() != nil {
				return ctx.Err()
			}
			if !ready {
				continue
			}
		}
		if !ready {
			if err := s.checkQuiet(ctx, level > 0); err != nil {
				return err
			}
			level, heard = min(level+1, len(s.Timing.Quiet)-1), time.Now()
			continue
		}
		frames, err := conn.Recv()
		if err != nil {
			return err
		}
		level, heard = 1, now
		seq, payload, err := BatchFrames(frames)
		if err != nil {
			// Its number is lost with it: the next batch shows the gap.
			s.stats.DecodeErrors.Add(1)
			s.warnOnce("frames", "message is no KV event batch", "error", err)
			continue
		}
		if err := s.receive(ctx, seq, payload); err != nil {
			return err
		}
	}
}

// receive deals with one live batch. It fails only when ctx has ended.
func (s *Stream) receive(ctx context.Context, seq uint64, payload []byte) error {
	sum := xxh3.Hash(payload)
	if seq+1 == s.live && sum == s.liveSum { // sent twice
		s.stats.Duplicates.Add(1)
		return nil
	}
	behind := seq < s.live
	s.live, s.liveSum = seq+1, sum
	if s.sure && (behind || seq+1 == s.next && sum != s.sum) {
		// A proxy keeps connections while the engine behind it restarts.
		s.restarted()
	}
	if !s.sure && s.replayAt != "" && !s.resync {
		if s.catchUp(ctx) != nil && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if s.sure && seq > s.next {
		s.stats.Gaps.Add(1)
		s.log.Warn("gap in the worker's KV events", "want", s.next, "got", seq)
		why := ""
		if s.replayAt == "" {
			why = "events were missed and there is no replay endpoint"
		} else if err := s.catchUp(ctx); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			why = "missed events cannot be replayed"
		} else if seq > s.next {
			// vLLM buffers a batch before it answers the next replay.
			why = "missed events were not in the replay"
			s.log.Warn("replay endpoint keeps no history, not asking it again", "replay", s.replayAt)
			s.replayAt = ""
		}
		if why != "" && !s.askPeers(ctx, seq, sum) {
			s.forget(why)
		}
	}
	if s.stats.Cold.Load() && (s.sure || seq > 0) && !s.asked {
		s.askPeers(ctx, seq, sum)
	}
	if s.sure && seq < s.next {
		s.stats.Duplicates.Add(1)
		return nil
	}
	if !s.sure {
		s.seeded = false // what was missed since the peer's dump is not known
		s.Begin(seq)
	}
	s.Apply(seq, payload, true)
	return nil
}

// checkQuiet asks the replay endpoint whether a silent connection missed
// anything. settled is false for the first check of a connection. An error
// means that the connection is not to be trusted.
func (s *Stream) checkQuiet(ctx context.Context, settled bool) error {
	if s.replayAt == "" || s.resync {
		return nil
	}
	if s.live < s.owed {
		return fmt.Errorf("%w: batch %d was published and did not arrive", errStalled, s.owed-1)
	}
	before, restarts := s.next, s.stats.Restarts.Load()
	if err := s.catchUp(ctx); err != nil {
		return fmt.Errorf("check of a quiet connection: %w", err)
	}
	if s.stats.Restarts.Load() != restarts {
		return fmt.Errorf("%w: it belongs to a publisher that is gone", errStalled)
	}
	if settled && s.next != before {
		s.owed = s.next
	}
	return nil
}

// Begin starts the rank's blocks afresh, with seq as the first batch known. A
// peer's blocks stay if they are older than that.
func (s *Stream) Begin(seq uint64) {
	if !s.seeded || seq == 0 {
		s.index.Clear(s.Src.Worker)
		s.seeded = false
	}
	s.history.cleared()
	s.groupKnown = false
	s.sure, s.next = true, seq
	s.stats.Cold.Store(seq > 0)
}

// restarted notes that the publisher is a new one: nothing of the old holds.
func (s *Stream) restarted() {
	s.stats.Restarts.Add(1)
	s.forget("its KV-event publisher has restarted")
}

// forget gives up what is known about the rank, its place in the sequence too.
func (s *Stream) forget(why string) {
	s.clear(why)
	s.sure, s.next, s.groupKnown = false, 0, false
}

// clear empties the rank in the index.
func (s *Stream) clear(why string) {
	s.log.Warn("cleared the worker's blocks", "reason", why)
	s.stats.Cold.Store(true)
	s.index.Clear(s.Src.Worker)
	s.history.cleared()
	s.seeded = false
}

// Apply puts batch next into the index. A bad event is left out alone, unless
// it may have been a removal: then the blocks of the rank are cleared, and the
// batch goes on.
func (s *Stream) Apply(seq uint64, payload []byte, live bool) {
	s.next, s.sum = seq+1, xxh3.Hash(payload)
	s.history.beginBatch(seq, s.sum)
	defer s.history.endBatch()
	s.stats.Batches.Add(1)
	defer s.stats.LastSeq.Store(seq) // whoever sees it finds the batch in the index
	ts, err := s.dec.start(payload)
	if err != nil {
		s.stats.DecodeErrors.Add(1)
		s.clear(fmt.Sprintf("event batch %d is unreadable: %v", seq, err))
		return
	}
	if live && s.OnLag != nil {
		s.OnLag(time.Duration(float64(s.Now().UnixNano()) - ts*1e9))
	}
	for s.dec.more() {
		e, err := s.dec.next()
		if err == nil {
			err = s.applyEvent(e)
		}
		if err == nil {
			continue
		}
		s.stats.DecodeErrors.Add(1)
		if e.kind == eventStored && !errors.Is(err, errBrokenPayload) {
			s.stats.InvalidStored.Add(1)
			s.stats.Cold.Store(true)
			s.warnOnce("event", "left out a bad KV event", "batch", seq, "error", err)
			continue
		}
		s.clear(fmt.Sprintf("event batch %d is bad: %v", seq, err))
	}
	if rank, ok := s.dec.rank(); ok && rank != int(s.Src.Worker.Rank) {
		// The endpoint decides: behind an external load balancer every rank is
		// a worker of its own to us, while its engine still counts itself.
		s.warnOnce("rank", "events name another data-parallel rank than their endpoint", "named", rank)
	}
}

func (s *Stream) applyEvent(e *kvEvent) error {
	switch e.kind {
	case eventStored:
		return s.applyStored(e)
	case eventRemoved:
		if !ownCache(e) || e.hasGroup && s.groupKnown && e.group != s.group {
			s.stats.Ignored.Add(1)
			return nil
		}
		unknown := s.index.Remove(s.Src.Worker, e.hashes)
		s.history.removed(e.hashes)
		s.stats.Removed.Add(1)
		s.stats.RemovedBlocks.Add(uint64(len(e.hashes) - unknown))
		if unknown > 0 {
			s.stats.UnknownRemoved.Add(uint64(unknown))
			s.stats.RemovedIncomplete.Add(1)
		}
	case eventCleared:
		s.index.Clear(s.Src.Worker)
		s.history.cleared()
		s.stats.Cleared.Add(1)
		s.stats.Cold.Store(false)
	default:
		s.stats.Ignored.Add(1)
		s.warnOnce("type", "unknown type of KV event", "type", fmt.Sprintf("%.40s", e.tag))
	}
	return nil
}

func (s *Stream) applyStored(e *kvEvent) error {
	if !ownCache(e) || !fullAttention(e) {
		s.stats.Ignored.Add(1)
		return nil
	}
	if len(e.hashes) == 0 {
		return nil
	}
	if e.blockSize != s.Src.BlockSize {
		s.stats.BlockSizeMismatch.Add(1)
		s.stats.Cold.Store(true)
		if !s.warned["block size"] {
			s.warned["block size"] = true
			s.log.Error("the engine's block size differs from the router's: its events are dropped; start both with the same --block-size",
				"engine", e.blockSize, "router", s.Src.BlockSize)
		}
		return nil
	}
	if e.hasGroup {
		// The groups of a hybrid model hold the same prompt side by side, with
		// the same block ids. One of them stands for all.
		if !s.groupKnown {
			s.group, s.groupKnown = e.group, true
		}
		if e.group != s.group {
			s.stats.Ignored.Add(1)
			return nil
		}
	}
	var err error
	s.blocks, err = s.dec.blocks(s.blocks[:0], e)
	if err != nil {
		return err
	}
	if s.seeded { // or a block that the peer has told counts twice
		s.index.Remove(s.Src.Worker, e.hashes)
	}
	switch err := s.index.Store(s.Src.Worker, e.parent, e.hasParent, s.blocks); {
	case errors.Is(err, radix.ErrParentUnknown):
		s.stats.UnknownParent.Add(1)
		if s.stats.Cold.Load() {
			return nil // expected: their parents are among what is missing
		}
		s.clear("stored blocks follow a block that it is not known to hold")
		s.resync, s.retryAt = true, time.Now()
		return nil
	case err != nil:
		return err
	}
	s.history.stored(e.parent, e.hasParent, s.blocks)
	s.stats.Stored.Add(1)
	s.stats.StoredBlocks.Add(uint64(len(s.blocks)))
	return nil
}

// ownCache tells whether an event is about the engine's own KV cache rather
// than an offloading tier or another process.
func ownCache(e *kvEvent) bool {
	return (len(e.medium) == 0 || string(e.medium) == "GPU") && string(e.locality) != "REMOTE"
}

// fullAttention tells whether a stored block means that the whole prefix up to
// it is usable. Groups with a sliding window, a state or cross attention keep
// some blocks only. Where the engine does not tell the kind, its first group
// counts.
func fullAttention(e *kvEvent) bool {
	switch string(e.specKind) {
	case "":
		return !e.hasGroup || e.group == 0
	case "full_attention", "mla_attention", "sink_full_attention":
		return true
	}
	return false
}

func (s *Stream) warnOnce(reason, msg string, args ...any) {
	if !s.warned[reason] {
		s.warned[reason] = true
		s.log.Warn(msg, args...)
	}
}

// pause waits for d or until ctx ends.
func (s *Stream) pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
