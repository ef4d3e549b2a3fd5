package proxy

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
)

const (
	// flows is how lately a byte of an answer must have come for it to be left alone
	// when its worker is said to be down: one that ends in good order answers to the
	// end its running requests.
	flows = 2 * time.Second
	// elsewhereFor is the time for which a request without a byte is left alone then, if its
	// gateway may have sent it to another worker.
	elsewhereFor = 15 * time.Second
)

// abortError means that a request was aborted at its worker.
type abortError struct {
	why   string
	drain bool // the worker is up and answers, but is cordoned
}

func (e *abortError) Error() string { return e.why }

// inflight is a request sent to a worker, with an answer that has not ended.
type inflight struct {
	target    kv.Target
	booking   *router.Booking
	cancel    context.CancelCauseFunc
	began     time.Time
	heard     atomic.Int64 // when a byte last came, Unix ns; 0: none has
	reads     atomic.Bool  // the router waits for the worker: while the client takes no bytes, it does not
	goesOn    atomic.Bool  // its answer has begun and may be continued elsewhere
	elsewhere bool         // until its answer begins, its gateway may have sent it elsewhere
	tries     *tries       // at its request; nil: it may not begin elsewhere
	lane      int32        // of them

	since time.Time   // from which its silence counts, if no byte came later
	timer *time.Timer // of the next look after Abort; nil: none
	over  bool
}

// workerInflight holds the requests in flight on one worker.
type workerInflight struct {
	requests map[*inflight]struct{}
	last     int64       // when the last byte came of those that are over, Unix ns
	timer    *time.Timer // of the next look
	drains   time.Time   // since when it is cordoned, as seen by the looks; zero: it is not
}

// inflights are the requests in flight, by worker.
type inflights struct {
	mu      sync.Mutex // guards the rest and the last fields of each inflight; the budget's may be taken under it
	workers map[uint64]*workerInflight
}

// sent notes that a request is sent. cancel ends it with a cause. ended must follow.
func (p *Proxy) sent(b *router.Booking, target kv.Target, cancel context.CancelCauseFunc, u *sending, elsewhere bool) *inflight {
	f := &inflight{target: target, booking: b, cancel: cancel, began: p.now(), elsewhere: elsewhere, tries: u.tries, lane: u.lane}
	f.reads.Store(true)
	p.inflights.mu.Lock()
	l := p.inflights.workers[target.Key.Worker]
	if l == nil {
		l = &workerInflight{requests: map[*inflight]struct{}{}}
		p.inflights.workers[target.Key.Worker] = l
		l.timer = time.AfterFunc(health.LookEvery, func() { p.lookAt(target.Key.Worker, l) })
	}
	l.requests[f] = struct{}{}
	f.tries.joined(f)
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
	f.tries.left(f)
	l := p.inflights.workers[f.target.Key.Worker]
	l.last = max(l.last, f.heard.Load())
	if delete(l.requests, f); len(l.requests) == 0 {
		delete(p.inflights.workers, f.target.Key.Worker)
		l.timer.Stop()
	}
}

// lookAt has the silence of a worker's requests judged, and carries out what follows: a request
// that waits in doubt begins elsewhere, too, and what runs on a worker that is stuck ends. The
// answers of one that drains go on elsewhere.
func (p *Proxy) lookAt(worker uint64, l *workerInflight) {
	now := p.now()
	p.inflights.mu.Lock()
	if p.inflights.workers[worker] != l {
		p.inflights.mu.Unlock()
		return
	}
	all, judged, last := make([]*inflight, 0, len(l.requests)), make([]router.InFlight, 0, len(l.requests)), l.last
	for f := range l.requests {
		heard := f.heard.Load()
		last = max(last, heard)
		if !f.reads.Load() {
			f.since = now
		}
		q := router.InFlight{Booking: f.booking, Since: later(f.began, f.since), Begun: heard != 0}
		if q.Begun {
			q.Since = later(q.Since, time.Unix(0, heard))
		}
		all, judged = append(all, f), append(judged, q)
	}
	p.inflights.mu.Unlock()

	router.Look(judged, time.Unix(0, last))
	one := all[0].booking
	drains := p.settings.DrainMigrateAfter > 0 && one.WorkerIsCordoned() && one.OthersTakeOver()

	p.inflights.mu.Lock()
	defer p.inflights.mu.Unlock()
	if p.inflights.workers[worker] != l {
		return
	}
	var late []*inflight
	for i, f := range all {
		switch {
		case f.over:
		case judged[i].Verdict == health.GiveUp:
			l.giveUp(f.target.Generation)
		case judged[i].Verdict == health.Hedge && f.heard.Load() == 0:
			late = append(late, f)
		}
	}
	slices.SortFunc(late, func(a, b *inflight) int { return a.began.Compare(b.began) })
	for _, f := range late {
		p.hedge(f)
	}
	switch {
	case !drains:
		l.drains = time.Time{}
	case l.drains.IsZero():
		l.drains = now
	case now.Sub(l.drains) >= p.settings.DrainMigrateAfter:
		l.handOn()
	}
	l.timer.Reset(health.LookEvery)
}

// later returns the later of two times.
func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// giveUp ends the requests of an incarnation that is stuck.
func (l *workerInflight) giveUp(generation int) {
	for f := range l.requests {
		if f.target.Generation == generation {
			f.cancel(&abortError{why: "its worker shows no sign of life"})
		}
	}
}

// handOn ends the answers that may be continued on another worker.
func (l *workerInflight) handOn() {
	for f := range l.requests {
		if f.goesOn.Load() {
			f.cancel(&abortError{why: "its worker is drained", drain: true})
		}
	}
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
		wait = elsewhereFor - now.Sub(f.began)
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
		if !f.over && !up {
			p.abortOne(f, why)
		}
	})
}
