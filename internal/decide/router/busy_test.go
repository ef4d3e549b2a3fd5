package router

import (
	"errors"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
)

func TestBusyThresholds(t *testing.T) {
	share := func(f float64) *float64 { return &f }
	tokens := func(n int) *int { return &n }
	full := policy.Load{Published: policy.Published{KVUsage: 0.5}, Fresh: true, ActiveBlocks: 30, PrefillTokens: 100}
	for _, test := range []struct {
		name       string
		thresholds BusyThresholds
		target     kv.Target
		load       policy.Load
		want       bool
	}{
		{"none means off", BusyThresholds{}, kv.Target{TotalBlocks: 1, MaxBatchedTokens: 1}, full, false},
		{"published usage above", BusyThresholds{ActiveDecodeBlocksThreshold: share(0.4)}, kv.Target{}, full, true},
		{"published usage equal", BusyThresholds{ActiveDecodeBlocksThreshold: share(0.5)}, kv.Target{}, full, false},
		{"published usage is old", BusyThresholds{ActiveDecodeBlocksThreshold: share(0.4)}, kv.Target{}, policy.Load{Published: policy.Published{KVUsage: 0.5}}, false},
		{"own blocks above", BusyThresholds{ActiveDecodeBlocksThreshold: share(0.5)}, kv.Target{TotalBlocks: 59}, full, true},
		{"own blocks equal", BusyThresholds{ActiveDecodeBlocksThreshold: share(0.5)}, kv.Target{TotalBlocks: 60}, full, false},
		{"tokens above", BusyThresholds{ActivePrefillTokensThreshold: tokens(99)}, kv.Target{}, full, true},
		{"tokens equal", BusyThresholds{ActivePrefillTokensThreshold: tokens(100)}, kv.Target{}, full, false},
		{"passes above", BusyThresholds{ActivePrefillTokensThresholdFrac: share(2)}, kv.Target{MaxBatchedTokens: 49}, full, true},
		{"passes equal", BusyThresholds{ActivePrefillTokensThresholdFrac: share(2)}, kv.Target{MaxBatchedTokens: 50}, full, false},
		{"passes of unknown size", BusyThresholds{ActivePrefillTokensThresholdFrac: share(0)}, kv.Target{}, full, false},
		{"one of several is enough", BusyThresholds{ActiveDecodeBlocksThreshold: share(1), ActivePrefillTokensThreshold: tokens(0)}, kv.Target{}, full, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := test.thresholds.exceeded(&test.target, &test.load); got != test.want {
				t.Errorf("busy %v, want %v", got, test.want)
			}
		})
	}
}

func TestBusyThresholdsOutOfRangeAreRefused(t *testing.T) {
	above, below := 1.1, -1
	negative := -0.1
	for _, thresholds := range []BusyThresholds{{ActiveDecodeBlocksThreshold: &above}, {ActiveDecodeBlocksThreshold: &negative}, {ActivePrefillTokensThreshold: &below}, {ActivePrefillTokensThresholdFrac: &negative}} {
		if thresholds.Validate() == nil {
			t.Errorf("%+v was taken", thresholds)
		}
	}
}

// overload gives a worker's rank more than the threshold of newBusyRouter.
func overload(t testing.TB, r *Router, w kv.WorkerKey) *Booking {
	t.Helper()
	b, err := r.Book(Request{NumTokens: 11}, w)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// setBusyThresholds sets all thresholds at once.
func (r *Router) setBusyThresholds(t BusyThresholds) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Admission.thresholds = t
	r.Admission.dispatch(r.now())
}

func newBusyRouter(t *testing.T, workers int) *Router {
	r, _ := NewClockedRouter(t, workers, testkit.Defaults[Settings]())
	limit := 10
	r.setBusyThresholds(BusyThresholds{ActivePrefillTokensThreshold: &limit})
	return r
}

func TestSchedulerOverloadedWorkersAreFiltered(t *testing.T) {
	r := newBusyRouter(t, 3)
	Hold(r, 1, testkit.Tokens(1, 80))
	overload(t, r, kv.WorkerKey{Worker: 1})
	overload(t, r, kv.WorkerKey{Worker: 0})
	for range 20 {
		d := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 81)})
		if d.Target.Key.Worker != 2 {
			t.Fatalf("worker %d was chosen, want 2, the only one that is not busy", d.Target.Key.Worker)
		}
		d.Booking.End()
	}
}

func TestSchedulerAllOverloadedIsAnError(t *testing.T) {
	r := newBusyRouter(t, 2)
	bookings := []*Booking{overload(t, r, kv.WorkerKey{Worker: 0}), overload(t, r, kv.WorkerKey{Worker: 1})}
	for _, request := range []Request{{NumTokens: 1}, {NumTokens: 1, QueryOnly: true}, {NumTokens: 1, ChooseOnly: true}} {
		if _, err := r.Route(t.Context(), request); !errors.Is(err, ErrBusy) {
			t.Errorf("%+v: %v, want ErrBusy", request, err)
		}
	}
	if _, err := r.Route(t.Context(), Request{NumTokens: 1, Allowed: []uint64{9}}); !errors.Is(err, ErrNoWorker) {
		t.Errorf("none is allowed: %v, want ErrNoWorker", err)
	}
	bookings[1].FirstToken()
	if d := MustRoute(t, r, Request{NumTokens: 1}); d.Target.Key.Worker != 1 {
		t.Error("the busy one was chosen")
	}
	r.setBusyThresholds(BusyThresholds{})
	MustRoute(t, r, Request{NumTokens: 1, Allowed: []uint64{0}})
}

func TestSchedulerPinnedOverloadedIsNotRerouted(t *testing.T) {
	r := newBusyRouter(t, 2)
	overload(t, r, kv.WorkerKey{Worker: 1})
	if _, err := r.Route(t.Context(), Request{NumTokens: 1, Pinned: &kv.WorkerKey{Worker: 1}}); !errors.Is(err, ErrBusy) {
		t.Errorf("pinned to a busy worker: %v, want ErrBusy", err)
	}
	if _, err := r.Route(t.Context(), Request{NumTokens: 1, Pinned: &kv.WorkerKey{Worker: 1, Rank: 1}}); !errors.Is(err, ErrNoWorker) {
		t.Errorf("pinned to a rank that is not there: %v, want ErrNoWorker", err)
	}
	if _, err := r.Route(t.Context(), Request{NumTokens: 1, Pinned: &kv.WorkerKey{Worker: 0}, Allowed: []uint64{1}}); !errors.Is(err, ErrNoWorker) {
		t.Errorf("pinned to a worker that is not allowed: %v, want ErrNoWorker", err)
	}
}

func TestBusyIsAWorkerOnlyIfAllItsRanksAre(t *testing.T) {
	r := newBusyRouter(t, 0)
	for rank := range uint32(2) {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: 3, Rank: rank}, Ranks: 2})
	}
	overload(t, r, kv.WorkerKey{Worker: 3})
	MustRoute(t, r, Request{NumTokens: 1, Pinned: &kv.WorkerKey{Worker: 3}}).Booking.End()
	overload(t, r, kv.WorkerKey{Worker: 3, Rank: 1})
	if _, err := r.Route(t.Context(), Request{NumTokens: 1}); !errors.Is(err, ErrBusy) {
		t.Errorf("all ranks are busy: %v", err)
	}
}

func TestBusyByWhatTheWorkerPublishes(t *testing.T) {
	r, clock := NewClockedRouter(t, 1, testkit.Defaults[Settings]())
	limit := 0.2
	r.setBusyThresholds(BusyThresholds{ActiveDecodeBlocksThreshold: &limit})
	r.Publish(kv.WorkerKey{}, policy.Published{KVUsage: 0.3, At: clock.Now()})
	if _, err := r.Route(t.Context(), Request{NumTokens: 1}); !errors.Is(err, ErrBusy) {
		t.Errorf("30 %% of the cache in use: %v, want ErrBusy", err)
	}
	clock.Advance(2 * loadFreshFor)
	MustRoute(t, r, Request{NumTokens: 1})
	r.Publish(kv.WorkerKey{}, policy.Published{KVUsage: 0.1, At: clock.Now()})
	MustRoute(t, r, Request{NumTokens: 1})
}
