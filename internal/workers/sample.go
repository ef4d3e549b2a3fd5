package workers

import (
	"time"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/radix"
)

// Sample is the current state of one worker rank, for metrics and dashboard.
type Sample struct {
	Worker    kv.WorkerKey
	URL       string
	Models    []string // that it serves, its own first
	Role      kv.Role
	Engine    kv.Engine
	Up        bool // requests may go to it
	Restarts  int
	Blocks    int // in the index
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
	Targets() []kv.Target
	LoadOf(kv.WorkerKey) policy.Load
	Blocks(kv.WorkerKey) int
}

// Samples returns the state of every rank, with the router's records of it.
func (f *Fleet) Samples(books Books) (samples []Sample) {
	up := map[kv.WorkerKey]bool{}
	for _, t := range books.Targets() {
		up[t.Key] = !t.Cordoned && !t.Unanswered
	}
	streams, lower := f.Streams(), f.lower()
	samples = make([]Sample, 0, len(up))
	for _, w := range f.Workers() {
		for _, key := range w.Keys() {
			s := Sample{Worker: key, URL: w.URL, Models: w.Models, Role: w.Disagg.Role, Engine: w.Engine, Up: up[key], Restarts: w.Restarts, Blocks: books.Blocks(key), Load: books.LoadOf(key), Cell: w.Cell, Lag: -1}
			if stats := streams[key]; stats != nil {
				s.Events, s.Lower = stats, lower[key]
				s.Connected, s.Cold = stats.Connected.Load(), stats.Cold.Load()
				if stats.Lagged.Load() {
					s.Lag = time.Duration(stats.Lag.Load())
				}
			}
			samples = append(samples, s)
		}
	}
	return samples
}

// lower returns what the index has of the lower tiers of all ranks whose events are
// followed.
func (f *Fleet) lower() map[kv.WorkerKey]radix.LowerState {
	all := map[kv.WorkerKey]radix.LowerState{}
	for _, w := range f.all() {
		w.mu.Lock()
		for key, stream := range w.streams {
			all[key] = stream.Lower()
		}
		w.mu.Unlock()
	}
	return all
}
