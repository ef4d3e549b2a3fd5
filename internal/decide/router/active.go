package router

import (
	"math/rand/v2"
	"slices"
	"sort"

	"kvrouter/internal/base/sets"
	"kvrouter/internal/base/table"
)

// activeBlocks counts, by worker number, the requests in flight that have a block in
// their prompt. For each block it has the set of workers: so one look finds what all
// workers have of a prompt, and those that have nothing of it cost nothing. Its owner
// guards it.
type activeBlocks struct {
	entries table.Table // sequence hash -> its set
	sets    sets.Sets   // of worker numbers
	more    table.Table // (sequence hash, worker number) -> requests beyond the first
	numbers int         // above all worker numbers
	pairs   int         // of a block and a worker that has it
	alive   []uint64    // reused by prefixes
}

func newActiveBlocks() activeBlocks {
	seed := rand.Uint64() // affects no result
	return activeBlocks{entries: table.Table{Seed: seed}, sets: sets.New(seed), more: table.Table{Seed: seed}}
}

// requests returns how many requests on a worker have the block.
func (a *activeBlocks) requests(h uint64, worker uint32) uint32 {
	if !a.sets.Has(a.entries.Get(h, 0), worker) {
		return 0
	}
	return 1 + a.more.Get(h, worker)
}

// add counts one more request on a worker with the block, and reports whether it is the
// first.
func (a *activeBlocks) add(h uint64, worker uint32) (first bool) {
	a.numbers = max(a.numbers, int(worker)+1)
	set := a.entries.Get(h, 0)
	if a.sets.Has(set, worker) {
		a.more.Put(h, worker, a.more.Get(h, worker)+1)
		return false
	}
	a.toggle(h, set, worker)
	a.pairs++
	return true
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
	a.toggle(h, a.entries.Get(h, 0), worker)
	a.pairs--
	return true
}

// toggle puts the worker into the block's set, or takes it out.
func (a *activeBlocks) toggle(h uint64, set, worker uint32) {
	to := a.sets.Toggle(set, worker)
	a.sets.Acquire(to)
	a.sets.Release(set)
	a.entries.SetOrDelete(h, to)
}

// prefixes sets held, by worker number, to how many leading blocks of a prompt the
// requests on that worker have, and returns it. Sequence hashes name whole prefixes,
// so a worker with a block has those before it.
func (a *activeBlocks) prefixes(sequence []uint64, held []int32) []int32 {
	held = slices.Grow(held[:0], a.numbers)[:a.numbers]
	clear(held)
	if len(sequence) == 0 || a.pairs == 0 {
		return held
	}
	set := a.entries.Get(sequence[0], 0)
	a.alive = append(a.alive[:0], a.sets.Words(set)...)
	for at := 0; set != 0; {
		at = a.runEnd(sequence, at, set)
		if set = 0; at < len(sequence) {
			set = a.entries.Get(sequence[at], 0)
		}
		if !sets.Narrow(a.alive, a.sets.Words(set), at, held) {
			break
		}
	}
	return held
}

// runEnd returns the first position after at with a block of other workers than set, those
// of the one at at.
func (a *activeBlocks) runEnd(sequence []uint64, at int, set uint32) int {
	same := func(i int) bool { return a.entries.Get(sequence[i], 0) == set }
	step := 1
	for at+step < len(sequence) && same(at+step) {
		at, step = at+step, 2*step
	}
	left := min(step, len(sequence)-at) - 1 // positions after at that may still be of the run
	return at + 1 + sort.Search(left, func(i int) bool { return !same(at + 1 + i) })
}
