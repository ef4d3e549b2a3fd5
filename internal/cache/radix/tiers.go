package radix

import (
	"math"
	"slices"

	"kvrouter/internal/base/kv"
)

// LowerTier names blocks below the device: of a tier of the worker whose events name them, or
// of a store that no worker owns.
type LowerTier struct {
	Tier kv.Tier // not kv.Device
	// Shared means that the blocks are in a store that every worker reads which has named
	// blocks of it; Store is its name, empty for the usual one.
	Shared bool
	Store  string
	// Again means that the event may have been applied before: a held block has no copy more.
	Again bool
	// Partial means that the events of the tier do not name all that the engine's hashes
	// depend on, such as cache salts: the first block of a prompt is placed by its hash only.
	Partial bool
}

// Bounds of the lower tiers.
const (
	// MaxLowerBlocks bounds the blocks of all lower tiers of an index, of some 55 bytes each.
	// Beyond it the largest tier is dropped.
	MaxLowerBlocks = 10 << 20
	// maxWaiting bounds the blocks of a worker that wait for their place, of some 150 bytes
	// each. Beyond it all that wait are dropped.
	maxWaiting = 1 << 14
	maxStores  = 16  // stores of an index
	maxStore   = 256 // bytes of a store's name
	maxChunk   = 1 << 12
	// settledTogether is the number of waiting blocks that get their place before lookups
	// may continue.
	settledTogether = 32
)

// noSlot is no slot of a tier: it is in no set.
const noSlot = math.MaxUint32

// tierSlots are the slots of the lower tiers of a worker or a store, by kv.Tier-1. As
// those of KV-cache groups, they stand in the sets of the nodes, and no lookup takes them
// for workers. A node lives for as long as any tier holds it.
type tierSlots [len(kv.LowerTiers)]uint32

func noSlots() tierSlots { return tierSlots{noSlot, noSlot, noSlot} }

// lowerTiers are the lower tiers of a worker.
type lowerTiers struct {
	own    tierSlots
	stores []*sharedStore // that it reads
	// present are the slots of own and stores that exist, the fastest tiers first.
	present []presentTier
	// chunk is the number of blocks that the engine loads whole or not at all; 0: one.
	chunk int
	// doubt is the number of the last reset after which the own tiers may have been emptied
	// without an event; 0: they were not. What they have stored since is in sure, too.
	doubt   uint32
	sure    tierSlots
	waiting waiting
}

// presentTier is a tier that holds blocks.
type presentTier struct {
	setBits // of slot
	slot    uint32
	tier    kv.Tier
}

// sharedStore is a store that several workers read.
type sharedStore struct {
	name    string
	slots   tierSlots
	readers int
}

// LowerState is what an index has of a worker's lower tiers.
type LowerState struct {
	Own    kv.LowerBlocks
	Shared kv.LowerBlocks // of the stores that it reads
	// Waiting is the number of blocks whose place in a prompt is not known yet.
	Waiting int
	Chunk   int // blocks that are loaded whole or not at all; 0: one
	// Doubt is not 0 if the own tiers may have been emptied without an event: the number of
	// this doubt, for DoubtSettled.
	Doubt uint32
}

// storeLower is Stored in a lower tier.
//
// vLLM announces a hash that several chunks contain once for each of them, and removes it
// as often (v1/offloading/events.py, read in 0.32.0).
func (r *Tree) storeLower(w kv.WorkerKey, at LowerTier, parent uint64, hasParent bool, blocks []kv.StoredBlock) (lost int) {
	slot, store, ok := r.lowerOf(w, at)
	if !ok {
		return 0
	}
	before := r.lowerLost
	for _, b := range blocks {
		if hasParent && b.Engine == parent {
			break // it is its own parent
		}
		n := r.placed(slot, store, b.Engine)
		if n == 0 {
			under := rootNode
			if hasParent {
				under = r.placed(slot, store, parent)
			}
			if under != rootNode || !hasParent && !at.Partial {
				if n = r.child(under, b.Local); n == 0 {
					n = r.addChild(under, b.Local)
				}
			}
		}
		if n != 0 {
			r.holdAt(slot, store, at, b.Engine, n)
		} else {
			r.wait(r.slots[slot].lower, store, at.Tier, waitingBlock{engine: b.Engine, parent: parent, hasParent: hasParent, local: b.Local,
				hasLocal: hasParent || !at.Partial})
		}
		parent, hasParent = b.Engine, true
	}
	r.settleAll(slot)
	return r.lowerLost - before
}

// holdLower is Held in a lower tier.
func (r *Tree) holdLower(w kv.WorkerKey, at LowerTier, engine []uint64) (lost int) {
	slot, store, ok := r.lowerOf(w, at)
	if !ok {
		return 0
	}
	before := r.lowerLost
	for _, e := range engine {
		if n := r.placed(slot, store, e); n != 0 {
			r.holdAt(slot, store, at, e, n)
		} else {
			r.wait(r.slots[slot].lower, store, at.Tier, waitingBlock{engine: e})
		}
	}
	r.settleAll(slot)
	return r.lowerLost - before
}

// removeLowers is Removed in a lower tier.
func (r *Tree) removeLowers(w kv.WorkerKey, at LowerTier, engine []uint64) (unknown int) {
	slot, sure := uint32(noSlot), uint32(noSlot)
	first, known := r.slot(w)
	if store := r.storeNamed(at.Store); at.Shared && store != nil {
		slot = store.slots[at.Tier-1]
	} else if !at.Shared && known && r.slots[first].lower != nil {
		slot, sure = r.slots[first].lower.own[at.Tier-1], r.slots[first].lower.sure[at.Tier-1]
	}
	for _, e := range engine {
		r.removeLower(sure, e)
		held := r.removeLower(slot, e)
		if waited := (known || at.Shared) && r.removeWaiting(at, first, e); !held && !waited {
			unknown++
		}
	}
	return unknown
}

// removeLower takes one copy of a block out of the slot of a tier, and reports whether it
// was there.
func (r *Tree) removeLower(slot uint32, engine uint64) bool {
	if slot == noSlot {
		return false
	}
	s := &r.slots[slot]
	if more := s.copies.Get(engine, 0); more != 0 {
		s.copies.SetOrDelete(engine, more-1)
		return true
	}
	n := s.blocks.Delete(engine, 0)
	if n == 0 {
		return false
	}
	r.lowerHeld--
	r.dropMember(slot, n)
	return true
}

// removeWaiting takes a block of a tier out of those that wait: of a store, whichever
// worker has named it. first is the worker's slot.
func (r *Tree) removeWaiting(at LowerTier, first uint32, engine uint64) (found bool) {
	if !at.Shared {
		lower := r.slots[first].lower
		return lower != nil && lower.waiting.remove(engine, nil, at.Tier)
	}
	store := r.storeNamed(at.Store)
	if store == nil {
		return false
	}
	for _, p := range r.workers {
		if lower := r.slots[p.slot].lower; lower != nil && lower.waiting.remove(engine, store, at.Tier) {
			found = true
		}
	}
	return found
}

// lowerOf returns the slot of the worker of a lower tier and, if that is shared, the store,
// which are made if they do not exist; not ok: there are too many stores.
func (r *Tree) lowerOf(w kv.WorkerKey, at LowerTier) (slot uint32, store *sharedStore, ok bool) {
	if at.Shared {
		if store = r.storeNamed(at.Store); store == nil && (len(r.stores) == maxStores || len(at.Store) > maxStore) {
			return 0, nil, false
		}
	}
	slot, known := r.slot(w)
	if !known {
		slot = r.takeSlot(w)
	}
	lower := r.slots[slot].lower
	if lower == nil {
		lower = &lowerTiers{own: noSlots(), sure: noSlots()}
		r.slots[slot].lower = lower
		r.lowered++
	}
	if !at.Shared {
		return slot, nil, true
	}
	if store == nil {
		store = &sharedStore{name: at.Store, slots: noSlots()}
		r.stores = append(r.stores, store)
	}
	if !slices.Contains(lower.stores, store) {
		store.readers++
		lower.stores = append(lower.stores, store)
		lower.relist()
		lower.waiting.all()
	}
	return slot, store, true
}

// relist makes present again, after own or stores have changed.
func (l *lowerTiers) relist() {
	l.present = l.present[:0]
	add := func(slot uint32, tier kv.Tier) {
		if slot != noSlot {
			l.present = append(l.present, presentTier{bitOf(slot), slot, tier})
		}
	}
	for i, tier := range kv.LowerTiers {
		add(l.own[i], tier)
		for _, s := range l.stores {
			add(s.slots[i], tier)
		}
	}
}

// relistAll does so for all workers.
func (r *Tree) relistAll() {
	for _, p := range r.workers {
		if lower := r.slots[p.slot].lower; lower != nil {
			lower.relist()
		}
	}
}

// storeNamed returns the store of that name, or nil.
func (r *Tree) storeNamed(name string) *sharedStore {
	for _, s := range r.stores {
		if s.name == name {
			return s
		}
	}
	return nil
}

// placed returns the node at which a block of a worker stands by its engine hash, or 0:
// on its device, in its tiers or in a store that it reads, of which store comes first.
func (r *Tree) placed(slot uint32, store *sharedStore, engine uint64) uint32 {
	if n := r.slots[slot].blocks.Get(engine, 0); n != 0 {
		return n
	}
	lower := r.slots[slot].lower
	if n := r.placedIn(&lower.own, engine); n != 0 {
		return n
	}
	if store != nil {
		if n := r.placedIn(&store.slots, engine); n != 0 {
			return n
		}
	}
	for _, other := range lower.stores {
		if other != store {
			if n := r.placedIn(&other.slots, engine); n != 0 {
				return n
			}
		}
	}
	return 0
}

func (r *Tree) placedIn(slots *tierSlots, engine uint64) uint32 {
	for _, slot := range slots {
		if slot != noSlot {
			if n := r.slots[slot].blocks.Get(engine, 0); n != 0 {
				return n
			}
		}
	}
	return 0
}

// holdAt notes a block of a lower tier at its node, and makes what has waited for it ready.
// first is the worker's slot, and at says which tier.
func (r *Tree) holdAt(first uint32, store *sharedStore, at LowerTier, engine uint64, n uint32) {
	lower := r.slots[first].lower
	slots, again := &lower.own, at.Again
	if store != nil {
		slots = &store.slots
		again = true // several workers may announce it
	} else if lower.doubt != 0 {
		if lower.sure[at.Tier-1] == noSlot {
			lower.sure[at.Tier-1] = r.newSlot()
		}
		if !r.holdIn(lower.sure[at.Tier-1], engine, n, at.Again) {
			again = true // the engine stores it because it has lost it
		}
	}
	slot := slots[at.Tier-1]
	if slot == noSlot {
		slot = r.newSlot()
		r.booked.counts(slot)
		slots[at.Tier-1] = slot
		if store != nil {
			r.relistAll()
		} else {
			lower.relist()
		}
	}
	r.holdIn(slot, engine, n, again)
	lower.waiting.place(engine)
	if store != nil {
		r.placeForReaders(store, engine)
	}
	if r.lowerHeld > r.lowerMost {
		r.dropLargest()
	}
}

// holdIn notes a block in the slot of a tier, and reports whether it was there. Unless
// again, it is then one copy more.
func (r *Tree) holdIn(slot uint32, engine uint64, n uint32, again bool) (held bool) {
	s := &r.slots[slot]
	old := s.blocks.Get(engine, 0)
	if old == n {
		if again {
			s.copies.Delete(engine, 0)
		} else {
			s.copies.Put(engine, 0, s.copies.Get(engine, 0)+1)
		}
		return true
	}
	s.blocks.Put(engine, 0, n)
	r.addMember(slot, n)
	if old != 0 {
		s.copies.Delete(engine, 0)
		r.dropMember(slot, old)
	} else {
		r.lowerHeld++
	}
	return old != 0
}

// followLower puts a block of a worker's lower tiers to node n, at which the device has just
// stored it: events of lower tiers do not name all that its place depends on.
func (r *Tree) followLower(lower *lowerTiers, engine uint64, n uint32) {
	follow := func(slot uint32) {
		s := &r.slots[slot]
		old := s.blocks.Get(engine, 0)
		if old == 0 || old == n {
			return
		}
		s.blocks.Put(engine, 0, n)
		r.addMember(slot, n)
		r.dropMember(slot, old)
	}
	for _, t := range lower.present {
		follow(t.slot)
	}
	for _, slot := range lower.sure {
		if slot != noSlot {
			follow(slot)
		}
	}
}

// dropLargest empties the lower tier that holds the most blocks, of all workers and
// stores.
func (r *Tree) dropLargest() {
	var largest, sure *uint32
	most := -1
	look := func(slots, certain *tierSlots) {
		for i, slot := range slots {
			if slot != noSlot && r.slots[slot].blocks.Len() > most {
				largest, sure, most = &slots[i], &certain[i], r.slots[slot].blocks.Len()
			}
		}
	}
	for _, p := range r.workers {
		if lower := r.slots[p.slot].lower; lower != nil {
			look(&lower.own, &lower.sure)
		}
	}
	none := noSlots()
	for _, s := range r.stores {
		look(&s.slots, &none)
	}
	if largest != nil {
		r.lowerLost += most
		r.emptyTier(largest)
		r.emptyTier(sure)
		r.relistAll()
	}
}

// emptyTier drops all blocks of a tier. The caller lists the tiers of its workers again.
func (r *Tree) emptyTier(slot *uint32) {
	if *slot != noSlot {
		r.lowerHeld -= r.slots[*slot].blocks.Len()
		r.retire(*slot)
		*slot = noSlot
	}
}

// forgetLower drops all that is known of a worker's lower tiers. A store goes with its
// last reader.
func (r *Tree) forgetLower(first uint32) {
	lower := r.slots[first].lower
	if lower == nil {
		return
	}
	for i := range lower.own {
		r.emptyTier(&lower.own[i])
		r.emptyTier(&lower.sure[i])
	}
	for _, s := range lower.stores {
		if s.readers--; s.readers == 0 {
			for i := range s.slots {
				r.emptyTier(&s.slots[i])
			}
			r.stores = slices.DeleteFunc(r.stores, func(o *sharedStore) bool { return o == s })
		}
	}
	r.slots[first].lower = nil
	r.lowered--
}

// clearDevice is DeviceCleared.
func (r *Tree) clearDevice(w kv.WorkerKey, host bool) {
	slot, known := r.slot(w)
	if !known {
		return
	}
	lower := r.slots[slot].lower
	if lower != nil && host {
		r.emptyTier(&lower.own[kv.Host-1])
		r.emptyTier(&lower.sure[kv.Host-1])
		lower.waiting.drop(nil, kv.Host)
		lower.relist()
	} else if lower != nil {
		r.doubt(lower, lower.own != noSlots())
	}
	r.slots[slot].lower = nil
	r.empty(w, slot)
	slot, _ = r.slot(w)
	r.slots[slot].lower = lower
}

// doubt sets whether all blocks of the own tiers are doubtful, or none is.
func (r *Tree) doubt(lower *lowerTiers, doubtful bool) {
	lower.doubt = 0
	if doubtful {
		r.doubts++
		lower.doubt = r.doubts
	}
	for i := range lower.sure {
		r.emptyTier(&lower.sure[i])
	}
	for key, b := range lower.waiting.blocks {
		b.old = b.old || doubtful && key.store == nil
	}
}

// settleLower is DoubtSettled.
func (r *Tree) settleLower(w kv.WorkerKey, doubt uint32, held bool) (settled bool) {
	slot, known := r.slot(w)
	if !known || r.slots[slot].lower == nil {
		return false
	}
	lower := r.slots[slot].lower
	if doubt == 0 || doubt != lower.doubt {
		return false
	}
	if held {
		r.doubt(lower, false)
		return true
	}
	left := &lowerTiers{own: lower.sure, sure: noSlots(), chunk: lower.chunk}
	lower.sure = noSlots()
	r.forgetLower(slot)
	left.relist()
	r.slots[slot].lower = left
	r.lowered++
	return true
}

// setChunk is ChunkSet.
func (r *Tree) setChunk(w kv.WorkerKey, blocks int) {
	slot, _, _ := r.lowerOf(w, LowerTier{})
	r.slots[slot].lower.chunk = min(max(0, blocks), maxChunk)
}

// restoreLower is LowerRestored.
func (r *Tree) restoreLower(w kv.WorkerKey, chunk int, doubtful bool, stores []string) {
	for _, store := range stores[:min(len(stores), maxStores)] {
		r.lowerOf(w, LowerTier{Shared: true, Store: store})
	}
	slot, _, _ := r.lowerOf(w, LowerTier{})
	if chunk > 0 {
		r.slots[slot].lower.chunk = min(chunk, maxChunk)
	}
	r.doubt(r.slots[slot].lower, doubtful)
	r.settleAll(slot)
}

// LowerOf returns what the index has of the lower tiers of w.
func (r *Tree) LowerOf(w kv.WorkerKey) (state LowerState) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	slot, known := r.slot(w)
	if !known || r.slots[slot].lower == nil {
		return state
	}
	lower := r.slots[slot].lower
	count := func(slots *tierSlots) (b kv.LowerBlocks) {
		for j, to := range []*int32{&b.Host, &b.Disk, &b.External} {
			if slots[j] != noSlot {
				*to = int32(r.slots[slots[j]].blocks.Len())
			}
		}
		return b
	}
	state = LowerState{Own: count(&lower.own), Waiting: len(lower.waiting.blocks), Chunk: lower.chunk, Doubt: lower.doubt}
	for _, s := range lower.stores {
		b := count(&s.slots)
		state.Shared.Host += b.Host
		state.Shared.Disk += b.Disk
		state.Shared.External += b.External
	}
	return state
}
