package policy

import (
	"math"
	"math/rand/v2"
	"time"

	"kvrouter/internal/base/kv"
)

// Work chooses the worker where a request costs the least time, summed over all
// affected requests. All terms are in ms:
//
//	f·(first + load − copy + pushed + foreign + later + network) + decode + others + slower + adapter
//
//	first    predicted time to first token: the worker's next passes are
//	         simulated, see coming.
//	load     delay by loads from lower tiers, those before on the worker included:
//	         for each tier a fixed time and one for each token, see loadTime. Engines
//	         load what they have, also where computing would be faster. A load
//	         begins with the first pass that has room for the prompt.
//	copy     the part of own, the time to compute the uncached tokens, that later
//	         requests save. The term leaves out its passes, which they take in any
//	         case. A new copy of a prefix is an investment: in the next turnover of
//	         the caches as many requests will use the prefix as in the last one, over
//	         N workers. So of a block that was used u times, u/(u + N) is theirs. Of windows and states, engines keep only those
//	         where two prompts parted: where another group than the first ends the match
//	         of any worker, a copy is worth something only behind what the worker's
//	         first group holds.
//	pushed   delay of the first tokens of earlier requests that share a pass.
//	foreign  wait for queued requests of other clients of the worker.
//	later    λ·(own − copy)·(first + backlog − own/2)/(1 − ρ): work that is added to a
//	         queue delays all requests that arrive before it is empty (M/G/1). backlog
//	         is what of its class and of those before it waits in the router for each
//	         worker, with a fair queue. λ is the arrival rate of a worker per ms, ρ the
//	         share of time with prompts to compute, estimated by the share of workers
//	         that decisions find so.
//	         Loads of a worker are served one after the other, beside the passes: a
//	         second queue, with the rate λₗ of loads and the share ρₗ of time with
//	         loads under way. It adds λₗ·l·(load − l/2)/(1 − ρₗ), where l is the time
//	         of this load alone: (load − l) of waiting and half of its own.
//	decode   slowdown of this answer by the context on the worker.
//	others   n·(own − copy + Pass·begun): the n in-flight requests pause in passes
//	         that compute this prompt; begun are those without another prompt.
//	slower   slowdown of their decoding by this prompt. Two answers of random
//	         (exponential) length overlap for half of one.
//	adapter  of requests with a LoRA adapter: (f + n)·load where the worker does not have
//	         it loaded, less the part that later requests save as of copy, and that
//	         part of f·load of the adapter that is evicted for it; f times the wait for a
//	         slot, and up to an eighth of f·load, less that part, by which each adapter
//	         prefers a worker, see placement. load is learned from first tokens.
//	network  the round trip, if that to the candidates differs: of a cell, a router whose
//	         workers are below it. Its other terms are those of one of its workers that has an equal share of its
//	         load, with the wait that it reports, see cellTerms.
//	f        1 + ½·(mean duration)/(mean time to first token): minimizes
//	         ln(mean duration) + ½·ln(mean time to first token). The ½ is a
//	         preference, the only chosen constant.
//
// A decode worker has no prompt to compute, and a prefill worker has no decoding
// that pauses. Blocks of in-flight requests count as cached. Pass durations and
// means are learned from finished requests. Ties are broken at random.
type Work struct {
	Timing *EngineTiming

	firstToken runningMean // ms until then
	decoding   runningMean // ms from first to last token
	Output     runningMean // tokens
	stretch    runningMean // of answers, see TokenTime
	busy       runningMean // share of the workers with prompts to compute
	loadBusy   runningMean // share of the workers with loads from lower tiers under way
	loadShare  runningMean // share of the requests that load
	gap        runningMean // ms between two requests
	last       time.Time   // when the last one came
	reuse      reuseCounts
	loads      [len(kv.LowerTiers)]loadFit // of all workers
	ordered    []Prefill                   // reused by computing
	pulls      loadFit                     // of all workers
	pulledAt   time.Time                   // when pulls last learned
	found      runningMean                 // share of a prompt's tokens that was cached

	adapterLoad runningMean // ms to load an adapter
	adapterUses adapterUses
}

// workMeanOver is the number of requests that the means are over, about.
const workMeanOver = 256

// runningMean is the mean of about the last workMeanOver values.
type runningMean struct {
	Value float64
	count int
}

func (m *runningMean) add(value float64) {
	m.count = min(m.count+1, workMeanOver)
	m.Value += (value - m.Value) / float64(m.count)
}

// longestGap is what a longer pause between two requests counts, ms: a quiet night
// says nothing about the rate of the morning.
const longestGap = 1000

// NewWork returns policy work with an engine's timing to begin with.
func NewWork() *Work { return &Work{Timing: NewEngineTiming(), adapterUses: adapterUses{}} }

// Traits requests siblings: an engine computes prompts in order, so their blocks
// will be cached.
func (*Work) Traits() Traits {
	return Traits{ActiveBlocks: true, Siblings: true, HostCredit: 1, DiskCredit: 1}
}

// Learn learns from a finished request. The first token of a request whose prompt
// another worker computed is not used; a prompt alone has no mean answer.
func (p *Work) Learn(o Outcome) {
	o.Alone = o.Alone && o.Leg != kv.LegDecode
	p.Timing.Learn(o)
	p.learnLoad(&o)
	p.learnAdapter(&o)
	if o.Leg != kv.LegPrefill {
		p.learnStretch(&o)
		p.LearnUsual(o)
	}
}

// LearnUsual learns from the length and the duration of a finished answer.
func (p *Work) LearnUsual(o Outcome) {
	p.firstToken.add(milliseconds(o.FirstToken))
	p.decoding.add(milliseconds(o.Decode))
	p.Output.add(float64(o.Output))
}

// Choose returns the candidate with the lowest cost, and learns the arrival rate
// and the prefixes of prompts.
func (p *Work) Choose(q Query, candidates []Candidate, random *rand.Rand) int {
	computes := q.Leg != kv.LegDecode
	learns := computes && !q.DryRun && !q.Retry
	all := p.survey(&q, candidates)
	if computes {
		p.reuse.look(q.Sequence, all.workers/all.routers(), learns)
	}
	if learns {
		p.arrive(q, all)
		if q.Adapter != "" {
			p.adapterUses.add(q.Adapter, q.Now)
		}
	}
	u := p.usual(q, candidates, all)
	if all.pulls {
		u.starts = p.startsBest(&q, candidates, &u)
	}
	if q.Explain != nil {
		q.Explain.Rank("work", candidates, func(c *Candidate) Score { t := p.terms(&q, c, &u); return t.explain() })
	}
	same := workSame{overlap: -1}
	chosen := Best(candidates, random, func(c *Candidate) float64 {
		if c.plain() && q.Adapter == "" {
			return -p.plainCost(&q, c, &u, &same)
		}
		t := p.terms(&q, c, &u)
		return -t.cost()
	})
	if c := &candidates[chosen]; c.Pull.Blocks > 0 {
		c.Pull.Tokens = p.terms(&q, c, &u).pulled
	}
	if learns {
		loads := 0.0
		if candidates[chosen].Lower != (kv.LowerBlocks{}) || candidates[chosen].Pull.Tokens > 0 {
			loads = 1
		}
		p.loadShare.add(loads)
	}
	if learns && q.Tokens > 0 {
		uncached := float64(uncachedTokens(&q, &candidates[chosen]))
		p.found.add(1 - uncached/float64(q.Tokens))
		stored := uncached + u.output
		caches := all.cache * float64(fleet(q, len(candidates))) / float64(len(candidates))
		p.reuse.pass(min(all.routers()*stored/caches, 1))
	}
	return chosen
}

// survey is what a decision counts of all candidates, in one pass: thousands of them do not
// fit in the processor's cache.
type survey struct {
	candidates   int
	workers      float64 // those of cells included
	ours, others int     // requests in flight from this router, and from others
	cache        float64 // tokens that the caches hold
	computing    float64 // candidates with prompts to compute; of a cell, the share of its workers
	loading      int     // candidates with loads from lower tiers under way
	parts        bool    // another group than the first ends a match
	pulls        bool    // one could pull blocks from another worker
}

func (p *Work) survey(q *Query, candidates []Candidate) survey {
	all := survey{candidates: len(candidates)}
	for i := range candidates {
		c := &candidates[i]
		load := c.Load
		all.workers += load.width()
		all.ours += load.InFlight - int(load.Remote)
		all.others += load.Foreign + int(load.Remote)
		if reported := c.Target.TotalBlocks * q.BlockSize; reported > 0 {
			all.cache += float64(reported)
		} else {
			all.cache += load.width() * workUntoldCache
		}
		all.parts = all.parts || int(c.Held) > c.Overlap
		all.pulls = all.pulls || c.Pull.Blocks > 0
		switch {
		case len(load.Prefills) == 0:
			continue
		case load.Cell != nil:
			all.computing += min(1, float64(len(load.Prefills))/load.width())
			continue
		case load.Fetching == 0:
			all.computing++
			continue
		}
		if len(p.computing(q.Now, load, 0)) > 0 {
			all.computing++
		}
		if p.loadsBefore(q.Now, load) > 0 {
			all.loading++
		}
	}
	return all
}

// routers is how many times as many requests as ours the workers have in flight: what
// this router sees of arrivals and uses is its share of them. More than mostRouters
// are a worker's false account.
func (s survey) routers() float64 {
	return min(1+float64(s.others)/float64(max(1, s.ours)), mostRouters)
}

// mostRouters bounds survey.routers.
const mostRouters = 64

// workUntoldCache is the assumed cache size, tokens, of a worker that reports none:
// about that of an 8B model on a GPU of 80 GB.
const workUntoldCache = 1 << 19

// arrive counts a request, and the workers that it finds busy, if it has a
// look at most of them.
func (p *Work) arrive(q Query, all survey) {
	if !p.last.IsZero() {
		p.gap.add(min(max(milliseconds(q.Now.Sub(p.last)), 0), longestGap))
	}
	p.last = q.Now
	if 2*all.candidates >= fleet(q, all.candidates) {
		p.busy.add(all.computing / float64(all.candidates))
		p.loadBusy.add(float64(all.loading) / float64(all.candidates))
	}
}

// fleet is how many workers share the requests that this one is of: where a request
// may go to few of them, the others get other ones.
func fleet(q Query, candidates int) int { return max(q.Workers, candidates) }

// uncachedTokens is how many tokens of the prompt the candidate has to compute: of a
// prompt at least one, also where nothing is known of it.
func uncachedTokens(q *Query, c *Candidate) int {
	if q.Leg == kv.LegDecode {
		return 0
	}
	return max(1, q.Tokens-c.Overlap*q.BlockSize)
}

// workUsual is what all candidates of a decision have in common.
type workUsual struct {
	f        float64
	output   float64 // tokens
	decoding float64 // ms
	starts   float64 // of startsBest
	parts    bool    // another group than the first ends a match
	delayed  float64 // requests that come to a worker until a queue is empty, for each ms of it
	behind   float64 // the same of loads, until no more are under way

	// Of a request with an adapter:
	adapters int     // that a worker may have, see adapterMost
	workers  float64 // that share the requests
	once     float64 // part of a load that later requests do not save
}

const (
	// workFirstOutput is the assumed answer before any has ended, tokens.
	workFirstOutput = 256
	// workFirstToken is what a percent of the mean time to the first token counts beside
	// a percent of the mean whole time.
	workFirstToken = 0.5
	// workMostBusy keeps 1/(1 − ρ) finite.
	workMostBusy = 0.98
)

func (p *Work) usual(q Query, candidates []Candidate, all survey) workUsual {
	u := workUsual{output: workFirstOutput, decoding: workFirstOutput * p.Timing.decode, parts: all.parts}
	first := p.Timing.Prefill(q.Tokens)
	if p.Output.count > 0 {
		u.output, u.decoding, first = p.Output.Value, p.decoding.Value, p.firstToken.Value
	}
	first = max(first, 1)
	u.f = 1 + workFirstToken*(first+u.decoding)/first
	if q.Adapter != "" {
		u.adapters, u.workers = adapterMost(q.Adapter, candidates), float64(fleet(q, all.candidates))
		u.once = 1 - p.adapterUses.share(q.Adapter, q.Now, u.workers)
	}
	if p.gap.Value > 0 {
		rate := all.routers() / p.gap.Value / float64(fleet(q, all.candidates))
		u.delayed = rate / (1 - min(p.busy.Value, workMostBusy))
		u.behind = rate * p.loadShare.Value / (1 - min(p.loadBusy.Value, workMostBusy))
	}
	return u
}

// workTerms are the parts of a cost, ms: the first ones are f times what Work says.
type workTerms struct {
	first, load, copy, pushed, foreign, later float64
	decode, others, slower                    float64

	pull    float64
	adapter float64 // not times f
	network float64 // round trip
	far     bool    // it has one
	starts  float64 // until the first token, not times f
	pulled  int     // tokens that it is expected to pull
	sourced bool    // it could pull
}

func (t *workTerms) cost() float64 {
	return t.first + t.load + t.pull - t.copy + t.pushed + t.foreign + t.later + t.network + t.decode + t.others + t.slower + t.adapter
}

func (t *workTerms) explain() Score {
	s := Score{
		Terms: []Term{
			{"first_token", -t.first}, {"load", -t.load}, {"copy", t.copy}, {"pushed", -t.pushed}, {"foreign", -t.foreign}, {"later", -t.later},
			{"decode", -t.decode}, {"others", -t.others}, {"slower", -t.slower},
		},
		Total: -t.cost(),
	}
	if t.far {
		s.Terms = append(s.Terms, Term{"network", -t.network})
	}
	if t.adapter != 0 {
		s.Terms = append(s.Terms, Term{"adapter", -t.adapter})
	}
	if t.sourced {
		s.Terms = append(s.Terms, Term{"pull", -t.pull})
	}
	return s
}

// startsBest returns when the first token comes, ms, at the candidate that is best without
// pulls.
func (p *Work) startsBest(q *Query, candidates []Candidate, u *workUsual) (ms float64) {
	least := math.Inf(1)
	for i := range candidates {
		var t workTerms
		if p.setTerms(&t, q, &candidates[i], u, false); t.cost() < least {
			least, ms = t.cost(), t.starts
		}
	}
	return ms
}

// terms returns the parts of a candidate's cost: that of computing what it does not have,
// or of pulling it, whichever is less. With a pull, the first token must come no later than
// at the best candidate without pulls: later ones, which spare the answers of others, paid
// in no simulation.
func (p *Work) terms(q *Query, c *Candidate, u *workUsual) (t workTerms) {
	p.setTerms(&t, q, c, u, false)
	if c.Pull.Blocks == 0 {
		return t
	}
	var pulled workTerms
	if p.setTerms(&pulled, q, c, u, true); pulled.pulled > 0 && pulled.cost() < t.cost() && pulled.starts <= u.starts {
		t = pulled
	}
	t.sourced = true
	return t
}

// setTerms sets t, which is zero, to the parts of a candidate's cost, with its pull or without.
func (p *Work) setTerms(t *workTerms, q *Query, c *Candidate, u *workUsual, pulls bool) {
	if c.Load.Cell != nil {
		p.cellTerms(t, q, c, u)
		return
	}
	uncached, load := uncachedTokens(q, c), loading{}
	if (c.Lower != (kv.LowerBlocks{}) || pulls) && q.Leg != kv.LegDecode {
		load = p.loading(q, c, pulls)
		uncached = max(1, uncached-load.tokens-load.pulled)
	}
	starts, pushed, begun, _ := p.coming(q.Now, c.Load, uncached, load.over)
	first := starts - load.delay()
	own := p.Timing.Prefill(uncached)
	copied := 0.0
	if uncached > 0 {
		cached := c.Overlap + load.tokens/q.BlockSize
		if c.Pull.Blocks > 0 {
			copied = min(own, p.copiedBeside(q, c, u, cached, pulls))
		} else {
			copied = p.copied(q, c, u, cached, own)
		}
	}
	t.first, t.load, t.copy, t.pushed, t.starts = u.f*first, u.f*(load.delay()-load.pull), u.f*p.Timing.withoutPasses(copied), u.f*pushed, starts
	t.foreign = u.f * foreignWait(c.Load) * u.decoding
	t.later = u.f * u.delayed * (own - copied) * (first + q.Backlog - own/2)
	if network := milliseconds(c.Network); network > 0 {
		t.starts += network
		t.network, t.far = u.f*network, true
	}
	if load.pulled > 0 {
		t.pull, t.pulled = u.f*(load.pull+p.evicted(load.pulled)), load.pulled
	}
	if load.own > 0 {
		t.later += u.f * load.later(u.behind)
	}
	if q.Adapter != "" {
		t.adapter = p.adapter(q, c, u)
	}
	if q.Leg != kv.LegPrefill {
		n := float64(c.Load.requests())
		t.decode = u.output * p.Timing.context * float64(c.Load.Context())
		t.others = n * (own - copied + p.Timing.Pass*float64(begun))
		t.slower = n * u.output / 2 * p.Timing.context * float64(max(1, q.Tokens))
	}
}

// copied returns the part of own, the time to compute what the candidate does not have, that later
// requests save by a new copy of that, where it has so many blocks.
func (p *Work) copied(q *Query, c *Candidate, u *workUsual, cached int, own float64) float64 {
	blocks := p.reuse.others(cached)
	if u.parts {
		blocks -= p.reuse.others(max(cached, int(c.Held)))
	}
	return min(own, p.Timing.Prefill(q.BlockSize)*blocks)
}

// copiedBeside returns the time that later requests save by a new copy of what the
// candidate computes, if another worker has blocks that they could pull. Of such a block
// they save a pull at most, and the copy is worth nothing that the candidate pulls itself:
// the one that it is pulled from stays.
func (p *Work) copiedBeside(q *Query, c *Candidate, u *workUsual, cached int, pulls bool) float64 {
	if u.parts {
		return 0 // only of models whose blocks are not pulled
	}
	there := cached + c.Pull.Blocks
	compute := p.Timing.Prefill(q.BlockSize)
	saved := compute * p.reuse.others(there)
	if pulls {
		return saved
	}
	pull, _ := p.pullTime(q.Now, c.Load.Tiers, float64(q.BlockSize))
	return saved + min(compute, pull)*max(0, p.reuse.others(cached)-p.reuse.others(there))
}

// foreignWait is how many answers will be given before the requests have left the queue
// that others have sent: they wait for the ends of those that run.
func foreignWait(load *Load) float64 {
	if load.Foreign == 0 {
		return 0
	}
	return float64(min(load.Foreign, load.Waiting)) / float64(max(load.Running, 1))
}
