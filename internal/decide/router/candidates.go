package router

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policy"
)

// decider makes candidates of the workers for a request and has the policy choose one of them.
// router.mu guards it.
type decider struct {
	router     *Router
	policy     policy.Policy
	traits     policy.Traits // the policy's; they do not change
	forecast   *policy.Work  // knows how long the engines' passes take; the policy itself if it does
	assumes    radix.Assumer // nil: routed prompts do not count
	random     *rand.Rand
	candidates []policy.Candidate // reused by every decision
	decisions  uint64             // reported to a judged policy
}

func newDecider(r *Router, deps Deps) decider {
	forecast, ok := deps.Policy.(*policy.Work)
	if !ok {
		forecast = policy.NewWork()
	}
	return decider{
		router: r, policy: deps.Policy, traits: deps.Policy.Traits(), forecast: forecast, assumes: deps.Assumer,
		random: rand.New(rand.NewPCG(deps.Seed, deps.Seed)),
	}
}

// collect makes candidates of the workers that may serve p.
func (d *decider) collect(p *prompt, now time.Time) error {
	r, targets := d.router, d.router.fleet.targets
	candidates := slices.Grow(d.candidates[:0], len(targets))[:len(targets)]
	err, n, workers := ErrNoWorker, 0, 0
	d.snapshot(p, now)
	d.findSources(p, now)
	p.reachable, p.stays = 0, false
	limited := r.Admission.thresholds.Set()
	for i := range targets {
		t := &targets[i]
		why := p.excludes(t)
		if why == 0 || why > excludedLeg {
			workers++
		}
		if why != 0 {
			continue
		}
		if limited && r.Admission.busy(t.Key.Worker, now) {
			err = ErrBusy
			continue
		}
		c := &candidates[n]
		n++
		if d.candidate(c, p, i); c.Overlap > p.reachable || c.Lower != (kv.LowerBlocks{}) {
			device, lower := d.finds(p, c)
			p.reachable = max(p.reachable, device+lower.Total())
		}
	}
	d.candidates, p.workers = candidates[:n], workers
	if n == 0 {
		return err
	}
	if (r.fleet.resting > 0 || p.Versions.Restricts()) && p.Pinned == nil && !d.waitsForBest(p) {
		d.prefer(func(c *policy.Candidate) bool { return d.runs(p, c.Target.Key, c.Load) })
	}
	if p.Session != 0 || p.Home != nil {
		if d.trialStarves(now) && d.onTrial(p, now) {
			return nil
		}
		if p.stays = d.keepSession(p, now); p.stays {
			return nil
		}
	}
	if !r.Health.outliers.Quiet() && p.Pinned == nil {
		return d.filter(p, now)
	}
	return nil
}

// prefer leaves the candidates that are good, in their order, or all if none is. others: some are
// left out.
func (d *decider) prefer(good func(*policy.Candidate) bool) (others bool) {
	kept := d.candidates[:0]
	for i := range d.candidates { // kept is behind it
		if c := &d.candidates[i]; good(c) {
			kept = append(kept, *c)
		}
	}
	if len(kept) == 0 || len(kept) == len(d.candidates) {
		return false
	}
	d.candidates = kept
	return true
}

// busy reports whether all ranks of a worker are beyond a threshold.
func (a *Admission) busy(worker uint64, now time.Time) bool {
	r := a.router
	at, _ := r.fleet.target(kv.WorkerKey{Worker: worker})
	for ; at < len(r.fleet.targets) && r.fleet.targets[at].Key.Worker == worker; at++ {
		if load := r.fleet.targetLoads[at].asOf(now); !a.thresholds.exceeded(&r.fleet.targets[at], load) {
			return false
		}
	}
	return true
}

// snapshot looks up what requests in flight have of p, and what is the same for all candidates, and
// brings the loads up to now. It comes before candidate, without a change of the books in between.
func (d *decider) snapshot(p *prompt, now time.Time) {
	r := d.router
	r.fleet.freshen(now)
	for i := range p.views {
		v := &p.views[i]
		v.distinct, v.usable = v.times*p.newBlocks(v), v.times*usableBlocks(p.tokens, v.size)
		if d.traits.WholeMatch {
			v.usable = v.times * (p.tokens / v.size)
		}
	}
	if p.counted && p.shared {
		r.fleet.loads.snapshot(p.views)
	}
}

// freshen brings the loads of the workers that are up up to now. Mostly none of them has become too
// old since the last time, and thousands need not be looked at.
func (f *fleet) freshen(now time.Time) {
	if now.Before(f.loads.stale) {
		return
	}
	f.loads.stale = now.Add(loadFreshFor)
	for i := range f.targetLoads {
		if load := f.targetLoads[i].asOf(now); load.Fresh {
			f.loads.staleAt(load)
		}
	}
}

// candidate sets c to the target at that place as p sees it.
func (d *decider) candidate(c *policy.Candidate, p *prompt, at int) {
	f := &d.router.fleet
	load := &f.targetLoads[at]
	c.Target, c.Load = &f.targets[at], load.load
	v := p.viewOf(int(load.blockSize))
	c.Overlap, c.Held, c.NewBlocks = 0, 0, v.distinct
	c.Lower = kv.LowerBlocks{}
	if c.Pull.Blocks != 0 {
		c.Pull = policy.Pull{}
	}
	if d.traits.TreeBlocks {
		c.TreeBlocks = 0
	}
	if p.Cached != nil {
		c.Overlap = *p.Cached / p.unit
	} else if m := p.matched(c.Target.Key); m != nil && !load.engine.forgets(p) {
		c.Overlap, c.Held = m.Blocks, m.Held
		if m.Lower != (kv.LowerBlocks{}) || m.Staged != (kv.LowerBlocks{}) {
			c.Lower, c.Doubtful = d.counted(m), d.doubts(m)
		}
		if d.traits.TreeBlocks && m.Blocks > 0 {
			c.TreeBlocks = d.router.index.Blocks(c.Target.Key)
		}
	}
	matched := c.Overlap
	if p.counted && p.shared {
		active := f.loads.activeOn(load.number)
		c.NewBlocks -= active
		if d.traits.Siblings {
			c.Overlap = max(c.Overlap, active)
		}
	}
	c.Overlap = min(c.Overlap, v.usable)
	if c.Lower != (kv.LowerBlocks{}) {
		c.Lower = c.Lower.Beyond(c.Overlap - matched).Within(v.usable - c.Overlap)
	}
	if c.Indexed = c.Overlap; c.Target.Known == kv.Approximate && p.Cached == nil && c.Load.Tiers != nil {
		c.Overlap = int(math.Round(c.Load.Tiers.Trust(kv.Device) * float64(c.Indexed)))
	}
	if p.sources[0].blocks > 0 && c.Target.Pulls() {
		c.Pull = p.pullTo(c, v.usable)
	}
}

// doubts reports whether the own lower tiers of the match's worker may have been emptied.
// A match is also doubtful for blocks of which no engine announces the removal: how many
// of these come is what policies learn.
func (d *decider) doubts(m *kv.Match) bool {
	return m.Doubtful() && (m.Lower.Disk+m.Lower.External == 0 || d.router.index.LowerOf(m.Worker).Doubt != 0)
}

// doubted reports whether the lower tiers of the candidate may have been emptied, also where the
// policy counts nothing of them.
func (d *decider) doubted(p *prompt, c *policy.Candidate) bool {
	if p.Cached != nil {
		return false
	}
	m := p.matched(c.Target.Key)
	return m != nil && (m.Lower != (kv.LowerBlocks{}) || m.Staged != (kv.LowerBlocks{})) && d.doubts(m)
}

// counted returns the blocks in lower tiers that the policy counts.
func (d *decider) counted(m *kv.Match) kv.LowerBlocks {
	if d.traits.Staged {
		return m.Staged
	}
	return m.Lower
}

// uncached returns how many tokens of a prompt the candidate has to compute, by the
// policy's reckoning.
func (d *decider) uncached(p *prompt, c *policy.Candidate) int {
	loaded := 0
	if c.Lower != (kv.LowerBlocks{}) {
		loaded = int(math.Round(d.traits.Loaded(c) * float64(p.unit)))
	}
	return p.tokens - c.Overlap*p.unit - loaded - c.Pull.Tokens
}

// tracksPrefill reports whether p's tokens are counted.
func (d *decider) tracksPrefill(p *prompt) bool {
	if p.Override != nil && p.Override.TrackPrefillTokens != nil {
		return *p.Override.TrackPrefillTokens
	}
	return d.router.settings.RouterTrackPrefillTokens
}

// predict sets what of p is cached on the candidate.
func (d *decider) predict(p *prompt, to *Decision, c *policy.Candidate) {
	r := d.router
	to.BlockSize = p.unit
	to.Overlap, to.Lower = d.finds(p, c)
	sure, guessed := p.certain(c, to.Overlap, to.Lower)
	to.Predicted, to.Guessed = sure.Tokens(p.unit), guessed.Tokens(p.unit)
	to.Predicted.Device = to.Overlap * p.unit
	to.OverlapTokens = to.Predicted.Total()
	to.Reachable = max(to.OverlapTokens, p.reachable*p.unit)
	if c.Pull.Tokens > 0 {
		to.Guessed.External += c.Pull.Blocks * p.unit
		if at, up := r.fleet.target(c.Pull.From); up {
			from := r.fleet.targets[at]
			to.Source = &from
		}
	}
	to.MatchedBlocks, to.MatchedLower, to.EffectivePrefillTokens = c.Overlap, c.Lower, d.uncached(p, c)
}

// assume notes in an Assumer that p goes to t; for other indexes it returns nil.
func (d *decider) assume(t *kv.Target, p *prompt) *radix.Assumed {
	if d.assumes == nil {
		return nil
	}
	return d.assumes.Routed(t.Key, p.viewOf(int(t.BlockSize)).local)
}

// finds returns what the engine of the candidate is expected to find cached of p: blocks
// on the device, and those that continue them in lower tiers, also where the policy
// counts them differently.
func (d *decider) finds(p *prompt, c *policy.Candidate) (device int, lower kv.LowerBlocks) {
	v := p.viewOf(int(c.Target.BlockSize))
	usable := v.times * usableBlocks(p.tokens, max(1, v.size))
	device, lower = min(c.Indexed, usable), c.Lower
	if d.traits.Staged && p.Cached == nil {
		lower = kv.LowerBlocks{}
		if m := p.matched(c.Target.Key); m != nil {
			lower = m.Lower.Beyond(c.Indexed - m.Blocks)
		}
	}
	return device, lower.Within(usable - device)
}

// certain splits the blocks in lower tiers that the candidate is expected to find behind
// so many on the device: those whose removal would have been announced, and the others.
func (p *prompt) certain(c *policy.Candidate, device int, lower kv.LowerBlocks) (sure, guessed kv.LowerBlocks) {
	if m := p.matched(c.Target.Key); m != nil {
		sure.Host = min(max(0, m.Sure-int32(device-m.Blocks)), lower.Host)
	}
	lower.Host -= sure.Host
	return sure, lower
}

// matched returns what the index has of p on w; nil: nothing. Workers are mostly asked
// for in their order, which is that of the matches.
func (p *prompt) matched(w kv.WorkerKey) *kv.Match {
	if at := p.next; at < len(p.matches) && p.matches[at].Worker == w {
		p.next++
		return &p.matches[at]
	}
	return p.searchMatch(w)
}

// searchMatch is matched for a worker that is not the next one.
func (p *prompt) searchMatch(w kv.WorkerKey) *kv.Match {
	if p.next > 0 {
		switch order := p.matches[p.next-1].Worker.Compare(w); {
		case order == 0:
			return &p.matches[p.next-1]
		case order > 0:
			p.next, _ = slices.BinarySearchFunc(p.matches, w, func(m kv.Match, w kv.WorkerKey) int { return m.Worker.Compare(w) })
		}
	}
	for ; p.next < len(p.matches); p.next++ {
		switch order := p.matches[p.next].Worker.Compare(w); {
		case order == 0:
			p.next++
			return &p.matches[p.next-1]
		case order > 0:
			return nil
		}
	}
	return nil
}
