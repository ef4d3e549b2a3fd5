package radix

import (
	"slices"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/table"
)

// workerPlace is the slot of a worker.
type workerPlace struct {
	key  kv.WorkerKey
	slot uint32
}

// workerSlot is the blocks of one worker rank in the index: 16 bytes for each
// block in the common case of one copy and one engine hash a node.
type workerSlot struct {
	key     kv.WorkerKey // of a worker's slot
	blocks  table.Table  // engine hash -> node
	copies  table.Table  // engine hash -> copies beyond the first
	aliases table.Table  // node -> engine hashes there beyond the first
	groups  *groupSlots  // nil: a match is the leading blocks
	waiting table.Table  // of a group's slot: engine hash -> copies of a block without a node
	lower   *lowerTiers  // nil: a match ends with the device's blocks
}

// place finds w among the workers, or where it would be.
func (r *Tree) place(w kv.WorkerKey) (at int, known bool) {
	return slices.BinarySearchFunc(r.workers, w, func(p workerPlace, key kv.WorkerKey) int { return p.key.Compare(key) })
}

// slot returns the slot of w.
func (r *Tree) slot(w kv.WorkerKey) (slot uint32, known bool) {
	if at, known := r.place(w); known {
		return r.workers[at].slot, true
	}
	return 0, false
}

// takeSlot gives w a slot that holds nothing.
func (r *Tree) takeSlot(w kv.WorkerKey) uint32 {
	slot := r.newSlot()
	r.slots[slot].key = w
	r.booked.counts(slot)
	r.live[slot/64] |= 1 << (slot % 64)
	if at, known := r.place(w); known {
		r.workers[at].slot = slot
	} else {
		r.workers = slices.Insert(r.workers, at, workerPlace{w, slot})
	}
	return slot
}

// retire takes slot out of all lookups and leaves its blocks to sweep. The
// caller sees to the slot's key.
func (r *Tree) retire(slot uint32) {
	r.forgetLower(slot)
	r.live[slot/64] &^= 1 << (slot % 64)
	s := &r.slots[slot]
	if s.groups != nil {
		for _, other := range s.groups.others {
			r.retire(other)
		}
	}
	s.copies, s.aliases, s.waiting, s.groups = table.Table{}, table.Table{}, table.Table{}, nil
	r.retired = append(r.retired, slot)
}

// sweep takes up to limit entries of retired slots out of the tree.
func (r *Tree) sweep(limit int) {
	for len(r.retired) > 0 && limit > 0 {
		slot := r.retired[0]
		s := &r.slots[slot]
		limit -= s.blocks.Drain(limit, func(n uint32) {
			// The slot is gone already where two engine hashes led to the node,
			// which may even stand for another prefix by now.
			if r.sets.Has(r.nodes.at(n).members, slot) {
				r.toggleMember(slot, n)
				r.freeUnused(n)
			}
		})
		if s.blocks.Len() == 0 {
			*s = workerSlot{}
			r.booked.ignores(slot)
			r.retired = r.retired[1:]
			r.vacant = append(r.vacant, slot)
		}
	}
}
