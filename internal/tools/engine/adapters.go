package engine

import "slices"

// AdapterSettings are those of an engine's LoRA adapters.
type AdapterSettings struct {
	Slots  int     // adapters that are loaded, and that a batch has, at a time (vLLM's --max-loras); 0: any number, all of them loaded
	LoadMS float64 // time to load one, which the next pass waits for, ms; divided by Timing.Speedup
}

// inBatch returns the adapters of the running requests.
func (e *Engine) inBatch() (names []string) {
	for _, r := range e.running {
		if r.Adapter != "" && !slices.Contains(names, r.Adapter) {
			names = append(names, r.Adapter)
		}
	}
	return names
}

// waitsForSlot reports whether r waits because the batch has as many other adapters as it
// may have. Requests behind r go before it then.
func (e *Engine) waitsForSlot(r *Request) bool {
	if r.Adapter == "" || e.Cfg.Adapters.Slots == 0 {
		return false
	}
	names := e.inBatch()
	return len(names) >= e.Cfg.Adapters.Slots && !slices.Contains(names, r.Adapter)
}

// loadAdapters loads the adapters of the running requests, in place of those that were used
// first, and returns the time that it takes, ms.
func (e *Engine) loadAdapters() (ms float64) {
	if e.Cfg.Adapters.Slots == 0 {
		return 0
	}
	for _, name := range e.inBatch() {
		if at := slices.Index(e.loaded, name); at >= 0 {
			e.loaded = slices.Delete(e.loaded, at, at+1)
		} else {
			e.AdapterLoads++
			ms += e.Cfg.Adapters.LoadMS
		}
		e.loaded = append(e.loaded, name)
	}
	e.loaded = slices.Delete(e.loaded, 0, max(0, len(e.loaded)-e.Cfg.Adapters.Slots))
	return ms
}

// Adapters returns the adapters of requests that run or wait.
func (e *Engine) Adapters() (names []string) {
	names = e.inBatch()
	for _, r := range e.waiting {
		if r.Adapter != "" && !slices.Contains(names, r.Adapter) {
			names = append(names, r.Adapter)
		}
	}
	return names
}
