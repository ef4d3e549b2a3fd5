package router

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// mostTenants is the number of tenants of a class that a fair queue stores. There are more than
// keys of a file: headers name tenants, too.
const mostTenants = 16_384

// ErrShed means that a sheddable request would get its first token too late.
var ErrShed = errors.New("all workers are at capacity, and the first token would come later than its objective")

// ShedError is ErrShed with a time.
type ShedError struct {
	RetryAfter time.Duration // when the request is predicted to be in time; at least 1 s
}

// Error implements error.
func (e *ShedError) Error() string {
	return fmt.Sprintf("%v: try again in %d s", ErrShed, e.Seconds())
}

// Seconds returns RetryAfter in whole seconds.
func (e *ShedError) Seconds() int { return int((e.RetryAfter + time.Second - 1) / time.Second) }

// Unwrap returns ErrShed.
func (e *ShedError) Unwrap() error { return ErrShed }

// shed is a ShedError of a request whose first token is predicted to be late by that time.
func shed(late time.Duration) error {
	return &ShedError{RetryAfter: min(max(late, time.Second), mostRetryAfter)}
}

// mostRetryAfter bounds Retry-After: the load may be another by then.
const mostRetryAfter = 10 * time.Minute

// Charging is the basis of charges. All but ByWork are for comparison, in simulations.
type Charging int

const (
	// ByWork charges the workers' time for what they computed.
	ByWork Charging = iota
	// ByPrompt charges the tokens of the prompt, cached or not, as if they had to be computed.
	ByPrompt
	// ByRequest charges every request the same, so that tenants take turns.
	ByRequest
)

// requestCost is the charge of ByRequest, ms.
const requestCost = 100

// cost returns the charge, ms, for a request with so many computed tokens, prompt tokens and
// answered tokens.
func (c Charging) cost(uncached, prompt, answered float64, is price) float64 {
	switch c {
	case ByPrompt:
		return prompt * is.prompt
	case ByRequest:
		return requestCost
	}
	return uncached*is.prompt + answered*is.answer
}

// price is the worker time of a token, ms.
type price struct{ prompt, answer float64 }

// priceOn returns the price of p's tokens on a candidate, once it is there, too.
func (a *Admission) priceOn(p *prompt, c *policy.Candidate) (is price) {
	is.prompt, is.answer = a.router.decider.forecast.Price(p.tokens, c.Load.InFlight+c.Load.Foreign+1)
	switch p.Leg {
	case kv.LegPrefill:
		is.answer = 0
	case kv.LegDecode:
		is.prompt = 0
	}
	return is
}

// answerOf returns the expected tokens of p's answer.
func (a *Admission) answerOf(p *prompt) float64 {
	if p.ExpectedOutput > 0 {
		return float64(p.ExpectedOutput)
	}
	return a.router.decider.forecast.UsualOutput()
}

// charge charges the tenant of p the predicted cost on the candidate on which b is about to be
// booked.
func (a *Admission) charge(b *Booking, p *prompt, c *policy.Candidate, now time.Time) {
	b.price = a.priceOn(p, c)
	b.expects = a.answerOf(p)
	b.charge = a.fair.Begin(p.Tenant, p.Class, b.costOf(b.expects), now)
}

// costOf returns the charge for the request with an answer of that many tokens, ms. Of the prompt it
// counts what the engine has computed, once that is reported.
func (b *Booking) costOf(answered float64) float64 {
	uncached := b.uncached
	if b.cached >= 0 && b.leg != kv.LegDecode {
		uncached = max(0, b.prompt-b.cached*b.unit)
	}
	return b.router.settings.Charging.cost(float64(uncached), float64(b.prompt), answered, b.price)
}

// answerStep is the number of tokens of an answer between two charges.
const answerStep = 64

// AnswerStep returns the number of tokens of an answer between two calls of Answered; 0: none.
func (b *Booking) AnswerStep() int {
	if b.charge == nil {
		return 0
	}
	return answerStep
}

// Answered sets the answer's tokens so far. A tenant is charged for an answer that is
// longer than predicted while it runs.
func (b *Booking) Answered(tokens int) {
	r := b.router
	r.mu.Lock()
	defer r.mu.Unlock()
	if b.charge == nil || b.ended.Load() {
		return
	}
	b.answered = max(b.answered, tokens)
	b.charge.Set(b.costOf(max(b.expects, float64(b.answered))))
}

// settle sets the charge of an ended request to the work of its workers. Failed attempts are not
// charged. The caller holds the lock.
func (b *Booking) settle(how policy.Ending, output int) {
	answer := float64(max(output, b.answered))
	switch {
	case how == policy.Failed:
		b.charge.End(0)
		return
	case how == policy.Finished && output == 0 && b.answered == 0:
		answer = b.expects // it is not known
	}
	b.charge.End(b.costOf(answer))
}

// enqueueFairly is enqueue for a fair queue.
func (a *Admission) enqueueFairly(p *prompt, now time.Time) (*waiter, error) {
	r := a.router
	best, least := 0, p.tokens
	for i := range r.decider.candidates {
		if n := r.decider.uncached(p, &r.decider.candidates[i]); n < least {
			best, least = i, n
		}
	}
	price := a.priceOn(p, &r.decider.candidates[best])
	w := &waiter{prompt: *p, since: now, decided: make(chan waitResult, 1)}
	jump := time.Duration(min(max(0, p.PriorityJump), BookingExpiry.Seconds()) * float64(time.Second))
	w.item = &fair.Item[*waiter]{
		Value: w, Tenant: p.Tenant, Class: p.Class, Cost: r.settings.Charging.cost(float64(least), float64(p.tokens), a.answerOf(p), price),
		Priority: p.StrictPriority, Since: now, Deadline: p.Deadline, Jump: jump, Leaves: p.sheds(),
	}
	a.want(w, now)
	if p.sheds() {
		if late := now.Add(a.firstTokenIn(w.item, least, now)).Sub(p.Deadline); late > 0 {
			return nil, shed(late)
		}
	}
	switch out := a.fair.Push(w.item); out {
	case nil:
	case w.item:
		return nil, ErrQueueFull
	default:
		out.Value.deliver(waitResult{err: ErrQueueFull})
	}
	return w, nil
}

// firstTokenIn predicts the earliest first token of a request that has to wait: after one of the
// candidates, which are full, has room, and after the work ahead that is served however late.
// Sheddable requests ahead are not counted: which of them will be served is not known yet.
func (a *Admission) firstTokenIn(it *fair.Item[*waiter], uncached int, now time.Time) time.Duration {
	r := a.router
	room := time.Duration(-1)
	for i := range r.decider.candidates {
		if wait := r.decider.forecast.Wait(now, r.decider.candidates[i].Load); room < 0 || wait < room {
			room = wait
		}
	}
	ahead := a.fair.Ahead(it) / float64(len(r.decider.candidates))
	return room + time.Duration(ahead*float64(time.Millisecond)) + r.decider.forecast.Alone(uncached)
}

// dispatchFairly is dispatch for a fair queue.
func (a *Admission) dispatchFairly(now time.Time) {
	if a.fair.Len() == 0 {
		return
	}
	if !a.anyCapacity(now) {
		return
	}
	var blocked []alike
	room, enters, at := true, [len(fair.Classes)]bool{}, seats{} // as of the last item that went
	a.fair.Walk(func(it *fair.Item[*waiter], must bool) fair.Verdict {
		w := it.Value
		if room = room || a.anyCapacity(now); !room {
			return fair.Stop
		}
		if a.tooLate(w, now) {
			w.shed(now)
			return fair.Taken
		}
		if class := w.prompt.Class; !enters[class.Place()] {
			if a.seatsAreKept(class, &at, now) {
				return fair.PassClass
			}
			enters[class.Place()] = true
		}
		if a.sharesAreKept(it.Tenant, it.Class, &at, now) {
			return fair.PassTenant
		}
		kind := w.prompt.alike()
		if slices.Contains(blocked, kind) {
			return fair.Kept
		}
		if !must && a.stillWants(w, now) {
			return a.yields(w, now)
		}
		// Blocks stored and removed since its arrival decide where it belongs.
		w.matches = a.router.match(w.matches[:0], &w.prompt, a.router.parts())
		w.prompt.matches, w.prompt.next, w.prompt.matchedAt = w.matches, 0, now
		v := a.decide(w, must, now)
		switch {
		case v == fair.Taken:
			room, enters, at = false, [len(fair.Classes)]bool{}, seats{}
		case v == fair.Kept && kind.known:
			blocked = append(blocked, kind)
		}
		return v
	})
}

// alike is the set of requirements on a worker. If a request finds no room, those with equal
// requirements need not look.
type alike struct {
	known    bool // nothing else restricts it
	model    string
	leg      kv.Leg
	kinds    kv.Kinds
	sglang   bool
	versions VersionPolicy
}

func (p *prompt) alike() alike {
	free := p.Pinned == nil && !p.WaitsForPaused && p.Allowed == nil && len(p.Exclude) == 0 && p.Session == 0 && p.Home == nil && !p.Unanswered
	if !free {
		return alike{}
	}
	return alike{known: true, model: p.Model, leg: p.Leg, kinds: p.Kinds, sglang: p.SGLang, versions: p.Versions}
}

// sheds reports whether p is to be shed instead of served late.
func (p *prompt) sheds() bool { return p.Sheddable && !p.Deadline.IsZero() }

// late reports whether a request that may be shed can no longer be in time.
func (w *waiter) late(now time.Time) bool { return w.prompt.sheds() && now.After(w.prompt.Deadline) }

// shed refuses a late request.
func (w *waiter) shed(now time.Time) { w.deliver(waitResult{err: shed(now.Sub(w.prompt.Deadline))}) }

// anyIdle reports whether a worker that could serve p has nothing to do.
func (a *Admission) anyIdle(p *prompt) bool {
	r := a.router
	for i := range r.fleet.targets {
		if load := r.fleet.targetLoads[i].load; p.mayUse(&r.fleet.targets[i]) && load.InFlight+load.Foreign == 0 {
			return true
		}
	}
	return false
}

// lookEvery is the interval of looks for room that appears with time, not with an event.
const lookEvery = 20 * time.Millisecond

// looks returns the timer by which a request that waits in a fair queue looks for room, or
// finds that it is shed; nil: it need not. stop must follow.
func (a *Admission) looks(w *waiter) (look <-chan time.Time, stop func()) {
	if w.item == nil {
		return nil, func() {}
	}
	timer := time.NewTimer(lookEvery)
	a.router.mu.Lock()
	defer a.router.mu.Unlock()
	w.look = timer // dispatches set it, too
	return timer.C, func() { timer.Stop() }
}

// lookPause is the time between two looks of a request: all that wait look about once in lookEvery
// together.
func (a *Admission) lookPause() time.Duration { return lookEvery * time.Duration(max(1, a.fair.Len())) }

// lookForRoom assigns room that has appeared with time, and sheds w if it has become too late.
func (a *Admission) lookForRoom(w *waiter) {
	r := a.router
	r.mu.Lock()
	defer r.unlock()
	now := r.now()
	pause := a.lookPause()
	if left := w.prompt.Deadline.Sub(now); w.prompt.Sheddable && left > 0 {
		pause = min(pause, max(left, lookEvery)) // dispatchFairly does not look at all that wait
	}
	w.look.Reset(pause)
	a.dispatchFairly(now) // which may look sooner
	a.shedLate(w, now)
}

// lookAgainFairly is lookUpAgain for a fair queue, which looks up a prompt when it offers it to a
// worker.
func (a *Admission) lookAgainFairly(w *waiter) {
	r := a.router
	r.mu.Lock()
	defer r.mu.Unlock()
	w.wants.until = time.Time{}
	now := r.now()
	a.dispatchFairly(now)
	a.shedLate(w, now)
}

// tooLate reports whether a request that waits is to be shed: it can no longer be in time, and no
// worker is idle.
func (a *Admission) tooLate(w *waiter, now time.Time) bool {
	return w.late(now) && !a.anyIdle(&w.prompt)
}

// shedLate takes a request that is tooLate out of the queue, and reports whether it did.
func (a *Admission) shedLate(w *waiter, now time.Time) bool {
	if !a.tooLate(w, now) || !a.fair.Remove(w.item) {
		return false
	}
	w.shed(now)
	return true
}

// Tenants returns the tenants that have requests in the queue or in flight; none where the
// queue is not fair.
func (a *Admission) Tenants() []fair.State {
	a.router.mu.Lock()
	defer a.router.mu.Unlock()
	if a.fair == nil {
		return nil
	}
	return a.fair.States()
}
