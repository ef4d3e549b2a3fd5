// Package thompson is a routing policy: a contextual bandit with session affinity,
// which learns each worker's reward by Thompson sampling.
package thompson

import (
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"kvrouter/internal/base/jsonlines"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
)

const (
	// pinTTL is how long after its last request a series is taken for
	// over.
	pinTTL = 5 * time.Minute
	// Bounds of the entries kept; the oldest goes first.
	maxSeries  = 1 << 16
	maxPending = 1 << 16
	maxWorkers = 4096

	// loadWeight weighs the logarithm of the load. A reward is 1/(1 +
	// latency/usual), which falls by 1/4 of the latency's logarithm where that is
	// usual; so a load twice as high counts as a latency twice as long.
	loadWeight = 0.25
	// fadeWorkers is the number of workers up to which the evidence about one
	// fades with every feedback about any; with more workers it fades the slower,
	// so that as much remains of each.
	fadeWorkers = 4

	// The prior weighs as priorWeight times
	// lints.lambda: half a point for any decision, so much for a cached prompt and
	// so much off for one of many uncached tokens.
	priorWeight  = 8
	priorReward  = 0.5
	priorOverlap = 0.5
	priorPrefill = -0.3
	// coldStartTemp is the temperature then, in times of the lowest one: what is
	// drawn from beliefs explores by itself.
	coldStartTemp = 1. / 3
)

// Features of a decision.
const (
	featureOne = iota
	featureIdle
	featureOverlap
	featureStays
	featureOutstanding
	featureDecode
	featurePrefill
	featureIAT
	featureReuse
)

// Policy is the Thompson-sampling router of the NeMo Agent Toolkit. It learns each
// worker's reward as a linear function of the features of a decision (linearBandit)
// and as a mean (betaBandit), samples both, adds the affinity to the worker that
// served the series last, discounts for load, and draws a worker by the softmax of
// these scores. docs/thompson.md has the formulas and the effect of each fix.
type Policy struct {
	parameters
	prior banditPrior
	trace *jsonlines.Writer // nil: none

	workers   *recent[kv.WorkerKey, *arm]
	series    *recent[string, *requestSeries] // by prefix id, where requests are to come
	pending   *recent[uint64, *pendingDecision]
	baselines map[latencyKey]float64 // mean latencies, ms
	faded     float64                // ln of the share that remains of the very first feedback
	swept     time.Time
	changes   uint64 // of a state file's content

	timeouts, stayed, switched uint64
	tokens, budgets            Histogram // of the decisions

	roundRobin      int       // decisions without anything to go by
	scores, chances []float64 // of the candidates; reused
	choices         []candidate
}

// arm is the evidence on one worker.
type arm struct {
	key        kv.WorkerKey
	generation int // its incarnation; 0: not yet seen
	mean       betaBandit
	linear     *linearBandit
	faded      float64 // Policy.faded when both were brought up to date
	waits      int     // decisions for it that are pending
	pins       int     // series that are pinned to it
	work       float64 // what those will bring, see workOf

	decisions uint64
	overlap   float64
	reward    float64
	latency   Histogram // of its feedback, s
}

// requestSeries is a series of requests of which more are to come.
type requestSeries struct {
	id        string
	total     int // requests of it
	processed int // those that have come
	pinned    bool
	pin       seriesPin
	touched   time.Time
}

// seriesPin is where a series was sent last, and what that decision was like.
type seriesPin struct {
	worker          kv.WorkerKey
	reuse           int
	decode, prefill float64
	iat             float64
}

// pendingDecision is a decision without feedback so far.
type pendingDecision struct {
	decision uint64
	worker   kv.WorkerKey
	series   string
	x        banditVector
	began    time.Time
	tokens   int // of the prompt
	osl      hints.Level
	bin      hints.Level // of the prefill cost
}

// requestTerms is a request in the terms of the rule.
type requestTerms struct {
	tokens  int
	blocks  int     // full ones of the prompt
	decode  float64 // cost of its answer: D
	iat     float64 // factor of the gaps: F
	reuse   int     // requests to come after it: R
	temp    float64
	last    kv.WorkerKey // that has served the series so far
	hasLast bool
	own     float64 // of last's outstanding work, what this series is to bring
}

// candidate is a candidate in the terms of the rule.
type candidate struct {
	worker      *arm
	gpu, queue  float64
	overlap     float64 // share of the prompt's full blocks
	prefill     float64 // P
	outstanding float64 // O
	stays       bool    // it has served the series so far
	bareFactor  float64 // M without a floor
	x           banditVector
	loadFactor  float64 // M

	linear, mean float64 // rewards that were drawn for it
}

// New returns the policy with these settings; its errors name the flag.
func New(settings Settings) (*Policy, error) {
	config, err := settings.parameters()
	if err != nil {
		return nil, err
	}
	return newPolicy(config), nil
}

func newPolicy(config parameters) *Policy {
	p := &Policy{
		parameters: config,
		workers:    newRecent[kv.WorkerKey, *arm](maxWorkers),
		series:     newRecent[string, *requestSeries](maxSeries),
		pending:    newRecent[uint64, *pendingDecision](maxPending),
		baselines:  map[latencyKey]float64{},
		tokens:     newHistogram(32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
		budgets:    newHistogram(0, 1, 2, 5, 10, 20, 50, 100),
		prior:      banditPrior{lambda: config.lambda},
	}
	if p.fixes.coldStart {
		p.prior.lambda *= priorWeight
		p.prior.theta[featureOne] = priorReward
		p.prior.theta[featureOverlap] = priorOverlap
		p.prior.theta[featurePrefill] = priorPrefill
	}
	return p
}

// Traits requests full matches, as in the original.
func (*Policy) Traits() policy.Traits { return policy.Traits{WholeMatch: true, Logged: true} }

// Choose draws a candidate by the softmax of the scores; with router_type kv_load it
// returns the one with the lowest KV usage.
func (p *Policy) Choose(q policy.Query, candidates []policy.Candidate, random *rand.Rand) int {
	p.sweep(q.Now)
	if p.routerType == typeKVLoad {
		score := func(c *policy.Candidate) float64 {
			if !c.Load.Fresh {
				return 0
			}
			return -share(c.Load.KVUsage)
		}
		if q.Explain != nil {
			q.Explain.Rank("thompson", candidates, func(c *policy.Candidate) policy.Score { return policy.OneTerm("kv_usage", score(c)) })
		}
		return policy.Best(candidates, random, score)
	}
	return p.decide(q, candidates, randomDraws{random})
}

// decide is Choose where chance decides.
func (p *Policy) decide(q policy.Query, candidates []policy.Candidate, random draws) int {
	p.choices = p.choices[:0]
	for i := range candidates {
		p.choices = append(p.choices, candidate{worker: p.worker(candidates[i].Target)})
	}
	t := p.query(q)
	p.scores = p.scores[:0]
	if p.routerType != typeKV {
		return p.decideByType(q, &t, candidates, random)
	}
	for i := range p.choices {
		choice := &p.choices[i]
		p.describe(&t, &candidates[i], choice)
		var z banditVector
		for k := range z {
			z[k] = random.NormFloat64()
		}
		w := choice.worker
		p.fade(w)
		choice.linear, choice.mean = w.linear.sample(&choice.x, &z, p.v), w.mean.sample(random)
		p.scores = append(p.scores, p.score(&t, choice, choice.linear, choice.mean))
	}
	p.chances = softmaxOf(p.chances, p.scores, t.temp)
	draw := random.Float64()
	chosen := drawFrom(p.chances, draw)
	if q.Explain != nil {
		p.explain(q.Explain, &t, draw)
	}
	if q.Decision != 0 {
		p.keep(q, &t, chosen)
	}
	return chosen
}

var (
	decodeCosts = [...]float64{hints.LevelLow: 1, hints.LevelMedium: 2, hints.LevelHigh: 3}
	iatFactors  = [...]float64{hints.LevelLow: 1.5, hints.LevelMedium: 1.0, hints.LevelHigh: 0.6}
)

// query puts a request into the terms of the rule. The candidates' workers are
// in p.choices.
func (p *Policy) query(q policy.Query) requestTerms {
	t := requestTerms{
		tokens: q.Tokens, decode: decodeCosts[q.Prefix.OSL], iat: iatFactors[q.Prefix.IAT],
	}
	if q.BlockSize > 0 {
		t.blocks = q.Tokens / q.BlockSize
	}
	s := p.series.get(q.Prefix.ID)
	t.reuse = reuseOf(q.Prefix, s, q.Retry)
	if s != nil && s.pinned {
		t.last = s.pin.worker
		t.own = p.workOf(&s.pin)
		t.hasLast = !p.fixes.pinTTL || slices.ContainsFunc(p.choices, func(c candidate) bool { return c.worker.key == t.last })
	}
	t.temp = min(max(p.tempBase/(1+float64(t.reuse)*t.iat), p.tempMin), p.tempMax)
	if p.fixes.coldStart {
		t.temp = coldStartTemp * p.tempMin
	}
	return t
}

// reuseOf is how many requests of a series, nil if it is a new one or one that
// has ended, are to come after a request with these hints. One that is tried
// again has been counted.
func reuseOf(h hints.Prefix, s *requestSeries, retry bool) int {
	switch {
	case h.Budget != nil:
		return max(0, *h.Budget)
	case s == nil && retry:
		return 0
	case s == nil:
		return max(1, h.Total) - 1
	case retry:
		return max(0, max(s.total, h.Total)-s.processed)
	}
	return max(0, max(s.total, h.Total)-s.processed-1)
}

// worker returns the arm of t's worker.
func (p *Policy) worker(t *kv.Target) *arm {
	w := p.workers.get(t.Key)
	if w == nil {
		w = p.newWorker(t.Key)
	}
	p.workers.put(t.Key, w)
	if w.generation != t.Generation {
		if p.fixes.pinTTL && w.generation != 0 {
			p.unpin(w)
		}
		w.generation = t.Generation
	}
	return w
}

func (p *Policy) newWorker(key kv.WorkerKey) *arm {
	w := &arm{key: key, mean: newBetaBandit(), linear: newLinearBandit(&p.prior), faded: p.faded, latency: newHistogram(.1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120)}
	if gone, full := p.workers.put(key, w); full {
		p.unpin(gone)
		for k := range p.baselines {
			if k.perWorker && k.worker == gone.key {
				delete(p.baselines, k)
			}
		}
	}
	return w
}

// unpin takes the pins off w.
func (p *Policy) unpin(w *arm) {
	if w.pins == 0 {
		return
	}
	for _, s := range p.series.all {
		if s.pinned && s.pin.worker == w.key {
			p.unpinSeries(s)
		}
	}
}

// workOf is the expected work of a pinned series: all its requests to come or, as no
// two of them come at a time, one. That is the very one to be decided where a
// series is decided for its own worker.
func (p *Policy) workOf(pin *seriesPin) float64 {
	reuse := pin.reuse
	if p.fixes.outstanding {
		reuse = min(reuse, 1)
	}
	return float64(reuse) * (pin.decode + max(0, pin.prefill)) * pin.iat
}

// keep remembers a decision.
func (p *Policy) keep(q policy.Query, t *requestTerms, chosen int) {
	c := &p.choices[chosen]
	w := c.worker
	w.decisions++
	w.overlap = c.overlap
	if t.hasLast && c.stays {
		p.stayed++
	} else if t.hasLast {
		p.switched++
	}
	pin := seriesPin{worker: w.key, reuse: t.reuse, decode: t.decode, prefill: c.prefill, iat: t.iat}
	id := p.pinSeries(q, w, pin)
	if !p.fixes.outstanding { // the original learns from x as it is once the series is pinned
		c.x[featureOutstanding] = outstandingFeature(w.work)
	}
	w.waits++
	if gone, full := p.pending.put(q.Decision, &pendingDecision{
		decision: q.Decision, worker: w.key, series: id, x: c.x, began: q.Now, tokens: q.Tokens, osl: q.Prefix.OSL, bin: prefillBin(c.prefill),
	}); full {
		p.noLongerWaits(gone)
	}
	p.changes++
	p.tokens.observe(float64(q.Tokens))
	p.budgets.observe(float64(t.reuse))
	p.traceDecision(q, t, chosen)
}

// prefillBin is the level of a prefill cost.
func prefillBin(cost float64) hints.Level {
	switch {
	case cost < 0.25:
		return hints.LevelLow
	case cost < 0.75:
		return hints.LevelMedium
	}
	return hints.LevelHigh
}

// pinSeries pins a request's series to w, if more of it are to come, and returns
// the series' id.
func (p *Policy) pinSeries(q policy.Query, w *arm, pin seriesPin) string {
	id := q.Prefix.ID
	if id == "" {
		if p.fixes.pinTTL || pin.reuse <= 0 {
			return "" // it cannot be resumed
		}
		id = "auto-" + strconv.FormatUint(q.Decision, 16)
	}
	s := p.series.get(id)
	if s != nil {
		p.unpinSeries(s)
	}
	if pin.reuse <= 0 {
		p.series.remove(id)
		return id
	}
	if s == nil {
		s = &requestSeries{id: id}
	}
	s.total = max(s.total, q.Prefix.Total)
	if !q.Retry {
		s.processed++
	}
	s.pin, s.touched = pin, q.Now
	p.pin(s, w)
	if gone, full := p.series.put(id, s); full {
		p.unpinSeries(gone)
	}
	return id
}

// pin puts a series' pin on its worker.
func (p *Policy) pin(s *requestSeries, w *arm) {
	s.pinned = true
	w.pins++
	w.work += p.workOf(&s.pin)
}

// unpinSeries takes a series' pin off its worker.
func (p *Policy) unpinSeries(s *requestSeries) {
	if !s.pinned {
		return
	}
	s.pinned = false
	w := p.workers.get(s.pin.worker)
	if w == nil {
		return
	}
	w.pins--
	w.work -= p.workOf(&s.pin)
	if w.pins == 0 {
		w.work = 0 // what rounding left
	}
}

func (p *Policy) noLongerWaits(d *pendingDecision) {
	if w := p.workers.get(d.worker); w != nil && w.waits > 0 {
		w.waits--
	}
}

// sweep forgets series that are over, and takes decisions that have no feedback
// the end of for failed.
func (p *Policy) sweep(now time.Time) {
	if p.fixes.pinTTL {
		for _, s := p.series.oldest(); s != nil && now.Sub(s.touched) >= pinTTL; _, s = p.series.oldest() {
			p.series.remove(s.id)
			p.unpinSeries(s)
		}
	}
	if p.fixes.feedback || now.Sub(p.swept) < p.parameters.sweep {
		return
	}
	p.swept = now
	for id, d := p.pending.oldest(); d != nil && now.Sub(d.began) >= p.timeout; id, d = p.pending.oldest() {
		p.pending.remove(id)
		p.noLongerWaits(d)
		p.learn(d, p.timeoutReward)
		p.timeouts++
		p.traceTimeout(d, now)
	}
}

// Judge learns from the feedback; known is false if no decision with that number is
// pending.
func (p *Policy) Judge(f policy.Feedback) (verdict policy.Verdict, known bool) {
	d := p.pending.get(f.Decision)
	if d == nil {
		return verdict, false
	}
	verdict.Worker = d.worker
	if f.Ending == policy.Abandoned && !p.fixes.feedback {
		return verdict, true // the original does not hear of it: sweep will
	}
	p.pending.remove(f.Decision)
	p.noLongerWaits(d)
	if s := p.series.get(d.series); s != nil && f.Now.After(s.touched) {
		s.touched = f.Now
		p.series.put(s.id, s)
	}
	if f.Ending == policy.Abandoned {
		return verdict, true
	}
	j := p.judge(d, f)
	verdict.Baseline, verdict.Reward = j.baseline, j.reward
	p.learn(d, j.reward)
	if w := p.workers.get(d.worker); w != nil {
		w.reward = j.reward
		w.latency.observe(f.Latency.Seconds())
	}
	p.traceFeedback(d, f, &j)
	return verdict, true
}

// learn updates the bandits with the reward of a decision.
func (p *Policy) learn(d *pendingDecision, reward float64) {
	reward = min(max(reward, 0), 1)
	w := p.workers.get(d.worker)
	if w == nil {
		return
	}
	if p.fixes.forgetting {
		p.faded += math.Log(p.forgetRate) * min(1, fadeWorkers/float64(p.workers.len()))
		p.fade(w)
	} else {
		w.linear.forget(p.forgetRate, &p.prior)
	}
	w.mean.learn(reward)
	w.linear.learn(&d.x, reward)
	p.changes++
}

// fade discounts the evidence on w by the feedbacks that have come since
// it last did.
func (p *Policy) fade(w *arm) {
	if w.faded == p.faded {
		return
	}
	keep := math.Exp(p.faded - w.faded)
	w.faded = p.faded
	w.mean.forget(keep)
	w.linear.forget(keep, &p.prior)
}
