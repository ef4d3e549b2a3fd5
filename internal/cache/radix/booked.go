package radix

import (
	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/summary"
)

// booked keeps a book of the prefixes whose last block some worker has cached, on its device or in
// a lower tier, also if a request may not find it because of a hole or another KV-cache
// group. Blocks of cleared workers count until they are swept. It costs 8 bytes for each node,
// beside the book.
type booked struct {
	book      *summary.Book
	sequences []*[nodesPerChunk]uint64 // sequence hashes, by node
	slots     []uint64                 // bitset of the slots that count: not those of further groups
}

// NewTreeWithBook returns an empty index that keeps the book; nil: none.
func NewTreeWithBook(book *summary.Book) *Tree {
	r := NewTree()
	if book != nil {
		r.booked = &booked{book: book}
	}
	return r
}

// Tidy sweeps up to limit entries of cleared workers, so that they are reported also without
// events. It returns whether there are more.
func (r *Tree) Tidy(limit int) (more bool) {
	for ; limit > 0; limit -= sweepPerPart {
		r.mu.Lock()
		r.sweep(sweepPerPart)
		more = len(r.retired) > 0
		r.mu.Unlock()
		if !more {
			return false
		}
	}
	return true
}

// counts makes a slot count.
func (t *booked) counts(slot uint32) {
	if t == nil {
		return
	}
	for int(slot/64) >= len(t.slots) {
		t.slots = append(t.slots, 0)
	}
	t.slots[slot/64] |= 1 << (slot % 64)
}

// ignores undoes counts for a slot that holds nothing.
func (t *booked) ignores(slot uint32) {
	if t != nil && int(slot/64) < len(t.slots) {
		t.slots[slot/64] &^= 1 << (slot % 64)
	}
}

// made sets the sequence hash of a new node.
func (t *booked) made(n, parent uint32, local uint64) {
	if t == nil {
		return
	}
	for int(n/nodesPerChunk) >= len(t.sequences) {
		t.sequences = append(t.sequences, new([nodesPerChunk]uint64))
	}
	hash := local
	if parent != rootNode {
		hash = kv.NextSequenceHash(t.sequence(parent), local)
	}
	t.sequences[n/nodesPerChunk][n%nodesPerChunk] = hash
}

func (t *booked) sequence(n uint32) uint64 { return t.sequences[n/nodesPerChunk][n%nodesPerChunk] }

// changed notes that the members of a node were those, and are these.
func (t *booked) changed(n uint32, before, after []uint64) {
	switch held := t.held(after); {
	case held == t.held(before):
	case held:
		t.book.Hold(t.sequence(n))
	default:
		t.book.Drop(t.sequence(n))
	}
}

// held reports whether a set has a slot that counts.
func (t *booked) held(words []uint64) bool {
	for i := range min(len(words), len(t.slots)) {
		if words[i]&t.slots[i] != 0 {
			return true
		}
	}
	return false
}
