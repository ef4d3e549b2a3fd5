package router

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// Check reports the first violated invariant of the load accounting. It recounts
// everything from the bookings. Tests call it after changes.
func (r *Router) Check() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.fleet.loads
	if len(r.fleet.targetLoads) != len(r.fleet.targets) {
		return fmt.Errorf("%d books are open, %d workers are up", len(r.fleet.targetLoads), len(r.fleet.targets))
	}
	for i := range r.fleet.targets {
		t, load, cordoned := &r.fleet.targets[i], &r.fleet.targetLoads[i], r.Health.isCordoned(r.fleet.targets[i].Key.Worker)
		if load.workerLoad != l.byWorker[t.Key] || load.number != load.workerLoad.number || t.Cordoned != cordoned {
			return fmt.Errorf("worker %v: its books are not those of its place, or it is cordoned %v where %v is noted", t.Key, t.Cordoned, cordoned)
		}
	}
	for now, i := r.now(), 0; i < len(r.fleet.targets) && now.Before(l.stale); i++ {
		if load := r.fleet.targetLoads[i].load; load.Fresh != isFresh(load, now) || !load.Fresh && load.Foreign != 0 {
			return fmt.Errorf("worker %v: its load of %v is noted to be fresh %v, %d requests in it are foreign, and it is %v",
				r.fleet.targets[i].Key, load.At, load.Fresh, load.Foreign, now)
		}
	}
	if known := len(r.sessions.byHash); known != r.sessions.order.Len() || known > r.settings.SessionLimit {
		return fmt.Errorf("%d sessions can be found, %d are in order, and at most %d may be",
			known, r.sessions.order.Len(), r.settings.SessionLimit)
	}
	type recount struct {
		inFlight, prefill, context, awaited int
		prefills                            []policy.Prefill
		requests                            map[uint64]uint32
		output                              float64
	}
	counts := map[kv.WorkerKey]*recount{}
	var last *Booking
	named := 0
	charged := 0
	served := map[kv.WorkerKey]int{}
	own := map[uint64]int{}
	for b := l.oldest; b != nil; last, b = b, b.newer {
		switch {
		case b.ended.Load():
			return fmt.Errorf("an ended booking of %v is still in the list", b.worker)
		case b.older != last || last != nil && b.heard.Before(last.heard):
			return fmt.Errorf("the list of bookings is not in order at %v", b.worker)
		case b.id != "" && l.byID[b.id] != b:
			return fmt.Errorf("booking %s cannot be found by its id", b.id)
		}
		if b.id != "" {
			named++
		}
		if b.charge != nil {
			charged++
		}
		c := counts[b.worker]
		if c == nil {
			c = &recount{requests: map[uint64]uint32{}}
			counts[b.worker] = c
		}
		if !b.computed {
			served[b.pull.From] += b.pull.Tokens
		}
		c.inFlight++
		if !b.remote {
			own[b.worker.Worker]++
		}
		c.output += b.outputWeight
		switch {
		case b.computed:
			c.context += b.prompt
		case b.leg == kv.LegDecode:
			c.awaited += b.prompt
		default:
			c.prefill += b.uncached
			c.prefills = append(c.prefills, b.prefill())
		}
		for _, h := range b.sequence {
			c.requests[h]++
		}
	}
	if !maps.Equal(own, l.own) {
		return fmt.Errorf("%v requests of this router are in flight by worker, %v are counted", own, l.own)
	}
	if last != l.newest || named != len(l.byID) {
		return fmt.Errorf("the list ends at %p, not %p; %d of %d named bookings are in it", last, l.newest, named, len(l.byID))
	}
	if r.Admission.fair != nil {
		for _, s := range r.Admission.fair.States() {
			charged -= s.Running
		}
		if charged != 0 {
			return fmt.Errorf("%d more bookings are charged than tenants have requests", charged)
		}
		if err := r.Admission.fair.Check(); err != nil {
			return err
		}
	}
	entries := 0
	numbers := slices.Clone(l.unused)
	for w, load := range l.byWorker {
		numbers = append(numbers, load.number)
		c := counts[w]
		if c == nil {
			c = &recount{}
			if load.gone {
				return fmt.Errorf("worker %v is gone and has no bookings, but was not dropped", w)
			}
		}
		delete(counts, w)
		if load.InFlight != c.inFlight || load.Load.PrefillTokens != c.prefill || load.ContextTokens != c.context ||
			load.AwaitedTokens != c.awaited || len(load.Prefills) != len(c.prefills) {
			return fmt.Errorf("worker %v: in flight %d, prefill %d, context %d, awaited %d, %d prompts; recounted %+v",
				w, load.InFlight, load.Load.PrefillTokens, load.ContextTokens, load.AwaitedTokens, len(load.Prefills), *c)
		}
		if load.served > served[w] {
			return fmt.Errorf("worker %v serves %d tokens to others, which pull %d", w, load.served, served[w])
		}
		fetching := 0
		for _, p := range c.prefills {
			if !slices.Contains(load.Prefills, p) {
				return fmt.Errorf("worker %v lacks prompt %v", w, p)
			}
			if p.Fetches() {
				fetching++
			}
		}
		if int(load.Fetching) != fetching {
			return fmt.Errorf("worker %v: %d prompts are counted that are fetched, %d are", w, load.Fetching, fetching)
		}
		excess := 0.0
		for h, weight := range load.weights {
			if c.requests[h] == 0 {
				return fmt.Errorf("worker %v weighs a block that no worker has", w)
			}
			excess += weight - 1
		}
		if load.blocks != len(c.requests) || math.Abs(load.excess-excess) > 1e-6 || math.Abs(load.output-c.output) > 1e-6 {
			return fmt.Errorf("worker %v: %d blocks, excess %v, output %v; recounted %d, %v, %v",
				w, load.blocks, load.excess, load.output, len(c.requests), excess, c.output)
		}
		for h, n := range c.requests {
			if got := l.active.requests(h, load.number); got != n {
				return fmt.Errorf("worker %v counts %d requests with a block that %d have", w, got, n)
			}
		}
		entries += len(c.requests)
	}
	if len(counts) > 0 {
		return fmt.Errorf("bookings on unknown workers: %v", counts)
	}
	if entries != l.active.pairs {
		return fmt.Errorf("%d active blocks are counted, %d are booked", l.active.pairs, entries)
	}
	slices.Sort(numbers)
	for i, n := range numbers {
		if n != uint32(i) {
			return fmt.Errorf("worker numbers %v are not counted from 0", numbers)
		}
	}
	return nil
}

// ReportsCached reports whether an answer of w has reported cached tokens so far. Tests call it.
func (r *Router) ReportsCached(w kv.WorkerKey) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fleet.loads.of(w).reportsCached
}
