package events

import (
	"fmt"
	"slices"

	"kvrouter/internal/kv"
)

// maxParts bounds an engine's block, in blocks of the index: vLLM sets the block of a
// model with states to some hundreds of tokens.
const maxParts = 256

// maxLearned is how often one batch may change the layout: each time, the rest of it is
// read.
const maxLearned = 2

// knowsGroup reports whether the KV-cache group of a store event is in the layout, or
// is none that it could be in.
func (s *Stream) knowsGroup(e *kvEvent) bool {
	if e.kind != eventStored || !e.hasGroup || !e.onDevice() || s.unknown[e.group] {
		return true
	}
	known := slices.IndexFunc(s.layout.Groups, func(g kv.CacheGroup) bool { return g.Index == e.group })
	if known < 0 {
		return false
	}
	g, ok := s.cacheGroup(e)
	return !ok || s.layout.Groups[known] == smaller(s.layout.Groups[known], g)
}

// smaller returns g as it is known by one more event. With hits inside a block, vLLM
// stores a state at the end of its block, and also in the middle of one; the block size
// of such an event is the part. Where hits end is the smaller of the two.
func smaller(known, g kv.CacheGroup) kv.CacheGroup {
	if known.Attention == kv.State && g.Attention == kv.State {
		g.Block = min(g.Block, known.Block)
	}
	return g
}

// cacheGroup returns the group that a store event describes; not ok: its rule is not
// known, or the index cannot follow it.
func (s *Stream) cacheGroup(e *kvEvent) (g kv.CacheGroup, ok bool) {
	g = kv.CacheGroup{Index: e.group, Block: e.blockSize}
	if len(e.specKind) == 0 {
		// Engines before vLLM 0.20 do not report the kind: the first group counts.
		return g, e.group == 0 && e.blockSize%s.Src.BlockSize == 0 && e.blockSize > 0
	}
	if g.Attention, ok = kv.AttentionOf(string(e.specKind)); !ok {
		return g, false
	}
	if g.Attention == kv.SlidingWindow || g.Attention == kv.ChunkedLocal {
		if g.Window = e.window; g.Window == 0 && g.Attention == kv.ChunkedLocal {
			g.Window = int(s.chunk.Load())
		}
	}
	if e.blockSize <= 0 || e.blockSize%s.Src.BlockSize != 0 || e.blockSize/s.Src.BlockSize > maxParts {
		return g, false
	}
	return g, kv.Layout{Groups: []kv.CacheGroup{g}}.Validate() == nil
}

// learnGroups adds the groups of all store events from the place on to the layout:
// they must be known together, because the first of full attention places the blocks
// of the others. The next event is again that at the place.
func (s *Stream) learnGroups(from mark) {
	defer s.dec.reset(from)
	s.dec.reset(from)
	groups := slices.Clone(s.layout.Groups)
	for s.dec.more() {
		e, err := s.dec.next()
		if err != nil || e.kind != eventStored || !e.hasGroup || !e.onDevice() {
			continue
		}
		g, ok := s.cacheGroup(e)
		known := slices.IndexFunc(groups, func(g kv.CacheGroup) bool { return g.Index == e.group })
		switch {
		case known >= 0 && ok:
			groups[known] = smaller(groups[known], g)
		case known >= 0:
		case !ok || len(groups) == kv.MaxCacheGroups:
			s.passOver(e)
		default:
			groups = append(groups, g)
		}
	}
	slices.SortFunc(groups, func(a, b kv.CacheGroup) int {
		if full := (a.Attention == kv.FullAttention); full != (b.Attention == kv.FullAttention) {
			if full {
				return -1
			}
			return 1
		}
		return a.Index - b.Index
	})
	s.setGroups(groups)
}

// passOver notes a group that no prediction can take into account.
func (s *Stream) passOver(e *kvEvent) {
	if s.unknown[e.group] || len(s.unknown) >= kv.MaxCacheGroups {
		return
	}
	s.unknown[e.group] = true
	s.stats.UnknownGroups.Add(1)
	s.warnOnce("group", "a KV-cache group of the engine cannot be followed: predictions for this worker may be too high",
		"group", e.group, "kind", fmt.Sprintf("%.40q", e.specKind), "block_size", e.blockSize, "window", e.window)
}

// setGroups changes the layout. What the rank holds stays unless its first group changes.
func (s *Stream) setGroups(groups []kv.CacheGroup) {
	if slices.Equal(groups, s.layout.Groups) {
		return
	}
	if len(s.layout.Groups) > 0 && groups[0] != s.layout.Groups[0] {
		s.clear("its KV-cache groups have changed")
	}
	layout := kv.Layout{Groups: groups}
	if !layout.Plain(s.Src.BlockSize) {
		s.log.Info("the engine has several KV-cache groups, or blocks of another size: predictions take them into account", "groups", layout.String())
	}
	s.setLayout(kv.Layout{Groups: groups, DropsLast: s.drops.Load() && !s.looksAhead})
}

// setLayout gives the index a layout.
func (s *Stream) setLayout(layout kv.Layout) {
	s.layout, s.layoutText = layout, layout.String()
	s.index.SetLayout(s.Src.Worker, layout, s.Src.BlockSize)
	s.history.relaid(s.layoutText)
	s.stats.setLayout(layout)
}

// fits reports whether an index of that block size can follow the layout.
func fits(layout kv.Layout, block int) bool {
	return !slices.ContainsFunc(layout.Groups, func(g kv.CacheGroup) bool { return g.Block%block != 0 || g.Block/block > maxParts })
}

// groupOf returns the place of an event's group in the layout; 0 also for an event that
// names none, and for removals before the first store. It is not known if the event is
// not to be applied.
func (s *Stream) groupOf(e *kvEvent) (place int, known bool) {
	if !e.hasGroup || e.kind == eventRemoved && len(s.layout.Groups) == 0 {
		return 0, true
	}
	place = slices.IndexFunc(s.layout.Groups, func(g kv.CacheGroup) bool { return g.Index == e.group })
	return place, place >= 0
}

// parts is the number of blocks of the index in an engine's block of the first group.
func (s *Stream) parts() int {
	if len(s.layout.Groups) == 0 {
		return 1
	}
	return max(1, s.layout.Groups[0].Block/s.Src.BlockSize)
}

// inParts returns the hashes of all parts of the first group's blocks, until the next call.
func (s *Stream) inParts(engine []uint64) []uint64 {
	parts := s.parts()
	if parts == 1 {
		return engine
	}
	s.hashes = partHashes(s.hashes[:0], engine, parts)
	return s.hashes
}

// windowed reports whether no group needs all blocks of a prompt: those of the first do
// not follow each other.
func (s *Stream) windowed() bool {
	return len(s.layout.Groups) > 0 && s.layout.Groups[0].Attention != kv.FullAttention
}

// tail is a store event of a windowed rank that leaves blocks out.
type tail struct {
	parent    uint64
	hasParent bool
	locals    []uint64 // of all its blocks, in blocks of the index
	hashes    []uint64 // of those that the engine keeps
}

// maxTails and maxTailBlocks bound the tails that a stream remembers.
const (
	maxTails      = 256
	maxTailBlocks = 1 << 16
)

// applyTail applies a store event of the first group of a windowed rank. It has the
// tokens of all blocks and the hashes of those that the engine keeps: the window that
// ends where the prompt is looked up next. That is its last whole block; if the prompt
// ends with a block, it is the one before (reachable_block_mask and replay_boundaries in
// vLLM's v1/core). With more blocks than the window has, the two look alike: the last
// blocks are taken. The next event behind shows it if that was one too far, because it
// begins with the tokens of the last block.
func (s *Stream) applyTail(e *kvEvent) error {
	parts, need := s.parts(), (s.layout.Groups[0].Window-2)/e.blockSize+1
	all, kept := len(e.tokens)/e.blockSize, len(e.hashes)
	if kept > all {
		return fmt.Errorf("%d tokens for %d blocks of %d", len(e.tokens), kept, e.blockSize)
	}
	// Extra keys are those of the blocks that are kept. The seed of the others is that of
	// plain text: with a salt or media, nothing is found.
	whole := *e
	whole.ahead, whole.behind = nil, 0
	whole.tokens, whole.hashes = e.tokens[:all*e.blockSize], s.hashes[:0]
	for range all {
		whole.hashes = append(whole.hashes, 0)
	}
	if s.hashes = whole.hashes; kept < all {
		whole.extra = nil
	}
	var err error
	if s.blocks, err = s.dec.blocks(s.blocks[:0], &whole, parts); err != nil {
		return err
	}
	locals := make([]uint64, len(s.blocks))
	for i, b := range s.blocks {
		locals[i] = b.Local
	}
	t := tail{e.parent, e.hasParent, locals, slices.Clone(e.hashes)}
	s.batch.stored = true
	if before, known := s.tails[e.parent]; known && e.hasParent && slices.Equal(locals[:parts], before.locals[len(before.locals)-parts:]) {
		s.index.Remove(s.Src.Worker, s.inParts(before.hashes))
		s.storeTail(before, len(before.locals)/parts-len(before.hashes)-1)
		delete(s.tails, e.parent)
	}
	skipped := all - kept
	if kept == all-1 && all <= need {
		skipped = 0
	} else if skipped > 0 {
		s.remember(t)
	}
	s.storeTail(t, skipped)
	s.history.relay()
	return nil
}

// storeTail stores the blocks that t keeps behind its first skipped ones.
func (s *Stream) storeTail(t tail, skipped int) {
	parts := s.parts()
	blocks := s.blocks[:0]
	for i, hash := range t.hashes {
		for part := range parts {
			b := kv.StoredBlock{Engine: hash, Local: t.locals[(skipped+i)*parts+part]}
			if part < parts-1 {
				b.Engine = partHash(hash, part)
			}
			if s.seeded {
				s.index.Remove(s.Src.Worker, []uint64{b.Engine})
			}
			blocks = append(blocks, b)
		}
	}
	s.blocks = blocks
	if err := s.index.StoreTail(s.Src.Worker, t.parent, t.hasParent, t.locals[:skipped*parts], blocks); err != nil {
		s.stats.UnknownParent.Add(1) // the engine need not hold it either
		return
	}
	s.stats.Stored.Add(1)
	s.stats.StoredBlocks.Add(uint64(len(blocks)))
}

// remember keeps t until an event shows where it ends.
func (s *Stream) remember(t tail) {
	if s.tailBlocks += len(t.locals); len(s.tails) >= maxTails || s.tailBlocks > maxTailBlocks || s.tails == nil {
		s.tails, s.tailBlocks = map[uint64]tail{}, len(t.locals)
	}
	if len(t.locals) <= maxTailBlocks {
		s.tails[t.hashes[len(t.hashes)-1]] = t
	}
}

// applyHeld applies a store event of a group other than the first.
func (s *Stream) applyHeld(group int, hashes []uint64) error {
	if s.overflows(len(hashes)) {
		return nil
	}
	if s.seeded {
		s.index.Drop(s.Src.Worker, group, hashes)
	}
	s.batch.stored = true
	s.index.Hold(s.Src.Worker, group, hashes)
	s.history.holds(group, hashes)
	s.stats.Stored.Add(1)
	s.stats.StoredBlocks.Add(uint64(len(hashes)))
	return nil
}
