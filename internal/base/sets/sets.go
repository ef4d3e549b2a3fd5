// Package sets holds sets of small numbers, such as the workers with a block: each
// distinct set once, with the number of those who refer to it.
package sets

import (
	"math/bits"

	"kvrouter/internal/base/table"
)

// Sets are the distinct sets that are referred to: most blocks of a prompt are
// held by the same workers, so a block needs only the id of a set, and two equal ids
// mean equal sets. Id 0 is the empty set. Memory: 8 bytes for every 64 numbers up to the
// highest member, and about 70 bytes for each distinct set. It stays at its peak, and is
// reused. It is not safe for concurrent writers.
type Sets struct {
	sets  []set       // by id; sets[0] is the empty set
	free  []uint32    // ids of sets that nothing refers to
	index table.Table // hash of a set -> id of the first set with that hash
	last  change      // the change requested last: chains request the same again
	refs  int         // references to any set but the empty one
}

// set is a bitset without zero words at its end, so that equal sets have equal words.
type set struct {
	words []uint64 // of a free set none, but their memory
	hash  uint64   // exclusive or of memberHash over the members
	refs  uint32   // 0 only while it is free
	next  uint32   // the next set with the same hash, or 0
}

// change notes that adding member to from, or taking it away, gives to.
type change struct {
	from, member, to uint32
	valid            bool
}

// New returns no sets but the empty one. The seed is of the hash table.
func New(seed uint64) Sets {
	return Sets{sets: make([]set, 1), index: table.Table{Seed: seed}}
}

// Has reports whether n is in set id.
func (s *Sets) Has(id, n uint32) bool { return Has(s.sets[id].words, n) }

// Has reports whether n is in a bitset.
func Has(words []uint64, n uint32) bool {
	w := int(n / 64)
	return w < len(words) && words[w]>>(n%64)&1 != 0
}

// Words returns the bitset of set id. It must not be changed, and is valid until the next
// Release.
func (s *Sets) Words(id uint32) []uint64 { return s.sets[id].words }

// Refs returns the number of references to any set but the empty one.
func (s *Sets) Refs() int { return s.refs }

// Len returns the number of sets that are referred to.
func (s *Sets) Len() int { return len(s.sets) - 1 - len(s.free) }

// Toggle returns the set that differs from set id in n only. The caller must acquire the
// result before it requests anything else.
func (s *Sets) Toggle(id, n uint32) uint32 {
	if s.last.valid && s.last.from == id && s.last.member == n {
		return s.last.to
	}
	to := s.find(id, n)
	s.last = change{from: id, member: n, to: to, valid: true}
	return to
}

// Acquire counts one more reference to set id.
func (s *Sets) Acquire(id uint32) {
	if id != 0 {
		s.sets[id].refs++
		s.refs++
	}
}

// Release counts one reference less to set id and frees it with the last.
func (s *Sets) Release(id uint32) {
	if id == 0 {
		return
	}
	s.refs--
	released := &s.sets[id]
	if released.refs--; released.refs > 0 {
		return
	}
	if first := s.index.Get(released.hash, 0); first != id {
		for first != 0 && s.sets[first].next != id {
			first = s.sets[first].next
		}
		s.sets[first].next = released.next
	} else if released.next != 0 {
		s.index.Put(released.hash, 0, released.next)
	} else {
		s.index.Delete(released.hash, 0)
	}
	*released = set{words: released.words[:0]}
	s.free = append(s.free, id)
	if s.last.from == id || s.last.to == id {
		s.last.valid = false
	}
}

// find returns the set that differs from set id in n only, making it if it does not
// exist.
func (s *Sets) find(id, n uint32) uint32 {
	from, hash := s.sets[id].words, s.sets[id].hash^memberHash(n)
	if differOnlyIn(nil, from, n) {
		return 0
	}
	first := s.index.Get(hash, 0)
	for to := first; to != 0; to = s.sets[to].next {
		if differOnlyIn(s.sets[to].words, from, n) {
			return to
		}
	}
	var to uint32
	if last := len(s.free) - 1; last >= 0 {
		to, s.free = s.free[last], s.free[:last]
	} else {
		to = uint32(len(s.sets))
		s.sets = append(s.sets, set{})
	}
	words, length := s.sets[to].words, max(len(from), int(n/64)+1)
	if cap(words) < length {
		words = make([]uint64, length)
	}
	words = words[:length]
	clear(words[copy(words, from):])
	words[n/64] ^= 1 << (n % 64)
	for words[len(words)-1] == 0 {
		words = words[:len(words)-1]
	}
	s.sets[to] = set{words: words, hash: hash, next: first}
	s.index.Put(hash, 0, to)
	return to
}

// differOnlyIn reports whether n, and nothing else, is in one of the two sets but not in
// the other.
func differOnlyIn(a, b []uint64, n uint32) bool {
	if len(a) < len(b) {
		a, b = b, a
	}
	w := int(n / 64)
	for i, word := range a {
		if i < len(b) {
			word ^= b[i]
		}
		if i == w {
			word ^= 1 << (n % 64)
		}
		if word != 0 {
			return false
		}
	}
	return w < len(a)
}

// memberHash is a member's part in the hash of the sets it is in.
func memberHash(n uint32) uint64 {
	hi, lo := bits.Mul64(uint64(n)+0xd1b54a32d192ed03, 0x9e3779b97f4a7c15)
	return hi ^ lo
}

// Narrow keeps in alive the numbers also in words, and notes for every number that it
// takes out how many blocks it holds. It reports whether any is left.
func Narrow(alive, words []uint64, held int, blocks []int32) bool {
	var left uint64
	for i, word := range alive {
		kept := uint64(0)
		if i < len(words) {
			kept = word & words[i]
		}
		left |= kept
		for lost := word &^ kept; lost != 0; lost &= lost - 1 {
			blocks[i*64+bits.TrailingZeros64(lost)] = int32(held)
		}
		alive[i] = kept
	}
	return left != 0
}
