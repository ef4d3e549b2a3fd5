// Package radix implements the index of the workers' cached blocks: exact, from KV
// events (Tree), or approximate, from routed prompts (Approx, Trees). A Tree follows the
// KV-cache groups of engines (groups.go) and their tiers below the device (tiers.go).
package radix

import (
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/sets"
	"kvrouter/internal/base/table"
)

// Errors of Stored on the device; in all cases nothing was stored. The caller no longer
// knows the worker's blocks and should clear it or replay its events.
var (
	// ErrParentUnknown: the worker does not have the parent of the stored blocks.
	// They are not stored at the root, which would cause wrong matches.
	ErrParentUnknown = errors.New("parent block unknown")
	// ErrSelfParent: a block is named as its own parent.
	ErrSelfParent = errors.New("block is its own parent")
	// ErrTooManyBare: prefixes that no worker holds, on the way to blocks that some do,
	// have reached their maximum.
	ErrTooManyBare = errors.New("too many prefixes without a worker")
)

// maxBare bounds the nodes without a worker that skipped blocks may leave, of 24 bytes each.
const maxBare = 1 << 22

// sweepPerPart and sweepPerBlock are the entries of cleared workers that every part
// of a store or removal sweeps: a base, and as many more for each of its blocks.
const (
	sweepPerPart  = 16
	sweepPerBlock = 2
)

// partBlocks is the number of blocks that a store or removal changes before lookups may continue,
// some microseconds. A store reads the table entries of all blocks of a part before
// it uses the first: a large table is seldom in the processor's cache, and
// independent reads wait for memory together. Measured with 16: 1.5 to 2 times as
// fast on 1 M blocks.
const partBlocks = 8

// fewShare is the share of the workers, its reciprocal, up to which those that match are sorted
// instead of being looked for among all: a prompt is mostly held by few of thousands.
const fewShare = 64

// Tree is the exact index of the workers' cached blocks, built from their KV
// events. It is a prefix tree over local block hashes; each node represents one
// prompt prefix and has the set of workers that have cached its last block. It is
// safe for concurrent use.
//
// Copies. vLLM (v1/core/block_pool.py, read in 0.32.0) caches physical blocks
// without deduplicating them: cache_full_blocks publishes the hash of every
// physical block that becomes full, also when another block of the same hash is
// cached already (two requests computing one prompt at the same time), and
// evicting a physical block publishes BlockRemoved for its hash, also while
// copies remain. Stores and removals of a hash thus pair up one to one, and the
// engine can reuse the hash until the last copy goes. The index counts copies
// the same way. A block promoted from partial to full publishes its removal
// first; a reset publishes one AllBlocksCleared. The one exception is a request
// with the sampling extra_args kv_cache_report_mode=full: it publishes blocks
// that were only reused, which no removal will pair with, and whose event looks
// the same; such requests must not reach an engine that is indexed.
//
// One engine hash at two places. An engine's hash names a whole prefix, so the same
// worker storing one at another node means that the entries of it are outdated: the
// newest event wins: the old entry is removed and the copies are counted from one
// again. Two engine hashes at one node (contents that local hashes do not
// distinguish) both count: the worker remains in the node's set until the last of
// them is removed.
//
// Holes. Removing a block from the middle of a prompt leaves its node, and its
// descendants' workers, in place while there are descendants. Match does not
// reach past the hole; storing the block again closes it, as in the engine. A
// node without workers and children is freed at once, and so on upward.
//
// Clearing. Every (worker, rank) owns a slot, its number in the worker sets. Clear
// retires the slot, which lookups then ignore, and takes a new one. Later Stores
// and Removes sweep the blocks of retired slots: two entries for each of their own
// blocks, and 16 more for each of their parts. So every event reduces the total
// while anything is retired, and live and retired entries together never exceed the
// peak of live ones. Without further events they remain.
//
// Memory stays at its peak: freed nodes, sets and table entries are reused, not
// returned, except for tables of workers that were cleared or forgotten.
type Tree struct {
	mu       spinLock // guards everything below but scratch; those of a summary.Book may be taken under it
	nodes    nodeSlab
	branches table.Table   // (local hash, parent node) -> child, for all but inline children
	sets     sets.Sets     // of the workers' slots, which nodes refer to
	workers  []workerPlace // of all that are known, by key
	slots    []workerSlot
	live     []uint64 // bitset of the live slots
	vacant   []uint32 // unused slots
	retired  []uint32 // slots still to be swept, oldest first
	seed     uint64   // of all tables
	grouped  int      // workers with groupSlots
	lowered  int      // workers with lowerTiers
	beyond   int      // of them, those whose rules are beyond

	stores               []*sharedStore // those with readers
	lowerHeld, lowerMost int            // blocks of all lower tiers, and their maximum
	lowerLost            int            // blocks dropped for the bounds so far
	doubts               uint32         // about lower tiers so far
	readers              bool           // some worker may have ready blocks, because of a store

	booked *booked // nil: no book of held prefixes is kept

	lookaheads atomic.Pointer[[]kv.Lookahead] // of LookaheadStored changes

	scratch sync.Pool // *matchScratch, for concurrent lookups
}

// matchScratch is the working memory of one lookup.
type matchScratch struct {
	active []uint64 // bitset of the slots that hold every block so far
	blocks []int32  // by slot: leading blocks held, once that is known
	path   path
	few    [128]pathRun // of path.runs, which seldom has more
}

// NewTree returns an empty index.
func NewTree() *Tree {
	seed := rand.Uint64() // affects the placing of entries only, never a result
	r := &Tree{
		seed:      seed,
		branches:  table.Table{Seed: seed},
		lowerMost: MaxLowerBlocks,
		sets:      sets.New(seed),
	}
	r.nodes.alloc() // node 0, the root
	r.scratch.New = func() any { return new(matchScratch) }
	return r
}

// store is Stored on the device.
func (r *Tree) store(w kv.WorkerKey, parent uint64, hasParent bool, skipped []uint64, blocks []kv.StoredBlock) error {
	slot, known := r.slot(w)
	at := rootNode
	if hasParent {
		if known {
			at = r.slots[slot].blocks.Get(parent, 0)
			if at == rootNode && r.slots[slot].lower != nil {
				at = r.placed(slot, nil, parent)
			}
		}
		if at == rootNode {
			return fmt.Errorf("worker %d rank %d: store of %d blocks after engine hash %d: %w",
				w.Worker, w.Rank, len(blocks), parent, ErrParentUnknown)
		}
	}
	if len(blocks) == 0 {
		return nil
	}
	if len(skipped) > 0 && r.bare()+len(skipped) > maxBare {
		return fmt.Errorf("worker %d rank %d: store behind %d blocks: %w", w.Worker, w.Rank, len(skipped), ErrTooManyBare)
	}
	if !known {
		slot = r.takeSlot(w)
	}
	held := &r.slots[slot].blocks
	for _, b := range blocks {
		_ = held.Get(b.Engine, 0)
	}
	// Until the first of blocks is stored, the path to it has neither workers nor
	// children; under the lock that is not seen.
	for _, local := range skipped {
		n := r.child(at, local)
		if n == 0 {
			n = r.addChild(at, local)
		}
		at = n
	}
	for _, b := range blocks {
		at = r.storeBlock(slot, at, b)
	}
	if lower := r.slots[slot].lower; lower != nil && len(lower.waiting.blocks) > 0 {
		for _, b := range blocks {
			lower.waiting.place(b.Engine)
		}
		r.settleAll(slot)
	}
	return nil
}

// remove is Removed on the device.
func (r *Tree) remove(w kv.WorkerKey, group int, engine []uint64) (unknown int) {
	slot, known := r.slot(w)
	if group > 0 {
		_, slot, known = r.group(w, group)
	}
	if !known {
		return len(engine)
	}
	s := &r.slots[slot]
	for _, e := range engine {
		if more := s.copies.Get(e, 0); more != 0 {
			s.copies.SetOrDelete(e, more-1)
		} else if n := s.blocks.Delete(e, 0); n != 0 {
			r.dropMember(slot, n)
		} else if waiting := s.waiting.Get(e, 0); waiting != 0 {
			s.waiting.SetOrDelete(e, waiting-1)
		} else {
			unknown++
		}
	}
	return unknown
}

// clear is Cleared. Its duration does not depend on the number of blocks of w.
func (r *Tree) clear(w kv.WorkerKey) {
	if slot, known := r.slot(w); known {
		r.empty(w, slot)
	}
}

// empty empties the slot of w, or gives w another one.
func (r *Tree) empty(w kv.WorkerKey, slot uint32) {
	groups := r.slots[slot].groups
	if groups == nil && r.slots[slot].lower == nil && r.slots[slot].blocks.Len() == 0 {
		return
	}
	r.retire(slot)
	slot = r.takeSlot(w)
	if groups != nil {
		r.emptyGroups(groups, slot)
	}
}

// forget is Forgotten.
func (r *Tree) forget(worker uint64) {
	r.workers = slices.DeleteFunc(r.workers, func(p workerPlace) bool {
		if p.key.Worker == worker {
			if g := r.slots[p.slot].groups; g != nil {
				r.countGroups(g, -1)
			}
			r.retire(p.slot)
		}
		return p.key.Worker == worker
	})
}

// CanMatch is true.
func (*Tree) CanMatch() bool { return true }

// lookaheadStored is LookaheadStored.
func (r *Tree) lookaheadStored(l kv.Lookahead) {
	if kinds := r.Lookaheads(); !slices.Contains(kinds, l) && len(kinds) < kv.MaxLookaheads {
		next := append(slices.Clone(kinds), l)
		r.lookaheads.Store(&next)
	}
}

// Lookaheads returns the kinds of such blocks that any worker has stored: a prompt
// matches by those hashes, too. It must not be changed.
func (r *Tree) Lookaheads() []kv.Lookahead {
	if kinds := r.lookaheads.Load(); kinds != nil {
		return *kinds
	}
	return nil
}

// Match appends to dst, ordered by worker and rank, every worker in which a request
// finds a beginning of the prompt with these local hashes, and the length of it.
// usable is the greatest number of blocks that an engine uses of the prompt, because
// it computes the last token: it limits the matches that follow a Layout, not the
// plain ones. Of parts a match has those that are asked for. Other elements of dst are left
// as they are.
func (r *Tree) Match(local []uint64, usable int, parts kv.MatchParts, dst []kv.Match) []kv.Match {
	if len(local) == 0 {
		return dst
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	n := r.child(rootNode, local[0])
	if n == 0 {
		return dst
	}
	scratch := r.scratch.Get().(*matchScratch)
	defer r.scratch.Put(scratch)
	if len(scratch.blocks) < len(r.slots) {
		scratch.blocks = make([]int32, len(r.slots))
		scratch.active = make([]uint64, len(r.live))
		scratch.path.runs = scratch.few[:0]
	}

	// Along a prompt the workers seldom change from one block to the next, and
	// then the set's number does not either.
	set := r.nodes.at(n).members
	first := r.sets.Words(set)
	active := scratch.active[:len(first)]
	for i, word := range first {
		active[i] = word & r.live[i]
	}
	if r.grouped+r.lowered > 0 {
		return r.matchLayouts(n, active, scratch, local, usable, parts, dst)
	}
	depth := 1
	for ; depth < len(local); depth++ {
		run := r.nodes.run(n, set, local[depth:])
		n += uint32(run)
		if depth += run; depth == len(local) {
			break
		}
		if n = r.child(n, local[depth]); n == 0 {
			break
		}
		if s := r.nodes.at(n).members; s != set {
			set = s
			if !sets.Narrow(active, r.sets.Words(s), depth, scratch.blocks) {
				break
			}
		}
	}
	sets.Narrow(active, nil, depth, scratch.blocks)

	matches := 0
	for i, word := range first {
		matches += bits.OnesCount64(word & r.live[i])
	}
	if fewShare*matches > len(r.workers) {
		dst = slices.Grow(dst, len(r.workers))
		for i := range r.workers {
			if p := &r.workers[i]; sets.Has(first, p.slot) {
				dst = appendMatch(dst, p.key, int(scratch.blocks[p.slot]))
			}
		}
		return dst
	}
	start := len(dst)
	dst = slices.Grow(dst, matches)
	for i, word := range first {
		for left := word & r.live[i]; left != 0; left &= left - 1 {
			slot := i*64 + bits.TrailingZeros64(left)
			dst = appendMatch(dst, r.slots[slot].key, int(scratch.blocks[slot]))
		}
	}
	slices.SortFunc(dst[start:], func(a, b kv.Match) int { return a.Worker.Compare(b.Worker) })
	return dst
}

// matchLayouts is Match where some workers have a Layout or lower tiers: it also notes the sets along
// the prompt, and may continue where no worker's first group does. It is apart because
// the plain loop would be slower for it. n is the node of the first block, and active
// what holds it.
func (r *Tree) matchLayouts(n uint32, active []uint64, scratch *matchScratch, local []uint64, usable int, parts kv.MatchParts,
	dst []kv.Match) []kv.Match {
	set := r.nodes.at(n).members
	first := r.sets.Words(set)
	walked := &scratch.path
	walked.runs, walked.last = append(walked.runs[:0], pathRun{0, first}), 0
	depth := 1
	for ; depth < len(local); depth++ {
		run := r.nodes.runApart(n, set, local[depth:])
		n += uint32(run)
		if depth += run; depth == len(local) {
			break
		}
		if n = r.child(n, local[depth]); n == 0 {
			break
		}
		if s := r.nodes.at(n).members; s != set {
			set = s
			words := r.sets.Words(s)
			walked.runs = append(walked.runs, pathRun{depth, words})
			if !sets.Narrow(active, words, depth, scratch.blocks) && r.beyond+r.lowered == 0 {
				break
			}
		}
	}
	sets.Narrow(active, nil, depth, scratch.blocks)
	walked.length = depth

	usable = min(usable, len(local))
	end := min(usable, depth)
	dst = slices.Grow(dst, len(r.workers))
	for i := range r.workers {
		p := &r.workers[i]
		s := &r.slots[p.slot]
		held, start := 0, len(dst)
		if sets.Has(first, p.slot) {
			held = int(scratch.blocks[p.slot])
		}
		if s.groups != nil {
			dst = r.matchGroups(p, walked, held, usable, len(local), dst)
			if !s.groups.rules.simple() {
				continue
			}
		} else if held > 0 {
			dst = appendMatch(dst, p.key, held)
		}
		lower := s.lower
		if lower == nil || len(lower.present) == 0 {
			continue
		}
		matched := len(dst) > start
		if !matched {
			dst = appendMatch(dst, p.key, 0)
		}
		m := &dst[start]
		if parts != 0 {
			lower.setParts(m, walked, parts)
		}
		if lower.chunk <= 1 {
			lower.read(m, walked, end)
		} else {
			lower.readChunks(m, walked, usable)
		}
		if !matched && *m == (kv.Match{Worker: p.key}) {
			dst = dst[:start]
		}
	}
	return dst
}

// appendMatch appends a match of so many blocks, for which dst has room. It is made in place:
// many are slow to copy.
func appendMatch(dst []kv.Match, w kv.WorkerKey, blocks int) []kv.Match {
	dst = dst[:len(dst)+1]
	m := &dst[len(dst)-1]
	*m = kv.Match{}
	m.Worker, m.Blocks = w, blocks
	return dst
}

// matchGroups appends the match of a worker with a Layout, if it holds anything of the prompt.
func (r *Tree) matchGroups(p *workerPlace, walked *path, held, usable, whole int, dst []kv.Match) []kv.Match {
	g := r.slots[p.slot].groups
	if !g.rules.rooted {
		held = walked.length
	}
	if held == 0 {
		return dst
	}
	m := kv.Match{Worker: p.key}
	blocks, limit := g.hit(p.slot, walked, held, usable, whole)
	m.Blocks, m.Limit = blocks, int32(limit)
	if !g.rules.rooted && m.Blocks == 0 {
		return dst
	}
	if m.Held = int32(held); m.Blocks >= min(held, usable) || !g.rules.rooted {
		m.Held, m.Limit = 0, 0
	}
	return append(dst, m)
}

// Workers returns all workers with stored blocks, in order, including those that
// are empty now, excluding those that were forgotten.
func (r *Tree) Workers() []kv.WorkerKey {
	r.mu.RLock()
	defer r.mu.RUnlock()
	keys := make([]kv.WorkerKey, len(r.workers))
	for i, p := range r.workers {
		keys[i] = p.key
	}
	return keys
}

// Blocks returns the number of blocks that w holds; copies of one block count once.
func (r *Tree) Blocks(w kv.WorkerKey) int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if slot, known := r.slot(w); known {
		return r.slots[slot].blocks.Len()
	}
	return 0
}

// storeBlock adds block to slot as a child of node at, and returns its node.
func (r *Tree) storeBlock(slot, at uint32, block kv.StoredBlock) uint32 {
	n := r.child(at, block.Local)
	if n == 0 {
		n = r.addChild(at, block.Local)
	}
	s := &r.slots[slot]
	old := s.blocks.Get(block.Engine, 0)
	if old == n {
		s.copies.Put(block.Engine, 0, s.copies.Get(block.Engine, 0)+1)
		return n
	}
	s.blocks.Put(block.Engine, 0, n)
	r.addMember(slot, n)
	if s.groups != nil {
		r.follow(s.groups, block.Engine, n)
	}
	if s.lower != nil {
		r.followLower(s.lower, block.Engine, n)
	}
	if old != 0 {
		// After addMember, which keeps the path to n from being freed.
		s.copies.Delete(block.Engine, 0)
		r.dropMember(slot, old)
	}
	return n
}

// addMember counts one more engine hash of slot at node n.
func (r *Tree) addMember(slot, n uint32) {
	if members := r.nodes.at(n).members; r.sets.Has(members, slot) {
		aliases := &r.slots[slot].aliases
		aliases.Put(uint64(n), 0, aliases.Get(uint64(n), 0)+1)
		return
	}
	r.toggleMember(slot, n)
}

// dropMember counts one engine hash of slot less at node n, and frees the node
// if it is no longer needed.
func (r *Tree) dropMember(slot, n uint32) {
	aliases := &r.slots[slot].aliases
	if more := aliases.Get(uint64(n), 0); more != 0 {
		aliases.SetOrDelete(uint64(n), more-1)
		return
	}
	r.toggleMember(slot, n)
	r.freeUnused(n)
}

// bare returns the number of nodes without a worker, the root not among them.
func (r *Tree) bare() int { return r.nodes.used - 1 - r.sets.Refs() }

// toggleMember puts slot into the worker set of node n, or takes it out.
func (r *Tree) toggleMember(slot, n uint32) {
	node := r.nodes.at(n)
	old := node.members
	node.members = r.sets.Toggle(old, slot)
	r.sets.Acquire(node.members)
	if r.booked != nil {
		r.booked.changed(n, r.sets.Words(old), r.sets.Words(node.members))
	}
	r.sets.Release(old)
}

// child returns the child of node n for this local hash, or 0.
func (r *Tree) child(n uint32, local uint64) uint32 {
	node := r.nodes.at(n)
	switch {
	case node.children == 0:
		return 0
	case node.child != 0 && r.nodes.at(node.child).local == local:
		return node.child
	case node.child != 0 && node.children == 1:
		return 0
	}
	return r.branches.Get(local, n)
}

// addChild makes a child of node n for a local hash it has none for. The node
// has no worker yet.
func (r *Tree) addChild(n uint32, local uint64) uint32 {
	c := r.nodes.alloc()
	*r.nodes.at(c) = treeNode{local: local, parent: n}
	r.booked.made(c, n, local)
	parent := r.nodes.at(n)
	if parent.child == 0 {
		parent.child = c
	} else {
		r.branches.Put(local, n, c)
	}
	parent.children++
	return c
}

// freeUnused frees node n if it has neither workers nor children, and then its
// ancestors as far as the same is true of them.
func (r *Tree) freeUnused(n uint32) {
	for n != rootNode {
		node := r.nodes.at(n)
		if node.members != 0 || node.children != 0 {
			return
		}
		parent := r.nodes.at(node.parent)
		if parent.child == n {
			parent.child = 0
		} else {
			r.branches.Delete(node.local, node.parent)
		}
		parent.children--
		up := node.parent
		r.nodes.release(n)
		n = up
	}
}
