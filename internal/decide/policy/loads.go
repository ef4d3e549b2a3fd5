package policy

import (
	"math"
	"slices"
	"time"

	"kvrouter/internal/base/kv"
)

// An engine's loads from lower tiers are a queue of their own before that of its passes:
// vLLM's OffloadingConnector copies on a stream beside the computing, one load after the
// other, in the order in which the scheduler reached the prompts. A prompt waits for its
// load, and those behind it are computed meanwhile.

// loading is the load of a prompt from lower tiers on a worker, times in ms.
type loading struct {
	tokens int     // that are loaded instead of computed
	pulled int     // that are pulled from another worker instead of computed
	pull   float64 // how long that takes
	own    float64 // how long it takes in all
	asked  float64 // from now on, when a pass first has room for the prompt: it begins then at the earliest
	over   float64 // from now on, when it is over
}

// delay is by how much the prompt is computed later, ms: the wait for the loads before it,
// and its own.
func (l loading) delay() float64 { return l.over - l.asked }

// later is how much longer loads to come wait for this one, ms, if behind loads come for
// each ms until no more are under way: those that come while it waits are delayed
// by all of it, those that come while it runs by half of it in the mean.
func (l loading) later(behind float64) float64 { return behind * l.own * (l.delay() - l.own/2) }

// loading returns the load of a prompt on the candidate, which may pull, too.
func (p *Work) loading(q *Query, c *Candidate, pulls bool) (l loading) {
	sum, ahead := 0.0, 0.0
	for _, tier := range kv.LowerTiers {
		if blocks := c.expected(tier); blocks > 0 {
			sum += blocks * float64(q.BlockSize)
			l.own += p.loadTime(c.Load.Tiers, tier, blocks/float64(c.Lower.Of(tier)), blocks*float64(q.BlockSize))
		}
	}
	if pulls {
		l.pulled, l.pull, ahead = p.pulling(q, c)
		l.own += l.pull
	}
	if sum > 0 || pulls {
		_, _, _, l.asked = p.coming(q.Now, c.Load, 1, 0)
		l.over = l.own + max(l.asked, p.loadsBefore(q.Now, c.Load), ahead)
	}
	l.tokens = int(sum)
	return l
}

// loadsBefore is how long the loads of requests without a first token still take on a
// worker, ms: it serves them in order.
func (p *Work) loadsBefore(now time.Time, load *Load) float64 {
	over := math.Inf(-1)
	for i := range load.Prefills {
		if f := &load.Prefills[i]; f.Fetches() {
			over = p.loadOver(now, load.Tiers, f, over)
		}
	}
	return max(over, 0)
}

// loadOver is in how many ms the load of a prompt is over that comes after one which is
// over at before; negative: it has been. It begins when the prompts before are computed.
func (p *Work) loadOver(now time.Time, tiers *Tiers, f *Prefill, before float64) float64 {
	begins := milliseconds(f.Sent.Sub(now)) + p.Timing.Prefill(f.Queued-f.Tokens)
	return max(before, begins) + p.loadsOf(tiers, f.Loads) + p.pullsOf(tiers, f.Pulled)
}

// Fetches reports whether the prompt loads from lower tiers or pulls from another worker.
func (f *Prefill) Fetches() bool { return f.Loads != (kv.TierTokens{}) || f.Pulled > 0 }

// computing returns the prompts of a worker whose loads are over in ready ms, in the order
// in which they can be computed: Sent of one that loads is when that is over.
func (p *Work) computing(now time.Time, load *Load, ready float64) []Prefill {
	if load.Fetching == 0 {
		return load.Prefills
	}
	p.ordered = p.ordered[:0]
	over := math.Inf(-1)
	for _, f := range load.Prefills {
		if f.Fetches() {
			over = p.loadOver(now, load.Tiers, &f, over)
			if !(over <= ready) {
				continue
			}
			f.Sent = now.Add(duration(over) - duration(-over))
		}
		p.ordered = append(p.ordered, f)
	}
	slices.SortStableFunc(p.ordered, func(a, b Prefill) int { return a.Sent.Compare(b.Sent) })
	return p.ordered
}

// loadsOf is how long a worker takes to load tokens, of which it has the expected
// share, ms.
func (p *Work) loadsOf(t *Tiers, loads kv.TierTokens) (ms float64) {
	for _, tier := range kv.LowerTiers {
		if n := loads.Of(tier); n > 0 {
			trust := t.Trust(tier)
			ms += p.loadTime(t, tier, trust, trust*float64(n))
		}
	}
	return ms
}

// loadTime is how long a worker takes to load tokens from a tier, ms, if a load happens with
// a chance. It is what the worker's counters say, else what first tokens said, of the
// worker or of others, else a guess.
func (p *Work) loadTime(t *Tiers, tier kv.Tier, chance, tokens float64) float64 {
	if fixed, token, known := t.counters(tier); known {
		return chance*fixed + token*tokens
	}
	if t != nil && t.fits[tierAt(tier)].known() {
		return t.fits[tierAt(tier)].time(chance, tokens)
	}
	if fit := &p.loads[tierAt(tier)]; fit.known() {
		return fit.time(chance, tokens)
	}
	return tierGuess * p.Timing.Prefill(1) * tokens
}

// loadFit is a line through times of loads: a fixed part, and one for each token, neither
// negative. Older observations count less.
type loadFit struct{ n, x, xx, y, xy float64 }

const (
	// fitForget is the weight that an observation loses with each later one.
	fitForget = 1.0 / 64
	// fitLeast is how many observations a line takes.
	fitLeast = 4
)

// observe adds a load of that many tokens which took ms, perhaps less than none: what
// else a first token takes is subtracted.
func (f *loadFit) observe(tokens, ms float64) {
	for _, sum := range [...]*float64{&f.n, &f.x, &f.xx, &f.y, &f.xy} {
		*sum *= 1 - fitForget
	}
	f.n, f.x, f.xx, f.y, f.xy = f.n+1, f.x+tokens, f.xx+tokens*tokens, f.y+ms, f.xy+tokens*ms
}

func (f *loadFit) known() bool { return f.n > fitLeast-0.5 }

// time returns the ms of a load of that many tokens that happens with a chance.
func (f *loadFit) time(chance, tokens float64) float64 {
	// Loads of about one length do not separate the parts.
	spread := f.n*f.xx - f.x*f.x
	slope := max(0, f.xy/f.xx)
	if spread > 0.01*f.x*f.x {
		slope = (f.n*f.xy - f.x*f.y) / spread
		if fixed := (f.y - slope*f.x) / f.n; slope >= 0 && fixed >= 0 {
			return chance*fixed + slope*tokens
		}
		if slope < 0 {
			return chance * max(0, f.y/f.n)
		}
		slope = max(0, f.xy/f.xx)
	}
	return slope * tokens
}

// learnLoad learns from the first token of a request that loaded what was expected,
// from one tier, on a worker without other prompts: what it took longer than its passes.
func (p *Work) learnLoad(o *Outcome) {
	if !o.Alone || o.Leg == kv.LegDecode {
		return
	}
	if o.Pulled > 0 {
		p.learnPull(o)
		return
	}
	for i, tier := range kv.LowerTiers {
		n := o.Loads.Of(tier)
		if !o.Loaded || n == 0 || n != o.Loads.Total() {
			continue
		}
		ms := milliseconds(o.FirstToken) - p.Timing.firstToken(o)
		p.loads[i].observe(float64(n), ms)
		if o.Tiers != nil {
			o.Tiers.fits[i].observe(float64(n), ms)
		}
	}
}
