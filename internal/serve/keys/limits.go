package keys

import (
	"errors"
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
	promptTokens int     // a minute, which may be used at once
}

// bounds are limits and the remaining requests. The remaining prompt tokens are in counts:
// requests charged before a reload are settled after it.
type bounds struct {
	limits
	asked *rate.Limiter // requests; nil: no limit
}

// newBounds returns unused bounds.
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

// Results of a key's requests in metrics.
const (
	resultOK      = "ok"
	resultRefused = "refused" // status 400 to 499, limits aside
	resultFailed  = "failed"  // status 500 and more
	resultLimited = "limited"
)

// counts are the counts of one name, for all its keys and limits.
type counts struct {
	running                                atomic.Int64
	ok, refused, failed, limited           atomic.Uint64
	byRequests, byConcurrent, byPromptSize atomic.Uint64
	prompt                                 bucket // prompt tokens
}

// refusal names the limit that a request exceeds.
type refusal struct{ message string }

func (r *refusal) Error() string { return r.message }

// refuse counts a refusal by a limit and returns it with the time to wait; 0: it is not
// stated.
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

// enter admits a request or returns the refusal. leave must follow for an admitted one.
func (c *Caller) enter(now time.Time, header http.Header) *refusal {
	defer c.setHeaders(now, header)
	running := c.count.running.Add(1)
	refused := func() *refusal {
		if most := c.bounds.concurrent; most > 0 && running > int64(most) {
			return c.refuse(&c.count.byConcurrent, time.Second, header, "%d requests are already running", most)
		}
		if asked := c.bounds.asked; asked != nil && !asked.AllowN(now, 1) {
			return c.refuse(&c.count.byRequests, until(asked, now, 1), header, "%v requests per second, burst of %d", c.bounds.requests,
				c.bounds.burst)
		}
		return nil
	}()
	if refused != nil {
		c.count.running.Add(-1)
		c.count.limited.Add(1)
	}
	return refused
}

// leave counts the end of an admitted request with that HTTP status.
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

// Charge is the prompt tokens that a request has taken from its key's limit. A nil Charge
// has taken none. It is not safe for concurrent use.
type Charge struct {
	prompt *bucket
	now    func() time.Time
	tokens int
}

// Tokens returns the charged tokens.
func (c *Charge) Tokens() int {
	if c == nil {
		return 0
	}
	return c.tokens
}

// Settle changes the charge to the computed tokens, at least 0. Missing tokens are taken at
// once, and may leave the key in debt; excess tokens are returned.
func (c *Charge) Settle(tokens int) {
	if c == nil {
		return
	}
	tokens = min(max(0, tokens), mostCharged)
	c.prompt.give(c.tokens-tokens, c.now())
	c.tokens = tokens
}

// errDebt ends the running requests of a key in debt.
var errDebt = errors.New("rate limit of this key: its prompt tokens per minute are used up")

// Debt returns an error if the key owes tokens.
func (c *Charge) Debt() error {
	c.prompt.mu.Lock()
	defer c.prompt.mu.Unlock()
	if c.prompt.now(c.now()) < 0 {
		return errDebt
	}
	return nil
}

// Metered reports whether the caller's prompt tokens are limited.
func (c *Caller) Metered() bool { return c.bounds.promptTokens > 0 }

// take charges n prompt tokens or returns the refusal. An estimate is charged up to the
// limit only, because the actual number may be lower.
func (c *Caller) take(now func() time.Time, n int, estimated bool, header http.Header) (*Charge, *refusal) {
	at, most := now(), c.bounds.promptTokens
	defer func() { c.setHeaders(at, header) }()
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

// until returns the time until l has n left.
func until(l *rate.Limiter, now time.Time, n int) time.Duration {
	missing := float64(n) - l.TokensAt(now)
	return max(time.Millisecond, time.Duration(missing/float64(l.Limit())*float64(time.Second)))
}

// setHeaders sets OpenAI's headers: limits, remainders, and the times until they are full again.
func (c *Caller) setHeaders(now time.Time, header http.Header) {
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
