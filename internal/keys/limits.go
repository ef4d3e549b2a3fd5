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

// bounds are limits and their remainder.
type bounds struct {
	limits
	asked  *rate.Limiter // requests; nil: no limit
	prompt *rate.Limiter // prompt tokens; nil: no limit
}

// newBounds returns bounds of which nothing is used.
func newBounds(l limits, now time.Time) bounds {
	b := bounds{limits: l}
	if l.requests > 0 {
		b.asked = rate.NewLimiter(rate.Limit(l.requests), l.burst)
	}
	if l.promptTokens > 0 {
		b.prompt = rate.NewLimiter(rate.Limit(float64(l.promptTokens)/60), l.promptTokens)
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

// take takes n prompt tokens, or says why not.
func (c *Caller) take(now time.Time, n int, header http.Header) *refusal {
	defer c.tell(now, header)
	prompt, most := c.bounds.prompt, c.bounds.promptTokens
	switch {
	case prompt == nil || n <= 0:
		return nil
	case n > most:
		return c.refuse(&c.count.byPromptSize, 0, header, "the prompt has %d tokens, the limit per minute is %d", n, most)
	case prompt.AllowN(now, n):
		return nil
	}
	return c.refuse(&c.count.byPromptSize, until(prompt, now, n), header, "%d prompt tokens per minute, this prompt has %d", most, n)
}

// owe takes n prompt tokens that were used already.
func (c *Caller) owe(now time.Time, n int) {
	if prompt := c.bounds.prompt; prompt != nil {
		prompt.ReserveN(now, min(n, c.bounds.promptTokens))
	}
}

// until returns how long it takes until l has n left.
func until(l *rate.Limiter, now time.Time, n int) time.Duration {
	missing := float64(n) - l.TokensAt(now)
	return max(time.Millisecond, time.Duration(missing/float64(l.Limit())*float64(time.Second)))
}

// tell sets OpenAI's headers: the limits, their remainder, and the time until
// all of it is back.
func (c *Caller) tell(now time.Time, header http.Header) {
	for _, l := range []struct {
		name    string
		limiter *rate.Limiter
	}{{"Requests", c.bounds.asked}, {"Tokens", c.bounds.prompt}} {
		if l.limiter == nil {
			continue
		}
		left := l.limiter.TokensAt(now)
		back := until(l.limiter, now, l.limiter.Burst()).Round(time.Millisecond)
		if left >= float64(l.limiter.Burst()) {
			back = 0
		}
		header.Set("X-Ratelimit-Limit-"+l.name, strconv.Itoa(l.limiter.Burst()))
		header.Set("X-Ratelimit-Remaining-"+l.name, strconv.Itoa(max(0, int(left))))
		header.Set("X-Ratelimit-Reset-"+l.name, back.String())
	}
}
