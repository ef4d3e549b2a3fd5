package engine

import "time"

// Handover is the transfer time of a prompt's KV cache between simulated workers.
// Transfers do not share the bandwidth.
type Handover struct {
	Bandwidth     float64 // GB/s, more than 0; a GB is 10⁹ bytes
	BytesPerToken int
}

// Takes returns the transfer time of the KV cache of that many tokens.
func (h Handover) Takes(tokens int) time.Duration {
	return time.Duration(float64(tokens) * float64(h.BytesPerToken) / h.Bandwidth) // bytes / (GB/s) = ns
}
