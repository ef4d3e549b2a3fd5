package thompson

import (
	"math"

	"kvrouter/internal/decide/policy"
)

// describe puts a candidate into the terms of the rule.
func (p *Policy) describe(t *requestTerms, c *policy.Candidate, choice *candidate) {
	w := choice.worker
	choice.outstanding, choice.stays = w.work, t.hasLast && t.last == w.key
	if p.fixes.outstanding && choice.stays {
		choice.outstanding = max(0, choice.outstanding-t.own)
	}
	waits := float64(w.waits)
	if c.Load.Fresh {
		choice.gpu, choice.queue = share(c.Load.KVUsage), max(float64(c.Load.Waiting), waits)
	} else {
		choice.gpu, choice.queue = min(1, waits/20), waits
	}
	if t.blocks > 0 {
		choice.overlap = share(float64(c.Overlap) / float64(t.blocks))
	}
	choice.prefill = float64(t.tokens) * (1 - choice.overlap) / p.tokenScale * p.prefillWeight
	p.features(t, choice)
}

// share is v as a number from 0 to 1.
func share(v float64) float64 {
	if !(v > 0) { // NaN too
		return 0
	}
	return min(v, 1)
}

// features fills in x and M.
func (p *Policy) features(t *requestTerms, c *candidate) {
	load := p.gpuWeight*c.gpu + p.queueWeight*c.queue
	c.x = banditVector{
		featureOne:         1,
		featureIdle:        1 / (1 + p.gpuWeight*max(0, c.gpu) + p.queueWeight*max(0, c.queue)),
		featureOverlap:     c.overlap,
		featureOutstanding: outstandingFeature(c.outstanding),
		featureDecode:      t.decode / 3,
		featurePrefill:     math.Tanh(c.prefill),
		featureIAT:         t.iat / 1.5,
		featureReuse:       math.Tanh(0.25 * float64(t.reuse)),
	}
	if c.stays {
		c.x[featureStays] = 1
	}
	job := t.decode + c.prefill
	load += p.outstandingWeight*max(0, c.outstanding) + p.jobGPU*job*c.gpu + p.jobQueue*job*c.queue
	c.bareFactor = 1 / (1 + max(0, load))
	c.loadFactor = c.bareFactor
	if c.stays && t.reuse > 0 {
		c.loadFactor = max(c.loadFactor, p.stickyLoadFloor)
	}
}

// outstandingFeature is the feature of outstanding work.
func outstandingFeature(work float64) float64 { return math.Tanh(0.1 * work) }

// score is a candidate's value, given the rewards that were drawn for it.
func (p *Policy) score(t *requestTerms, c *candidate, linear, mean float64) float64 {
	s := linear + p.meanTerm(t, mean) + p.stayTerm(t, c)
	if p.fixes.loadSign {
		s += loadWeight * math.Log(c.loadFactor)
	} else {
		s *= c.loadFactor
	}
	if math.IsNaN(s) || math.IsInf(s, 0) {
		return -1e9
	}
	return s
}

// meanTerm is the part of a score that the drawn mean of the worker's rewards makes.
func (p *Policy) meanTerm(t *requestTerms, mean float64) float64 {
	return p.tsWeight / (1 + float64(t.reuse)*t.iat) * mean
}

// stayTerm is the value of staying with the worker that has served the series, or
// the cost of leaving it.
func (p *Policy) stayTerm(t *requestTerms, c *candidate) float64 {
	reuse := float64(t.reuse)
	switch {
	case t.reuse <= 0:
		return 0
	case c.stays:
		return (p.affinityBase + p.affinityReuse*reuse + p.affinityIAT*t.iat) * (0.5 + 0.5*c.overlap)
	case t.hasLast:
		return -(p.switchBase + p.switchReuse*reuse + p.switchIAT*t.iat)
	}
	return 0
}

// explain notes the scores that have just been drawn. The load's deduction is a
// term too where the original multiplies by it.
func (p *Policy) explain(e *policy.Explanation, t *requestTerms, draw float64) {
	e.By("thompson")
	reuse := t.reuse // so that t need not be on the heap
	e.Reuse = &reuse
	for i := range p.choices {
		c, total := &p.choices[i], p.scores[i]
		mean, stay := p.meanTerm(t, c.mean), p.stayTerm(t, c)
		terms := []policy.Term{{Name: "linear", Value: c.linear}, {Name: "mean", Value: mean}, {Name: "stay", Value: stay}, {Name: "load", Value: total - (c.linear + mean + stay)}}
		if load := terms[len(terms)-1].Value; math.IsNaN(load) || math.IsInf(load, 0) {
			terms = []policy.Term{{Name: "not_finite", Value: total}}
		}
		e.Add(policy.Score{Terms: terms, Total: total})
	}
	e.Drawn(p.chances, draw, t.temp)
}
