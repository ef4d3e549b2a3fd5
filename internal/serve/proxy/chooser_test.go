package proxy

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
)

// chooseOne is a Chooser of requests that one worker serves.
type chooseOne func(exclude []uint64) (router.Decision, error)

func (f chooseOne) Route(exclude []uint64) (router.Decision, error) { return f(exclude) }

// Beside chooses as for a further try.
func (f chooseOne) Beside(_ context.Context, exclude []uint64) (router.Pair, error) {
	d, err := f(exclude)
	return router.Pair{Decode: d, Whole: router.WholeNoPair}, err
}

func (chooseOne) Answers(router.Pair) {}

func (chooseOne) Continue([]uint64, []uint32) (router.Decision, error) {
	return router.Decision{}, router.ErrNoWorker
}

func (chooseOne) RoutePair([]uint64, string) (router.Pair, error) { panic("one worker serves it") }

func (chooseOne) Rebook(router.Decision, kv.WorkerKey) (router.Decision, error) {
	return router.Decision{}, router.ErrNoWorker
}

func (chooseOne) IsUp(kv.Target) bool { return true }

// fleetChooser is a Chooser of a router's workers for one request.
type fleetChooser struct {
	router  *router.Router
	ctx     context.Context
	request router.Request
	rule    router.PairRule
	hedged  bool                   // it may begin elsewhere, too
	decided func(*router.Decision) // changes decisions; nil: nothing does
}

func (c *fleetChooser) without(exclude []uint64) router.Request {
	request := c.request
	request.Exclude = exclude
	return request
}

func (c *fleetChooser) Route(exclude []uint64) (router.Decision, error) {
	d, err := c.router.Route(c.ctx, c.without(exclude))
	if err == nil && c.decided != nil {
		c.decided(&d)
	}
	return d, err
}

func (c *fleetChooser) Continue(exclude []uint64, _ []uint32) (router.Decision, error) {
	return c.Route(exclude)
}

func (c *fleetChooser) RoutePair(exclude []uint64, why string) (router.Pair, error) {
	rule := c.rule
	rule.Whole = why
	return c.router.RoutePair(c.ctx, c.without(exclude), rule)
}

func (c *fleetChooser) Beside(ctx context.Context, exclude []uint64) (router.Pair, error) {
	if !c.hedged {
		return router.Pair{}, router.ErrNoWorker
	}
	request := c.without(exclude)
	request.Beside = true
	return c.router.RoutePair(ctx, request, c.rule)
}

func (*fleetChooser) Answers(router.Pair) {}

func (c *fleetChooser) Rebook(d router.Decision, to kv.WorkerKey) (router.Decision, error) {
	return c.router.Rebook(c.request, d, to)
}

func (c *fleetChooser) IsUp(t kv.Target) bool { return c.router.IsUp(t) }

// rebooks is chooseOne whose requests a gateway may send elsewhere.
type rebooks struct {
	chooseOne
	rebook func(router.Decision, kv.WorkerKey) (router.Decision, error)
}

func (r rebooks) Rebook(d router.Decision, to kv.WorkerKey) (router.Decision, error) {
	return r.rebook(d, to)
}

// newTestProxy returns a proxy that waits that long for a worker's next byte; 0: for ever.
func newTestProxy(t testing.TB, timeout time.Duration) *Proxy {
	t.Helper()
	settings := testkit.Defaults[Settings]()
	settings.RequestTimeout = timeout
	p := New(settings, Deps{Observer: testkit.SilentObserver{}, Failed: func(uint64) {}, Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(p.Close)
	return p
}
