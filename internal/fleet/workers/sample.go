package workers

import (
	"iter"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policy"
)

// Sample is the current state of one worker rank, for metrics and dashboard.
type Sample struct {
	Worker    kv.WorkerKey
	URL       string
	Models    []string // that it serves, its own first
	Role      kv.Role
	Engine    kv.Engine
	Up        bool   // requests may go to it
	Version   string // of its weights; empty: unknown
	Restarts  int
	Blocks    int        // in the index
	Cache     CacheState // how its KV cache is known; zero: not attached yet
	Load      policy.Load
	Events    *events.Stats    // of its event stream; nil: it has none
	Cell      *Cell            // of a router below this one
	Connected bool             // to its KV events
	Cold      bool             // blocks may be missing in the index, because its history is incomplete
	Lower     radix.LowerState // of its lower tiers, in the index
	Lag       time.Duration    // age of the last batch of KV events on arrival; negative: none
}

// Books are the router's records of the workers.
type Books interface {
	Has(is func(*kv.Target) bool) bool // calls is with each worker that is up, until it returns true
	LoadOf(kv.WorkerKey) policy.Load
	Blocks(kv.WorkerKey) int
	Engine(kv.WorkerKey) (state kv.EngineState, version string)
}

// Samples returns the state of every rank, with the router's records of it. Each is valid
// until the next: those of thousands of ranks are megabytes.
func (f *Fleet) Samples(books Books) iter.Seq[*Sample] {
	return func(yield func(*Sample) bool) {
		workers := f.all()
		up := make(map[kv.WorkerKey]bool, len(workers))
		books.Has(func(t *kv.Target) bool {
			up[t.Key] = !t.Cordoned && !t.Unanswered
			return false
		})
		var s Sample
		for _, w := range workers {
			for _, key := range w.keys() {
				w.sample(&s, key)
				s.Up, s.Blocks, s.Load = up[key], books.Blocks(key), books.LoadOf(key)
				_, s.Version = books.Engine(key)
				if !yield(&s) {
					return
				}
			}
		}
	}
}

// sample sets s to what the fleet knows of a rank.
func (w *worker) sample(s *Sample, key kv.WorkerKey) {
	w.mu.Lock()
	defer w.mu.Unlock()
	status := &w.status
	*s = Sample{Worker: key, URL: status.URL, Models: status.Models, Role: status.Disagg.Role, Engine: status.Engine,
		Restarts: status.Restarts, Cache: status.Cache, Cell: status.Cell, Lag: -1}
	stream := w.streams[key]
	if stream == nil {
		return
	}
	stats := stream.Stats()
	s.Events, s.Lower = stats, stream.Lower()
	s.Connected, s.Cold = stats.Connected.Load(), stats.Cold.Load()
	if stats.Lagged.Load() {
		s.Lag = time.Duration(stats.Lag.Load())
	}
}

// keys returns the worker's keys, one for each rank.
func (w *worker) keys() []kv.WorkerKey {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.status.Keys()
}
