package radix

import (
	"fmt"
	"slices"

	"kvrouter/internal/base/kv"
)

// Kind says what a Change changes.
type Kind uint8

// The kinds of changes. What they say of blocks concerns the device, or a lower tier if the
// change names one.
const (
	// Stored: the rank holds Blocks, one after the other, the first behind Parent, or at the
	// start of a prompt without HasParent. A block that it holds counts as a further copy.
	//
	// Behind Parent, blocks with the local hashes Skipped may come first that a rank does not
	// hold: the first group of a model with sliding windows only does not keep all blocks of a
	// prompt.
	//
	// On the device it fails with ErrParentUnknown, ErrSelfParent or ErrTooManyBare, and has
	// then stored nothing, unless the rank is cleared meanwhile. Lookups may see the first
	// blocks before the last are stored.
	//
	// In a lower tier, a block whose place the index knows by its hash keeps it. Blocks come in
	// any order: those whose parent is not known wait until it is.
	Stored Kind = iota + 1
	// Held: the rank holds the blocks of Hashes, each a copy more: of a Group other than the
	// first, or of a lower tier, where those whose place is not known wait for a Stored that
	// names it. A Group that the Layout does not have has no effect.
	Held
	// Removed: one copy of each of the blocks of Hashes is dropped.
	Removed
	// Cleared: the rank is empty. It remains in Workers.
	Cleared
	// DeviceCleared: the device is empty. The rank's own lower tiers remain and become doubtful
	// until DoubtSettled; with Host, its host tier is empty, too, and nothing is doubtful.
	DeviceCleared
	// Forgotten: all ranks of the worker are empty and removed from Workers.
	Forgotten
	// LayoutSet: the rank has the KV-cache groups of Set's Layout. Groups of the same number and
	// the same kind keep their blocks; with another first group, the rank is empty.
	LayoutSet
	// LookaheadStored: the rank stores blocks with hashes of kv.HashLookaheadBlocks. Of more than
	// kv.MaxLookaheads kinds the others are ignored.
	LookaheadStored
	// ChunkSet: the engine loads Set's Chunk blocks from its lower tiers whole or not at all,
	// counted from the start of the prompt.
	ChunkSet
	// LowerRestored: what a LowerDump says of the rank beside the blocks: the stores before
	// them, the rest behind them. A Chunk of 0 and no Stores change nothing.
	LowerRestored
	// DoubtSettled: an answer has shown whether the lower tiers still have what a Match counted
	// and was not sure of. If not, they have what they stored since the doubt began, and the rank
	// reads no store until it names a block of one. It does nothing if Set's Doubt is not the
	// present one: of several answers that show the same, the first settles it, and what was
	// stored after it stays.
	DoubtSettled

	// KindsEnd is behind the last kind.
	KindsEnd
)

// Change is a change of what a worker rank holds. Kind says which of its fields count.
type Change struct {
	Kind      Kind
	HasParent bool  // of Stored
	Host      bool  // of DeviceCleared
	Group     int32 // of Held and Removed on the device: place in the Layout; 0: the first
	LowerTier       // of Stored, Held and Removed; the zero value: the device
	Parent    uint64
	Skipped   []uint64 // local hashes
	Blocks    []kv.StoredBlock
	Hashes    []uint64 // of the engine
	Set       *Setting // of the kinds that name it; nil: the zero value
}

// Setting is what a Change says of a rank beside blocks.
type Setting struct {
	Layout    kv.Layout    // in the order of precedence for Held and Removed
	BlockSize int          // of LayoutSet: tokens in a block of the index; it divides the block sizes of all groups
	Lookahead kv.Lookahead // of LookaheadStored
	Chunk     int          // of ChunkSet and LowerRestored: blocks
	Doubtful  bool         // of LowerRestored
	Stores    []string     // of LowerRestored
	Doubt     uint32       // of DoubtSettled: its number in LowerState
	Held      bool         // of DoubtSettled
}

// Applied is the effect of a Change.
type Applied struct {
	Unknown int  // blocks to be removed that the rank did not have; they are skipped
	Lost    int  // blocks of lower tiers of any worker that had to be dropped for its bounds
	Settled bool // the doubt was the present one
}

// Setting returns what c says beside blocks.
func (c *Change) Setting() Setting {
	if c.Set == nil {
		return Setting{}
	}
	return *c.Set
}

// Size returns the number of blocks that c names.
func (c *Change) Size() int { return len(c.Blocks) + len(c.Hashes) }

// Clone returns a copy that shares no blocks with c.
func (c *Change) Clone() Change {
	copied := *c
	copied.Skipped, copied.Blocks, copied.Hashes = slices.Clone(c.Skipped), slices.Clone(c.Blocks), slices.Clone(c.Hashes)
	return copied
}

// Part returns the change of some of the blocks that c names, those before them being done.
func (c *Change) Part(from, to int) Change {
	part := *c
	if c.Kind == Stored {
		part.Blocks = c.Blocks[from:to]
		if from > 0 {
			part.Parent, part.HasParent, part.Skipped = c.Blocks[from-1].Engine, true, nil
		}
	} else {
		part.Hashes = c.Hashes[from:to]
	}
	return part
}

// Apply makes a change of w. It keeps nothing of c.
func (r *Tree) Apply(w kv.WorkerKey, c *Change) (done Applied, err error) {
	if c.Kind == Stored && c.Tier == kv.Device {
		previous, hasPrevious := c.Parent, c.HasParent
		for i, b := range c.Blocks {
			if hasPrevious && b.Engine == previous {
				return done, fmt.Errorf("worker %d rank %d: store of %d blocks: block %d with engine hash %d: %w",
					w.Worker, w.Rank, len(c.Blocks), i, b.Engine, ErrSelfParent)
			}
			previous, hasPrevious = b.Engine, true
		}
	}
	for from := 0; from == 0 || from < c.Size(); from += partBlocks {
		part := c.Part(from, min(from+partBlocks, c.Size()))
		one, err := r.applyPart(w, &part)
		if err != nil {
			return done, err
		}
		done.Unknown, done.Lost, done.Settled = done.Unknown+one.Unknown, done.Lost+one.Lost, one.Settled
	}
	return done, nil
}

// applyPart makes a change of as many blocks as lookups may wait for. What it calls is for holders
// of the lock alone.
func (r *Tree) applyPart(w kv.WorkerKey, c *Change) (done Applied, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sweep(sweepPerPart + sweepPerBlock*c.Size())
	switch lower := c.Tier != kv.Device; c.Kind {
	case Stored:
		if lower {
			done.Lost = r.storeLower(w, c.LowerTier, c.Parent, c.HasParent, c.Blocks)
		} else {
			err = r.store(w, c.Parent, c.HasParent, c.Skipped, c.Blocks)
		}
	case Held:
		if lower {
			done.Lost = r.holdLower(w, c.LowerTier, c.Hashes)
		} else {
			r.hold(w, int(c.Group), c.Hashes)
		}
	case Removed:
		if lower {
			done.Unknown = r.removeLowers(w, c.LowerTier, c.Hashes)
		} else {
			done.Unknown = r.remove(w, int(c.Group), c.Hashes)
		}
	case Cleared:
		r.clear(w)
	case DeviceCleared:
		r.clearDevice(w, c.Host)
	case Forgotten:
		r.forget(w.Worker)
	case LayoutSet:
		set := c.Setting()
		r.setLayout(w, set.Layout, set.BlockSize)
	case LookaheadStored:
		r.lookaheadStored(c.Setting().Lookahead)
	case ChunkSet:
		r.setChunk(w, c.Setting().Chunk)
	case LowerRestored:
		set := c.Setting()
		r.restoreLower(w, set.Chunk, set.Doubtful, set.Stores)
	case DoubtSettled:
		set := c.Setting()
		done.Settled = r.settleLower(w, set.Doubt, set.Held)
	default:
		err = fmt.Errorf("worker %d rank %d: change of the unknown kind %d", w.Worker, w.Rank, c.Kind)
	}
	return done, err
}
