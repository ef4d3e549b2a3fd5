package router

import (
	"context"
	"errors"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/testkit"
)

func TestARestingWorkerGetsNothingNew(t *testing.T) {
	for _, rule := range policies.Names {
		t.Run(rule, func(t *testing.T) {
			r, _ := newWatchedRouter(t, rule, 3)
			running := MustRoute(t, r, Request{Pinned: &kv.WorkerKey{Worker: 1}, Tokens: testkit.Tokens(1, 20)})
			if err := r.Health.Cordon(1); err != nil {
				t.Fatal(err)
			}
			if got := chosen(t, r, 30, Request{Tokens: testkit.Tokens(1, 20)}); got[1] != 0 {
				t.Errorf("it got %d of 30 requests", got[1])
			}
			if _, err := r.Route(t.Context(), Request{Pinned: &kv.WorkerKey{Worker: 1}}); !errors.Is(err, ErrNoWorker) {
				t.Errorf("a request that names it: %v", err)
			}
			if idlest, _ := r.Health.Idlest(kv.EngineVLLM); idlest.Key.Worker == 1 {
				t.Error("it is asked for tokens")
			}
			if n := r.Load(kv.WorkerKey{Worker: 1}).InFlight; n != 1 {
				t.Errorf("%d requests run on it, want the one from before", n)
			}
			running.Booking.FirstToken()
			running.Booking.Finish(3)
			if n := r.Load(kv.WorkerKey{Worker: 1}).InFlight; n != 0 {
				t.Errorf("%d requests run on it after the end", n)
			}
			if err := r.Health.Readmit(1); err != nil {
				t.Fatal(err)
			}
			d := MustRoute(t, r, Request{Pinned: &kv.WorkerKey{Worker: 1}})
			d.Booking.End()
			if err := r.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestRestOutlastsTheIncarnation(t *testing.T) {
	r, now := newWatchedRouter(t, "round-robin", 2)
	began := *now
	if err := r.Health.Cordon(0); err != nil {
		t.Fatal(err)
	}
	*now = now.Add(time.Minute)
	again := func(step string) {
		t.Helper()
		if err := r.Health.Cordon(0); err != nil && step != "down" {
			t.Fatal(step, err)
		}
		if got := chosen(t, r, 10, Request{}); got[0] != 0 {
			t.Errorf("%s: it got %d of 10 requests", step, got[0])
		}
		if since := r.Health.Cordoned()[0]; !since.Equal(began) {
			t.Errorf("%s: it rests since %v, want %v", step, since, began)
		}
		if err := r.Check(); err != nil {
			t.Errorf("%s: %v", step, err)
		}
	}
	r.Up(kv.Target{Key: kv.WorkerKey{}, Generation: 2, Models: []string{"m"}})
	again("a new generation in its place")
	r.Down(kv.WorkerKey{})
	again("down")
	r.Up(kv.Target{Key: kv.WorkerKey{}, Generation: 3, Models: []string{"m"}})
	again("back")
	r.Up(kv.Target{Key: kv.WorkerKey{Rank: 1}, Generation: 3, Models: []string{"m"}})
	again("one more rank")
	if err := r.Health.Readmit(0); err != nil {
		t.Fatal(err)
	}
	if got := chosen(t, r, 30, Request{}); got[0] != 20 {
		t.Errorf("readmitted with two ranks of three it got %d of 30 requests", got[0])
	}
}

func TestReadmitEndsAnEjection(t *testing.T) {
	r, now := newWatchedRouter(t, "round-robin", 4)
	eject(t, r, 1)
	if err := r.Health.Readmit(1); err != nil {
		t.Fatal(err)
	}
	if got := chosen(t, r, 40, Request{}); got[1] != 10 {
		t.Errorf("it got %d of 40 requests, want its full share", got[1])
	}
	records, _ := r.Health.Records()
	if got := records[1]; got.State != health.StateIn || got.Row != 0 || !got.Since.Equal(*now) {
		t.Errorf("its record is %+v", got)
	}
	for _, unknown := range []func(uint64) error{r.Health.Cordon, r.Health.Readmit} {
		if err := unknown(9); !errors.Is(err, ErrUnknownWorker) {
			t.Errorf("an unknown worker: %v", err)
		}
	}
}

func TestTheReceiptSaysThatAWorkerRests(t *testing.T) {
	r, _ := newWatchedRouter(t, "work", 2)
	r.Health.Cordon(0)
	r.Receipts.Last(0)
	MustRoute(t, r, Request{}).Booking.End()
	list, _ := r.Receipts.Last(1)
	if got := list[0].Candidates[0].Excluded; got != excludedCordoned.String() {
		t.Errorf("it is excluded as %q", got)
	}
}

// TestWhoWaitsIsRefusedOnceAllRest: the end of what runs on a worker that rests frees no
// place, and may be long in coming.
func TestWhoWaitsIsRefusedOnceAllRest(t *testing.T) {
	settings := testkit.Defaults[Settings]()
	threshold := 1.0
	settings.RouterQueueThreshold = &threshold
	r, _ := NewClockedRouter(t, 0, settings)
	r.Up(kv.Target{Key: kv.WorkerKey{}, MaxBatchedTokens: 4})
	busy := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 20)})
	defer busy.Booking.End()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	ended := make(chan error, 1)
	go func() { // until the route is decided
		_, err := r.Route(ctx, Request{Tokens: testkit.Tokens(50, 20)})
		ended <- err
	}()
	testkit.Eventually(t, 5*time.Second, "it waits", func() bool { n, _ := r.Admission.QueueDepth(); return n == 1 })
	r.Health.Cordon(0)
	if err := <-ended; !errors.Is(err, ErrNoWorker) {
		t.Errorf("it ended with %v", err)
	}
	if n := r.Schedulable(); n != 0 || r.Count() != 1 {
		t.Errorf("%d of %d workers take requests, want 0 of 1", n, r.Count())
	}
}

func TestRestingIsBounded(t *testing.T) {
	r, now := newWatchedRouter(t, "round-robin", 0)
	for i := range uint64(maxCordoned + 10) {
		key := kv.WorkerKey{Worker: i}
		*now = now.Add(time.Second)
		r.Up(kv.Target{Key: key})
		if err := r.Health.Cordon(i); err != nil {
			t.Fatal(err)
		}
		r.Down(key)
	}
	if got := r.Health.Cordoned(); len(got) != maxCordoned || !got[5].IsZero() {
		t.Errorf("%d workers rest, the fifth of all since %v", len(got), got[5])
	}
}

// TestAHeldWorkerIsNobodysToReadmit: who keeps the fleet holds it, up or not, and a
// person's rest is another thing.
func TestAHeldWorkerIsNobodysToReadmit(t *testing.T) {
	r, _ := newWatchedRouter(t, "round-robin", 2)
	shares := func(step string, want bool) {
		t.Helper()
		if got := chosen(t, r, 10, Request{Tokens: testkit.Tokens(1, 20)}); (got[1] > 0) != want {
			t.Errorf("%s: worker 1 got %d of 10 requests", step, got[1])
		}
		if err := r.Check(); err != nil {
			t.Error(err)
		}
	}
	running := MustRoute(t, r, Request{Pinned: &kv.WorkerKey{Worker: 1}, Tokens: testkit.Tokens(1, 20)})
	r.Health.CordonDiscovered(1, true)
	shares("held", false)
	if !r.Working(1) || r.Working(7) {
		t.Error("it works on what it had")
	}
	running.Booking.End()
	if r.Working(1) {
		t.Error("it works on nothing")
	}
	if err := r.Health.Readmit(1); err != nil {
		t.Fatal(err)
	}
	shares("readmitted while held", false)
	r.Down(kv.WorkerKey{Worker: 1})
	r.Up(kv.Target{Key: kv.WorkerKey{Worker: 1}, Generation: 2})
	shares("up again while held", false)
	if err := r.Health.Cordon(1); err != nil {
		t.Fatal(err)
	}
	r.Health.CordonDiscovered(1, false)
	shares("let go, but at rest", false)
	if err := r.Health.Readmit(1); err != nil {
		t.Fatal(err)
	}
	shares("readmitted", true)
	r.Health.CordonDiscovered(2, true)
	r.Up(kv.Target{Key: kv.WorkerKey{Worker: 2}, Generation: 1})
	if got := chosen(t, r, 12, Request{}); got[2] != 0 || got[1] == 0 {
		t.Errorf("held before it came: %v", got)
	}
}
