package radix

import (
	"sync"
	"sync/atomic"

	"kvrouter/internal/base/kv"
)

// mixed has the blocks that the KV events of workers report, and for workers whose caches are not
// known exactly the blocks of the prompts that were routed to them. The longer match of a worker
// counts.
type mixed struct {
	*Tree
	routed *Approx // of workers that are not known exactly
	recent *Approx // prompts routed to the others, until their events come; nil: they do not count

	mu      sync.Mutex // guards assumed; the locks of the indexes may be taken under it
	assumed map[kv.WorkerKey]bool
	count   atomic.Int32 // of assumed
}

// NewMixed returns an index that combines exact, of KV events, with routed, which learns from routing
// decisions about the workers that are not known exactly. recent learns about the others and bridges
// the time until their events come; nil: nothing does.
func NewMixed(exact *Tree, routed, recent *Approx) (Index, Assumer) {
	x := &mixed{Tree: exact, routed: routed, recent: recent, assumed: map[kv.WorkerKey]bool{}}
	return x, x
}

// Match appends the longest match of each worker.
func (x *mixed) Match(local []uint64, usable int, parts kv.MatchParts, dst []kv.Match) []kv.Match {
	start := len(dst)
	dst = x.Tree.Match(local, usable, parts, dst)
	exact := len(dst)
	if x.count.Load() > 0 {
		dst = x.routed.Match(local, usable, parts, dst)
	}
	if x.recent != nil {
		dst = x.recent.Match(local, usable, parts, dst)
	}
	if len(dst) == exact || exact == start && x.recent == nil {
		return dst
	}
	return dst[:start+len(Longest(dst[start:]))]
}

// Blocks returns how many blocks of w can match, those that are assumed included.
func (x *mixed) Blocks(w kv.WorkerKey) int { return max(x.Tree.Blocks(w), x.routed.Blocks(w)) }

// Apply changes the exact index. What empties w's device, or forgets w, empties its assumed blocks,
// too. The begin of an event stream does not: until it is known to be whole, they count.
func (x *mixed) Apply(w kv.WorkerKey, c *Change) (Applied, error) {
	done, err := x.Tree.Apply(w, c)
	switch c.Kind {
	case Forgotten, DeviceCleared:
		_, _ = x.routed.Apply(w, c) // cannot fail
		x.forgetRecent(w, c)
		if c.Kind == Forgotten {
			x.forget(w.Worker)
		}
	case Cleared:
		x.forgetRecent(w, c)
	case Stored, Held, Removed, LayoutSet, LookaheadStored, ChunkSet, LowerRestored, DoubtSettled:
	}
	return done, err
}

func (x *mixed) forgetRecent(w kv.WorkerKey, c *Change) {
	if x.recent != nil {
		_, _ = x.recent.Apply(w, c) // cannot fail
	}
}

// forget notes that nothing is assumed of a worker any more.
func (x *mixed) forget(worker uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for w := range x.assumed {
		if w.Worker == worker {
			delete(x.assumed, w)
		}
	}
	x.count.Store(int32(len(x.assumed)))
}

// Assume sets whether the prompts routed to w count as cached there. Otherwise w is empty but for what
// its events report.
func (x *mixed) Assume(w kv.WorkerKey, assumed bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.assumed[w] == assumed:
		return
	case assumed:
		x.assumed[w] = true
	default:
		delete(x.assumed, w)
		_, _ = x.routed.Apply(w, &Change{Kind: Cleared}) // cannot fail
	}
	x.count.Store(int32(len(x.assumed)))
}

// SetCapacity sets the size of w's assumed cache.
func (x *mixed) SetCapacity(w kv.WorkerKey, blocks int) { x.routed.SetCapacity(w, blocks) }

// Routed counts the prompt as cached on w from now on, unless w's events report that.
func (x *mixed) Routed(w kv.WorkerKey, local []uint64) *Assumed {
	if x.count.Load() > 0 {
		x.mu.Lock()
		assumed := x.assumed[w]
		x.mu.Unlock()
		if assumed {
			return x.routed.Routed(w, local)
		}
	}
	if x.recent == nil {
		return nil
	}
	return x.recent.Routed(w, local)
}
