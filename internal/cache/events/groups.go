package events

import (
	"fmt"
	"slices"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
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
	return !ok || s.layout.Groups[known] == merged(s.layout.Groups[known], g)
}

// merged returns g as it is known by one more event. With hits inside a block, vLLM also
// stores parts of blocks, and the block size of such an event is the part. A state is
// found at the smaller of the two. Of full attention, a part is the last of its prompt,
// behind others that no event names: only whole blocks have a place.
func merged(known, g kv.CacheGroup) kv.CacheGroup {
	switch {
	case known.Attention != g.Attention:
	case g.Attention == kv.State:
		g.Block = min(g.Block, known.Block)
	case g.Attention == kv.FullAttention && known.Block%g.Block == 0:
		g.Block = known.Block
	}
	return g
}

// cacheGroup returns the group that a store event describes; not ok: its rule is not
// known, or the index cannot follow it.
func (s *Stream) cacheGroup(e *kvEvent) (g kv.CacheGroup, ok bool) {
	g = kv.CacheGroup{Index: e.group, Block: e.blockSize}
	if len(e.specKind) == 0 {
		// vLLM 0.20 numbers groups without their kind: the first group counts.
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
			groups[known] = merged(groups[known], g)
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
	if _, known := kv.AttentionOf(string(e.specKind)); known && e.blockSize%s.Src.BlockSize != 0 {
		s.resize(e.blockSize)
	}
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
		s.log.Info("the engine has several KV-cache groups, or blocks of another size: predictions take them into account",
			"groups", layout.String())
	}
	s.setLayout(kv.Layout{Groups: groups, DropsLast: s.drops.Load() && s.ahead.Tokens == 0})
}

// setLayout gives the index a layout.
func (s *Stream) setLayout(layout kv.Layout) {
	s.layout, s.layoutText = layout, layout.String()
	s.apply(radix.Change{Kind: radix.LayoutSet, Set: &radix.Setting{Layout: layout, BlockSize: s.Src.BlockSize}})
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

// applyHeld applies a store event of a group other than the first.
func (s *Stream) applyHeld(group int, hashes []uint64) error {
	if s.overflows(len(hashes)) {
		return nil
	}
	if s.seeded {
		s.alter(radix.Change{Kind: radix.Removed, Group: int32(group), Hashes: hashes})
	}
	s.batch.stored = true
	if _, err := s.apply(radix.Change{Kind: radix.Held, Group: int32(group), Hashes: hashes}); err != nil {
		return err
	}
	s.stats.Stored.Add(1)
	s.stats.StoredBlocks.Add(uint64(len(hashes)))
	return nil
}
