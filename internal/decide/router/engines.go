package router

import (
	"cmp"
	"slices"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policy"
)

const (
	// restsMost bounds the wait for a worker that rests, and restsQueued the requests that wait for some: a trainer
	// sends a whole step's, and repeats none.
	restsMost, restsQueued = 4 * time.Hour, 1 << 16
	// resetTold is the time for which an engine has worked after a reset, from which on its KV events are known not to
	// report it.
	resetTold = 5 * time.Second
)

// engine is what trainers have done to the engine of one rank, beside the state in its load.
type engine struct {
	version string             // of its weights; empty: unknown
	state   kv.EngineState     // without what calls under way do
	calls   []*kv.EngineChange // that are under way
	changed time.Time          // when the last of them ended
	resets  int                // of its cache that its KV events have not reported yet
	worked  time.Time          // resets: when the engine first showed life since the last of them
	cleared time.Time          // when its cache was last emptied
}

// now is the state with what the calls under way do.
func (e *engine) now() kv.EngineState {
	state := e.state
	for _, call := range e.calls {
		state |= call.Set | call.Meanwhile
	}
	return state
}

// forgets reports whether the worker's cache is empty in spite of what was found of p in the index.
func (e *engine) forgets(p *prompt) bool {
	return e.resets > 0 || p.matchedAt.Before(e.cleared)
}

// lives notes that the engine works. Then it publishes events.
func (e *engine) lives(now time.Time) {
	switch {
	case e.resets == 0 || len(e.calls) > 0:
	case e.worked.IsZero():
		e.worked = now
	case now.Sub(e.worked) > resetTold:
		e.resets = 0
	}
}

// runs reports whether a worker may be sent p now, as far as trainers decide that.
func (d *decider) runs(p *prompt, w kv.WorkerKey, load *policy.Load) bool {
	return !load.State.Rests() && d.router.fleet.takes(p.Versions, w)
}

// waitsForBest reports whether p waits for the worker that has most of it, as that one rests and p's client wants it.
func (d *decider) waitsForBest(p *prompt) bool {
	if !p.WaitsForPaused {
		return false
	}
	best := &d.candidates[0]
	for i := range d.candidates {
		if c := &d.candidates[i]; c.Overlap > best.Overlap {
			best = c
		}
	}
	if best.Overlap == 0 || !best.Load.State.Rests() {
		return false
	}
	d.candidates[0] = *best
	d.candidates = d.candidates[:1]
	return true
}

// limit is the most requests that may wait when p comes.
func (a *Admission) limit(p *prompt) int {
	if a.router.fleet.resting > 0 || p.Versions.Restricts() {
		return max(a.router.settings.RouterQueueLimit, restsQueued)
	}
	return a.router.settings.RouterQueueLimit
}

// restsFor returns how much longer w may wait in the queue because all workers that could serve it rest.
func (a *Admission) restsFor(w *waiter) time.Duration {
	r := a.router
	r.mu.Lock()
	defer r.mu.Unlock()
	runs, rests := false, false
	for i := range r.fleet.targets {
		if t := &r.fleet.targets[i]; w.prompt.mayUse(t) {
			well := r.decider.runs(&w.prompt, t.Key, r.fleet.targetLoads[i].load)
			runs, rests = runs || well, rests || !well
		}
	}
	if !rests || runs && !w.prompt.WaitsForPaused {
		return 0
	}
	return min(max(time.Second, r.settings.RouterQueueTimeout), restsMost-r.now().Sub(w.since))
}

// Engine returns what trainers have done to the engine of a worker's rank: its state, and the version of its weights, as
// far as that is known.
func (r *Router) Engine(w kv.WorkerKey) (state kv.EngineState, version string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at, up := r.fleet.target(w); up {
		load := r.fleet.targetLoads[at].workerLoad
		state, version = load.State, load.engine.version
	}
	return state, version
}

// EngineReports notes what the engine of that incarnation of a worker has answered to a question of that time. Calls
// that change it are known better.
func (h *Health) EngineReports(worker uint64, generation int, asked time.Time, report kv.EngineReport) {
	h.change(worker, func(t *kv.Target, load *workerLoad, now time.Time) {
		e := &load.engine
		if t.Generation != generation || len(e.calls) > 0 || asked.Before(e.changed) {
			return
		}
		state := e.state&^report.Knows | report.State&report.Knows
		if state&^e.state&kv.Asleep != 0 { // its memory was released by a call that has not passed here
			e.resets, e.worked = e.resets+1, time.Time{}
			h.emptied(t, e, now)
		}
		e.state, e.version = state, cmp.Or(report.Version, e.version)
	})
}

// Control notes that a call that changes a worker's engine is about to be sent. ended must follow, with what came of it.
func (h *Health) Control(worker uint64, change kv.EngineChange) (ended func(ok bool)) {
	var generation int
	call := &change
	h.change(worker, func(t *kv.Target, load *workerLoad, _ time.Time) {
		e := &load.engine
		generation = t.Generation
		e.calls = append(e.calls, call)
		if call.Resets {
			e.resets, e.worked = e.resets+1, time.Time{}
		}
	})
	return func(ok bool) {
		h.change(worker, func(t *kv.Target, load *workerLoad, now time.Time) {
			e := &load.engine
			at := slices.Index(e.calls, call)
			if t.Generation != generation || at < 0 {
				return
			}
			e.calls = slices.Delete(e.calls, at, at+1)
			e.changed = now
			if !ok {
				if call.Resets {
					e.resets = max(0, e.resets-1)
				}
				return
			}
			e.state = (e.state | call.Set) &^ call.Clear
			e.version = cmp.Or(call.Version, e.version)
			if call.Resets {
				h.emptied(t, e, now)
			}
		})
	}
}

// emptied ends a reset of a cache that is not known by events: none will report it.
func (h *Health) emptied(t *kv.Target, e *engine, now time.Time) {
	if t.Known != kv.Exact {
		_, _ = h.router.index.Apply(t.Key, &radix.Change{Kind: radix.DeviceCleared}) // cannot fail
		e.resets, e.cleared = max(0, e.resets-1), now
	}
}

// change calls f with each rank of a worker, and has the router follow.
func (h *Health) change(worker uint64, f func(t *kv.Target, load *workerLoad, now time.Time)) {
	r := h.router
	r.mu.Lock()
	defer r.unlock()
	now, ranks, changed := r.now(), r.fleet.ranksOf(worker), false
	for i := range ranks {
		t := &ranks[i]
		load := r.fleet.loads.of(t.Key)
		state, version := load.State, load.engine.version
		f(t, load, now)
		load.State = load.engine.now()
		h.outliers.Rest(t.Key, load.State.Rests(), now)
		changed = changed || load.State != state || load.engine.version != version
	}
	if changed { // reports mostly repeat what is known
		r.fleet.note()
		r.Admission.dispatch(now)
	}
}

// Cleared notes that a rank's KV events have reported its cache as empty.
func (h *Health) Cleared(w kv.WorkerKey) {
	r := h.router
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, up := r.fleet.target(w); up {
		e := &r.fleet.loads.of(w).engine
		e.resets, e.cleared = max(0, e.resets-1), r.now()
	}
}

// takes reports whether the weights of a worker are such that a policy takes.
func (f *fleet) takes(v VersionPolicy, w kv.WorkerKey) bool {
	return !v.Restricts() || v.takes(f.loads.of(w).engine.version, f.latest)
}
