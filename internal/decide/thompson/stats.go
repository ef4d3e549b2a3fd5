package thompson

import (
	"slices"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// With runs f with the policy of a router under its lock, if the policy is
// thompson; otherwise it returns false. with is the router's WithPolicy.
func With(with func(func(policy.Policy)), f func(*Policy)) (is bool) {
	with(func(rule policy.Policy) {
		var p *Policy
		if p, is = rule.(*Policy); is {
			f(p)
		}
	})
	return is
}

// Stats are the counts of the policy.
type Stats struct {
	Workers  []WorkerStats // by key
	Pending  int           // decisions without feedback so far
	Series   int           // series with remaining requests
	Timeouts uint64        // decisions counted as failed because they got no feedback
	Stayed   uint64        // decisions for the previous worker of the series
	Switched uint64        // decisions for another worker
	Tokens   Histogram     // prompt tokens of the decisions
	Reuse    Histogram     // remaining requests of the series, at each decision
}

// WorkerStats are the counts of one worker.
type WorkerStats struct {
	Worker      kv.WorkerKey
	Decisions   uint64
	Overlap     float64   // of the last decision, share of its prompt
	Reward      float64   // the last one
	Alpha, Beta float64   // of its mean reward
	Latency     Histogram // of its feedback, seconds
}

// Histogram counts values as Prometheus does.
type Histogram struct {
	Bounds []float64 // ascending; never changed
	Counts []uint64  // for each bound the values up to it
	Count  uint64    // of all values
	Sum    float64
}

func newHistogram(bounds ...float64) Histogram {
	return Histogram{Bounds: bounds, Counts: make([]uint64, len(bounds))}
}

func (h *Histogram) observe(v float64) {
	at, _ := slices.BinarySearch(h.Bounds, v)
	for i := at; i < len(h.Counts); i++ {
		h.Counts[i]++
	}
	h.Count++
	h.Sum += v
}

func (h Histogram) clone() Histogram {
	h.Counts = slices.Clone(h.Counts)
	return h
}

// Stats returns the counts so far. Call it under the router's lock.
func (p *Policy) Stats() Stats {
	s := Stats{
		Pending: p.pending.len(), Series: p.series.len(), Timeouts: p.timeouts, Stayed: p.stayed, Switched: p.switched,
		Tokens: p.tokens.clone(), Reuse: p.budgets.clone(),
	}
	for key, w := range p.workers.all {
		p.fade(w)
		s.Workers = append(s.Workers, WorkerStats{
			Worker: key, Decisions: w.decisions, Overlap: w.overlap, Reward: w.reward, Alpha: w.mean.alpha, Beta: w.mean.beta, Latency: w.latency.clone(),
		})
	}
	slices.SortFunc(s.Workers, func(a, b WorkerStats) int { return a.Worker.Compare(b.Worker) })
	return s
}

// FeedbackTimeout returns the time that a decision waits for feedback; 0: the
// policy does not learn, as with router_type kv_load.
func (p *Policy) FeedbackTimeout() time.Duration {
	if p.routerType == typeKVLoad {
		return 0
	}
	return p.timeout
}

// SparesAborts reports whether a request that its client aborted does not count
// against the worker: the fix feedback.
func (p *Policy) SparesAborts() bool { return p.fixes.feedback }
