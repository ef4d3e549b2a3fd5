package radix

import (
	"cmp"
	"iter"
	"slices"

	"kvrouter/internal/kv"
)

// Index maps blocks to the workers that have cached them. The implementations
// differ in their source: Tree uses KV events, Approx and Trees use routed prompts,
// predicting combines both, and blind is empty. A lookup waits for at most one
// change of the index.
type Index interface {
	Match(local []uint64, usable int, parts kv.MatchParts, dst []kv.Match) []kv.Match
	// CanMatch is false for an index that never matches, so that callers need not
	// hash prompts.
	CanMatch() bool
	LookaheadStored(kv.Lookahead)
	Lookaheads() []kv.Lookahead
	Store(w kv.WorkerKey, parent uint64, hasParent bool, blocks []kv.StoredBlock) error
	Remove(w kv.WorkerKey, engine []uint64) (unknown int)
	Clear(w kv.WorkerKey)
	Forget(worker uint64)
	Workers() []kv.WorkerKey
	Blocks(w kv.WorkerKey) int
	DumpOf(w kv.WorkerKey) iter.Seq[PlacedBlock]

	// The KV-cache groups of engines that have others than one of full attention.
	SetLayout(w kv.WorkerKey, layout kv.Layout, block int)
	StoreTail(w kv.WorkerKey, parent uint64, hasParent bool, skipped []uint64, blocks []kv.StoredBlock) error
	Hold(w kv.WorkerKey, group int, engine []uint64)
	Drop(w kv.WorkerKey, group int, engine []uint64) (unknown int)
	LayoutOf(w kv.WorkerKey) kv.Layout
	Depth(w kv.WorkerKey, engine uint64) (blocks int, known bool)
	HeldOf(w kv.WorkerKey) []HeldBlock
	AllBlocks(w kv.WorkerKey) int

	// The tiers below the device.
	StoreLower(at LowerTier, parent uint64, hasParent bool, blocks []kv.StoredBlock) (lost int)
	HoldLower(at LowerTier, engine []uint64) (lost int)
	RemoveLower(at LowerTier, engine []uint64) (unknown int)
	ClearDevice(w kv.WorkerKey, host bool)
	SetChunk(w kv.WorkerKey, blocks int)
	SettleLower(w kv.WorkerKey, doubt uint32, held bool) (settled bool)
	LowerOf(w kv.WorkerKey) LowerState
	DumpLowerOf(w kv.WorkerKey) LowerDump
	RestoreLower(w kv.WorkerKey, chunk int, doubtful bool, stores []string)
}

// Assumer is an Index that learns from routing decisions.
type Assumer interface {
	Index
	// SetCapacity sets the number of blocks of a worker's cache; 0: unknown.
	SetCapacity(w kv.WorkerKey, blocks int)
	// Routed records that a prompt with these local hashes is sent to w. The caller
	// must end the returned Assumption.
	Routed(w kv.WorkerKey, local []uint64) *Assumed
}

// NewBlind returns an index that matches nothing, for policies that ignore matches.
func NewBlind() Index { return blind{NewTree()} }

// NewPredicting returns an index that combines exact and routed: for each worker the
// longer match counts.
func NewPredicting(exact *Tree, routed *Approx) Index { return &predicting{exact, routed} }

// blind matches nothing, for a policy to which it would make no difference.
type blind struct{ *Tree }

// CanMatch is false.
func (blind) CanMatch() bool { return false }

// Match appends nothing.
func (blind) Match(_ []uint64, _ int, _ kv.MatchParts, dst []kv.Match) []kv.Match { return dst }

// predicting combines the exact index with recently routed prompts; the longer match
// of a worker counts. It bridges the time until a prompt's events come.
type predicting struct {
	*Tree
	routed *Approx
}

// Match appends the longer match of each worker.
func (x *predicting) Match(local []uint64, usable int, parts kv.MatchParts, dst []kv.Match) []kv.Match {
	start := len(dst)
	dst = x.Tree.Match(local, usable, parts, dst)
	exact := len(dst)
	dst = x.routed.Match(local, usable, parts, dst)
	if len(dst) == exact {
		return dst
	}
	return dst[:start+len(Longest(dst[start:]))]
}

// Longest sorts matches by worker in place and returns each worker's longest, lower tiers
// included.
func Longest(matches []kv.Match) []kv.Match {
	slices.SortFunc(matches, func(a, b kv.Match) int {
		return cmp.Or(a.Worker.Compare(b.Worker), cmp.Compare(b.Blocks+b.Lower.Total(), a.Blocks+a.Lower.Total()), cmp.Compare(b.Blocks, a.Blocks))
	})
	return slices.CompactFunc(matches, func(a, b kv.Match) bool { return a.Worker == b.Worker })
}

// ClearDevice empties the device of w in both.
func (x *predicting) ClearDevice(w kv.WorkerKey, host bool) {
	x.Tree.ClearDevice(w, host)
	x.routed.Clear(w)
}

// Clear empties w in both.
func (x *predicting) Clear(w kv.WorkerKey) {
	x.Tree.Clear(w)
	x.routed.Clear(w)
}

// Forget removes a worker from both.
func (x *predicting) Forget(worker uint64) {
	x.Tree.Forget(worker)
	x.routed.Forget(worker)
}

// SetCapacity does nothing: predictions are short-lived.
func (*predicting) SetCapacity(kv.WorkerKey, int) {}

// Routed counts the prompt as cached on w from now on.
func (x *predicting) Routed(w kv.WorkerKey, local []uint64) *Assumed {
	return x.routed.Routed(w, local)
}
