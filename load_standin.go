package main

// Stand-ins for radix.go, events.go and load.go, which replace this file.

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

type Published struct {
	Running, Waiting int
	KVUsage          float64
	At               time.Time
}

func FollowLoad(ctx context.Context, w WorkerKey, zmqEndpoint, metricsURL string, publish func(WorkerKey, Published), log *slog.Logger) {
	<-ctx.Done()
}

type Radix struct {
	mu     sync.Mutex
	blocks map[WorkerKey]int
}

func NewRadix() *Radix { return &Radix{blocks: map[WorkerKey]int{}} }

func (r *Radix) Store(w WorkerKey, parent uint64, hasParent bool, blocks []StoredBlock) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.blocks[w] += len(blocks)
	return nil
}

func (r *Radix) Blocks(w WorkerKey) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.blocks[w]
}

func (r *Radix) Forget(worker uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for w := range r.blocks {
		if w.Worker == worker {
			delete(r.blocks, w)
		}
	}
}

type EventSource struct {
	Worker                  WorkerKey
	Endpoint, Replay, Topic string
	BlockSize               int
}

type EventStats struct{}

type EventStream struct{ stats EventStats }

func NewEventStream(src EventSource, index *Radix, log *slog.Logger) *EventStream {
	return &EventStream{}
}

func (s *EventStream) Run(ctx context.Context) { <-ctx.Done() }

func (s *EventStream) Stats() *EventStats { return &s.stats }
