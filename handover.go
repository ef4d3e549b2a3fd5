package main

import "time"

// Handover says how long the KV cache of a prompt takes from one simulated
// worker to another. Each transfer has the whole bandwidth for itself.
type Handover struct {
	Bandwidth     float64 // GB/s, more than 0; a GB is 10⁹ bytes
	BytesPerToken int
}

// Handover returns the settings' handover.
func (c *MockConfig) Handover() Handover {
	return Handover{c.MockKVTransferBandwidth, c.MockKVBytesPerToken}
}

// Takes returns how long so many tokens take.
func (h Handover) Takes(tokens int) time.Duration {
	return time.Duration(float64(tokens) * float64(h.BytesPerToken) / h.Bandwidth) // bytes / (GB/s) = ns
}

// part is what worker w does.
func (s *Simulation) part(w int) Disagg {
	switch {
	case s.Prefills == 0:
		return Disagg{}
	case w < s.Prefills:
		return Disagg{Role: RolePrefill, Kind: KindNIXL}
	}
	return Disagg{Role: RoleDecode, Kind: KindNIXL}
}

// beginFetch has a prompt come to a worker that has taken blocks for it.
func (s *simulator) beginFetch(r *SimRequest) {
	s.fetches++
	s.coming.push(happening{at: s.now + s.Handover.Takes(r.Missing), order: s.Workers + s.total + s.fetches, fetched: r.Tag.(*simFlight)})
}

// endFetch is when it has come: the worker that computed it needs its blocks no
// longer.
func (s *simulator) endFetch(flight *simFlight) {
	s.workers[flight.worker].engine.Fetched(&flight.SimRequest, true)
	s.workers[flight.prefill.worker].engine.Abort(&flight.prefill.SimRequest)
	s.wake(flight.worker)
	s.wake(flight.prefill.worker)
}
