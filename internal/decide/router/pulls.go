package router

import (
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// source is a worker with leading blocks of a prompt that others can pull.
type source struct {
	key    kv.WorkerKey
	blocks int   // units
	size   int32 // tokens of its blocks
	ahead  int   // tokens that others pull from it now
	tiers  *policy.Tiers
}

// before reports whether others are better served by s than by o.
func (s *source) before(o *source) bool {
	return s.blocks > o.blocks || s.blocks == o.blocks && s.ahead < o.ahead
}

// findSources finds the two best workers to pull blocks of p from: the second one is the
// best one's own source. Of equal ones, the one from which the least is pulled is better.
// Cordoned workers can be sources, ejected ones cannot.
func (d *decider) findSources(p *prompt, now time.Time) {
	r := d.router
	p.sources = [2]source{}
	if !r.fleet.pulls.Load() || !p.Pulls || p.Leg != kv.LegWhole || p.Cached != nil {
		return
	}
	for i := range p.matches {
		m := &p.matches[i]
		s := source{key: m.Worker, blocks: int(m.Hosted)}
		at, up := r.fleet.target(m.Worker)
		if s.blocks == 0 || !up {
			continue
		}
		if t := &r.fleet.targets[at]; !t.Pulls() || !t.Serves(p.Model) || r.Health.outliers.IsOut(m.Worker, now) {
			continue
		}
		s.size = r.fleet.targets[at].BlockSize
		s.ahead, s.tiers = r.fleet.targetLoads[at].served, r.fleet.targetLoads[at].Tiers
		switch {
		case s.before(&p.sources[0]):
			p.sources = [2]source{s, p.sources[0]}
		case s.before(&p.sources[1]):
			p.sources[1] = s
		}
	}
}

// pullTo returns what the candidate could pull, if blocks of the prompt up to usable can be.
func (p *prompt) pullTo(c *policy.Candidate, usable int) (pull policy.Pull) {
	s := &p.sources[0]
	if s.key == c.Target.Key {
		s = &p.sources[1]
	}
	if s.size != c.Target.BlockSize { // engines pull blocks of their own size only
		return pull
	}
	if more := min(s.blocks, usable) - c.Indexed - c.Lower.Total(); more > 0 {
		pull = policy.Pull{From: s.key, Blocks: more, Ahead: s.ahead, Source: s.tiers}
	}
	return pull
}

// serves counts tokens that a worker is pulled from.
func (l *loads) serves(b *Booking, sign int) {
	if b.pull.Tokens == 0 {
		return
	}
	l.pulling += sign
	if load := l.byWorker[b.pull.From]; load != nil {
		load.served = max(0, load.served+sign*b.pull.Tokens)
	}
}

// pullCame notes how many blocks of the prompt the engine found cached, of a request that
// was to pull some. An answer with fewer blocks than the worker itself was to have says
// nothing about the other.
func (b *Booking) pullCame(blocks int, now time.Time) {
	own := b.device + b.lower.Total()
	came := min(max(0, blocks-own), b.pull.Blocks)
	switch {
	case came == b.pull.Blocks:
		b.pulled = policy.PullCame
	case came > 0:
		b.pulled = policy.PullPart
	default:
		b.pulled = policy.PullFailed
	}
	b.pulledBlocks = came
	if from := b.router.fleet.loads.byWorker[b.pull.From]; blocks >= own && from != nil {
		b.router.fleet.loads.of(b.worker).tiers().Pulled(from.tiers(), b.pull.Blocks, came, now)
	}
}
