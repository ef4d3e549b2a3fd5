package workers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/probe"
)

// Errors of Add.
var (
	// ErrKnown means that the fleet already has a worker at that address.
	ErrKnown = errors.New("already exists")
	// ErrRemoved means that Remove removed the worker before it was ready.
	ErrRemoved = errors.New("the worker was removed before it was ready")
)

// NotReadyError means that a worker of Add was not ready in time.
type NotReadyError struct {
	Limit time.Duration // --startup-timeout
	Why   string        // last known reason why it is not ready; may be empty
}

func (e *NotReadyError) Error() string {
	return fmt.Sprintf("not ready after %s (--startup-timeout): %s", e.Limit, e.Why)
}

// addedPoll is the time between checks of Add whether its worker is ready.
const addedPoll = 50 * time.Millisecond

// follower is the goroutine that follows a worker of Add, Follow or Register.
type follower struct {
	leave context.CancelFunc // ends it
	left  chan struct{}      // closed when it has ended
}

// added reports whether the worker is one of Add or Follow.
func (w *worker) added() bool { return w.follower != nil && !w.registered() }

// Add attaches the worker at a URL at run time, as --worker with only a URL, under
// a free id, and returns when it is ready. key is sent to it with every request
// instead of any other key; it may be empty. A worker that is not ready within
// --startup-timeout, or before ctx is done, is removed. Add fails with ErrKnown,
// ErrRemoved, ErrFleetEnding, a *NotReadyError or the cause of ctx.
func (f *Fleet) Add(ctx context.Context, url string, key kv.Secret) (id uint64, err error) {
	select {
	case <-f.opened:
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	w, err := f.join(url, key)
	if err != nil {
		return 0, err
	}
	limit := time.NewTimer(f.cfg.StartupTimeout)
	defer limit.Stop()
	look := time.NewTicker(addedPoll)
	defer look.Stop()
	for {
		status := w.current()
		if status.State == StateReady {
			return w.id, nil
		}
		select {
		case <-look.C:
			continue
		case <-w.follower.left:
			if !slices.Contains(f.all(), w) {
				return 0, ErrRemoved
			}
			return 0, ErrFleetEnding
		case <-ctx.Done():
			err = context.Cause(ctx)
		case <-limit.C:
			err = &NotReadyError{Limit: f.cfg.StartupTimeout, Why: status.LastError}
		}
		f.takeOut(w)
		return 0, err
	}
}

// join makes the worker at url a member and starts to follow it.
func (f *Fleet) join(url string, key kv.Secret) (*worker, error) {
	f.membership.Lock()
	defer f.membership.Unlock()
	if f.run == nil {
		return nil, ErrFleetEnding
	}
	if slices.ContainsFunc(f.workers, func(w *worker) bool { return w.address() == url }) {
		return nil, ErrKnown
	}
	for slices.ContainsFunc(f.workers, func(w *worker) bool { return w.id == f.nextAdded }) {
		f.nextAdded++
	}
	w := newWorker(probe.Server{ID: f.nextAdded, URL: url, Key: key}, true, key != "", StateConnecting)
	f.nextAdded++
	f.attach(w, f.superviseAttached)
	return w, nil
}

// attach makes w a member, which supervise follows from now on. f.membership is locked, and
// the fleet runs.
func (f *Fleet) attach(w *worker, supervise func(context.Context, *worker)) {
	ctx, leave := context.WithCancel(f.run.ctx)
	w.follower = &follower{leave, make(chan struct{})}
	f.workers = append(f.workers, w)
	f.run.group.Go(func() error {
		defer leave()
		defer close(w.follower.left)
		supervise(ctx, w)
		w.claims.renew()
		f.settle(w)
		return nil
	})
}

// address is where the worker is now.
func (w *worker) address() string { return w.current().URL }

// Remove removes the worker of Add at that URL and its index, and returns when its
// goroutines have ended. It reports whether there was such a worker.
func (f *Fleet) Remove(url string) (id uint64, found bool) {
	members := f.all()
	at := slices.IndexFunc(members, func(w *worker) bool { return w.added() && w.discovered == nil && w.address() == url })
	if at < 0 {
		return 0, false
	}
	return members[at].id, f.takeOut(members[at])
}

// takeOut removes a worker that has a follower, and returns when nothing follows it any
// more. It reports whether this call was the one that did.
func (f *Fleet) takeOut(w *worker) bool {
	f.membership.Lock()
	at := slices.Index(f.workers, w)
	if at >= 0 {
		f.workers = slices.Delete(slices.Clone(f.workers), at, at+1)
	}
	f.membership.Unlock()
	w.follower.leave()
	<-w.follower.left
	return at >= 0
}

// mayFollow reports whether the router connects to a worker's event endpoints. A worker
// that a client has added, or that was discovered, must not name sockets in the router's
// file system.
func (w *worker) mayFollow(source events.Source) bool {
	return !w.added() || !strings.HasPrefix(source.Endpoint, "ipc:") && !strings.HasPrefix(source.Replay, "ipc:")
}
