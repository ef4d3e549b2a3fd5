package keys

import (
	"math"
	"sync"
	"time"
)

const (
	// mostCharged is the maximum number of tokens of one charge, and mostOwed the maximum
	// debt of a key. Both are more than engines compute in a year, and exact in a float64.
	mostCharged = 1 << 40
	mostOwed    = 1 << 50
	// mostWait is the maximum wait in an answer.
	mostWait = 10 * 365 * 24 * time.Hour
	// rounding is the tolerance for sums of floats, tokens.
	rounding = 1e-6
)

// bucket is a token bucket, refilled over a minute. Its content may be negative: a debt,
// which must be refilled before anything more is taken. It is safe for concurrent use.
type bucket struct {
	mu    sync.Mutex // guards the rest
	limit float64    // tokens a minute, which may be taken at once; 0: no limit
	left  float64    // tokens at that time
	at    time.Time
}

// set sets the limit; 0 means none. A changed limit fills the bucket, but keeps a debt.
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

// now returns the content at a time. It changes nothing, so that frequent calls lose no
// fractions. b.mu is held.
func (b *bucket) now(now time.Time) float64 {
	return min(b.limit, b.left+b.limit*max(0, now.Sub(b.at).Minutes()))
}

// add adds n tokens; a negative n removes them, even into debt. b.mu is held.
func (b *bucket) add(n float64, now time.Time) {
	if b.limit == 0 {
		return
	}
	b.left = max(-mostOwed, min(b.limit, b.now(now)+n))
	if now.After(b.at) {
		b.at = now
	}
}

// take takes n tokens, at most mostCharged, if the bucket contains them. Otherwise it
// returns the time until it does; negative: never, because the limit is less than n.
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

// give returns n tokens, or takes them if n is negative.
func (b *bucket) give(n int, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.add(float64(n), now)
}

// refill returns the time to refill n tokens. b.mu is held.
func (b *bucket) refill(n float64) time.Duration {
	seconds := n / b.limit * 60
	return time.Duration(math.Min(seconds, mostWait.Seconds()) * float64(time.Second))
}

// state returns the content and the time until the bucket is full.
func (b *bucket) state(now time.Time) (limit, left int, full time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.limit == 0 {
		return 0, 0, 0
	}
	remainder := b.now(now)
	return int(b.limit), int(max(0, remainder+rounding)), b.refill(max(0, b.limit-remainder))
}
