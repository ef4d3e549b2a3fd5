package thompson

import (
	"math"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// latencyKey names latencies that are compared with each other.
type latencyKey struct {
	perWorker bool
	worker    kv.WorkerKey
	kind      latencyKind
	a, b      uint8 // what else they have in common, more than 0; 0: nothing
}

// latencyKind is a kind of latency, in ms.
type latencyKind uint8

const (
	latencyRequest latencyKind = iota // of an aggregated request
	latencyToken                      // the same by tokens of the answer
	latencyFirst                      // to the first token
	latencyGap                        // from a token to the next
	latencyWhole                      // of a request of that size
)

// judgement is the result of a feedback on a decision.
type judgement struct {
	metric   float64 // the measured latency, ms
	perToken bool    // it is that of a token of the answer
	baseline float64 // the latency it was compared with, ms
	after    float64 // the same from now on
	reward   float64
}

// judge compares a request's latency with those before. The original takes the
// latency by tokens of the answer, where those are known, and compares it with
// the worker's own ones for such requests. So a long prompt with a short answer
// looks slow wherever it was computed; sound instead is to compare the time to
// the first token with that of prompts of the same length (within a factor of
// 2), cached or not, as it is the decision's merit if they are, and the time
// from one token to the next with any; both count the same. Where the first
// token's time is not known, whole requests with prompts and answers of the same
// length are compared.
func (p *Policy) judge(d *pendingDecision, f policy.Feedback) judgement {
	f.Latency = max(f.Latency, 0)
	f.FirstToken = min(f.FirstToken, f.Latency)
	if !p.fixes.feedback {
		j := judgement{metric: milliseconds(f.Latency), perToken: f.TokensOut > 0}
		kind := latencyRequest
		if j.perToken {
			kind = latencyToken
			j.metric /= float64(f.TokensOut)
		}
		p.compare(&j, f.Ending, d.worker,
			latencyKey{kind: kind, a: uint8(d.osl) + 1, b: uint8(d.bin) + 1}, latencyKey{kind: kind})
		return j
	}
	tokens := d.tokens
	if tokens == 0 {
		tokens = f.TokensIn
	}
	if f.FirstToken <= 0 {
		j := judgement{metric: milliseconds(f.Latency)}
		p.compare(&j, f.Ending, d.worker, latencyKey{kind: latencyWhole, a: sizeClass(tokens), b: sizeClass(f.TokensOut)})
		return j
	}
	j := judgement{metric: milliseconds(f.FirstToken)}
	p.compare(&j, f.Ending, d.worker, latencyKey{kind: latencyFirst, a: sizeClass(tokens)})
	if gaps := f.TokensOut - 1; gaps > 0 {
		g := judgement{metric: milliseconds(f.Latency-f.FirstToken) / float64(gaps)}
		p.compare(&g, f.Ending, d.worker, latencyKey{kind: latencyGap})
		j.metric += g.metric * float64(gaps)
		j.baseline += g.baseline * float64(gaps)
		j.after += g.after * float64(gaps)
		j.reward = (j.reward + g.reward) / 2
	}
	return j
}

// sizeClass puts sizes within a factor of 2 together.
func sizeClass(n int) uint8 { return uint8(1 + math.Ilogb(float64(max(n, 1)))) }

// compare fills in the rest of a judgement: the metric is compared with the
// first of these that has been measured, the worker's own ones before those of
// all, and goes into all of them.
func (p *Policy) compare(j *judgement, ending policy.Ending, w kv.WorkerKey, keys ...latencyKey) {
	levels := make([]latencyKey, 0, 3)
	if !p.fixes.baseline {
		for _, key := range keys {
			key.perWorker, key.worker = true, w
			levels = append(levels, key)
		}
		keys = keys[len(keys)-1:] // the original keeps one mean of all workers
	}
	levels = append(levels, keys...)
	j.baseline = max(1, j.metric)
	for _, key := range levels {
		if mean, has := p.baselines[key]; has {
			j.baseline = mean
			break
		}
	}
	j.after = j.baseline
	if ending != policy.Finished {
		return
	}
	j.reward = 1 / (1 + j.metric/max(1e-3, j.baseline))
	for _, key := range levels {
		mean, has := p.baselines[key]
		if has {
			mean += p.emaAlpha * (j.metric - mean)
		} else {
			mean = j.metric
		}
		p.baselines[key] = mean
	}
	j.after = p.baselines[levels[0]]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
