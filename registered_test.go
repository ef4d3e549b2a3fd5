package main

import (
	"errors"
	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/workers"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// healthServer is a worker that answers health checks as it is told to.
type healthServer struct {
	*httptest.Server
	well atomic.Bool
	good atomic.Int64 // good answers
}

// registeredSite is a router with one registered worker that may answer health
// checks.
func registeredSite(t *testing.T) (s *selectionSite, worker *healthServer, spec object) {
	t.Helper()
	worker = new(healthServer)
	worker.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !worker.well.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		} else if r.URL.Path == "/health" {
			worker.good.Add(1)
		}
	}))
	t.Cleanup(worker.Close)
	s = startSelection(t)
	s.rooms.fleet.Timing.HealthEvery = 20 * time.Millisecond
	events, err := mocker.NewEvents("127.0.0.1:0", "127.0.0.1:0", 4)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(events.Close)
	s.events[1] = events
	spec = object{"worker_id": 1, "model_name": "m", "endpoint": worker.URL, "kv_events_endpoint": events.Pub.Endpoint(), "block_size": 4}
	s.want("POST", "/workers", spec, 201, `lifecycle "schedulable"`)
	testkit.Eventually(t, 10*time.Second, "the worker's events are followed", func() bool { return events.Pub.Subscribers() > 0 })
	return s, worker, spec
}

func (s *selectionSite) lifecycleBecomes(want string) {
	s.t.Helper()
	testkit.Eventually(s.t, 10*time.Second, "worker 1 is "+want, func() bool {
		return ask(s.t, s.selection, "GET", "/workers", nil).Get("0.lifecycle").String() == want
	})
}

func TestRegisteredWorkerIsWatchedOnceItHasAnswered(t *testing.T) {
	s, worker, _ := registeredSite(t)
	s.stores(1, 11)
	worker.well.Store(true)
	testkit.Eventually(t, 10*time.Second, "a health check is answered", func() bool { return worker.good.Load() > 0 })
	worker.well.Store(false)
	s.lifecycleBecomes(selection.LifecycleUnschedulable)
	worker.well.Store(true)
	s.lifecycleBecomes(selection.LifecycleSchedulable)
	s.want("GET", "/workers", nil, 200, "0.generation 1", "0.blocks 1")
	worker.Close()
	s.lifecycleBecomes(selection.LifecycleUnschedulable)
	testkit.Eventually(t, 10*time.Second, "its cache is gone with its process", func() bool {
		return s.rooms.index.Blocks(kv.WorkerKey{Worker: 1}) == 0
	})
}

func TestChangesOfARegisteredWorkerKeepItsCacheIfTheyCan(t *testing.T) {
	s, _, spec := registeredSite(t)
	s.stores(1, 11, 12)
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "a"}), 200)
	s.want("PATCH", "/workers/1", object{"max_num_batched_tokens": 100}, 200, "blocks 2", "generation 1", "in_flight 1")
	s.want("POST", "/workers", spec, 201, "blocks 2", "generation 1")
	s.want("PATCH", "/workers/1", object{"kv_events_endpoint": "tcp://127.0.0.1:1"}, 200, "blocks 0", "generation 2", "in_flight 1", `lifecycle "schedulable"`)
	s.want("DELETE", "/workers/1", nil, 200)
	s.want("DELETE", "/reservations/a", nil, 404) // freed with its worker
	if loads := s.rooms.router.Loads(); len(loads) != 0 {
		t.Errorf("loads of nobody: %v", loads)
	}
	s.want("POST", "/workers", spec, 201, "blocks 0", "in_flight 0")
}

func TestWorkersOfTheFlagsCannotBeChangedByRegistration(t *testing.T) {
	s := startSelection(t, "--worker=url=http://127.0.0.1:1,id=3")
	s.want("POST", "/workers", object{"worker_id": 3, "endpoint": "http://127.0.0.1:2", "block_size": 4, "kv_events_endpoint": "tcp://127.0.0.1:1"}, 409)
	s.want("PATCH", "/workers/3", object{"block_size": 4}, 409)
	s.want("DELETE", "/workers/3", nil, 409)
	s.want("GET", "/workers", nil, 200, "# 1", "0.worker_id 3", `0.lifecycle "unschedulable"`)
}

func TestRegistrationWithoutEventsNeedsNoEndpointForThem(t *testing.T) {
	s := startSelection(t, "--no-kv-events")
	worker := object{"worker_id": 1, "model_name": "m", "endpoint": "http://127.0.0.1:1", "block_size": 4}
	s.want("POST", "/workers", worker, 201, `lifecycle "schedulable"`)
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "a"}), 200, "worker_id 1", "overlap.longest_matched 0")
	s.want("POST", "/select", prompt12(object{}), 200, "overlap.longest_matched 12")
	s.want("DELETE", "/reservations/a", nil, 200)
}

func TestRegistrationEndsWithTheRouter(t *testing.T) {
	s, _, _ := registeredSite(t)
	if err := s.end(); err != nil {
		t.Fatal(err)
	}
	if err := s.rooms.fleet.Register(t.Context(), workers.Registration{ID: 9}); !errors.Is(err, workers.ErrFleetEnding) {
		t.Errorf("registered at an ended fleet: %v", err)
	}
	if s.rooms.fleet.Unregister(9) {
		t.Error("a worker was unregistered that never was registered")
	}
}

func TestRegisteredWorkerServesChats(t *testing.T) {
	s := &selectionSite{startRooms(t, testkit.FreePorts(t, 2), "--engine=none", "--policy=kv"), nil}
	first := startMockSite(t, 1)
	record := ask(t, first.selection, "GET", "/workers", nil).Get("0")
	s.want("POST", "/workers", object{
		"worker_id": 0, "model_name": record.Get("model_name").String(), "endpoint": record.Get("endpoint").String(), "block_size": 64,
		"kv_events_endpoint": record.Get("kv_events_endpoint").String(), "replay_endpoint": record.Get("replay_endpoint").String(),
	}, 201, `lifecycle "schedulable"`)
	chat := say(strings.Repeat("seen by both ", 30))
	if _, err := first.chat(t.Context(), chat, false, 1); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 20*time.Second, "the second router knows the blocks", func() bool { return s.rooms.index.Blocks(kv.WorkerKey{}) > 0 })
	if a, err := s.chat(t.Context(), chat, false, 1); err != nil || a.predicted != a.cached || a.cached == 0 {
		t.Error(a, err)
	}
	s.want("GET", "/loads", nil, 200, "0.loads.0.active_requests 0")
	if err := s.end(); err != nil { // its connections, before the other ends and looks for some
		t.Error(err)
	}
	s.rooms.proxy.Client.CloseIdleConnections()
}
