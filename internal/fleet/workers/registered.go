package workers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/probe"
)

// Errors of Register.
var (
	// ErrWorkerTaken means that the id belongs to a worker that was not registered.
	ErrWorkerTaken = errors.New("the id belongs to a worker that the router has started, attached or discovered")
	// ErrFleetEnding means that the router is shutting down.
	ErrFleetEnding = errors.New("the router is shutting down")
)

// Registration is a worker that a client registers at run time. Requests are routed
// to it at once; then it is health-checked like others. While its URL has never answered,
// it is up for clients that forward their requests themselves, as in Dynamo's selection
// service, which does not connect to workers.
type Registration struct {
	ID               uint64
	URL              string // http://host:port, no slash at the end
	Model            string // that it serves
	Ranks            []uint32
	Sources          []events.Source // KV events of its ranks; may be none
	MaxBatchedTokens int             // of one engine step; 0: unknown
	TotalBlocks      int             // KV blocks of a rank; 0: unknown
	BlockSize        int             // tokens; 0: unknown
	Key              kv.Secret       // bearer key for its requests; may be empty
	kv.Disagg
}

// sameCache reports whether the index of the worker's cache stays valid after a change
// to next.
func (r Registration) sameCache(next Registration) bool {
	return r.URL == next.URL && r.Model == next.Model && r.BlockSize == next.BlockSize && slices.Equal(r.Ranks, next.Ranks) &&
		slices.Equal(r.Sources, next.Sources)
}

// maxInfoFailures is how often in a row a registered worker may leave the question
// whether it runs SGLang unanswered: enough for a long pass, then it counts as another.
const maxInfoFailures = 5

// registered reports whether the worker is one of Register.
func (w *worker) registered() bool { return w.changes != nil }

// registryChange is one Registration on its way to the goroutine that follows its worker.
type registryChange struct {
	Registration
	done chan struct{} // closed when it is in force; nil: none waits
}

func (c registryChange) acknowledge() {
	if c.done != nil {
		close(c.done)
	}
}

// fleetRun is a running Fleet, as far as workers may join it.
type fleetRun struct {
	group *errgroup.Group
	ctx   context.Context
}

// open lets workers be registered until ctx ends. The group must not be waited
// for before.
func (f *Fleet) open(ctx context.Context, group *errgroup.Group) {
	f.membership.Lock()
	f.run = &fleetRun{group, ctx}
	f.membership.Unlock()
	close(f.opened)
	group.Go(func() error { // its end is what lets the group end
		<-ctx.Done()
		f.membership.Lock()
		f.run = nil
		f.membership.Unlock()
		return nil
	})
}

// Register adds a worker, or changes a registered one, and returns when the change
// is effective. Its index is kept if address, model, ranks and event endpoints are
// unchanged. It fails with ErrWorkerTaken, ErrFleetEnding or with ctx.
func (f *Fleet) Register(ctx context.Context, r Registration) error {
	select {
	case <-f.opened:
	case <-ctx.Done():
		return ctx.Err()
	}
	w, err := f.registered(r)
	if err != nil {
		return err
	}
	change := registryChange{r, make(chan struct{})}
	select {
	case w.changes <- change:
	case <-w.follower.left:
		return ErrFleetEnding
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-change.done:
		return nil
	case <-w.follower.left:
		return ErrFleetEnding
	case <-ctx.Done():
		return ctx.Err()
	}
}

// registered returns the registered worker with r's id, a new one if there is
// none.
func (f *Fleet) registered(r Registration) (*worker, error) {
	f.membership.Lock()
	defer f.membership.Unlock()
	if f.run == nil {
		return nil, ErrFleetEnding
	}
	if at := slices.IndexFunc(f.workers, func(w *worker) bool { return w.id == r.ID }); at >= 0 {
		if !f.workers[at].registered() {
			return nil, fmt.Errorf("worker %d: %w", r.ID, ErrWorkerTaken)
		}
		return f.workers[at], nil
	}
	if at := slices.IndexFunc(f.workers, func(w *worker) bool { return w.address() == r.URL }); at >= 0 {
		f.log.Warn(fmt.Sprintf("worker %d: has the URL of %s: it gets the requests of two; remove one of them", r.ID, f.workers[at]), "url", r.URL)
	}
	w := newWorker(probe.Server{ID: r.ID, URL: r.URL}, true, true, StateConnecting)
	w.changes = make(chan registryChange)
	f.attach(w, f.superviseRegistered)
	return w, nil
}

// Unregister removes a registered worker and its index, and returns when its
// goroutines have ended. It reports whether there was such a worker.
func (f *Fleet) Unregister(id uint64) bool {
	members := f.all()
	at := slices.IndexFunc(members, func(w *worker) bool { return w.id == id && w.registered() })
	return at >= 0 && f.takeOut(members[at])
}

// superviseRegistered follows a registered worker until ctx is done, each time that it
// goes and comes back.
func (f *Fleet) superviseRegistered(ctx context.Context, w *worker) {
	var next registryChange
	select {
	case <-ctx.Done():
		return
	case next = <-w.changes:
	}
	gone, answered := false, false
	for ctx.Err() == nil {
		if gone {
			next, answered = f.awaitRegistered(ctx, w, next, answered)
		}
		if ctx.Err() == nil {
			next, gone, answered = f.followRegistered(ctx, w, next, answered)
		}
	}
	f.update(w, func(s *Status) { s.State = StateStopped })
}

// adopt takes over a registration.
func (f *Fleet) adopt(w *worker, r Registration) {
	w.spec.URL, w.spec.Key = r.URL, r.Key
	w.mu.Lock()
	w.key, w.publishes.host = r.Key, plainHost(probe.HostOf(r.URL))
	w.mu.Unlock()
	if len(r.Sources) > 0 {
		w.reports(r.Sources)
	}
	f.update(w, func(s *Status) { s.URL, s.Models, s.Ranks = r.URL, []string{r.Model}, slices.Clone(r.Ranks) })
}

// awaitRegistered waits until a process listens at a worker's address again, until
// another Registration gives it another cache (which is routed to at once), or until
// ctx is done. answered means that the worker has been healthy before, so that it must be
// healthy again. It returns the registration to follow next.
func (f *Fleet) awaitRegistered(ctx context.Context, w *worker, now registryChange,
	answered bool) (next registryChange, stillAnswered bool) {
	for misses := 1; ; misses++ {
		select {
		case <-ctx.Done():
			return now, answered
		case change := <-w.changes:
			if !now.sameCache(change.Registration) {
				return change, false
			}
			f.adopt(w, change.Registration)
			now = registryChange{Registration: change.Registration}
			change.acknowledge()
		case <-w.wake:
		case <-time.After(f.pauseAfter(misses)):
		}
		err := f.checkWithin(ctx, w, func(limit time.Duration) error { return f.probe.Health(ctx, w.spec, limit, answered) })
		if err == nil || !answered && probe.Rejected(err) {
			return now, err == nil
		}
		if ctx.Err() == nil {
			f.update(w, func(s *Status) { s.LastError = err.Error() })
		}
	}
}

// followRegistered follows one incarnation: until ctx is done, its process has
// ended, or another Registration gives it another cache. answered means that the
// worker has been healthy before. It returns the registration to follow next, whether
// the process has ended, and whether it has ever been healthy.
func (f *Fleet) followRegistered(ctx context.Context, w *worker, now registryChange,
	answered bool) (next registryChange, gone, hasAnswered bool) {
	f.adopt(w, now.Registration)
	f.update(w, func(s *Status) { s.State = StateConnecting })
	in := f.begin(ctx, w)
	in.answered, in.met = answered, answered
	reason := "no longer registered"
	defer func() { in.end(reason) }()
	if err := in.join(kv.Served{Names: []string{now.Model}}); err != nil {
		f.unreachable(ctx, w, err)
		now.acknowledge()
		return registryChange{Registration: now.Registration}, true, answered
	}
	in.followRegistration(now.Registration)
	in.setDisagg(now.Disagg)
	asked, failures := false, 0 // whether it runs SGLang, and for fields that its Disagg lacks
	in.register(now.Registration)
	in.followLoads()
	in.markUp()
	now.acknowledge()
	f.log.Info(fmt.Sprintf("%s: registered", w), "url", now.URL, "model", now.Model, "event_streams", len(now.Sources))

	for pause := f.timing.firstLook; ; pause = in.pause() {
		select {
		case <-ctx.Done():
			return now, false, in.answered
		case change := <-w.changes:
			if !now.sameCache(change.Registration) {
				reason = "registered again with another address or cache size"
				return change, false, false
			}
			f.adopt(w, change.Registration)
			if change.Disagg != now.Disagg {
				in.setDisagg(change.Disagg)
				asked = false
			}
			in.register(change.Registration)
			change.acknowledge()
			now.Registration = change.Registration
			continue
		case <-w.wake:
		case <-time.After(pause):
		}
		if in.checkHealth(); in.gone {
			return registryChange{Registration: now.Registration}, true, in.answered
		}
		if in.resized() || in.unrivaled() {
			in.restart(ctx)
			in.followRegistration(now.Registration)
			in.register(now.Registration)
			in.followLoads()
		}
		in.review()
		if in.answered && in.up && !asked {
			known := in.info != nil
			if !known {
				info, err := f.probe.ServerInfo(in.ctx, w.spec)
				if failures++; err != nil && failures < maxInfoFailures { // asked again after the next health check
					continue
				}
				in.know(info)
			}
			asked = true
			if d := probe.Disagg(probe.Server{URL: now.URL, Disagg: now.Disagg}, in.info); d != in.disagg || in.info != nil {
				in.setDisagg(d)
				in.register(now.Registration)
			}
			if !known && in.info != nil { // its targets have their number of ranks now
				in.followLoadsAnew()
			}
		}
	}
}

// followRegistration follows the event streams of r.
func (in *incarnation) followRegistration(r Registration) {
	in.sizeBlocks(r.BlockSize)
	for _, source := range r.Sources {
		in.followEvents(source)
	}
}

// register makes every rank of r a target, in place of its earlier ranks.
func (in *incarnation) register(r Registration) {
	batched, sizes := r.MaxBatchedTokens, map[uint32]int(nil)
	if in.info != nil {
		batched = cmp.Or(batched, in.info.MaxBatchedTokens())
		if r.TotalBlocks == 0 {
			sizes = in.caches(r.Ranks)
		}
	}
	in.aim(r.Ranks, sizes, kv.Target{Ranks: max(len(r.Ranks), in.ranks), Models: []string{r.Model}, MaxBatchedTokens: tokensOf(batched),
		TotalBlocks: r.TotalBlocks, Unanswered: in.unanswered})
	in.announceAnew()
}
