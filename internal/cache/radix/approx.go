package radix

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/blockpool"
	"kvrouter/internal/base/kv"
)

// Approx is the approximate index: prompts routed to a worker count as cached
// there. It models each worker's memory and updates a Tree by it, as events.Stream
// updates one by the engine's events.
//
// Size. On a worker whose number of blocks is known, eviction is vLLM's: blocks of
// in-flight requests remain, the others are reused in the order of their release,
// oldest first, the end of a prompt before its start. An answer takes blocks too,
// which match no prompt.
//
// Time. On other workers, blocks expire after the time to live since their last
// use, which is the end of their last request. Together these workers have at most
// maxBlocks: beyond that, the least recently used blocks are evicted until pruneTo
// remain. Blocks of in-flight requests always remain. The time to live may also
// apply to workers of known size, in addition to the size.
//
// Corrections. An answer's cached_tokens may show that the engine has evicted
// blocks assumed to be cached. Engines evict the oldest first, so all blocks used
// no later than the first missing block are removed. The size of a worker that is
// not otherwise known (of Trees) is then limited to the remaining blocks, until an
// answer finds removed blocks, whose number is added.
type Approx struct {
	*Tree             // changed under mu only
	ttl               time.Duration
	maxBlocks         int
	pruneTo           int
	now               func() time.Time
	ttlForAll         bool         // the time to live applies to workers of known size too
	learns            bool         // how much a worker holds, by corrections
	corrected         bool         // by what answers say of the cache
	due               atomic.Int64 // no block's time is over before; in Unix ns
	mu                sync.Mutex   // guards all below; may be held when taking Tree.mu
	capacity          map[kv.WorkerKey]int
	Caches            map[kv.WorkerKey]*assumedCache
	evicted, sequence []uint64         // reused
	blocks            []kv.StoredBlock // reused
}

// assumedCache is the assumed cache of a worker.
type assumedCache struct {
	capacity int             // blocks; 0: not known
	Pool     *blockpool.Pool // blocks by sequence hash; those of answers by a random number
	learned  int             // blocks that it holds at most, as answers have shown; 0: nothing has
	used     []int64         // by block of the pool: when a request last finished with it, Unix ns; 0: none has
	answers  []int32         // by block of the pool: blocks of the longest answer to a prompt that ends there
}

// firstPool is the number of blocks that an assumedCache can hold before its first growth.
const firstPool = 256

// maxAnswer bounds the blocks of one answer that are modelled: it is the worker
// that reports how long its answers are.
const maxAnswer = 1 << 16

// SetCorrected sets whether the cached tokens of answers correct the index; the
// default is true. Call it before the index is used.
func (a *Approx) SetCorrected(corrected bool) { a.corrected = corrected }

// SetTTLForAll sets whether the time to live also applies to workers of known size;
// the default is false. Call it before the index is used.
func (a *Approx) SetTTLForAll(forAll bool) { a.ttlForAll = forAll }

// Assumed is one routed prompt with the part that its worker is assumed to have
// cached. Its owner must call End or Fail.
type Assumed struct {
	index    *Approx
	worker   kv.WorkerKey
	cache    *assumedCache
	held     []uint32  // blocks of the pool, in flight until the end
	found    int       // of them, leading ones that were cached before
	lasts    []lastUse // of those found
	answered int       // blocks of an answer that may follow those found
}

// lastUse says when the blocks from the last one's end up to block upTo of a
// prompt were used last before. Along a prompt that time never rises, because
// a user of a block uses those before it as well.
type lastUse struct {
	upTo int
	at   int64 // Unix ns; inUse: in flight then
}

const inUse = math.MaxInt64

// NewApprox returns an empty index. ttl and maxBlocks limit the assumed blocks of
// workers of unknown size; beyond maxBlocks, blocks are evicted until the share
// pruneTarget of it remains. now is the clock.
func NewApprox(ttl time.Duration, maxBlocks int, pruneTarget float64, now func() time.Time) *Approx {
	a := &Approx{
		Tree: NewTree(), ttl: ttl, maxBlocks: maxBlocks, pruneTo: int(float64(maxBlocks) * pruneTarget), now: now,
		capacity: map[kv.WorkerKey]int{}, Caches: map[kv.WorkerKey]*assumedCache{}, corrected: true,
	}
	a.due.Store(math.MaxInt64)
	return a
}

// Assume does nothing: all workers' blocks are assumed.
func (*Approx) Assume(kv.WorkerKey, bool) {}

// SetCapacity sets the number of blocks of w's cache; 0: unknown. A worker whose
// size changes starts empty.
func (a *Approx) SetCapacity(w kv.WorkerKey, blocks int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.capacity[w] != blocks {
		a.capacity[w] = blocks
		a.clear(w)
	}
}

// Apply changes the Tree; what empties w also empties its modelled memory.
func (a *Approx) Apply(w kv.WorkerKey, c *Change) (Applied, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch c.Kind {
	case Cleared, DeviceCleared:
		delete(a.Caches, w)
	case Forgotten:
		maps.DeleteFunc(a.capacity, func(other kv.WorkerKey, _ int) bool { return other.Worker == w.Worker })
		maps.DeleteFunc(a.Caches, func(other kv.WorkerKey, _ *assumedCache) bool { return other.Worker == w.Worker })
	case Stored, Held, Removed, LayoutSet, LookaheadStored, ChunkSet, LowerRestored, DoubtSettled:
	}
	return a.Tree.Apply(w, c)
}

func (a *Approx) clear(w kv.WorkerKey) {
	delete(a.Caches, w)
	_, _ = a.Tree.Apply(w, &Change{Kind: Cleared}) // cannot fail
}

func (a *Approx) remove(w kv.WorkerKey, engine []uint64) {
	_, _ = a.Tree.Apply(w, &Change{Kind: Removed, Hashes: engine}) // cannot fail
}

// Match is Tree.Match after expired blocks have been removed.
func (a *Approx) Match(local []uint64, usable int, parts kv.MatchParts, dst []kv.Match) []kv.Match {
	if now := a.now().UnixNano(); now >= a.due.Load() {
		a.mu.Lock()
		a.expire(now)
		a.mu.Unlock()
	}
	return a.Tree.Match(local, usable, parts, dst)
}

// Routed records that a prompt with these local hashes is sent to w, where it
// counts as cached from now on.
func (a *Approx) Routed(w kv.WorkerKey, local []uint64) *Assumed {
	now := a.now().UnixNano()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire(now)
	c := a.Caches[w]
	if c == nil {
		c = &assumedCache{capacity: a.capacity[w], Pool: blockpool.New(0)}
		a.Caches[w] = c
	}
	p := &Assumed{index: a, worker: w, cache: c, held: make([]uint32, 0, len(local))}
	a.sequence = kv.SequenceHashes(a.sequence[:0], local)
	for _, h := range a.sequence {
		b := c.Pool.Find(h)
		if b == 0 {
			break
		}
		last := int64(inUse)
		if c.Pool.Refs(b) == 0 {
			last = c.used[b]
		}
		if n := len(p.lasts); n == 0 || p.lasts[n-1].at != last {
			p.lasts = append(p.lasts, lastUse{at: last})
		}
		c.Pool.Acquire(b)
		p.held = append(p.held, b)
		p.lasts[len(p.lasts)-1].upTo = len(p.held)
	}
	if p.found = len(p.held); p.found > 0 {
		p.answered = int(c.answers[p.held[p.found-1]])
	}

	a.evicted, a.blocks = a.evicted[:0], a.blocks[:0]
	for i := p.found; i < len(local); i++ {
		b := a.take(c)
		if b == 0 {
			break // the engine has no free block for it either
		}
		c.Pool.SetKey(b, a.sequence[i])
		c.used[b], c.answers[b] = 0, 0
		p.held = append(p.held, b)
		a.blocks = append(a.blocks, kv.StoredBlock{Engine: a.sequence[i], Local: local[i]})
	}
	a.remove(w, a.evicted)
	parent := uint64(0)
	if p.found > 0 {
		parent = a.sequence[p.found-1]
	}
	if _, err := a.Tree.Apply(w, &Change{Kind: Stored, Parent: parent, HasParent: p.found > 0, Blocks: a.blocks}); err != nil {
		a.clear(w) // someone else changed the Tree: begin again
	}
	a.expire(now)
	return p
}

// Expected returns how many blocks of the prompt were assumed to be cached, where answers and counters
// correct the index; 0 on nil.
func (p *Assumed) Expected() int {
	if p == nil || !p.index.corrected {
		return 0
	}
	return p.found
}

// Came returns the share of the assumed blocks that the engine has had, as it reports that many cached ones
// (-1: unknown). known is false where that says nothing: a block that was in flight may not have been computed.
func (p *Assumed) Came(cached int) (share float64, known bool) {
	expected := p.Expected()
	switch {
	case cached < 0 || expected == 0 || cached < expected-1 && p.lostAt(cached) == 0:
		return 0, false
	case cached >= expected-1:
		return 1, true
	}
	return float64(cached) / float64(expected), true
}

// End records the end of the request: its answer filled that many blocks, and the
// engine had cached blocks of the prompt in its cache (-1: unknown). Call it once.
// On nil it does nothing.
func (p *Assumed) End(answer, cached int) {
	answer = min(max(answer, 0), maxAnswer)
	p.ended(func(a *Approx, c *assumedCache, now int64) {
		if a.corrected {
			a.correct(p, cached)
		}
		if n := len(p.held); n > 0 {
			c.answers[p.held[n-1]] = max(c.answers[p.held[n-1]], int32(answer))
		}
		a.evicted = a.evicted[:0]
		for range answer {
			b := a.take(c)
			if b == 0 {
				break
			}
			c.Pool.SetKey(b, rand.Uint64())
			p.held = append(p.held, b)
		}
		for _, b := range slices.Backward(p.held) {
			c.used[b] = now
			c.Pool.Release(b)
		}
	})
}

// Fail is End for a request that failed on its worker. Blocks with which no other
// request has finished may not have been computed, so they are removed.
func (p *Assumed) Fail() {
	p.ended(func(a *Approx, c *assumedCache, now int64) {
		a.evicted = a.evicted[:0]
		for _, b := range slices.Backward(p.held) {
			finished := c.used[b] != 0
			if finished {
				c.used[b] = now
			}
			if c.Pool.Release(b); !finished && c.Pool.Refs(b) == 0 {
				a.evicted = append(a.evicted, c.Pool.Evict(b))
			}
		}
	})
}

// ended has release give back p's blocks, under the lock, and takes those off the
// index that it leaves in a.evicted. It does nothing if the worker was cleared
// meanwhile. now is in Unix ns.
func (p *Assumed) ended(release func(a *Approx, c *assumedCache, now int64)) {
	if p == nil {
		return
	}
	a := p.index
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.Caches[p.worker] != p.cache {
		return
	}
	now := a.now().UnixNano()
	release(a, p.cache, now)
	a.remove(p.worker, a.evicted)
	a.expire(now)
}

// correct compares an answer's cached tokens with the assumption.
func (a *Approx) correct(p *Assumed, cached int) {
	c := p.cache
	if at := p.lostAt(cached); at > 0 {
		a.evict(p.worker, c, at, math.MaxInt)
		if a.learns {
			c.learned = c.Pool.Held()
		}
	} else if more := cached - p.found - p.answered - 1; more > 0 && c.learned > 0 {
		c.learned += more
	}
}

// lostAt returns the last use of the blocks that the engine must have lost if it
// found only that many, Unix ns; 0: that proves nothing. One block less than assumed
// does not: engines compute the last token, and some the last block, again. Nor
// does one that was in flight, and may not have been computed.
func (p *Assumed) lostAt(cached int) int64 {
	if cached < 0 || cached >= p.found-1 {
		return 0
	}
	for _, last := range p.lasts {
		if cached < last.upTo && last.at != inUse {
			return last.at
		} else if cached < last.upTo {
			return 0
		}
	}
	return 0
}

// take returns a block with one reference and no key, or 0 if all that a worker
// has are in flight. Whose memory it was goes to a.evicted.
func (a *Approx) take(c *assumedCache) uint32 {
	for c.learned > 0 && c.Pool.Held() >= c.learned && c.Pool.Oldest() != 0 {
		a.evicted = append(a.evicted, c.Pool.Evict(c.Pool.Oldest()))
	}
	if size := c.Pool.Size(); c.Pool.FreeBlocks() == 0 && (c.capacity == 0 || size < c.capacity) {
		larger := max(firstPool, 2*size)
		if c.capacity > 0 {
			larger = min(larger, c.capacity)
		}
		c.Pool.Grow(larger)
		c.used = append(c.used, make([]int64, larger+1-len(c.used))...)
		c.answers = append(c.answers, make([]int32, larger+1-len(c.answers))...)
	}
	b, evicted, hasEvicted := c.Pool.Take()
	if hasEvicted {
		a.evicted = append(a.evicted, evicted)
	}
	return b
}

// evict removes at most limit blocks of w, those that were used no later than
// at (Unix ns), oldest first, and returns how many.
func (a *Approx) evict(w kv.WorkerKey, c *assumedCache, at int64, limit int) int {
	a.evicted = a.evicted[:0]
	for len(a.evicted) < limit {
		b := c.Pool.Oldest()
		if b == 0 || c.used[b] > at {
			break
		}
		a.evicted = append(a.evicted, c.Pool.Evict(b))
	}
	a.remove(w, a.evicted)
	return len(a.evicted)
}

// expire removes the blocks of workers beyond their time to live, and
// those of unknown size by their number of blocks.
func (a *Approx) expire(now int64) {
	due, blocks := int64(math.MaxInt64), 0
	for w, c := range a.Caches {
		if c.capacity > 0 && !a.ttlForAll {
			continue
		}
		a.evict(w, c, now-int64(a.ttl), math.MaxInt)
		if used, ok := c.oldest(); ok {
			due = min(due, used+int64(a.ttl))
		}
		if c.capacity == 0 {
			blocks += c.Pool.Held()
		}
	}
	a.due.Store(due)
	if blocks <= a.maxBlocks {
		return
	}
	for blocks > a.pruneTo {
		w, until, ok := a.oldest()
		if !ok {
			return
		}
		blocks -= a.evict(w, a.Caches[w], until, blocks-a.pruneTo)
	}
}

// oldest returns the worker of unknown size whose oldest block was used longest
// ago, and until when its blocks are older than any other's, Unix ns.
func (a *Approx) oldest() (oldest kv.WorkerKey, until int64, ok bool) {
	first := int64(math.MaxInt64)
	until = math.MaxInt64
	for w, c := range a.Caches {
		used, has := c.oldest()
		switch {
		case c.capacity > 0 || !has:
		case !ok || used < first || used == first && w.Compare(oldest) < 0:
			oldest, first, until, ok = w, used, first, true
		default:
			until = min(until, used)
		}
	}
	return oldest, until, ok
}

// oldest returns the earliest release time of a block; ok is false if
// all are in flight.
func (c *assumedCache) oldest() (used int64, ok bool) {
	b := c.Pool.Oldest()
	if b == 0 {
		return 0, false
	}
	return c.used[b], true
}
