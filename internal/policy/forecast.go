package policy

import "time"

// Wait predicts by how much later a request that comes now gets its first token on a
// worker with that load than on an idle one: the prompts that are booked there are
// played through, as coming does.
//
// Not all that makes requests wait is seen in their prompts: an engine may have no
// room for them in its batch or its cache. Then the oldest prompt is overdue, and a
// new one will wait for about as long as that has waited so far. Of answers that come
// whole nobody tells the first token: only others can be overdue.
func (p *Work) Wait(now time.Time, load *Load) time.Duration {
	first, _, _ := p.coming(now, load, 1)
	wait := first - p.passTime(1) + foreignWait(load)*p.decoding.Value
	for i := range load.Prefills {
		oldest := &load.Prefills[i]
		if oldest.AnsweredWhole {
			continue
		}
		begun := oldest.Sent
		if load.FirstToken.After(begun) {
			begun = load.FirstToken
		}
		passes := float64(1 + wholePasses(oldest.Tokens))
		due := passes*(p.Timing.Pass+p.Timing.Decoding(load.ContextTokens)) + p.Timing.Token*float64(oldest.Tokens)
		if overdue*due < milliseconds(now.Sub(begun)) {
			wait = max(wait, milliseconds(now.Sub(oldest.Sent))-due)
		}
		break
	}
	return duration(wait)
}

// overdue is how many times as long as predicted a first token may take before its
// worker is taken to have no room for it.
const overdue = 2

// Compute is how long a worker takes for so many prompt tokens.
func (p *Work) Compute(tokens int) time.Duration { return duration(p.Timing.Prefill(tokens)) }

// mostForecast bounds what is predicted: what is longer is a foreign number.
const mostForecast = time.Hour

// duration is a time of so many ms, from 0 to mostForecast.
func duration(ms float64) time.Duration {
	if !(ms > 0) { // as what is no number
		return 0
	}
	return time.Duration(min(ms, float64(mostForecast/time.Millisecond)) * float64(time.Millisecond))
}
