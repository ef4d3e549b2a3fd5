package proxy

import (
	"time"

	"kvrouter/internal/router"
)

const (
	// flowLook is the interval at which a worker's running answers are checked.
	flowLook = time.Second
	// flowing is the number of running answers of one worker from which their common
	// silence is evidence against it: a single one may be buffered by the engine's parser.
	flowing = 3
	// gapFrom is the shortest gap that is recorded.
	gapFrom = 2 * flowLook
	// gapFor is the time for which the longest gap counts: at least this, at most twice.
	gapFor = 5 * time.Minute
)

// gaps holds the longest times for which a worker delivered no byte of its running
// answers and then went on.
type gaps struct {
	current, previous time.Duration
	since             time.Time // start of current
}

// add records a gap.
func (g *gaps) add(gap time.Duration, now time.Time) {
	g.rotate(now)
	g.current = max(g.current, gap)
}

// longest returns the longest recorded gap.
func (g *gaps) longest(now time.Time) time.Duration {
	g.rotate(now)
	return max(g.current, g.previous)
}

func (g *gaps) rotate(now time.Time) {
	switch age := now.Sub(g.since); {
	case age >= 2*gapFor:
		*g = gaps{since: now}
	case age >= gapFor:
		*g = gaps{previous: g.current, since: now}
	}
}

// flow is the state of one worker's running answers.
type flow struct {
	any     *inflight     // one of the requests
	answers int           // running ones
	witness *inflight     // one of them
	last    time.Time     // when a byte of any answer last came
	work    []*inflight   // requests without a byte that were sent before that
	silent  time.Duration // since last
}

// flowOf returns the state of the answers of a worker's newest incarnation. p.inflights is
// locked.
func (l *workerInflight) flowOf(now time.Time) (f flow) {
	generation, last := 0, l.last
	for r := range l.requests {
		generation = max(generation, r.target.Generation)
		last = max(last, r.heard.Load())
	}
	f.last = time.Unix(0, last)
	f.silent = now.Sub(f.last)
	for r := range l.requests {
		switch f.any = r; {
		case r.target.Generation != generation:
		case r.heard.Load() != 0:
			f.answers++
			f.witness = r
		case r.began.Before(f.last):
			f.work = append(f.work, r)
		}
	}
	return f
}

// heard is when a byte of a worker's answers came, Unix ns.
type heard struct {
	worker uint64
	at     int64
}

// heardLast holds the newest bytes of two workers, the newer one first.
type heardLast [2]heard

// note records a byte.
func (l *heardLast) note(worker uint64, at int64) {
	switch {
	case worker == l[0].worker || l[0].at == 0:
		l[0] = heard{worker, max(at, l[0].at)}
	case at >= l[0].at:
		l[0], l[1] = heard{worker, at}, l[0]
	case at > l[1].at:
		l[1] = heard{worker, at}
	}
}

// othersFlow reports whether another worker has delivered a byte at least flowLook after
// that time. p.inflights is locked.
func (p *Proxy) othersFlow(worker uint64, after time.Time) bool {
	from := after.Add(flowLook).UnixNano()
	for _, over := range p.inflights.over {
		if over.worker != worker && over.at >= from {
			return true
		}
	}
	for other, l := range p.inflights.workers {
		if other == worker {
			continue
		}
		for r := range l.requests {
			if r.heard.Load() >= from {
				return true
			}
		}
	}
	return false
}

// lookAtFlow checks whether a worker whose answers are running has stopped delivering
// them. Such a worker is stuck, and its requests end as look ends them.
func (p *Proxy) lookAtFlow(worker uint64, l *workerInflight) {
	now := p.now()
	p.inflights.mu.Lock()
	if p.inflights.workers[worker] != l {
		p.inflights.mu.Unlock()
		return
	}
	f := l.flowOf(now)
	if l.silent >= gapFrom && f.silent < l.silent { // it went on
		p.inflights.gaps.add(l.silent+flowLook, now)
	}
	l.silent = 0
	if f.answers >= flowing {
		l.silent = f.silent
	}
	gap, others := p.inflights.gaps.longest(now), false
	if l.silent >= gapFrom {
		others = p.othersFlow(worker, f.last)
	}
	p.inflights.mu.Unlock()

	stuck := false
	if l.silent >= gapFrom {
		if others {
			stuck = f.witness.booking.Stalled(f.silent, gap, bookings(f.work))
		} else { // a router that ends has no other answers, but hears of ejections
			stuck = f.silent >= stalledStart && f.witness.booking.WorkerIsOut()
		}
	}
	drains := p.settings.DrainMigrateAfter > 0 && f.any.booking.WorkerIsCordoned() && f.any.booking.OthersTakeOver()
	p.inflights.mu.Lock()
	defer p.inflights.mu.Unlock()
	if p.inflights.workers[worker] != l {
		return
	}
	if stuck {
		p.leave(l, f.witness.target.Generation)
	}
	switch {
	case !drains:
		l.drains = time.Time{}
	case l.drains.IsZero():
		l.drains = now
	case now.Sub(l.drains) >= p.settings.DrainMigrateAfter:
		l.handOn()
	}
	l.timer.Reset(flowLook)
}

// bookings returns the bookings of requests.
func bookings(of []*inflight) []*router.Booking {
	all := make([]*router.Booking, len(of))
	for i, r := range of {
		all[i] = r.booking
	}
	return all
}

// handOn ends the answers that may be continued on another worker.
func (l *workerInflight) handOn() {
	for f := range l.requests {
		if f.goesOn.Load() {
			f.cancel(&abortError{why: "its worker is drained", drain: true})
		}
	}
}

// leave ends the requests of an incarnation that is stuck: those that may be sent elsewhere
// at once, the others if they stay silent. p.inflights is locked.
func (p *Proxy) leave(l *workerInflight, generation int) {
	for f := range l.requests {
		switch {
		case f.target.Generation != generation:
		case f.moves && f.heard.Load() == 0:
			f.cancel(&abortError{why: "no data received while other workers answered", stuck: true})
		default:
			p.endStalled(f)
		}
	}
}
