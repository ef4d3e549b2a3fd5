package simulate

import (
	"kvrouter/internal/engine"
	"kvrouter/internal/kv"
)

// part returns the role of worker w.
func (s *Simulation) part(w int) kv.Disagg {
	switch {
	case s.Prefills == 0:
		return kv.Disagg{}
	case w < s.Prefills:
		return kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindNIXL}
	}
	return kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindNIXL}
}

// beginFetch starts the transfer of a prompt to a worker that has allocated its
// blocks.
func (s *simulator) beginFetch(r *engine.Request) {
	s.fetches++
	s.coming.push(happening{at: s.now + s.Handover.Takes(r.Missing), order: s.Workers + s.total + s.fetches, fetched: r.Tag.(*flight)})
}

// endFetch ends the transfer of a prompt: the worker that computed it frees its
// blocks.
func (s *simulator) endFetch(flight *flight) {
	s.workers[flight.worker].engine.Fetched(&flight.Request, true)
	s.workers[flight.prefill.worker].engine.Abort(&flight.prefill.Request)
	s.wake(flight.worker)
	s.wake(flight.prefill.worker)
}
