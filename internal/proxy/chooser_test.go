package proxy

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/router"
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

// choosePair is a Chooser of requests that two workers serve.
type choosePair func() (router.Pair, error)

func (choosePair) Route([]uint64) (router.Decision, error) { panic("two workers serve it") }

func (choosePair) Beside(context.Context, []uint64) (router.Pair, error) {
	return router.Pair{}, router.ErrNoWorker
}

func (choosePair) Answers(router.Pair) {}

func (choosePair) Continue([]uint64, []uint32) (router.Decision, error) {
	panic("two workers serve it")
}

func (f choosePair) RoutePair([]uint64, string) (router.Pair, error) { return f() }

func (choosePair) Rebook(router.Decision, kv.WorkerKey) (router.Decision, error) {
	return router.Decision{}, router.ErrNoWorker
}

func (choosePair) IsUp(kv.Target) bool { return true }

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
