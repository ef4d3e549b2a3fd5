package proxy

import (
	"context"
	"errors"
	"slices"

	"kvrouter/internal/decide/router"
)

// A request without a first byte on a worker that may be stuck begins at another one, too, and
// runs on where it is. Such attempts of one request are its lanes. Each has an Exchange of its
// own, and the first that has something for the client claims the right to write it: the others
// are cancelled, and no worker is to blame for that. What nothing waits for costs nothing: the
// lanes beside the first have goroutines, the first one is the request's own.

// errOutrun ends the attempts at a request that another one answers.
var errOutrun = errors.New("another worker answered first")

// firstLane is the lane of the request's own goroutine; those beside it have higher numbers.
const firstLane = 1

// Results of attempts beside the first, for kvrouter_hedges_total.
const (
	HedgeWon    = "won"    // it answered first
	HedgeLost   = "lost"   // the first worker did
	HedgeFailed = "failed" // it ended without an answer
)

// lane is an attempt beside the first.
type lane struct {
	number   int32
	ctx      context.Context
	cancel   context.CancelCauseFunc
	u        *sending
	x        *Exchange
	pair     router.Pair
	err      error
	panicked any
	done     chan struct{} // closed at its end
	over     bool          // guarded by inflights.mu
}

// claims reports whether the client gets this attempt's answer: no other one has begun to
// write. The others are cancelled.
func (u *sending) claims() bool {
	t := u.tries
	if t == nil || t.won.Load() == u.lane {
		return true
	}
	if !t.won.CompareAndSwap(0, u.lane) {
		return false
	}
	if !t.hedged.Load() {
		return true
	}
	t.proxy.inflights.mu.Lock()
	defer t.proxy.inflights.mu.Unlock()
	for _, l := range t.lanes {
		if l.number != u.lane {
			l.cancel(errOutrun)
		}
	}
	for _, f := range t.own {
		if f != nil && u.lane != firstLane {
			f.cancel(errOutrun)
		}
	}
	return true
}

// joined notes that f is sent for one of the lanes. p.inflights is locked.
func (t *tries) joined(f *inflight) {
	switch {
	case t == nil || f.lane != firstLane:
	case t.won.Load() > firstLane:
		f.cancel(errOutrun)
	case t.own[0] == nil:
		t.own[0] = f
	default: // of a pair
		t.own[1] = f
	}
}

// left notes that f is over. p.inflights is locked.
func (t *tries) left(f *inflight) {
	if t == nil {
		return
	}
	for i := range t.own {
		if t.own[i] == f {
			t.own[i] = nil
		}
	}
}

// newest is the lane that was begun last and runs. p.inflights is locked.
func (t *tries) newest() int32 {
	for _, l := range slices.Backward(t.lanes) {
		if !l.over {
			return l.number
		}
	}
	return firstLane
}

// hedge begins the request of f, whose worker may be stuck, at another worker, too, if its
// retries and the budget allow it. p.inflights is locked.
func (p *Proxy) hedge(f *inflight) {
	t := f.tries
	if t == nil || t.alone || f.lane != t.newest() || t.ctx.Err() != nil {
		return
	}
	if t.hedged.Store(true); t.won.Load() != 0 {
		return
	}
	again, denied := t.Again(p.budget, t.u.Client, t.u.MaxRetries, false, p.now())
	if denied != "" && !t.denied {
		t.denied = true
		p.observer.RetryDenied(string(denied))
	}
	if !again {
		return
	}
	t.begun++
	l := &lane{number: firstLane + t.begun, u: t.u.beside(), x: t.x.beside(), done: make(chan struct{})}
	l.u.tries, l.u.lane = t, l.number
	l.ctx, l.cancel = context.WithCancelCause(t.ctx)
	t.lanes, t.doubted = append(t.lanes, l), append(t.doubted, f.target.Key.Worker)
	go t.run(l, slices.Concat(t.exclude, t.doubted)) // ends with join
}

// run runs an attempt beside the first.
func (t *tries) run(l *lane, exclude []uint64) {
	p := t.proxy
	defer close(l.done)
	defer func() {
		l.panicked = recover()
		l.cancel(nil)
		l.x.acquit(false)
		p.inflights.mu.Lock()
		defer p.inflights.mu.Unlock()
		l.over = true
		if worker, _, failed := blamed(l.err); failed {
			t.doubted = append(t.doubted, worker)
		} else if l.err != nil {
			t.alone = true // no other worker is there, or it would fail in the same way
		}
	}()
	began := l.x.Trace.Now()
	l.pair, l.err = l.u.chooser.Beside(l.ctx, exclude)
	l.x.Trace.Decided(began, l.err, &l.pair.Prefill, &l.pair.Decode)
	if l.err != nil {
		return
	}
	l.x.Receipts = slices.Concat(l.pair.Prefill.Receipts, l.pair.Decode.Receipts)
	l.err = p.serve(l.ctx, t.w, l.u, l.x, l.pair, true)
}

// join waits for the attempts beside the first, which ended with err, and returns the error of
// the one whose answer the client has. If none has, they have failed, too.
func (t *tries) join(ctx context.Context, u *sending, err error) error {
	if !t.hedged.Load() {
		return err
	}
	p := t.proxy
	for i := 0; ; i++ {
		p.inflights.mu.Lock()
		if i == len(t.lanes) {
			p.inflights.mu.Unlock()
			break
		}
		l := t.lanes[i]
		p.inflights.mu.Unlock()
		<-l.done
	}
	lanes := t.lanes
	t.lanes = nil
	for _, l := range lanes {
		if l.panicked != nil {
			panic(l.panicked)
		}
		switch worker, failed, known := blamed(l.err); {
		case t.won.Load() == l.number:
			t.x.adopt(l.x)
			u.Upstream, u.lane, err = l.u.Upstream, l.number, l.err
			u.chooser.Answers(l.pair)
			p.observer.Hedged(HedgeWon)
		case errors.Is(l.err, errOutrun):
			p.observer.Hedged(HedgeLost)
		case known && ctx.Err() == nil:
			t.exclude = append(t.exclude, worker)
			t.note(l.x, failed)
			if failed.blames() {
				p.failed(worker)
			}
			p.observer.Hedged(HedgeFailed)
		}
	}
	return err
}

// beside is a request as an attempt beside the first begins it.
func (u *sending) beside() *sending {
	own := *u.Upstream
	if s := u.PromptTokens; s != nil {
		own.PromptTokens = &PromptTokens{ids: s.ids, takes: s.takes}
	}
	own.Migration = u.Migration.beside()
	return &sending{Upstream: &own, edits: editsOf(&own), chooser: u.chooser}
}

// beside is an answer of which there is nothing yet.
func (s *Migration) beside() *Migration {
	if s == nil {
		return nil
	}
	return s.continuable.begin()
}

// beside is the Exchange of an attempt beside the first: what is known of the request.
func (x *Exchange) beside() *Exchange {
	return &Exchange{
		ID: x.ID, Route: x.Route, Model: x.Model, Arrived: x.Arrived, Source: x.Source, Trusted: x.Trusted, Served: x.Served,
		Prepared: x.Prepared, Serial: x.Serial, Request: x.Request, Default: x.Default, Trace: x.Trace,
	}
}

// adopt takes over what an attempt beside the first has of the answer.
func (x *Exchange) adopt(y *Exchange) {
	x.Status, x.Worker, x.FirstChunk, x.Decision, x.Usage, x.Shared = y.Status, y.Worker, y.FirstChunk, y.Decision, y.Usage, y.Shared
	x.Ending, x.Below, x.finish, x.refusal = y.Ending, y.Below, y.finish, y.refusal
	x.Reached, x.Receipts = x.Reached || y.Reached, append(x.Receipts, y.Receipts...)
	x.accepted(x.Status)
}
