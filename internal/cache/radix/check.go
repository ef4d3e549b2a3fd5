package radix

import (
	"fmt"
	"slices"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/sets"
	"kvrouter/internal/base/table"
)

// Check reports the first violated invariant of the index. Its time and memory are
// proportional to the size of the index.
func (r *Tree) Check() error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	free, err := r.checkNodes()
	if err != nil {
		return err
	}
	if err := r.checkSets(free); err != nil {
		return err
	}
	if err := r.checkTelling(free); err != nil {
		return err
	}
	return r.checkSlots(free)
}

// checkTelling checks the book against the nodes.
func (r *Tree) checkTelling(free []bool) error {
	t := r.booked
	if t == nil {
		return nil
	}
	if err := t.book.Check(); err != nil {
		return fmt.Errorf("book: %w", err)
	}
	held := 0
	for n := uint32(1); n < r.nodes.next; n++ {
		if free[n] {
			continue
		}
		node := r.nodes.at(n)
		want := node.local
		if node.parent != rootNode {
			want = kv.NextSequenceHash(t.sequence(node.parent), node.local)
		}
		if t.sequence(n) != want {
			return fmt.Errorf("node %d has sequence hash %x, not %x", n, t.sequence(n), want)
		}
		holders := 0
		if t.held(r.sets.Words(node.members)) {
			held, holders = held+1, 1
		}
		if in := t.book.Holders(want); in != holders {
			return fmt.Errorf("node %d has %d holders in the book, not %d", n, in, holders)
		}
	}
	if in := t.book.Size().Held; in != held {
		return fmt.Errorf("the book has %d prefixes, and %d are held", in, held)
	}
	return nil
}

// checkNodes checks the shape of the tree and returns which nodes are free.
func (r *Tree) checkNodes() (free []bool, err error) {
	nodes := &r.nodes
	free = make([]bool, nodes.next)
	freed := 0
	for n := nodes.free; n != 0; n = nodes.at(n).child {
		if n >= nodes.next || free[n] {
			return nil, fmt.Errorf("free list: node %d is out of range or there twice", n)
		}
		if node := nodes.at(n); node.members != 0 || node.children != 0 {
			return nil, fmt.Errorf("free node %d has workers or children", n)
		}
		free[n] = true
		freed++
	}
	if int(nodes.next) != nodes.used+freed {
		return nil, fmt.Errorf("%d nodes were made, but %d are in use and %d free", nodes.next, nodes.used, freed)
	}
	if err := r.branches.Check(); err != nil {
		return nil, fmt.Errorf("branches: %w", err)
	}
	bare := 0
	for n := uint32(1); n < nodes.next; n++ {
		if !free[n] && nodes.at(n).members == 0 {
			bare++
		}
	}
	if bare != r.bare() {
		return nil, fmt.Errorf("%d nodes without a worker are counted as %d", bare, r.bare())
	}
	children := make([]uint32, nodes.next)
	branches := 0
	for n := uint32(1); n < nodes.next; n++ {
		if free[n] {
			continue
		}
		node := nodes.at(n)
		if node.parent >= nodes.next || free[node.parent] {
			return nil, fmt.Errorf("node %d has no parent", n)
		}
		if node.members == 0 && node.children == 0 {
			return nil, fmt.Errorf("node %d has neither workers nor children", n)
		}
		children[node.parent]++
		branch := r.branches.Get(node.local, node.parent)
		switch inline := nodes.at(node.parent).child == n; {
		case inline && branch != 0:
			return nil, fmt.Errorf("inline child %d is among the branches as %d", n, branch)
		case !inline && branch != n:
			return nil, fmt.Errorf("branches lead to %d instead of child %d", branch, n)
		case !inline:
			branches++
		}
		if r.child(node.parent, node.local) != n {
			return nil, fmt.Errorf("child %d cannot be reached from its parent", n)
		}
	}
	if branches != r.branches.Len() {
		return nil, fmt.Errorf("%d branches, but %d children are not inline", r.branches.Len(), branches)
	}
	for n := range nodes.next {
		node := nodes.at(n)
		if free[n] {
			continue
		}
		if node.children != children[n] {
			return nil, fmt.Errorf("node %d counts %d children and has %d", n, node.children, children[n])
		}
		if c := node.child; c != 0 && (c >= nodes.next || free[c] || nodes.at(c).parent != n) {
			return nil, fmt.Errorf("inline child %d of node %d is not its child", c, n)
		}
	}
	// Every node leads up to the root: no cycles.
	rooted := make([]bool, nodes.next)
	rooted[rootNode] = true
	for n := range nodes.next {
		var path []uint32
		for at := n; !free[n] && !rooted[at]; at = nodes.at(at).parent {
			if path = append(path, at); len(path) > nodes.used {
				return nil, fmt.Errorf("node %d is below itself", n)
			}
		}
		for _, at := range path {
			rooted[at] = true
		}
	}
	return free, nil
}

// checkSets checks the worker sets and how many nodes refer to each.
func (r *Tree) checkSets(free []bool) error {
	refs := map[uint32]uint32{}
	for n := range r.nodes.next {
		if !free[n] {
			refs[r.nodes.at(n).members]++
		}
	}
	if r.nodes.at(rootNode).members != 0 {
		return fmt.Errorf("the root has workers")
	}
	return r.sets.Check(func(id uint32) uint32 { return refs[id] })
}

// checkSlots checks each worker's tables against the sets of the nodes.
func (r *Tree) checkSlots(free []bool) error {
	if len(r.live) != (len(r.slots)+63)/64 {
		return fmt.Errorf("%d words for %d slots", len(r.live), len(r.slots))
	}
	uses := make([]int, len(r.slots))
	grouped, beyond := 0, 0
	for i, p := range r.workers {
		if i > 0 && p.key.Compare(r.workers[i-1].key) <= 0 {
			return fmt.Errorf("worker %v is out of order", p.key)
		}
		if !sets.Has(r.live, p.slot) {
			return fmt.Errorf("worker %v has slot %d, which is not live", p.key, p.slot)
		}
		if key := r.slots[p.slot].key; key != p.key {
			return fmt.Errorf("worker %v has slot %d, which is that of %v", p.key, p.slot, key)
		}
		uses[p.slot]++
		g := r.slots[p.slot].groups
		if g == nil {
			continue
		}
		if grouped++; g.rules.beyond() {
			beyond++
		}
		if want := max(0, len(g.layout.Groups)-1); len(g.others) != want {
			return fmt.Errorf("worker %v has %d slots for %d groups beside the first", p.key, len(g.others), want)
		}
		for _, slot := range g.others {
			if sets.Has(r.live, slot) {
				return fmt.Errorf("slot %d of a group of worker %v is live", slot, p.key)
			}
			uses[slot]++
			var err error
			s := &r.slots[slot]
			s.waiting.Each(func(engine uint64, _, _ uint32) bool {
				if s.blocks.Get(engine, 0) != 0 || r.slots[p.slot].blocks.Get(engine, 0) != 0 {
					err = fmt.Errorf("slot %d of a group of worker %v waits for the place of %d, which is known", slot, p.key, engine)
				}
				return err == nil
			})
			if err != nil {
				return err
			}
		}
	}
	if err := r.checkLower(uses); err != nil {
		return err
	}
	if grouped != r.grouped || beyond != r.beyond {
		return fmt.Errorf("%d workers with groups, %d of them beyond, are counted as %d and %d", grouped, beyond, r.grouped, r.beyond)
	}
	for _, slot := range slices.Concat(r.retired, r.vacant) {
		if r.live[slot/64]>>(slot%64)&1 != 0 {
			return fmt.Errorf("slot %d is retired or vacant, and live", slot)
		}
		uses[slot]++
	}
	members := make([]map[uint32]int, len(r.slots)) // by slot: node -> engine hashes there
	for slot := range r.slots {
		if uses[slot] != 1 {
			return fmt.Errorf("slot %d has %d uses", slot, uses[slot])
		}
		s := &r.slots[slot]
		members[slot] = make(map[uint32]int)
		s.blocks.Each(func(_ uint64, _, n uint32) bool { members[slot][n]++; return true })
		if slices.Contains(r.vacant, uint32(slot)) && s.blocks.Len() != 0 {
			return fmt.Errorf("vacant slot %d holds blocks", slot)
		}
		if slices.Contains(r.retired, uint32(slot)) {
			continue
		}
		for name, t := range map[string]*table.Table{"blocks": &s.blocks, "copies": &s.copies, "aliases": &s.aliases} {
			if err := t.Check(); err != nil {
				return fmt.Errorf("slot %d: %s: %w", slot, name, err)
			}
		}
		var err error
		s.copies.Each(func(engine uint64, _, _ uint32) bool {
			if s.blocks.Get(engine, 0) == 0 {
				err = fmt.Errorf("slot %d has copies of %d, but not the block", slot, engine)
			}
			return err == nil
		})
		aliases := 0
		for n, hashes := range members[slot] {
			if n == rootNode || n >= r.nodes.next || free[n] || !r.sets.Has(r.nodes.at(n).members, uint32(slot)) {
				return fmt.Errorf("slot %d maps a block to node %d, which does not name it", slot, n)
			}
			if got := int(s.aliases.Get(uint64(n), 0)); got != hashes-1 {
				return fmt.Errorf("slot %d has %d engine hashes at node %d and counts %d more than one", slot, hashes, n, got)
			}
			if hashes > 1 {
				aliases++
			}
		}
		if err == nil && aliases != s.aliases.Len() {
			err = fmt.Errorf("slot %d counts aliases at %d nodes and has them at %d", slot, s.aliases.Len(), aliases)
		}
		if err != nil {
			return err
		}
	}
	for n := range r.nodes.next {
		words := r.sets.Words(r.nodes.at(n).members)
		for slot := range len(words) * 64 {
			if words[slot/64]>>(slot%64)&1 == 0 {
				continue
			}
			if slot >= len(r.slots) || members[slot][n] == 0 {
				return fmt.Errorf("node %d names slot %d, which does not hold it", n, slot)
			}
		}
	}
	return nil
}

// checkLower checks the lower tiers of all workers and the stores, and counts the uses of
// their slots.
func (r *Tree) checkLower(uses []int) error {
	held, lowered := 0, 0
	readers := map[*sharedStore]int{}
	use := func(slots *tierSlots) error {
		for _, slot := range slots {
			if slot == noSlot {
				continue
			}
			if int(slot) >= len(r.slots) || sets.Has(r.live, slot) {
				return fmt.Errorf("slot %d of a lower tier is live or does not exist", slot)
			}
			uses[slot]++
			held += r.slots[slot].blocks.Len()
		}
		return nil
	}
	for _, p := range r.workers {
		lower := r.slots[p.slot].lower
		if lower == nil {
			continue
		}
		lowered++
		again := lowerTiers{own: lower.own, stores: lower.stores}
		if again.relist(); !slices.Equal(lower.present, again.present) {
			return fmt.Errorf("worker %v lists the tiers %v, and has %v", p.key, lower.present, again.present)
		}
		for _, s := range lower.stores {
			readers[s]++
		}
		if err := use(&lower.own); err != nil {
			return err
		}
		if err := use(&lower.sure); err != nil {
			return err
		}
		for i, slot := range lower.sure {
			if slot == noSlot {
				continue
			}
			if lower.doubt == 0 || lower.own[i] == noSlot {
				return fmt.Errorf("worker %v is sure of blocks of a tier that is not doubtful", p.key)
			}
			for _, h := range r.appendHeld(nil, slot, kv.LowerTiers[i], -1, r.slots[slot].blocks.Len()) {
				if own := r.slots[lower.own[i]].blocks.Get(h.block.Engine, 0); own == 0 || own != r.slots[slot].blocks.Get(h.block.Engine, 0) {
					return fmt.Errorf("worker %v is sure of block %d, which its tier has not or elsewhere", p.key, h.block.Engine)
				}
			}
		}
		if err := r.checkWaiting(p, lower); err != nil {
			return err
		}
	}
	for _, s := range r.stores {
		if s.readers == 0 || s.readers != readers[s] {
			return fmt.Errorf("store %q counts %d readers and has %d", s.name, s.readers, readers[s])
		}
		delete(readers, s)
		if err := use(&s.slots); err != nil {
			return err
		}
	}
	if len(readers) > 0 || lowered != r.lowered || held != r.lowerHeld || held > r.lowerMost {
		return fmt.Errorf("%d unknown stores; %d workers with lower tiers hold %d blocks of at most %d and are counted as %d and %d",
			len(readers), lowered, held, r.lowerMost, r.lowered, r.lowerHeld)
	}
	return nil
}

// checkWaiting checks the blocks of a worker that wait for their place.
func (r *Tree) checkWaiting(p workerPlace, lower *lowerTiers) error {
	w := &lower.waiting
	if len(w.ready) > 0 || len(w.blocks) > maxWaiting {
		return fmt.Errorf("worker %v: %d blocks wait, %d are ready", p.key, len(w.blocks), len(w.ready))
	}
	listed := 0
	for _, keys := range w.byHash {
		listed += len(keys)
	}
	if listed != len(w.blocks) {
		return fmt.Errorf("worker %v: %d blocks wait and %d are listed", p.key, len(w.blocks), listed)
	}
	children := 0
	for key, b := range w.blocks {
		if !slices.Contains(w.byHash[key.engine], key) {
			return fmt.Errorf("worker %v: waiting block %d is not listed", p.key, key.engine)
		}
		if r.placed(p.slot, key.store, key.engine) != 0 {
			return fmt.Errorf("worker %v: block %d waits and has a place", p.key, key.engine)
		}
		if !b.hasLocal || !b.hasParent {
			continue
		}
		if children++; !slices.Contains(w.children[b.parent], key) {
			return fmt.Errorf("worker %v: waiting block %d is not among the children of %d", p.key, key.engine, b.parent)
		}
	}
	for _, keys := range w.children {
		children -= len(keys)
	}
	if children != 0 {
		return fmt.Errorf("worker %v: %d more children wait than are listed", p.key, children)
	}
	return nil
}

// Check returns the first inconsistency between the workers' modelled memories
// and the Tree.
func (a *Approx) Check() error {
	if err := a.Tree.Check(); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, w := range a.Tree.Workers() {
		if a.Caches[w] == nil && a.Tree.Blocks(w) > 0 {
			return fmt.Errorf("%v holds %d blocks and has no memory", w, a.Tree.Blocks(w))
		}
	}
	for w, c := range a.Caches {
		if err := c.Pool.Check(); err != nil {
			return fmt.Errorf("%v: %w", w, err)
		}
		if c.capacity != a.capacity[w] || c.capacity > 0 && c.Pool.Size() > c.capacity || c.Pool.Size() > 0 &&
			len(c.used) != len(c.Pool.References()) {
			return fmt.Errorf("%v: %d blocks of %d (%d), times of %d", w, c.Pool.Size(), c.capacity, a.capacity[w], len(c.used))
		}
		var before int64
		for _, b := range c.Pool.Order() {
			if c.used[b] < before {
				return fmt.Errorf("%v: block %d was used before one that goes first", w, b)
			}
			before = c.used[b]
		}
		slot, _ := a.Tree.slot(w)
		for _, held := range a.Tree.snapshot(w) {
			if b := c.Pool.Find(held.block.Engine); b == 0 {
				return fmt.Errorf("%v: the index has a block that the memory has not", w)
			} else if parent := held.parent; parent != rootNode && !a.Tree.sets.Has(a.Tree.nodes.at(parent).members, slot) {
				return fmt.Errorf("%v: block %d has lost the one before it", w, b)
			}
		}
	}
	return nil
}
