package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"kvrouter/internal/base/kv"
)

// CacheSettings are the settings of the policies cache-threshold and variance.
// Settings that SGLang also has use its names.
type CacheSettings struct {
	CacheThreshold      float64 `group:"Policies cache-threshold and variance" default:"0.5" help:"Share of the prompt, 0 to 1, above which the worker with the longest match is selected; otherwise the one with the fewest in-flight requests."`
	VarianceK           float64 `group:"Policies cache-threshold and variance" name:"variance-k" default:"1.5" help:"Policy variance: maximum in-flight requests of a worker, in standard deviations above the mean of all workers. Values above the square root of the number of workers minus one exclude none."`
	BalanceAbsThreshold float64 `group:"Policies cache-threshold and variance" default:"32" hidden:"" help:"In-flight requests above the mean at which the least loaded worker is selected instead of the one with the longest match. A number above any load disables it."`
	BalanceRelThreshold float64 `group:"Policies cache-threshold and variance" default:"1.5" hidden:"" help:"The same threshold as a multiple of the mean; both must be exceeded."`
}

func (s CacheSettings) validate() error {
	if !(s.CacheThreshold >= 0 && s.CacheThreshold <= 1) {
		return fmt.Errorf("--cache-threshold %v: give a share from 0 to 1", s.CacheThreshold)
	}
	return checkNotNegative([]flagValue{
		{"--variance-k", s.VarianceK},
		{"--balance-abs-threshold", s.BalanceAbsThreshold},
		{"--balance-rel-threshold", s.BalanceRelThreshold},
	})
}

// RoutesByMatch reports whether a policy is cache-threshold or variance, which may
// use prefix trees.
func RoutesByMatch(policy string) bool { return policy == "cache-threshold" || policy == "variance" }

// cacheRouting is the common part of the policies cache-threshold and variance. A
// worker's queue is its requests in flight and those that it failed lately:
// without these a worker that fails fast would always look idle and get all.
//
// What wins by its match must have more than cache_threshold of the prompt, and
// pass a gate (that of SGLang's successor router): with a queue of more than
// balance_rel times the mean and more than balance_abs beyond it, the shortest
// queue gets the request instead, which makes a second home for a prompt that
// many clients request and leaves all others where they are.
type cacheRouting struct {
	settings CacheSettings
	failed   map[kv.WorkerKey]failures
	queues   []float64 // of the candidates; reused
}

// failures is a count that halves every failureHalfLife.
type failures struct {
	count float64
	at    time.Time
}

const (
	failureHalfLife = 10 * time.Second
	// failureForgotten is a count too small to matter.
	failureForgotten = 0.01
)

func newCacheRouting(settings CacheSettings) cacheRouting {
	return cacheRouting{settings: settings, failed: map[kv.WorkerKey]failures{}}
}

// Traits requests siblings: on the exact index they correspond to SGLang's
// speculation.
func (*cacheRouting) Traits() Traits {
	return Traits{ActiveBlocks: true, Siblings: true, WholeMatch: true}
}

func (f failures) as(now time.Time) float64 {
	return f.count * math.Exp2(-now.Sub(f.at).Seconds()/failureHalfLife.Seconds())
}

// Judge counts failures.
func (p *cacheRouting) Judge(f Feedback) (verdict Verdict, known bool) {
	if f.Ending != Failed {
		return verdict, false
	}
	for w, failed := range p.failed {
		if failed.as(f.Now) < failureForgotten {
			delete(p.failed, w)
		}
	}
	p.failed[f.Worker] = failures{p.failed[f.Worker].as(f.Now) + 1, f.Now}
	return verdict, false
}

// measure notes the candidates' queues and returns their mean and standard
// deviation (that of all, not of a sample).
func (p *cacheRouting) measure(now time.Time, candidates []Candidate) (mean, deviation float64) {
	p.queues = p.queues[:0]
	for i := range candidates {
		queue := candidates[i].Load.each(candidates[i].Load.InFlight) + p.failed[candidates[i].Target.Key].as(now)
		p.queues = append(p.queues, queue)
		mean += queue / float64(len(candidates))
	}
	for _, queue := range p.queues {
		deviation += (queue - mean) * (queue - mean) / float64(len(candidates))
	}
	return mean, math.Sqrt(deviation)
}

// first returns the candidate that goes before all others, one of them at random
// where several do.
func (p *cacheRouting) first(random *rand.Rand, before func(i, j int) bool) int {
	chosen, ties := 0, 1
	for i := 1; i < len(p.queues); i++ {
		switch {
		case before(i, chosen):
			chosen, ties = i, 1
		case !before(chosen, i):
			ties++
			if random.IntN(ties) == 0 {
				chosen = i
			}
		}
	}
	return chosen
}

// shortest returns the candidate with the shortest queue.
func (p *cacheRouting) shortest(random *rand.Rand) int {
	return p.first(random, func(i, j int) bool { return p.queues[i] < p.queues[j] })
}

// longest returns the candidate with the longest match, of several the one with
// the shortest queue. Those with a queue of more than limit come last.
func (p *cacheRouting) longest(candidates []Candidate, limit float64, random *rand.Rand) int {
	return p.first(random, func(i, j int) bool {
		if long, other := p.queues[i] > limit, p.queues[j] > limit; long != other {
			return other
		}
		if a, b := candidates[i].Overlap, candidates[j].Overlap; a != b {
			return a > b
		}
		return p.queues[i] < p.queues[j]
	})
}

// matching returns the candidate with the longest match among those with a queue
// of at most limit, if that is more than cache_threshold of the prompt and passes
// the gate; else the one with the shortest queue.
func (p *cacheRouting) matching(q Query, candidates []Candidate, mean, limit float64, random *rand.Rand) int {
	chosen := p.longest(candidates, limit, random)
	queue := p.queues[chosen]
	short := float64(candidates[chosen].Overlap*q.BlockSize) <= p.settings.CacheThreshold*float64(q.Tokens)
	long := queue > mean*p.settings.BalanceRelThreshold && queue > mean+p.settings.BalanceAbsThreshold
	switch {
	case q.Explain == nil:
	case short:
		p.explainQueues(q.Explain, candidates, ruleShortMatch)
	case long:
		p.explainQueues(q.Explain, candidates, ruleLongQueue)
	default:
		p.explainMatches(q.Explain, candidates, limit, queue > limit)
	}
	if short || long {
		return p.shortest(random)
	}
	return chosen
}

// Rules of an Explanation.
const (
	ruleMatch      = "longest match"
	ruleShortMatch = "shortest queue: no worker has enough of the prompt"
	ruleLongQueue  = "shortest queue: the worker with the longest match has too many requests"
)

// explainQueues notes the candidates' queues.
func (p *cacheRouting) explainQueues(e *Explanation, candidates []Candidate, rule string) {
	e.Rule = rule
	for i, queue := range p.queues {
		inFlight := candidates[i].Load.each(candidates[i].Load.InFlight)
		e.Add(Score{Terms: []Term{{"in_flight", -inFlight}, {"failures", inFlight - queue}}, Total: -queue})
	}
}

// explainMatches notes the candidates' matches, in blocks. Those with a queue of more
// than limit could be chosen only if all have one.
func (p *cacheRouting) explainMatches(e *Explanation, candidates []Candidate, limit float64, all bool) {
	e.Rule = ruleMatch
	for i, queue := range p.queues {
		s, shorter := OneTerm("match", float64(candidates[i].Overlap)), -queue
		s.TieBreak = &shorter
		if queue > limit && !all {
			s.Excluded = "queue_limit"
		}
		e.Add(s)
	}
}

// cacheThreshold is strategy "cache threshold and shortest queue" of SGLang's
// pull request 1934: the worker with the longest match, if that is more than
// cache_threshold of the prompt, else the one with the shortest queue.
type cacheThreshold struct{ cacheRouting }

func (p *cacheThreshold) Choose(q Query, candidates []Candidate, random *rand.Rand) int {
	q.Explain.By("cache-threshold")
	mean, _ := p.measure(q.Now, candidates)
	return p.matching(q, candidates, mean, math.Inf(1), random)
}

// variance is strategy "variance based" of the same, which it left without code
// and K without a value: workers with a queue of more than mean + K·σ get
// nothing, and of the others the one with the longest match gets the request.
// Where all queues are the same, σ is 0 and none is left out.
//
// That any match counts is a trap: where some workers have equal queues and the
// others none, none is left out unless the busy ones are fewer than 1/(1 + K²)
// of all, and the others stay idle forever for want of the one block that all
// prompts share. So it takes cache_threshold of a prompt here too; with 0 this
// is the rule as proposed.
type variance struct{ cacheRouting }

func (p *variance) Choose(q Query, candidates []Candidate, random *rand.Rand) int {
	q.Explain.By("variance")
	mean, deviation := p.measure(q.Now, candidates)
	return p.matching(q, candidates, mean, mean+p.settings.VarianceK*deviation, random)
}
