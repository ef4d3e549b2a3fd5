package radix

import (
	"slices"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/table"
)

// groupSlots are the KV-cache groups of a worker whose Layout is not plain. The
// worker's own slot has the blocks of the first group, and each other group a slot of
// its own, which no lookup takes for a worker. So the sets of the nodes say what each
// group holds, and a node lives for as long as any group holds it.
//
// The groups of an engine hash a prefix alike, and the stores of a group other than
// the first may leave out blocks, so that their tokens do not place them. Their hashes do:
// a block of a group stands at the node of the same hash in another group. Until there
// is one, the hash waits in the slot, which its events may change like the rest.
type groupSlots struct {
	layout kv.Layout
	others []uint32  // slots of layout.Groups[1:]
	bits   []setBits // of others
	rules  rules
}

// setBits are some slots in a word of a worker set.
type setBits struct {
	word int
	bits uint64
}

// bitOf returns one slot in the words of a worker set.
func bitOf(slot uint32) setBits { return setBits{word: int(slot / 64), bits: 1 << (slot % 64)} }

// bitsOf returns slots by the words of a worker set.
func bitsOf(slots []uint32) (words []setBits) {
	for _, slot := range slots {
		one := bitOf(slot)
		if at := slices.IndexFunc(words, func(b setBits) bool { return b.word == one.word }); at >= 0 {
			words[at].bits |= one.bits
		} else {
			words = append(words, one)
		}
	}
	return words
}

// setLayout is LayoutSet.
func (r *Tree) setLayout(w kv.WorkerKey, layout kv.Layout, block int) {
	slot, known := r.slot(w)
	if layout.Plain(block) && (!known || r.slots[slot].groups == nil) {
		return
	}
	if !known {
		slot = r.takeSlot(w)
	}
	var old kv.Layout
	var slots []uint32
	if g := r.slots[slot].groups; g != nil {
		old, slots = g.layout, g.others
		r.countGroups(g, -1)
	}
	if len(old.Groups) > 0 && (len(layout.Groups) == 0 || old.Groups[0] != layout.Groups[0]) {
		r.retire(slot)
		slot = r.takeSlot(w)
		old, slots = kv.Layout{}, nil
	}
	r.slots[slot].groups = nil
	next := &groupSlots{layout: layout, rules: rulesOf(layout, block)}
	for i := 1; i < len(layout.Groups); i++ {
		at := slices.Index(old.Groups, layout.Groups[i])
		if at > 0 {
			next.others = append(next.others, slots[at-1])
			continue
		}
		next.others = append(next.others, r.newSlot())
	}
	for i, other := range slots {
		if !slices.Contains(layout.Groups, old.Groups[i+1]) {
			r.retire(other)
		}
	}
	if layout.Plain(block) {
		return
	}
	next.bits = bitsOf(next.others)
	r.slots[slot].groups = next
	r.countGroups(next, 1)
}

// countGroups counts g among the layouts that lookups must see.
func (r *Tree) countGroups(g *groupSlots, by int) {
	r.grouped += by
	if g.rules.beyond() {
		r.beyond += by
	}
}

// group returns the slot of a group of w, by its place in the Layout; known is false
// if there is none.
func (r *Tree) group(w kv.WorkerKey, group int) (first, slot uint32, known bool) {
	first, known = r.slot(w)
	if !known {
		return 0, 0, false
	}
	g := r.slots[first].groups
	if g == nil || group < 1 || group > len(g.others) {
		return 0, 0, false
	}
	return first, g.others[group-1], true
}

// hold is Held of the group Groups[group] of w's Layout.
func (r *Tree) hold(w kv.WorkerKey, group int, engine []uint64) {
	first, slot, known := r.group(w, group)
	if !known {
		return
	}
	s := &r.slots[slot]
	for _, e := range engine {
		if s.blocks.Get(e, 0) != 0 {
			s.copies.Put(e, 0, s.copies.Get(e, 0)+1)
			continue
		}
		n := r.slots[first].blocks.Get(e, 0)
		for i := 0; n == 0 && i < len(r.slots[first].groups.others); i++ {
			n = r.slots[r.slots[first].groups.others[i]].blocks.Get(e, 0)
		}
		if n == 0 {
			s.waiting.Put(e, 0, s.waiting.Get(e, 0)+1)
			continue
		}
		s.blocks.Put(e, 0, n)
		r.addMember(slot, n)
	}
}

// Depth returns the number of blocks of the prefix that ends with the block of that engine
// hash in the first group of w; it is not known if w does not hold the block.
func (r *Tree) Depth(w kv.WorkerKey, engine uint64) (blocks int, known bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	slot, known := r.slot(w)
	if !known {
		return 0, false
	}
	for n := r.slots[slot].blocks.Get(engine, 0); n != rootNode; n = r.nodes.at(n).parent {
		blocks++
	}
	return blocks, blocks > 0
}

// follow puts the blocks of a worker's other groups with the engine hash to node n, at
// which the first group has just stored it.
func (r *Tree) follow(g *groupSlots, engine uint64, n uint32) {
	for _, slot := range g.others {
		s := &r.slots[slot]
		old := s.blocks.Get(engine, 0)
		if waiting := s.waiting.Get(engine, 0); waiting != 0 {
			s.waiting.Delete(engine, 0)
			s.copies.SetOrDelete(engine, waiting-1)
		} else if old == 0 || old == n {
			continue
		}
		s.blocks.Put(engine, 0, n)
		r.addMember(slot, n)
		if old != 0 {
			r.dropMember(slot, old)
		}
	}
}

// emptyGroups gives a new slot of a worker the groups that it had, empty.
func (r *Tree) emptyGroups(g *groupSlots, slot uint32) {
	next := &groupSlots{layout: g.layout, rules: g.rules}
	for range g.others {
		next.others = append(next.others, r.newSlot())
	}
	next.bits = bitsOf(next.others)
	r.slots[slot].groups = next
}

// LayoutOf returns the Layout of w; the zero value if none was set.
func (r *Tree) LayoutOf(w kv.WorkerKey) kv.Layout {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if slot, known := r.slot(w); known && r.slots[slot].groups != nil {
		return r.slots[slot].groups.layout
	}
	return kv.Layout{}
}

// AllBlocks returns the number of blocks that all groups of w hold, by engine hash and
// group; copies of one block count once.
func (r *Tree) AllBlocks(w kv.WorkerKey) int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	slot, known := r.slot(w)
	if !known {
		return 0
	}
	count := r.slots[slot].blocks.Len()
	if g := r.slots[slot].groups; g != nil {
		for _, other := range g.others {
			count += r.slots[other].blocks.Len() + r.slots[other].waiting.Len()
		}
	}
	return count
}

// newSlot returns a slot that holds nothing and belongs to no worker.
func (r *Tree) newSlot() uint32 {
	var slot uint32
	if n := len(r.vacant); n > 0 {
		slot, r.vacant = r.vacant[n-1], r.vacant[:n-1]
	} else {
		slot = uint32(len(r.slots))
		r.slots = append(r.slots, workerSlot{})
		if int(slot/64) == len(r.live) {
			r.live = append(r.live, 0)
		}
	}
	empty := table.Table{Seed: r.seed}
	r.slots[slot] = workerSlot{blocks: empty, copies: empty, aliases: empty, waiting: empty}
	return slot
}
