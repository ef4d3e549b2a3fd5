package keys

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// limits are the rate limits of one key; 0 is no limit.
type limits struct {
	requests     float64 // a second, on average
	burst        int     // requests at once, at least 1 where requests is set
	concurrent   int     // requests at the same time
	promptTokens int     // a minute, all of them at once if need be
}

// bounds are limits and what is left of the requests. What is left of the prompt tokens
// is in counts: requests that were charged before a reload are settled after it.
type bounds struct {
	limits
	asked *rate.Limiter // requests; nil: no limit
}

// newBounds returns bounds of which nothing is used.
func newBounds(l limits) bounds {
	b := bounds{limits: l}
	if l.requests > 0 {
		b.asked = rate.NewLimiter(rate.Limit(l.requests), l.burst)
	}
	return b
}

// Names of limits in metrics.
const (
	limitRequests     = "requests"
	limitConcurrent   = "concurrent"
	limitPromptTokens = "prompt_tokens"
)

// What came of a key's requests, in metrics.
const (
	resultOK      = "ok"
	resultRefused = "refused" // status 400 to 499, limits aside
	resultFailed  = "failed"  // status 500 and more
	resultLimited = "limited"
)

// counts are of one name, for all its keys and limits.
type counts struct {
	running                                atomic.Int64
	ok, refused, failed, limited           atomic.Uint64
	byRequests, byConcurrent, byPromptSize atomic.Uint64
	prompt                                 bucket // prompt tokens
}

// refusal says which limit a request exceeds.
type refusal struct{ message string }

func (r *refusal) Error() string { return r.message }

// refuse counts a refusal by a limit and says when to come again; wait 0: never.
func (c *Caller) refuse(by *atomic.Uint64, wait time.Duration, header http.Header, format string, values ...any) *refusal {
	by.Add(1)
	message := fmt.Sprintf(format, values...)
	if wait > 0 {
		seconds := int(math.Ceil(wait.Seconds()))
		header.Set("Retry-After", strconv.Itoa(seconds))
		message += fmt.Sprintf(": try again in %d s", seconds)
	}
	return &refusal{"rate limit of this key: " + message}
}

// enter lets a request in, or says why not; leave must follow where it does.
func (c *Caller) enter(now time.Time, header http.Header) *refusal {
	defer c.tell(now, header)
	running := c.count.running.Add(1)
	refused := func() *refusal {
		if most := c.bounds.concurrent; most > 0 && running > int64(most) {
			return c.refuse(&c.count.byConcurrent, time.Second, header, "%d requests are already running", most)
		}
		if asked := c.bounds.asked; asked != nil && !asked.AllowN(now, 1) {
			return c.refuse(&c.count.byRequests, until(asked, now, 1), header, "%v requests per second, burst of %d", c.bounds.requests, c.bounds.burst)
		}
		return nil
	}()
	if refused != nil {
		c.count.running.Add(-1)
		c.count.limited.Add(1)
	}
	return refused
}

// leave counts a request that was let in and has ended with that HTTP status.
func (c *Caller) leave(status int) {
	c.count.running.Add(-1)
	switch {
	case status >= 500:
		c.count.failed.Add(1)
	case status == http.StatusTooManyRequests:
		c.count.limited.Add(1)
	case status >= 400:
		c.count.refused.Add(1)
	default:
		c.count.ok.Add(1)
	}
}

// Charge is what a request has taken from its key's limit of prompt tokens. A nil Charge
// has taken nothing. It is not safe for concurrent use.
type Charge struct {
	prompt *bucket
	now    func() time.Time
	tokens int
}

// Tokens returns the tokens that are charged.
func (c *Charge) Tokens() int {
	if c == nil {
		return 0
	}
	return c.tokens
}

// Settle changes the charge to the tokens that were computed, at least 0. What is missing
// is taken at once, and may leave the key in debt; what is too much is given back.
func (c *Charge) Settle(tokens int) {
	if c == nil {
		return
	}
	tokens = min(max(0, tokens), mostCharged)
	c.prompt.give(c.tokens-tokens, c.now())
	c.tokens = tokens
}

// Metered reports whether the caller's prompt tokens are limited.
func (c *Caller) Metered() bool { return c.bounds.promptTokens > 0 }

// take charges n prompt tokens, or says why not. An estimate is never more than the
// limit: what it is about may be less.
func (c *Caller) take(now func() time.Time, n int, estimated bool, header http.Header) (*Charge, *refusal) {
	at, most := now(), c.bounds.promptTokens
	defer func() { c.tell(at, header) }()
	if most == 0 {
		return nil, nil
	}
	n = min(max(0, n), mostCharged)
	if estimated {
		n = min(n, most)
	}
	wait, ok := c.count.prompt.take(n, at)
	switch {
	case ok:
		return &Charge{prompt: &c.count.prompt, now: now, tokens: n}, nil
	case wait < 0:
		return nil, c.refuse(&c.count.byPromptSize, 0, header, "the request has %d prompt tokens, the limit per minute is %d", n, most)
	}
	return nil, c.refuse(&c.count.byPromptSize, wait, header, "%d prompt tokens per minute, this request has %d", most, n)
}

// until returns how long it takes until l has n left.
func until(l *rate.Limiter, now time.Time, n int) time.Duration {
	missing := float64(n) - l.TokensAt(now)
	return max(time.Millisecond, time.Duration(missing/float64(l.Limit())*float64(time.Second)))
}

// tell sets OpenAI's headers: the limits, their remainder, and the time until
// all of it is back.
func (c *Caller) tell(now time.Time, header http.Header) {
	show := func(name string, limit, left int, full time.Duration) {
		header.Set("X-Ratelimit-Limit-"+name, strconv.Itoa(limit))
		header.Set("X-Ratelimit-Remaining-"+name, strconv.Itoa(left))
		header.Set("X-Ratelimit-Reset-"+name, full.Round(time.Millisecond).String())
	}
	if asked := c.bounds.asked; asked != nil {
		left, full := asked.TokensAt(now), time.Duration(0)
		if left < float64(asked.Burst()) {
			full = until(asked, now, asked.Burst())
		}
		show("Requests", asked.Burst(), max(0, int(left)), full)
	}
	if limit, left, full := c.count.prompt.state(now); limit > 0 {
		show("Tokens", limit, left, full)
	}
}
