package proxy

import (
	"context"
	"fmt"
	"slices"
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

// lateLook is the longest time between two looks at a request that may not be sent elsewhere
// and has had no byte for stalledStart: its worker may be ejected meanwhile.
const lateLook = 5 * time.Second

// silentLeast is how many requests that may not be sent elsewhere must have had no byte
// for their worker to be stuck: one alone may have a long answer, which would be lost.
const silentLeast = 3

// abortError means that a request was aborted at its worker.
type abortError struct {
	why   string
	stuck bool // the worker is up, but silent
	drain bool // the worker is up and answers, but is cordoned
}

func (e *abortError) Error() string { return e.why }

// watch is what may be done about a request whose worker is stuck or down.
type watch struct {
	judges    bool // its silence may show that its worker is stuck
	moves     bool // it may then be sent elsewhere; implies judges
	elsewhere bool // until its answer begins, its gateway may have sent it elsewhere
}

// inflight is a request sent to a worker, with an answer that has not ended.
type inflight struct {
	target  kv.Target
	booking *router.Booking
	cancel  context.CancelCauseFunc
	began   time.Time
	heard   atomic.Int64 // when a byte last came, Unix ns; 0: none has
	goesOn  atomic.Bool  // its answer has begun and may be continued elsewhere
	watch

	timer    *time.Timer // of the next look; nil: none
	stalling bool        // timer ends it if it stays silent
	over     bool
}

// workerInflight holds the requests in flight on one worker.
type workerInflight struct {
	requests map[*inflight]struct{}
	last     int64         // when the last byte came of those that are over, Unix ns
	timer    *time.Timer   // of the next look at the running answers
	silent   time.Duration // of the running answers at the last look; 0: they are too few
	drains   time.Time     // since when it is cordoned, as seen by the looks; zero: it is not
}

// inflights are the requests in flight, by worker.
type inflights struct {
	mu      sync.Mutex // guards the rest and the last fields of each inflight
	workers map[uint64]*workerInflight
	gaps    gaps      // of running answers, on all workers
	over    heardLast // of answers that are over
}

// sent notes that a request is sent. cancel ends it with a cause. ended must follow.
func (p *Proxy) sent(b *router.Booking, target kv.Target, cancel context.CancelCauseFunc, by watch) *inflight {
	f := &inflight{target: target, booking: b, cancel: cancel, began: p.now(), watch: by}
	look, watched := b.FirstLook()
	p.inflights.mu.Lock()
	l := p.inflights.workers[target.Key.Worker]
	if l == nil {
		l = &workerInflight{requests: map[*inflight]struct{}{}}
		p.inflights.workers[target.Key.Worker] = l
		l.timer = time.AfterFunc(flowLook, func() { p.lookAtFlow(target.Key.Worker, l) })
	}
	l.requests[f] = struct{}{}
	f.moves, f.judges = by.moves && watched, by.judges && watched
	switch {
	case f.judges:
		f.timer = time.AfterFunc(look, func() { p.look(f) })
	case watched:
		f.timer = time.AfterFunc(stalledStart, func() { p.lookAtUnmoved(f) })
	}
	p.inflights.mu.Unlock()
	if !b.WorkerIsUp() { // it went down after it was chosen, and Abort came too early for this one
		p.inflights.mu.Lock()
		defer p.inflights.mu.Unlock()
		p.abortOne(f, "its worker went down")
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
	p.inflights.over.note(f.target.Key.Worker, f.heard.Load())
	if delete(l.requests, f); len(l.requests) == 0 {
		delete(p.inflights.workers, f.target.Key.Worker)
		l.timer.Stop()
	}
}

// waiting returns since when silentLeast requests of an incarnation have had no byte; not
// enough: there are fewer.
func (l *workerInflight) waiting(generation int) (since time.Time, enough bool) {
	oldest := make([]time.Time, 0, silentLeast+1)
	for f := range l.requests {
		if f.target.Generation == generation && f.heard.Load() == 0 {
			at, _ := slices.BinarySearchFunc(oldest, f.began, time.Time.Compare)
			oldest = slices.Insert(oldest, at, f.began)
			oldest = oldest[:min(len(oldest), silentLeast)]
		}
	}
	if len(oldest) < silentLeast {
		return since, false
	}
	return oldest[silentLeast-1], true
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
	now, since, enough := p.now(), f.began, true
	if !f.moves && !f.booking.IsTrial() {
		since, enough = l.waiting(f.target.Generation)
	}
	p.inflights.mu.Unlock()
	if heard := time.Unix(0, last); heard.After(since) {
		since = heard
	}
	stuck, again := false, time.Second
	if enough {
		stuck, again = f.booking.Silent(now.Sub(since))
	}
	late := !stuck && !f.moves && now.Sub(f.began) >= stalledStart && f.booking.WorkerIsOut()
	p.inflights.mu.Lock()
	defer p.inflights.mu.Unlock()
	if f.over {
		return
	}
	if late {
		p.endStalled(f)
		return
	}
	if !stuck {
		if age := now.Sub(f.began); !f.moves && age < stalledStart { // or it would wait for its own silence
			again = min(again, stalledStart-age)
		} else if !f.moves {
			again = min(again, lateLook)
		}
		f.timer.Reset(again)
		return
	}
	p.leave(l, f.target.Generation)
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

// abortOne ends f, or looks again later if its answer flows, or is still to begin and may
// come from another worker. p.inflights is locked.
func (p *Proxy) abortOne(f *inflight, why string) {
	now, wait := p.now(), time.Duration(0)
	switch heard := f.heard.Load(); {
	case heard != 0:
		wait = flows - now.Sub(time.Unix(0, heard))
	case f.elsewhere:
		wait = stalledStart - now.Sub(f.began)
	}
	if wait <= 0 {
		f.cancel(&abortError{why: why})
		return
	}
	if f.timer != nil {
		f.timer.Stop()
	}
	f.timer = time.AfterFunc(wait, func() {
		up := f.booking.WorkerIsUp() // again
		p.inflights.mu.Lock()
		defer p.inflights.mu.Unlock()
		switch {
		case f.over:
		case !up:
			p.abortOne(f, why)
		case f.judges:
			f.timer = time.AfterFunc(time.Second, func() { p.look(f) })
		}
	})
}
