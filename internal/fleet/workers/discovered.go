package workers

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/probe"
)

// discovered is what discovery reports about a worker.
type discovered struct {
	name    string        // its first, for the log
	now     kv.Worker     // as reported last; guarded by the worker's mu
	changed chan struct{} // has a token when now differs from the followed list
	drains  atomic.Bool   // it finishes its requests, and goes
	gone    time.Time     // since when no source reports it; zero: one does. Follow uses it
}

// discoveryChanges has a token when discovery reports a change; nil: the worker is not
// discovered.
func (w *worker) discoveryChanges() <-chan struct{} {
	if w.discovered == nil {
		return nil
	}
	return w.discovered.changed
}

// drains reports whether the worker finishes its requests, and goes.
func (w *worker) drains() bool { return w.discovered != nil && w.discovered.drains.Load() }

// Follow updates the fleet's discovered workers to the last list, until the channel
// is closed: new ones are attached when they are ready, cordoned ones get no new
// requests, and those that are no longer listed are removed with their index when
// their requests have ended.
func (f *Fleet) Follow(lists <-chan []kv.Worker) {
	d := following{f: f, known: map[uint64]*worker{}, refused: map[uint64]string{}}
	tick := time.NewTicker(f.timing.leaveLook)
	defer tick.Stop()
	for {
		select {
		case list, open := <-lists:
			if !open {
				return
			}
			d.list = list
			d.apply()
		case <-tick.C:
			d.removeIdle()
			if len(d.refused) > 0 { // the address may be free now
				d.apply()
			}
		}
	}
}

// following is a run of Follow.
type following struct {
	f       *Fleet
	list    []kv.Worker // the last one
	known   map[uint64]*worker
	refused map[uint64]string // why a worker cannot join, by id
}

// apply brings the workers in step with the list.
func (d *following) apply() {
	listed := d.listed()
	d.name(listed)
	for _, now := range d.list {
		w := d.known[now.ID]
		if w != nil && w.address() != now.URL { // another machine: its requests have ended there
			d.takeOut(w)
			w = nil
		}
		switch {
		case w != nil:
			w.discovered.gone = time.Time{}
			d.f.rediscover(w, now)
		case now.Cordon == "":
			d.join(now)
		}
	}
	for id, w := range d.known {
		if !listed[id] && w.discovered.gone.IsZero() {
			w.discovered.gone = time.Now()
			if !w.drains() {
				d.f.cordon(w, kv.CordonDraining)
			}
			d.f.log.Info(fmt.Sprintf("%s: no longer discovered: removing it when its in-flight requests have ended", w),
				"limit", d.f.timing.leaveLimit)
		}
	}
	for id := range d.refused {
		if !listed[id] {
			delete(d.refused, id)
		}
	}
}

// name sets the names of the workers that are listed, and of those that are leaving. A
// name belongs to the worker that has it now, such as the next Pod of a StatefulSet.
func (d *following) name(listed map[uint64]bool) {
	var leaving []kv.Worker
	for id, w := range d.known {
		if !listed[id] {
			w.mu.Lock()
			leaving = append(leaving, w.discovered.now)
			w.mu.Unlock()
		}
	}
	slices.SortFunc(leaving, func(a, b kv.Worker) int { return cmp.Compare(a.ID, b.ID) })
	d.f.deps.Names.Set(append(slices.Clip(d.list), leaving...))
}

// join makes a worker a member that can be one.
func (d *following) join(now kv.Worker) {
	for _, other := range d.known { // its address has passed to this one
		if !other.discovered.gone.IsZero() && other.address() == now.URL {
			d.takeOut(other)
		}
	}
	w, why := d.f.discover(now)
	if w != nil {
		d.known[now.ID] = w
		delete(d.refused, now.ID)
		return
	}
	if d.refused[now.ID] != why {
		d.f.log.Warn(fmt.Sprintf("discovered worker %s is not used: %s", now.Name, why), "url", now.URL)
	}
	d.refused[now.ID] = why
}

// removeIdle removes the workers that are no longer listed and have no requests left, with
// their names.
func (d *following) removeIdle() {
	before := len(d.known)
	for _, w := range d.known {
		since := w.discovered.gone
		if since.IsZero() {
			continue
		}
		if busy := d.f.members.Busy(w.id); !busy || time.Since(since) > d.f.timing.leaveLimit {
			d.takeOut(w)
			d.f.log.Info(fmt.Sprintf("%s: removed", w), "cut", busy)
		}
	}
	if len(d.known) < before {
		d.name(d.listed())
	}
}

// listed has the ids of the list.
func (d *following) listed() map[uint64]bool {
	listed := make(map[uint64]bool, len(d.list))
	for _, now := range d.list {
		listed[now.ID] = true
	}
	return listed
}

// takeOut removes a worker, with its requests.
func (d *following) takeOut(w *worker) {
	d.f.takeOut(w)
	d.f.members.CordonDiscovered(w.id, false)
	delete(d.known, w.id)
}

// discover makes a discovered worker a member and starts to follow it, or says why not;
// why is empty if the fleet does not run.
func (f *Fleet) discover(now kv.Worker) (w *worker, why string) {
	f.membership.Lock()
	defer f.membership.Unlock()
	if f.run == nil {
		return nil, ""
	}
	if at := slices.IndexFunc(f.workers, func(w *worker) bool { return w.address() == now.URL }); at >= 0 {
		return nil, fmt.Sprintf("%s has its address", f.workers[at])
	}
	if slices.ContainsFunc(f.workers, func(w *worker) bool { return w.id == now.ID }) {
		return nil, "another worker has its id"
	}
	w = newWorker(serverOf(now, cmp.Or(f.cfg.WorkerKey, f.cfg.Key)), true, f.cfg.WorkerKey != "" || f.cfg.PassKey, StateConnecting)
	w.status.Name = now.Name
	w.discovered = &discovered{name: now.Name, now: now, changed: make(chan struct{}, 1)}
	f.attach(w, f.superviseAttached)
	return w, ""
}

// serverOf is a discovered worker as a server to ask.
func serverOf(w kv.Worker, key kv.Secret) probe.Server {
	return probe.Server{ID: w.ID, URL: w.URL, KVEvents: w.KVEvents, Replay: w.Replay, Load: w.Load, Disagg: w.Disagg, EventsPort: w.EventsPort,
		Key: key}
}

// rediscover applies discovery's current report on a worker. Whether it gets
// requests changes at once, the rest in the goroutine that follows it.
func (f *Fleet) rediscover(w *worker, now kv.Worker) {
	w.mu.Lock()
	before := w.discovered.now
	w.discovered.now, w.status.Name = now, now.Name
	held := w.status.Cordon
	w.mu.Unlock()
	if held != now.Cordon {
		f.cordon(w, now.Cordon)
	}
	if serverOf(before, "") == serverOf(now, "") {
		return
	}
	select {
	case w.discovered.changed <- struct{}{}:
	default: // it has one
	}
}

// cordon keeps new requests from a worker, or ends that: why is empty.
func (f *Fleet) cordon(w *worker, why kv.Cordon) {
	w.discovered.drains.Store(why == kv.CordonDraining)
	f.members.CordonDiscovered(w.id, why != "")
	f.update(w, func(s *Status) { s.Cordon, s.CordonedSince = why, time.Now() })
	if why != "" {
		f.log.Info(fmt.Sprintf("%s: %s: it gets no new requests", w, why))
		return
	}
	f.log.Info(fmt.Sprintf("%s: gets requests again", w))
	w.checkSoon()
}

// applyDiscovered applies discovery's current report on the worker. Only the
// goroutine that follows it calls this.
func (w *worker) applyDiscovered() (changed bool) {
	if w.discovered == nil {
		return false
	}
	select {
	case <-w.discovered.changed:
	default:
	}
	w.mu.Lock()
	spec := serverOf(w.discovered.now, w.spec.Key)
	w.mu.Unlock()
	changed = w.spec != spec
	w.spec = spec
	return changed
}

// applyDiscovered is the same for a worker with these event streams. Its role changes in
// place; other endpoints rebuild its index, while its requests continue. It returns the
// event streams of now.
func (in *incarnation) applyDiscovered(ctx context.Context, sources []events.Source) []events.Source {
	before := in.w.spec
	if !in.w.applyDiscovered() {
		return sources
	}
	now := in.w.spec
	in.f.log.Info(fmt.Sprintf("%s: discovery reports a change", in.w), "role", now.Role, "kind", now.Kind)
	if before.Disagg != now.Disagg {
		in.setDisagg(probe.Disagg(now, in.info))
		for i := range in.targets {
			in.targets[i].Disagg = in.disagg
		}
	}
	before.Disagg = now.Disagg
	if before != now {
		return in.followAnew(ctx)
	}
	in.announceAnew()
	return sources
}

// followAnew rebuilds the worker's index from its event streams of now, which it returns,
// while its requests continue.
func (in *incarnation) followAnew(ctx context.Context) []events.Source {
	in.restart(ctx)
	sources := in.eventSources()
	if len(sources) == 0 { // it may not have answered in time
		in.warnedOfEvents, in.began = false, time.Now()
	}
	in.learn()
	for _, source := range sources {
		in.followEvents(source)
	}
	in.setTargets(in.served, sources)
	in.followLoads()
	for key, target := range in.announced {
		if !slices.ContainsFunc(in.targets, func(t kv.Target) bool { return t.Key == key }) {
			delete(in.announced, key)
			in.f.down(target, "the worker no longer has this rank")
		}
	}
	in.announceAnew()
	return sources
}
