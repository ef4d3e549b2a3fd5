package simulate

import (
	"container/heap"
	"context"
	"errors"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/tools/engine"
)

// PrioritySettings define which conversations have priority in the routers' queues.
type PrioritySettings struct {
	PriorityShare float64 `group:"Simulation" default:"0" help:"Share of conversations, 0 to 1, with priority in the router's queue (--router-queue-threshold)."`
	PriorityJump  float64 `group:"Simulation" default:"0" placeholder:"SECONDS" help:"Head start of those conversations in seconds; 0: ahead of all others."`
}

// Why a request was lost: its client got an error.
const (
	lostNoWorker = "no_worker"
	lostBusy     = "busy"
	lostQueue    = "queue_full"
	lostTimeout  = "queue_timeout"
	lostShed     = "shed"   // its objective could not be kept
	lostLimit    = "limit"  // its tenant had as many in flight as it may
	lostFailed   = "failed" // its worker failed it, and it was not or could not be tried again
	lostCut      = "cut"    // its answer broke off
)

// backOff is the time that a client waits that was refused or failed, before it continues.
const backOff = time.Second

// simRequest is one request with all attempts at it.
type simRequest struct {
	request *TraceRequest
	local   []uint64         // block hashes of the prompt
	blocks  []kv.StoredBlock // those and the answer's
	asked   time.Duration    // when its client sent it
	prior   bool
	router  int

	waiting *router.Waiting // in the queue; nil: it is not
	spared  bool            // it is served though it was to be shed
	counts  bool            // in simulator.inFlight

	tries   health.Tries
	exclude []uint64          // workers that have failed it
	same    []*router.Booking // those that failed it with an answer
	hit     *fault            // that its first attempt met; nil: none
}

// send begins a simulated request at one of the routers.
func (s *simulator) send(request *TraceRequest) {
	e := &simRequest{request: request, asked: s.now}
	e.local, e.blocks = request.Blocks(s.Engine.BlockSize)
	if len(s.routers) > 1 {
		e.router = s.random.IntN(len(s.routers))
	}
	if s.Priority.PriorityShare > 0 {
		e.prior = s.prior(request)
	}
	s.budgets[e.router].Request("", s.clock())
	if s.overLimit(e) {
		s.lose(e, lostLimit)
		return
	}
	s.attempt(e)
}

// prior draws, once for all turns of a conversation, whether it goes before others.
func (s *simulator) prior(request *TraceRequest) bool {
	prior, known := s.priors[request]
	if !known {
		prior = s.drawPrior.Float64() < s.Priority.PriorityShare
	}
	delete(s.priors, request)
	if request.Next != nil {
		s.priors[request.Next] = prior
	}
	return prior
}

// question is a request for a decision of a router.
func (s *simulator) question(e *simRequest) router.Request {
	asked := router.Request{Local: e.local, NumTokens: e.request.Prompt, Prefix: e.request.Hints, Exclude: e.exclude,
		Pulls: s.Peers.Bandwidth > 0 && !s.WithoutPulls}
	if !s.UntoldAdapters {
		asked.LoRA = e.request.Adapter
	}
	if t := e.request.tenant; t != nil {
		asked.Tenant, asked.Class = t.Tenant, t.group.class
		if t.group.objective > 0 {
			asked.Deadline = epoch.Add(e.asked + t.group.objective)
			asked.Sheddable = t.group.sheddable && !e.spared
		}
	}
	if s.WithoutHints {
		asked.Prefix = hints.Prefix{}
	}
	switch {
	case e.prior && s.Priority.PriorityJump > 0:
		asked.PriorityJump = s.Priority.PriorityJump
	case e.prior:
		asked.StrictPriority = 1
	}
	return asked
}

// attempt routes a simulated request and queues it on its worker, or on the first of two.
func (s *simulator) attempt(e *simRequest) {
	s.catchUp()
	r := s.routers[e.router]
	if s.Prefills > 0 {
		pair, err := r.RoutePair(context.Background(), s.question(e), router.PairRule{LeastUncached: s.LeastUncached})
		if err != nil {
			s.err = err
			return
		}
		s.dispatch(e, pair)
		return
	}
	decision, waiting, err := r.RouteOrWait(s.question(e), func(decision router.Decision, err error) {
		s.decided = append(s.decided, decidedRequest{e, decision, err})
	})
	switch {
	case err != nil:
		s.refused(e, err)
	case waiting == nil:
		s.dispatch(e, router.Pair{Decode: decision})
	default:
		e.waiting = waiting
		began := s.now
		s.after(s.Routing.RouterQueueTimeout, func() {
			if e.waiting == waiting && waiting.Leave() {
				e.waiting = nil
				s.waits = append(s.waits, milliseconds(s.now-began))
				s.refused(e, router.ErrQueueTimeout)
			}
		})
		s.refreshLater(e, waiting)
	}
}

// refreshLater has what waits look its prompt up again and again.
func (s *simulator) refreshLater(e *simRequest, waiting *router.Waiting) {
	s.after(router.QueueRefresh, func() {
		if e.waiting == waiting {
			s.catchUp()
			waiting.Refresh()
			s.refreshLater(e, waiting)
		}
	})
}

// decidedRequest is one that need not wait any more.
type decidedRequest struct {
	simulated *simRequest
	decision  router.Decision
	err       error
}

// leaveQueue sends what need not wait any more.
func (s *simulator) leaveQueue() {
	for len(s.decided) > 0 && s.err == nil {
		d := s.decided[0]
		s.decided = s.decided[1:]
		d.simulated.waiting = nil
		s.waits = append(s.waits, milliseconds(d.decision.QueueTime))
		if d.err != nil {
			s.refused(d.simulated, d.err)
			continue
		}
		s.dispatch(d.simulated, router.Pair{Decode: d.decision})
	}
}

// dispatch sends a simulated request where a router says.
func (s *simulator) dispatch(e *simRequest, pair router.Pair) {
	flight := s.newFlight(e, pair.Decode, engine.Request{Blocks: e.blocks, Prompt: e.request.Prompt, Output: e.request.Output,
		Adapter: e.request.Adapter})
	if pair.Prefill.Booking == nil {
		if source := pair.Decode.Source; source != nil {
			s.pull(flight, int(source.Key.Worker))
		}
		s.deliver(flight)
		return
	}
	flight.Fetch = true
	flight.prefill = s.newFlight(e, pair.Prefill, engine.Request{Blocks: e.blocks[:len(e.local)], Prompt: e.request.Prompt, Output: 1,
		Keep: true, Adapter: e.request.Adapter})
	flight.prefill.decode = flight
	s.submit(flight.prefill)
	if s.Kind == kv.KindSGLang {
		s.submit(flight)
	}
}

// refused ends a simulated request that a router does not place; one that was tried before
// has failed.
func (s *simulator) refused(e *simRequest, err error) {
	if len(e.exclude) > 0 {
		s.giveUp(e)
		return
	}
	why := lostNoWorker
	switch {
	case errors.Is(err, router.ErrShed):
		if s.spares(e) {
			s.attempt(e)
			return
		}
		why = lostShed
	case errors.Is(err, router.ErrBusy):
		why = lostBusy
	case errors.Is(err, router.ErrQueueFull):
		why = lostQueue
	case errors.Is(err, router.ErrQueueTimeout):
		why = lostTimeout
	case !errors.Is(err, router.ErrNoWorker):
		s.err = err
	}
	s.lose(e, why)
}

// failed ends a flight that its worker failed before the first byte of its answer.
func (s *simulator) failed(f *flight, kind health.Kind, why string) {
	e := f.simulated
	s.land(f)
	out := f.booking.FailAs(kind, why)
	e.exclude = append(e.exclude, uint64(f.worker))
	if kind == health.Status {
		e.same = append(e.same, f.booking)
	}
	again := s.mayRetry(e, out)
	s.noteHealth(f.worker)
	s.retryOr(e, again)
}

// mayRetry reports whether a simulated request that a worker failed may be tried again, and counts
// it then. out means that the worker gets nothing more for a while.
func (s *simulator) mayRetry(e *simRequest, out bool) bool {
	again, denied := e.tries.Again(s.budgets[e.router], "", s.Retry.Retries, out, s.clock())
	if denied != "" {
		s.denied++
	}
	return again
}

// retryOr tries a simulated request again, or gives it up.
func (s *simulator) retryOr(e *simRequest, again bool) {
	if !again {
		s.giveUp(e)
		return
	}
	s.retried++
	s.attempt(e)
}

// giveUp ends a simulated request that is not tried again.
func (s *simulator) giveUp(e *simRequest) {
	if n := len(e.same); n > 1 && n == len(e.exclude) {
		for _, b := range e.same {
			b.Forgive() // what all fail in the same way is the request's fault
		}
	}
	s.lose(e, lostFailed)
}

// lose ends a simulated request with an error. Its client continues after a pause, as if it had
// been answered: so all policies get the same requests.
func (s *simulator) lose(e *simRequest, why string) {
	s.lost[why]++
	if t := e.request.tenant; t != nil {
		s.lostBy[t.group]++
	}
	if e.hit != nil {
		e.hit.lost++
	}
	s.after(backOff, func() { s.over(e) })
}

// over ends a request; its conversation continues or ends.
func (s *simulator) over(e *simRequest) {
	s.done++
	if e.counts {
		s.inFlight[e.request.tenant]--
	}
	if next := e.request.Next; next != nil {
		heap.Push(&s.coming, happening{at: s.now + e.request.Think, order: s.Workers + s.done, call: func() { s.send(next) }})
	} else {
		s.open--
	}
	if s.Progress != nil && (s.done%64 == 0 || s.done == s.total) {
		s.Progress(s.done)
	}
}

// after schedules a call of f. Of events due at one time it comes last, in the order of
// the calls of after.
func (s *simulator) after(d time.Duration, f func()) {
	s.later++
	heap.Push(&s.coming, happening{at: s.now + d, order: s.Workers + 2*s.total + s.later, call: f})
}

// clock is the routers' time.
func (s *simulator) clock() time.Time { return epoch.Add(s.now) }

// LostShare returns the share of requests that ended with an error.
func (r *Report) LostShare() float64 {
	lost := 0
	for _, n := range r.Lost {
		lost += n
	}
	return float64(lost) / float64(max(1, lost+r.Requests))
}

// QueueReport is the totals of the routers' queues.
type QueueReport struct {
	Waited int          `json:"waited"` // requests
	WaitMS Distribution `json:"wait_ms"`
}
