package radix

import (
	"slices"

	"kvrouter/internal/base/kv"
)

// waiting is the blocks of a worker's lower tiers whose place in a prompt is not known
// yet. It is known as soon as another event names it by the same hash, or the place of the
// parent is.
type waiting struct {
	blocks   map[waitingKey]*waitingBlock
	byHash   map[uint64][]waitingKey // by engine hash
	children map[uint64][]waitingKey // by the parent's engine hash
	ready    []waitingKey            // their place is known; others may have been removed since
}

type waitingKey struct {
	engine uint64
	store  *sharedStore // nil: the worker's own tiers
}

type waitingBlock struct {
	engine, parent, local uint64
	hasParent, hasLocal   bool // hasLocal: the parent's place, or the root if there is none, is enough
	old                   bool // the worker's own tiers may have been emptied since
	copies                [len(kv.LowerTiers)]uint32
}

// wait notes a block of a tier that has no place yet.
func (r *Tree) wait(lower *lowerTiers, store *sharedStore, tier kv.Tier, b waitingBlock) {
	w := &lower.waiting
	if w.blocks == nil || len(w.blocks) >= maxWaiting {
		r.lowerLost += len(w.blocks)
		*w = waiting{blocks: map[waitingKey]*waitingBlock{}, byHash: map[uint64][]waitingKey{}, children: map[uint64][]waitingKey{}}
	}
	key := waitingKey{b.engine, store}
	known := w.blocks[key]
	if known == nil {
		known = &b
		w.blocks[key] = known
		w.byHash[b.engine] = append(w.byHash[b.engine], key)
	} else if b.hasLocal && !known.hasLocal {
		b.copies = known.copies
		*known = b
	} else {
		b.hasParent = false // it is among the children already, if it has a parent
	}
	known.copies[tier-1]++
	if known.hasLocal && b.hasParent {
		w.children[b.parent] = append(w.children[b.parent], key)
	}
}

// place makes ready what has waited for the place of the block with this engine hash.
func (w *waiting) place(engine uint64) {
	if len(w.blocks) == 0 {
		return
	}
	w.ready = append(append(w.ready, w.byHash[engine]...), w.children[engine]...)
	delete(w.children, engine)
}

// all makes all blocks ready: the worker reads one store more.
func (w *waiting) all() {
	for key := range w.blocks {
		w.ready = append(w.ready, key)
	}
}

// placeForReaders makes ready what other workers have waiting for a block of a store.
func (r *Tree) placeForReaders(store *sharedStore, engine uint64) {
	for _, p := range r.workers {
		lower := r.slots[p.slot].lower
		if lower != nil && len(lower.waiting.blocks) > 0 && slices.Contains(lower.stores, store) {
			lower.waiting.place(engine)
			r.readers = r.readers || len(lower.waiting.ready) > 0
		}
	}
}

// remove takes one copy of a block in a tier out, all of one in a store, and reports
// whether it was there.
func (w *waiting) remove(engine uint64, store *sharedStore, tier kv.Tier) bool {
	key := waitingKey{engine, store}
	b := w.blocks[key]
	if b == nil || b.copies[tier-1] == 0 {
		return false
	}
	if store != nil {
		b.copies[tier-1] = 1
	}
	if b.copies[tier-1]--; b.copies == [len(kv.LowerTiers)]uint32{} {
		w.delete(key)
	}
	return true
}

// drop takes all blocks of a tier out.
func (w *waiting) drop(store *sharedStore, tier kv.Tier) {
	for key, b := range w.blocks {
		if key.store != store {
			continue
		}
		if b.copies[tier-1] = 0; b.copies == [len(kv.LowerTiers)]uint32{} {
			w.delete(key)
		}
	}
}

// delete takes a block out.
func (w *waiting) delete(key waitingKey) {
	b := w.blocks[key]
	delete(w.blocks, key)
	without(w.byHash, key.engine, key)
	if b.hasLocal && b.hasParent {
		without(w.children, b.parent, key)
	}
}

// without takes one key out of a list of a map.
func without(lists map[uint64][]waitingKey, at uint64, key waitingKey) {
	list := lists[at]
	for i := range list {
		if list[i] == key {
			list[i] = list[len(list)-1]
			list = list[:len(list)-1]
			break
		}
	}
	if len(list) == 0 {
		delete(lists, at)
	} else {
		lists[at] = list
	}
}

// settleAll gives all ready blocks of a worker their place, and of others those that waited
// for a block of a store. It unlocks r.mu for a moment after each settledTogether of them,
// so that lookups may continue.
func (r *Tree) settleAll(slot uint32) {
	r.settleOne(slot)
	for r.readers {
		r.readers = false
		for i := 0; i < len(r.workers); i++ { // which may change meanwhile
			slot := r.workers[i].slot
			if lower := r.slots[slot].lower; lower != nil && len(lower.waiting.ready) > 0 {
				r.settleOne(slot)
			}
		}
	}
}

func (r *Tree) settleOne(slot uint32) {
	lower := r.slots[slot].lower
	for r.settle(slot, lower) {
		r.mu.Unlock()
		r.mu.Lock()
		if r.slots[slot].lower != lower {
			return // it was cleared meanwhile
		}
	}
}

// settle gives some ready blocks of a worker their place, and reports whether more are
// ready.
func (r *Tree) settle(slot uint32, lower *lowerTiers) (more bool) {
	wait := &lower.waiting
	for range settledTogether {
		if len(wait.ready) == 0 {
			return false
		}
		key := wait.ready[len(wait.ready)-1]
		wait.ready = wait.ready[:len(wait.ready)-1]
		b := wait.blocks[key]
		if b == nil {
			continue
		}
		n := r.placed(slot, key.store, b.engine)
		if n == 0 && b.hasLocal && b.hasParent {
			if under := r.placed(slot, key.store, b.parent); under != rootNode {
				if n = r.child(under, b.local); n == 0 {
					n = r.addChild(under, b.local)
				}
			}
		}
		if n == 0 {
			if b.hasLocal && b.hasParent && !slices.Contains(wait.children[b.parent], key) {
				// Its parent's place is gone again.
				wait.children[b.parent] = append(wait.children[b.parent], key)
			}
			continue
		}
		copies := b.copies
		wait.delete(key)
		for tier, count := range copies {
			for range min(count, maxCopiesWaited) {
				r.holdAt(slot, key.store, LowerTier{Tier: kv.Tier(tier + 1)}, b.engine, n)
			}
			if b.old {
				r.removeLower(lower.sure[tier], b.engine)
			}
		}
	}
	return len(wait.ready) > 0
}

// maxCopiesWaited bounds the copies of a waiting block that count.
const maxCopiesWaited = 64
