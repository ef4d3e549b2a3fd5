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
// predicting combines both, and blind is empty. Apply alone changes it, so that what embeds
// a Reader passes no change by.
type Index interface {
	Reader
	Applier
}

// Assumer learns from routing decisions.
type Assumer interface {
	// SetCapacity sets the number of blocks of a worker's cache; 0: unknown.
	SetCapacity(w kv.WorkerKey, blocks int)
	// Routed records that a prompt with these local hashes is sent to w. The caller
	// must end the returned Assumption.
	Routed(w kv.WorkerKey, local []uint64) *Assumed
}

// NewBlind returns an index that matches nothing, for policies that ignore matches.
func NewBlind() Index { return blind{NewTree()} }

// NewPredicting returns an index that combines exact and routed, which learns from routing
// decisions: for each worker the longer match counts.
func NewPredicting(exact *Tree, routed *Approx) (Index, Assumer) {
	x := &predicting{exact, routed}
	return x, x
}

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
		return cmp.Or(a.Worker.Compare(b.Worker), cmp.Compare(b.Blocks+b.Lower.Total(), a.Blocks+a.Lower.Total()),
			cmp.Compare(b.Blocks, a.Blocks))
	})
	return slices.CompactFunc(matches, func(a, b kv.Match) bool { return a.Worker == b.Worker })
}

// Apply changes the exact index, and empties w in both.
func (x *predicting) Apply(w kv.WorkerKey, c *Change) (Applied, error) {
	done, err := x.Tree.Apply(w, c)
	switch c.Kind {
	case Cleared, DeviceCleared, Forgotten:
		_, _ = x.routed.Apply(w, c) // cannot fail
	case Stored, Held, Removed, LayoutSet, LookaheadStored, ChunkSet, LowerRestored, DoubtSettled:
	}
	return done, err
}

// SetCapacity does nothing: predictions are short-lived.
func (*predicting) SetCapacity(kv.WorkerKey, int) {}

// Routed counts the prompt as cached on w from now on.
func (x *predicting) Routed(w kv.WorkerKey, local []uint64) *Assumed {
	return x.routed.Routed(w, local)
}
