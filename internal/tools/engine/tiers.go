package engine

import (
	"slices"
	"sync"
	"time"

	"kvrouter/internal/base/blockpool"
	"kvrouter/internal/base/kv"
)

// Store is a tier below the cache of a simulated engine, or of several that share it:
// blocks by engine hash, the least recently used evicted first. It is safe for
// concurrent use.
type Store struct {
	// Tier is where the blocks are, and Loads how long one takes to load.
	Tier  kv.Tier
	Loads Loads
	// Unpublished means that evictions are not reported, as files are deleted.
	Unpublished bool
	// Shared means that several engines have it.
	Shared bool

	mu   sync.Mutex // guards pool
	pool *blockpool.Pool
}

// Loads is the time that a load from a tier takes.
type Loads struct {
	Fixed         time.Duration // of each load
	Bandwidth     float64       // GB/s; a GB is 10⁹ bytes. 0: unlimited
	BytesPerToken int
}

// Takes returns the time to move the KV cache of that many tokens, without Fixed.
func (l Loads) Takes(tokens int) time.Duration {
	if l.Bandwidth <= 0 {
		return 0
	}
	return Handover{Bandwidth: l.Bandwidth, BytesPerToken: l.BytesPerToken}.Takes(tokens)
}

// TierSettings are those of a tier of each engine, or of all together.
type TierSettings struct {
	Tier                kv.Tier
	Blocks              int
	Loads               Loads
	Unpublished, Shared bool
}

// PeerSettings are those of pulls from other engines' host memory.
type PeerSettings struct {
	Loads            // Bandwidth 0: no pulls
	Failures float64 // share of the pulls of which nothing comes
}

// Stores returns the empty tiers of an engine. Those that it shares are the ones of
// shared, which gets them if it has none.
func Stores(tiers []TierSettings, shared map[kv.Tier]*Store) []*Store {
	var stores []*Store
	for _, t := range tiers {
		s := shared[t.Tier]
		if s == nil || !t.Shared {
			s = NewStore(t.Tier, t.Blocks, t.Loads)
			s.Unpublished, s.Shared = t.Unpublished, t.Shared
		}
		if t.Shared {
			shared[t.Tier] = s
		}
		stores = append(stores, s)
	}
	return stores
}

// NewStore returns an empty tier of that many blocks.
func NewStore(tier kv.Tier, blocks int, loads Loads) *Store {
	return &Store{Tier: tier, Loads: loads, pool: blockpool.New(blocks)}
}

// Has reports whether a block is in the tier.
func (s *Store) Has(hash uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pool.Find(hash) != 0
}

// Leading returns how many of the blocks, from the first on, are in the tier.
func (s *Store) Leading(blocks []kv.StoredBlock) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n < len(blocks) && s.pool.Find(blocks[n].Engine) != 0 {
		n++
	}
	return n
}

// Held returns the number of blocks in the tier.
func (s *Store) Held() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pool.Held()
}

// Reset empties the tier.
func (s *Store) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pool.Reset()
}

// keep stores blocks of a prompt, one after the other, and returns which of them were
// not in the tier, and what had to leave it. The first blocks stay longest, because
// the others are of no use without them.
func (s *Store) keep(blocks []kv.StoredBlock) (stored []int, evicted []uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, block := range blocks {
		if s.pool.Find(block.Engine) == 0 {
			stored = append(stored, i)
		}
	}
	stored = stored[:min(len(stored), s.pool.Size())]
	held := make([]uint32, 0, len(blocks))
	for _, block := range blocks { // what is used now is evicted last
		if b := s.pool.Find(block.Engine); b != 0 {
			s.pool.Acquire(b)
			held = append(held, b)
		}
	}
	for _, i := range stored {
		b, old, evicts := s.pool.Take()
		if b == 0 {
			stored = stored[:slices.Index(stored, i)]
			break
		}
		if evicts {
			evicted = append(evicted, old)
		}
		s.pool.SetKey(b, blocks[i].Engine)
		held = append(held, b)
	}
	for _, b := range slices.Backward(held) {
		s.pool.Release(b)
	}
	return stored, evicted
}

// continued counts the blocks that continue r's first cached ones in the lower tiers,
// each in the fastest one that has it. Those of another engine are external.
func (e *Engine) continued(r *Request, cached int) (found [len(kv.LowerTiers)]int) {
	if e.Cfg.Silent {
		return found
	}
	longest := min(len(r.Blocks), (r.Prompt+r.Generated-1)/e.Cfg.BlockSize)
	for i := cached; i < longest; i++ {
		at := slices.IndexFunc(e.Lower, func(s *Store) bool { return s.Has(r.Blocks[i].Engine) })
		if at < 0 && i < r.Served {
			found[kv.External-kv.Host]++
			continue
		}
		if at < 0 {
			break
		}
		found[e.Lower[at].Tier-kv.Host]++
	}
	return found
}

// lowerBlocks is found under the names of the tiers.
func lowerBlocks(found [len(kv.LowerTiers)]int) kv.LowerBlocks {
	return kv.LowerBlocks{Host: int32(found[0]), Disk: int32(found[1]), External: int32(found[2])}
}

// loadState is what became of the load of a request from the lower tiers.
type loadState uint8

const (
	loadNothing     loadState = iota // they have nothing of it
	loadBegun                        // the owner was notified
	loadComing                       // blocks of it are being loaded for another request
	loadNeedsBlocks                  // there are not enough blocks
)

// beginLoad takes blocks for what the lower tiers have of r's prompt, and notifies the
// owner, which must call Loaded. No block is loaded twice at a time, as in vLLM's
// OffloadingConnector (_chunks_being_loaded).
func (e *Engine) beginLoad(r *Request) loadState {
	if len(e.Lower) == 0 && r.Served == 0 {
		return loadNothing
	}
	cached, _ := e.found(r)
	found := lowerBlocks(e.continued(r, cached))
	switch {
	case found.Total() == 0:
		return loadNothing
	case slices.ContainsFunc(e.fetching, func(other *Request) bool { return e.brings(other, r, cached, cached+found.Total()) }):
		return loadComing
	}
	r.counts = !r.admitted
	if !e.holdCached(r) {
		return loadNeedsBlocks
	}
	if r.Load = found; r.counts {
		r.Lower = found
	}
	r.unkeyed = true // blocks that have not come are not found
	if !e.hold(r, r.computed+found.Total()*e.Cfg.BlockSize) {
		panic("simulated engine: counted blocks are missing")
	}
	e.fetching = append(e.fetching, r)
	e.LoadNow(r)
	return loadBegun
}

// brings reports whether the load of another request brings blocks of r's, of those from
// first to below end. Prompts with an equal block are equal up to it.
func (e *Engine) brings(other, r *Request, first, end int) bool {
	from := other.computed / e.Cfg.BlockSize
	at := max(first, from)
	return at < min(end, from+other.Load.Total()) && other.Blocks[at].Engine == r.Blocks[at].Engine
}

// LoadTime returns how long the load of a request takes, without those before it.
func (e *Engine) LoadTime(r *Request) (d time.Duration) {
	e.EachLoad(r, func(s *Store, tokens int) { d += s.Loads.Fixed + s.Loads.Takes(tokens) })
	return d
}

// EachLoad calls f with the tokens that the load of a request moves out of each tier. What
// comes from a slower tier passes through the faster ones.
func (e *Engine) EachLoad(r *Request, f func(s *Store, tokens int)) {
	blocks := 0
	if r.Served > 0 {
		if blocks = r.Load.Of(kv.External); blocks > 0 {
			f(&Store{Tier: kv.External, Loads: r.Peer}, blocks*e.Cfg.BlockSize)
		}
	}
	for _, s := range slices.Backward(e.Lower) {
		if blocks += r.Load.Of(s.Tier); blocks > 0 {
			f(s, blocks*e.Cfg.BlockSize)
		}
	}
}

// Loaded ends the load of a request from the lower tiers. Its blocks are in the cache
// from now on, those of slower tiers in the faster ones too, and the request joins the
// batch when that has room. A request that was aborted meanwhile is ignored.
func (e *Engine) Loaded(r *Request) {
	if !takeOut(&e.fetching, r) {
		return
	}
	tokens := r.Load.Total() * e.Cfg.BlockSize
	r.unkeyed = false
	r.computed += tokens
	r.Reused += tokens
	if r.counts {
		r.Cached = r.computed
	}
	e.offload(r, r.computed/e.Cfg.BlockSize)
	if e.Cfg.Caching != CacheNothing {
		e.keyFirst(r, r.computed/e.Cfg.BlockSize)
	}
	e.fetched = append(e.fetched, r)
}

// offloadComputed is offload of the full blocks of r's first tokens.
func (e *Engine) offloadComputed(r *Request, tokens int) {
	if len(e.Lower) > 0 && !r.unkeyed {
		e.offload(r, tokens/e.Cfg.BlockSize)
	}
}

// offload copies the first blocks of r, which are computed, to the lower tiers that do
// not have them. vLLM leaves the blocks of answers out.
func (e *Engine) offload(r *Request, blocks int) {
	if e.Cfg.Caching == CacheFilled {
		blocks = min(blocks, r.Prompt/e.Cfg.BlockSize)
	}
	if blocks = min(blocks, len(r.Blocks)); blocks <= r.offloaded {
		return
	}
	r.offloaded = blocks
	for _, s := range e.Lower {
		stored, evicted := s.keep(r.Blocks[:blocks])
		if len(evicted) > 0 && !s.Unpublished {
			e.events(Event{Tier: s.Tier, Removed: evicted})
		}
		for len(stored) > 0 {
			n := 1
			for n < len(stored) && stored[n] == stored[0]+n {
				n++
			}
			e.tellTier(s.Tier, r, stored[0], stored[0]+n)
			stored = stored[n:]
		}
	}
}

// ResetLower empties the lower tiers of the engine.
func (e *Engine) ResetLower() {
	for _, s := range e.Lower {
		s.Reset()
	}
}
