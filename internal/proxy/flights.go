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
// end what it has begun.
const flows = 2 * time.Second

// Once a worker is known to be stuck, a request there that may not be sent elsewhere
// ends when no byte of its answer has come for so long: stalledAnswer if it had
// begun, stalledStart before.
const stalledAnswer, stalledStart = 5 * time.Second, 15 * time.Second

// letGoError says that a request was taken off its worker.
type letGoError struct {
	why   string
	stuck bool // the worker is up, but silent
}

func (e *letGoError) Error() string { return e.why }

// flight is a request on its way to a worker or an answer on its way back.
type flight struct {
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

// lane holds what is in flight on one worker.
type lane struct {
	flights map[*flight]struct{}
	last    int64 // when the last byte came of those that are over, Unix ns
}

// traffic is what is in flight, by worker.
type traffic struct {
	mu    sync.Mutex // guards lanes and the last fields of flights
	lanes map[uint64]*lane
}

// depart notes that a request is sent. cancel ends it with a cause. moves says that
// it may be sent elsewhere if its worker turns out to be stuck. arrive must follow.
func (p *Proxy) depart(b *router.Booking, target kv.Target, cancel context.CancelCauseFunc, moves bool) *flight {
	f := &flight{target: target, booking: b, cancel: cancel, began: p.now(), moves: moves}
	look, watched := b.FirstLook()
	p.traffic.mu.Lock()
	l := p.traffic.lanes[target.Key.Worker]
	if l == nil {
		l = &lane{flights: map[*flight]struct{}{}}
		p.traffic.lanes[target.Key.Worker] = l
	}
	l.flights[f] = struct{}{}
	f.moves = moves && watched
	switch {
	case f.moves:
		f.timer = time.AfterFunc(look, func() { p.look(f) })
	case watched:
		f.timer = time.AfterFunc(stalledStart, func() { p.lookAtUnmoved(f) })
	}
	p.traffic.mu.Unlock()
	if !b.WorkerIsUp() { // it went down after it was chosen, and LetGo came too early for this one
		cancel(&letGoError{why: "its worker has just gone down"})
	}
	return f
}

// arrive notes that a flight is over.
func (p *Proxy) arrive(f *flight) {
	p.traffic.mu.Lock()
	defer p.traffic.mu.Unlock()
	f.over = true
	if f.timer != nil {
		f.timer.Stop()
	}
	l := p.traffic.lanes[f.target.Key.Worker]
	l.last = max(l.last, f.heard.Load())
	if delete(l.flights, f); len(l.flights) == 0 {
		delete(p.traffic.lanes, f.target.Key.Worker)
	}
}

// look looks whether the worker of a request without a first byte is stuck. If it
// is, all such requests there are let go, and the others are watched.
func (p *Proxy) look(f *flight) {
	p.traffic.mu.Lock()
	if f.over || f.heard.Load() != 0 {
		p.traffic.mu.Unlock()
		return
	}
	l := p.traffic.lanes[f.target.Key.Worker]
	last := l.last
	for other := range l.flights {
		last = max(last, other.heard.Load())
	}
	p.traffic.mu.Unlock()
	now, since := p.now(), f.began
	if heard := time.Unix(0, last); heard.After(since) {
		since = heard
	}
	stuck, again := f.booking.Silent(now.Sub(since))
	p.traffic.mu.Lock()
	defer p.traffic.mu.Unlock()
	if f.over {
		return
	}
	if !stuck {
		f.timer.Reset(again)
		return
	}
	for other := range l.flights {
		switch {
		case other.target.Generation != f.target.Generation:
		case other.moves && other.heard.Load() == 0:
			other.cancel(&letGoError{why: "no byte came for long while other workers answered", stuck: true})
		default:
			p.endStalled(other)
		}
	}
}

// lookAtUnmoved ends a request that may not be sent elsewhere and has had no byte for
// stalledStart, once its worker is out. It judges nobody: the answer may be long.
func (p *Proxy) lookAtUnmoved(f *flight) {
	out := f.booking.WorkerIsOut()
	p.traffic.mu.Lock()
	defer p.traffic.mu.Unlock()
	switch {
	case f.over || f.heard.Load() != 0:
	case out:
		f.cancel(&letGoError{why: fmt.Sprintf("no byte came for %s and its worker is out", stalledStart), stuck: true})
	default:
		f.timer.Reset(time.Second)
	}
}

// endStalled ends f when no byte of its answer comes any more. p.traffic is locked.
func (p *Proxy) endStalled(f *flight) {
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
		p.traffic.mu.Lock()
		defer p.traffic.mu.Unlock()
		f.stalling = false
		if !f.over && f.heard.Load() == heard {
			f.cancel(&letGoError{why: fmt.Sprintf("no byte came for %s while other workers answered", limit), stuck: true})
		}
	})
}

// LetGo ends what is in flight on that incarnation of a worker, which is down:
// requests without a first byte are tried elsewhere, streams end with an error
// event. An answer that still flows is left alone until it stops for two seconds.
func (p *Proxy) LetGo(worker uint64, generation int, why string) {
	p.traffic.mu.Lock()
	defer p.traffic.mu.Unlock()
	l := p.traffic.lanes[worker]
	if l == nil {
		return
	}
	for f := range l.flights {
		if f.target.Generation == generation {
			p.letGo(f, why)
		}
	}
}

// letGo ends f, or looks again later if its answer flows. p.traffic is locked.
func (p *Proxy) letGo(f *flight, why string) {
	heard := f.heard.Load()
	wait := flows - p.now().Sub(time.Unix(0, heard))
	if heard == 0 || wait <= 0 {
		f.cancel(&letGoError{why: why})
		return
	}
	if f.timer != nil {
		f.timer.Stop()
	}
	f.timer = time.AfterFunc(wait, func() {
		if f.booking.WorkerIsUp() {
			return // again
		}
		p.traffic.mu.Lock()
		defer p.traffic.mu.Unlock()
		if !f.over {
			p.letGo(f, why)
		}
	})
}
