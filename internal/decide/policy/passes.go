package policy

import (
	"math"
	"time"
)

// workPass is the engine's batched-token budget, tokens a pass (vLLM's
// max_num_batched_tokens).
const workPass = 8192

// coming plays a worker's coming passes through, with a prompt of that many
// uncached tokens at the end of its queue, which joins no pass before ready ms: in
// how many ms that has its first token, by how many ms together the first tokens of
// those before it come later for it, how many passes compute prompts only because of
// it, and in how many ms the first of its passes begins.
//
// An engine computes prompts in the order in which they came, up to workPass
// tokens a pass. The running pass began with the last first token, or when the
// oldest prompt without one was sent, whichever was later; a prompt that came
// after a pass began waits for the next one. Prompts whose loads last longer than
// ready are left out: it passes them.
func (p *Work) coming(now time.Time, load *Load, uncached int, ready float64) (first, pushed float64, begun int, joined float64) {
	decode := p.Timing.Decoding(load.ContextTokens)
	queue := p.computing(now, load, ready)
	joined = math.Inf(1)
	at := decode / 2 // a pass that only decodes ends about then
	sent := 0.0      // of queue[0], ms from now on
	if len(queue) > 0 {
		sent = milliseconds(queue[0].Sent.Sub(now))
		at = sent
		if !load.FirstToken.IsZero() {
			at = later(at, milliseconds(load.FirstToken.Sub(now)))
		}
	}
	whole := p.passTime(workPass) + decode // a pass of nothing but one prompt
	// rest are tokens of queue[0] that are computed.
	for rest := 0; ; {
		computed, ends, silent, joins := 0, 0, true, false
		if len(queue) > 0 {
			at = later(at, sent)
			passes := wholePasses(queue[0].Tokens - rest)
			rest += passes * workPass
			at += float64(passes) * whole
		}
		// The comparisons hold for a time that is no number, too: the loop must end.
		for len(queue) > 0 && computed < workPass && !(sent > at) {
			step := min(queue[0].Tokens-rest, workPass-computed)
			computed += step
			if rest += step; rest < queue[0].Tokens {
				break
			}
			silent = silent && queue[0].AnsweredWhole
			if queue, rest, ends = queue[1:], 0, ends+1; len(queue) > 0 {
				sent = milliseconds(queue[0].Sent.Sub(now))
			}
		}
		if len(queue) == 0 && computed == 0 && at < ready {
			at = later(ready+decode/2, 0)
		}
		if len(queue) == 0 && !(at < ready) {
			joins = computed < workPass
		}
		step := 0
		if joins {
			if at < joined {
				joined = at
			}
			if computed == 0 && ends == 0 {
				passes := wholePasses(uncached)
				uncached -= passes * workPass
				at += float64(passes) * whole
				begun += passes
			}
			step = min(uncached, workPass-computed)
			if computed == 0 && step > 0 {
				begun++
			}
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
			at = later(at, 0) // they would have been heard of
		}
		if joins && uncached <= 0 {
			return at, pushed, begun, joined
		}
	}
}

// later is max for times that are rarely no number: it takes less time.
func later(at, other float64) float64 {
	if other > at {
		return other
	}
	return at
}

// wholePasses is the number of passes that a prompt with that many tokens to compute fills
// alone before the one that it ends in.
func wholePasses(tokens int) int { return (max(1, tokens) - 1) / workPass }

// passTime is the prefill part of a pass, ms.
func (p *Work) passTime(tokens int) float64 {
	if tokens == 0 {
		return 0
	}
	return p.Timing.Pass + p.Timing.Token*float64(tokens)
}
