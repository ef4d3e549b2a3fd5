package selection

import (
	"cmp"
	"maps"
	"slices"
	"sync"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/models"
)

// Partitions has the workers that clients of the router port have registered, and knows
// the partition of every worker: its model and routing group. It is safe for concurrent
// use.
type Partitions struct {
	model  string // of workers that report none
	models *models.Set

	mu         sync.Mutex // guards the rest; no other lock is taken under it
	registered map[uint64]registeredWorker
	recovered  map[uint64]events.Partition // of workers in a peer's dump
}

// NewPartitions returns the partitions of the workers of models, none of which is
// registered. servedModelName is --served-model-name; empty: not set.
func NewPartitions(servedModelName string, models *models.Set) *Partitions {
	return &Partitions{model: cmp.Or(servedModelName, events.DefaultModel), models: models, registered: map[uint64]registeredWorker{}}
}

// Of returns the model and the routing group of a worker.
func (p *Partitions) Of(worker uint64) (model, group string) {
	if w, registered := p.get(worker); registered {
		of := w.partition()
		return of.Model, of.Group
	}
	model = p.model
	p.models.For(worker).Router.Has(func(t *kv.Target) bool {
		if t.Key.Worker == worker {
			model = p.modelAmong(t.Models)
		}
		return t.Key.Worker == worker
	})
	return model, events.DefaultGroup
}

// modelAmong returns the model of a worker that serves the given names, its own first:
// the router's own if it is among them or there are none.
func (p *Partitions) modelAmong(names []string) string {
	if len(names) > 0 && !slices.Contains(names, p.model) {
		return names[0]
	}
	return p.model
}

// SetRecovered stores the partitions of the workers whose blocks came from a peer's dump.
func (p *Partitions) SetRecovered(recovered events.Recovered) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.recovered = recovered.Partition
}

// group returns a worker's routing group.
func (p *Partitions) group(worker uint64) string {
	if w, registered := p.get(worker); registered {
		return w.partition().Group
	}
	return events.DefaultGroup
}

// grouped reports whether any worker has a routing group other than the default one.
func (p *Partitions) grouped() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range p.registered {
		if w.partition().Group != events.DefaultGroup {
			return true
		}
	}
	return false
}

// dumpParts groups the ranks of an index by partition.
func (p *Partitions) dumpParts(ranks []kv.WorkerKey) []events.DumpPart {
	own := events.Partition{Model: p.model, Group: events.DefaultGroup}
	parts := []events.DumpPart{{Name: own.DumpName()}}
	at := map[events.Partition]int{own: 0}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range ranks {
		of := own
		if w, ok := p.registered[key.Worker]; ok {
			of = w.partition()
		} else if recovered, ok := p.recovered[key.Worker]; ok {
			of = recovered
		}
		if _, known := at[of]; !known {
			at[of] = len(parts)
			parts = append(parts, events.DumpPart{Name: of.DumpName()})
		}
		part := &parts[at[of]]
		part.Workers = append(part.Workers, key)
	}
	if len(parts) > 1 && len(parts[0].Workers) == 0 {
		parts = parts[1:]
	}
	return parts
}

// get returns a registered worker.
func (p *Partitions) get(worker uint64) (w registeredWorker, registered bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	w, registered = p.registered[worker]
	return w, registered
}

// list returns a copy of all registered workers by id.
func (p *Partitions) list() map[uint64]registeredWorker {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.registered)
}

// ranks counts the ranks of the registered workers with several ranks, except for one
// worker.
func (p *Partitions) ranks(but uint64) (ranks int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, w := range p.registered {
		if count := Given(w.spec.RankCount, 1); id != but && count > 1 {
			ranks += int(count)
		}
	}
	return ranks
}

// put stores a registered worker; not ok: there are maxRegistered others.
func (p *Partitions) put(w registeredWorker) (ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.registered[w.id]; !known && len(p.registered) >= maxRegistered {
		return false
	}
	p.registered[w.id] = w
	return true
}

// remove forgets a registered worker.
func (p *Partitions) remove(worker uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.registered, worker)
}
