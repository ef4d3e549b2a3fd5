package routertest

import (
	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
	"testing"
)

// newClockedRouter is newTestRouter for policy kv with a clock of its own.
func NewClockedRouter(t testing.TB, workers int, knobs router.Settings) (*router.Router, *testkit.StandingClock) {
	t.Helper()
	clock := new(testkit.StandingClock)
	r := router.New(radix.NewTree(), MustPolicy(t, "kv"), testkit.TestBlock, 1, knobs)
	r.Now = clock.Now
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Models: []string{"m"}})
	}
	return r, clock
}

// mustRoute routes and expects a worker.
func MustRoute(t testing.TB, r *router.Router, request router.Request) router.Decision {
	t.Helper()
	d, err := r.Route(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	return d
}
