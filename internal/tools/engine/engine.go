// Package engine simulates one vLLM or SGLang engine step by step: paged KV memory
// with prefix caching, continuous batching, chunked prefill and preemption.
package engine

import (
	"fmt"
	"slices"
	"time"

	"kvrouter/internal/base/blockpool"
	"kvrouter/internal/base/kv"
)

// Settings are the size and speed of a simulated engine.
type Settings struct {
	Blocks           int // KV-cache blocks
	BlockSize        int // tokens a block
	MaxSeqs          int // maximum requests in the batch
	MaxBatchedTokens int // maximum tokens computed in one pass
	Caching          Caching
	Timing           Timing
	Adapters         AdapterSettings
	Silent           bool // requests find nothing in the tiers below the cache
}

// Caching is the time from which later requests find a block.
type Caching uint8

// Kinds of Caching.
const (
	CacheFilled   Caching = iota // from the start of the pass that fills it: vLLM
	CacheComputed                // a prompt's from the end of the pass that computes it, an answer's from the end of its request: SGLang
	CacheNothing                 // never: SGLang's decode servers
)

// Timing is the duration of a pass: a polynomial of the prompt tokens that it
// computes, plus one of the share of the KV cache (0..1) that the tokens of decoding
// requests fill. Coefficients are in ms, the constant first. A part with nothing to
// do takes no time.
type Timing struct {
	Prefill   [3]float64 // ms, ms a token, ms a token²
	Decode    [3]float64 // ms, ms a full cache, ms a full cache²
	MinDecode float64    // ms; the decode part never takes less
	Speedup   float64    // all is divided by it; 0 counts as 1
}

// DefaultTiming returns the polynomials of Dynamo's mocker.
func DefaultTiming() Timing {
	return Timing{
		Prefill:   [3]float64{16.50142, 1.518344e-02, 4.209989e-07},
		Decode:    [3]float64{5.74, 54.01, -25.74},
		MinDecode: 1,
		Speedup:   1,
	}
}

// Pass returns the duration of a pass that computes prefill prompt tokens and
// decodes requests whose tokens fill the share usage of the cache; decoding is
// false if it decodes none.
func (t Timing) Pass(prefill int, usage float64, decoding bool) time.Duration {
	ms := 0.0
	if n := float64(prefill); prefill > 0 {
		ms += t.Prefill[0] + t.Prefill[1]*n + t.Prefill[2]*n*n
	}
	if decoding {
		u := min(1, usage)
		ms += max(t.MinDecode, t.Decode[0]+t.Decode[1]*u+t.Decode[2]*u*u)
	}
	return t.scaled(ms)
}

// scaled returns a time of the engine, ms.
func (t Timing) scaled(ms float64) time.Duration {
	if t.Speedup > 0 {
		ms /= t.Speedup
	}
	return time.Duration(ms * float64(time.Millisecond))
}

// Request is one request to a simulated engine.
type Request struct {
	// Blocks are the prompt's full blocks (Engine is the sequence hash, Local the
	// local hash) and then, if they are cached too, those that the output
	// will fill.
	Blocks    []kv.StoredBlock
	Prompt    int    // tokens, at least 1
	Output    int    // tokens to generate; less than 1 counts as 1
	Cached    int    // prompt tokens found in the cache when first admitted
	Reused    int    // the same, summed over all admissions: a preempted request is admitted again
	Generated int    // tokens emitted so far
	Tag       any    // the owner's
	Adapter   string // LoRA adapter; empty: none

	// Fetch means that another engine has computed the prompt: this one allocates
	// blocks for it, notifies its owner, waits for Fetched, and computes the last
	// token only.
	Fetch bool
	// Missing is the number of prompt tokens to fetch: those of blocks that are not
	// in the cache. Valid after the owner was notified.
	Missing int
	// Lower counts the blocks of Cached that were loaded from lower tiers, and Load those
	// of the load under way, or of the last one.
	Lower, Load kv.LowerBlocks
	// Served is the number of the prompt's first blocks that another engine sends: what
	// neither the cache nor the lower tiers have of them is loaded from there, with Peer.
	Served int
	Peer   Loads
	// Keep retains the blocks after the last token until Abort, so that another
	// engine can fetch them.
	Keep bool

	Held     []uint32 // blocks, in the order of the tokens
	uncached int      // tokens of the prompt that the cache did not have when it came
	computed int      // tokens whose KV is in Held
	step     int      // tokens that the running pass computes
	admitted bool     // has been in the batch
	running  bool     // is in the batch
	decoding bool     // its last pass emitted a token
	unkeyed  bool     // the cache was reset under it: it stores nothing more

	offloaded int  // first blocks that lower tiers have got
	counts    bool // the load under way counts as Cached
}

// Event is one change of a simulated engine's prefix cache, or of a tier below it:
// blocks stored or blocks removed.
type Event struct {
	Tier      kv.Tier
	Stored    bool
	Parent    uint64           // engine hash that Blocks follow
	HasParent bool             // false: Blocks start a prompt
	Blocks    []kv.StoredBlock // stored, one after the other; part of Request.Blocks
	First     int              // index of Blocks[0] in Request.Blocks
	Request   *Request         // owner of the prompt
	Removed   []uint64         // engine hashes; only valid during the call if the tier is the device
}

// Engine is the core of a simulated vLLM worker: paged blocks with prefix
// caching, continuous batching, chunked prefill, preemption. It has no clock and
// no lock: one goroutine starts passes with Begin and ends each with End after
// the time that Begin returned.
//
// A pass computes at most MaxBatchedTokens tokens: first those of the running
// requests in the order of their admission (one each if decoding, else what is
// left of the prompt), then those of waiting ones, first come first served; the
// first whose whole prompt does not fit into the free and the inactive blocks
// blocks the others. One of which a load for another brings blocks waits for that load,
// and the others go before it. A running request that finds no
// block preempts the one admitted last, which starts over later. Full blocks are
// in the cache as Settings.Caching says.
type Engine struct {
	Cfg     Settings
	Lower   []*Store // tiers below the cache, from the fastest on; they get a copy of every computed block
	events  func(Event)
	Pool    *blockpool.Pool
	running []*Request // in the order of admission
	waiting []*Request

	Fetch    func(*Request) // called with requests whose prompts must be fetched
	fetching []*Request     // they have blocks for it
	fetched  []*Request     // their prompts have come; the batch was full
	LoadNow  func(*Request) // called with requests of which lower tiers have blocks
	kept     []*Request     // ended ones that Keep their blocks

	AdapterLoads int      // since the start
	loaded       []string // LoRA adapters, the last used at the end

	Hold Hold // what a pause stops

	inPass  bool
	prefill int        // prompt tokens that the pass computes
	emitted []*Request // reused
	removed []uint64   // reused
}

// Hold is what a paused engine does not do.
type Hold uint8

const (
	HoldNothing Hold = iota // it is not paused
	HoldWaiting             // requests that wait are not admitted
	HoldAll                 // those that run stand still, too
)

// Retract puts all running requests back to the head of the queue, in their order. Their blocks are free.
func (e *Engine) Retract() {
	for len(e.running) > 0 {
		e.preemptLast()
	}
}

// New returns an idle engine with an empty cache and the tiers below it, from the fastest
// on. events is called for every change of the cache and of these tiers, in order; it may
// be nil.
func New(cfg Settings, events func(Event), lower ...*Store) *Engine {
	if events == nil {
		events = func(Event) {}
	}
	return &Engine{Cfg: cfg, Lower: lower, events: events, Pool: blockpool.New(cfg.Blocks)}
}

// Submit queues a request. It refuses a request larger than the cache, which the
// maximum model length of a real engine prevents.
func (e *Engine) Submit(r *Request) error {
	if r.Prompt < 1 {
		return fmt.Errorf("simulated request with %d prompt tokens: at least 1 is required", r.Prompt)
	}
	r.Output = max(1, r.Output)
	if need := e.blocksFor(r.Prompt + r.Output); need > e.Cfg.Blocks {
		return fmt.Errorf("simulated request of %d + %d tokens needs %d blocks of %d; the engine has %d",
			r.Prompt, r.Output, need, e.Cfg.BlockSize, e.Cfg.Blocks)
	}
	if r.uncached = r.Prompt; e.Cfg.Caching == CacheComputed { // only SGLang reports it
		cached, _ := e.found(r)
		r.uncached -= cached * e.Cfg.BlockSize
	}
	e.waiting = append(e.waiting, r)
	return nil
}

// found is how many of r's blocks the cache has, and how many of those no request
// holds. The engine computes the last token itself.
func (e *Engine) found(r *Request) (cached, inactive int) {
	longest := min(len(r.Blocks), (r.Prompt+r.Generated-1)/e.Cfg.BlockSize)
	for cached < longest {
		b := e.Pool.Find(r.Blocks[cached].Engine)
		if b == 0 {
			break
		}
		if e.Pool.Refs(b) == 0 {
			inactive++
		}
		cached++
	}
	return cached, inactive
}

// Abort removes a request from its queue. A finished request with Keep frees its
// blocks.
func (e *Engine) Abort(r *Request) {
	for _, queue := range []*[]*Request{&e.waiting, &e.running, &e.fetching, &e.fetched, &e.kept} {
		if takeOut(queue, r) {
			e.cacheComputed(r, r.computed)
			e.drop(r)
			return
		}
	}
}

// takeOut removes r from a queue and reports whether it was there.
func takeOut(queue *[]*Request, r *Request) bool {
	i := slices.Index(*queue, r)
	if i >= 0 {
		*queue = slices.Delete(*queue, i, i+1)
	}
	return i >= 0
}

// Begin starts a pass and returns its duration; busy is false if there is nothing
// to compute. Changes of the cache are reported before it returns.
func (e *Engine) Begin() (d time.Duration, busy bool) {
	if e.inPass {
		panic("simulated engine: a pass began inside a pass")
	}
	budget := e.Cfg.MaxBatchedTokens
	prefill, context, decoding, preempted := 0, 0, false, false
	if e.Hold == HoldAll {
		return 0, false
	}
	e.joinFetched()
	for i := 0; i < len(e.running); i++ {
		r := e.running[i]
		r.step = min(r.left(), budget)
		if r.step == 0 {
			continue
		}
		for r.running && !e.hold(r, r.computed+r.step+1) {
			e.preemptLast()
			preempted = true
		}
		if !r.running {
			break // it was the last one itself
		}
		budget -= r.step
		if r.decoding {
			decoding = true
			context += r.Prompt + r.Generated
			e.seal(r)
		} else {
			prefill += r.step
		}
	}
admission:
	for next := 0; e.Hold == HoldNothing && !preempted && budget > 0 && next < len(e.waiting) && len(e.running) < e.Cfg.MaxSeqs; {
		r := e.waiting[next]
		if e.waitsForSlot(r) {
			next++
			continue
		}
		if r.Fetch {
			if !e.beginFetch(r) {
				break
			}
			e.leaveWaiting(next)
			continue
		}
		switch e.beginLoad(r) {
		case loadBegun:
			e.leaveWaiting(next)
			continue
		case loadComing:
			next++
			continue
		case loadNeedsBlocks:
			break admission
		}
		if !e.admit(r, budget) {
			break
		}
		e.leaveWaiting(next)
		budget -= r.step
		prefill += r.step
	}
	if len(e.running) == 0 {
		return 0, false
	}
	e.inPass, e.prefill = true, prefill
	usage := float64(context) / float64(e.Cfg.Blocks*e.Cfg.BlockSize)
	return e.Cfg.Timing.Pass(prefill, usage, decoding) + e.Cfg.Timing.scaled(e.loadAdapters()), true
}

// End ends the pass and returns the requests that emitted one token, those with
// Generated equal to Output for the last time. The slice is valid until the
// next End.
func (e *Engine) End() (emitted []*Request) {
	if !e.inPass {
		panic("simulated engine: a pass ended that had not begun")
	}
	e.inPass = false
	e.emitted = e.emitted[:0]
	stay := e.running[:0]
	for _, r := range e.running {
		r.computed += r.step
		if r.step > 0 && !r.decoding {
			e.cacheComputed(r, min(r.computed, r.Prompt))
			e.offloadComputed(r, min(r.computed, r.Prompt))
		}
		if r.step > 0 && r.left() == 0 {
			r.Generated++
			r.decoding = true
			e.emitted = append(e.emitted, r)
		}
		r.step = 0
		if r.Generated < r.Output {
			stay = append(stay, r)
			continue
		}
		e.cacheComputed(r, r.computed)
		e.offloadComputed(r, r.computed)
		if r.Keep {
			r.running = false
			e.kept = append(e.kept, r)
		} else {
			e.drop(r)
		}
	}
	clear(e.running[len(stay):])
	e.running = stay
	return e.emitted
}

// Prefill returns the number of prompt tokens of the last pass begun.
func (e *Engine) Prefill() int { return e.prefill }

// Queued returns the tokens of the waiting prompts and, with CacheComputed, those
// that were not in the cache at the request's arrival.
func (e *Engine) Queued() (tokens, uncached int) {
	for _, r := range e.waiting {
		tokens += r.Prompt
		uncached += r.uncached
	}
	return tokens, uncached
}

// Load returns the number of requests in the batch, the number of waiting ones, and
// the share of the blocks that they use, 0..1.
func (e *Engine) Load() (running, waiting int, usage float64) {
	return len(e.running), len(e.waiting) + len(e.fetching) + len(e.fetched), float64(e.Pool.Active()) / float64(e.Cfg.Blocks)
}

// Reset empties the prefix cache. It reports no event: the owner publishes that all
// blocks are cleared. Running requests keep their blocks, but no later request finds
// those.
func (e *Engine) Reset() {
	e.Pool.Reset()
	for _, queue := range [][]*Request{e.running, e.fetched, e.kept} {
		for _, r := range queue {
			r.unkeyed = true
		}
	}
}

// admit puts r into the batch if there are blocks for all of its tokens, also
// those of later passes (vLLM's scheduler_reserve_full_isl); it takes those of
// this pass.
func (e *Engine) admit(r *Request, budget int) bool {
	if !e.holdCached(r) {
		return false
	}
	r.step = min(r.left(), budget)
	r.running = true
	e.running = append(e.running, r)
	if !e.hold(r, r.computed+r.step+1) {
		panic("simulated engine: counted blocks are missing")
	}
	return true
}

// holdCached takes for r the blocks that the cache has of it, if there are
// enough for the others too.
func (e *Engine) holdCached(r *Request) bool {
	cached, inactive := e.found(r)
	if e.blocksFor(r.Prompt+r.Generated+1)-cached > e.Pool.Available()-inactive {
		return false
	}
	if cap(r.Held) == 0 {
		r.Held = make([]uint32, 0, e.blocksFor(r.Prompt+r.Output))
	}
	for _, block := range r.Blocks[:cached] {
		b := e.Pool.Find(block.Engine)
		e.Pool.Acquire(b)
		r.Held = append(r.Held, b)
	}
	r.computed = cached * e.Cfg.BlockSize
	r.Reused += r.computed
	if !r.admitted {
		r.admitted = true
		r.Cached = r.computed
	}
	return true
}

// hold takes blocks until r's hold that many tokens, or as many as it will ever
// have, and reports the prompt blocks stored and removed. It returns
// false if there are not enough; then r may have got some of them.
func (e *Engine) hold(r *Request, tokens int) bool {
	need := e.blocksFor(min(tokens, r.Prompt+r.Output))
	if len(r.Held) >= need {
		return true
	}
	e.removed = e.removed[:0]
	keyed := min(len(r.Blocks), (r.Prompt+r.Generated)/e.Cfg.BlockSize)
	if r.unkeyed || e.Cfg.Caching != CacheFilled {
		keyed = 0
	}
	enough := true
	first := len(r.Held)
	var stored [][2]int // runs of new blocks; almost always one
	var one [1][2]int
	stored = one[:0]
	for i := first; i < need; i++ {
		if i < keyed {
			if b := e.Pool.Find(r.Blocks[i].Engine); b != 0 {
				e.Pool.Acquire(b)
				r.Held = append(r.Held, b)
				continue
			}
		}
		b, evicted, hasEvicted := e.Pool.Take()
		if b == 0 {
			enough = false
			break
		}
		if hasEvicted {
			e.removed = append(e.removed, evicted)
		}
		r.Held = append(r.Held, b)
		if i >= keyed {
			continue
		}
		e.Pool.SetKey(b, r.Blocks[i].Engine)
		if n := len(stored); n > 0 && stored[n-1][1] == i {
			stored[n-1][1] = i + 1
		} else {
			stored = append(stored, [2]int{i, i + 1})
		}
	}
	// A block may be evicted and then stored again by the same call, never the
	// other way round, because stored blocks are active.
	if len(e.removed) > 0 {
		e.events(Event{Removed: e.removed})
	}
	for _, run := range stored {
		e.tellStored(r, run[0], run[1])
	}
	return enough
}

// tellStored reports that blocks of r, from first to below end, are in the cache.
func (e *Engine) tellStored(r *Request, first, end int) { e.tellTier(kv.Device, r, first, end) }

// tellTier is tellStored of a tier.
func (e *Engine) tellTier(tier kv.Tier, r *Request, first, end int) {
	event := Event{Tier: tier, Stored: true, Blocks: r.Blocks[first:end], First: first, Request: r}
	if first > 0 {
		event.Parent, event.HasParent = r.Blocks[first-1].Engine, true
	}
	e.events(event)
}

// seal caches the block of r that the token about to be computed fills, if it is
// one of the output's.
func (e *Engine) seal(r *Request) {
	if e.Cfg.Caching != CacheFilled {
		return
	}
	i := (r.Prompt+r.Generated)/e.Cfg.BlockSize - 1
	if (r.Prompt+r.Generated)%e.Cfg.BlockSize == 0 && i < len(r.Blocks) && !r.unkeyed && e.key(r, i) {
		e.tellStored(r, i, i+1)
	}
}

// cacheComputed caches the full blocks of r's first tokens, which are computed,
// where that is when blocks come into the cache.
func (e *Engine) cacheComputed(r *Request, tokens int) {
	if e.Cfg.Caching == CacheComputed && !r.unkeyed {
		e.keyFirst(r, tokens/e.Cfg.BlockSize)
	}
}

// keyFirst caches the first blocks of r, which are full, and reports those that
// the cache did not have.
func (e *Engine) keyFirst(r *Request, blocks int) {
	blocks = min(len(r.Blocks), blocks)
	for i := 0; i < blocks; i++ {
		first := i
		for i < blocks && e.key(r, i) {
			i++
		}
		if i > first {
			e.tellStored(r, first, i)
		}
	}
}

// key caches block i of r, which is full, and reports whether the cache did not
// have it. Where it has, r continues with that copy: so the blocks before a cached
// one stay in the cache as long as it does.
func (e *Engine) key(r *Request, i int) bool {
	key := r.Blocks[i].Engine
	b := e.Pool.Find(key)
	if b == 0 {
		e.Pool.SetKey(r.Held[i], key)
		return true
	}
	if b != r.Held[i] { // else it was full when r took it
		e.Pool.Acquire(b)
		e.Pool.Release(r.Held[i])
		r.Held[i] = b
	}
	return false
}

// preemptLast puts the request admitted last back to the head of the queue.
func (e *Engine) preemptLast() {
	n := len(e.running) - 1
	r := e.running[n]
	e.running[n] = nil
	e.running = e.running[:n]
	e.drop(r)
	e.waiting = slices.Insert(e.waiting, 0, r)
}

// leaveWaiting takes the request at that place out of the queue.
func (e *Engine) leaveWaiting(at int) {
	if at == 0 {
		e.waiting = e.waiting[1:]
		return
	}
	e.waiting = slices.Delete(e.waiting, at, at+1)
}

// drop takes its blocks from r, the end of the prompt first, so that the end
// of a chain is evicted before its start.
func (e *Engine) drop(r *Request) {
	for _, b := range slices.Backward(r.Held) {
		e.Pool.Release(b)
	}
	r.Held = r.Held[:0]
	r.computed, r.step = 0, 0
	r.running, r.decoding, r.unkeyed = false, false, false
	r.offloaded = 0
}

// left is how many tokens of r are still to be computed before it emits one.
func (r *Request) left() int { return r.Prompt + r.Generated - r.computed }

func (e *Engine) blocksFor(tokens int) int {
	return (tokens + e.Cfg.BlockSize - 1) / e.Cfg.BlockSize
}
