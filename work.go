package main

import "math/rand/v2"

// Weights of policy work, found on the simulator with two traces at five loads;
// all are ratios, none has a unit.
const (
	// workFirstToken weighs the wait for the first token, relative to the usual
	// one, against the decoding, relative to that of the other workers.
	workFirstToken = 0.7
	// workLater is what computing a prompt token costs later requests, in times
	// of its own cost: they queue behind it, and it takes the memory of a cached
	// one that they would have found.
	workLater = 2
	// workCrowding is the share of what a prompt slows the decoding of the
	// others on its worker that counts: they end, and others take their place,
	// long before it does.
	workCrowding = 0.2
	// workMeanOver is how many requests the usual cost of a prompt is the mean
	// of, about.
	workMeanOver = 256
)

// workPass is the engine's batched-token budget, tokens a pass (vLLM's
// max_num_batched_tokens).
const workPass = 8192

// work estimates what a request will wait on each worker and what it makes
// others wait, and takes the lowest of
//
//	0.7·((1 + 2)·own + queued + passes) / usual + (decode + 0.2·n·slowdown) / usual decode
//
// own is the time to compute the uncached tokens of this prompt, queued that of
// the uncached tokens of earlier requests without a first token, passes the
// decoding that goes on in the passes which compute both; usual is the mean own
// of the last requests. decode is the time of one decoding pass for the prompts
// that decode there, usual decode its mean over the workers, n the requests in
// flight and slowdown what a pass takes longer with this prompt's tokens. All
// are in ms of the engine's timing model; but as every sum is divided by its
// usual value, only the model's shape matters: how the time of a decoding pass
// grows with its context. Ties are broken at random.
type work struct {
	timing SimTiming
	usual  float64 // ms
	count  int     // requests in usual, up to workMeanOver
	skip   workTerm
}

// workTerm names a term of the rule, to leave it out.
type workTerm int

const (
	workNoTerm workTerm = iota
	workTermLater
	workTermQueued
	workTermPasses
	workTermDecode
	workTermSlowdown
)

func newWork() *work { return &work{timing: DefaultSimTiming()} }

func (p *work) Choose(q Query, candidates []Candidate, random *rand.Rand) int {
	usualDecode := 0.0
	for i := range candidates {
		usualDecode += p.decode(candidates[i].Load.ContextTokens) / float64(len(candidates))
	}
	usual := p.usual
	if p.count == 0 {
		usual = p.prefill(q.Tokens)
	}
	usual = max(usual, p.prefill(1))
	chosen := best(candidates, random, func(c *Candidate) float64 {
		first, decoding := p.waits(q, c)
		return -workFirstToken*first/usual - decoding/usualDecode
	})
	if q.Tokens > 0 {
		own := p.prefill(q.Tokens - candidates[chosen].Overlap*q.BlockSize)
		p.count = min(p.count+1, workMeanOver)
		p.usual += (own - p.usual) / float64(p.count)
	}
	return chosen
}

// waits returns the two sums of the rule, ms.
func (p *work) waits(q Query, c *Candidate) (first, decoding float64) {
	own := p.prefill(q.Tokens - c.Overlap*q.BlockSize)
	queued := p.prefill(c.Load.PrefillTokens)
	decode := p.decode(c.Load.ContextTokens)
	passes := (own + queued) / p.prefill(workPass) * decode
	slowdown := float64(c.Load.InFlight) * (p.decode(c.Load.ContextTokens+q.Tokens) - decode)
	later := workLater * own
	switch p.skip {
	case workTermLater:
		later = 0
	case workTermQueued:
		queued = 0
	case workTermPasses:
		passes = 0
	case workTermDecode:
		decode = 0
	case workTermSlowdown:
		slowdown = 0
	}
	return own + later + queued + passes, decode + workCrowding*slowdown
}

// prefill is the time to compute so many prompt tokens, ms, in passes that are
// full: their fixed part is spread over their tokens.
func (p *work) prefill(tokens int) float64 {
	perToken := p.timing.Prefill[1] + p.timing.Prefill[2]*workPass/2 + p.timing.Prefill[0]/workPass
	return perToken * float64(max(0, tokens))
}

// decode is the time of a pass that decodes prompts of so many tokens together,
// ms.
func (p *work) decode(context int) float64 {
	const capacity = 16384 * 64 // tokens of the timing model's engine
	return milliseconds(p.timing.Pass(0, float64(context)/capacity, true))
}
