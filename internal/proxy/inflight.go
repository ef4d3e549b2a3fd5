package proxy

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/router"
)

// flows is how lately a byte of an answer must have come for it to be left alone
// when its worker is said to be down: one that ends in good order answers to the
// end its running requests.
const flows = 2 * time.Second

// Once a worker is known to be stuck, a request there that may not be sent elsewhere
// ends when no byte of its answer has come for that time: stalledAnswer if it had
// begun, stalledStart before.
const stalledAnswer, stalledStart = 5 * time.Second, 15 * time.Second

// abortError means that a request was aborted at its worker.
type abortError struct {
	why   string
	stuck bool // the worker is up, but silent
}

func (e *abortError) Error() string { return e.why }

// inflight is a request sent to a worker, with an answer that has not ended.
type inflight struct {
	target  kv.Target
	booking *router.Booking
	cancel  context.CancelCauseFunc
	began   time.Time
	heard   atomic.Int64 // when a byte last came, Unix ns; 0: none has
	moves   bool         // it may be sent elsewhere if its worker is stuck

	timer    *time.Timer // of the next look; nil: none
	stalling bool        // timer ends it if it stays silent
	over     bool
}

// workerInflight holds the requests in flight on one worker.
type workerInflight struct {
	requests map[*inflight]struct{}
	last     int64 // when the last byte came of those that are over, Unix ns
}

// inflights are the requests in flight, by worker.
type inflights struct {
	mu      sync.Mutex // guards workers and the last fields of each inflight
	workers map[uint64]*workerInflight
}

// sent notes that a request is sent. cancel ends it with a cause. moves means that
// it may be sent elsewhere if its worker turns out to be stuck. ended must follow.
func (p *Proxy) sent(b *router.Booking, target kv.Target, cancel context.CancelCauseFunc, moves bool) *inflight {
	f := &inflight{target: target, booking: b, cancel: cancel, began: p.now(), moves: moves}
	look, watched := b.FirstLook()
	p.inflights.mu.Lock()
	l := p.inflights.workers[target.Key.Worker]
	if l == nil {
		l = &workerInflight{requests: map[*inflight]struct{}{}}
		p.inflights.workers[target.Key.Worker] = l
	}
	l.requests[f] = struct{}{}
	f.moves = moves && watched
	switch {
	case f.moves:
		f.timer = time.AfterFunc(look, func() { p.look(f) })
	case watched:
		f.timer = time.AfterFunc(stalledStart, func() { p.lookAtUnmoved(f) })
	}
	p.inflights.mu.Unlock()
	if !b.WorkerIsUp() { // it went down after it was chosen, and Abort came too early for this one
		cancel(&abortError{why: "its worker went down"})
	}
	return f
}

// ended notes that a request is over.
func (p *Proxy) ended(f *inflight) {
	p.inflights.mu.Lock()
	defer p.inflights.mu.Unlock()
	f.over = true
	if f.timer != nil {
		f.timer.Stop()
	}
	l := p.inflights.workers[f.target.Key.Worker]
	l.last = max(l.last, f.heard.Load())
	if delete(l.requests, f); len(l.requests) == 0 {
		delete(p.inflights.workers, f.target.Key.Worker)
	}
}

// look looks whether the worker of a request without a first byte is stuck. If it
// is, all such requests there are aborted, and the others are watched.
func (p *Proxy) look(f *inflight) {
	p.inflights.mu.Lock()
	if f.over || f.heard.Load() != 0 {
		p.inflights.mu.Unlock()
		return
	}
	l := p.inflights.workers[f.target.Key.Worker]
	last := l.last
	for other := range l.requests {
		last = max(last, other.heard.Load())
	}
	p.inflights.mu.Unlock()
	now, since := p.now(), f.began
	if heard := time.Unix(0, last); heard.After(since) {
		since = heard
	}
	stuck, again := f.booking.Silent(now.Sub(since))
	p.inflights.mu.Lock()
	defer p.inflights.mu.Unlock()
	if f.over {
		return
	}
	if !stuck {
		f.timer.Reset(again)
		return
	}
	for other := range l.requests {
		switch {
		case other.target.Generation != f.target.Generation:
		case other.moves && other.heard.Load() == 0:
			other.cancel(&abortError{why: "no data received while other workers answered", stuck: true})
		default:
			p.endStalled(other)
		}
	}
}

// lookAtUnmoved ends a request that may not be sent elsewhere and has had no byte for
// stalledStart, once its worker is ejected. No failure is recorded: the answer may be long.
func (p *Proxy) lookAtUnmoved(f *inflight) {
	out := f.booking.WorkerIsOut()
	p.inflights.mu.Lock()
	defer p.inflights.mu.Unlock()
	switch {
	case f.over || f.heard.Load() != 0:
	case out:
		f.cancel(&abortError{why: fmt.Sprintf("no data received for %s and its worker is ejected", stalledStart), stuck: true})
	default:
		f.timer.Reset(time.Second)
	}
}

// endStalled ends f when no byte of its answer comes any more. p.inflights is locked.
func (p *Proxy) endStalled(f *inflight) {
	if f.stalling {
		return
	}
	f.stalling = true
	heard, limit, since := f.heard.Load(), stalledStart, f.began
	if heard != 0 {
		limit, since = stalledAnswer, time.Unix(0, heard)
	}
	if f.timer != nil {
		f.timer.Stop()
	}
	f.timer = time.AfterFunc(limit-p.now().Sub(since), func() {
		p.inflights.mu.Lock()
		defer p.inflights.mu.Unlock()
		f.stalling = false
		if !f.over && f.heard.Load() == heard {
			f.cancel(&abortError{why: fmt.Sprintf("no data received for %s while other workers answered", limit), stuck: true})
		}
	})
}

// Abort ends the requests in flight on that incarnation of a worker, which is down:
// requests without a first byte are tried elsewhere, streams end with an error
// event. An answer that still flows is aborted once it stops for two seconds.
func (p *Proxy) Abort(worker uint64, generation int, why string) {
	p.inflights.mu.Lock()
	defer p.inflights.mu.Unlock()
	l := p.inflights.workers[worker]
	if l == nil {
		return
	}
	for f := range l.requests {
		if f.target.Generation == generation {
			p.abortOne(f, why)
		}
	}
}

// abortOne ends f, or looks again later if its answer flows. p.inflights is locked.
func (p *Proxy) abortOne(f *inflight, why string) {
	heard := f.heard.Load()
	wait := flows - p.now().Sub(time.Unix(0, heard))
	if heard == 0 || wait <= 0 {
		f.cancel(&abortError{why: why})
		return
	}
	if f.timer != nil {
		f.timer.Stop()
	}
	f.timer = time.AfterFunc(wait, func() {
		if f.booking.WorkerIsUp() {
			return // again
		}
		p.inflights.mu.Lock()
		defer p.inflights.mu.Unlock()
		if !f.over {
			p.abortOne(f, why)
		}
	})
}
