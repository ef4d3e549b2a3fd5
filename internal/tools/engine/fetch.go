package engine

import "slices"

// beginFetch takes the blocks for a prompt that is computed elsewhere and notifies
// the owner, which must call Fetched. It returns false if there are not enough.
func (e *Engine) beginFetch(r *Request) bool {
	if !e.holdCached(r) {
		return false
	}
	r.unkeyed = true // blocks that have not come are not found
	r.Missing = r.Prompt - r.computed
	e.fetching = append(e.fetching, r)
	if !e.hold(r, r.Prompt+1) {
		panic("simulated engine: counted blocks are missing")
	}
	e.Fetch(r)
	return true
}

// Fetched ends the fetching of a prompt. If it succeeded, the full blocks are in
// the cache from now on, and the request joins the batch when that has room;
// otherwise the engine computes the prompt. A request that was aborted meanwhile is
// ignored.
func (e *Engine) Fetched(r *Request, came bool) {
	if !takeOut(&e.fetching, r) {
		return
	}
	r.Fetch = false
	if !came {
		r.Missing = 0
		e.drop(r)
		e.waiting = slices.Insert(e.waiting, 0, r)
		return
	}
	r.unkeyed = false
	r.computed, r.Cached, r.decoding = r.Prompt-1, r.Prompt, true
	if e.Cfg.Caching != CacheNothing {
		e.keyFirst(r, r.Prompt/e.Cfg.BlockSize)
	}
	e.fetched = append(e.fetched, r)
}

// joinFetched puts the requests into the batch whose prompts have come. They go
// before those that wait: they have their blocks already.
func (e *Engine) joinFetched() {
	for len(e.fetched) > 0 && len(e.running) < e.Cfg.MaxSeqs {
		r := e.fetched[0]
		e.fetched = e.fetched[1:]
		r.running = true
		e.running = append(e.running, r)
	}
}
