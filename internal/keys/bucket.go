package keys

import (
	"math"
	"sync"
	"time"
)

const (
	// mostCharged bounds the tokens of one charge, and mostOwed the debt of a key: both
	// are far beyond what engines compute in a year, and a float64 counts that many one
	// by one.
	mostCharged = 1 << 40
	mostOwed    = 1 << 50
	// mostWait bounds how long a key is sent away.
	mostWait = 10 * 365 * 24 * time.Hour
	// rounding is a part of a token, which sums of floats may lack.
	rounding = 1e-6
)

// bucket is what is left of a number of tokens a minute. It may be less than nothing: a
// debt, which has to be refilled before anything more is taken. It is safe for concurrent
// use.
type bucket struct {
	mu    sync.Mutex // guards the rest
	limit float64    // tokens a minute, all of them at once if need be; 0: any number
	left  float64    // tokens at that time
	at    time.Time
}

// set changes the limit; 0: there is none. With another limit than before the bucket is
// full, but a debt stays.
func (b *bucket) set(limit int, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if float64(limit) == b.limit {
		return
	}
	debt := min(b.now(now), 0)
	b.limit, b.at = float64(limit), now
	if b.left = debt; debt == 0 || limit == 0 {
		b.left = b.limit
	}
}

// now is what is left at a time. It changes nothing, so that being asked often does not
// lose the little that has come since. b.mu is held.
func (b *bucket) now(now time.Time) float64 {
	return min(b.limit, b.left+b.limit*max(0, now.Sub(b.at).Minutes()))
}

// add puts n tokens in; a negative n takes them, whether they are there or not. b.mu is
// held.
func (b *bucket) add(n float64, now time.Time) {
	if b.limit == 0 {
		return
	}
	b.left = max(-mostOwed, min(b.limit, b.now(now)+n))
	if now.After(b.at) {
		b.at = now
	}
}

// take takes n tokens, at most mostCharged, if they are there and there is no debt. Else
// it returns how long that will take; negative: for ever, since the limit is less than n.
func (b *bucket) take(n int, now time.Time) (wait time.Duration, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	missing := float64(n) - b.now(now)
	switch {
	case b.limit == 0:
		return 0, true
	case float64(n) > b.limit:
		return -1, false
	case missing > rounding:
		return max(time.Millisecond, b.refill(missing)), false
	}
	b.add(-float64(n), now)
	return 0, true
}

// give puts n tokens back, or takes them where n is negative.
func (b *bucket) give(n int, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.add(float64(n), now)
}

// refill is the time until n more tokens are there. b.mu is held.
func (b *bucket) refill(n float64) time.Duration {
	seconds := n / b.limit * 60
	return time.Duration(math.Min(seconds, mostWait.Seconds()) * float64(time.Second))
}

// state returns what is left and the time until all of it is there.
func (b *bucket) state(now time.Time) (limit, left int, full time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.limit == 0 {
		return 0, 0, 0
	}
	remainder := b.now(now)
	return int(b.limit), int(max(0, remainder+rounding)), b.refill(max(0, b.limit-remainder))
}
