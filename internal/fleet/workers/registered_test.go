package workers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// registeredFleet is a running fleet without workers, in which some can be
// registered.
func registeredFleet(t *testing.T, change func(*fakeFleet)) *fakeFleet {
	t.Helper()
	f := newFakeFleet(t, fakeConfig(t, 0))
	if change != nil {
		change(f)
	}
	f.start()
	return f
}

// registration is worker 5 with one rank.
func registration(url string) Registration {
	return Registration{ID: 5, URL: url, Model: "m", Ranks: []uint32{0}}
}

func (f *fakeFleet) register(r Registration) {
	f.t.Helper()
	if err := f.Register(f.t.Context(), r); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fakeFleet) wantState(want, lastError string) {
	f.t.Helper()
	testkit.Settles(f.t, func() error {
		if w := f.Workers()[0]; w.State != want || !strings.Contains(w.LastError, lastError) {
			return fmt.Errorf("%+v", w)
		}
		return nil
	})
}

func TestRegisteredWorkerIsUnansweredFromTheFirstRefusedConnection(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, "")
	f := registeredFleet(t, nil)
	f.register(registration("http://" + a.address))
	f.wantEvents("up 5.0 g1", "unanswered 5.0 g1") // the router sends to it no longer than until the first look
	f.wantState(StateConnecting, "connection refused")
	f.register(registration("http://" + a.address)) // says nothing new
	f.wantEvents("up 5.0 g1", "unanswered 5.0 g1", "unanswered 5.0 g1")
	if err := radixtest.Store(f.index, kv.WorkerKey{Worker: 5}, 0, false, []kv.StoredBlock{{Engine: 1, Local: 2}}); err != nil {
		t.Fatal(err)
	}
	a.start()
	f.wantEvents("up 5.0 g1", "unanswered 5.0 g1", "unanswered 5.0 g1", "up 5.0 g1")
	f.wantState(StateReady, "")
	if n := f.index.Blocks(kv.WorkerKey{Worker: 5}); n != 1 {
		t.Errorf("%d blocks of the worker are in the index, of 1 that it had reported before it answered", n)
	}
	a.server.Close()
	events := []string{"up 5.0 g1", "unanswered 5.0 g1", "unanswered 5.0 g1", "up 5.0 g1", "down 5.0 g1"}
	f.wantEvents(events...)
	f.register(registration("http://" + a.address)) // says nothing new
	f.wantState(StateDown, "connection refused")
	a.start()
	f.wantEvents(append(events, "up 5.0 g2")...)
	a.server.Close()
	f.wantEvents(append(events, "up 5.0 g2", "down 5.0 g2")...)
	f.stop()
	f.wantEvents(append(events, "up 5.0 g2", "down 5.0 g2")...)
}

func TestRefusedRequestHasARegisteredWorkerLookedAtAtOnce(t *testing.T) {
	defer goleak.VerifyNone(t)
	f := registeredFleet(t, func(f *fakeFleet) { f.timing.firstLook, f.timing.healthEvery = time.Hour, time.Hour })
	f.register(registration(fmt.Sprintf("http://127.0.0.1:%d", testkit.FreePorts(t, 1))))
	f.wantEvents("up 5.0 g1")
	f.ReportFailure(5)
	f.wantEvents("up 5.0 g1", "unanswered 5.0 g1")
	f.stop()
}

// watchedServer answers /health as it is told to.
type watchedServer struct {
	*httptest.Server
	status atomic.Int64  // of its answers; 0: none comes
	looks  atomic.Int64  // at its health
	let    chan struct{} // closed at the end
}

func newWatchedServer(t *testing.T, status int) *watchedServer {
	t.Helper()
	s := &watchedServer{let: make(chan struct{})}
	s.status.Store(int64(status))
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/health" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		s.looks.Add(1)
		status := int(s.status.Load())
		if status == 0 {
			select {
			case <-s.let:
			case <-r.Context().Done():
			}
			return
		}
		w.WriteHeader(status)
	}))
	return s
}

func (s *watchedServer) end() {
	close(s.let)
	s.Close()
}

// wantLooks waits for so many more looks.
func (s *watchedServer) wantLooks(t *testing.T, more int64) {
	t.Helper()
	until := s.looks.Load() + more
	testkit.Eventually(t, 20*time.Second, "looks at its health", func() bool { return s.looks.Load() >= until })
}

func TestRegisteredWorkerThatDoesNotAnswerIsUnansweredAfterTwoLooks(t *testing.T) {
	defer goleak.VerifyNone(t)
	s := newWatchedServer(t, 0)
	defer s.end()
	f := registeredFleet(t, func(f *fakeFleet) { f.timing.healthLimit = 50 * time.Millisecond })
	f.register(registration(s.URL))
	f.wantEvents("up 5.0 g1", "unanswered 5.0 g1")
	if n := s.looks.Load(); n < 2 {
		t.Errorf("unanswered after %d looks", n)
	}
	s.status.Store(http.StatusOK)
	f.wantEvents("up 5.0 g1", "unanswered 5.0 g1", "up 5.0 g1")
	s.status.Store(0)
	f.wantEvents("up 5.0 g1", "unanswered 5.0 g1", "up 5.0 g1", "down 5.0 g1") // it has answered
	f.stop()
}

func TestServerThatDoesNotTellItsHealthIsRoutedToUntilItHas(t *testing.T) {
	defer goleak.VerifyNone(t)
	for _, unknown := range []int{http.StatusNotFound, http.StatusUnauthorized, http.StatusMethodNotAllowed} {
		s := newWatchedServer(t, unknown)
		f := registeredFleet(t, nil)
		f.register(registration(s.URL))
		s.wantLooks(t, 10)
		f.wantEvents("up 5.0 g1")
		s.status.Store(http.StatusOK)
		s.wantLooks(t, 2)
		s.status.Store(int64(unknown))
		f.wantEvents("up 5.0 g1", "down 5.0 g1")
		f.stop()
		s.end()
	}
}

func TestRegisteredWorkerThatIsNotWellFromTheStartIsDownAfterThreeLooks(t *testing.T) {
	defer goleak.VerifyNone(t)
	s := newWatchedServer(t, http.StatusServiceUnavailable)
	defer s.end()
	f := registeredFleet(t, nil)
	f.register(registration(s.URL))
	f.wantEvents("up 5.0 g1", "down 5.0 g1")
	f.wantState(StateDown, "503")
	f.stop()
}

// TestEveryWayAWorkerGoesIsReported: it aborts the in-flight requests of the worker.
func TestEveryWayAWorkerGoesIsReported(t *testing.T) {
	for _, test := range []struct {
		name string
		goes func(*fakeFleet, *watchedServer)
		why  string
	}{
		{"it never answers", nil, "connection refused"},
		{"its process ends", func(_ *fakeFleet, s *watchedServer) { s.Listener.Close() }, "connection refused"},
		{"it hangs", func(_ *fakeFleet, s *watchedServer) { s.status.Store(0) }, "deadline exceeded"},
		{"it is not well", func(_ *fakeFleet, s *watchedServer) { s.status.Store(500) }, "500 Internal"},
		{"it is unregistered", func(f *fakeFleet, _ *watchedServer) { f.Unregister(5) }, "no longer registered"},
		{"it moves", func(f *fakeFleet, s *watchedServer) {
			r := registration(s.URL + "/moved")
			r.Ranks = []uint32{0, 1}
			f.register(r)
		}, "registered again"},
		{"the router ends", func(f *fakeFleet, _ *watchedServer) { f.cancel() }, "no longer registered"},
	} {
		t.Run(test.name, func(t *testing.T) {
			defer goleak.VerifyNone(t)
			s := newWatchedServer(t, http.StatusOK)
			defer s.end()
			if test.goes == nil {
				s.Listener.Close()
			}
			var mu sync.Mutex
			var downs []string
			f := registeredFleet(t, func(f *fakeFleet) {
				f.timing.healthLimit = 100 * time.Millisecond
				f.hooks.Heard = func(target kv.Target, why string) {
					mu.Lock()
					defer mu.Unlock()
					downs = append(downs, fmt.Sprintf("%d.%d g%d: %s", target.Key.Worker, target.Key.Rank, target.Generation, why))
				}
			})
			r := registration(s.URL)
			r.Ranks = []uint32{0, 1}
			f.register(r)
			if test.goes != nil {
				s.wantLooks(t, 1)
				test.goes(f, s)
			}
			testkit.Settles(t, func() error {
				mu.Lock()
				defer mu.Unlock()
				told := slices.Sorted(slices.Values(downs))
				for rank := range 2 {
					if len(told) <= rank || !strings.HasPrefix(told[rank], fmt.Sprintf("5.%d g1: ", rank)) || !strings.Contains(told[rank], test.why) {
						return fmt.Errorf("told %q, want both ranks and %q", told, test.why)
					}
				}
				return nil
			})
			f.stop()
		})
	}
}

// lacking fails every health check as a process without descriptors does.
type lacking struct {
	prober
	lacks  atomic.Bool
	failed atomic.Int64
}

func (l *lacking) Health(ctx context.Context, s probe.Server, limit time.Duration, known bool) error {
	if l.lacks.Load() {
		l.failed.Add(1)
		return fmt.Errorf("worker does not answer: %w", &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", syscall.EMFILE)})
	}
	return l.prober.Health(ctx, s, limit, known)
}

func TestLackOfDescriptorsMarksNoWorkerDown(t *testing.T) {
	defer goleak.VerifyNone(t)
	s := newWatchedServer(t, http.StatusOK)
	defer s.end()
	lacking := &lacking{}
	f := registeredFleet(t, func(f *fakeFleet) {
		lacking.prober = f.probe
		f.probe = lacking
	})
	f.register(registration(s.URL))
	s.wantLooks(t, 1)
	lacking.lacks.Store(true)
	testkit.Eventually(t, 20*time.Second, "looks fail", func() bool { return lacking.failed.Load() > 10 })
	lacking.lacks.Store(false)
	s.wantLooks(t, 1)
	f.wantEvents("up 5.0 g1")
	if !strings.Contains(f.out.String(), "ulimit -n") {
		t.Error("the log does not say what to do")
	}
	f.stop()
}

// TestHungWorkersAreAvoidedWithinEightSeconds adds up what a worker that hangs right
// after a look costs.
func TestHungWorkersAreAvoidedWithinEightSeconds(t *testing.T) {
	d := defaultTiming()
	if worst := d.healthEvery + d.healthLimit + d.missPause + 2*d.healthLimit; worst > 8*time.Second {
		t.Errorf("a hung worker is avoided after %s", worst)
	}
	if worst := d.firstLook + d.healthLimit + d.missPause + 2*d.healthLimit; worst > 8*time.Second {
		t.Errorf("a registered worker that never answers is known after %s", worst)
	}
}

func TestDeadWorkersAreLookedAtLessAndLess(t *testing.T) {
	f := &Fleet{timing: defaultTiming()}
	for _, test := range []struct {
		misses int
		most   time.Duration
	}{{0, 2 * time.Second}, {10, 2 * time.Second}, {11, 8 * time.Second}, {1000, 8 * time.Second}} {
		seen := map[time.Duration]bool{}
		for range 100 {
			pause := f.pauseAfter(test.misses)
			if pause > test.most || pause < test.most*4/5 {
				t.Errorf("after %d misses %s", test.misses, pause)
			}
			seen[pause] = true
		}
		if len(seen) < 50 {
			t.Errorf("after %d misses all pauses are alike", test.misses)
		}
	}
}

func TestAddressesThatLeadBackAreRefused(t *testing.T) {
	defer goleak.VerifyNone(t)
	hop := web.NewHop()
	self := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if slices.Contains(r.Header["Via"], string(hop)) {
			w.WriteHeader(http.StatusLoopDetected)
		}
	}))
	defer self.Close()
	const says = "address is this router's own"

	cfg := fakeConfig(t, 0)
	cfg.fleet.Hop, cfg.fleet.RestartBackoffMax = hop, 30*time.Millisecond
	cfg.fleet.Attached = []Attached{{Server: probe.Server{ID: 3, URL: self.URL}}}
	f := newFakeFleet(t, cfg)
	f.start()
	testkit.Settles(t, func() error {
		if w := f.Workers()[0]; !strings.Contains(w.LastError, says) {
			return fmt.Errorf("%+v", w)
		}
		return nil
	})
	f.register(registration(self.URL))
	f.wantEvents("up 5.0 g1", "down 5.0 g1")
	for _, line := range []string{"level=ERROR msg=\"worker 3", "level=ERROR msg=\"worker 5: down: the " + says} {
		if !strings.Contains(f.out.String(), line) {
			t.Errorf("no line %q in\n%s", line, f.out.String())
		}
	}
	good := newWatchedServer(t, http.StatusOK)
	defer good.end()
	dead := fmt.Sprintf("http://127.0.0.1:%d", testkit.FreePorts(t, 1))
	for url, want := range map[string]bool{self.URL: true, good.URL: false, dead: false} {
		if got := f.LeadsBack(t.Context(), url); got != want {
			t.Errorf("%s leads back: %v", url, got)
		}
	}
	f.stop()
}

func TestErrorsOfRegister(t *testing.T) {
	cfg := fakeConfig(t, 0)
	cfg.fleet.Attached = []Attached{{Server: probe.Server{ID: 5, URL: "http://127.0.0.1:1"}}}
	f := newFakeFleet(t, cfg)
	f.start()
	if err := f.Register(t.Context(), registration("http://127.0.0.1:2")); !errors.Is(err, ErrWorkerTaken) {
		t.Errorf("registered over an attached worker: %v", err)
	}
	f.stop()
	if err := f.Register(t.Context(), registration("http://127.0.0.1:2")); !errors.Is(err, ErrFleetEnding) {
		t.Errorf("registered at the end: %v", err)
	}
	if f.Unregister(9) {
		t.Error("removed a worker that was never registered")
	}
}
