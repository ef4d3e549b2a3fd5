package router

import (
	"math"
	"slices"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
)

// collect makes candidates of the workers that may serve p.
func (r *Router) collect(p *prompt, now time.Time) error {
	candidates := slices.Grow(r.candidates[:0], len(r.targets))[:len(r.targets)]
	err, n, workers := ErrNoWorker, 0, 0
	r.snapshot(p, now)
	r.findSources(p, now)
	p.reachable, p.stays = 0, false
	limited := r.Admission.thresholds.Set()
	for i := range r.targets {
		t := &r.targets[i]
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
		if r.candidate(c, p, i); c.Overlap > p.reachable || c.Lower != (kv.LowerBlocks{}) {
			device, lower := r.finds(p, c)
			p.reachable = max(p.reachable, device+lower.Total())
		}
	}
	r.candidates, p.workers = candidates[:n], workers
	if n == 0 {
		return err
	}
	if p.Session != 0 || p.Home != nil {
		if r.trialStarves(now) && r.onTrial(p, now) {
			return nil
		}
		if p.stays = r.keepSession(p, now); p.stays {
			return nil
		}
	}
	if !r.Health.outliers.Quiet() && p.Pinned == nil {
		return r.filter(p, now)
	}
	return nil
}

// prefer leaves the candidates that are good, in their order, or all if none is. others: some are
// left out.
func (r *Router) prefer(good func(*policy.Candidate) bool) (others bool) {
	kept := r.candidates[:0]
	for i := range r.candidates { // kept is behind it
		if c := &r.candidates[i]; good(c) {
			kept = append(kept, *c)
		}
	}
	if len(kept) == 0 || len(kept) == len(r.candidates) {
		return false
	}
	r.candidates = kept
	return true
}

// busy reports whether all ranks of a worker are beyond a threshold.
func (a *Admission) busy(worker uint64, now time.Time) bool {
	r := a.router
	at, _ := r.target(kv.WorkerKey{Worker: worker})
	for ; at < len(r.targets) && r.targets[at].Key.Worker == worker; at++ {
		if load := r.targetLoads[at].asOf(now); !a.thresholds.exceeded(&r.targets[at], load) {
			return false
		}
	}
	return true
}

// snapshot looks up what requests in flight have of p, and what is the same for all candidates, and
// brings the loads up to now. It comes before candidate, without a change of the books in between.
func (r *Router) snapshot(p *prompt, now time.Time) {
	r.freshen(now)
	p.distinct, p.usable = p.newBlocks(), r.usableBlocks(p.tokens)
	if r.traits.WholeMatch {
		p.usable = p.tokens / r.blockSize
	}
	if p.counted && p.shared {
		r.loads.snapshot(p.sequence)
	}
}

// freshen brings the loads of the workers that are up up to now. Mostly none of them has become too
// old since the last time, and thousands need not be looked at.
func (r *Router) freshen(now time.Time) {
	if now.Before(r.loads.stale) {
		return
	}
	r.loads.stale = now.Add(loadFreshFor)
	for i := range r.targetLoads {
		if load := r.targetLoads[i].asOf(now); load.Fresh {
			r.loads.staleAt(load)
		}
	}
}

// candidate sets c to the target at that place as p sees it.
func (r *Router) candidate(c *policy.Candidate, p *prompt, at int) {
	c.Target = &r.targets[at]
	c.Overlap, c.Held, c.NewBlocks = 0, 0, p.distinct
	c.Lower = kv.LowerBlocks{}
	if c.Pull.Blocks != 0 {
		c.Pull = policy.Pull{}
	}
	if r.traits.TreeBlocks {
		c.TreeBlocks = 0
	}
	c.Load = r.targetLoads[at].load
	if p.Cached != nil {
		c.Overlap = *p.Cached / r.blockSize
	} else if m := p.matched(c.Target.Key); m != nil {
		c.Overlap, c.Held = m.Blocks, m.Held
		if m.Lower != (kv.LowerBlocks{}) || m.Staged != (kv.LowerBlocks{}) {
			c.Lower, c.Doubtful = r.counted(m), r.doubts(m)
		}
		if r.traits.TreeBlocks && m.Blocks > 0 {
			c.TreeBlocks = r.index.Blocks(c.Target.Key)
		}
	}
	matched := c.Overlap
	if p.counted && p.shared {
		active := r.loads.activeOn(r.targetLoads[at].number)
		c.NewBlocks -= active
		if r.traits.Siblings {
			c.Overlap = max(c.Overlap, active)
		}
	}
	c.Overlap = min(c.Overlap, p.usable)
	if c.Lower != (kv.LowerBlocks{}) {
		c.Lower = c.Lower.Beyond(c.Overlap - matched).Within(p.usable - c.Overlap)
	}
	if p.sources[0].blocks > 0 && c.Target.Pulls() {
		c.Pull = p.pullTo(c, p.usable)
	}
}

// doubts reports whether the own lower tiers of the match's worker may have been emptied.
// A match is also doubtful for blocks of which no engine announces the removal: how many
// of these come is what policies learn.
func (r *Router) doubts(m *kv.Match) bool {
	return m.Doubtful() && (m.Lower.Disk+m.Lower.External == 0 || r.index.LowerOf(m.Worker).Doubt != 0)
}

// doubted reports whether the lower tiers of the candidate may have been emptied, also where the
// policy counts nothing of them.
func (r *Router) doubted(p *prompt, c *policy.Candidate) bool {
	if p.Cached != nil {
		return false
	}
	m := p.matched(c.Target.Key)
	return m != nil && (m.Lower != (kv.LowerBlocks{}) || m.Staged != (kv.LowerBlocks{})) && r.doubts(m)
}

// counted returns the blocks in lower tiers that the policy counts.
func (r *Router) counted(m *kv.Match) kv.LowerBlocks {
	if r.traits.Staged {
		return m.Staged
	}
	return m.Lower
}

// uncached returns how many tokens of a prompt the candidate has to compute, by the
// policy's reckoning.
func (r *Router) uncached(tokens int, c *policy.Candidate) int {
	loaded := 0
	if c.Lower != (kv.LowerBlocks{}) {
		loaded = int(math.Round(r.traits.Loaded(c) * float64(r.blockSize)))
	}
	return tokens - c.Overlap*r.blockSize - loaded - c.Pull.Tokens
}

// finds returns what the engine of the candidate is expected to find cached of p: blocks
// on the device, and those that continue them in lower tiers, also where the policy
// counts them differently.
func (r *Router) finds(p *prompt, c *policy.Candidate) (device int, lower kv.LowerBlocks) {
	usable := r.usableBlocks(p.tokens)
	device, lower = min(c.Overlap, usable), c.Lower
	if r.traits.Staged && p.Cached == nil {
		lower = kv.LowerBlocks{}
		if m := p.matched(c.Target.Key); m != nil {
			lower = m.Lower.Beyond(c.Overlap - m.Blocks)
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
