package events

import (
	"fmt"
	"slices"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// tail is a store event of a windowed rank that leaves blocks out.
type tail struct {
	parent    uint64
	hasParent bool
	locals    []uint64 // of all its blocks, in blocks of the index
	hashes    []uint64 // of those that the engine keeps
	before    []int    // where these are if the prompt ended with the last block
}

// maxTails and maxTailBlocks bound the tails that a stream remembers.
const (
	maxTails      = 256
	maxTailBlocks = 1 << 16
)

// applyTail applies a store event of the first group of a windowed rank. It has the
// tokens of all blocks and the hashes of those that the engine keeps, which are at the
// places that keptBlocks finds. The next event behind shows if the prompt ended with a
// block after all, because it begins with the tokens of the last one.
func (s *Stream) applyTail(e *kvEvent) error {
	parts, all, kept := s.parts(), len(e.tokens)/e.blockSize, len(e.hashes)
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
	t := tail{parent: e.parent, hasParent: e.hasParent, locals: locals, hashes: slices.Clone(e.hashes)}
	s.batch.stored = true
	if last, known := s.tails[e.parent]; known && e.hasParent && slices.Equal(locals[:parts], last.locals[len(last.locals)-parts:]) {
		s.apply(radix.Change{Kind: radix.Removed, Hashes: s.inParts(last.hashes)})
		s.storeTail(last, last.before)
		delete(s.tails, e.parent)
	}
	start := 0
	if e.hasParent {
		depth, known := s.index.Depth(s.Src.Worker, e.parent)
		if !known {
			s.stats.UnknownParent.Add(1) // the engine need not hold it either
			return nil
		}
		start = depth / parts
	}
	w := window{need: (s.layout.Groups[0].Window-2)/e.blockSize + 1, every: int(s.retention.Load()) / e.blockSize}
	places := w.keptBlocks(start, all, kept)
	if len(places) == 0 {
		s.stats.Misplaced.Add(1) // other than by vLLM's rule: they are not found
		return nil
	}
	if places = s.consistent(t, start, places); len(places) > 1 {
		s.stats.Ambiguous.Add(1)
		if t.before = places[1]; places[0][kept-1] == all-1 && places[1][kept-1] == all-2 {
			s.remember(t)
		}
	}
	s.storeTail(t, places[0])
	return nil
}

// consistent leaves of the possible places of t's blocks those that the index confirms, if it
// has one of them from another event: an engine hash stands for all tokens before it, too,
// so that a block has one place.
func (s *Stream) consistent(t tail, start int, places [][]int) [][]int {
	if len(places) == 1 {
		return places
	}
	for i, hash := range t.hashes {
		depth, known := s.index.Depth(s.Src.Worker, hash)
		if !known {
			continue
		}
		if at := slices.IndexFunc(places, func(p []int) bool { return (start+p[i]+1)*s.parts() == depth }); at >= 0 {
			return places[at : at+1]
		}
	}
	return places
}

// window is which blocks an engine keeps of a group of sliding windows, if no group needs
// all blocks.
type window struct {
	need  int // blocks of a window, at least 1
	every int // blocks between the multiples at which windows are kept; 0: at none
}

// keptBlocks returns the possible places of the blocks that an engine keeps, kept of the
// all blocks that begin with block start of their prompt, counted from the first of them:
// the most likely ones first. There are none if no prompt has that many.
//
// vLLM keeps the need blocks before each multiple of every blocks, and those before the
// last block boundary below the prompt's end (reachable_block_mask and replay_boundaries
// in its v1/core), or all blocks. The event does not say where the prompt ends: most likely
// within the block behind. If it ends with the last of the blocks, the boundary is the one
// before; if the blocks are a chunk of it, further on.
func (w window) keptBlocks(start, all, kept int) (places [][]int) {
	end := start + all
	segment := func(i int) bool { return w.every > 0 && (w.need >= w.every || i%w.every >= w.every-w.need) }
	between := func(from, to int) []int { // with the segments
		found := make([]int, 0, kept)
		for i := start; i < end && len(found) <= kept; i++ {
			if segment(i) || from <= i && i < to {
				found = append(found, i-start)
			}
		}
		if len(found) != kept {
			return nil
		}
		return found
	}
	if kept == all {
		return [][]int{between(start, end)}
	}
	// The boundary is behind the end: of the last window, some blocks from one on are here.
	count, from := 0, end
	for i := start; i < end; i++ {
		if segment(i) {
			count++
		}
	}
	for count < kept && from > max(start, end-w.need) {
		if from--; !segment(from) {
			count++
		}
	}
	for _, possible := range [][]int{between(end-w.need, end), between(end-1-w.need, end-1), between(from, end)} {
		if possible != nil && !slices.ContainsFunc(places, func(other []int) bool { return slices.Equal(other, possible) }) {
			places = append(places, possible)
		}
	}
	return places
}

// storeTail stores the blocks that t keeps, at these of its places.
func (s *Stream) storeTail(t tail, places []int) {
	parts := s.parts()
	parent, hasParent, after := t.parent, t.hasParent, 0
	for i := 0; i < len(places); {
		blocks := s.blocks[:0]
		first := places[i]
		for ; i < len(places) && places[i]-first == len(blocks)/parts; i++ {
			for part := range parts {
				b := kv.StoredBlock{Engine: t.hashes[i], Local: t.locals[places[i]*parts+part]}
				if part < parts-1 {
					b.Engine = partHash(t.hashes[i], part)
				}
				if s.seeded {
					s.alter(radix.Change{Kind: radix.Removed, Hashes: []uint64{b.Engine}})
				}
				blocks = append(blocks, b)
			}
		}
		s.blocks = blocks
		if _, err := s.apply(radix.Change{Kind: radix.Stored, Parent: parent, HasParent: hasParent, Skipped: t.locals[after*parts : first*parts],
			Blocks: blocks}); err != nil {
			s.stats.UnknownParent.Add(1) // the engine need not hold it either
			return
		}
		parent, hasParent, after = t.hashes[i-1], true, places[i-1]+1
		s.stats.StoredBlocks.Add(uint64(len(blocks)))
	}
	s.stats.Stored.Add(1)
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
