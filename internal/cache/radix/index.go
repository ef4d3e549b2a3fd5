package radix

import (
	"cmp"
	"iter"
	"slices"

	"kvrouter/internal/base/kv"
)

// Matcher finds cached prefixes. A lookup waits for at most one change of the index.
type Matcher interface {
	Match(local []uint64, usable int, parts kv.MatchParts, dst []kv.Match) []kv.Match
	// CanMatch is false for an index that never matches, so that callers need not
	// hash prompts.
	CanMatch() bool
	Lookaheads() []kv.Lookahead
	Blocks(w kv.WorkerKey) int
	LowerOf(w kv.WorkerKey) LowerState
}

// Reader is all that changes nothing.
type Reader interface {
	Matcher
	Workers() []kv.WorkerKey
	DumpOf(w kv.WorkerKey) iter.Seq[PlacedBlock]
	LayoutOf(w kv.WorkerKey) kv.Layout
	Depth(w kv.WorkerKey, engine uint64) (blocks int, known bool)
	HeldOf(w kv.WorkerKey) []HeldBlock
	AllBlocks(w kv.WorkerKey) int
	DumpLowerOf(w kv.WorkerKey) LowerDump
}

// Applier takes changes. The caller may reuse a Change afterwards.
type Applier interface {
	Apply(w kv.WorkerKey, c *Change) (Applied, error)
}

// Index maps blocks to the workers that have cached them. The implementations
// differ in their source: Tree uses KV events, Approx and Trees use routed prompts,
// mixed combines both, and blind is empty. Apply alone changes it, so that what embeds
// a Reader passes no change by.
type Index interface {
	Reader
	Applier
}

// Assumer learns from routing decisions.
type Assumer interface {
	// Assume sets whether the prompts routed to w count as cached there: its events do not report
	// all of its blocks. It has no effect on an index that assumes the blocks of all workers.
	Assume(w kv.WorkerKey, assumed bool)
	// SetCapacity sets the number of blocks of a worker's cache; 0: unknown.
	SetCapacity(w kv.WorkerKey, blocks int)
	// Routed records that a prompt with these local hashes is sent to w. The caller
	// must end the returned Assumption.
	Routed(w kv.WorkerKey, local []uint64) *Assumed
}

// NewBlind returns an index that matches nothing, for policies that ignore matches.
func NewBlind() Index { return blind{NewTree()} }

// blind matches nothing, for a policy to which it would make no difference.
type blind struct{ *Tree }

// CanMatch is false.
func (blind) CanMatch() bool { return false }

// Match appends nothing.
func (blind) Match(_ []uint64, _ int, _ kv.MatchParts, dst []kv.Match) []kv.Match { return dst }

// Longest sorts matches by worker in place and returns each worker's longest, lower tiers
// included.
func Longest(matches []kv.Match) []kv.Match {
	slices.SortFunc(matches, func(a, b kv.Match) int {
		return cmp.Or(a.Worker.Compare(b.Worker), cmp.Compare(b.Blocks+b.Lower.Total(), a.Blocks+a.Lower.Total()),
			cmp.Compare(b.Blocks, a.Blocks))
	})
	return slices.CompactFunc(matches, func(a, b kv.Match) bool { return a.Worker == b.Worker })
}
