package policy

import (
	"slices"
	"time"

	"kvrouter/internal/kv"
)

// ThompsonStats says what policy thompson has done and what it waits for.
type ThompsonStats struct {
	Workers  []ThompsonWorkerStats // by key
	Pending  int                   // decisions that nobody has told the end of
	Series   int                   // series of which requests are to come
	Timeouts uint64                // decisions that were taken for failed
	Stayed   uint64                // decisions for the worker that has served the series so far
	Switched uint64                // those for another
}

// ThompsonWorkerStats is what ThompsonStats says of one worker.
type ThompsonWorkerStats struct {
	Worker      kv.WorkerKey
	Decisions   uint64
	Overlap     float64 // of the last decision, share of its prompt
	Reward      float64 // the last one
	Alpha, Beta float64 // of its mean reward
}

// Stats returns the counts so far. Call it under the router's lock.
func (p *Thompson) Stats() ThompsonStats {
	s := ThompsonStats{Pending: p.pending.len(), Series: p.series.len(), Timeouts: p.timeouts, Stayed: p.stayed, Switched: p.switched}
	for key, w := range p.workers.all {
		p.fade(w)
		s.Workers = append(s.Workers, ThompsonWorkerStats{Worker: key, Decisions: w.decisions, Overlap: w.overlap, Reward: w.reward, Alpha: w.mean.alpha, Beta: w.mean.beta})
	}
	slices.SortFunc(s.Workers, func(a, b ThompsonWorkerStats) int { return a.Worker.Compare(b.Worker) })
	return s
}

// ThompsonObserver holds calls for histograms, made under the router's lock; nil ones
// are left out. Set it before the first decision.
type ThompsonObserver struct {
	Tokens  func(tokens int) // of a decision's prompt
	Reuse   func(requests int)
	Latency func(w kv.WorkerKey, latency time.Duration) // of a feedback
}

func (o *ThompsonObserver) decided(tokens, reuse int) {
	if o.Tokens != nil {
		o.Tokens(tokens)
	}
	if o.Reuse != nil {
		o.Reuse(reuse)
	}
}

func (o *ThompsonObserver) judged(w kv.WorkerKey, latency time.Duration) {
	if o.Latency != nil {
		o.Latency(w, latency)
	}
}
