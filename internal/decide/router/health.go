package router

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
)

// maxCordoned bounds the workers that users have cordoned, those that are down included.
const maxCordoned = 1024

// Health is which workers may get new requests, whoever sends them: users and discovery cordon
// workers, and the detector watches what becomes of their requests. router.mu guards it.
type Health struct {
	router   *Router
	outliers *health.Detector
	cordons  map[uint64]cordon // by worker, up or not
}

// cordon is who keeps new requests from a worker.
type cordon struct {
	user       bool
	since      time.Time // of the user's
	discovered bool
}

// Cordon stops new requests to a worker that is up, on all its ranks, until
// Readmit. In-flight requests finish, its events and load are still processed, and
// it remains cordoned if it goes down and returns. It fails with ErrUnknownWorker.
func (h *Health) Cordon(worker uint64) error {
	r := h.router
	r.mu.Lock()
	defer r.unlock()
	if len(r.fleet.ranksOf(worker)) == 0 {
		return ErrUnknownWorker
	}
	now := r.now()
	if c := h.cordons[worker]; !c.user {
		h.forgetCordoned()
		c.user, c.since = true, now
		h.set(worker, c)
	}
	r.Admission.dispatch(now) // requests that wait for it may go elsewhere now
	return nil
}

// set stores who cordons a worker, and marks its ranks that are up.
func (h *Health) set(worker uint64, c cordon) {
	if h.cordons[worker] = c; c == (cordon{}) {
		delete(h.cordons, worker)
	}
	ranks := h.router.fleet.ranksOf(worker)
	for i := range ranks {
		ranks[i].Cordoned = h.isCordoned(worker)
	}
}

// isCordoned reports whether a worker gets no new requests.
func (h *Health) isCordoned(worker uint64) bool {
	_, cordoned := h.cordons[worker]
	return cordoned
}

// forgetCordoned makes room for one more cordon of a user: that of the worker that is down and has
// been cordoned for longest goes. Those that are up are as many as the fleet.
func (h *Health) forgetCordoned() {
	users := 0
	var oldest *uint64
	for worker, c := range h.cordons {
		if !c.user {
			continue
		}
		users++
		if len(h.router.fleet.ranksOf(worker)) == 0 && (oldest == nil || c.since.Before(h.cordons[*oldest].since)) {
			oldest = &worker
		}
	}
	if users >= maxCordoned && oldest != nil {
		h.set(*oldest, cordon{discovered: h.cordons[*oldest].discovered})
	}
}

// Readmit ends a user's cordon of a worker and its ejection, without slow start. It fails
// with ErrUnknownWorker if the worker is neither up nor cordoned by a user.
func (h *Health) Readmit(worker uint64) error {
	r := h.router
	r.mu.Lock()
	defer r.unlock()
	now, ranks, c := r.now(), r.fleet.ranksOf(worker), h.cordons[worker]
	if !c.user && len(ranks) == 0 {
		return ErrUnknownWorker
	}
	h.set(worker, cordon{discovered: c.discovered})
	for i := range ranks {
		h.outliers.Readmit(ranks[i].Key, now)
	}
	r.Admission.dispatch(now)
	return nil
}

// Cordoned returns the workers that users have cordoned, each with the time at which it was.
func (h *Health) Cordoned() map[uint64]time.Time {
	h.router.mu.Lock()
	defer h.router.mu.Unlock()
	since := map[uint64]time.Time{}
	for worker, c := range h.cordons {
		if c.user {
			since[worker] = c.since
		}
	}
	return since
}

// CordonDiscovered sets or ends the cordon of a worker by discovery, such as that of a
// draining worker, whether it is up or not. It is independent of Cordon: Readmit does not
// end it, and its end does not readmit the worker. The caller must end it when the worker
// was removed.
func (h *Health) CordonDiscovered(worker uint64, on bool) {
	r := h.router
	r.mu.Lock()
	defer r.unlock()
	c := h.cordons[worker]
	c.discovered = on
	h.set(worker, c)
	r.Admission.dispatch(r.now())
}

// CordonAs cordons the workers that discovery has cordoned in another router.
func (h *Health) CordonAs(other *Health) {
	other.router.mu.Lock()
	var workers []uint64
	for worker, c := range other.cordons {
		if c.discovered {
			workers = append(workers, worker)
		}
	}
	other.router.mu.Unlock()
	for _, worker := range workers {
		h.CordonDiscovered(worker, true)
	}
}

// Idlest returns the worker to query: one that has answered before, of that engine if
// one is up, if possible neither cordoned nor ejected and answering queries, then the one
// with the fewest in-flight requests; not ok: there is none. Nothing is booked.
func (h *Health) Idlest(engine kv.Engine) (t kv.Target, ok bool) {
	r := h.router
	r.mu.Lock()
	defer r.unlock()
	if len(r.fleet.targets) == 0 {
		return kv.Target{}, false
	}
	now := r.now()
	badness := func(t *kv.Target) int {
		switch {
		case t.Unanswered:
			return 5
		case t.Engine != engine:
			return 4
		case t.Cordoned:
			return 3
		case h.outliers.IsOut(t.Key, now):
			return 2
		case h.outliers.AskedInVain(t.Key, now):
			return 1
		}
		return 0
	}
	t = slices.MinFunc(r.fleet.targets, func(a, b kv.Target) int {
		return cmp.Or(badness(&a)-badness(&b), r.fleet.loads.get(a.Key, now).InFlight-r.fleet.loads.get(b.Key, now).InFlight)
	})
	return t, !t.Unanswered
}

// clientKey is the context key of a client's name.
type clientKey struct{}

// ForClient returns the context of what is asked for a request of that client.
func ForClient(ctx context.Context, client string) context.Context {
	return context.WithValue(ctx, clientKey{}, client)
}

// AskFailed records that t did not answer a tokenization request sent at that time.
// It counts as a failure, with ForClient of its client's request, unless the caller has
// cancelled it.
func (h *Health) AskFailed(ctx context.Context, t kv.Target, asked time.Time) {
	if errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	h.router.mu.Lock()
	defer h.router.unlock()
	client, _ := ctx.Value(clientKey{}).(string)
	h.outliers.AskFailed(health.Attempt{Worker: t.Key, Generation: t.Generation, Sent: asked, Client: client}, h.router.now())
}

// Lives records a sign of life of the engine of that incarnation of a worker: tokens, passes
// or finished requests were counted, blocks were stored, its load changed. An answer that its
// HTTP server gives alone shows nothing of the kind.
func (h *Health) Lives(worker uint64, generation int) {
	h.router.mu.Lock()
	defer h.router.unlock()
	now := h.router.now()
	ranks := h.router.fleet.ranksOf(worker)
	for i := range ranks {
		h.outliers.Lives(ranks[i].Key, generation, now)
		h.router.fleet.loads.of(ranks[i].Key).engine.lives(now)
	}
}

// Missed records that a worker has not answered its health checks, the last of them sent at that
// time: new requests avoid it. It returns when the worker last showed life, and until when its requests
// explain that its server does not answer; zero: never.
func (h *Health) Missed(worker uint64, generation int, sent time.Time) (lived, busy time.Time) {
	h.router.mu.Lock()
	defer h.router.unlock()
	return h.outliers.Missed(worker, generation, sent)
}

// Answers records that a worker answers its health checks again.
func (h *Health) Answers(worker uint64, generation int) {
	h.router.mu.Lock()
	defer h.router.unlock()
	h.outliers.AnswersChecks(worker, generation)
}

// Records returns the state of each worker that is up, by key, and whether the
// panic threshold is exceeded, so that all are used.
func (h *Health) Records() (list []health.Record, panicking bool) {
	h.router.mu.Lock()
	defer h.router.unlock()
	return h.outliers.Records(h.router.now()), h.outliers.Panic()
}

// Record returns the state of w; not ok: it is not up.
func (h *Health) Record(w kv.WorkerKey) (record health.Record, ok bool) {
	h.router.mu.Lock()
	defer h.router.unlock()
	return h.outliers.Record(w, h.router.now())
}

// Panicking reports whether the panic threshold is exceeded, so that all workers are used.
func (h *Health) Panicking() bool {
	h.router.mu.Lock()
	defer h.router.unlock()
	return h.outliers.Panic()
}

// Shunned returns the workers that are up and ejected or held.
func (h *Health) Shunned() []kv.WorkerKey {
	h.router.mu.Lock()
	defer h.router.unlock()
	return h.outliers.Shunned(h.router.now())
}

// Discredited returns the number of clients whose failures count against no worker now.
func (h *Health) Discredited() int {
	h.router.mu.Lock()
	defer h.router.mu.Unlock()
	return h.outliers.CountDiscredited(h.router.now())
}

// TakeEjection records that another router has ejected a worker for that time. It
// is a hint, see health.Detector.Hint. It reports whether anything changed.
func (h *Health) TakeEjection(w kv.WorkerKey, long time.Duration) (took bool) {
	h.router.mu.Lock()
	defer h.router.unlock()
	return h.outliers.Hint(w, long, h.router.now())
}

// isOut reports whether t gets nothing now but what no other worker can take. One
// whose trial is due does.
func (h *Health) isOut(t *kv.Target, now time.Time) bool {
	if !h.outliers.IsOut(t.Key, now) {
		return false
	}
	_, due := h.outliers.TrialDue(t.Key, now)
	return !due
}
