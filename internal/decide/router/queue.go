package router

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// Errors of requests that cannot wait in the queue or waited there for too long.
var (
	ErrQueueFull    = errors.New("all workers are at capacity and the queue is full")
	ErrQueueTimeout = errors.New("all workers were at capacity for the maximum queue time")
)

// Names of the values that --router-queue-policy takes.
const (
	queueFCFS = "fcfs"
	queueWSPT = "wspt"
	queueLCFS = "lcfs"
	queueFair = "fair"
)

// QueueSettings are the settings of the queue, with Dynamo's names and defaults.
type QueueSettings struct {
	RouterQueueThreshold *float64      `group:"Routing" placeholder:"NUMBER" help:"Queue requests in the router while every eligible worker has more uncached prompt tokens pending than this many of its passes (--max-num-batched-tokens). Default: no queue; with --router-queue-policy fair, what each worker has room for is learned."`
	RouterQueuePolicy    string        `group:"Routing" default:"fcfs" enum:"fcfs,wspt,lcfs,fair" help:"Order of the queue: ${enum} (first come, fewest uncached tokens, last come, by class and fairly over tenants: see docs/fairness.md)."`
	RouterQueueTimeout   time.Duration `group:"Routing" default:"5m" help:"Maximum time in the queue; the request is then rejected."`
	RouterQueueLimit     int           `group:"Routing" default:"1024" help:"Maximum number of queued requests. At the limit, a new one takes the place of the last one of the client that has the most, if its own client has fewer; otherwise it is rejected."`
	RouterBatchShare     float64       `group:"Routing" default:"0" placeholder:"SHARE" help:"Share of the workers' time, 0 to 1, that is kept for requests of class batch while they wait, with --router-queue-policy fair. 0: they use what the other classes leave."`
	Charging             Charging      `kong:"-"` // of a fair queue
}

// Queues reports whether requests can wait in the queue.
func (k QueueSettings) Queues() bool { return k.RouterQueueThreshold != nil || k.Fair() }

// Fair reports whether the order of the queue is fair.
func (k QueueSettings) Fair() bool { return k.RouterQueuePolicy == queueFair }

// validate checks the settings; its errors name the flag.
func (k QueueSettings) validate() error {
	if t := k.RouterQueueThreshold; t != nil && !(*t >= 0) {
		return fmt.Errorf("--router-queue-threshold %v: give a number of at least 0", *t)
	}
	switch {
	case !(k.RouterBatchShare >= 0 && k.RouterBatchShare <= 1):
		return fmt.Errorf("--router-batch-share %v: give a share from 0 to 1", k.RouterBatchShare)
	case k.RouterBatchShare > 0 && !k.Fair():
		return fmt.Errorf("--router-batch-share %v needs --router-queue-policy fair", k.RouterBatchShare)
	case !k.Queues():
		return nil
	}
	off := "leave out --router-queue-threshold"
	if k.Fair() {
		off = "another --router-queue-policy than fair"
	}
	if k.RouterQueueLimit < 1 {
		return fmt.Errorf("--router-queue-limit %d: give at least 1, or %s", k.RouterQueueLimit, off)
	}
	if k.RouterQueueTimeout <= 0 {
		return fmt.Errorf("--router-queue-timeout %s: give more than 0, or %s", k.RouterQueueTimeout, off)
	}
	return nil
}

// QueueRefresh is the interval at which a queued request looks its prompt up again.
// It also detects capacity that was freed without a signal.
const QueueRefresh = 10 * time.Second

// waiter is a request that waits until a worker has capacity for it.
type waiter struct {
	prompt  prompt
	since   time.Time
	score   float64             // higher ones first, among those with one StrictPriority
	item    *fair.Item[*waiter] // its place in a fair queue; nil: the queue is not fair
	wants   wanted              // in a fair queue
	matches []kv.Match          // reused there; the prompt's first ones are its other leg's too
	look    *time.Timer         // of looks; nil: none
	decided chan waitResult     // of one; where the prompt has decided, that is called instead
}

// deliver passes on the decision.
func (w *waiter) deliver(result waitResult) {
	if w.prompt.decided != nil {
		w.prompt.decided(result.decision, result.err)
		return
	}
	w.decided <- result
}

// waitResult is what dispatch decided on a waiting request.
type waitResult struct {
	decision Decision
	err      error
}

// queueScore is the order in the queue; uncached are the tokens of p that its best worker
// has to compute. The formulas are Dynamo's.
func (a *Admission) queueScore(p *prompt, uncached int, now time.Time) float64 {
	jump := max(0, p.PriorityJump)
	since := now.Sub(a.began).Seconds()
	switch a.router.settings.RouterQueuePolicy {
	case queueWSPT:
		return (1 + jump) / float64(max(1, uncached))
	case queueLCFS:
		return jump + since
	}
	return jump - since
}

// hasCapacity reports whether a worker with that load may get one more request.
func (a *Admission) hasCapacity(t *kv.Target, load *policy.Load, now time.Time) bool {
	if load.State.Rests() {
		return false
	}
	if a.fair != nil && a.router.settings.RouterQueueThreshold == nil {
		return a.hasRoom(t, load, now)
	}
	threshold := a.router.settings.RouterQueueThreshold
	return threshold == nil || t.MaxBatchedTokens <= 0 || float64(load.PrefillTokens) <= *threshold*float64(t.MaxBatchedTokens)
}

// mustWait reports whether p has to wait for one of the candidates. Those already
// waiting need no check: had one of the candidates capacity for them, they would not
// wait.
func (a *Admission) mustWait(p *prompt, now time.Time) bool {
	r := a.router
	waits := r.settings.Queues() || r.fleet.resting > 0 || p.Versions.Restricts()
	if !waits || p.QueryOnly || p.ChooseOnly {
		return false
	}
	for i := range r.decider.candidates {
		if c := &r.decider.candidates[i]; r.decider.runs(p, c.Target.Key, c.Load) && a.hasCapacity(c.Target, c.Load, now) {
			var s seats
			return a.fair != nil && (a.seatsAreKept(p.Class, &s, now) || a.sharesAreKept(p.Tenant, p.Class, &s, now))
		}
	}
	return true
}

// enqueue puts p, whose candidates have been gathered, into the queue.
func (a *Admission) enqueue(p *prompt, now time.Time) (*waiter, error) {
	if a.fair != nil {
		return a.enqueueFairly(p, now)
	}
	if len(a.waiting) >= a.limit(p) && !a.makeRoom(p.Client) {
		return nil, ErrQueueFull
	}
	if a.began.IsZero() {
		a.began = now
	}
	w := &waiter{prompt: *p, since: now, score: a.queueScore(p, a.leastUncached(p), now), decided: make(chan waitResult, 1)}
	at := slices.IndexFunc(a.waiting, func(other *waiter) bool {
		if p.StrictPriority != other.prompt.StrictPriority {
			return p.StrictPriority > other.prompt.StrictPriority
		}
		return w.score > other.score
	})
	if at < 0 {
		at = len(a.waiting)
	}
	a.waiting = slices.Insert(a.waiting, at, w)
	return w, nil
}

// makeRoom removes the last request of the client with the most in the queue, if that client then
// still has no fewer than this one will have. A fair queue does the same for tenants.
func (a *Admission) makeRoom(client string) (ok bool) {
	of := map[string]int{}
	for _, w := range a.waiting {
		of[w.prompt.Client]++
	}
	last, most := -1, of[client]+1
	for i, w := range slices.Backward(a.waiting) {
		if n := of[w.prompt.Client]; n > most {
			last, most = i, n
		}
	}
	if last < 0 {
		return false
	}
	a.waiting[last].deliver(waitResult{err: ErrQueueFull})
	a.waiting = slices.Delete(a.waiting, last, last+1)
	return true
}

// leastUncached returns the tokens of p that its best candidate has to compute.
func (a *Admission) leastUncached(p *prompt) int {
	r := a.router
	uncached := p.tokens
	for i := range r.decider.candidates {
		uncached = min(uncached, r.decider.uncached(p, &r.decider.candidates[i]))
	}
	return uncached
}

// dispatch decides the waiting requests that a worker has capacity for, in queue
// order. It is called whenever capacity may have been freed.
func (a *Admission) dispatch(now time.Time) {
	if a.fair != nil {
		a.dispatchFairly(now)
		return
	}
	if len(a.waiting) == 0 {
		return
	}
	kept := a.waiting[:0]
	var blocked []alike
	capacity := a.anyCapacity(now)
	for i, w := range a.waiting {
		if !capacity {
			kept = append(kept, a.waiting[i:]...)
			break
		}
		kind := w.prompt.alike()
		if slices.Contains(blocked, kind) {
			kept = append(kept, w)
			continue
		}
		if a.decide(w, true, now) == fair.Kept {
			kept = append(kept, w)
			if kind.known {
				blocked = append(blocked, kind)
			}
			continue
		}
		capacity = a.anyCapacity(now)
	}
	clear(a.waiting[len(kept):])
	a.waiting = kept
}

// decide decides a waiting request, unless it has to keep waiting, or prefers to wait for the worker
// with its prefix.
func (a *Admission) decide(w *waiter, must bool, now time.Time) fair.Verdict {
	r := a.router
	err := r.decider.collect(&w.prompt, now)
	switch {
	case errors.Is(err, ErrBusy), err == nil && a.mustWait(&w.prompt, now):
		return fair.Kept
	case err == nil && !must && a.want(w, now):
		return a.yields(w, now)
	case err == nil && a.fair != nil:
		if late := a.lateBy(&w.prompt, now); late > 0 {
			w.deliver(waitResult{err: shed(late)})
			return fair.Taken
		}
	}
	result := waitResult{err: err}
	if err != nil {
		r.Receipts.refuse(&w.prompt, &result.decision, err, now)
	} else {
		result.decision.QueueTime = now.Sub(w.since)
		r.choose(&w.prompt, &result.decision, now)
	}
	w.deliver(result)
	return fair.Taken
}

// anyCapacity reports whether any worker that takes requests has capacity, or there is
// none to wait for.
func (a *Admission) anyCapacity(now time.Time) bool {
	r := a.router
	none := true
	for i := range r.fleet.targets {
		if t := &r.fleet.targets[i]; !t.Cordoned {
			if a.hasCapacity(t, r.fleet.targetLoads[i].asOf(now), now) {
				return true
			}
			none = false
		}
	}
	return none
}

// wait returns the decision on w, ErrQueueTimeout, or the cause for which ctx
// ended before.
func (a *Admission) wait(ctx context.Context, w *waiter) (Decision, error) {
	limit := time.NewTimer(a.router.settings.RouterQueueTimeout)
	defer limit.Stop()
	refresh := time.NewTicker(QueueRefresh)
	defer refresh.Stop()
	look, stop := a.looks(w)
	defer stop()
	for {
		select {
		case result := <-w.decided:
			return result.decision, result.err
		case <-ctx.Done():
			a.leave(w)
			return Decision{}, context.Cause(ctx)
		case <-limit.C:
			if left := a.restsFor(w); left > 0 {
				limit.Reset(left)
				continue
			}
			if a.dequeue(w) {
				return Decision{}, ErrQueueTimeout
			}
		case <-refresh.C:
			a.lookUpAgain(w)
		case <-look:
			a.lookForRoom(w)
		}
	}
}

// leave takes w out of the queue, or ends its booking.
func (a *Admission) leave(w *waiter) {
	if a.dequeue(w) {
		return
	}
	if result := <-w.decided; result.err == nil {
		result.decision.Booking.End()
	}
}

// dequeue takes w out of the queue, and reports whether it was there: if not, it has been
// decided.
func (a *Admission) dequeue(w *waiter) bool {
	a.router.mu.Lock()
	defer a.router.mu.Unlock()
	if a.fair != nil {
		return a.fair.Remove(w.item)
	}
	at := slices.Index(a.waiting, w)
	if at >= 0 {
		a.waiting = slices.Delete(a.waiting, at, at+1)
	}
	return at >= 0
}

// lookUpAgain updates the matches of w's prompt on its workers.
func (a *Admission) lookUpAgain(w *waiter) {
	r := a.router
	if a.fair != nil {
		a.lookAgainFairly(w)
		return
	}
	began := r.now()
	matches := r.match(nil, &w.prompt, r.parts())
	r.mu.Lock()
	defer r.mu.Unlock()
	w.prompt.matches, w.prompt.next, w.prompt.matchedAt = matches, 0, began
	if now := r.now(); now.Sub(a.refreshed) >= lookEvery { // thousands may wait
		a.refreshed = now
		a.dispatch(now)
	}
}

// Waiting is a request of RouteOrWait that is in the queue.
type Waiting struct {
	router *Router
	waiter *waiter
}

// RouteOrWait is Route for a caller with its own clock that must not block: if the
// request has to wait, it returns a Waiting, and decided is called later with the
// decision or an error. decided must not call the router. The caller calls Refresh
// after each QueueRefresh, and Leave after RouterQueueTimeout.
func (r *Router) RouteOrWait(request Request, decided func(Decision, error)) (Decision, *Waiting, error) {
	scratch := r.scratch.Get().(*workspace)
	p, decision := r.lookUp(request, scratch)
	p.decided = decided
	w, err := r.schedule(&p, &decision)
	if w == nil {
		r.scratch.Put(scratch) // else it belongs to the waiting request
		return decision, nil, err
	}
	return Decision{}, &Waiting{r, w}, nil
}

// Refresh updates the workers' matches of the request's prompt.
func (w *Waiting) Refresh() { w.router.Admission.lookUpAgain(w.waiter) }

// Leave removes the request from the queue, and reports whether it was there; if
// not, it has been decided.
func (w *Waiting) Leave() bool { return w.router.Admission.dequeue(w.waiter) }

// QueueDepth returns the number of queued requests and of their prompt tokens.
func (a *Admission) QueueDepth() (requests, tokens int) {
	a.router.mu.Lock()
	defer a.router.mu.Unlock()
	a.eachWaiting(func(w *waiter) {
		requests, tokens = requests+1, tokens+w.prompt.tokens
	})
	return requests, tokens
}

// eachWaiting calls f with every waiting request, in no particular order.
func (a *Admission) eachWaiting(f func(*waiter)) {
	if a.fair != nil {
		a.fair.Each(func(it *fair.Item[*waiter]) { f(it.Value) })
	}
	for _, w := range a.waiting {
		f(w)
	}
}
