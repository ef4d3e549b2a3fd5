package batch

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Pauses after a refusal.
const (
	firstPause   = 500 * time.Millisecond // doubled with each consecutive one
	longestPause = 30 * time.Second       // unless the endpoint names a time
	longestAsked = 5 * time.Minute        // of a time that the endpoint names
)

// firstLimit is the number of requests in flight at the start.
const firstLimit = 4

// pace limits the requests in flight to the capacity of the endpoint, as TCP does: the
// limit grows by one with each answer until the first refusal, then by one with each round
// of answers. A refusal halves it, and pauses all sending. Requests are sent in the order in
// which they enter: a refused one enters again behind the waiting ones.
type pace struct {
	most int

	mu       sync.Mutex // guards all below
	limit    float64    // 1 to most
	slow     bool       // the limit grows by rounds
	inFlight int
	waiting  []chan struct{} // closed when the request may be sent
	refusals int             // in a row
	cut      time.Time       // when a refusal halved the limit
	pause    time.Time       // nothing is sent before
	timer    *time.Timer     // ends the pause
	answered time.Time       // the last time, or the start
}

func newPace(most int) *pace {
	p := &pace{most: most, limit: float64(min(most, firstLimit)), answered: time.Now()}
	p.timer = time.AfterFunc(time.Hour, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.grant()
	})
	return p
}

// stop ends the timer.
func (p *pace) stop() { p.timer.Stop() }

// enter waits until a request may be sent. If so, the caller must call leave. Not ok: ctx is
// done.
func (p *pace) enter(ctx context.Context) (ok bool) {
	ready := make(chan struct{})
	p.mu.Lock()
	p.waiting = append(p.waiting, ready)
	p.grant()
	p.mu.Unlock()
	select {
	case <-ready:
		return true
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	at := slices.Index(p.waiting, ready)
	if at < 0 { // it was granted meanwhile
		p.inFlight--
		p.grant()
	} else {
		p.waiting = slices.Delete(p.waiting, at, at+1)
	}
	return false
}

// grant releases as many requests as the limit allows. The caller holds p.mu.
func (p *pace) grant() {
	if wait := time.Until(p.pause); wait > 0 {
		p.timer.Reset(wait)
		return
	}
	for len(p.waiting) > 0 && p.inFlight < int(p.limit) {
		p.inFlight++
		close(p.waiting[0])
		p.waiting = slices.Delete(p.waiting, 0, 1)
	}
}

// Results of an attempt for the pace.
type verdict int

const (
	answered verdict = iota // also with an error of the request's own
	broken                  // no answer, for whatever reason
	refused                 // the endpoint is overloaded, or unreachable
)

// leave ends an attempt that began at sent. asked is the pause that a refusal requests;
// 0: none.
func (p *pace) leave(v verdict, sent time.Time, asked time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inFlight--
	now := time.Now()
	switch v {
	case answered:
		p.answered, p.refusals = now, 0
		step := 1.0
		if p.slow {
			step = 1 / p.limit
		}
		p.limit = min(p.limit+step, float64(p.most))
	case refused:
		p.slow = true
		if !sent.Before(p.cut) { // those sent before show the same bottleneck
			p.limit, p.cut = max(1, p.limit/2), now
			p.refusals++
		}
		pause := min(asked, longestAsked)
		if asked <= 0 {
			pause = min(firstPause<<min(max(p.refusals-1, 0), 10), longestPause)
		}
		if until := now.Add(pause); until.After(p.pause) {
			p.pause = until
		}
	}
	p.grant()
}

// idle returns the time since the last answer, or the start.
func (p *pace) idle() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Since(p.answered)
}

// flying returns the number of requests in flight.
func (p *pace) flying() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.inFlight
}
