package testkit

import (
	"sync/atomic"
	"testing"
	"time"
)

// Eventually polls condition until it holds. The test fails with the text of what
// if it does not hold within limit.
func Eventually(t testing.TB, limit time.Duration, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("after %s still not: %s", limit, what)
		}
		<-time.After(5 * time.Millisecond)
	}
}

// Settles polls condition, which returns what is still wrong, until it returns nil.
// The test fails if that takes more than 20 s.
func Settles(t *testing.T, condition func() error) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		<-tick.C
	}
}

// StandingClock moves only when a test moves it.
type StandingClock struct{ seconds atomic.Int64 }

// Now returns the time of the clock.
func (c *StandingClock) Now() time.Time { return time.Unix(1_000_000+c.seconds.Load(), 0) }

// Advance moves the clock by whole seconds.
func (c *StandingClock) Advance(d time.Duration) { c.seconds.Add(int64(d / time.Second)) }
