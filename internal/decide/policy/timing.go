package policy

import (
	"math"
	"time"

	"kvrouter/internal/base/kv"
)

// EngineTiming estimates the duration of an engine's passes from the
// requests it served. A pass that computes n prompt tokens and decodes prompts
// of c tokens together takes
//
//	Pass + Token·n + Decode + Context·c
//
// ms, the first two only if n > 0, the last two only if it decodes. All workers
// are taken to be alike.
type EngineTiming struct {
	Pass, Token, decode, context float64

	covariance [4][4]float64
	widest     [4]float64 // variances that are not exceeded
	scaled     bool       // by the first observation
}

const (
	// timingForget is the weight that an observation loses with each later one:
	// about the last thousand count.
	timingForget = 1.0 / 1000
	// timingNoise is the variance of an observation relative to its value.
	timingNoise = 0.1
	// timingLeastTokens is the least output tokens for a usable decoding time
	// about a pass.
	timingLeastTokens = 8
	// timingFastest is how many times as fast as expected an answer can be.
	timingFastest = 50
)

// NewEngineTiming returns the timing of an H100-like engine, the mocker's. The
// first observation scales all parts; after that, the uncertainty of each part is
// its own size.
func NewEngineTiming() *EngineTiming {
	return &EngineTiming{Pass: 16, Token: 0.018, decode: 6, context: 4e-5}
}

// Prefill returns the time to compute that many prompt tokens in full passes, ms.
func (t *EngineTiming) Prefill(tokens int) float64 {
	return (t.Token + t.Pass/workPass) * float64(max(0, tokens))
}

// withoutPasses returns the part of a Prefill that its tokens take: requests that find them pay
// for their pass still. A copy that is worth its pass, too, can be worth more than it costs where it
// is made, and draws a conversation away from an idle worker that has its prefix.
func (t *EngineTiming) withoutPasses(prefill float64) float64 {
	return prefill * t.Token / (t.Token + t.Pass/workPass)
}

// Decoding returns the decode part of a pass, ms; 0 for no tokens.
func (t *EngineTiming) Decoding(context int) float64 {
	if context <= 0 {
		return 0
	}
	return t.decode + t.context*float64(context)
}

// Learn learns from one request: its decoding, and its first token if its prompt
// did not wait for others.
func (t *EngineTiming) Learn(o Outcome) {
	if passes := float64(o.Output - 1); passes >= timingLeastTokens {
		t.observe([4]float64{min(prefillPasses(o.During), passes), float64(o.During.Tokens), passes, passes * o.During.Context},
			milliseconds(o.Decode))
	}
	if o.Alone && o.Loads == (kv.TierTokens{}) && o.Pulled == 0 && o.Adapter == AdapterReady {
		t.observe(firstTokenRow(&o), milliseconds(o.FirstToken))
	}
}

// firstTokenRow is what the passes until a first token did, if the prompt did not wait.
func firstTokenRow(o *Outcome) [4]float64 {
	passes := float64((o.Before.Tokens + workPass - 1) / workPass)
	row := [4]float64{passes, float64(o.Before.Tokens)}
	if o.Before.Context > 0 {
		passes += 0.5 // the pass that ran when it was sent
		row[2], row[3] = passes, passes*o.Before.Context
	}
	return row
}

// firstToken returns how long the passes until a first token take, ms.
func (t *EngineTiming) firstToken(o *Outcome) float64 {
	row := firstTokenRow(o)
	return row[0]*t.Pass + row[1]*t.Token + row[2]*t.decode + row[3]*t.context
}

// observe is a step of recursive least squares for row·(pass, token, decode,
// context) = ms, every row weighed by its own size.
func (t *EngineTiming) observe(row [4]float64, ms float64) {
	if ms <= 0 {
		return
	}
	estimate := [4]*float64{&t.Pass, &t.Token, &t.decode, &t.context}
	guess := 0.0
	for i, x := range row {
		guess += x * *estimate[i]
	}
	if t.scaled {
		// An answer that came in one piece took no time, and so would count more than
		// all others. It pulls as far as one that took half of the expected time.
		if ms < guess/timingFastest {
			ms = guess / 2
		}
	} else {
		if guess <= 0 {
			return
		}
		t.scaled = true
		for i, c := range estimate {
			*c *= ms / guess
			t.widest[i] = *c * *c
			t.covariance[i][i] = t.widest[i]
		}
	}
	var gain [4]float64
	scale, miss := timingNoise, 1.0
	for i := range row {
		row[i] /= ms
		miss -= row[i] * *estimate[i]
	}
	for i := range row {
		for j := range row {
			gain[i] += t.covariance[i][j] * row[j]
		}
		scale += row[i] * gain[i]
	}
	for i := range estimate {
		*estimate[i] += gain[i] / scale * miss
		for j := range estimate {
			t.covariance[i][j] = (t.covariance[i][j] - gain[i]*gain[j]/scale) / (1 - timingForget)
		}
	}
	t.project(estimate)
	t.Token = max(t.Token, 1e-9) // it is divided by
	// Forgetting widens what is not observed; without a bound, without end.
	for i, widest := range t.widest {
		if shrink := widest / t.covariance[i][i]; shrink < 1 {
			for j := range estimate {
				t.covariance[i][j] *= math.Sqrt(shrink)
				t.covariance[j][i] *= math.Sqrt(shrink)
			}
		}
	}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// project takes the estimates to the likeliest ones of which none is negative. To
// cut off a negative one alone would not do: the others are what they are because
// of it, and run away over many observations.
func (t *EngineTiming) project(estimate [4]*float64) {
	for i, e := range estimate {
		if *e >= 0 || !(t.covariance[i][i] > 0) {
			continue
		}
		excess := *e / t.covariance[i][i]
		for j := range estimate {
			*estimate[j] -= t.covariance[i][j] * excess
		}
	}
	for _, e := range estimate {
		*e = max(*e, 0)
	}
}

// prefillPasses is how many passes computed prompts: those that gave first tokens, and
// at least as many as the tokens fill.
func prefillPasses(m Meanwhile) float64 {
	return max(float64(m.Passes), float64(m.Tokens)/workPass)
}
