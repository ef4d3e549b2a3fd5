package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
)

// keptLimit bounds the answer of a failed attempt that is kept for the client, bytes.
// A longer one goes to the client at once.
const keptLimit = 1 << 20

// refusal returns the meaning of an answer's status for its worker.
type refusal struct {
	pressed bool          // it requests a pause
	pause   time.Duration // of that length; 0: it does not say
	suspect bool          // the client may be to blame, or the worker
	failed  bool          // the worker is to blame
}

// refusalOf reads a status and its headers. Of /v1/responses a worker knows only
// its own answers: there 404 says nothing.
func refusalOf(status int, header http.Header, route string, now time.Time) refusal {
	after, given := retryAfter(header, now)
	switch {
	case status == http.StatusTooManyRequests, status == web.StatusOverloaded, status == http.StatusServiceUnavailable && given:
		return refusal{pressed: true, pause: after}
	case status == http.StatusUnauthorized, status == http.StatusForbidden, status == http.StatusNotFound && route != ResponsesRoute:
		return refusal{suspect: true}
	case status >= http.StatusInternalServerError && status != http.StatusNotImplemented: // which no worker could
		return refusal{failed: true}
	}
	return refusal{}
}

// retryAfter reads how long a worker wants to be left alone, at most
// health.LongestPause: seconds, or a date. 0: that cannot be read.
func retryAfter(header http.Header, now time.Time) (pause time.Duration, given bool) {
	text := header.Get("Retry-After")
	if text == "" {
		return 0, false
	}
	if seconds, err := strconv.ParseFloat(text, 64); err == nil && seconds >= 0 {
		pause = health.LongestPause
		if seconds < health.LongestPause.Seconds() {
			pause = time.Duration(seconds * float64(time.Second))
		}
	} else if at, err := http.ParseTime(text); err == nil {
		pause = min(at.Sub(now), health.LongestPause)
	}
	return max(0, pause), true
}

// keptAnswer is a worker's answer that the client gets if no other worker has a
// better one.
type keptAnswer struct {
	status   int
	header   http.Header
	body     []byte
	decision router.Decision
	worker   string
}

// keep reads the whole answer; nil: it is too long, and still there to be relayed.
// An error means that it broke off.
func keep(answer *upstreamAnswer, x *Exchange) (*keptAnswer, error) {
	body, err := io.ReadAll(io.LimitReader(answer, keptLimit+1))
	if err != nil {
		return nil, err
	}
	if len(body) > keptLimit {
		answer.unread(body)
		return nil, nil
	}
	return &keptAnswer{status: answer.StatusCode, header: answer.Header, body: body, decision: x.Decision, worker: x.Worker}, nil
}

// relay answers the client with k.
func (k *keptAnswer) relay(w http.ResponseWriter, u *sending, x *Exchange) error {
	x.Decision, x.Worker, x.Ending = k.decision, k.worker, endingOf(k.status, "")
	writeHead(w, &http.Response{StatusCode: k.status, Header: k.header}, u, x)
	if _, err := w.Write(k.body); err != nil {
		return errors.Join(ErrAnswered, err)
	}
	return nil
}

// suspicion is a worker that refused what another may accept.
type suspicion struct {
	booking *router.Booking
	status  int
}

// acquit ends the suspicions against workers. agreed means that two of them said the
// same.
func (x *Exchange) acquit(agreed bool) {
	for _, s := range x.suspects {
		s.booking.Acquit(s.status, agreed)
	}
	x.suspects = nil
}

// accepted is called when a worker begins to answer with that status: if it accepts
// the request, those that refused it are misconfigured.
func (x *Exchange) accepted(status int) {
	if len(x.suspects) == 0 || status >= http.StatusBadRequest {
		return
	}
	for _, s := range x.suspects {
		s.booking.Convict(s.status)
	}
	x.suspects = nil
}

// workerError means that a worker did not answer, or answered what another may answer
// better.
type workerError struct {
	worker uint64
	called string // its name
	err    error
	kind   health.Kind

	refusal refusal
	answer  *keptAnswer // nil: there was none
	abort   *abortError // it was aborted; nil: it was not
	out     bool        // nothing more goes to the worker for a while
	final   bool        // no other may be tried
}

func (e *workerError) Error() string { return fmt.Sprintf("worker %s: %v", e.called, e.err) }

func (e *workerError) Unwrap() error { return e.err }

// blames reports whether the worker has failed, so that its health is to be checked.
func (e *workerError) blames() bool {
	return !e.refusal.pressed && !e.refusal.suspect && e.abort == nil
}

// unanswered returns the error of a worker whose answer did not come, or broke off,
// with err.
func (p *Proxy) unanswered(worker uint64, err error, kind health.Kind) *workerError {
	e := &workerError{worker: worker, called: p.names.Label(worker), err: err, kind: kind}
	if errors.As(err, &e.abort) {
		return e
	}
	switch {
	case errors.Is(err, ErrSilent):
		e.kind = health.Timeout
	case kind == health.Refused && !web.Undialed(err): // it has seen the request
		e.kind = health.Dropped
	}
	return e
}

// blame ends the booking of a request that a worker failed, and notes in e
// the state of the worker then.
func (p *Proxy) blame(b *router.Booking, x *Exchange, e *workerError) {
	switch {
	case errors.Is(e.err, web.ErrUnsendable):
		b.End()
		return
	case e.abort != nil:
		b.Abort()
	case e.refusal.pressed:
		e.out = b.Press(e.refusal.pause)
		return
	case e.refusal.suspect:
		e.out = b.Suspect(e.answer.status)
		e.final = !e.out
		agreed := slices.ContainsFunc(x.suspects, func(s suspicion) bool { return s.status == e.answer.status })
		if x.suspects = append(x.suspects, suspicion{b, e.answer.status}); agreed {
			e.final = true
			x.acquit(true)
		}
		return
	default:
		e.out = b.FailAs(e.kind, e.err.Error())
	}
}

// tries are the attempts at one request.
type tries struct {
	health.Tries
	proxy   *Proxy
	ctx     context.Context
	w       http.ResponseWriter
	u       *sending
	x       *Exchange
	exclude []uint64 // workers that have failed it

	won    atomic.Int32 // lane whose answer the client gets; 0: none so far
	hedged atomic.Bool  // there may be other lanes than the first
	// All below is guarded by inflights.mu.
	own     [2]*inflight // requests in flight of the first lane: two of a pair
	lanes   []*lane      // beside the first
	begun   int32        // lanes beside the first so far
	doubted []uint64     // workers that had lanes when another one was begun, or failed it
	alone   bool         // no other worker takes it
	denied  bool         // the budget has prevented a lane

	failure error       // the last
	first   *keptAnswer // of a worker that said the client was wrong
	paused  *keptAnswer // of the last that asked for a pause
	same    []suspicion // those that failed it with an answer, or broke its connection (status 0)
}

// begin counts a request; over must follow. It may begin elsewhere beside a worker that is
// silent, unless a gateway sends it, or it is known to an SGLang server by a name of its own.
func (p *Proxy) begin(ctx context.Context, w http.ResponseWriter, u *sending, x *Exchange) *tries {
	p.budget.Request(u.Client, p.now())
	t := &tries{proxy: p, ctx: ctx, w: w, u: u, x: x}
	if u.Gateway == nil && u.MaxRetries > 0 && !(u.Paired && asks(u.Body, "rid")) {
		u.tries, u.lane = t, firstLane
	}
	return t
}

// over ends the open trials and bookings of the workers that were tried.
func (t *tries) over() { t.x.acquit(false) }

// retry reports whether another worker may be tried if the next one fails.
func (t *tries) retry() bool { return t.Left(t.u.MaxRetries) }

// again notes how an attempt ended and reports whether to try another worker.
// beside means that it would not count as a retry.
func (t *tries) again(ctx context.Context, err error, beside bool) bool {
	worker, failed, ok := blamed(err)
	if !ok || ctx.Err() != nil {
		return false
	}
	t.failure, t.x.tried = err, true
	t.exclude = append(t.exclude, worker)
	t.note(t.x, failed)
	if failed.blames() {
		t.proxy.failed(worker)
	}
	switch {
	case beside:
	case failed.final:
		return false
	case failed.abort != nil && t.LetGo(t.u.MaxRetries):
	default:
		again, denied := t.Again(t.proxy.budget, t.u.Client, t.u.MaxRetries, failed.out, t.proxy.now())
		if denied != "" {
			t.proxy.observer.RetryDenied(string(denied))
		}
		if !again {
			return false
		}
	}
	t.proxy.observer.Retried(worker)
	return true
}

// note keeps the answer of a failed attempt.
func (t *tries) note(x *Exchange, failed *workerError) {
	switch {
	case failed.answer == nil && failed.kind == health.Dropped && x.Shared == nil:
		t.same = append(t.same, suspicion{x.Decision.Booking, 0})
	case failed.answer == nil:
	case failed.refusal.suspect && t.first == nil:
		t.first = failed.answer
	case failed.refusal.pressed:
		t.paused = failed.answer
	case failed.refusal.failed:
		t.same = append(t.same, suspicion{failed.answer.decision.Booking, failed.answer.status})
	}
}

// end ends a request that is not tried again after err: the client gets the best
// answer that a worker had, if any.
func (t *tries) end(ctx context.Context, w http.ResponseWriter, err error) error {
	_, failed, ok := blamed(err)
	if !ok || ctx.Err() != nil {
		return err
	}
	if n := len(t.same); n > 1 && n == len(t.exclude) && !slices.ContainsFunc(t.same, func(s suspicion) bool { return s.status != t.same[0].status }) {
		for _, s := range t.same {
			s.booking.Forgive() // what all fail in the same way is the request's fault
		}
	}
	for _, kept := range []*keptAnswer{t.first, t.paused, failed.answer} {
		if kept != nil {
			return kept.relay(w, t.u, t.x)
		}
	}
	return err
}

// giveUp ends a request for which there is no further worker, which err says.
func (t *tries) giveUp(ctx context.Context, w http.ResponseWriter, err error) error {
	if t.failure == nil {
		return err
	}
	return t.end(ctx, w, t.failure)
}

// blamed returns the worker that failed an attempt, and how. Not ok: none is to
// blame, or something of the answer has been written, or the time of another attempt
// is over too, or no worker could be sent the request.
func blamed(err error) (worker uint64, failed *workerError, ok bool) {
	if err == nil || errors.Is(err, ErrAnswered) || errors.Is(err, ErrSilent) || errors.Is(err, web.ErrUnsendable) {
		return 0, nil, false
	}
	var late *LegTimeout
	var prefill *PrefillFailure
	switch {
	case errors.As(err, &prefill):
		if !errors.As(prefill.err, &failed) {
			failed = &workerError{worker: prefill.Worker, called: prefill.Called, err: prefill.err}
		}
		return prefill.Worker, failed, true
	case errors.As(err, &late): // of both legs together: the one at fault is unknown
		return 0, nil, false
	case errors.As(err, &failed):
		return failed.worker, failed, true
	}
	return 0, nil, false
}

// finished ends the booking of a request after its answer was relayed to its end.
func (p *Proxy) finished(u *sending, x *Exchange) {
	b := x.Decision.Booking
	if u.SeveralAnswers && x.Decision.Target.RunsSGLang() {
		x.Usage.CachedKnown = false
	}
	switch refused := x.refusal; {
	case refused.pressed:
		b.Press(refused.pause)
	case x.Ending == policy.Failed:
		kind := health.Engine
		if refused.failed {
			kind = health.Status
		}
		b.FailAs(kind, fmt.Sprintf("its answer, with status %d, reports a failure", x.Status))
	case x.Ending == policy.Finished:
		switch {
		case u.CachedTokensMislead, u.decodes:
		case x.Usage.CachedKnown:
			b.Cached(x.Usage.CachedTokens, x.Usage.CachedByTier)
		case x.Usage.CachedUntold:
			x.Usage.CachedKnown = b.CachedUnreported()
		}
		b.FinishAs(x.Usage.OutputTokens, x.finish)
	default:
		b.End()
	}
}
