package router

import (
	"cmp"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

const (
	// restsMost bounds the wait for a worker that rests, and restsQueued the requests that wait for some: a trainer
	// sends a whole step's, and repeats none.
	restsMost, restsQueued = 4 * time.Hour, 1 << 16
	// resetTold is the time for which an engine has worked after a reset, from which on its KV events are known not to
	// tell of it.
	resetTold = 5 * time.Second
)

// engine is what trainers have done to the engine of one rank, beside the state of its target.
type engine struct {
	calls   int       // that change it and are under way
	changed time.Time // when the last of them ended
	resets  int       // of its cache, of which its KV events have not told yet
	worked  time.Time // resets: when the engine first showed life since the last of them
	cleared time.Time // when its cache was last emptied
}

// forgets reports whether the worker's cache is empty in spite of what was found of p in the index.
func (e *engine) forgets(p *prompt) bool {
	return e.resets > 0 || p.matchedAt.Before(e.cleared)
}

// lives notes that the engine works. Then it publishes events.
func (e *engine) lives(now time.Time) {
	switch {
	case e.resets == 0 || e.calls > 0:
	case e.worked.IsZero():
		e.worked = now
	case now.Sub(e.worked) > resetTold:
		e.resets = 0
	}
}

// runs reports whether a worker may be sent p now, as far as trainers decide that.
func (d *decider) runs(p *prompt, t *kv.Target) bool {
	return !t.State.Rests() && d.router.fleet.takes(p.Versions, t)
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
	if best.Overlap == 0 || !best.Target.State.Rests() {
		return false
	}
	d.candidates[0] = *best
	d.candidates = d.candidates[:1]
	return true
}

// limit is the most requests that may wait.
func (a *Admission) limit() int {
	if a.router.fleet.resting > 0 {
		return max(a.router.settings.RouterQueueLimit, restsQueued)
	}
	return a.router.settings.RouterQueueLimit
}

// restsFor returns how much longer w may wait in the queue because all workers that could serve it rest.
func (a *Admission) restsFor(w *waiter) time.Duration {
	r := a.router
	r.mu.Lock()
	defer r.mu.Unlock()
	rests := false
	for i := range r.fleet.targets {
		if t := &r.fleet.targets[i]; w.prompt.mayUse(t) {
			if r.decider.runs(&w.prompt, t) && !w.prompt.WaitsForPaused {
				return 0
			}
			rests = true
		}
	}
	if !rests {
		return 0
	}
	return min(max(time.Second, r.settings.RouterQueueTimeout), restsMost-r.now().Sub(w.since))
}

// Rests reports whether the engine of that incarnation of a worker computes nothing, as a trainer has paused it.
func (r *Router) Rests(t kv.Target) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, found := r.fleet.target(t.Key)
	return found && r.fleet.targets[at].Generation == t.Generation && r.fleet.targets[at].State.Rests()
}

// EngineReports notes what the engine of that incarnation of a worker has answered to a question of that time. Calls
// that change it are known better.
func (h *Health) EngineReports(worker uint64, generation int, asked time.Time, report kv.EngineReport) {
	h.change(worker, func(t *kv.Target, e *engine, now time.Time) {
		if t.Generation != generation || e.calls > 0 || asked.Before(e.changed) {
			return
		}
		state := t.State&^report.Knows | report.State&report.Knows
		if state&^t.State&kv.Asleep != 0 { // its memory was released by a call that has not passed here
			e.resets, e.worked = e.resets+1, time.Time{}
		}
		t.State, t.Version = state, cmp.Or(report.Version, t.Version)
	})
}

// Control notes that a call that changes a worker's engine is about to be sent. ended must follow, with what came of it.
func (h *Health) Control(worker uint64, change kv.EngineChange) (ended func(ok bool)) {
	var generation int
	before := map[kv.WorkerKey]kv.EngineState{}
	h.change(worker, func(t *kv.Target, e *engine, _ time.Time) {
		generation, before[t.Key] = t.Generation, t.State
		t.State |= change.Set | change.Meanwhile
		e.calls++
		if change.Resets {
			e.resets, e.worked = e.resets+1, time.Time{}
		}
	})
	return func(ok bool) {
		h.change(worker, func(t *kv.Target, e *engine, now time.Time) {
			if t.Generation != generation || e.calls == 0 {
				return
			}
			e.calls--
			e.changed = now
			t.State &^= change.Meanwhile &^ before[t.Key]
			if !ok {
				t.State &^= change.Set &^ before[t.Key]
				if change.Resets {
					e.resets = max(0, e.resets-1)
				}
				return
			}
			t.State &^= change.Clear
			t.Version = cmp.Or(change.Version, t.Version)
			if change.Resets && t.Known != kv.Exact { // no event will tell
				_, _ = h.router.index.Apply(t.Key, &radix.Change{Kind: radix.DeviceCleared}) // cannot fail
				e.resets, e.cleared = max(0, e.resets-1), now
			}
		})
	}
}

// change calls f with each rank of a worker, and has the router follow.
func (h *Health) change(worker uint64, f func(t *kv.Target, e *engine, now time.Time)) {
	r := h.router
	r.mu.Lock()
	defer r.unlock()
	now, ranks := r.now(), r.fleet.ranksOf(worker)
	for i := range ranks {
		t := &ranks[i]
		f(t, &r.fleet.loads.of(t.Key).engine, now)
		h.outliers.Rest(t.Key, t.State.Rests(), now)
	}
	r.fleet.note()
	r.Admission.dispatch(now)
}

// Cleared notes that a rank's KV events have told that its cache is empty.
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
func (f *fleet) takes(v VersionPolicy, t *kv.Target) bool {
	if !v.Restricts() {
		return true
	}
	return v.takes(t.Version, f.latest())
}

// latest returns the highest version of the workers that are up.
func (f *fleet) latest() (version string) {
	for i := range f.targets {
		if v := f.targets[i].Version; CompareVersions(v, version) > 0 {
			version = v
		}
	}
	return version
}
