package simulate

import (
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// AdapterReport is what became of LoRA adapters.
type AdapterReport struct {
	Loads  float64 `json:"loads_per_1000_requests"`
	Spread float64 `json:"workers_per_adapter"` // mean number of workers that got requests of an adapter
}

// notes notes that the worker was sent a request with an adapter.
func (w *worker) notes(adapter string) {
	if adapter == "" {
		return
	}
	if w.adapters == nil {
		w.adapters = map[string]bool{}
	}
	w.adapters[adapter] = true
}

// showAdapters lets the routers read worker w's adapters, from time to time.
func (s *simulator) showAdapters(w int) {
	worker := &s.workers[w]
	if worker.adapters == nil || s.UntoldAdapters || worker.shown > 0 && s.now-worker.shown < countsEvery {
		return
	}
	worker.shown = s.now
	report := policy.AdapterReport{Slots: s.Engine.Adapters.Slots, Active: worker.engine.Adapters(), Stamp: s.now.Seconds()}
	for _, router := range s.routers {
		router.ShowAdapters(kv.WorkerKey{Worker: uint64(w)}, report)
	}
}

// adapterReport sums up the adapters; nil: no request had one.
func (s *simulator) adapterReport() *AdapterReport {
	loads, places, names := 0, 0, map[string]bool{}
	for w := range s.workers {
		loads += s.workers[w].engine.AdapterLoads
		places += len(s.workers[w].adapters)
		for name := range s.workers[w].adapters {
			names[name] = true
		}
	}
	if len(names) == 0 {
		return nil
	}
	return &AdapterReport{Loads: 1000 * float64(loads) / float64(len(s.ledger)), Spread: float64(places) / float64(len(names))}
}
