package main

import (
	"cmp"
	"slices"
)

// Index tells which worker holds which blocks. Where that comes from is what
// the kinds differ in: Radix knows it from KV events, Approx and PrefixTrees
// assume it from what was routed, withPredictions does both and noIndex neither.
// A lookup waits for one change of the index at most, never for changes that
// wait as well.
type Index interface {
	Match(local []uint64, dst []Match) []Match
	// CanMatch is false for an index whose Match never finds anything, so that
	// its callers need not hash a prompt for it.
	CanMatch() bool
	Store(w WorkerKey, parent uint64, hasParent bool, blocks []StoredBlock) error
	Remove(w WorkerKey, engine []uint64) (unknown int)
	Clear(w WorkerKey)
	Forget(worker uint64)
	Workers() []WorkerKey
	Blocks(w WorkerKey) int
	Dump(yield func(w WorkerKey, parent uint64, hasParent bool, block StoredBlock) bool)
}

// assumer is an Index that is told what was routed.
type assumer interface {
	Index
	// SetCapacity tells how many blocks a worker's cache has; 0: not known.
	SetCapacity(w WorkerKey, blocks int)
	// Routed tells that a prompt with these local hashes goes to w. The caller
	// must end what it returns.
	Routed(w WorkerKey, local []uint64) *Assumed
}

// NewBlind returns an index that matches nothing, for a policy to which it would
// make no difference.
func NewBlind() Index { return noIndex{NewRadix()} }

// NewPredicting returns an index that finds what exact or routed has, whichever
// has more of a worker.
func NewPredicting(exact *Radix, routed *Approx) Index { return &withPredictions{exact, routed} }

// noIndex matches nothing, for a policy to which it would make no difference.
type noIndex struct{ *Radix }

// CanMatch is false.
func (noIndex) CanMatch() bool { return false }

// Match appends nothing.
func (noIndex) Match(_ []uint64, dst []Match) []Match { return dst }

// withPredictions is the exact index and, beside it, what was routed lately: of
// both, a worker holds what the one says that has more. It bridges the time
// until a prompt's events come.
type withPredictions struct {
	*Radix
	routed *Approx
}

// Match appends the longer match of each worker.
func (x *withPredictions) Match(local []uint64, dst []Match) []Match {
	start := len(dst)
	dst = x.Radix.Match(local, dst)
	exact := len(dst)
	dst = x.routed.Match(local, dst)
	if len(dst) == exact {
		return dst
	}
	slices.SortFunc(dst[start:], func(a, b Match) int {
		return cmp.Or(a.Worker.Compare(b.Worker), cmp.Compare(b.Blocks, a.Blocks))
	})
	longest := slices.CompactFunc(dst[start:], func(a, b Match) bool { return a.Worker == b.Worker })
	return dst[:start+len(longest)]
}

// Clear empties w in both.
func (x *withPredictions) Clear(w WorkerKey) {
	x.Radix.Clear(w)
	x.routed.Clear(w)
}

// Forget forgets a worker in both.
func (x *withPredictions) Forget(worker uint64) {
	x.Radix.Forget(worker)
	x.routed.Forget(worker)
}

// SetCapacity does nothing: predictions only live for a moment.
func (*withPredictions) SetCapacity(WorkerKey, int) {}

// Routed counts the prompt as cached on w from now on.
func (x *withPredictions) Routed(w WorkerKey, local []uint64) *Assumed {
	return x.routed.Routed(w, local)
}
