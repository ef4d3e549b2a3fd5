package router

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
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
)

// QueueSettings are the settings of the queue, with Dynamo's names and defaults.
type QueueSettings struct {
	RouterQueueThreshold *float64      `group:"Routing" placeholder:"NUMBER" help:"Queue requests in the router while every eligible worker has more uncached prompt tokens pending than this many of its passes (--max-num-batched-tokens). Default: no queue."`
	RouterQueuePolicy    string        `group:"Routing" default:"fcfs" enum:"fcfs,wspt,lcfs" help:"Order of the queue: ${enum} (first come, fewest uncached tokens, last come)."`
	RouterQueueTimeout   time.Duration `group:"Routing" default:"5m" help:"Maximum time in the queue; the request is then rejected."`
	RouterQueueLimit     int           `group:"Routing" default:"1024" help:"Maximum number of queued requests; further ones are rejected."`
}

// validate checks the settings; its errors name the flag.
func (k QueueSettings) validate() error {
	if t := k.RouterQueueThreshold; t != nil && !(*t >= 0) {
		return fmt.Errorf("--router-queue-threshold %v: give a number of at least 0", *t)
	}
	if k.RouterQueueThreshold != nil && k.RouterQueueLimit < 1 {
		return fmt.Errorf("--router-queue-limit %d: give at least 1, or leave out --router-queue-threshold", k.RouterQueueLimit)
	}
	if k.RouterQueueThreshold != nil && k.RouterQueueTimeout <= 0 {
		return fmt.Errorf("--router-queue-timeout %s: give more than 0, or leave out --router-queue-threshold", k.RouterQueueTimeout)
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
	score   float64         // the higher go first, of those with one StrictPriority
	decided chan waitResult // of one; where the prompt has decided, that is called instead
}

// waitResult is what dispatch decided on a waiting request.
type waitResult struct {
	decision Decision
	err      error
}

// queueScore is the order in the queue; uncached are the tokens of p that its best worker
// has to compute. The formulas are Dynamo's.
func (r *Router) queueScore(p *prompt, uncached int, now time.Time) float64 {
	jump := max(0, p.PriorityJump)
	since := now.Sub(r.began).Seconds()
	switch r.settings.RouterQueuePolicy {
	case queueWSPT:
		return (1 + jump) / float64(max(1, uncached))
	case queueLCFS:
		return jump + since
	}
	return jump - since
}

// hasCapacity reports whether a worker with that many uncached prompt tokens to
// compute may get one more request.
func (r *Router) hasCapacity(t *kv.Target, prefillTokens int) bool {
	threshold := r.settings.RouterQueueThreshold
	return threshold == nil || t.MaxBatchedTokens <= 0 || float64(prefillTokens) <= *threshold*float64(t.MaxBatchedTokens)
}

// mustWait reports whether p has to wait for one of the candidates. Those that
// wait already need not be asked: had one of the candidates capacity for them, they
// would not wait.
func (r *Router) mustWait(p *prompt) bool {
	if r.settings.RouterQueueThreshold == nil || p.QueryOnly || p.ChooseOnly {
		return false
	}
	return !slices.ContainsFunc(r.candidates, func(c policy.Candidate) bool { return r.hasCapacity(c.Target, c.Load.PrefillTokens) })
}

// enqueue puts p, whose candidates have been gathered, into the queue.
func (r *Router) enqueue(p *prompt, now time.Time) (*waiter, error) {
	if len(r.waiting) >= r.settings.RouterQueueLimit {
		return nil, ErrQueueFull
	}
	if r.began.IsZero() {
		r.began = now
	}
	uncached := p.tokens
	for i := range r.candidates {
		uncached = min(uncached, r.uncached(p.tokens, &r.candidates[i]))
	}
	w := &waiter{prompt: *p, since: now, score: r.queueScore(p, uncached, now), decided: make(chan waitResult, 1)}
	at := slices.IndexFunc(r.waiting, func(other *waiter) bool {
		if p.StrictPriority != other.prompt.StrictPriority {
			return p.StrictPriority > other.prompt.StrictPriority
		}
		return w.score > other.score
	})
	if at < 0 {
		at = len(r.waiting)
	}
	r.waiting = slices.Insert(r.waiting, at, w)
	return w, nil
}

// dispatch decides the waiting requests that a worker has capacity for, in queue
// order. It is called whenever capacity may have been freed.
func (r *Router) dispatch(now time.Time) {
	if len(r.waiting) == 0 {
		return
	}
	kept := r.waiting[:0]
	for i, w := range r.waiting {
		if !r.anyCapacity() {
			kept = append(kept, r.waiting[i:]...)
			break
		}
		err := r.collect(&w.prompt, now)
		if errors.Is(err, ErrBusy) || err == nil && r.mustWait(&w.prompt) {
			kept = append(kept, w)
			continue
		}
		result := waitResult{err: err}
		if err != nil {
			r.explainRefusal(&w.prompt, &result.decision, err, now)
		} else {
			result.decision.QueueTime = now.Sub(w.since)
			r.choose(&w.prompt, &result.decision, now)
		}
		if tell := w.prompt.decided; tell != nil {
			tell(result.decision, result.err)
		} else {
			w.decided <- result
		}
	}
	clear(r.waiting[len(kept):])
	r.waiting = kept
}

// anyCapacity reports whether any worker that takes requests has capacity, or there is
// none to wait for.
func (r *Router) anyCapacity() bool {
	none := true
	for i := range r.targets {
		if t := &r.targets[i]; !t.Cordoned {
			if r.hasCapacity(t, r.targetLoads[i].Load.PrefillTokens) {
				return true
			}
			none = false
		}
	}
	return none
}

// wait returns the decision on w, ErrQueueTimeout, or the cause for which ctx
// ended before.
func (r *Router) wait(ctx context.Context, w *waiter) (Decision, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, r.settings.RouterQueueTimeout, ErrQueueTimeout)
	defer cancel()
	refresh := time.NewTicker(QueueRefresh)
	defer refresh.Stop()
	for {
		select {
		case result := <-w.decided:
			return result.decision, result.err
		case <-ctx.Done():
			r.leave(w)
			return Decision{}, context.Cause(ctx)
		case <-refresh.C:
			r.lookUpAgain(w)
		}
	}
}

// leave takes w out of the queue, or ends its booking.
func (r *Router) leave(w *waiter) {
	if r.dequeue(w) {
		return
	}
	if result := <-w.decided; result.err == nil {
		result.decision.Booking.End()
	}
}

// dequeue takes w out of the queue, and reports whether it was there: if not, it has been
// decided.
func (r *Router) dequeue(w *waiter) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	at := slices.Index(r.waiting, w)
	if at >= 0 {
		r.waiting = slices.Delete(r.waiting, at, at+1)
	}
	return at >= 0
}

// lookUpAgain brings up to date what w's workers have of its prompt.
func (r *Router) lookUpAgain(w *waiter) {
	matches := r.match(nil, &w.prompt)
	r.mu.Lock()
	defer r.mu.Unlock()
	w.prompt.matches, w.prompt.next = matches, 0
	r.dispatch(r.now())
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
		r.scratch.Put(scratch) // else it is part of what waits
		return decision, nil, err
	}
	return Decision{}, &Waiting{r, w}, nil
}

// Refresh updates the workers' matches of the request's prompt.
func (w *Waiting) Refresh() { w.router.lookUpAgain(w.waiter) }

// Leave removes the request from the queue, and reports whether it was there; if
// not, it has been decided.
func (w *Waiting) Leave() bool { return w.router.dequeue(w.waiter) }

// QueueDepth returns the number of queued requests and of their prompt tokens.
func (r *Router) QueueDepth() (requests, tokens int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range r.waiting {
		tokens += w.prompt.tokens
	}
	return len(r.waiting), tokens
}
