package engine

import "time"

// Handover is the time that the KV cache of a prompt takes from one simulated
// worker to another. Each transfer has the whole bandwidth for itself.
type Handover struct {
	Bandwidth     float64 // GB/s, more than 0; a GB is 10⁹ bytes
	BytesPerToken int
}

// Takes returns the time that the KV cache of that many tokens takes.
func (h Handover) Takes(tokens int) time.Duration {
	return time.Duration(float64(tokens) * float64(h.BytesPerToken) / h.Bandwidth) // bytes / (GB/s) = ns
}
