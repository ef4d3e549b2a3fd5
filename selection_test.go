package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
	"kvrouter/internal/workers"
)

// selectionSite is a router of block size 4 without an engine, whose workers are
// registered.
type selectionSite struct {
	*mockSite
	events map[uint64]*mocker.Events
}

func startSelection(t *testing.T, args ...string) *selectionSite {
	t.Helper()
	all := []string{"--engine=none", "--policy=kv", "--block-size=4", "--seed=1"}
	s := &selectionSite{startApp(t, testkit.FreePorts(t, 2), append(all, args...)...), map[uint64]*mocker.Events{}}
	// Most of its workers do not exist: nobody is to notice.
	s.app.fleet.Timing.FirstLook, s.app.fleet.Timing.HealthEvery = time.Hour, time.Hour
	return s
}

// register adds a worker of model m with a publisher of its own.
func (s *selectionSite) register(id uint64) {
	s.t.Helper()
	events, err := mocker.NewEvents("127.0.0.1:0", "127.0.0.1:0", 4)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(events.Close)
	s.events[id] = events
	spec := map[string]any{
		"worker_id": id, "model_name": "m", "endpoint": "http://127.0.0.1:1", "kv_events_endpoint": events.Pub.Endpoint(),
		"block_size": 4, "max_num_batched_tokens": 8192, "total_kv_blocks": 1000,
	}
	s.want("POST", "/workers", spec, 201, `lifecycle "schedulable"`, `routing_group "default"`, fmt.Sprintf("worker_id %d", id))
	testkit.Eventually(s.t, 10*time.Second, "the worker's events are followed", func() bool { return events.Pub.Subscribers() > 0 })
}

// stores lets a worker publish that it holds the tokens 1 to 4·len(engine).
func (s *selectionSite) stores(id uint64, engine ...uint64) {
	s.t.Helper()
	event := mocker.Event{}
	for i, e := range engine {
		event.Stored = append(event.Stored, kv.StoredBlock{Engine: e})
		event.Tokens = append(event.Tokens, testkit.Tokens(uint32(4*i+1), 4)...)
	}
	s.events[id].PublishNow(event)
	testkit.Eventually(s.t, 10*time.Second, "the events are applied", func() bool {
		return s.app.index.Blocks(kv.WorkerKey{Worker: id}) == len(engine)
	})
}

// want sends a request and checks the status and, as "path value", parts of the
// answer; the value - stands for none.
func (s *selectionSite) want(method, path string, query any, status int, parts ...string) reply {
	s.t.Helper()
	got := ask(s.t, s.selection, method, path, query)
	if got.status != status {
		s.t.Errorf("%s %s %v: status %d, want %d: %s", method, path, query, got.status, status, got.Raw)
	}
	for _, part := range parts {
		field, value, _ := strings.Cut(part, " ")
		if is := got.Get(field); is.Raw != value && (is.Exists() || value != "-") {
			s.t.Errorf("%s %s %v: %s is %s, want %s in %s", method, path, query, field, is.Raw, value, got.Raw)
		}
	}
	return got
}

// two registers the two workers of the documented examples.
func (s *selectionSite) two() {
	s.t.Helper()
	s.register(1)
	s.register(2)
	s.stores(1, 11, 12)
	s.stores(2, 11)
}

type object = map[string]any

// prompt12 is a request about the prompt 1 to 12, with more fields.
func prompt12(more object) object {
	query := object{"model_name": "m", "token_ids": testkit.Tokens(1, 12)}
	for name, value := range more {
		query[name] = value
	}
	return query
}

func TestSelectionAnswersAsDocumented(t *testing.T) {
	s := startSelection(t)
	s.want("GET", "/ready", nil, 503, "ready false", "schedulable_workers 0")
	s.want("POST", "/select", prompt12(nil), 503, `error "no schedulable workers for model=m routing_group=default"`)
	s.two()

	s.want("GET", "/health", nil, 200, `status "ok"`)
	s.want("GET", "/ready", nil, 200, "ready true", "schedulable_workers 2", "workers.1.worker_id 2")
	s.want("GET", "/workers?model_name=m", nil, 200, "# 2", "0.worker_id 1", "0.max_num_batched_tokens 8192", "0.total_kv_blocks 1000")
	s.want("GET", "/workers?routing_group=other", nil, 200, "# 0")
	s.want("POST", "/overlap_scores", prompt12(nil), 200, "block_size 4", "num_blocks 3", "workers.0.device_blocks 2", "workers.1.device_blocks 1")
	s.want("POST", "/select", prompt12(nil), 200, `model_name "m"`, `routing_group "default"`, "worker_id 1", "dp_rank 0", `endpoint "http://127.0.0.1:1"`, "block_size 4",
		"overlap.longest_matched 8", "overlap.gpu 8", `overlap.dp {"0":8}`, "effective_prefill_tokens 4", "potential_decode_blocks 3", "sequence_hashes -")
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "a"}), 200, "worker_id 1", `selection_id "a"`,
		"sequence_hashes [-3803038269031200164,4945711292740353085,-5863151826378895484]", "isl_tokens 12", "track_prefill_tokens true")
	s.want("POST", "/potential_loads", prompt12(nil), 200,
		"0.potential_prefill_tokens 8", "0.potential_decode_blocks 3", "0.active_requests 1", "1.potential_prefill_tokens 8", "1.potential_decode_blocks 3", "1.active_requests 0")
	s.want("GET", "/loads", nil, 200, "# 1", `0.model_name "m"`, "0.loads.0.potential_prefill_tokens 4", "0.loads.0.potential_decode_blocks 3", "0.loads.0.active_requests 1",
		"0.loads.1.potential_prefill_tokens 0", "0.pending_count 0", "0.pending_isl_tokens 0")
	s.want("POST", "/reservations/a/prefill_complete", object{}, 200, `status "ok"`)
	s.want("GET", "/loads", nil, 200, "0.loads.0.potential_prefill_tokens 0", "0.loads.0.potential_decode_blocks 3")
	s.want("POST", "/reservations/a/output_block", object{"decay_fraction": 0.5}, 200)
	s.want("GET", "/loads", nil, 200, "0.loads.0.potential_decode_blocks 2")
	s.want("POST", "/reservations/a/output_block", object{"decay_fraction": 1.5}, 400, `error "decay_fraction must be between 0.0 and 1.0"`)
	s.want("POST", "/reservations", prompt12(object{"selection_id": "b", "worker_id": 2}), 201, `selection_id "b"`, "worker_id 2", "dp_rank 0", `endpoint "http://127.0.0.1:1"`)
	s.want("DELETE", "/reservations/a", nil, 200, `status "ok"`)
	s.want("DELETE", "/reservations/a", nil, 404, `error "reservation a not found"`)
	s.want("POST", "/reservations/a/prefill_complete", nil, 404, `error "reservation a not found"`)
	s.want("DELETE", "/reservations/b", nil, 200)
	s.want("POST", "/select", prompt12(object{"allowed_worker_ids": []int{2}}), 200, "worker_id 2", "overlap.longest_matched 4", "effective_prefill_tokens 8")
	s.want("POST", "/select", object{"model_name": "m", "token_ids": []int{}}, 200, "effective_prefill_tokens 0", "potential_decode_blocks 0")
	s.want("POST", "/select", object{"model_name": "x", "token_ids": []int{1}}, 503, `error "no schedulable workers for model=x routing_group=default"`)
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "c"}), 200)
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "c"}), 409, `error "selection c is already reserved or being reserved"`)
	s.want("DELETE", "/reservations/c", nil, 200)
	s.want("GET", "/dump", nil, 200, `m:default.block_size 4`, "m:default.events.#(worker_id==1).event.data.stored.blocks.#.block_hash [11,12]",
		"m:default.events.#(worker_id==1).event.data.stored.blocks.#.tokens_hash [14643705804678351452,16777012769546811212]")
	s.want("PATCH", "/workers/2", object{"total_kv_blocks": 500}, 200, "total_kv_blocks 500", "max_num_batched_tokens 8192", "blocks 1")
	s.want("DELETE", "/workers/2", nil, 200, "worker_id 2", `lifecycle "unschedulable"`)
	s.want("DELETE", "/workers/2", nil, 404, `error "worker 2 not found"`)
	s.want("GET", "/ready", nil, 200, "schedulable_workers 1")
	s.want("GET", "/nothing", nil, 404, `error "route not found"`)
	s.want("GET", "/select", nil, 405)
}

func TestReservationBooksWhatSelectChose(t *testing.T) {
	s := startSelection(t)
	s.two()
	s.want("POST", "/reservations", object{"model_name": "m", "selection_id": "a"}, 404,
		`error "no pending selection a for model=m routing_group=default (expired, already used, or never selected)"`)
	s.want("POST", "/select", prompt12(object{"selection_id": "a"}), 200, "worker_id 1", `selection_id "a"`)
	s.want("GET", "/loads", nil, 200, "0.loads.0.active_requests 0")
	s.want("POST", "/reservations", object{"model_name": "m", "selection_id": "a"}, 201, "worker_id 1")
	s.want("GET", "/loads", nil, 200, "0.loads.0.potential_prefill_tokens 4", "0.loads.0.potential_decode_blocks 3")
	s.want("POST", "/reservations", object{"model_name": "m", "selection_id": "a"}, 404)
	s.want("DELETE", "/reservations/a", nil, 200)

	s.want("POST", "/select", prompt12(object{"selection_id": "b"}), 200, "worker_id 1")
	s.want("DELETE", "/workers/1", nil, 200)
	s.want("POST", "/reservations", object{"model_name": "m", "selection_id": "b"}, 404, `error "schedulable worker 1 not found for model=m routing_group=default"`)
}

func TestSelectionRefusesWhatMakesNoSense(t *testing.T) {
	s := startSelection(t)
	s.register(1)
	for _, c := range []struct {
		path   string
		query  any
		status int
		says   string
	}{
		{"/select", object{"model_name": "m"}, 400, "token_ids"},
		{"/select", object{"model_name": "m", "token_ids": "x"}, 422, "token_ids"},
		{"/select", object{"model_name": "m", "block_hashes": []int{1}}, 400, "sequence_hashes"},
		{"/select", object{"model_name": "m", "block_hashes": []int{1}, "sequence_hashes": []int{1, 2}, "isl_tokens": 8}, 400, "length 1 must match"},
		{"/select", prompt12(object{"router_config_override": object{"router_temperature": -1}}), 422, "router_temperature"},
		{"/select", prompt12(object{"expected_output_tokens": -1}), 422, "expected_output_tokens"},
		{"/select", prompt12(object{"pinned_worker": object{"worker_id": 1}, "allowed_worker_ids": []int{2}}), 400, "pinned worker 1 is not in allowed worker set"},
		{"/select", prompt12(object{"selection_id": strings.Repeat("x", 1025)}), 400, "1024"},
		{"/select_and_reserve", prompt12(object{"selection_id": strings.Repeat("x", 1025)}), 400, "1024"},
		{"/select", prompt12(object{"pinned_worker": object{"worker_id": 9}}), 503, "no endpoints available to route work"},
		{"/reservations", prompt12(object{"worker_id": 1}), 422, "selection_id"},
		{"/reservations", prompt12(object{"worker_id": 1, "selection_id": "a", "effective_prefill_tokens": 13}), 400, "effective_prefill_tokens"},
		{"/reservations", prompt12(object{"worker_id": 9, "selection_id": "a"}), 404, "worker 9"},
		{"/workers", object{"model_name": "m"}, 422, "worker_id"},
		{"/workers", object{"worker_id": 5, "endpoint": "x"}, 400, "endpoint"},
		{"/workers", object{"worker_id": 5, "endpoint": "http://h:1", "block_size": 4, "kv_events_endpoint": "h"}, 400, "kv_events_endpoint"},
		{"/workers", object{"worker_id": 5, "endpoint": "http://h:1", "block_size": 4, "data_parallel_size": 100000}, 400, "data_parallel_size"},
		{"/route", object{"method": "dance"}, 400, "mark_prefill"},
		{"/route", object{"method": "new"}, 400, "tokens"},
	} {
		got := ask(t, s.selection, "POST", c.path, c.query)
		if got.status != c.status || !strings.Contains(got.Get("error").String(), c.says) {
			t.Errorf("%s %.100v: %d %s, want %d and %q", c.path, c.query, got.status, got.Raw, c.status, c.says)
		}
	}
	s.want("PATCH", "/workers/x", object{}, 400)
	s.want("GET", "/loads", nil, 200, "0.loads.0.active_requests 0")
}

func TestIncompleteWorkersSayWhatIsMissing(t *testing.T) {
	s := startSelection(t)
	s.want("POST", "/workers", object{"worker_id": 7, "model_name": "m"}, 201, `lifecycle "incomplete"`,
		`not_schedulable_reasons ["endpoint is required","block_size must be greater than 0","kv_events endpoint is required for dp_rank 0"]`)
	s.want("GET", "/ready", nil, 503, "workers.0.worker_id 7")
	s.want("PATCH", "/workers/7", object{"endpoint": "http://127.0.0.1:1", "block_size": 8, "kv_events_endpoint": "tcp://127.0.0.1:1"}, 200,
		`lifecycle "incomplete"`, `not_schedulable_reasons ["reconciliation failed: block_size mismatch for model=m routing_group=default: existing=4 requested=8"]`)
	s.want("PATCH", "/workers/7", object{"block_size": 4}, 200, `lifecycle "schedulable"`, "not_schedulable_reasons -")
	s.want("POST", "/select", prompt12(nil), 200, "worker_id 7")
	s.want("PATCH", "/workers/7", object{"block_size": 8}, 200, `lifecycle "incomplete"`)
	s.want("POST", "/select", prompt12(nil), 503)
	s.want("DELETE", "/workers/7", nil, 200, `lifecycle "unschedulable"`)
	s.want("GET", "/workers", nil, 200, "# 0")
}

func TestRoutingGroupsAndModelsKeepToTheirOwnWorkers(t *testing.T) {
	s := startSelection(t)
	for id, group := range []string{"", "blue"} {
		s.want("POST", "/workers", object{"worker_id": id, "model_name": "m", "routing_group": group, "endpoint": "http://127.0.0.1:1", "block_size": 4, "kv_events_endpoint": "tcp://127.0.0.1:1"}, 201)
	}
	s.want("POST", "/workers", object{"worker_id": 2, "model_name": "other", "endpoint": "http://127.0.0.1:1", "block_size": 4, "kv_events_endpoint": "tcp://127.0.0.1:1"}, 201)
	for range 10 {
		s.want("POST", "/select", prompt12(nil), 200, "worker_id 0")
		s.want("POST", "/select", prompt12(object{"routing_group": "blue"}), 200, "worker_id 1", `routing_group "blue"`)
		s.want("POST", "/select", prompt12(object{"model_name": "other"}), 200, "worker_id 2", `model_name "other"`)
	}
	s.want("POST", "/select", prompt12(object{"routing_group": "red"}), 503, `error "no schedulable workers for model=m routing_group=red"`)
	s.want("POST", "/potential_loads", prompt12(object{"routing_group": "blue"}), 200, "#.worker_id [1]")
	s.want("POST", "/overlap_scores", prompt12(object{"routing_group": "blue"}), 200, "workers.#.worker_id [1]")
	s.want("GET", "/loads", nil, 200, "#.routing_group [\"blue\",\"default\",\"default\"]", "#.model_name [\"m\",\"m\",\"other\"]")
	s.want("GET", "/loads?model_name=other", nil, 200, "# 1", "0.loads.#.worker_id [2]")
}

func TestRankIsChosenAndShown(t *testing.T) {
	s := startSelection(t)
	endpoints := object{}
	for rank := 2; rank < 4; rank++ {
		events, err := mocker.NewEvents("127.0.0.1:0", "127.0.0.1:0", 4)
		if err != nil {
			t.Fatal(err)
		}
		events.Rank = rank
		t.Cleanup(events.Close)
		s.events[uint64(rank)] = events
		endpoints[fmt.Sprint(rank)] = events.Pub.Endpoint()
	}
	s.want("POST", "/workers", object{"worker_id": 5, "model_name": "m", "endpoint": "http://127.0.0.1:1", "block_size": 4,
		"kv_events_endpoints": endpoints, "data_parallel_start_rank": 2, "data_parallel_size": 2}, 201, `lifecycle "schedulable"`)
	testkit.Eventually(t, 10*time.Second, "events are followed", func() bool { return s.events[3].Pub.Subscribers() > 0 })
	s.events[3].PublishNow(mocker.Event{Stored: []kv.StoredBlock{{Engine: 9}}, Tokens: testkit.Tokens(1, 4)})
	testkit.Eventually(t, 10*time.Second, "events are applied", func() bool { return s.app.index.Blocks(kv.WorkerKey{Worker: 5, Rank: 3}) == 1 })
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "a"}), 200, "worker_id 5", "dp_rank 3", "overlap.dp.2 0", "overlap.dp.3 4")
	s.want("GET", "/loads", nil, 200, "0.loads.#.dp_rank [2,3]", "0.loads.1.potential_prefill_tokens 8")
	s.want("POST", "/select", prompt12(object{"pinned_worker": object{"worker_id": 5, "dp_rank": 2}}), 200, "dp_rank 2", "effective_prefill_tokens 12")
	s.want("DELETE", "/reservations/a", nil, 200)
}

func TestRouteServesTheContractOfKvRouter(t *testing.T) {
	s := startSelection(t)
	s.two()
	s.want("POST", "/route", object{"method": "new", "request_id": "q", "tokens": testkit.Tokens(1, 12)}, 200, `method "new"`, "worker_id 1", "dp_rank 0", "overlap_blocks 2")
	s.want("POST", "/route", object{"method": "new", "request_id": "q", "tokens": testkit.Tokens(1, 12)}, 409)
	s.want("POST", "/route", object{"method": "potential_loads", "tokens": testkit.Tokens(1, 12)}, 200, `method "potential_loads"`, "loads.0.potential_prefill_tokens 8", "pending_count 0")
	s.want("POST", "/route", object{"method": "mark_prefill", "request_id": "q"}, 200, `method "prefill_marked"`, "success true")
	s.want("GET", "/loads", nil, 200, "0.loads.0.potential_prefill_tokens 0", "0.loads.0.active_requests 1")
	s.want("POST", "/route", object{"method": "mark_free", "request_id": "q"}, 200, `method "free_marked"`, "success true")
	s.want("POST", "/route", object{"method": "mark_free", "request_id": "q"}, 200, "success true")
	s.want("POST", "/route", object{"method": "mark_prefill", "request_id": "q"}, 200, "success false")
	id := s.want("POST", "/route", object{"method": "new", "tokens": testkit.Tokens(1, 12)}, 200).Get("request_id").String()
	s.want("GET", "/loads", nil, 200, "0.loads.0.active_requests 1")
	s.want("POST", "/route", object{"method": "mark_free", "request_id": id}, 200)
	s.want("GET", "/loads", nil, 200, "0.loads.0.active_requests 0", "0.loads.0.potential_decode_blocks 0")
}

func TestReservationsWaitWhileAllWorkersHaveEnoughToDo(t *testing.T) {
	s := startSelection(t, "--router-queue-threshold=1", "--router-queue-limit=1")
	s.want("POST", "/workers", object{"worker_id": 1, "model_name": "m", "endpoint": "http://127.0.0.1:1", "block_size": 4, "kv_events_endpoint": "tcp://127.0.0.1:1"}, 201,
		`not_schedulable_reasons ["max_num_batched_tokens is required while queueing is enabled"]`)
	s.want("PATCH", "/workers/1", object{"max_num_batched_tokens": 8}, 200, `lifecycle "schedulable"`)
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "a"}), 200)
	answered := make(chan reply, 1)
	go func() {
		answered <- ask(t, s.selection, "POST", "/select_and_reserve", prompt12(object{"selection_id": "b"}))
	}()
	pending := func() int64 { return ask(t, s.selection, "GET", "/loads", nil).Get("0.pending_count").Int() }
	testkit.Eventually(t, 10*time.Second, "the second waits", func() bool { return pending() == 1 })
	s.want("GET", "/loads", nil, 200, "0.pending_isl_tokens 12")
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "b"}), 409)
	s.want("DELETE", "/reservations/b", nil, 404) // not held yet
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "c"}), 529)
	s.want("POST", "/reservations/a/prefill_complete", nil, 200)
	select {
	case got := <-answered:
		if got.status != 200 || got.Get("selection_id").String() != "b" {
			t.Errorf("%d %s", got.status, got.Raw)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the second was not answered")
	}

	// A client that goes away while it waits leaves nothing.
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() {
		request, err := http.NewRequestWithContext(ctx, "POST", s.selection+"/select_and_reserve", strings.NewReader(`{"model_name":"m","token_ids":[1,2,3,4],"selection_id":"d"}`))
		if err == nil {
			request.Header.Set("Content-Type", "application/json")
			_, err = http.DefaultClient.Do(request)
		}
		gone <- err
	}()
	testkit.Eventually(t, 10*time.Second, "it waits", func() bool { return pending() == 1 })
	cancel()
	if err := <-gone; err == nil {
		t.Error("answered")
	}
	testkit.Eventually(t, 10*time.Second, "it is gone", func() bool { return pending() == 0 })
	s.want("DELETE", "/reservations/b", nil, 200)
	s.want("DELETE", "/reservations/a", nil, 200)
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "d"}), 200)
}

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
			w.WriteHeader(http.StatusNotFound)
		} else if r.URL.Path == "/health" {
			worker.good.Add(1)
		}
	}))
	t.Cleanup(worker.Close)
	s = startSelection(t)
	s.app.fleet.Timing.FirstLook, s.app.fleet.Timing.HealthEvery = 20*time.Millisecond, 20*time.Millisecond
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
		return s.app.index.Blocks(kv.WorkerKey{Worker: 1}) == 0
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
	if loads := s.app.router.Loads(); len(loads) != 0 {
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
	if err := s.app.fleet.Register(t.Context(), workers.Registration{ID: 9}); !errors.Is(err, workers.ErrFleetEnding) {
		t.Errorf("registered at an ended fleet: %v", err)
	}
	if s.app.fleet.Unregister(9) {
		t.Error("a worker was unregistered that never was registered")
	}
}

func TestRegisteredWorkerServesChats(t *testing.T) {
	s := &selectionSite{startApp(t, testkit.FreePorts(t, 2), "--engine=none", "--policy=kv"), nil}
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
	testkit.Eventually(t, 20*time.Second, "the second router knows the blocks", func() bool { return s.app.index.Blocks(kv.WorkerKey{}) > 0 })
	if a, err := s.chat(t.Context(), chat, false, 1); err != nil || a.predicted != a.cached || a.cached == 0 {
		t.Error(a, err)
	}
	s.want("GET", "/loads", nil, 200, "0.loads.0.active_requests 0")
	if err := s.end(); err != nil { // its connections, before the other ends and looks for some
		t.Error(err)
	}
	s.app.proxy.Client.CloseIdleConnections()
}

// TestTwoRoutersHoldTheSameIndex has a second router join while the first is at
// work: it learns what was before through replay.
func TestTwoRoutersHoldTheSameIndex(t *testing.T) {
	first := startMockSite(t, 2, "--mock-num-gpu-blocks=40", "--block-size=16", "--mock-data-parallel-size=2")
	load := func(from, to int) {
		for i := from; i < to; i++ {
			if _, err := first.chat(t.Context(), say(strings.Repeat(fmt.Sprintf("words of chat %d ", i), 12)), i%2 == 0, 4); err != nil {
				t.Fatal(err)
			}
		}
	}
	load(0, 20)
	port := testkit.FreePorts(t, 2)
	args := []string{"--engine=none", "--block-size=16", fmt.Sprintf("--http-port=%d", port), fmt.Sprintf("--router-port=%d", port+1)}
	for i := range 2 {
		args = append(args, fmt.Sprintf("--worker=url=%s,id=%d", first.workerURL(i), i))
	}
	second, end := runApp(t, io.Discard, args...)
	testkit.Eventually(t, 20*time.Second, "the second router follows all ranks", func() bool {
		n := 0
		for _, stats := range second.fleet.Streams() {
			if stats.Connected.Load() {
				n++
			}
		}
		return n == 4
	})
	load(20, 40)
	first.settle()
	want := routertest.DumpLines(first.app.index)
	if len(want) == 0 {
		t.Fatal("the first index is empty")
	}
	testkit.Eventually(t, 20*time.Second, "both indexes are equal", func() bool { return slices.Equal(routertest.DumpLines(second.index), want) })
	if err := end(); err != nil {
		t.Error(err)
	}
	second.proxy.Client.CloseIdleConnections()
}

// TestGrowingPrefixesStayOnOneWorker continues chats turn by turn.
func TestGrowingPrefixesStayOnOneWorker(t *testing.T) {
	for _, flags := range [][]string{{"--policy=kv"}, {"--policy=work"}, {"--policy=kv", "--no-kv-events"}, {"--policy=kv", "--mock-data-parallel-size=2"}} {
		t.Run(strings.Join(flags, " "), func(t *testing.T) {
			s := startMockSite(t, 2, append(flags, "--block-size=16")...)
			for c := range 4 {
				parts := []string{strings.Repeat(fmt.Sprintf("chat %d begins at length ", c), 10)}
				var home uint64
				for turn := range 4 {
					a, err := s.chat(t.Context(), say(parts...), false, 8)
					if err != nil {
						t.Fatal(err)
					}
					if turn == 0 {
						home = a.worker
					} else if a.worker != home || a.cached == 0 {
						t.Errorf("turn %d of chat %d went to worker %d and found %d tokens; want worker %d and some", turn, c, a.worker, a.cached, home)
					}
					if s.app.config.KVEvents() {
						s.settle()
					}
					parts = append(parts, a.text, strings.Repeat("and goes on ", 5))
				}
			}
		})
	}
}
