package router

import (
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
)

// preferKeeping keeps the candidates that are predicted to keep the objectives of p, or all if there
// are none. An objective of the first token that has passed no longer counts. A prefill worker keeps
// the time to the first token, a decode worker that of the further ones.
func (d *decider) preferKeeping(p *prompt, q *policy.Query) {
	first, further := time.Duration(0), time.Duration(0)
	if p.Leg != kv.LegDecode && !p.Deadline.IsZero() {
		first = p.Deadline.Sub(q.Now)
	}
	if p.Leg != kv.LegPrefill {
		further = p.TPOT
	}
	if p.keeps = false; first <= 0 && further <= 0 || len(d.candidates) == 1 {
		return
	}
	p.keeps = d.prefer(func(c *policy.Candidate) bool {
		return (first <= 0 || d.forecast.FirstToken(q, c) <= first) && (further <= 0 || d.forecast.TokenTime(q, c) <= further)
	})
}

// lateBy returns by how much the first token of a sheddable p is predicted to miss its deadline on
// the best candidate with a free seat; 0: p is to be served. An idle worker takes any request.
func (a *Admission) lateBy(p *prompt, now time.Time) time.Duration {
	r := a.router
	if !p.sheds() || a.anyIdle(p) {
		return 0
	}
	late := mostRetryAfter
	q := policy.Query{Now: now, Tokens: p.tokens, BlockSize: r.blockSize, Leg: p.Leg, Adapter: p.LoRA, Class: p.Class}
	for i := range r.decider.candidates {
		if c := &r.decider.candidates[i]; hasSeat(c.Load) || r.settings.RouterQueueThreshold != nil {
			late = min(late, r.decider.forecast.FirstToken(&q, c)-p.Deadline.Sub(now))
		}
	}
	return max(0, late)
}
