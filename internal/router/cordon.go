package router

import (
	"maps"
	"time"
)

// maxCordoned bounds the workers that users have cordoned, those that are down included.
const maxCordoned = 1024

// Cordon stops new requests to a worker that is up, on all its ranks, until
// Readmit. In-flight requests finish, its events and load are still processed, and
// it remains cordoned if it goes down and returns. It fails with ErrUnknownWorker.
func (r *Router) Cordon(worker uint64) error {
	r.mu.Lock()
	defer r.unlock()
	now, ranks := r.now(), r.ranksOf(worker)
	if len(ranks) == 0 {
		return ErrUnknownWorker
	}
	for i := range ranks {
		ranks[i].Cordoned = true
	}
	if _, cordoned := r.cordoned[worker]; !cordoned {
		r.forgetCordoned()
		r.cordoned[worker] = now
	}
	r.dispatch(now) // requests that wait for it may go elsewhere now
	return nil
}

// forgetCordoned frees one entry of cordoned: that of the worker that is down and has
// been cordoned for longest. Those that are up are as many as the fleet.
func (r *Router) forgetCordoned() {
	if len(r.cordoned) < maxCordoned {
		return
	}
	var oldest *uint64
	for worker, since := range r.cordoned {
		if len(r.ranksOf(worker)) == 0 && (oldest == nil || since.Before(r.cordoned[*oldest])) {
			oldest = &worker
		}
	}
	if oldest != nil {
		delete(r.cordoned, *oldest)
	}
}

// Readmit ends a worker's cordon and its ejection, without slow start. It fails
// with ErrUnknownWorker if the worker is neither up nor cordoned.
func (r *Router) Readmit(worker uint64) error {
	r.mu.Lock()
	defer r.unlock()
	now, ranks := r.now(), r.ranksOf(worker)
	if _, cordoned := r.cordoned[worker]; !cordoned && len(ranks) == 0 {
		return ErrUnknownWorker
	}
	delete(r.cordoned, worker)
	for i := range ranks {
		ranks[i].Cordoned = r.unavailable[worker]
		r.outliers.Readmit(ranks[i].Key, now)
	}
	r.dispatch(now)
	return nil
}

// Cordoned returns the cordoned workers, each with the time at which it was
// cordoned.
func (r *Router) Cordoned() map[uint64]time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.cordoned)
}

// Schedulable returns the number of ranks that are up, and neither cordoned nor
// Unanswered.
func (r *Router) Schedulable() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.targets {
		if t := &r.targets[i]; !t.Cordoned && !t.Unanswered {
			n++
		}
	}
	return n
}

// CordonDiscovered sets or ends the cordon of a worker by discovery, such as that of a
// draining worker, whether it is up or not. It is independent of Cordon: Readmit does not
// end it, and its end does not readmit the worker. The caller must end it when the worker
// was removed.
func (r *Router) CordonDiscovered(worker uint64, on bool) {
	r.mu.Lock()
	defer r.unlock()
	if delete(r.unavailable, worker); on {
		r.unavailable[worker] = true
	}
	ranks := r.ranksOf(worker)
	for i := range ranks {
		ranks[i].Cordoned = r.isCordoned(worker)
	}
	r.dispatch(r.now())
}

// isCordoned reports whether a worker gets no new requests.
func (r *Router) isCordoned(worker uint64) bool {
	_, cordoned := r.cordoned[worker]
	return cordoned || r.unavailable[worker]
}

// Working reports whether this router has in-flight requests on any rank of a
// worker.
func (r *Router) Working(worker uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for w, load := range r.loads.byWorker {
		if w.Worker == worker && load.InFlight > int(load.Remote) {
			return true
		}
	}
	return false
}
