package workers

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
)

// found is what discovery tells of a worker.
type found struct {
	name    string        // as it was told first, for the log
	now     kv.Worker     // as it is told now; guarded by the worker's mu
	changed chan struct{} // has a token when now is another than the worker is followed by
	drains  atomic.Bool   // it ends what it has begun
	gone    time.Time     // since when no source knows it; zero: one does. Follow uses it
}

// told has a token when discovery tells something new; nil: nobody tells.
func (w *worker) told() <-chan struct{} {
	if w.found == nil {
		return nil
	}
	return w.found.changed
}

// drains tells whether the worker ends what it has begun, and goes.
func (w *worker) drains() bool { return w.found != nil && w.found.drains.Load() }

// Follow keeps the fleet's discovered workers at what the lists tell, until the channel
// is closed: new ones are attached once they get requests, held ones get none, and those
// that no list names any more are taken out once their requests have ended, with all that
// is known of their caches.
func (f *Fleet) Follow(lists <-chan []kv.Worker) {
	d := following{f: f, known: map[uint64]*worker{}, refused: map[uint64]string{}}
	tick := time.NewTicker(f.Timing.leaveLook)
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
			d.letLeave()
			if len(d.refused) > 0 { // the address may be free now
				d.apply()
			}
		}
	}
}

// following is a run of Follow.
type following struct {
	f       *Fleet
	list    []kv.Worker // as told last
	known   map[uint64]*worker
	refused map[uint64]string // why a worker cannot join, by id
}

// apply makes the workers what the list tells.
func (d *following) apply() {
	told := d.told()
	d.name(told)
	for _, now := range d.list {
		w := d.known[now.ID]
		if w != nil && w.address() != now.URL { // another machine: its requests have ended there
			d.takeOut(w)
			w = nil
		}
		switch {
		case w != nil:
			w.found.gone = time.Time{}
			d.f.retell(w, now)
		case now.Held == "":
			d.join(now)
		}
	}
	for id, w := range d.known {
		if !told[id] && w.found.gone.IsZero() {
			w.found.gone = time.Now()
			if !w.drains() {
				d.f.hold(w, kv.HoldDraining)
			}
			d.f.log.Info(fmt.Sprintf("%s: no longer discovered: its requests may end", w), "limit", d.f.Timing.leaveLimit)
		}
	}
	for id := range d.refused {
		if !told[id] {
			delete(d.refused, id)
		}
	}
}

// name makes known what the workers are called: those that are told of, and those that
// are leaving. A name goes to who has it now, such as the next Pod of a StatefulSet.
func (d *following) name(told map[uint64]bool) {
	var leaving []kv.Worker
	for id, w := range d.known {
		if !told[id] {
			w.mu.Lock()
			leaving = append(leaving, w.found.now)
			w.mu.Unlock()
		}
	}
	slices.SortFunc(leaving, func(a, b kv.Worker) int { return cmp.Compare(a.ID, b.ID) })
	d.f.Names.Set(append(slices.Clip(d.list), leaving...))
}

// join makes a worker a member that can be one.
func (d *following) join(now kv.Worker) {
	for _, other := range d.known { // whose address has passed to this one
		if !other.found.gone.IsZero() && other.address() == now.URL {
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
		d.f.log.Warn(fmt.Sprintf("discovered worker %s is left out: %s", now.Name, why), "url", now.URL)
	}
	d.refused[now.ID] = why
}

// letLeave takes out those that no source knows and that have nothing left to do, with
// their names.
func (d *following) letLeave() {
	before := len(d.known)
	for _, w := range d.known {
		since := w.found.gone
		if since.IsZero() {
			continue
		}
		if works := d.f.hooks.Working(w.id); !works || time.Since(since) > d.f.Timing.leaveLimit {
			d.takeOut(w)
			d.f.log.Info(fmt.Sprintf("%s: taken out", w), "cut", works)
		}
	}
	if len(d.known) < before {
		d.name(d.told())
	}
}

// told has the ids of those that are told of.
func (d *following) told() map[uint64]bool {
	told := make(map[uint64]bool, len(d.list))
	for _, now := range d.list {
		told[now.ID] = true
	}
	return told
}

// takeOut takes a worker out, with what it still does.
func (d *following) takeOut(w *worker) {
	d.f.takeOut(w)
	d.f.hooks.Hold(w.id, false)
	delete(d.known, w.id)
}

// discover makes a discovered worker a member and has it followed, or says why not;
// there is nothing to say where the fleet does not run.
func (f *Fleet) discover(now kv.Worker) (w *worker, why string) {
	f.membership.Lock()
	defer f.membership.Unlock()
	if f.run == nil {
		return nil, ""
	}
	if at := slices.IndexFunc(f.workers, func(w *worker) bool { return w.address() == now.URL }); at >= 0 {
		return nil, fmt.Sprintf("%s is at its address", f.workers[at])
	}
	if slices.ContainsFunc(f.workers, func(w *worker) bool { return w.id == now.ID }) {
		return nil, "another worker has its id"
	}
	spec := specOf(now, cmp.Or(f.cfg.WorkerKey, f.cfg.Key))
	w = newWorker(spec, true, f.cfg.WorkerKey != "" || f.cfg.PassKey, StateConnecting)
	w.status.Name = now.Name
	w.found = &found{name: now.Name, now: now, changed: make(chan struct{}, 1)}
	f.attach(w)
	return w, ""
}

// specOf is a discovered worker as one that is attached.
func specOf(w kv.Worker, key kv.Secret) Attached {
	return Attached{ID: w.ID, HasID: true, URL: w.URL, KVEvents: w.KVEvents, Replay: w.Replay, Load: w.Load, Disagg: w.Disagg, EventsPort: w.EventsPort, Key: key}
}

// retell takes over what is told of a worker now. Whether it gets requests changes at
// once, the rest in the goroutine that follows it.
func (f *Fleet) retell(w *worker, now kv.Worker) {
	w.mu.Lock()
	before := w.found.now
	w.found.now, w.status.Name = now, now.Name
	held := w.status.Held
	w.mu.Unlock()
	if held != now.Held {
		f.hold(w, now.Held)
	}
	if specOf(before, "") == specOf(now, "") {
		return
	}
	select {
	case w.found.changed <- struct{}{}:
	default: // it has one
	}
}

// hold keeps a worker from new requests, or ends that.
func (f *Fleet) hold(w *worker, why kv.Hold) {
	w.found.drains.Store(why == kv.HoldDraining)
	f.hooks.Hold(w.id, why != "")
	f.update(w, func(s *Status) { s.Held, s.HeldSince = why, time.Now() })
	if why != "" {
		f.log.Info(fmt.Sprintf("%s: %s: no new requests go there", w, why))
		return
	}
	f.log.Info(fmt.Sprintf("%s: gets requests again", w))
	select {
	case w.wake <- struct{}{}:
	default: // it has one
	}
}

// takeTold makes a discovered worker what is told of it now. Only the goroutine that
// follows it calls this.
func (w *worker) takeTold() (changed bool) {
	if w.found == nil {
		return false
	}
	select {
	case <-w.found.changed:
	default:
	}
	w.mu.Lock()
	spec := specOf(w.found.now, w.Spec.Key)
	w.mu.Unlock()
	changed = w.Spec != spec
	w.Spec = spec
	return changed
}

// takeTold is the same for a worker that is followed from there. Its part changes in
// place; with other endpoints its cache is learned anew, while its requests go on. It
// returns what is followed now.
func (in *incarnation) takeTold(ctx context.Context, sources []events.Source) []events.Source {
	before := in.w.Spec
	if !in.w.takeTold() {
		return sources
	}
	now := in.w.Spec
	in.f.log.Info(fmt.Sprintf("%s: is told of otherwise", in.w), "role", now.Role, "kind", now.Kind)
	if before.Disagg != now.Disagg {
		in.takePart(partOf(now.Disagg, in.info, now.URL))
		for i := range in.targets {
			in.targets[i].Disagg = in.disagg
		}
	}
	before.Disagg = now.Disagg
	if before != now {
		return in.followAnew(ctx)
	}
	if in.up {
		clear(in.announced)
		in.markUp()
	}
	return sources
}

// followAnew learns the worker's cache anew, from where its events are now, while its
// requests go on. It returns what is followed now.
func (in *incarnation) followAnew(ctx context.Context) []events.Source {
	in.forget()
	in.ctx, in.cancel = context.WithCancel(ctx)
	in.stopLoads, in.watched = nil, false
	clear(in.loaded)
	sources := in.eventSources()
	if len(sources) == 0 { // it may not have answered in time
		in.toldSilent, in.began = false, time.Now()
	}
	for _, source := range sources {
		in.followEvents(source)
	}
	in.setTargets(in.served, sources)
	in.followLoads(in.loadOf)
	for key, target := range in.announced {
		if !slices.ContainsFunc(in.targets, func(t kv.Target) bool { return t.Key == key }) {
			delete(in.announced, key)
			in.f.hooks.Down(target, "the worker has this rank no more")
		}
	}
	if in.up {
		clear(in.announced)
		in.markUp()
	}
	return sources
}
