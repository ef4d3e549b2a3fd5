package router

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"sort"

	"kvrouter/internal/table"
)

// activeBlocks counts, by worker number, the requests in flight that have a block in
// their prompt. For each block it has the set of workers: so one look finds what all
// workers have of a prompt, and those that have nothing of it cost nothing. Its owner
// guards it.
type activeBlocks struct {
	entries table.Table // sequence hash -> its set, from 1
	more    table.Table // (sequence hash, worker number) -> requests beyond the first
	width   int         // of a set, words
	sets    []uint64    // width words each, by worker number; the first is not used
	free    []uint32    // sets that no block has
	pairs   int         // of a block and a worker that has it
	alive   []uint64    // reused by prefixes
}

func newActiveBlocks() activeBlocks {
	seed := rand.Uint64() // affects no result
	return activeBlocks{entries: table.Table{Seed: seed}, more: table.Table{Seed: seed}}
}

// set returns the workers that have the block; nil: none.
func (a *activeBlocks) set(h uint64) []uint64 {
	if n := int(a.entries.Get(h, 0)); n != 0 {
		return a.sets[n*a.width : (n+1)*a.width]
	}
	return nil
}

// requests returns how many requests on a worker have the block.
func (a *activeBlocks) requests(h uint64, worker uint32) uint32 {
	if set := a.set(h); set == nil || int(worker/64) >= a.width || set[worker/64]>>(worker%64)&1 == 0 {
		return 0
	}
	return 1 + a.more.Get(h, worker)
}

// add counts one more request on a worker with the block, and reports whether it is the
// first.
func (a *activeBlocks) add(h uint64, worker uint32) (first bool) {
	if int(worker/64) >= a.width {
		a.widen(int(worker/64) + 1)
	}
	set := a.set(h)
	if set == nil {
		set = a.newSet(h)
	}
	if word, bit := &set[worker/64], uint64(1)<<(worker%64); *word&bit == 0 {
		*word |= bit
		a.pairs++
		return true
	}
	a.more.Put(h, worker, a.more.Get(h, worker)+1)
	return false
}

// remove counts one request less of those that add counted, and reports whether it was
// the last.
func (a *activeBlocks) remove(h uint64, worker uint32) (last bool) {
	switch more := a.more.Get(h, worker); more {
	case 0:
	case 1:
		a.more.Delete(h, worker)
		return false
	default:
		a.more.Put(h, worker, more-1)
		return false
	}
	set := a.set(h)
	set[worker/64] &^= 1 << (worker % 64)
	a.pairs--
	if !slices.ContainsFunc(set, func(word uint64) bool { return word != 0 }) {
		a.free = append(a.free, a.entries.Delete(h, 0))
	}
	return true
}

// newSet gives the block a set without workers.
func (a *activeBlocks) newSet(h uint64) []uint64 {
	var n uint32
	if last := len(a.free) - 1; last >= 0 {
		n, a.free = a.free[last], a.free[:last]
	} else {
		n = uint32(max(1, len(a.sets)/a.width))
		a.sets = append(a.sets, make([]uint64, int(n+1)*a.width-len(a.sets))...)
	}
	a.entries.Put(h, 0, n)
	return a.sets[int(n)*a.width : int(n+1)*a.width]
}

// widen grows the sets to that many words of worker numbers.
func (a *activeBlocks) widen(width int) {
	var wider []uint64
	for old := range slices.Chunk(a.sets, max(1, a.width)) {
		wider = append(append(wider, old...), make([]uint64, width-len(old))...)
	}
	a.sets, a.width = wider, width
	a.alive = make([]uint64, width)
}

// prefixes sets held, by worker number, to how many leading blocks of a prompt the
// requests on that worker have, and returns it. Sequence hashes name whole prefixes,
// so a worker with a block has those before it.
func (a *activeBlocks) prefixes(sequence []uint64, held []int32) []int32 {
	held = slices.Grow(held[:0], a.width*64)[:a.width*64]
	clear(held)
	if len(sequence) == 0 || a.pairs == 0 {
		return held
	}
	set := a.set(sequence[0])
	copy(a.alive, set)
	for at := 0; set != nil; {
		at = a.runEnd(sequence, at, set)
		if set = nil; at < len(sequence) {
			set = a.set(sequence[at])
		}
		for i, word := range a.alive {
			kept := uint64(0)
			if set != nil {
				kept = word & set[i]
			}
			for lost := word &^ kept; lost != 0; lost &= lost - 1 {
				held[i*64+bits.TrailingZeros64(lost)] = int32(at)
			}
			a.alive[i] = kept
		}
	}
	return held
}

// runEnd returns the first position after at with a block of other workers than set,
// those of the one at at.
func (a *activeBlocks) runEnd(sequence []uint64, at int, set []uint64) int {
	same := func(i int) bool { return slices.Equal(a.set(sequence[i]), set) }
	step := 1
	for at+step < len(sequence) && same(at+step) {
		at, step = at+step, 2*step
	}
	left := min(step, len(sequence)-at) - 1 // positions after at that may still be of the run
	return at + 1 + sort.Search(left, func(i int) bool { return !same(at + 1 + i) })
}
