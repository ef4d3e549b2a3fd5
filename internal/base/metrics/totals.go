package metrics

import "slices"

// Totals are sums over the finished requests since the start of the router,
// including those of removed workers.
type Totals struct {
	Requests        uint64
	Errors          uint64 // of those with status 500 or more
	PromptTokens    uint64
	OutputTokens    uint64
	PredictedTokens uint64 // as predicted by the index
	CachedTokens    uint64 // as reported by the workers
	ComparedTokens  uint64 // prompt tokens of the requests that CachedTokens counts
	Exact           uint64 // exact predictions
	Compared        uint64 // predictions for which a worker reported the cached tokens
	FirstToken      Histogram
	InterToken      Histogram
	Workers         map[string]WorkerTotals // by label; without removed workers
}

// WorkerTotals are the totals of one worker. Requests counts those that it
// answered; tokens are of prompts that it computed, also for the answer of another
// worker.
type WorkerTotals struct{ Requests, CachedTokens, ComparedTokens uint64 }

// Histogram counts durations. The zero value has none.
type Histogram struct {
	Bounds []float64 // upper bounds, s, rising
	Counts []uint64  // of those up to each bound, and last of all: one more than Bounds
}

// Add adds the counts of another histogram with the same bounds.
func (h *Histogram) Add(other Histogram) {
	if len(h.Counts) == 0 {
		*h = Histogram{other.Bounds, slices.Clone(other.Counts)}
		return
	}
	for i := range min(len(h.Counts), len(other.Counts)) {
		h.Counts[i] += other.Counts[i]
	}
}

// Since returns the difference to before, an earlier state of the same histogram.
func (h Histogram) Since(before Histogram) Histogram {
	d := Histogram{h.Bounds, slices.Clone(h.Counts)}
	for i := range min(len(d.Counts), len(before.Counts)) {
		d.Counts[i] -= min(d.Counts[i], before.Counts[i])
	}
	return d
}

// Quantile returns the q-quantile (q from 0 to 1) in seconds, as Prometheus'
// histogram_quantile; nil: no data.
func (h Histogram) Quantile(q float64) *float64 {
	last := len(h.Bounds)
	if last == 0 || len(h.Counts) != last+1 || h.Counts[last] == 0 {
		return nil
	}
	rank, at := q*float64(h.Counts[last]), 0
	for at < last && float64(h.Counts[at]) < rank {
		at++
	}
	if at == last {
		return &h.Bounds[last-1]
	}
	low, below := 0.0, uint64(0)
	if at > 0 {
		low, below = h.Bounds[at-1], h.Counts[at-1]
	}
	value := h.Bounds[at]
	if here := h.Counts[at] - below; here > 0 {
		value = low + (h.Bounds[at]-low)*(rank-float64(below))/float64(here)
	}
	return &value
}
