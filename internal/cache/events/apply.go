package events

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// Bounds of what one rank may hold in the index. A block takes about 58 bytes there.
const (
	heldFactor = 2       // times what its cache holds, by its own account
	heldSlack  = 1024    // blocks beyond that
	maxHeld    = 1 << 24 // blocks of a rank whose cache is of unknown size
)

// maxLag is the greatest age of a batch that is reported: it is the worker's clock
// that says when the batch was made.
const maxLag = 24 * time.Hour

// batchResult is the result of a batch so far, logged once at its end.
type batchResult struct {
	bad     int    // events that may have been removals, and made no sense
	cleared int    // times that the rank was cleared
	reason  string // of the first time
	// stored is whether the rank may hold blocks: it was not cleared, or has stored
	// some since.
	stored bool
}

// clear empties the rank in the index. Within a batch it is logged at the end.
func (s *Stream) clear(why string) {
	if s.batch.cleared++; s.batch.cleared == 1 {
		s.batch.reason = why
	}
	s.batch.stored = false
	s.stats.Cold.Store(true)
	s.apply(radix.Change{Kind: radix.Cleared})
	s.tails, s.chunkBlocks = nil, 0
	s.seeded = false
	s.settle()
	if !s.applying {
		s.tellCleared()
	}
}

// apply makes a change of the rank's blocks and notes it in the history.
func (s *Stream) apply(c radix.Change) (radix.Applied, error) {
	s.change = c
	return s.history.Apply(&s.change)
}

// alter makes a change that the history does not have.
func (s *Stream) alter(c radix.Change) (radix.Applied, error) {
	s.change = c
	return s.index.Apply(s.Src.Worker, &s.change)
}

// tellCleared logs what clear has done since it last did.
func (s *Stream) tellCleared() {
	if b := &s.batch; b.cleared > 0 {
		s.log.Warn("cleared the worker's blocks", "reason", b.reason, "times", b.cleared, "bad_events", b.bad)
		b.cleared, b.reason, b.bad = 0, "", 0
	}
}

// Apply puts batch next into the index. An invalid event is skipped. If it may have
// been a removal, the blocks of the rank are cleared, and the batch continues.
func (s *Stream) Apply(seq uint64, payload []byte, live bool) {
	s.next, s.sum = seq+1, xxh3.Hash(payload)
	s.history.beginBatch(seq, s.sum)
	defer func() {
		// Of a peer's dump the blocks may be of a later moment than the batch, and
		// a history that must be requested again is not known in full.
		s.history.at = position{}
		if !s.seeded && !s.resync {
			s.history.at = s.position()
		}
		s.history.endBatch()
	}()
	s.stats.Batches.Add(1)
	defer s.stats.LastSeq.Store(seq) // after this the batch is in the index
	s.applying, s.batch.stored = true, true
	defer func() {
		s.applying = false
		s.tellCleared()
	}()
	err := s.Edges.Do(guard.KVEventBatch, s.log, func() error { return s.applyBatch(seq, payload, live) })
	if err != nil {
		s.stats.DecodeErrors.Add(1)
		s.clear(fmt.Sprintf("cannot decode event batch %d: %v", seq, err))
	}
}

func (s *Stream) applyBatch(seq uint64, payload []byte, live bool) error {
	ts, err := s.dec.start(payload)
	if err != nil {
		return err
	}
	if age := float64(s.Now().UnixNano())/1e9 - ts; live && !math.IsNaN(age) {
		lag := time.Duration(min(max(age, 0), maxLag.Seconds()) * float64(time.Second))
		s.stats.Lag.Store(int64(lag))
		s.stats.Lagged.Store(true)
		if s.OnLag != nil {
			s.OnLag(lag)
		}
	}
	defer s.trim()
	if drops := s.drops.Load() && s.ahead.Tokens == 0; drops != s.layout.DropsLast {
		s.setLayout(kv.Layout{Groups: s.layout.Groups, DropsLast: drops})
	}
	learned := 0
	for s.dec.more() {
		place := s.dec.mark()
		e, err := s.dec.next()
		if err == nil && learned < maxLearned && !s.knowsGroup(e) {
			learned++
			s.learnGroups(place)
			e, err = s.dec.next()
		}
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
			s.warnOnce("event", "skipped an invalid KV event", "batch", seq, "error", err)
			continue
		}
		if s.batch.bad++; s.batch.bad == 1 || s.batch.stored {
			s.clear(fmt.Sprintf("event batch %d is invalid: %v", seq, err))
		}
		s.stats.Cold.Store(true)
	}
	if rank, ok := s.dec.rank(); ok && rank != int(s.Src.Worker.Rank) {
		// The endpoint decides: behind an external load balancer every rank is
		// a worker of its own to us, while its engine still counts itself.
		s.warnOnce("rank", "events have a different data-parallel rank than their endpoint", "named", rank)
	}
	return nil
}

// trim gives up the memory that an unusually large batch took.
func (s *Stream) trim() {
	s.dec.trim()
	s.change = radix.Change{}
	if cap(s.blocks) > keptBlocks {
		s.blocks = nil
	}
	if cap(s.hashes) > keptBlocks {
		s.hashes = nil
	}
}

func (s *Stream) applyEvent(e *kvEvent) error {
	if (e.kind == eventStored || e.kind == eventRemoved) && !e.onDevice() {
		s.applyLower(e)
		return nil
	}
	switch e.kind {
	case eventStored:
		return s.applyStored(e)
	case eventRemoved:
		group, known := s.groupOf(e)
		if !known {
			s.stats.Ignored.Add(1)
			return nil
		}
		hashes := e.hashes
		if group == 0 {
			hashes = s.inParts(hashes)
		}
		done, err := s.apply(radix.Change{Kind: radix.Removed, Group: int32(group), Hashes: hashes})
		if err != nil {
			return err
		}
		s.stats.Removed.Add(1)
		s.stats.RemovedBlocks.Add(uint64(len(e.hashes) - done.Unknown))
		if done.Unknown > 0 {
			s.stats.UnknownRemoved.Add(uint64(done.Unknown))
			s.stats.RemovedIncomplete.Add(1)
		}
	case eventCleared:
		// SGLang clears the host's memory, too. vLLM does or does not, and sends the same
		// (reset_external of POST /reset_prefix_cache): its lower tiers become doubtful.
		s.apply(radix.Change{Kind: radix.DeviceCleared, Host: s.pinned.Load()})
		s.tails = nil
		s.batch.stored = false
		s.stats.Cleared.Add(1)
		if s.OnCleared != nil {
			s.OnCleared()
		}
		s.stats.Cold.Store(false)
	default:
		s.stats.Ignored.Add(1)
		s.warnOnce("type", "unknown type of KV event", "type", fmt.Sprintf("%.40s", e.tag))
	}
	return nil
}

func (s *Stream) applyStored(e *kvEvent) error {
	group, known := s.groupOf(e)
	if !known {
		s.stats.Ignored.Add(1)
		return nil
	}
	if len(e.hashes) == 0 {
		return nil
	}
	if e.blockSize <= 0 || e.blockSize%s.Src.BlockSize != 0 || e.blockSize/s.Src.BlockSize > maxParts {
		s.stats.BlockSizeMismatch.Add(1)
		s.stats.Cold.Store(true)
		if !s.warned["block size"] {
			s.warned["block size"] = true
			s.log.Warn("the block size of the engine's events is not a multiple of the expected one: they are dropped until it is followed",
				"engine", e.blockSize, "expected", s.Src.BlockSize)
		}
		s.resize(e.blockSize)
		return nil
	}
	if group > 0 {
		return s.applyHeld(group, e.hashes)
	}
	if len(s.layout.Groups) == 0 && e.blockSize != s.Src.BlockSize { // SGLang names no groups
		s.setGroups([]kv.CacheGroup{{Block: e.blockSize}})
	}
	if len(s.layout.Groups) > 0 && s.layout.Groups[0].Attention == kv.FullAttention && s.layout.Groups[0].Block > e.blockSize &&
		s.layout.Groups[0].Block%e.blockSize == 0 {
		s.stats.PartBlocks.Add(1)
		return nil
	}
	if parts := s.parts(); len(s.layout.Groups) > 0 && e.blockSize != s.layout.Groups[0].Block {
		return fmt.Errorf("block_size is %d, that of the group is %d", e.blockSize, s.layout.Groups[0].Block)
	} else if s.overflows(parts * len(e.hashes)) {
		return nil
	}
	if s.windowed() {
		return s.applyTail(e)
	}
	var err error
	s.blocks, err = s.dec.blocks(s.blocks[:0], e, s.parts())
	if err != nil {
		return err
	}
	if s.seeded { // or a block from the peer counts twice
		s.alter(radix.Change{Kind: radix.Removed, Hashes: s.inParts(e.hashes)})
	}
	if ahead := e.lookahead(); ahead.Tokens > 0 && ahead != s.ahead {
		s.apply(radix.Change{Kind: radix.LookaheadStored, Set: &radix.Setting{Lookahead: ahead}})
		s.ahead = ahead
	}
	s.batch.stored = true
	switch _, err := s.apply(radix.Change{Kind: radix.Stored, Parent: e.parent, HasParent: e.hasParent, Blocks: s.blocks}); {
	case errors.Is(err, radix.ErrParentUnknown):
		s.stats.UnknownParent.Add(1)
		if s.stats.Cold.Load() {
			return nil // expected: their parents are missing, too
		}
		s.clear("the parent of stored blocks is not in the index")
		s.resync, s.retryAt = true, time.Now()
		return nil
	case err != nil:
		return err
	}
	s.stats.Stored.Add(1)
	s.stats.StoredBlocks.Add(uint64(len(s.blocks)))
	return nil
}

// resize passes on that the rank's events need another block size than the Source's: that of the
// event, or one that divides those of the groups that are known, too.
func (s *Stream) resize(block int) {
	if s.OnBlockSize == nil || block <= 0 || block > kv.MaxBlock {
		return
	}
	largest := block
	for _, group := range s.layout.Groups {
		largest, block = max(largest, group.Block), kv.CommonBlock(block, group.Block)
	}
	if block != s.Src.BlockSize && largest/block <= maxParts {
		s.OnBlockSize(block)
	}
}

// overflows reports whether the rank would hold more with that many further blocks than
// its cache can: removals do not come, or are not the engine's. Then its blocks are
// cleared, and its history is requested again in a while.
func (s *Stream) overflows(more int) bool {
	most := maxHeld
	if capacity := s.capacity.Load(); capacity > 0 {
		scale := int64(1)
		if block := s.block.Load(); block > 0 && len(s.layout.Groups) > 0 { // context parallelism, in older versions
			scale = max(1, int64(s.layout.Groups[0].Block)/block)
		}
		most = int(min(maxHeld, heldFactor*min(capacity, maxHeld)*min(scale, maxParts)+heldSlack))
	}
	held := s.index.AllBlocks(s.Src.Worker)
	if held+more <= most {
		return false
	}
	s.stats.Overflows.Add(1)
	s.clear(fmt.Sprintf("its KV events remove too few blocks: the index would have %d, the cache has at most %d", held+more, most))
	s.resync, s.retryAt = true, time.Now().Add(s.Timing.Retry)
	return true
}
