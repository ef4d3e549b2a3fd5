package workers

import (
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
)

// Sample is the current state of one worker rank, for metrics and dashboard.
type Sample struct {
	Worker     kv.WorkerKey
	URL        string
	Models     []string // that it serves, its own first
	Role       kv.Role
	Engine     kv.Engine
	Up         bool // requests may go to it
	Restarts   int
	Blocks     int // in the index
	Load       policy.Load
	EventCount map[string]uint64 // by kind: batches, stored, gaps, ...; nil: no event stream
	Connected  bool              // to its KV events
	Cold       bool              // blocks may be missing in the index, because its history is incomplete
	Lag        time.Duration     // age of the last batch of KV events on arrival; negative: none
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
	streams := f.Streams()
	for _, w := range f.Workers() {
		for _, key := range w.Keys() {
			s := Sample{Worker: key, URL: w.URL, Models: w.Models, Role: w.Disagg.Role, Engine: w.Engine, Up: up[key], Restarts: w.Restarts, Blocks: books.Blocks(key), Load: books.LoadOf(key), Lag: -1}
			if stats := streams[key]; stats != nil {
				s.EventCount, s.Connected, s.Cold = stats.Counts(), stats.Connected.Load(), stats.Cold.Load()
				if stats.Lagged.Load() {
					s.Lag = time.Duration(stats.Lag.Load())
				}
			}
			samples = append(samples, s)
		}
	}
	return samples
}
