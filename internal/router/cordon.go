package router

import (
	"maps"
	"time"

	"kvrouter/internal/kv"
)

// maxCordoned bounds the workers that users have cordoned, those that are down included.
const maxCordoned = 1024

// Cordon stops new requests to a worker that is up, on all its ranks, until
// Readmit. Running ones finish, its events and load still count, and it stays cordoned if it
// goes down and comes back meanwhile. It fails with ErrUnknownWorker.
func (r *Router) Cordon(worker uint64) error {
	r.mu.Lock()
	defer r.unlock()
	now, found := r.now(), false
	for i := range r.targets {
		if r.targets[i].Key.Worker == worker {
			r.targets[i].Cordoned, found = true, true
		}
	}
	if !found {
		return ErrUnknownWorker
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

// Readmit ends a worker's cordon, and its ejection for failures: it gets its full share
// at once. It fails with ErrUnknownWorker where the worker is neither up nor cordoned.
func (r *Router) Readmit(worker uint64) error {
	r.mu.Lock()
	defer r.unlock()
	now := r.now()
	_, found := r.cordoned[worker]
	delete(r.cordoned, worker)
	for i := range r.targets {
		if t := &r.targets[i]; t.Key.Worker == worker {
			t.Cordoned, found = r.unavailable[worker], true
			r.outliers.Readmit(t.Key, now)
		}
	}
	if !found {
		return ErrUnknownWorker
	}
	r.dispatch(now)
	return nil
}

// Cordoned returns the workers that Cordon has cordoned, each with the time of that.
func (r *Router) Cordoned() map[uint64]time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.cordoned)
}

// Schedulable returns the number of ranks that are up and not cordoned.
func (r *Router) Schedulable() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.targets {
		if !r.targets[i].Cordoned {
			n++
		}
	}
	return n
}

// CordonDiscovered sets or ends discovery's cordon of a worker, up or not: of a draining
// one, say. It is independent of Cordon: Readmit does not end it, nor does its end
// readmit the worker. The caller must end it once the worker is gone.
func (r *Router) CordonDiscovered(worker uint64, on bool) {
	r.mu.Lock()
	defer r.unlock()
	if delete(r.unavailable, worker); on {
		r.unavailable[worker] = true
	}
	for i := range r.targets {
		if t := &r.targets[i]; t.Key.Worker == worker {
			t.Cordoned = r.isCordoned(t.Key)
		}
	}
	r.dispatch(r.now())
}

// isCordoned reports whether the worker of a rank gets no new requests.
func (r *Router) isCordoned(w kv.WorkerKey) bool {
	_, cordoned := r.cordoned[w.Worker]
	return cordoned || r.unavailable[w.Worker]
}

// Working reports whether requests of this router are on their way on a worker, on any of
// its ranks.
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
