package router

import (
	"errors"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/testkit"
)

// TestAnUnansweredWorkerIsForClientsThatForward: it gets the requests of clients that
// send them to the worker themselves, and none that the router would have to send.
func TestAnUnansweredWorkerIsForClientsThatForward(t *testing.T) {
	for _, rule := range policies.Names {
		t.Run(rule, func(t *testing.T) {
			r, _ := newWatchedRouter(t, rule, 3)
			silent := kv.WorkerKey{Worker: 1}
			r.Up(kv.Target{Key: silent, Models: []string{"m"}, Unanswered: true})
			if got := chosen(t, r, 30, Request{Tokens: testkit.Tokens(1, 20)}); got[1] != 0 {
				t.Errorf("it got %d of 30 requests", got[1])
			}
			if _, err := r.Route(t.Context(), Request{Pinned: &silent}); !errors.Is(err, ErrNoWorker) {
				t.Errorf("a request that names it: %v", err)
			}
			if d := MustRoute(t, r, Request{Unanswered: true, Pinned: &silent}); d.Target.Key != silent {
				t.Errorf("chosen: %v", d.Target.Key)
			} else {
				d.Booking.End()
			}
			if d := MustRoute(t, r, Request{Unanswered: true, Allowed: []uint64{1}, Alternatives: 3}); d.Target.Key != silent {
				t.Errorf("chosen: %v", d.Target.Key)
			} else {
				d.Booking.End()
			}
			d := MustRoute(t, r, Request{Alternatives: 3})
			if d.Booking.End(); len(d.Alternatives) != 1 {
				t.Errorf("fallbacks %v, want the other worker that answers", d.Alternatives)
			}
			if idlest, ok := r.Health.Idlest(kv.EngineVLLM); !ok || idlest.Key == silent {
				t.Error("it is asked for tokens")
			}
			if n, all := r.Count(), len(r.Targets()); n != 2 || all != 3 || r.Schedulable() != 2 {
				t.Errorf("%d of %d count as up, %d as schedulable", n, all, r.Schedulable())
			}
			if err := r.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestARouterOfUnansweredWorkersHasNone for its own requests: they are held, and its
// saturation is unknown.
func TestARouterOfUnansweredWorkersHasNone(t *testing.T) {
	r, _ := newWatchedRouter(t, "work", 0)
	silent := kv.Target{Key: kv.WorkerKey{Worker: 1}, Models: []string{"m"}, Unanswered: true}
	r.Up(silent)
	if _, up := r.Admission.Saturation(); up {
		t.Error("it has a saturation")
	}
	if _, ok := r.Health.Idlest(kv.EngineVLLM); ok {
		t.Error("a worker that has never answered is asked")
	}
	for _, need := range []Need{{Model: "m", Whole: true}, {Model: "x", Whole: true}, {Model: "m", Pair: true}} {
		if !r.Lacks(need) {
			t.Errorf("%+v does not wait", need)
		}
	}
	r.Receipts.Last(0)
	if _, err := r.Route(t.Context(), Request{Model: "m"}); !errors.Is(err, ErrNoWorker) {
		t.Errorf("routed: %v", err)
	}
	if list, _ := r.Receipts.Last(1); len(list) != 1 || list[0].Candidates[0].Excluded != excludedSilent.String() {
		t.Errorf("explained as %+v", list)
	}
	silent.Unanswered = false
	r.Up(silent)
	if r.Lacks(Need{Model: "m", Whole: true}) {
		t.Error("requests wait although the worker has answered")
	}
	MustRoute(t, r, Request{Model: "m"}).Booking.End()
}
