package main

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
)

func TestBusyThresholds(t *testing.T) {
	share := func(f float64) *float64 { return &f }
	tokens := func(n int) *int { return &n }
	full := Load{Published: Published{KVUsage: 0.5}, Fresh: true, ActiveBlocks: 30, PrefillTokens: 100}
	for _, test := range []struct {
		name       string
		thresholds BusyThresholds
		target     Target
		load       Load
		want       bool
	}{
		{"none means off", BusyThresholds{}, Target{TotalBlocks: 1, MaxBatchedTokens: 1}, full, false},
		{"published usage above", BusyThresholds{ActiveDecodeBlocksThreshold: share(0.4)}, Target{}, full, true},
		{"published usage equal", BusyThresholds{ActiveDecodeBlocksThreshold: share(0.5)}, Target{}, full, false},
		{"published usage is old", BusyThresholds{ActiveDecodeBlocksThreshold: share(0.4)}, Target{}, Load{Published: Published{KVUsage: 0.5}}, false},
		{"own blocks above", BusyThresholds{ActiveDecodeBlocksThreshold: share(0.5)}, Target{TotalBlocks: 59}, full, true},
		{"own blocks equal", BusyThresholds{ActiveDecodeBlocksThreshold: share(0.5)}, Target{TotalBlocks: 60}, full, false},
		{"tokens above", BusyThresholds{ActivePrefillTokensThreshold: tokens(99)}, Target{}, full, true},
		{"tokens equal", BusyThresholds{ActivePrefillTokensThreshold: tokens(100)}, Target{}, full, false},
		{"passes above", BusyThresholds{ActivePrefillTokensThresholdFrac: share(2)}, Target{MaxBatchedTokens: 49}, full, true},
		{"passes equal", BusyThresholds{ActivePrefillTokensThresholdFrac: share(2)}, Target{MaxBatchedTokens: 50}, full, false},
		{"passes of unknown size", BusyThresholds{ActivePrefillTokensThresholdFrac: share(0)}, Target{}, full, false},
		{"one of several is enough", BusyThresholds{ActiveDecodeBlocksThreshold: share(1), ActivePrefillTokensThreshold: tokens(0)}, Target{}, full, true},
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
		if thresholds.validate() == nil {
			t.Errorf("%+v was taken", thresholds)
		}
	}
}

// overload gives a worker's rank more than the threshold of newBusyRouter.
func overload(t *testing.T, r *Router, w WorkerKey) *Booking {
	t.Helper()
	b, err := r.Book(Request{NumTokens: 11}, w)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func newBusyRouter(t *testing.T, workers int) *Router {
	r, _ := newClockedRouter(t, workers, DefaultRouterKnobs())
	limit := 10
	r.SetBusyThresholds(BusyThresholds{ActivePrefillTokensThreshold: &limit})
	return r
}

func TestSchedulerOverloadedWorkersAreFiltered(t *testing.T) {
	r := newBusyRouter(t, 3)
	hold(r, 1, count(1, 80))
	overload(t, r, WorkerKey{Worker: 1})
	overload(t, r, WorkerKey{Worker: 0})
	for range 20 {
		d := mustRoute(t, r, Request{Tokens: count(1, 81)})
		if d.Target.Key.Worker != 2 {
			t.Fatalf("worker %d was chosen, want 2, the only one that is not busy", d.Target.Key.Worker)
		}
		d.Booking.End()
	}
}

func TestSchedulerAllOverloadedIsAnError(t *testing.T) {
	r := newBusyRouter(t, 2)
	bookings := []*Booking{overload(t, r, WorkerKey{Worker: 0}), overload(t, r, WorkerKey{Worker: 1})}
	for _, request := range []Request{{NumTokens: 1}, {NumTokens: 1, QueryOnly: true}, {NumTokens: 1, Unbooked: true}} {
		if _, err := r.Route(t.Context(), request); !errors.Is(err, ErrBusy) {
			t.Errorf("%+v: %v, want ErrBusy", request, err)
		}
	}
	if _, err := r.Route(t.Context(), Request{NumTokens: 1, Allowed: []uint64{9}}); !errors.Is(err, ErrNoWorker) {
		t.Errorf("none is allowed: %v, want ErrNoWorker", err)
	}
	bookings[1].FirstToken()
	if d := mustRoute(t, r, Request{NumTokens: 1}); d.Target.Key.Worker != 1 {
		t.Error("the busy one was chosen")
	}
	r.SetBusyThresholds(BusyThresholds{})
	mustRoute(t, r, Request{NumTokens: 1, Allowed: []uint64{0}})
}

func TestSchedulerPinnedOverloadedIsNotRerouted(t *testing.T) {
	r := newBusyRouter(t, 2)
	overload(t, r, WorkerKey{Worker: 1})
	if _, err := r.Route(t.Context(), Request{NumTokens: 1, Pinned: &WorkerKey{Worker: 1}}); !errors.Is(err, ErrBusy) {
		t.Errorf("pinned to a busy worker: %v, want ErrBusy", err)
	}
	if _, err := r.Route(t.Context(), Request{NumTokens: 1, Pinned: &WorkerKey{Worker: 1, Rank: 1}}); !errors.Is(err, ErrNoWorker) {
		t.Errorf("pinned to a rank that is not there: %v, want ErrNoWorker", err)
	}
	if _, err := r.Route(t.Context(), Request{NumTokens: 1, Pinned: &WorkerKey{Worker: 0}, Allowed: []uint64{1}}); !errors.Is(err, ErrNoWorker) {
		t.Errorf("pinned to a worker that is not allowed: %v, want ErrNoWorker", err)
	}
}

func TestBusyIsAWorkerOnlyIfAllItsRanksAre(t *testing.T) {
	r := newBusyRouter(t, 0)
	for rank := range uint32(2) {
		r.Up(Target{Key: WorkerKey{Worker: 3, Rank: rank}, Ranks: 2})
	}
	overload(t, r, WorkerKey{Worker: 3})
	mustRoute(t, r, Request{NumTokens: 1, Pinned: &WorkerKey{Worker: 3}}).Booking.End()
	overload(t, r, WorkerKey{Worker: 3, Rank: 1})
	if _, err := r.Route(t.Context(), Request{NumTokens: 1}); !errors.Is(err, ErrBusy) {
		t.Errorf("all ranks are busy: %v", err)
	}
}

func TestBusyByWhatTheWorkerPublishes(t *testing.T) {
	r, clock := newClockedRouter(t, 1, DefaultRouterKnobs())
	limit := 0.2
	r.SetBusyThresholds(BusyThresholds{ActiveDecodeBlocksThreshold: &limit})
	r.Publish(WorkerKey{}, Published{KVUsage: 0.3, At: clock.now()})
	if _, err := r.Route(t.Context(), Request{NumTokens: 1}); !errors.Is(err, ErrBusy) {
		t.Errorf("30 %% of the cache in use: %v, want ErrBusy", err)
	}
	clock.advance(2 * loadFreshFor)
	mustRoute(t, r, Request{NumTokens: 1})
	r.Publish(WorkerKey{}, Published{KVUsage: 0.1, At: clock.now()})
	mustRoute(t, r, Request{NumTokens: 1})
}

func TestBusyThresholdEndpoint(t *testing.T) {
	h := newHouse(t, Config{}, "http://127.0.0.1:1")
	for _, step := range []struct {
		method, body string
		status       int
		answer       string
	}{
		{"GET", "", 200, `{"thresholds":[]}`},
		{"POST", `{"model":"m"}`, 200, `{"model":"m","active_decode_blocks_threshold":null,"active_prefill_tokens_threshold":null,"active_prefill_tokens_threshold_frac":null}`},
		{"POST", `{"model":"m","active_prefill_tokens_threshold":0}`, 200, `{"model":"m","active_decode_blocks_threshold":null,"active_prefill_tokens_threshold":0,"active_prefill_tokens_threshold_frac":null}`},
		{"POST", `{"model":"m","active_decode_blocks_threshold":0.85}`, 200, `{"model":"m","active_decode_blocks_threshold":0.85,"active_prefill_tokens_threshold":0,"active_prefill_tokens_threshold_frac":null}`},
		{"GET", "", 200, `{"thresholds":[{"model":"m","active_decode_blocks_threshold":0.85,"active_prefill_tokens_threshold":0,"active_prefill_tokens_threshold_frac":null}]}`},
		{"POST", `{"model":"other","active_decode_blocks_threshold":0.5}`, 404, ""},
		{"POST", `{"active_decode_blocks_threshold":0.5}`, 404, ""},
		{"POST", `{"model":"m","active_decode_blocks_threshold":1.5}`, 400, ""},
		{"POST", `{`, 400, ""},
	} {
		request, _ := http.NewRequest(step.method, h.URL+"/busy_threshold", strings.NewReader(step.body))
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != step.status || step.answer != "" && string(body) != step.answer {
			t.Errorf("%s %s: %d %s, want %d %s", step.method, step.body, response.StatusCode, body, step.status, step.answer)
		}
	}
	booking := overload(t, h.router, WorkerKey{})
	response, err := http.Post(h.URL+"/v1/embeddings", "application/json", strings.NewReader(`{"model":"m","input":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" {
		t.Errorf("all busy: %d, Retry-After %q; want 503 and a time", response.StatusCode, response.Header.Get("Retry-After"))
	}
	booking.End()
	http.DefaultClient.CloseIdleConnections()
}
