package router

import (
	"maps"
	"time"

	"kvrouter/internal/kv"
)

// maxCordoned bounds the workers that rest, those that are down included.
const maxCordoned = 1024

// Cordon stops new requests to a worker that is up, on all its ranks, until
// Readmit. In-flight requests finish, its events and load are still processed, and
// it remains cordoned if it goes down and returns. It fails with ErrUnknownWorker.
func (r *Router) Cordon(worker uint64) error {
	r.mu.Lock()
	defer r.unlock()
	now, found := r.now(), false
	for i := range r.targets {
		if r.targets[i].Key.Worker == worker {
			r.targets[i].Resting, found = true, true
		}
	}
	if !found {
		return ErrUnknownWorker
	}
	if _, rests := r.cordoned[worker]; !rests {
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
	up := map[uint64]bool{}
	for i := range r.targets {
		up[r.targets[i].Key.Worker] = true
	}
	var oldest *uint64
	for worker, since := range r.cordoned {
		if !up[worker] && (oldest == nil || since.Before(r.cordoned[*oldest])) {
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
	now := r.now()
	_, found := r.cordoned[worker]
	delete(r.cordoned, worker)
	for i := range r.targets {
		if t := &r.targets[i]; t.Key.Worker == worker {
			t.Resting, found = r.held[worker], true
			r.outliers.Readmit(t.Key, now)
		}
	}
	if !found {
		return ErrUnknownWorker
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
		if t := &r.targets[i]; !t.Resting && !t.Unanswered {
			n++
		}
	}
	return n
}

// Hold sets or ends the cordon of a worker by discovery, such as that of a draining
// worker, whether it is up or not. It is independent of Cordon: Readmit does not
// end it, and its end does not readmit the worker. The caller must end it when the
// worker was removed.
func (r *Router) Hold(worker uint64, hold bool) {
	r.mu.Lock()
	defer r.unlock()
	if delete(r.held, worker); hold {
		r.held[worker] = true
	}
	for i := range r.targets {
		if t := &r.targets[i]; t.Key.Worker == worker {
			t.Resting = r.isCordoned(t.Key)
		}
	}
	r.dispatch(r.now())
}

// isCordoned reports whether the worker of a rank gets no new requests.
func (r *Router) isCordoned(w kv.WorkerKey) bool {
	_, rests := r.cordoned[w.Worker]
	return rests || r.held[w.Worker]
}

// Working reports whether this router has in-flight requests on any rank of a
// worker.
func (r *Router) Working(worker uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for w, load := range r.loads.byWorker {
		if w.Worker == worker && load.InFlight > load.Remote {
			return true
		}
	}
	return false
}
