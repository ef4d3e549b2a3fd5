package models

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
)

// Errors of Find.
var (
	errWaitFull    = fmt.Errorf("%w, and the maximum number of requests (--router-queue-limit) already waits for one", router.ErrNoWorker)
	errWaitTimeout = fmt.Errorf("%w, and none started within --hold-when-empty", router.ErrNoWorker)
	errWaitStopped = fmt.Errorf("%w, and the router is shutting down", router.ErrNoWorker)
)

// waitList has the requests that wait until a worker is up.
type waitList struct {
	mu      sync.Mutex        // guards the rest; that of a router may be taken under it
	all     []*waitingRequest // in order of arrival
	stopped bool              // no request may wait any more
}

// waitingRequest waits until a worker is up.
type waitingRequest struct {
	need router.Need
	done chan error // takes one: nil, or why the request cannot be served
}

// Find returns the model for a request, like Of. The workers are asked for their models
// before a name counts as unknown. While no worker is up that could serve the request,
// Find waits for one, at most --hold-when-empty; requests continue in order of arrival.
// An error is router.ErrNoWorker or the cause of ctx's end.
func (s *Set) Find(ctx context.Context, need router.Need) (m *Model, known bool, err error) {
	m, known = s.Of(need.Model)
	if !known && s.look != nil {
		s.look(ctx)
		m, known = s.Of(need.Model)
	}
	if limit := s.settings.Routing.HoldWhenEmpty; known && limit > 0 && !need.Now && m.Router.Lacks(need) {
		err = s.wait(ctx, need, limit)
		m, known = s.Of(need.Model) // the worker may have brought a model of its own
	}
	return m, known, err
}

// lacks reports whether a request has to wait until a worker is up.
func (s *Set) lacks(need router.Need) bool {
	m, known := s.Of(need.Model)
	return known && m.Router.Lacks(need)
}

// wait waits until lacks is false.
func (s *Set) wait(ctx context.Context, need router.Need, limit time.Duration) error {
	w, err := s.enqueue(need)
	if w == nil {
		return err
	}
	select {
	case err := <-w.done:
		return err
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-time.After(limit):
		err = errWaitTimeout
	}
	s.waiting.mu.Lock()
	defer s.waiting.mu.Unlock()
	at := slices.Index(s.waiting.all, w)
	if at < 0 && errors.Is(err, router.ErrNoWorker) {
		return <-w.done // a worker came at the same moment
	}
	if at >= 0 {
		s.waiting.all = slices.Delete(s.waiting.all, at, at+1)
	}
	return err
}

// enqueue makes a request wait; nil: it need not, or must not.
func (s *Set) enqueue(need router.Need) (*waitingRequest, error) {
	s.waiting.mu.Lock()
	defer s.waiting.mu.Unlock()
	switch {
	case !s.lacks(need):
		return nil, nil
	case s.waiting.stopped:
		return nil, errWaitStopped
	case len(s.waiting.all) >= s.settings.Routing.RouterQueueLimit:
		return nil, errWaitFull
	}
	w := &waitingRequest{need: need, done: make(chan error, 1)}
	s.waiting.all = append(s.waiting.all, w)
	return w, nil
}

// releaseWaiting lets the requests continue that a worker can serve now. It follows
// every change by which a worker may become able to.
func (s *Set) releaseWaiting() {
	s.waiting.mu.Lock()
	defer s.waiting.mu.Unlock()
	s.waiting.all = slices.DeleteFunc(s.waiting.all, func(w *waitingRequest) bool {
		done := !s.lacks(w.need)
		if done {
			w.done <- nil
		}
		return done
	})
}

// StopWaiting fails all requests that wait until a worker is up, and later ones
// that would wait: the router is shutting down.
func (s *Set) StopWaiting() {
	s.waiting.mu.Lock()
	defer s.waiting.mu.Unlock()
	s.waiting.stopped = true
	for _, w := range s.waiting.all {
		w.done <- errWaitStopped
	}
	s.waiting.all = nil
}

// Waiting returns the number of requests that wait until a worker is up.
func (s *Set) Waiting() int {
	s.waiting.mu.Lock()
	defer s.waiting.mu.Unlock()
	return len(s.waiting.all)
}

// waitingByModel returns the same by the model of the requests.
func (s *Set) waitingByModel() map[*Model]int {
	s.waiting.mu.Lock()
	defer s.waiting.mu.Unlock()
	counts := map[*Model]int{}
	for _, w := range s.waiting.all {
		m, _ := s.Of(w.need.Model)
		counts[m]++
	}
	return counts
}

// Saturation returns the highest Admission.Saturation of the models; a model without
// workers has 1 while requests wait for one.
func (s *Set) Saturation() (highest float64) {
	waiting := s.waitingByModel()
	for _, m := range s.All() {
		highest = max(highest, m.saturation(waiting[m]))
	}
	return highest
}

// saturation is Admission.Saturation; without workers 1 if requests wait for one.
func (m *Model) saturation(waiting int) float64 {
	saturation, up := m.Router.Admission.Saturation()
	return saturationOr(saturation, up, waiting)
}

// saturationOf is the same of Router.SaturationOf.
func (m *Model) saturationOf(role kv.Role, waiting int) float64 {
	saturation, up := m.Router.Admission.SaturationOf(role)
	return saturationOr(saturation, up, waiting)
}

// saturationOr returns a saturation; without workers 1 if requests wait for one.
func saturationOr(saturation float64, up bool, waiting int) float64 {
	if !up && waiting > 0 {
		return 1
	}
	return saturation
}
