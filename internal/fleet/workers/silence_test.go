package workers

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/testkit"
)

// TestASilentWorkerIsAvoidedFirstAndDownLater: what runs there may still be answered.
func TestASilentWorkerIsAvoidedFirstAndDownLater(t *testing.T) {
	defer goleak.VerifyNone(t)
	s := newWatchedServer(t, http.StatusOK)
	defer s.end()
	const silence = 500 * time.Millisecond
	var missed atomic.Int64
	f := registeredFleet(t, func(f *fakeFleet) {
		f.timing.healthLimit, f.timing.healthMost = 20*time.Millisecond, 40*time.Millisecond
		f.silence.Store(int64(silence))
		f.hooks.Missed = func(uint64) (lived time.Time) {
			missed.CompareAndSwap(0, time.Now().UnixNano())
			return lived
		}
	})
	f.register(registration(s.URL))
	f.wantState(StateReady, "")
	s.wantLooks(t, 1)
	began := time.Now()
	s.status.Store(0)
	f.wantState(StateDown, "deadline exceeded")
	if took := time.Since(began); took < silence || missed.Load() == 0 || time.Unix(0, missed.Load()).Sub(began) > took-silence/2 {
		t.Errorf("down after %s, avoided after %s", took, time.Unix(0, missed.Load()).Sub(began))
	}
	s.status.Store(http.StatusOK)
	f.wantState(StateReady, "")
	f.stop()
}

// TestADrainWaitsForNoSilentWorker: what runs there has been silent for as long as the drain may take.
func TestADrainWaitsForNoSilentWorker(t *testing.T) {
	defer goleak.VerifyNone(t)
	s := newWatchedServer(t, http.StatusOK)
	defer s.end()
	f := registeredFleet(t, func(f *fakeFleet) {
		f.timing.healthLimit, f.timing.healthMost = 20*time.Millisecond, 40*time.Millisecond
		f.silence.Store(0)
	})
	f.register(registration(s.URL))
	f.wantState(StateReady, "")
	s.wantLooks(t, 1)
	s.status.Store(0)
	s.wantLooks(t, 10)
	f.wantEvents("up 5.0 g1")
	f.Drain(100 * time.Millisecond)
	f.wantState(StateDown, "deadline exceeded")
	f.stop()
}

// TestAWorkerThatLivesIsNotDown: answers, KV events and counters are as good as /health.
func TestAWorkerThatLivesIsNotDown(t *testing.T) {
	defer goleak.VerifyNone(t)
	s := newWatchedServer(t, http.StatusOK)
	defer s.end()
	var answers atomic.Int64
	f := registeredFleet(t, func(f *fakeFleet) {
		f.timing.healthLimit, f.timing.healthMost = 10*time.Millisecond, 20*time.Millisecond
		f.silence.Store(int64(100 * time.Millisecond))
		f.hooks.Missed = func(uint64) (lived time.Time) { return time.Now() }
		f.hooks.Answers = func(uint64) { answers.Add(1) }
	})
	f.register(registration(s.URL))
	f.wantState(StateReady, "")
	s.wantLooks(t, 1)
	s.status.Store(0)
	s.wantLooks(t, 20)
	f.wantEvents("up 5.0 g1")
	s.status.Store(http.StatusOK)
	testkit.Eventually(t, 10*time.Second, "answers again", func() bool { return answers.Load() > 0 })
	f.wantEvents("up 5.0 g1")
	f.stop()
}

// TestSlowHealthChecksAreWaitedFor: a busy server takes longer than the first limit for each.
func TestSlowHealthChecksAreWaitedFor(t *testing.T) {
	defer goleak.VerifyNone(t)
	var looks, cut atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/health" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		looks.Add(1)
		select {
		case <-time.After(60 * time.Millisecond):
		case <-r.Context().Done():
			cut.Add(1)
		}
	}))
	defer server.Close()
	f := registeredFleet(t, func(f *fakeFleet) {
		f.timing.healthLimit, f.timing.healthMost, f.timing.firstLook = 30*time.Millisecond, 10*time.Second, time.Millisecond
		f.silence.Store(int64(time.Hour))
	})
	f.register(registration(server.URL))
	testkit.Eventually(t, 20*time.Second, "checks", func() bool { return looks.Load() > 10 })
	for _, event := range f.seen() {
		if event == "down 5.0 g1" {
			t.Error("it is down")
		}
	}
	f.stop()
	if n := cut.Load(); n > 6 {
		t.Errorf("%d of %d checks were given up", n, looks.Load())
	}
}

// counterPage is the page of a vLLM server that has generated n tokens.
func counterPage(n int64) string {
	return fmt.Sprintf("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 0\n"+
		"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc 0.5\n# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total %d\n", n)
}

// TestProgressOnThePageIsPassedOn: the counters of the page move.
func TestProgressOnThePageIsPassedOn(t *testing.T) {
	defer goleak.VerifyNone(t)
	defer http.DefaultClient.CloseIdleConnections()
	a := newAttachedServer(t, "")
	a.metrics = counterPage(1)
	a.start()
	f := attachedFleet(t, a, "")
	lived := make(chan int, 100)
	f.hooks.Lives = func(worker uint64, generation int) {
		if worker == 3 {
			lived <- generation
		}
	}
	f.start()
	f.wantEvents("up 3.0 g1")
	var n int64 = 1
	for generation := 0; generation == 0; {
		select {
		case generation = <-lived:
			if generation != 1 {
				t.Errorf("generation %d", generation)
			}
		case <-time.After(200 * time.Millisecond):
			n++
			a.set(func() { a.metrics = counterPage(n) })
		case <-t.Context().Done():
			t.Fatal("no sign of life")
		}
	}
	f.stop()
	a.server.Close()
}
