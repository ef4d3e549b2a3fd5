package radix

import (
	"math/bits"

	"kvrouter/internal/table"
)

// workerSets holds the distinct sets of worker slots that occur in the index,
// each once, with a count of the nodes that refer to it: most nodes of a prompt
// are held by the same workers, so a node needs only a number and two equal
// numbers mean equal sets. Set 0 is the empty set. Memory: 8 bytes for every 64
// slots and about 70 bytes for each distinct set in use.
type workerSets struct {
	sets  []workerSet // by id; sets[0] is the empty set
	free  []uint32    // ids of sets that no node refers to
	index table.Table // hash of a set -> id of the first set with that hash
	last  setChange   // the change requested last: chains request the same again
	refs  int         // nodes that refer to any set but the empty one
}

// workerSet is a bitset by slot without zero words at its end, so that equal
// sets have equal words.
type workerSet struct {
	words []uint64
	hash  uint64 // exclusive or of slotHash over the members
	refs  uint32 // nodes that refer to the set; 0 only while it is free
	next  uint32 // the next set with the same hash, or 0
}

// setChange notes that adding slot to from, or taking it away, gives to.
type setChange struct {
	from, slot, to uint32
	valid          bool
}

// has reports whether slot is in set id.
func (s *workerSets) has(id, slot uint32) bool {
	return hasSlot(s.sets[id].words, slot)
}

func hasSlot(words []uint64, slot uint32) bool {
	w := int(slot / 64)
	return w < len(words) && words[w]>>(slot%64)&1 != 0
}

// words returns the bitset of set id, by slot. It must not be changed.
func (s *workerSets) words(id uint32) []uint64 { return s.sets[id].words }

// toggle returns the set that differs from set id in slot only. The caller must
// acquire the result before it requests anything else.
func (s *workerSets) toggle(id, slot uint32) uint32 {
	if s.last.valid && s.last.from == id && s.last.slot == slot {
		return s.last.to
	}
	to := s.find(id, slot)
	s.last = setChange{from: id, slot: slot, to: to, valid: true}
	return to
}

// acquire counts one more node that refers to set id.
func (s *workerSets) acquire(id uint32) {
	if id != 0 {
		s.sets[id].refs++
		s.refs++
	}
}

// release counts one node less that refers to set id and frees it with the last.
func (s *workerSets) release(id uint32) {
	if id == 0 {
		return
	}
	s.refs--
	set := &s.sets[id]
	if set.refs--; set.refs > 0 {
		return
	}
	if first := s.index.Get(set.hash, 0); first != id {
		for first != 0 && s.sets[first].next != id {
			first = s.sets[first].next
		}
		s.sets[first].next = set.next
	} else if set.next != 0 {
		s.index.Put(set.hash, 0, set.next)
	} else {
		s.index.Delete(set.hash, 0)
	}
	*set = workerSet{}
	s.free = append(s.free, id)
	if s.last.from == id || s.last.to == id {
		s.last.valid = false
	}
}

// find returns the set that differs from set id in slot only, making it if it
// does not exist.
func (s *workerSets) find(id, slot uint32) uint32 {
	from := &s.sets[id]
	hash := from.hash ^ slotHash(slot)
	first := s.index.Get(hash, 0)
	for to := first; to != 0; to = s.sets[to].next {
		if differOnlyIn(s.sets[to].words, from.words, slot) {
			return to
		}
	}
	words := make([]uint64, max(len(from.words), int(slot/64)+1))
	copy(words, from.words)
	words[slot/64] ^= 1 << (slot % 64)
	for len(words) > 0 && words[len(words)-1] == 0 {
		words = words[:len(words)-1]
	}
	if len(words) == 0 {
		return 0
	}
	var to uint32
	if n := len(s.free); n > 0 {
		to, s.free = s.free[n-1], s.free[:n-1]
	} else {
		to = uint32(len(s.sets))
		s.sets = append(s.sets, workerSet{})
	}
	s.sets[to] = workerSet{words: words, hash: hash, next: first}
	s.index.Put(hash, 0, to)
	return to
}

// differOnlyIn reports whether slot, and nothing else, is in one of the two sets
// but not in the other.
func differOnlyIn(a, b []uint64, slot uint32) bool {
	if len(a) < len(b) {
		a, b = b, a
	}
	w := int(slot / 64)
	for i, word := range a {
		if i < len(b) {
			word ^= b[i]
		}
		if i == w {
			word ^= 1 << (slot % 64)
		}
		if word != 0 {
			return false
		}
	}
	return w < len(a)
}

// slotHash is a slot's part in the hash of the sets it is in.
func slotHash(slot uint32) uint64 {
	hi, lo := bits.Mul64(uint64(slot)+0xd1b54a32d192ed03, 0x9e3779b97f4a7c15)
	return hi ^ lo
}
