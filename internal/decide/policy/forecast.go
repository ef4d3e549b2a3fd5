package policy

import (
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
)

// Wait predicts the delay of the first token of a new request on a worker with that
// load, compared to an idle one. It simulates the passes of the prompts booked
// there, as coming does.
//
// Prompts do not explain every wait: an engine's batch or cache may be full. Then
// the oldest prompt is overdue, and each waiting one needs a running answer to end:
// a new request waits until as many running answers have ended as requests wait. If
// nothing is known of answers, its wait is that of the oldest prompt so far.
// Non-streamed answers report no first token, so only streamed ones can be overdue.
func (p *Work) Wait(now time.Time, load *Load) time.Duration {
	if load.Cell != nil {
		return duration(p.cellWait(now, load, fair.Standard))
	}
	first, _, _, _ := p.coming(now, load, 1, 0)
	wait := first - p.passTime(1)
	if waits, late := p.overdue(now, load); waits > 0 {
		if running := load.InFlight - len(load.Prefills); running > 0 && p.decoding.Value > 0 {
			late = (float64(waits) + 0.5) * p.decoding.Value / float64(running) // the next one ends soon
		}
		wait = max(wait, late)
	}
	return duration(wait + foreignWait(load)*p.decoding.Value)
}

// FirstToken predicts when the first token of a request comes, from now, on a candidate that it
// is sent to, without pulls: what waits there, or is overdue as of Wait, goes before it.
func (p *Work) FirstToken(q *Query, c *Candidate) time.Duration {
	if c.Load.Cell != nil {
		var t workTerms
		p.cellTerms(&t, q, c, &workUsual{})
		return duration(t.starts)
	}
	uncached, load := uncachedTokens(q, c), loading{}
	if c.Lower != (kv.LowerBlocks{}) {
		load = p.loading(q, c, false)
		uncached = max(1, uncached-load.tokens)
	}
	first, _, _, _ := p.coming(q.Now, c.Load, uncached, load.over)
	alone := milliseconds(p.Alone(uncached))
	first = max(first, milliseconds(p.Wait(q.Now, c.Load))+alone)
	if q.Adapter != "" {
		first += p.decoding.Value * c.Load.Adapters.slotWait(q.Adapter)
		if !c.Load.Adapters.Resident(q.Adapter) {
			first += p.adapterTime()
		}
	}
	return duration(first)
}

// TokenTime predicts the mean time of each further token of an answer on a candidate: that of a
// pass that decodes this request beside those that are there, times by how much answers took
// longer of late than their passes without prompts.
func (p *Work) TokenTime(q *Query, c *Candidate) time.Duration {
	stretch := 1.0
	if p.stretch.count > 0 {
		stretch = p.stretch.Value
	}
	return duration(stretch * p.Timing.Decoding(int(float64(c.Load.Context())/c.Load.width())+max(1, q.Tokens)))
}

// mostStretch bounds what one answer says of stretch.
const mostStretch = 16

// learnStretch learns from an answer by how much its tokens took longer than their passes would
// have without prompts.
func (p *Work) learnStretch(o *Outcome) {
	if passes := o.Output - 1; passes >= timingLeastTokens {
		if alone := float64(passes) * p.Timing.Decoding(int(max(1, min(o.During.Context, kv.MaxTokens)))); alone > 0 {
			p.stretch.add(min(max(milliseconds(o.Decode)/alone, 1.0/mostStretch), mostStretch))
		}
	}
}

// overduePrompts is how many times as long as predicted a first token may take before
// its worker is taken to have no room for it.
const overduePrompts = 2

// overdue returns how many prompts wait for their first token where the oldest should
// have had it, and by how many ms it is late; else 0.
func (p *Work) overdue(now time.Time, load *Load) (waits int, late float64) {
	for i := range load.Prefills {
		oldest := &load.Prefills[i]
		if oldest.AnsweredWhole {
			continue
		}
		if waits++; waits > 1 {
			continue
		}
		tokens := max(oldest.Queued, oldest.Tokens)
		passes := float64(2 + wholePasses(tokens)) // one runs when it is sent
		due := passes*(p.Timing.Pass+p.Timing.Decoding(load.ContextTokens)) + p.Timing.Token*float64(tokens)
		if oldest.Fetches() {
			due += p.loadsOf(load.Tiers, oldest.Loads) + p.pullsOf(load.Tiers, oldest.Pulled)
		}
		if late = milliseconds(now.Sub(oldest.Sent)) - due; late < (overduePrompts-1)*due {
			return 0, 0
		}
	}
	return waits, late
}

// Compute returns the time that a worker takes for that many prompt tokens.
func (p *Work) Compute(tokens int) time.Duration { return duration(p.Timing.Prefill(tokens)) }

// Alone returns the time from the begin of a prompt's first pass to its first token, where
// so many of its tokens are computed beside nothing else.
func (p *Work) Alone(uncached int) time.Duration {
	whole := wholePasses(uncached)
	return duration(float64(whole)*p.passTime(workPass) + p.passTime(max(1, uncached)-whole*workPass))
}

// Price returns how much of a worker's time, ms, a prompt token takes that is computed, and
// a token of the answer to a prompt of that many tokens, where so many requests share the
// worker's passes.
func (p *Work) Price(prompt, together int) (computed, answered float64) {
	return p.Timing.Prefill(1), p.Timing.decode/float64(max(1, together)) + p.Timing.context*float64(max(0, prompt))
}

// UsualOutput returns the mean tokens of answers.
func (p *Work) UsualOutput() float64 {
	if p.Output.count > 0 {
		return p.Output.Value
	}
	return workFirstOutput
}

// mostForecast bounds predictions: a longer one is a foreign number.
const mostForecast = time.Hour

// duration is a time of ms milliseconds, from 0 to mostForecast.
func duration(ms float64) time.Duration {
	if !(ms > 0) { // NaN too
		return 0
	}
	return time.Duration(min(ms, float64(mostForecast/time.Millisecond)) * float64(time.Millisecond))
}
