package models

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"kvrouter/internal/router"
)

// Errors of Find.
var (
	errHoldFull = fmt.Errorf("%w, and as many requests wait for one as may (--router-queue-limit)", router.ErrNoWorker)
	errHoldTime = fmt.Errorf("%w, and none came within --hold-when-empty", router.ErrNoWorker)
	errHoldEnds = fmt.Errorf("%w, and the router is to end", router.ErrNoWorker)
)

// holding is the requests that wait for a worker to come.
type holding struct {
	mu     sync.Mutex     // guards all; Router.Mu may be taken under it
	all    []*heldRequest // the first to go at the front
	ending bool           // nothing waits any more
}

// heldRequest waits for a worker.
type heldRequest struct {
	need router.Need
	goes chan error // of one: nil, or why it cannot be served
}

// Find is Of for a request with that need. Its model may be new: the workers are asked
// before it is called unknown. While no worker is up that could serve it, it waits for
// one, for --hold-when-empty at most; those that wait are let go in the order in which
// they came. An error is router.ErrNoWorker, or the cause for which ctx ended.
func (s *Set) Find(ctx context.Context, need router.Need) (m *Model, known bool, err error) {
	m, known = s.Of(need.Model)
	if !known && s.Look != nil {
		s.Look(ctx)
		m, known = s.Of(need.Model)
	}
	if limit := s.settings.Routing.HoldWhenEmpty; known && limit > 0 && !need.Now && m.Router.Lacks(need) {
		err = s.await(ctx, need, limit)
		m, known = s.Of(need.Model) // it may have come as a model of its own
	}
	return m, known, err
}

// lacks tells whether a request has to wait for a worker to come.
func (s *Set) lacks(need router.Need) bool {
	m, known := s.Of(need.Model)
	return known && m.Router.Lacks(need)
}

// await waits until lacks is false.
func (s *Set) await(ctx context.Context, need router.Need, limit time.Duration) error {
	h, err := s.hold(need)
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
	s.holding.mu.Lock()
	defer s.holding.mu.Unlock()
	at := slices.Index(s.holding.all, h)
	if at < 0 && errors.Is(err, router.ErrNoWorker) {
		return <-h.goes // a worker came in the same moment
	}
	if at >= 0 {
		s.holding.all = slices.Delete(s.holding.all, at, at+1)
	}
	return err
}

// hold makes a request wait; nil: it need not, or may not.
func (s *Set) hold(need router.Need) (*heldRequest, error) {
	s.holding.mu.Lock()
	defer s.holding.mu.Unlock()
	switch {
	case !s.lacks(need):
		return nil, nil
	case s.holding.ending:
		return nil, errHoldEnds
	case len(s.holding.all) >= s.settings.Routing.RouterQueueLimit:
		return nil, errHoldFull
	}
	h := &heldRequest{need: need, goes: make(chan error, 1)}
	s.holding.all = append(s.holding.all, h)
	return h, nil
}

// letHeldGo lets those go that wait for a worker no longer. It follows every change by
// which a worker may take requests.
func (s *Set) letHeldGo() {
	s.holding.mu.Lock()
	defer s.holding.mu.Unlock()
	s.holding.all = slices.DeleteFunc(s.holding.all, func(h *heldRequest) bool {
		goes := !s.lacks(h.need)
		if goes {
			h.goes <- nil
		}
		return goes
	})
}

// EndHolding lets all go that wait for a worker, with an error, and holds none any
// more: the router is to end.
func (s *Set) EndHolding() {
	s.holding.mu.Lock()
	defer s.holding.mu.Unlock()
	s.holding.ending = true
	for _, h := range s.holding.all {
		h.goes <- errHoldEnds
	}
	s.holding.all = nil
}

// Awaiting returns how many requests wait for a worker to come.
func (s *Set) Awaiting() int {
	s.holding.mu.Lock()
	defer s.holding.mu.Unlock()
	return len(s.holding.all)
}

// awaited counts them by the model that is to serve them.
func (s *Set) awaited() map[*Model]int {
	s.holding.mu.Lock()
	defer s.holding.mu.Unlock()
	counts := map[*Model]int{}
	for _, h := range s.holding.all {
		m, _ := s.Of(h.need.Model)
		counts[m]++
	}
	return counts
}

// Saturation returns the highest Router.Saturation of the models. One without workers
// counts as 1 while requests wait for them.
func (s *Set) Saturation() (highest float64) {
	awaited := s.awaited()
	for _, m := range s.All() {
		highest = max(highest, m.saturation(awaited[m]))
	}
	return highest
}

// saturation is Router.Saturation; without workers 1 if any wait for them.
func (m *Model) saturation(awaiting int) float64 {
	saturation, up := m.Router.Saturation()
	if !up && awaiting > 0 {
		return 1
	}
	return saturation
}
