package policy

import (
	"math"
	"time"

	"kvrouter/internal/base/kv"
)

// A pull is a load of blocks from another worker's host memory: vLLM's tier p2p looks them up
// there, copies them into its own host memory, and from there to the device. It joins the
// queue of the worker's loads. Unlike a load it is the router's choice: where computing is
// cheaper, the request names no source.

// pullRecord summarizes the pulls in which a worker took part. The zero value trusts them
// and has no times.
type pullRecord struct {
	missing float64   // recent share of the expected blocks that did not arrive
	at      time.Time // when a pull last ended
	fit     loadFit
}

const (
	// pullForgive is the half-life of distrust: without pulls, none could show that they
	// work again.
	pullForgive = time.Minute
	// pullKept is the validity of measured times after the last pull, for the same reason.
	// Until pulls are measured again, a guess is used.
	pullKept = 10 * time.Minute
)

// trust returns the share of the expected blocks that is assumed to arrive.
func (r *pullRecord) trust(now time.Time) float64 {
	if r.missing == 0 {
		return 1
	}
	return 1 - r.missing*math.Exp2(-max(0, float64(now.Sub(r.at)))/float64(pullForgive))
}

// came records the share of the expected blocks that arrived.
func (r *pullRecord) came(share float64, now time.Time) {
	r.missing = 1 - r.trust(now)
	r.missing += tierForget * (1 - share - r.missing)
	r.at = now
}

// Pulled records how many of the expected blocks a worker, t, got from another one. A
// failure counts against both.
func (t *Tiers) Pulled(from *Tiers, expected, came int, now time.Time) {
	share := float64(came) / float64(expected)
	t.pulls.came(share, now)
	from.serves.came(share, now)
}

// PullResult is the outcome of a block pull.
type PullResult uint8

// The results.
const (
	PullNone       PullResult = iota // the request pulled nothing
	PullUnreported                   // the answer did not report its cached tokens, or there was none
	PullCame                         // all arrived
	PullPart                         // some arrived
	PullFailed                       // none arrived: the worker has computed them
)

// PullResults are the names of the results of pulls, as in metrics.
var PullResults = [...]string{PullUnreported: "unreported", PullCame: "came", PullPart: "part", PullFailed: "failed"}

// PullCounts counts pulls of a worker.
type PullCounts struct {
	Results [len(PullResults)]int64 // by PullResult
	Tokens  int64                   // pulled, by the workers' answers
}

// PullEnded counts a pull of the worker and its tokens.
func (t *Tiers) PullEnded(result PullResult, tokens int) {
	t.pullCounts.Results[result]++
	t.pullCounts.Tokens += int64(tokens)
}

// PullCounts returns the results of the worker's pulls so far.
func (t *Tiers) PullCounts() PullCounts {
	if t == nil {
		return PullCounts{}
	}
	return t.pullCounts
}

// PullTrust returns the recent share of the blocks expected from others that the worker
// got, 0 to 1.
func (t *Tiers) PullTrust(now time.Time) float64 {
	if t == nil {
		return 1
	}
	return t.pulls.trust(now)
}

// pulling is the pull of a prompt to the candidate, times in ms. Until pulls have been
// measured, one runs at a time, to a worker without other prompts: pulls can be slow, and
// only such a pull measures how slow.
func (p *Work) pulling(q *Query, c *Candidate) (tokens int, own, ahead float64) {
	trust := c.Load.Tiers.PullTrust(q.Now)
	if c.Pull.Source != nil {
		trust = min(trust, c.Pull.Source.serves.trust(q.Now))
	}
	own, measured := p.pullTime(q.Now, c.Load.Tiers, float64(c.Pull.Blocks*q.BlockSize))
	if !measured && (q.Pulling > 0 || len(c.Load.Prefills) > 0) {
		return 0, 0, 0
	}
	ahead, _ = p.pullTime(q.Now, c.Load.Tiers, float64(c.Pull.Ahead))
	return int(trust * float64(c.Pull.Blocks*q.BlockSize)), own, ahead
}

// pullTime is the time to pull tokens, ms: by the worker's counters, else by first tokens of
// the worker or of others, else a guess.
func (p *Work) pullTime(now time.Time, t *Tiers, tokens float64) (ms float64, measured bool) {
	if t != nil && now.Sub(t.pulls.at) < pullKept {
		if token, known := t.peerToken(); known {
			return token * tokens, true
		}
		if t.pulls.fit.known() {
			return t.pulls.fit.time(1, tokens), true
		}
	}
	if p.pulls.known() && now.Sub(p.pulledAt) < pullKept {
		return p.pulls.time(1, tokens), true
	}
	return tierGuess * p.Timing.Prefill(1) * tokens, false
}

// evicted returns the time that later requests lose, ms, because as many tokens leave the
// worker's cache as are pulled into it: in the life of a stored token, about found/(1 −
// found) tokens are found again, which are then computed. Computing stores as many, but the
// source has these already.
func (p *Work) evicted(tokens int) float64 {
	return p.found.Value / max(1-p.found.Value, leastStored) * p.Timing.Prefill(tokens)
}

// leastStored is the least share of a prompt that counts as stored, which evicted divides by.
const leastStored = 0.1

// pullsOf is pullTime for a prompt under way.
func (p *Work) pullsOf(t *Tiers, tokens int) float64 {
	if tokens == 0 {
		return 0
	}
	ms, _ := p.pullTime(p.last, t, float64(tokens))
	return ms
}

// peerToken returns the ms that a token from another worker takes by the engine's
// counters: on its way into host memory, and from there to the device.
func (t *Tiers) peerToken() (ms float64, known bool) {
	if !t.peer.known() || !t.host.known() || !t.tokens.known() {
		return 0, false
	}
	return 1000 * (t.peer.each() + t.host.each()) * t.BytesPerToken(), true
}

// learnPull learns from the first token of a request that pulled all that was expected on
// a worker without other prompts: its delay beyond its passes.
func (p *Work) learnPull(o *Outcome) {
	if !o.Loaded || o.Loads != (kv.TierTokens{}) {
		return
	}
	ms := milliseconds(o.FirstToken) - p.Timing.firstToken(o)
	p.pulls.observe(float64(o.Pulled), ms)
	p.pulledAt = p.last
	if o.Tiers != nil {
		o.Tiers.pulls.fit.observe(float64(o.Pulled), ms)
	}
}
