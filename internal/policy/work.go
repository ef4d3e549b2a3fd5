package policy

import (
	"math/rand/v2"
	"time"

	"kvrouter/internal/kv"
)

const (
	// workPass is the engine's batched-token budget, tokens a pass (vLLM's
	// max_num_batched_tokens).
	workPass = 8192
	// workMeanOver is how many requests the usual values are the mean of, about.
	workMeanOver = 256

	// workLater is what computing a prompt token costs later requests, in times
	// of its own cost: it takes the memory of a cached one that they would have
	// found.
	workLater = 2.3
	// workDecode weighs decoding against the wait for the first token, both
	// relative to what is usual.
	workDecode = 2.2
	// workOthers is the share that counts of the time by which the requests on a
	// worker end later: some end before it has passed.
	workOthers = 0.4
	// workNotice is the share of the usual decoding below which a wait for the
	// first token is not noticed: waits are never relative to less.
	workNotice = 0.02
	// workCount weighs the number of requests in flight relative to the mean of
	// the workers: what the estimates cannot know, such as the lengths of answers
	// to come, grows with it.
	workCount = 0.25
)

// Work estimates how long a request will take on each worker and by how much it
// delays others, and takes the lowest of
//
//	(first + pushed + 2.3·own + own·queued/usual) / usual +
//	2.2·(decode + 0.4·n·(own + slowdown)) / usual decode +
//	0.25·(n + 1) / (mean n + 1)
//
// with times in ms. The first line is about first tokens: first is when that of
// this request will come, from the worker's coming passes, after those that wait
// there and that this router did not send; pushed by how much
// those of the requests before it come later, where they share a pass; own the
// time to compute its uncached tokens, which later requests wait for (the more,
// the longer the queue is) and which push cached blocks out; queued the same of
// the requests that wait; usual the mean own, or 0.02·usual decode if that is
// more. The second line is about the other tokens: decode is the time to decode
// an answer of usual length there, usual decode its mean; each of the n requests
// there stands still for own, and decodes slower then, by slowdown.
// The last line balances their number.
//
// A worker that gets its prompt from another has nothing of it to compute.
// Blocks of requests in flight count as cached. How long passes take and the
// usual values are learned from finished requests. Ties are broken at random.
type Work struct {
	Timing *EngineTiming

	Uncached runningMean // tokens of a prompt
	decoding runningMean // ms from first to last token
	Output   runningMean // tokens
}

// runningMean is the mean of about the last workMeanOver values.
type runningMean struct {
	Value float64
	count int
}

func (m *runningMean) add(value float64) {
	m.count = min(m.count+1, workMeanOver)
	m.Value += (value - m.Value) / float64(m.count)
}

// NewWork returns policy work with an engine's timing to begin with.
func NewWork() *Work { return &Work{Timing: NewEngineTiming()} }

// Traits asks for siblings: an engine computes prompts in order, so their blocks will
// be cached.
func (*Work) Traits() Traits { return Traits{ActiveBlocks: true, Siblings: true} }

// Learn takes in a finished request. The first token of one whose prompt another
// worker computed says nothing about either; a prompt alone has no usual answer.
func (p *Work) Learn(o Outcome) {
	o.Alone = o.Alone && o.Leg != kv.LegDecode
	p.Timing.Learn(o)
	if o.Leg != kv.LegPrefill {
		p.LearnUsual(o)
	}
}

// LearnUsual takes in how long a finished answer was and how long it took.
func (p *Work) LearnUsual(o Outcome) {
	p.Output.add(float64(o.Output))
	if o.Output > 1 {
		p.decoding.add(milliseconds(o.Decode))
	}
}

// Choose returns the candidate with the lowest cost, and learns the usual prompt from
// the choice.
func (p *Work) Choose(q Query, candidates []Candidate, random *rand.Rand) int {
	u := p.usual(q, candidates)
	if q.Explain != nil {
		q.Explain.rank("work", candidates, func(c *Candidate) Score { return p.terms(q, c, &u).explain(&u) })
	}
	chosen := best(candidates, random, func(c *Candidate) float64 { return -p.terms(q, c, &u).cost(&u) })
	if q.Tokens > 0 && q.Leg != kv.LegDecode {
		p.Uncached.add(float64(max(1, q.Tokens-candidates[chosen].Overlap*q.BlockSize)))
	}
	return chosen
}

// workUsual are the values that those of a candidate are relative to.
type workUsual struct {
	own      float64 // ms, more than 0
	output   float64 // tokens
	decoding float64 // ms, more than 0
	inFlight float64
}

// workFirstOutput is the usual answer before any has ended, tokens.
const workFirstOutput = 256

func (p *Work) usual(q Query, candidates []Candidate) workUsual {
	u := workUsual{own: p.Timing.Prefill(max(1, q.Tokens)), output: workFirstOutput}
	if p.Uncached.count > 0 {
		u.own = p.Timing.Prefill(int(p.Uncached.Value))
	}
	if p.Output.count > 0 {
		u.output, u.decoding = p.Output.Value, p.decoding.Value
	}
	u.decoding = max(u.decoding, u.output*p.Timing.decode, 1)
	u.own = max(u.own, workNotice*u.decoding)
	for i := range candidates {
		u.inFlight += float64(candidates[i].Load.requests()) / float64(len(candidates))
	}
	return u
}

// workTerms are the parts of a cost: all in ms, but for count.
type workTerms struct {
	first, foreign, pushed, later, busier float64 // relative to workUsual.own
	decode, others                        float64 // relative to workUsual.decoding
	count                                 float64
}

func (t workTerms) cost(u *workUsual) float64 {
	return (t.first+t.foreign+t.pushed+t.later+t.busier)/u.own + workDecode*(t.decode+t.others)/u.decoding + t.count
}

func (t workTerms) explain(u *workUsual) Score {
	return Score{
		Terms: []Term{
			{"first_token", -t.first / u.own}, {"foreign", -t.foreign / u.own}, {"pushed", -t.pushed / u.own}, {"later", -t.later / u.own}, {"busier", -t.busier / u.own},
			{"decode", -workDecode * t.decode / u.decoding}, {"others", -workDecode * t.others / u.decoding}, {"count", -t.count},
		},
		Total: -t.cost(u),
	}
}

func (p *Work) terms(q Query, c *Candidate, u *workUsual) workTerms {
	uncached := max(0, q.Tokens-c.Overlap*q.BlockSize)
	if q.Leg == kv.LegDecode {
		uncached = 0
	}
	own, queued := p.Timing.Prefill(uncached), p.Timing.Prefill(c.Load.PrefillTokens)
	first, pushed := p.coming(q.Now, &c.Load, uncached)
	slowdown := u.output / 2 * p.Timing.context * float64(q.Tokens)
	return workTerms{
		first: first, foreign: foreignWait(&c.Load) * u.decoding, pushed: pushed,
		later: workLater * own, busier: own * queued / u.own,
		decode: u.output * p.Timing.Decoding(c.Load.ContextTokens+c.Load.AwaitedTokens+1),
		others: workOthers * float64(c.Load.requests()) * (own + slowdown),
		count:  workCount * float64(c.Load.requests()+1) / (u.inFlight + 1),
	}
}

// foreignWait is how many answers will be given before the requests have left the queue
// that others have sent: they wait for the ends of those that run.
func foreignWait(load *Load) float64 {
	return float64(min(load.Foreign, load.Waiting)) / float64(max(load.Running, 1))
}

// coming plays a worker's coming passes through, with a prompt of so many
// uncached tokens at the end of its queue: in how many ms that has its first
// token, and by how many ms together the first tokens of those before it come
// later for it.
//
// An engine computes prompts in the order in which they came, up to workPass
// tokens a pass. The running pass began with the last first token, or when the
// oldest prompt without one was sent, whichever was later; a prompt that came
// after a pass began waits for the next one.
func (p *Work) coming(now time.Time, load *Load, uncached int) (first, pushed float64) {
	decode := p.Timing.Decoding(load.ContextTokens)
	at := decode / 2 // a pass that only decodes ends about then
	if len(load.Prefills) > 0 {
		at = milliseconds(load.Prefills[0].Sent.Sub(now))
		if !load.FirstToken.IsZero() {
			at = max(at, milliseconds(load.FirstToken.Sub(now)))
		}
	}
	whole := p.passTime(workPass) + decode // a pass of nothing but one prompt
	queue := load.Prefills
	for rest := 0; ; { // rest are tokens of queue[0] that are computed
		computed, ends, silent, joins := 0, 0, true, false
		if len(queue) > 0 {
			at = max(at, milliseconds(queue[0].Sent.Sub(now)))
			passes := wholePasses(queue[0].Tokens - rest)
			rest += passes * workPass
			at += float64(passes) * whole
		}
		// The comparisons hold for a time that is no number, too: the loop must end.
		for len(queue) > 0 && computed < workPass && !(milliseconds(queue[0].Sent.Sub(now)) > at) {
			step := min(queue[0].Tokens-rest, workPass-computed)
			computed += step
			if rest += step; rest < queue[0].Tokens {
				break
			}
			silent = silent && queue[0].AnsweredWhole
			queue, rest, ends = queue[1:], 0, ends+1
		}
		if len(queue) == 0 && computed == 0 && at < 0 {
			at = max(decode/2, 0)
		}
		if len(queue) == 0 && !(at < 0) {
			joins = computed < workPass
		}
		step := 0
		if joins {
			if computed == 0 && ends == 0 {
				passes := wholePasses(uncached)
				uncached -= passes * workPass
				at += float64(passes) * whole
			}
			step = min(uncached, workPass-computed)
			uncached -= step
		}
		alone := p.passTime(computed) + decode
		took := p.passTime(computed+step) + decode
		if computed == 0 {
			alone = 0
		}
		if joins {
			pushed += float64(ends) * (took - alone)
		}
		at += took
		if ends > 0 && !silent {
			at = max(at, 0) // they would have been heard of
		}
		if joins && uncached <= 0 {
			return at, pushed
		}
	}
}

// wholePasses is how many passes a prompt with so many tokens to compute fills
// alone before the one that it ends in.
func wholePasses(tokens int) int { return (max(1, tokens) - 1) / workPass }

// passTime is the prefill part of a pass, ms.
func (p *Work) passTime(tokens int) float64 {
	if tokens == 0 {
		return 0
	}
	return p.Timing.Pass + p.Timing.Token*float64(tokens)
}
