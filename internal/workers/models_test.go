package workers

import (
	"context"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/kv"
)

const withLateAdapter = `{"data":[{"id":"base","parent":null},{"id":"late","parent":"base"}]}`

func TestModelsAreLookedAtWithTheHealth(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, twoRanks)
	a.start()
	f := attachedFleet(t, a, "")
	var mu sync.Mutex
	adapters := map[kv.WorkerKey][]string{}
	up := f.hooks.Up
	f.hooks.Up = func(target kv.Target) {
		mu.Lock()
		adapters[target.Key] = target.Adapters
		mu.Unlock()
		up(target)
	}
	f.Timing.modelsEvery = f.Timing.HealthEvery
	f.start()
	f.wantEvents("up 3.0 g1", "up 3.1 g1")
	a.set(func() { a.models = http.StatusServiceUnavailable }) // tells nothing, and changes nothing
	a.set(func() { a.models, a.list = http.StatusOK, withLateAdapter })
	f.wantEvents("up 3.0 g1", "up 3.1 g1", "up 3.0 g1", "up 3.1 g1")
	mu.Lock()
	defer mu.Unlock()
	for _, key := range []kv.WorkerKey{{Worker: 3, Rank: 0}, {Worker: 3, Rank: 1}} {
		if !slices.Equal(adapters[key], []string{"late"}) {
			t.Errorf("%v has the adapters %q", key, adapters[key])
		}
	}
	if got := f.Workers()[0].Models; !slices.Equal(got, []string{"base", "late"}) {
		t.Errorf("models %q", got)
	}
	f.stop()
	a.server.Close()
}

func TestRequestsForUnknownModelsShareFewLooks(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, "")
	a.start()
	f := attachedFleet(t, a, "")
	f.Timing.modelsEvery, f.Timing.lookEvery, f.Timing.lookLimit = time.Hour, time.Hour, 5*time.Second
	f.start()
	f.wantEvents("up 3.0 g1")
	a.set(func() { a.list = withLateAdapter })
	f.LookForModels(t.Context())
	if got := f.Workers()[0].Models; !slices.Equal(got, []string{"base", "late"}) {
		t.Errorf("models %q after the look", got)
	}
	// The next look is an hour away: these give up with their clients.
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	var asking sync.WaitGroup
	for range 20 {
		asking.Go(func() { f.LookForModels(ctx) })
	}
	asking.Wait()
	a.set(func() {
		if a.listed != 2 { // when it was attached, and for the first
			t.Errorf("the worker was asked %d times", a.listed)
		}
	})
	f.stop()
	a.server.Close()
}
