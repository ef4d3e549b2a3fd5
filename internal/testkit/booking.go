package testkit

import (
	"sync/atomic"
	"time"
)

// standingClock moves only when a test moves it.
type StandingClock struct{ seconds atomic.Int64 }

func (c *StandingClock) Now() time.Time { return time.Unix(1_000_000+c.seconds.Load(), 0) }

func (c *StandingClock) Advance(d time.Duration) { c.seconds.Add(int64(d / time.Second)) }
