package events

import (
	"fmt"
	"strings"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// Media of vLLM's offloading connector and of SGLang's hierarchical cache, in upper case.
const (
	mediumCPU     = "CPU"
	mediumStorage = "STORAGE"
	mediumPinned  = "CPU_PINNED"
)

// remote is the locality of a store that other workers read, too.
const remote = "REMOTE"

// onDevice reports whether an event is about the engine's own cache, rather than a lower
// tier or another process.
func (e *kvEvent) onDevice() bool {
	if string(e.locality) == remote {
		return false
	}
	if len(e.medium) == 0 || string(e.medium) == "GPU" {
		return true
	}
	tier, known := kv.TierOf(string(e.medium[:min(len(e.medium), maxMedium)]))
	return known && tier == kv.Device
}

// maxMedium bounds the name of a medium that may be known, bytes.
const maxMedium = 32

// lowerTier returns the lower tier that an event is about; not ok: its medium is not known,
// or the device of another process.
func (s *Stream) lowerTier(e *kvEvent) (at radix.LowerTier, medium string, ok bool) {
	if len(e.medium) <= maxMedium {
		medium = strings.ToUpper(string(e.medium))
		at.Tier, ok = kv.TierOf(medium)
	}
	if !ok || at.Tier == kv.Device {
		s.stats.UnknownMedia.Add(1)
		s.warnOnce("medium", "ignored KV events of an unknown medium", "medium", fmt.Sprintf("%.40q", e.medium), "locality",
			fmt.Sprintf("%.40q", e.locality))
		return at, medium, false
	}
	at.Again = s.seeded
	if at.Shared = string(e.locality) == remote; at.Shared {
		at.Store = string(e.ownership)
	}
	return at, medium, true
}

// followsTiers reports whether the index can continue a match in lower tiers: the engine
// has one KV-cache group, of full attention, and no drafter, with which vLLM's connector
// leaves out the last chunk.
func (s *Stream) followsTiers() bool {
	return !s.layout.DropsLast && s.ahead.Tokens == 0 && (len(s.layout.Groups) == 0 || len(s.layout.Groups) == 1 && !s.windowed())
}

// applyLower applies a store or removal of a lower tier.
func (s *Stream) applyLower(e *kvEvent) {
	at, medium, ok := s.lowerTier(e)
	group, known := s.groupOf(e)
	if !ok || !known || group > 0 || !s.followsTiers() {
		s.stats.Ignored.Add(1)
		return
	}
	if len(e.hashes) == 0 {
		return
	}
	counts := &s.stats.Lower[at.Tier]
	if e.kind == eventRemoved {
		hashes := s.inParts(e.hashes)
		done, _ := s.apply(radix.Change{Kind: radix.Removed, LowerTier: at, Hashes: hashes}) // cannot fail
		counts.Removed.Add(uint64(len(hashes) - done.Unknown))
		counts.UnknownRemoved.Add(uint64(done.Unknown))
		return
	}
	s.batch.stored = true
	if medium == mediumPinned {
		s.pinned.Store(true)
	}
	if len(e.tokens) == 0 {
		// vLLM names no more than the hash unless its events are self-describing.
		hashes := s.inParts(e.hashes)
		s.applyLost(radix.Change{Kind: radix.Held, LowerTier: at, Hashes: hashes})
		counts.Stored.Add(uint64(len(hashes)))
		return
	}
	parts := e.blockSize / s.Src.BlockSize
	var err error
	if e.blockSize <= 0 || e.blockSize%s.Src.BlockSize != 0 || parts > maxParts {
		err = fmt.Errorf("block_size is %d, want a multiple of %d", e.blockSize, s.Src.BlockSize)
	} else {
		s.blocks, err = s.dec.blocks(s.blocks[:0], e, parts)
	}
	if err != nil { // the device's blocks are as they were
		s.stats.InvalidStored.Add(1)
		s.warnOnce("lower", "skipped an invalid KV event of a lower tier", "medium", medium, "error", err)
		return
	}
	// vLLM announces the blocks of a chunk together, SGLang many that are loaded one by one.
	chunk := parts
	// Other block sizes are those of other caches, whose hashes the device does not name.
	own := len(s.layout.Groups) == 0 || e.blockSize == s.layout.Groups[0].Block
	if at.Partial = own && (medium == mediumCPU || medium == mediumStorage); at.Partial {
		chunk = len(s.blocks)
	}
	if chunk > max(1, s.chunkBlocks) {
		s.apply(radix.Change{Kind: radix.ChunkSet, Set: &radix.Setting{Chunk: chunk}})
	}
	s.chunkBlocks = max(s.chunkBlocks, chunk)
	s.applyLost(radix.Change{Kind: radix.Stored, LowerTier: at, Parent: e.parent, HasParent: e.hasParent, Blocks: s.blocks})
	counts.Stored.Add(uint64(len(s.blocks)))
}

// applyLost applies a store in a lower tier, and counts blocks that the index had to drop for its
// bounds.
func (s *Stream) applyLost(c radix.Change) {
	if done, _ := s.apply(c); done.Lost > 0 { // cannot fail
		s.stats.LowerLost.Add(uint64(done.Lost))
		s.warnOnce("lost", "dropped blocks of lower tiers from the index: they are too many, or too many have no place", "blocks", done.Lost,
			"maximum", radix.MaxLowerBlocks)
	}
}

// Lower returns what the index has of the rank's lower tiers.
func (s *Stream) Lower() radix.LowerState { return s.index.LowerOf(s.Src.Worker) }
