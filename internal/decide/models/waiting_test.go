package models

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
)

// newWaitingSet returns a default model of any name, without workers, for which so many
// requests may wait so long.
func newWaitingSet(t testing.TB, limit time.Duration, most int) *Set {
	t.Helper()
	settings := Settings{Policy: "round-robin", Scoring: testkit.Defaults[policies.Settings](), Index: testkit.Defaults[router.IndexSettings](), Routing: testkit.Defaults[router.Settings](), BlockSize: testkit.BlockSize}
	settings.Routing.HoldWhenEmpty, settings.Routing.RouterQueueLimit = limit, most
	log, index := slog.New(slog.DiscardHandler), radix.NewTree()
	rt := router.New(settings.Routing, router.Deps{Index: index, Policy: policytest.MustPolicy(t, settings.Policy), BlockSize: settings.BlockSize, Seed: 1})
	return New(settings, Deps{Router: rt, Index: index, Log: log})
}

// awaits begins to wait, and returns when the request is one of so many that do.
func awaits(t testing.TB, s *Set, ctx context.Context, waiting int, need router.Need) chan error {
	t.Helper()
	ended := make(chan error, 1)
	go func() {
		_, _, err := s.Find(ctx, need)
		ended <- err
	}()
	testkit.Eventually(t, 10*time.Second, "the request waits", func() bool { return s.Waiting() == waiting })
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
		need router.Need
		not  []kv.Target // that come before, and do not
		ends kv.Target
	}{
		"a worker":                            {ends: whole},
		"one that serves the model":           {need: router.Need{Model: "m"}, ends: whole},
		"one of another model: it is told so": {need: router.Need{Model: "x"}, ends: whole},
		"a decode worker takes it whole":      {need: router.Need{Model: "m"}, not: []kv.Target{prefill}, ends: decode},
		"a pair":                              {need: router.Need{Model: "m"}, not: []kv.Target{prefill, other}, ends: meets},
		"a pair that is enforced":             {need: router.Need{Pair: true}, not: []kv.Target{whole, decode}, ends: prefill},
		"for a whole one a pair does not do":  {need: router.Need{Whole: true}, not: []kv.Target{other, meets}, ends: whole},
	} {
		t.Run(name, func(t *testing.T) {
			s := newWaitingSet(t, time.Minute, 10)
			ended := awaits(t, s, t.Context(), 1, test.need)
			for _, target := range test.not {
				s.Up(target)
			}
			if s.Waiting() != 1 {
				t.Fatal("it waits no more")
			}
			s.Up(test.ends)
			if err := ends(t, ended); err != nil || s.Waiting() != 0 {
				t.Errorf("%v, %d wait", err, s.Waiting())
			}
			if _, _, err := s.Find(t.Context(), test.need); err != nil {
				t.Errorf("the next one: %v", err)
			}
		})
	}
}

func TestAWorkerThatDrainsServesNobodyWhoWaits(t *testing.T) {
	s := newWaitingSet(t, time.Minute, 10)
	s.Up(kv.Target{Key: testkit.W0, Models: []string{"m"}})
	for name, rest := range map[string][2]func(){
		"cordoned by the fleet": {func() { s.CordonDiscovered(0, true) }, func() { s.CordonDiscovered(0, false) }},
		"at rest":               {func() { _ = s.Cordon(0) }, func() { _ = s.Readmit(0) }},
	} {
		rest[0]()
		ended := awaits(t, s, t.Context(), 1, router.Need{Model: "m"})
		rest[1]()
		if err := ends(t, ended); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRequestsThatWaitGoInTheirOrder(t *testing.T) {
	s := newWaitingSet(t, time.Minute, 100)
	var all []*waitingRequest
	for range 100 {
		h, err := s.enqueue(router.Need{})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, h)
	}
	if !slices.Equal(s.waiting.all, all) {
		t.Error("they are not in the order in which they came")
	}
	s.Up(kv.Target{Key: testkit.W0})
	for i, h := range all {
		select {
		case err := <-h.done:
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
		s := newWaitingSet(t, 20*time.Millisecond, 10)
		if _, _, err := s.Find(t.Context(), router.Need{}); !errors.Is(err, router.ErrNoWorker) || err.Error() != "no worker is ready, and none started within --hold-when-empty" {
			t.Error(err)
		}
	})
	t.Run("its client leaves", func(t *testing.T) {
		s := newWaitingSet(t, time.Minute, 10)
		ctx, leave := context.WithCancelCause(t.Context())
		left := errors.New("left")
		ended := awaits(t, s, ctx, 1, router.Need{})
		leave(left)
		if err := ends(t, ended); !errors.Is(err, left) {
			t.Error(err)
		}
	})
	t.Run("too many wait", func(t *testing.T) {
		s := newWaitingSet(t, time.Minute, 1)
		first := awaits(t, s, t.Context(), 1, router.Need{})
		if _, _, err := s.Find(t.Context(), router.Need{}); !errors.Is(err, router.ErrNoWorker) || s.Waiting() != 1 {
			t.Errorf("%v, %d wait", err, s.Waiting())
		}
		s.Up(kv.Target{Key: testkit.W0})
		if err := ends(t, first); err != nil {
			t.Error(err)
		}
	})
	t.Run("the router ends", func(t *testing.T) {
		s := newWaitingSet(t, time.Minute, 10)
		ended := awaits(t, s, t.Context(), 1, router.Need{})
		s.StopWaiting()
		if err := ends(t, ended); !errors.Is(err, router.ErrNoWorker) {
			t.Error(err)
		}
		if _, _, err := s.Find(t.Context(), router.Need{}); !errors.Is(err, router.ErrNoWorker) || s.Waiting() != 0 {
			t.Errorf("%v, %d wait", err, s.Waiting())
		}
	})
	t.Run("it must not wait", func(t *testing.T) {
		if _, _, err := newWaitingSet(t, time.Minute, 10).Find(t.Context(), router.Need{Now: true}); err != nil {
			t.Error(err)
		}
		if _, _, err := newWaitingSet(t, 0, 10).Find(t.Context(), router.Need{}); err != nil {
			t.Error(err)
		}
	})
}

func TestReadyWhileRequestsAreHeld(t *testing.T) {
	for limit, want := range map[time.Duration]bool{0: false, time.Minute: true} {
		s := newWaitingSet(t, limit, 10)
		if got := s.Ready(); got != want {
			t.Errorf("waiting up to %s without a worker: ready %v", limit, got)
		}
		s.Up(kv.Target{Key: testkit.W0})
		if !s.Ready() {
			t.Error("not ready with a worker")
		}
	}
}

// TestSaturationWithoutWorkers: somebody has to be asked for that wakes the first one.
func TestSaturationWithoutWorkers(t *testing.T) {
	s := newWaitingSet(t, time.Minute, 10)
	expect := func(when string, want float64) {
		t.Helper()
		if got := s.Saturation(); got != want {
			t.Errorf("%s: saturation %v, want %v", when, got, want)
		}
	}
	expect("nobody waits", 0)
	ended := awaits(t, s, t.Context(), 1, router.Need{})
	expect("one waits", 1)
	s.Up(kv.Target{Key: testkit.W0})
	if err := ends(t, ended); err != nil {
		t.Error(err)
	}
	expect("a worker is up", 0)
	if err := s.Cordon(0); err != nil {
		t.Fatal(err)
	}
	expect("it rests", 0)
}
