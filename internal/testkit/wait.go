package testkit

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Eventually polls condition until it is true. The test fails with the text of what
// if that takes longer than limit.
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

// Settles polls condition until it returns nil. The test fails with the last error
// after 20 s.
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

// StandingClock is a clock that only Advance moves.
type StandingClock struct{ seconds atomic.Int64 }

// Now returns the time of the clock.
func (c *StandingClock) Now() time.Time { return time.Unix(1_000_000+c.seconds.Load(), 0) }

// Advance moves the clock by whole seconds.
func (c *StandingClock) Advance(d time.Duration) { c.seconds.Add(int64(d / time.Second)) }

// Background runs run until the test ends, and waits for its end then.
func Background(t testing.TB, run func(context.Context)) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
}
