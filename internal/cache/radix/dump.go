package radix

import (
	"cmp"
	"iter"
	"slices"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/table"
)

// PlacedBlock is a block and the engine hash of the one that it follows.
type PlacedBlock struct {
	kv.StoredBlock
	Parent    uint64
	HasParent bool // false: it is a prompt's first
}

// DumpOf yields every block of w that Match can reach, each after its parent. Storing
// the yielded blocks one by one into an empty index gives the same matches; a block with
// several copies is yielded once for each. Blocks behind a hole are omitted, because their
// parent is unknown. DumpOf first copies 32 bytes per block, during which lookups continue
// and changes wait; the rest is computed without a lock while the blocks are consumed.
func (r *Tree) DumpOf(w kv.WorkerKey) iter.Seq[PlacedBlock] {
	held := r.snapshot(w)
	return func(yield func(PlacedBlock) bool) {
		dumpWorker(held, func(_ *heldBlock, b PlacedBlock) bool { return yield(b) })
	}
}

// HeldBlock is a block of a group other than the first.
type HeldBlock struct {
	Group  int // place in the Layout, at least 1
	Engine uint64
	Copies int
}

// HeldOf returns the blocks of all groups of w but the first, in no order. Together
// with its Layout and DumpOf they are all that the index has of w.
func (r *Tree) HeldOf(w kv.WorkerKey) (held []HeldBlock) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	slot, known := r.slot(w)
	if !known || r.slots[slot].groups == nil {
		return nil
	}
	for i, other := range r.slots[slot].groups.others {
		s := &r.slots[other]
		held = slices.Grow(held, s.blocks.Len()+s.waiting.Len())
		s.blocks.Each(func(engine uint64, _, _ uint32) bool {
			held = append(held, HeldBlock{Group: i + 1, Engine: engine, Copies: 1 + int(s.copies.Get(engine, 0))})
			return true
		})
		s.waiting.Each(func(engine uint64, _, copies uint32) bool {
			held = append(held, HeldBlock{Group: i + 1, Engine: engine, Copies: int(copies)})
			return true
		})
	}
	return held
}

// heldBlock is one entry of a worker's table, as DumpOf and DumpLowerOf need it.
type heldBlock struct {
	block        kv.StoredBlock
	node, parent uint32 // parent is rootNode for the first block of a prompt
	copies       uint32
	tier         kv.Tier
	store        int8 // of a lower tier: place among the stores that the worker reads; -1: its own
}

// snapshot returns what w holds, in no order.
func (r *Tree) snapshot(w kv.WorkerKey) []heldBlock {
	r.mu.RLock()
	defer r.mu.RUnlock()
	slot, known := r.slot(w)
	if !known {
		return nil
	}
	return r.appendHeld(nil, slot, kv.Device, -1, r.slots[slot].blocks.Len())
}

// appendHeld appends what a slot holds, at most that many blocks.
func (r *Tree) appendHeld(held []heldBlock, slot uint32, tier kv.Tier, store int8, most int) []heldBlock {
	s := &r.slots[slot]
	held = slices.Grow(held, min(most, s.blocks.Len()))
	s.blocks.Each(func(engine uint64, _, n uint32) bool {
		if most--; most < 0 {
			return false
		}
		node := r.nodes.at(n)
		held = append(held, heldBlock{
			block:  kv.StoredBlock{Engine: engine, Local: node.local},
			node:   n,
			parent: node.parent,
			copies: 1 + s.copies.Get(engine, 0),
			tier:   tier,
			store:  store,
		})
		return true
	})
	return held
}

// dumpWorker yields the reachable blocks among held, each after its parent, until
// yield returns false. It puts held in the order of nodes, tiers and engine hashes.
func dumpWorker(held []heldBlock, yield func(*heldBlock, PlacedBlock) bool) {
	slices.SortFunc(held, func(a, b heldBlock) int {
		return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.tier, b.tier), cmp.Compare(a.store, b.store),
			cmp.Compare(a.block.Engine, b.block.Engine))
	})
	byNode := table.Table{} // node -> 1 + index of its first entry in held
	for i := len(held) - 1; i >= 0; i-- {
		byNode.Put(uint64(held[i].node), 0, uint32(i)+1)
	}
	const (
		unknown = iota
		reachable
		unreachable
	)
	state := make([]uint8, len(held)) // of the first entry of each node
	var path []int
	for start := range held {
		// Up to the root, a hole, or an ancestor whose state is known ...
		path = path[:0]
		var result uint8
		for i := int(byNode.Get(uint64(held[start].node), 0)) - 1; ; {
			if result = state[i]; result != unknown {
				break
			}
			path = append(path, i)
			if held[i].parent == rootNode {
				result = reachable
				break
			}
			if i = int(byNode.Get(uint64(held[i].parent), 0)) - 1; i < 0 {
				result = unreachable
				break
			}
		}
		// ... and back down.
		for _, first := range slices.Backward(path) {
			state[first] = result
			if result == unreachable {
				continue
			}
			parent, hasParent := uint64(0), held[first].parent != rootNode
			if hasParent {
				parent = held[byNode.Get(uint64(held[first].parent), 0)-1].block.Engine
			}
			for i := first; i < len(held) && held[i].node == held[first].node; i++ {
				for range held[i].copies {
					if !yield(&held[i], PlacedBlock{held[i].block, parent, hasParent}) {
						return
					}
				}
			}
		}
	}
}
