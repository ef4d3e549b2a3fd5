package radix

import (
	"math"
	"sync"
	"time"

	"kvrouter/internal/base/kv"
)

// Trees is the approximate index of SGLang's router: one prefix tree per worker
// with the prompts routed to it, inserted before they are forwarded. The engines'
// memories are unknown except by corrections. A tree has a maximum number of
// tokens, including those of answers. At each interval the excess is evicted, the
// least recently used prompts first, the end of a prompt before its start;
// in-flight prompts remain. Between two evictions a tree may grow to twice its
// size: then the oldest blocks are evicted at once, and a prompt that does not fit
// beside the in-flight ones is inserted in part.
//
// It is an Approx in which every worker has a memory of that size.
type Trees struct {
	*Approx
	blocks int           // that a tree keeps
	every  time.Duration // from one eviction to the next
	mu     sync.Mutex    // guards due; no other lock is taken under it
	due    time.Time     // of the next eviction
}

// Limits returns the number of blocks that each tree keeps, and the time from one eviction
// to the next.
func (t *Trees) Limits() (blocks int, every time.Duration) { return t.blocks, t.every }

// NewTrees returns empty trees, each limited to that many blocks. now is the clock.
func NewTrees(blocks int, every time.Duration, now func() time.Time) *Trees {
	t := &Trees{Approx: NewApprox(0, 0, 0, now), blocks: blocks, every: every, due: now().Add(every)}
	t.learns = true
	return t
}

// SetCapacity does nothing: the size of a tree is independent of the worker's
// memory.
func (*Trees) SetCapacity(kv.WorkerKey, int) {}

// Routed enters a prompt into w's tree, and evicts due blocks in all of them.
func (t *Trees) Routed(w kv.WorkerKey, local []uint64) *Assumed {
	t.Approx.SetCapacity(w, 2*t.blocks)
	now := t.now()
	t.mu.Lock()
	due := !now.Before(t.due)
	if due {
		t.due = now.Add(t.every)
	}
	t.mu.Unlock()
	if due {
		t.Approx.keep(t.blocks)
	}
	return t.Approx.Routed(w, local)
}

// keep evicts all but that many blocks of each worker.
func (a *Approx) keep(blocks int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for w, c := range a.Caches {
		a.evict(w, c, math.MaxInt64, max(0, c.Pool.Held()-blocks))
	}
}
