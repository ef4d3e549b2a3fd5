package router

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"kvrouter/internal/kv"
)

// HoldSettings say what becomes of requests while no worker is up that could serve
// them.
type HoldSettings struct {
	HoldWhenEmpty time.Duration `group:"Routing" default:"0s" help:"Let requests wait so long for a worker while none is up that could serve them, at most --router-queue-limit of them, and stay ready meanwhile: for workers that are scaled to zero. 0: answer 503 at once."`
}

// validate checks the settings; its errors name the flag.
func (k HoldSettings) validate(limit int) error {
	switch {
	case k.HoldWhenEmpty < 0:
		return fmt.Errorf("--hold-when-empty %s: give a time, such as 2m; 0 holds nothing", k.HoldWhenEmpty)
	case k.HoldWhenEmpty > 0 && limit < 1:
		return fmt.Errorf("--router-queue-limit %d: give at least 1, or leave out --hold-when-empty", limit)
	}
	return nil
}

// Errors of Await.
var (
	errHoldFull = fmt.Errorf("%w, and as many requests wait for one as may (--router-queue-limit)", ErrNoWorker)
	errHoldTime = fmt.Errorf("%w, and none came within --hold-when-empty", ErrNoWorker)
	errHoldEnds = fmt.Errorf("%w, and the router is to end", ErrNoWorker)
)

// Need says which workers could serve a request.
type Need struct {
	Model string // that they serve; empty: any
	Whole bool   // one that takes it whole
	Pair  bool   // two that share it, where Whole is not set
	Now   bool   // it is not to wait
}

// heldRequest waits for a worker.
type heldRequest struct {
	need Need
	goes chan error // of one: nil, or why it cannot be served
}

// Await waits while no worker is up that could serve the request, for HoldWhenEmpty at
// most. Those that wait go in the order in which they came. Where workers are up of
// which none serves the model, waiting would not help: it does not. It fails with an
// error that is ErrNoWorker, or with the cause for which ctx ended.
func (r *Router) Await(ctx context.Context, need Need) error {
	limit := r.Knobs.HoldWhenEmpty
	if limit <= 0 || need.Now {
		return nil
	}
	h, err := r.hold(need)
	if h == nil {
		return err
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case err := <-h.goes:
		return err
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-timer.C:
		err = errHoldTime
	}
	r.Mu.Lock()
	defer r.Mu.Unlock()
	at := slices.Index(r.awaiting, h)
	if at < 0 && errors.Is(err, ErrNoWorker) {
		return <-h.goes // a worker came in the same moment
	}
	if at >= 0 {
		r.awaiting = slices.Delete(r.awaiting, at, at+1)
	}
	return err
}

// hold makes a request wait; nil: it need not, or may not.
func (r *Router) hold(need Need) (*heldRequest, error) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	switch {
	case !r.empty(need):
		return nil, nil
	case r.ending:
		return nil, errHoldEnds
	case len(r.awaiting) >= r.Knobs.RouterQueueLimit:
		return nil, errHoldFull
	}
	h := &heldRequest{need: need, goes: make(chan error, 1)}
	r.awaiting = append(r.awaiting, h)
	return h, nil
}

// empty tells whether a request has to wait for a worker to come.
func (r *Router) empty(need Need) bool {
	known := len(r.targets) == 0
	var prefill, decode kv.Kinds
	for i := range r.targets {
		t := &r.targets[i]
		if !t.Serves(need.Model) {
			continue
		}
		known = true
		if t.Takes(kv.LegWhole) && (need.Whole || !need.Pair) {
			return false
		}
		if t.Takes(kv.LegPrefill) {
			prefill |= kv.KindsOf(t.Kind)
		}
		if t.Takes(kv.LegDecode) {
			decode |= kv.KindsOf(t.Kind)
		}
	}
	return known && (need.Whole || prefill&decode == 0)
}

// letHeldGo lets those go that wait for a worker no longer. It is called with every
// change of the workers, under the lock.
func (r *Router) letHeldGo() {
	r.letGo(func(need Need) bool { return !r.empty(need) })
}

// letGo lets those go that wait for a worker and need it no longer, by is.
func (r *Router) letGo(is func(Need) bool) {
	r.awaiting = slices.DeleteFunc(r.awaiting, func(h *heldRequest) bool {
		goes := is(h.need)
		if goes {
			h.goes <- nil
		}
		return goes
	})
}

// LetGo lets those go that wait for a worker of a model for which is holds.
func (r *Router) LetGo(is func(model string) bool) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	r.letGo(func(need Need) bool { return is(need.Model) })
}

// EndHolding lets all go that wait for a worker, with an error, and holds none any
// more: the router is to end.
func (r *Router) EndHolding() {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	r.ending = true
	for _, h := range r.awaiting {
		h.goes <- errHoldEnds
	}
	r.awaiting = nil
}

// Awaiting returns how many requests wait for a worker to come.
func (r *Router) Awaiting() int {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	return len(r.awaiting)
}

// Ready tells whether a request that comes now would be served, or held until it can
// be.
func (r *Router) Ready() bool {
	return r.Knobs.HoldWhenEmpty > 0 || r.Has(func(t *kv.Target) bool { return t.Role != kv.RolePrefill && !t.Resting })
}
