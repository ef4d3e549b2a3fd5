package simulate

import (
	"time"

	"kvrouter/internal/engine"
	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
)

// beginLoad starts the load of a request's blocks from lower tiers, after those before it
// on its worker.
func (s *simulator) beginLoad(r *engine.Request) {
	flight := r.Tag.(*flight)
	worker := &s.workers[flight.worker]
	worker.loadsEnd = max(worker.loadsEnd, s.now) + worker.engine.LoadTime(r)
	s.after(worker.loadsEnd-s.now, func() {
		s.countLoad(flight.worker, r)
		worker.engine.Loaded(r)
		s.wake(flight.worker)
	})
}

// countsEvery is the time between two readings of a worker's counters by the router.
const countsEvery = 5 * time.Second

// countLoad counts what a load has moved, and reports it to the routers from time to time.
func (s *simulator) countLoad(w int, r *engine.Request) {
	worker := &s.workers[w]
	worker.engine.EachLoad(r, func(store *engine.Store, tokens int) {
		bytes, seconds := &worker.moved.HostBytes, &worker.moved.HostSeconds
		if store.Tier == kv.Host {
			worker.moved.HostTokens += float64(tokens)
		} else {
			bytes, seconds = &worker.moved.DiskBytes, &worker.moved.DiskSeconds
		}
		*bytes += float64(tokens * store.Loads.BytesPerToken)
		*seconds += store.Loads.Takes(tokens).Seconds()
	})
	if s.now-worker.reported < countsEvery {
		return
	}
	worker.reported = s.now
	for _, router := range s.routers {
		router.Transferred(kv.WorkerKey{Worker: uint64(w)}, worker.moved)
	}
}

// applyLower changes an index as a lower tier of worker w has changed.
func (s *simulator) applyLower(index radix.Index, w int, event engine.Event) {
	at := radix.LowerTier{Worker: kv.WorkerKey{Worker: uint64(w)}, Tier: event.Tier}
	for _, t := range s.Tiers {
		at.Shared = at.Shared || t.Tier == event.Tier && t.Shared
	}
	if event.Stored {
		index.StoreLower(at, event.Parent, event.HasParent, event.Blocks)
	} else {
		index.RemoveLower(at, event.Removed)
	}
}

// TierReport is what requests were loaded from tiers below the cache when they were first
// admitted, as shares of all prompt tokens.
type TierReport struct {
	Host float64 `json:"host"`
	Disk float64 `json:"disk"`
}

// tierReport returns that of the run; nil: the workers have no such tiers.
func (s *simulator) tierReport() *TierReport {
	if len(s.Tiers) == 0 {
		return nil
	}
	prompt, host, disk := 0, 0, 0
	for _, f := range s.ledger {
		prompt += f.Prompt
		host += int(f.Lower.Host) * s.Engine.BlockSize
		disk += int(f.Lower.Disk) * s.Engine.BlockSize
	}
	return &TierReport{float64(host) / float64(prompt), float64(disk) / float64(prompt)}
}
