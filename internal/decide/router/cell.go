package router

import (
	"slices"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/decide/policy"
)

// cell is the summary of a router whose workers are below it.
type cell struct {
	key   kv.WorkerKey
	holds *summary.View
}

// ShowCell stores the report and the summary of a router whose workers are below it. It has no
// effect on a worker that is not up.
func (r *Router) ShowCell(w kv.WorkerKey, report policy.CellReport, holds *summary.View) {
	r.mu.Lock()
	defer r.unlock()
	at, up := r.fleet.target(w)
	if !up {
		return
	}
	load := r.fleet.targetLoads[at]
	if load.Cell == nil {
		load.Cell = new(policy.Cell)
		cells := []cell{{w, holds}}
		if before := r.fleet.cells.Load(); before != nil {
			cells = append(cells, *before...)
		}
		slices.SortFunc(cells, func(a, b cell) int { return a.key.Compare(b.key) })
		r.fleet.cells.Store(&cells)
	}
	load.Cell.CellReport = report
	before := load.Published
	r.fleet.loads.publish(w, report.Load, r.now())
	if r.Admission.fair != nil {
		r.Admission.learnRoom(at, before)
	}
	r.Admission.dispatch(r.now())
}

// loseCell forgets the summary of a router that is down. The caller holds the lock.
func (f *fleet) loseCell(w kv.WorkerKey) {
	before := f.cells.Load()
	if before == nil {
		return
	}
	if cells := slices.DeleteFunc(slices.Clone(*before), func(c cell) bool { return c.key == w }); len(cells) > 0 {
		f.cells.Store(&cells)
	} else {
		f.cells.Store(nil)
	}
}

// matchCells appends to dst, from start on by worker, the number of leading blocks of a prompt that
// each cell reports.
func (f *fleet) matchCells(dst []kv.Match, start int, local []uint64) []kv.Match {
	cells := f.cells.Load()
	if cells == nil || len(local) == 0 {
		return dst
	}
	before := len(dst)
	sequence := kv.SequenceHashes(make([]uint64, 0, len(local)), local)
	for _, c := range *cells {
		if blocks := c.holds.Run(sequence); blocks > 0 {
			dst = append(dst, kv.Match{Worker: c.key, Blocks: blocks})
		}
	}
	if len(dst) > before && before > start {
		dst = dst[:start+len(radix.Longest(dst[start:]))]
	}
	return dst
}

// Found records the tokens of the prompt that a cell found cached on the worker that it chose.
func (b *Booking) Found(tokens int) {
	b.router.mu.Lock()
	defer b.router.mu.Unlock()
	if !b.ended.Load() {
		b.router.fleet.loads.of(b.worker).Cell.Found(tokens, b.device*b.unit)
	}
}

// Waits predicts the delay of the first token of a new request of each class as Wait does, behind
// those ahead of it in the router's queue. Not up: no worker accepts requests.
func (a *Admission) Waits() (waits [len(fair.Classes)]time.Duration, up bool) {
	r := a.router
	r.mu.Lock()
	defer r.unlock()
	now := r.now()
	r.expire(now)
	wait, workers := a.shortestWait(a.newLeg(), now)
	if workers == 0 {
		return waits, false
	}
	for i, class := range fair.Classes {
		waits[i] = a.waitBehind(class, wait, workers, now)
	}
	return waits, true
}

// Sum is the load of all workers of a router.
type Sum struct {
	Workers int     // ranks that are up, take prompts and get new requests
	Running int     // requests in their engines, and those in flight
	Waiting int     // in the engines' queues and in the router's
	Usage   float64 // mean share of their KV caches in use, as published
	Blocks  int     // of their KV caches, as far as known
	Context int     // policy.Load.Context of all, tokens
}

// Sum sums up the load of the workers that take whole requests or prompts.
func (r *Router) Sum() (s Sum) {
	r.mu.Lock()
	defer r.unlock()
	now, request := r.now(), Request{Leg: r.Admission.newLeg()}
	for i := range r.fleet.targets {
		t, load := &r.fleet.targets[i], r.fleet.targetLoads[i].asOf(now)
		if !request.mayUse(t) {
			continue
		}
		workers := 1
		if load.Cell != nil {
			workers = max(1, load.Cell.Workers)
		}
		s.Workers += workers
		s.Blocks += t.TotalBlocks
		s.Context += load.Context()
		waiting := 0
		if load.Fresh {
			waiting = load.Waiting
			s.Usage += float64(workers) * policy.Finite(load.KVUsage)
		}
		s.Waiting += waiting
		s.Running += max(0, load.InFlight+load.Foreign-waiting)
	}
	if s.Workers > 0 {
		s.Usage /= float64(s.Workers)
	}
	r.Admission.eachWaiting(func(*waiter) { s.Waiting++ })
	return s
}

// newLeg is the leg whose wait new requests are given: with pairs, that of
// the prompt. The caller holds the lock.
func (a *Admission) newLeg() kv.Leg {
	takes := func(leg kv.Leg) bool {
		request := Request{Leg: leg}
		return a.router.fleet.has(request.mayUse)
	}
	if takes(kv.LegPrefill) && takes(kv.LegDecode) {
		return kv.LegPrefill
	}
	return kv.LegWhole
}

// Now returns the time of the clock of the router's deadlines.
func (r *Router) Now() time.Time { return r.now() }
