package thompson

import (
	"math"

	"kvrouter/internal/decide/policy"
)

const (
	// trivialOverlap is the share of a prompt below which a match says
	// nothing, with router_type kv_only.
	trivialOverlap = 0.05
	// overlapTie is how far overlaps may be apart to be taken for equal.
	overlapTie = 1e-6
	// queueKnee is the square of the queue at which the penalty of router_type
	// kv_thompson is exp(−weight).
	queueKnee = 25
)

// kvLoadParameters is section kv_load. Nothing reads it: that rule is policy kv.
type kvLoadParameters struct{ overlapWeight, temp, scrape float64 }

// balancedParameters is section kv_load_balanced.
type balancedParameters struct {
	overlapWeight float64 // of the blocks to compute
	idleBoost     float64 // share of a prompt that counts as cached anywhere
	temp          float64
	scrape        float64 // s; without effect
}

// modularParameters is section kv_thompson.
type modularParameters struct {
	tsWeight, idleBoost, temp, queueWeight, coldStart, scrape float64

	lints, affinity, switching, fullLoad, adaptiveTemp, adaptiveExplore, stickyFloor bool

	lintsWeight                 float64 // below 0: of its tanh
	affinityBase, affinityReuse float64
	switchBase, switchReuse     float64
	stickyLoadFloor, loadFloor  float64
	tempBase                    float64
}

// decideOtherwise is decide for the router types of the Toolkit's development
// branch. The candidates' workers are in p.choices. docs/thompson.md has the
// formulas.
func (p *Policy) decideByType(q policy.Query, t *requestTerms, candidates []policy.Candidate, random draws) int {
	widest := 0.0
	for i := range p.choices {
		c := &p.choices[i]
		p.describe(t, &candidates[i], c)
		p.fade(c.worker)
		widest = max(widest, c.overlap)
		score := c.overlap
		switch p.routerType {
		case typeBalanced:
			score = p.balancedScore(t, q.BlockSize, c)
		case typeModular:
			score = p.modularScore(t, c, random)
		}
		p.scores = append(p.scores, score)
	}
	p.otherChances(t, widest)
	draw := random.Float64()
	chosen := drawFrom(p.chances, draw)
	if q.Explain != nil {
		q.Explain.By("thompson")
		for _, score := range p.scores {
			q.Explain.Add(policy.Score{Terms: []policy.Term{{Name: p.routerType, Value: score}}, Total: score})
		}
		q.Explain.Drawn(p.chances, draw, 0)
	}
	if q.Decision != 0 {
		p.keep(q, t, chosen)
	}
	return chosen
}

// otherChances fills in the candidates' chances. widest is the largest overlap.
func (p *Policy) otherChances(t *requestTerms, widest float64) {
	switch {
	case p.routerType == typeKVOnly && widest < trivialOverlap, p.routerType == typeModular && widest < p.modular.coldStart:
		p.chances = evenChances(p.chances, p.scores, func(i int, _ float64) bool { return i == p.roundRobin%len(p.scores) })
		p.roundRobin = (p.roundRobin + 1) % len(p.scores)
	case p.routerType == typeKVOnly:
		p.chances = evenChances(p.chances, p.scores, func(_ int, overlap float64) bool { return overlap >= widest-overlapTie })
	case p.routerType == typeBalanced:
		p.chances = softmaxOf(p.chances, p.scores, p.bounded(p.balanced.temp))
	case p.modular.adaptiveTemp:
		p.chances = softmaxOf(p.chances, p.scores, p.bounded(p.modular.tempBase/(1+float64(t.reuse)*t.iat)))
	default:
		p.chances = softmaxOf(p.chances, p.scores, p.bounded(p.modular.temp))
	}
}

// bounded is a temperature within exploration.temperature.min and max.
func (p *Policy) bounded(temp float64) float64 { return min(max(temp, p.tempMin), p.tempMax) }

// evenChances gives the same chance to all candidates that are in, at least one.
func evenChances(chances, scores []float64, in func(i int, score float64) bool) []float64 {
	chances = chances[:0]
	n := 0.0
	for i, score := range scores {
		chances = append(chances, 0)
		if in(i, score) {
			chances[i] = 1
			n++
		}
	}
	for i := range chances {
		chances[i] /= n
	}
	return chances
}

// balancedScore is the negated cost of Dynamo's KvRouter, in blocks. The branch
// counts all requests that it ever sent to a worker as its load; this counts
// those that have not ended, as Dynamo does.
func (p *Policy) balancedScore(t *requestTerms, blockSize int, c *candidate) float64 {
	if blockSize <= 0 {
		return 0
	}
	block := float64(blockSize)
	cached := max(math.Round(c.overlap*float64(t.blocks)), math.Floor(p.balanced.idleBoost*float64(t.blocks)))
	compute := max(0, float64(t.tokens)/block-cached)
	return -(p.balanced.overlapWeight*compute + float64(c.worker.waits)*math.Ceil(float64(t.tokens)/block))
}

// modularScore is the score of router_type kv_thompson, made of the parts that
// section kv_thompson enables.
func (p *Policy) modularScore(t *requestTerms, c *candidate, random draws) float64 {
	m := &p.modular
	sticky, reuse := c.stays && t.reuse > 0, float64(t.reuse)
	weight := m.queueWeight
	if weight == 0 {
		weight = p.queueWeight
	}
	c.loadFactor = math.Exp(-weight * c.queue * c.queue / queueKnee)
	if m.fullLoad {
		c.loadFactor = c.bareFactor
	}
	if m.stickyFloor && sticky {
		c.loadFactor = max(c.loadFactor, m.stickyLoadFloor)
	}
	c.loadFactor = max(c.loadFactor, m.loadFloor)

	explore := m.tsWeight
	if m.adaptiveExplore {
		explore /= 1 + reuse*t.iat
	}
	s := max(c.overlap, m.idleBoost)*c.loadFactor + explore*c.worker.mean.sample(random)
	if m.lints {
		s += p.modularLinear(c, random)
	}
	switch {
	case m.affinity && sticky:
		s += (m.affinityBase + m.affinityReuse*reuse) * (0.5 + 0.5*c.overlap) * c.loadFactor
	case m.switching && t.hasLast && !c.stays && t.reuse > 0:
		s -= m.switchBase + m.switchReuse*reuse
	}
	if math.IsNaN(s) || math.IsInf(s, 0) {
		return -1e9
	}
	return s
}

// modularLinear is the summand of the linear model in a score.
func (p *Policy) modularLinear(c *candidate, random draws) float64 {
	var z banditVector
	for k := range z {
		z[k] = random.NormFloat64()
	}
	linear := c.worker.linear.sample(&c.x, &z, p.v)
	if p.modular.lintsWeight < 0 {
		return -p.modular.lintsWeight * math.Tanh(linear)
	}
	return p.modular.lintsWeight * linear
}
