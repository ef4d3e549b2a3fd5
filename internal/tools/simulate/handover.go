package simulate

import (
	"cmp"
	"container/heap"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/tools/engine"
)

// part returns the role of worker w.
func (s *Simulation) part(w int) kv.Disagg {
	kind := cmp.Or(s.Kind, kv.KindNIXL)
	switch {
	case s.Prefills == 0:
		return kv.Disagg{P2P: s.peerAddress(w)}
	case w < s.Prefills:
		return kv.Disagg{Role: kv.RolePrefill, Kind: kind, Bootstrap: kv.Bootstrap{Host: "simulated", Port: kv.SGLangPort}}
	}
	return kv.Disagg{Role: kv.RoleDecode, Kind: kind}
}

// beginFetch starts the transfer of a prompt to a worker that has allocated its
// blocks, or notes that it waits for the prompt to be computed.
func (s *simulator) beginFetch(r *engine.Request) {
	flight := r.Tag.(*flight)
	if !flight.prefill.ready {
		flight.prefill.awaited = true
		return
	}
	s.fetches++
	heap.Push(&s.coming, happening{at: s.now + s.Handover.Takes(r.Missing), order: s.Workers + s.total + s.fetches,
		call: func() { s.endFetch(flight) }})
}

// promptComputed ends the work of a prefill leg: its prompt goes to a worker that
// waits for it.
func (s *simulator) promptComputed(leg *flight) {
	leg.ready = true
	if leg.awaited {
		s.beginFetch(&leg.decode.Request)
	}
}

// endFetch ends the transfer of a prompt: the worker that computed it frees its
// blocks.
func (s *simulator) endFetch(flight *flight) {
	s.workers[flight.worker].engine.Fetched(&flight.Request, true)
	s.workers[flight.prefill.worker].engine.Abort(&flight.prefill.Request)
	s.wake(flight.worker)
	s.wake(flight.prefill.worker)
}
