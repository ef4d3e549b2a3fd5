// Package events subscribes to the KV-cache events of workers and applies them to
// an index.
//
// A Stream reads one worker rank. It applies every batch once and in order, fetches
// missed ones from the worker or from another router, and clears the rank's blocks
// if neither has them. A Log keeps the last batches for other routers; a dump holds
// all blocks of an index.
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

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/cache/radix"
)

// Source names the KV events of one worker rank.
type Source struct {
	Worker    kv.WorkerKey
	Endpoint  string // PUB socket, e.g. tcp://127.0.0.1:5557; vLLM adds the rank to the port
	Replay    string // ROUTER socket that replays published batches; empty: none
	Buffer    int    // batches that Replay keeps, as the worker reports; 0: unknown
	Topic     string // prefix of the topics; empty: all
	BlockSize int    // tokens a block, the same as the engine's
	Seeded    bool   // the index has the rank's blocks from a peer
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
	ReplayWhole time.Duration // for a catch-up, all its replays together
	// After a replay has failed it is requested again: replayRetries times after
	// retryFirst, each time doubled, then every retry.
	retryFirst, Retry time.Duration
	Grace             time.Duration // without a connection until the blocks are forgotten
}

// Stream applies the KV events of one worker rank to the index: it subscribes to
// them and applies them strictly in order of their sequence numbers, each once.
//
// A missed batch is fetched from the replay endpoint; meanwhile live ones wait in
// the connection (first TCP's buffers, then the publisher's queue of 100,000). Each
// replay starts at the last applied batch, whose bytes must come back unchanged:
// that proves that the publisher is still the same and separates a restarted engine
// that has counted up to the same number. If the gap cannot be filled, the rank's
// blocks are cleared; the index is never wrong.
type Stream struct {
	Options
	Src     Source
	index   radix.Index
	history *Log
	log     *slog.Logger
	Now     func() time.Time // for OnLag
	Timing  streamTiming
	stats   Stats

	capacity atomic.Int64 // blocks that the rank's cache holds; 0: not known
	drops    atomic.Bool  // kv.Traits.DropsLast
	chunk    atomic.Int64 // kv.Traits.AttentionChunk
	block    atomic.Int64 // kv.Traits.Block
	// retention is kv.Traits.Retention.
	retention atomic.Int64
	// pinned means that the engine is SGLang, by the medium of its host tier. Run's
	// goroutine sets it.
	pinned atomic.Bool

	// The rest belongs to Run's goroutine.

	replayAt string // src.Replay, until it proves useless
	// seeded means that the blocks are a peer's, and may contain what the batches
	// to be replayed bring again; what those do not touch stays as it is.
	seeded bool
	// sure means that next is the batch that must come next: all before it were
	// applied or are known to be lost. Otherwise any number may come.
	sure bool
	next uint64
	sum  uint64 // hash of batch next-1 as received; valid if next > 0
	// saved are the rank's blocks of a snapshot, until the publisher has proved that
	// it is still the one that they are of; nil: there are none.
	saved *savedRank
	// resync is whether the history must be requested again from its beginning,
	// at retryAt; a replay that has just done that leaves it off.
	resync   bool
	retryAt  time.Time
	failures int // of replays, since the last that brought the requested batches
	// live is the highest sequence number + 1 that this connection has
	// delivered; owed is what it should have delivered by the next check.
	live, owed uint64
	liveSum    uint64 // hash of batch live-1; valid if live > 0
	// foreign means that the last catch-up found another publisher than the one whose
	// batches this connection may still deliver.
	foreign bool
	kept    bool // the last replay brought a batch
	asked   bool // peers were asked during this connection

	layout     kv.Layout // the KV-cache groups seen so far
	layoutText string    // the same as text
	// ahead is how its blocks depend on the tokens behind them; not the zero value: the engine
	// does not compute the last block again.
	ahead kv.Lookahead
	// chunkBlocks is the number of blocks that the engine loads together from lower tiers; 0
	// before the first.
	chunkBlocks int
	unknown     map[int]bool    // groups that are passed over
	tails       map[uint64]tail // of a windowed rank, by the last hash
	tailBlocks  int             // in them
	dec         *batchDecoder
	blocks      []kv.StoredBlock
	hashes      []uint64
	change      radix.Change    // reused
	warned      map[string]bool // reasons already logged
	batch       batchResult     // of the batch that is being applied
	applying    bool            // a batch is
}

// Options are the optional parts of a Stream.
type Options struct {
	// OnLag is called with the age of every live batch when it is applied, by the
	// clocks of the two machines, under the lock of the stream's Log; nil: not called.
	OnLag func(time.Duration)
	// OnCleared is called after an event of the worker has emptied the index; nil: not called.
	OnCleared func()
	// OnBlockSize is called with the block size, tokens, with which the worker's events could be
	// followed, where that is not a multiple of the Source's; nil: not called.
	OnBlockSize func(tokens int)
	// Peers have events that the worker cannot replay; nil: no peers.
	Peers *Peers
	// Rarer returns how many times longer a connection may be silent, from its third check
	// on, before the replay endpoint is asked, because of all others; nil: as long.
	Rarer func() int
	// Edges counts the panics of event parsers; nil: not counted.
	Edges *guard.Edges
	// Dial connects to the worker's sockets; nil: over the network.
	Dial zmq.Dialer
	// Random draws the jitter of the waits between connections. Run's goroutine uses it;
	// nil: that of math/rand.
	Random *rand.Rand
}

// NewStream returns a stream for src that feeds index. Run starts it.
func NewStream(src Source, index radix.Index, options Options, log *slog.Logger) *Stream {
	s := &Stream{
		Options: options,
		Src:     src,
		index:   index,
		log:     log.With("worker", src.Worker.Worker, "rank", src.Worker.Rank, "endpoint", src.Endpoint),
		Now:     time.Now,
		Timing: streamTiming{
			BackoffMin:  100 * time.Millisecond,
			BackoffMax:  5 * time.Second,
			Quiet:       [3]time.Duration{500 * time.Millisecond, 2 * time.Second, 15 * time.Second},
			ReplayLimit: 5 * time.Second,
			ReplayPause: time.Second,
			ReplayWhole: time.Minute,
			retryFirst:  200 * time.Millisecond,
			Retry:       30 * time.Second,
			Grace:       5 * time.Second,
		},
		replayAt: src.Replay,
		seeded:   src.Seeded,
		dec:      newBatchDecoder(),
		warned:   make(map[string]bool),
		unknown:  make(map[int]bool),
	}
	s.stats.Cold.Store(true)
	s.history = &Log{worker: src.Worker, blockSize: src.BlockSize, index: index, stats: &s.stats}
	return s
}

// History returns the log that the stream keeps for other routers.
func (s *Stream) History() *Log { return s.history }

// Stats returns the stream's counters.
func (s *Stream) Stats() *Stats { return &s.stats }

// Close ends the history of the rank's blocks, so that the caller may remove them
// from the index: a concurrent snapshot must not take their absence for a complete
// history. Call it after Run.
func (s *Stream) Close() { s.history.cleared() }

// SetCapacity sets the capacity of the rank's cache in blocks; 0: unknown. A rank
// that has far more in the index is cleared. It may be called at any time.
func (s *Stream) SetCapacity(blocks int) { s.capacity.Store(int64(blocks)) }

// SetTraits sets what is known of the engine. It may be called at any time, and counts
// from the next batch on.
func (s *Stream) SetTraits(t kv.Traits) {
	s.drops.Store(t.DropsLast)
	s.chunk.Store(int64(t.AttentionChunk))
	s.block.Store(int64(t.Block))
	s.retention.Store(int64(t.Retention))
}

// Run follows the events until ctx ends, connecting again whenever the connection
// is lost. When it returns, its goroutines have ended; the rank's blocks remain in
// the index. Call it once.
func (s *Stream) Run(ctx context.Context) {
	backoff := s.Timing.BackoffMin
	lost, connected := time.Now(), false
	for ctx.Err() == nil {
		began, linked := time.Now(), false
		err := s.Edges.Do(guard.KVEvents, s.log, func() error {
			conn, err := s.Dial.DialSub(ctx, s.Src.Endpoint, s.Src.Topic)
			if err != nil {
				return err
			}
			defer conn.Close()
			if connected {
				s.stats.Reconnects.Add(1)
			}
			linked, connected = true, true
			s.log.Debug("following KV events")
			s.stats.Connected.Store(true)
			defer s.stats.Connected.Store(false)
			return s.follow(ctx, conn)
		})
		if linked {
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
		var broken *guard.PanicError
		if errors.As(err, &broken) {
			s.forget("a message caused a panic in the parser")
		}
		if ctx.Err() != nil {
			return
		}
		// Without a replay nothing can prove that no event was missed.
		if s.sure && (s.replayAt == "" || time.Since(lost) >= s.Timing.Grace) {
			s.forget("no connection to its KV events")
		}
		pause(ctx, backoff/2+s.jitter(backoff/2))
		backoff = min(2*backoff, s.Timing.BackoffMax)
	}
}

// follow applies what one connection delivers, until that fails.
func (s *Stream) follow(ctx context.Context, conn *zmq.Conn) error {
	s.live, s.owed, s.asked, s.foreign = 0, 0, false, false
	if s.replayAt != "" {
		if err := s.catchUp(ctx); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if s.sure {
				s.forget("its history cannot be verified after a new connection")
			}
		}
		if s.foreign {
			return errForeign
		}
	}
	level, heard := 0, time.Now()
	for {
		quiet := s.Timing.Quiet[level]
		if level == len(s.Timing.Quiet)-1 && s.Rarer != nil {
			quiet *= time.Duration(s.Rarer())
		}
		due := heard.Add(quiet)
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
			if s.foreign {
				return errForeign
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
		if err == nil && seq == ReplayEnd {
			err = errors.New("its number is reserved for the end of a replay")
		}
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

// receive deals with one live batch. It fails when ctx has ended, or the batch is not of
// the publisher that the replay endpoint belongs to.
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
		if s.foreign {
			return errForeign
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
		} else if s.foreign {
			return errForeign
		} else if seq > s.next {
			why = "missed events were not in the replay"
			s.replayLacks()
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
		s.seeded = false // events missed since the peer's dump are unknown
		s.Begin(seq)
	}
	s.Apply(seq, payload, true)
	return nil
}

// replayLacks deals with a replay that has ended without a batch published before it.
func (s *Stream) replayLacks() {
	if s.kept { // its end was dropped in a full queue
		s.resync, s.retryAt = true, time.Now().Add(s.Timing.retryFirst)
		return
	}
	// vLLM buffers a batch before it answers the next replay.
	s.log.Warn("the replay endpoint keeps no history: replay is disabled for it", "replay", s.replayAt)
	s.replayAt = ""
}

// checkQuiet asks the replay endpoint whether a silent connection missed
// anything. settled is false for the first check of a connection. An error
// means that the connection is not to be trusted.
func (s *Stream) checkQuiet(ctx context.Context, settled bool) error {
	if s.replayAt == "" || s.resync {
		return nil
	}
	if s.live < s.owed {
		return fmt.Errorf("%w: batch %d was published but did not arrive", errStalled, s.owed-1)
	}
	before := s.next
	if err := s.catchUp(ctx); err != nil {
		return fmt.Errorf("checking a quiet connection: %w", err)
	}
	if s.foreign {
		return errForeign
	}
	if settled && s.next != before {
		s.owed = s.next
	}
	return nil
}

// Begin clears the rank's blocks and starts with batch seq. A peer's blocks remain
// unless seq is 0.
func (s *Stream) Begin(seq uint64) {
	if !s.seeded || seq == 0 {
		s.alter(radix.Change{Kind: radix.Cleared})
		s.seeded = false
	}
	s.history.cleared()
	if clear(s.unknown); s.seeded {
		s.layout = s.index.LayoutOf(s.Src.Worker)
	} else {
		s.layout = kv.Layout{}
	}
	s.layoutText = s.layout.String()
	s.chunkBlocks = 0
	s.sure, s.next = true, seq
	s.stats.Cold.Store(seq > 0)
}

// position returns the place in the sequence that the blocks are as of.
func (s *Stream) position() position {
	return position{next: s.next, sum: s.sum, layout: s.layoutText}
}

// restarted notes that the publisher has restarted: nothing of the old is valid.
func (s *Stream) restarted() {
	s.stats.Restarts.Add(1)
	s.forget("its KV-event publisher has restarted")
}

// forget drops the rank's blocks and its place in the sequence.
func (s *Stream) forget(why string) {
	s.clear(why)
	s.sure, s.next, s.layout, s.layoutText = false, 0, kv.Layout{}, ""
	s.pinned.Store(false)
	clear(s.unknown)
	s.tails = nil
}

func (s *Stream) warnOnce(reason, msg string, args ...any) {
	if !s.warned[reason] {
		s.warned[reason] = true
		s.log.Warn(msg, args...)
	}
}

// jitter draws a duration from 0 to most.
func (s *Stream) jitter(most time.Duration) time.Duration {
	if s.Random == nil {
		return rand.N(most + 1)
	}
	return time.Duration(s.Random.Int64N(int64(most) + 1))
}

// pause waits for d or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
