package radix

import (
	"iter"

	"kvrouter/internal/base/kv"
)

// maxDumpedLower bounds the blocks of a worker's lower tiers in a dump. Without the others
// a match ends earlier.
const maxDumpedLower = 1 << 20

// LowerBlock is a block of a lower tier and the place that is known of it.
type LowerBlock struct {
	PlacedBlock // without a place, Local is unset
	At          LowerTier
	Placed      bool
}

// LowerDump is the lower tiers of a worker, as an index has them.
type LowerDump struct {
	Chunk    int
	Doubtful bool
	Stores   []string // that it reads
	// Blocks yields each block after its parent, a block with several copies once for each.
	// Storing them one by one, behind the worker's blocks on the device and the attachment
	// of its stores, gives the same matches. The blocks of a store are with the first worker that reads it. Blocks behind
	// a hole are omitted, as are those of a store behind blocks that only another reader of it
	// holds.
	Blocks iter.Seq[LowerBlock]
}

// Empty reports whether there is nothing in d.
func (d LowerDump) Empty() bool { return d.Blocks == nil }

// DumpLowerOf returns the lower tiers of w. It first copies 32 bytes per block, during which
// lookups continue and changes wait; the rest is computed while the blocks are consumed.
func (r *Tree) DumpLowerOf(w kv.WorkerKey) (d LowerDump) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	slot, known := r.slot(w)
	if !known || r.slots[slot].lower == nil {
		return d
	}
	lower := r.slots[slot].lower
	d.Chunk, d.Doubtful = lower.chunk, lower.doubt != 0
	left := maxDumpedLower
	held := r.appendHeld(nil, slot, kv.Device, -1, r.slots[slot].blocks.Len())
	device := len(held)
	tiers := func(slots *tierSlots, store int8) {
		for i, tier := range kv.LowerTiers {
			if slots[i] != noSlot {
				held = r.appendHeld(held, slots[i], tier, store, left-(len(held)-device))
			}
		}
	}
	tiers(&lower.own, -1)
	for i, s := range lower.stores {
		d.Stores = append(d.Stores, s.name)
		from := len(held)
		tiers(&s.slots, int8(i))
		if r.firstReader(s) != w { // they only give their children a place
			for j := range held[from:] {
				held[from+j].copies = 0
			}
		}
	}
	waiting := lower.dumpWaiting()
	stores := d.Stores
	d.Blocks = func(yield func(LowerBlock) bool) {
		more := true
		dumpWorker(held, func(h *heldBlock, b PlacedBlock) bool {
			if h.tier == kv.Device {
				return true
			}
			at := LowerTier{Tier: h.tier, Shared: h.store >= 0}
			if at.Shared {
				at.Store = stores[h.store]
			}
			more = yield(LowerBlock{PlacedBlock: b, At: at, Placed: true})
			return more
		})
		for i := 0; more && i < len(waiting); i++ {
			more = yield(waiting[i])
		}
	}
	return d
}

// firstReader returns the first worker that reads a store.
func (r *Tree) firstReader(s *sharedStore) kv.WorkerKey {
	for _, p := range r.workers {
		if lower := r.slots[p.slot].lower; lower != nil {
			for _, other := range lower.stores {
				if other == s {
					return p.key
				}
			}
		}
	}
	return kv.WorkerKey{}
}

// dumpWaiting returns the blocks that wait for their place.
func (l *lowerTiers) dumpWaiting() (blocks []LowerBlock) {
	for key, b := range l.waiting.blocks {
		for i, tier := range kv.LowerTiers {
			out := LowerBlock{At: LowerTier{Tier: tier}}
			out.Engine = b.engine
			if key.store != nil {
				out.At.Shared, out.At.Store = true, key.store.name
			}
			if b.hasLocal && b.hasParent {
				out.Local, out.Parent, out.HasParent, out.Placed = b.local, b.parent, true, true
			}
			for range min(b.copies[i], maxCopiesWaited) {
				blocks = append(blocks, out)
			}
		}
	}
	return blocks
}
