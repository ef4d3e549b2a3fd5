package router

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/testkit"
)

func newHoldingRouter(t testing.TB, limit time.Duration, most int) *Router {
	t.Helper()
	r, _ := newSessionRouter(t, 0, func(k *Settings) { k.HoldWhenEmpty, k.RouterQueueLimit = limit, most })
	return r
}

// awaits begins to wait, and returns when the request is one of so many that do.
func awaits(t testing.TB, r *Router, ctx context.Context, held int, need Need) chan error {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- r.Await(ctx, need) }()
	testkit.Eventually(t, 10*time.Second, "the request is held", func() bool { return r.Awaiting() == held })
	return ended
}

// ends returns how a wait ends, which it must soon.
func ends(t testing.TB, ended chan error) error {
	t.Helper()
	select {
	case err := <-ended:
		return err
	case <-time.After(10 * time.Second):
		t.Fatal("a request waits that should not")
		return nil
	}
}

func TestWhatEndsTheWaitForAWorker(t *testing.T) {
	worker := func(id uint64, role kv.Role, kind kv.Kind, models ...string) kv.Target {
		return kv.Target{Key: kv.WorkerKey{Worker: id}, Models: models, Disagg: kv.Disagg{Role: role, Kind: kind}}
	}
	whole := worker(0, kv.RoleBoth, kv.KindNone, "m")
	prefill, decode := worker(1, kv.RolePrefill, kv.KindNIXL, "m"), worker(2, kv.RoleDecode, kv.KindNIXL, "m")
	other, meets := worker(3, kv.RoleDecode, kv.KindSGLang, "m"), worker(4, kv.RolePrefill, kv.KindSGLang, "m")
	meets.Bootstrap = kv.Bootstrap{Host: "h", Port: 1}
	for name, test := range map[string]struct {
		need Need
		not  []kv.Target // that come before, and do not
		ends kv.Target
	}{
		"a worker":                            {ends: whole},
		"one that serves the model":           {need: Need{Model: "m"}, ends: whole},
		"one of another model: it is told so": {need: Need{Model: "x"}, ends: whole},
		"a decode worker takes it whole":      {need: Need{Model: "m"}, not: []kv.Target{prefill}, ends: decode},
		"a pair":                              {need: Need{Model: "m"}, not: []kv.Target{prefill, other}, ends: meets},
		"a pair that is enforced":             {need: Need{Pair: true}, not: []kv.Target{whole, decode}, ends: prefill},
		"for a whole one a pair does not do":  {need: Need{Whole: true}, not: []kv.Target{other, meets}, ends: whole},
	} {
		t.Run(name, func(t *testing.T) {
			r := newHoldingRouter(t, time.Minute, 10)
			ended := awaits(t, r, t.Context(), 1, test.need)
			for _, target := range test.not {
				r.Up(target)
			}
			if r.Awaiting() != 1 {
				t.Fatal("it waits no more")
			}
			r.Up(test.ends)
			if err := ends(t, ended); err != nil || r.Awaiting() != 0 {
				t.Errorf("%v, %d are held", err, r.Awaiting())
			}
			if err := r.Await(t.Context(), test.need); err != nil {
				t.Errorf("the next one: %v", err)
			}
		})
	}
}

func TestAWorkerThatDrainsServesNobodyWhoWaits(t *testing.T) {
	r := newHoldingRouter(t, time.Minute, 10)
	r.Up(kv.Target{Key: testkit.W0, Models: []string{"m"}})
	for name, rest := range map[string][2]func(){
		"held by the fleet": {func() { r.Hold(0, true) }, func() { r.Hold(0, false) }},
		"at rest":           {func() { _ = r.Rest(0) }, func() { _ = r.Readmit(0) }},
	} {
		rest[0]()
		ended := awaits(t, r, t.Context(), 1, Need{Model: "m"})
		rest[1]()
		if err := ends(t, ended); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRequestsThatWaitGoInTheirOrder(t *testing.T) {
	r := newHoldingRouter(t, time.Minute, 100)
	var all []*heldRequest
	for range 100 {
		h, err := r.hold(Need{})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, h)
	}
	if !slices.Equal(r.awaiting, all) {
		t.Error("they are not in the order in which they came")
	}
	r.Up(kv.Target{Key: testkit.W0})
	for i, h := range all {
		select {
		case err := <-h.goes:
			if err != nil {
				t.Errorf("request %d: %v", i, err)
			}
		default:
			t.Errorf("request %d still waits", i)
		}
	}
}

func TestWhoWaitsInVain(t *testing.T) {
	t.Run("its time is over", func(t *testing.T) {
		r := newHoldingRouter(t, 20*time.Millisecond, 10)
		if err := r.Await(t.Context(), Need{}); !errors.Is(err, ErrNoWorker) || err.Error() != "no worker is ready, and none came within --hold-when-empty" {
			t.Error(err)
		}
	})
	t.Run("its client leaves", func(t *testing.T) {
		r := newHoldingRouter(t, time.Minute, 10)
		ctx, leave := context.WithCancelCause(t.Context())
		left := errors.New("left")
		ended := awaits(t, r, ctx, 1, Need{})
		leave(left)
		if err := ends(t, ended); !errors.Is(err, left) {
			t.Error(err)
		}
	})
	t.Run("too many wait", func(t *testing.T) {
		r := newHoldingRouter(t, time.Minute, 1)
		first := awaits(t, r, t.Context(), 1, Need{})
		if err := r.Await(t.Context(), Need{}); !errors.Is(err, ErrNoWorker) || r.Awaiting() != 1 {
			t.Errorf("%v, %d are held", err, r.Awaiting())
		}
		r.Up(kv.Target{Key: testkit.W0})
		if err := ends(t, first); err != nil {
			t.Error(err)
		}
	})
	t.Run("the router ends", func(t *testing.T) {
		r := newHoldingRouter(t, time.Minute, 10)
		ended := awaits(t, r, t.Context(), 1, Need{})
		r.EndHolding()
		if err := ends(t, ended); !errors.Is(err, ErrNoWorker) {
			t.Error(err)
		}
		if err := r.Await(t.Context(), Need{}); !errors.Is(err, ErrNoWorker) || r.Awaiting() != 0 {
			t.Errorf("%v, %d are held", err, r.Awaiting())
		}
	})
	t.Run("it must not wait", func(t *testing.T) {
		if err := newHoldingRouter(t, time.Minute, 10).Await(t.Context(), Need{Now: true}); err != nil {
			t.Error(err)
		}
		if err := newHoldingRouter(t, 0, 10).Await(t.Context(), Need{}); err != nil {
			t.Error(err)
		}
	})
}

func TestReadyWhileRequestsAreHeld(t *testing.T) {
	for limit, want := range map[time.Duration]bool{0: false, time.Minute: true} {
		r := newHoldingRouter(t, limit, 10)
		if got := r.Ready(); got != want {
			t.Errorf("held for %s without a worker: ready %v", limit, got)
		}
		r.Up(kv.Target{Key: testkit.W0})
		if !r.Ready() {
			t.Error("not ready with a worker")
		}
	}
}
