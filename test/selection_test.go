package test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// selectionSite is a router of block size 4 without an engine, whose workers are
// registered.
type selectionSite struct {
	*Router
	events map[uint64]*mocker.Events
	bare   string // URL of workers: nothing listens there
}

func startSelection(t *testing.T, args ...string) *selectionSite {
	t.Helper()
	all := []string{"--engine=none", "--policy=kv", "--block-size=4", "--seed=1"}
	return &selectionSite{Start(t, append(all, args...)...), map[uint64]*mocker.Events{}, deadURL(t)}
}

// register adds a worker of model m with a publisher of its own.
func (s *selectionSite) register(id uint64) {
	s.T.Helper()
	events, err := mocker.NewEvents("127.0.0.1:0", "127.0.0.1:0", 4)
	if err != nil {
		s.T.Fatal(err)
	}
	s.T.Cleanup(events.Close)
	s.events[id] = events
	spec := map[string]any{
		"worker_id": id, "model_name": "m", "endpoint": s.bare, "kv_events_endpoint": events.Pub.Endpoint(),
		"block_size": 4, "max_num_batched_tokens": 8192, "total_kv_blocks": 1000,
	}
	s.want("POST", "/workers", spec, 201, `lifecycle "schedulable"`, `routing_group "default"`, fmt.Sprintf("worker_id %d", id))
	testkit.Eventually(s.T, 10*time.Second, "the worker's events are followed", func() bool { return events.Pub.Subscribers() > 0 })
}

// stores lets a worker publish that it holds the tokens 1 to 4·len(engine).
func (s *selectionSite) stores(id uint64, engine ...uint64) {
	s.T.Helper()
	event := mocker.Event{}
	for i, e := range engine {
		event.Stored = append(event.Stored, kv.StoredBlock{Engine: e})
		event.Tokens = append(event.Tokens, testkit.Tokens(uint32(4*i+1), 4)...)
	}
	s.events[id].PublishNow(event)
	testkit.Eventually(s.T, 10*time.Second, "the events are applied", func() bool {
		return s.Blocks(kv.WorkerKey{Worker: id}) == len(engine)
	})
}

// want sends a request and checks the status and, as "path value", parts of the
// answer; the value - stands for none.
func (s *selectionSite) want(method, path string, query any, status int, parts ...string) reply {
	s.T.Helper()
	got := ask(s.T, s.Port, method, path, query)
	if got.status != status {
		s.T.Errorf("%s %s %v: status %d, want %d: %s", method, path, query, got.status, status, got.Raw)
	}
	for _, part := range parts {
		field, value, _ := strings.Cut(part, " ")
		if is := got.Get(field); is.Raw != value && (is.Exists() || value != "-") {
			s.T.Errorf("%s %s %v: %s is %s, want %s in %s", method, path, query, field, is.Raw, value, got.Raw)
		}
	}
	return got
}

// two registers the two workers of the documented examples.
func (s *selectionSite) two() {
	s.T.Helper()
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
	t.Parallel()
	s := startSelection(t)
	s.want("GET", "/ready", nil, 503, "ready false", "schedulable_workers 0")
	s.want("POST", "/select", prompt12(nil), 503, `error "no schedulable workers for model=m routing_group=default"`)
	s.two()

	s.want("GET", "/health", nil, 200, `status "ok"`)
	s.want("GET", "/ready", nil, 200, "ready true", "schedulable_workers 2", "workers.1.worker_id 2")
	s.want("GET", "/workers?model_name=m", nil, 200, "# 2", "0.worker_id 1", "0.max_num_batched_tokens 8192", "0.total_kv_blocks 1000")
	s.want("GET", "/workers?routing_group=other", nil, 200, "# 0")
	s.want("POST", "/overlap_scores", prompt12(nil), 200, "block_size 4", "num_blocks 3", "workers.0.device_blocks 2", "workers.1.device_blocks 1")
	s.want("POST", "/select", prompt12(nil), 200, `model_name "m"`, `routing_group "default"`, "worker_id 1", "dp_rank 0", fmt.Sprintf("endpoint %q", s.bare), "block_size 4",
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
	s.want("POST", "/reservations", prompt12(object{"selection_id": "b", "worker_id": 2}), 201, `selection_id "b"`, "worker_id 2", "dp_rank 0", fmt.Sprintf("endpoint %q", s.bare))
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
	t.Parallel()
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
	t.Parallel()
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
		got := ask(t, s.Port, "POST", c.path, c.query)
		if got.status != c.status || !strings.Contains(got.Get("error").String(), c.says) {
			t.Errorf("%s %.100v: %d %s, want %d and %q", c.path, c.query, got.status, got.Raw, c.status, c.says)
		}
	}
	s.want("PATCH", "/workers/x", object{}, 400)
	s.want("GET", "/loads", nil, 200, "0.loads.0.active_requests 0")
}

func TestIncompleteWorkersSayWhatIsMissing(t *testing.T) {
	t.Parallel()
	s := startSelection(t)
	s.want("POST", "/workers", object{"worker_id": 7, "model_name": "m"}, 201, `lifecycle "incomplete"`,
		`not_schedulable_reasons ["endpoint is required","block_size must be greater than 0","kv_events endpoint is required for dp_rank 0"]`)
	s.want("GET", "/ready", nil, 503, "workers.0.worker_id 7")
	s.want("PATCH", "/workers/7", object{"endpoint": s.bare, "kv_events_endpoint": "tcp://127.0.0.1:1"}, 200,
		`lifecycle "incomplete"`, `not_schedulable_reasons ["block_size must be greater than 0"]`)
	s.want("POST", "/select", prompt12(nil), 503)
	for _, size := range []int{4, 8} { // any is taken
		s.want("PATCH", "/workers/7", object{"block_size": size}, 200, `lifecycle "schedulable"`, "not_schedulable_reasons -")
		s.want("POST", "/select", prompt12(nil), 200, "worker_id 7", fmt.Sprintf("block_size %d", size))
	}
	s.want("DELETE", "/workers/7", nil, 200, `lifecycle "unschedulable"`)
	s.want("GET", "/workers", nil, 200, "# 0")
}

func TestRoutingGroupsAndModelsKeepToTheirOwnWorkers(t *testing.T) {
	t.Parallel()
	s := startSelection(t)
	for id, group := range []string{"", "blue"} {
		s.want("POST", "/workers", object{"worker_id": id, "model_name": "m", "routing_group": group, "endpoint": s.bare, "block_size": 4, "kv_events_endpoint": "tcp://127.0.0.1:1"}, 201)
	}
	s.want("POST", "/workers", object{"worker_id": 2, "model_name": "other", "endpoint": s.bare, "block_size": 4, "kv_events_endpoint": "tcp://127.0.0.1:1"}, 201)
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
	t.Parallel()
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
	s.want("POST", "/workers", object{"worker_id": 5, "model_name": "m", "endpoint": s.bare, "block_size": 4,
		"kv_events_endpoints": endpoints, "data_parallel_start_rank": 2, "data_parallel_size": 2}, 201, `lifecycle "schedulable"`)
	testkit.Eventually(t, 10*time.Second, "events are followed", func() bool { return s.events[3].Pub.Subscribers() > 0 })
	s.events[3].PublishNow(mocker.Event{Stored: []kv.StoredBlock{{Engine: 9}}, Tokens: testkit.Tokens(1, 4)})
	testkit.Eventually(t, 10*time.Second, "events are applied", func() bool { return s.Blocks(kv.WorkerKey{Worker: 5, Rank: 3}) == 1 })
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "a"}), 200, "worker_id 5", "dp_rank 3", "overlap.dp.2 0", "overlap.dp.3 4")
	s.want("GET", "/loads", nil, 200, "0.loads.#.dp_rank [2,3]", "0.loads.1.potential_prefill_tokens 8")
	s.want("POST", "/select", prompt12(object{"pinned_worker": object{"worker_id": 5, "dp_rank": 2}}), 200, "dp_rank 2", "effective_prefill_tokens 12")
	s.want("DELETE", "/reservations/a", nil, 200)
}

func TestRouteServesTheContractOfKvRouter(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
	s := startSelection(t, "--router-queue-threshold=1", "--router-queue-limit=1")
	s.want("POST", "/workers", object{"worker_id": 1, "model_name": "m", "endpoint": s.bare, "block_size": 4, "kv_events_endpoint": "tcp://127.0.0.1:1"}, 201,
		`not_schedulable_reasons ["max_num_batched_tokens is required while queueing is enabled"]`)
	s.want("PATCH", "/workers/1", object{"max_num_batched_tokens": 8}, 200, `lifecycle "schedulable"`)
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "a"}), 200)
	answered := make(chan reply, 1)
	go func() {
		answered <- ask(t, s.Port, "POST", "/select_and_reserve", prompt12(object{"selection_id": "b"}))
	}()
	pending := func() int64 { return ask(t, s.Port, "GET", "/loads", nil).Get("0.pending_count").Int() }
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
		request, err := http.NewRequestWithContext(ctx, "POST", s.Port+"/select_and_reserve", strings.NewReader(`{"model_name":"m","token_ids":[1,2,3,4],"selection_id":"d"}`))
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
	s.T.Helper()
	testkit.Eventually(s.T, 10*time.Second, "worker 1 is "+want, func() bool {
		return ask(s.T, s.Port, "GET", "/workers", nil).Get("0.lifecycle").String() == want
	})
}

func TestRegisteredWorkerIsWatchedOnceItHasAnswered(t *testing.T) {
	t.Parallel()
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
		return s.Blocks(kv.WorkerKey{Worker: 1}) == 0
	})
}

func TestChangesOfARegisteredWorkerKeepItsCacheIfTheyCan(t *testing.T) {
	t.Parallel()
	s, _, spec := registeredSite(t)
	s.stores(1, 11, 12)
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "a"}), 200)
	s.want("PATCH", "/workers/1", object{"max_num_batched_tokens": 100}, 200, "blocks 2", "generation 1", "in_flight 1")
	s.want("POST", "/workers", spec, 201, "blocks 2", "generation 1")
	s.want("PATCH", "/workers/1", object{"kv_events_endpoint": "tcp://127.0.0.1:1"}, 200, "blocks 0", "generation 2", "in_flight 1", `lifecycle "schedulable"`)
	s.want("DELETE", "/workers/1", nil, 200)
	s.want("DELETE", "/reservations/a", nil, 404) // freed with its worker
	s.want("GET", "/loads", nil, 200, "#.loads.# []")
	s.want("POST", "/workers", spec, 201, "blocks 0", "in_flight 0")
}

func TestWorkersOfTheFlagsCannotBeChangedByRegistration(t *testing.T) {
	t.Parallel()
	s := startSelection(t, "--worker=url=http://127.0.0.1:1,id=3")
	s.want("POST", "/workers", object{"worker_id": 3, "endpoint": "http://127.0.0.1:2", "block_size": 4, "kv_events_endpoint": "tcp://127.0.0.1:1"}, 409)
	s.want("PATCH", "/workers/3", object{"block_size": 4}, 409)
	s.want("DELETE", "/workers/3", nil, 409)
	s.want("GET", "/workers", nil, 200, "# 1", "0.worker_id 3", `0.lifecycle "unschedulable"`)
}

func TestRegistrationWithoutEventsNeedsNoEndpointForThem(t *testing.T) {
	t.Parallel()
	s := startSelection(t, "--no-kv-events")
	worker := object{"worker_id": 1, "model_name": "m", "endpoint": s.bare, "block_size": 4}
	s.want("POST", "/workers", worker, 201, `lifecycle "schedulable"`)
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "a"}), 200, "worker_id 1", "overlap.longest_matched 0")
	s.want("POST", "/select", prompt12(object{}), 200, "overlap.longest_matched 12")
	s.want("DELETE", "/reservations/a", nil, 200)
}

func TestRegistrationEndsWithTheRouter(t *testing.T) {
	t.Parallel()
	s, _, _ := registeredSite(t)
	s.Stop() // which fails the test if it takes long, or the exit status is not 0
}

func TestRegisteredWorkerServesChats(t *testing.T) {
	t.Parallel()
	s := &selectionSite{Router: Start(t, "--engine=none", "--policy=kv")}
	first := StartMocks(t, 1)
	record := ask(t, first.Port, "GET", "/workers", nil).Get("0")
	s.want("POST", "/workers", object{
		"worker_id": 0, "model_name": record.Get("model_name").String(), "endpoint": record.Get("endpoint").String(), "block_size": 64,
		"kv_events_endpoint": record.Get("kv_events_endpoint").String(), "replay_endpoint": record.Get("replay_endpoint").String(),
	}, 201, `lifecycle "schedulable"`)
	chat := Say(strings.Repeat("seen by both ", 30))
	if _, err := first.Chat(t.Context(), chat, false, 1); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 20*time.Second, "the second router knows the blocks", func() bool { return s.Blocks(kv.WorkerKey{}) > 0 })
	if a, err := s.Chat(t.Context(), chat, false, 1); err != nil || a.Predicted != a.Cached || a.Cached == 0 {
		t.Error(a, err)
	}
	s.want("GET", "/loads", nil, 200, "0.loads.0.active_requests 0")
}

// managedServer is a worker that clients of sglang-router add by its URL.
func managedServer(t *testing.T) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/health":
		case "/v1/models":
			io.WriteString(w, `{"data":[{"id":"m"}]}`)
		case "/v1/completions":
			fmt.Fprintf(w, `{"choices":[{"text":"x","finish_reason":"stop"}],"key":%q}`, r.Header.Get("Authorization"))
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(s.Close)
	return s
}

// call sends a request without a body, as sglang-router's clients do.
func (s *selectionSite) call(method, path string, headers ...string) (int, string) {
	s.T.Helper()
	request, err := http.NewRequestWithContext(s.T.Context(), method, s.Port+path, nil)
	if err != nil {
		s.T.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		s.T.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		s.T.Fatal(err)
	}
	return response.StatusCode, string(text)
}

func (s *selectionSite) calls(method, path string, status int, want string) {
	s.T.Helper()
	if got, text := s.call(method, path); got != status || text != want {
		s.T.Errorf("%s %s: %d %s, want %d %s", method, path, got, text, status, want)
	}
}

// TestSGLangRoutersClientsManageWorkers: the calls and answers are sglang-router's.
func TestSGLangRoutersClientsManageWorkers(t *testing.T) {
	t.Parallel()
	s := startSelection(t)
	worker := managedServer(t)
	s.calls("GET", "/liveness", 200, "OK")
	s.calls("GET", "/readiness", 503, `{"reason":"insufficient healthy workers","status":"not ready"}`)
	s.calls("GET", "/list_workers", 200, `{"urls":[]}`)
	s.calls("POST", "/add_worker?url="+worker.URL+"/&api_key=sesame", 200, "Successfully added worker: "+worker.URL)
	s.calls("POST", "/add_worker?url="+worker.URL, 400, "Worker "+worker.URL+" already exists")
	s.calls("GET", "/list_workers", 200, fmt.Sprintf(`{"urls":[%q]}`, worker.URL))
	s.calls("GET", "/readiness", 200, `{"healthy_workers":1,"status":"ready","total_workers":1}`)
	s.want("GET", "/workers", nil, 200, "# 1", `0.lifecycle "schedulable"`, `0.model_name "m"`, "0.api_key -")
	if status, answer := Post(t, s.OpenAI+"/v1/completions", `{"prompt":"a"}`); status != 200 || gjson.GetBytes(answer, "key").Str != "Bearer sesame" {
		t.Errorf("%d %s", status, answer)
	}
	s.calls("POST", "/remove_worker?url="+worker.URL, 200, "Successfully removed worker: "+worker.URL)
	s.calls("POST", "/remove_worker?url="+worker.URL, 200, "Successfully removed worker: "+worker.URL)
	s.calls("GET", "/list_workers", 200, `{"urls":[]}`)
	s.want("GET", "/workers", nil, 200, "# 0")
}

func TestRegisteredWorkersAreRemovedByTheirURL(t *testing.T) {
	t.Parallel()
	s := startSelection(t, "--worker=url=http://127.0.0.1:9,id=3")
	s.register(1)
	s.calls("POST", "/remove_worker?url="+s.bare+"/", 200, "Successfully removed worker: "+s.bare)
	s.want("GET", "/workers", nil, 200, "# 1", "0.worker_id 3")
	s.calls("POST", "/remove_worker?url=http://127.0.0.1:9", 400, "Worker http://127.0.0.1:9 was started by the router, or attached by --worker: it cannot be removed")
}

func TestWhatCannotBeAdded(t *testing.T) {
	t.Parallel()
	s := startSelection(t, "--startup-timeout=300ms")
	dead := deadURL(t)
	for _, test := range []struct {
		query  string
		status int
		part   string
	}{
		{"", 400, "Worker URL required. Provide 'url' query parameter"},
		{"?url=h:1", 400, "is not a URL such as"},
		{"?url=http://user:sesame@h:1", 400, "must not contain a user or password"},
		{"?url=" + s.OpenAI, 400, "address of this router itself"},
		{"?url=" + s.Port, 400, "address of this router itself"},
		{"?url=http://h:1&api_key=a%0Ab", 400, "without control characters"},
		{"?url=" + dead, 400, "waiting for worker " + dead + " to become healthy. Please set --startup-timeout"},
	} {
		began := time.Now()
		status, answer := s.call("POST", "/add_worker"+test.query)
		if status != test.status || !strings.Contains(answer, test.part) || strings.Contains(answer, "sesame") || time.Since(began) > 20*time.Second {
			t.Errorf("%s: %d %s", test.query, status, answer)
		}
	}
	s.calls("GET", "/list_workers", 200, `{"urls":[]}`)
}

// TestManagingWorkersIsGuarded as registering them is.
func TestManagingWorkersIsGuarded(t *testing.T) {
	t.Parallel()
	s := startSelection(t, "--router-api-key=open")
	worker := managedServer(t)
	for _, path := range []string{"/add_worker?url=" + worker.URL, "/remove_worker?url=" + worker.URL} {
		if status, answer := s.call("POST", path); status != 401 {
			t.Errorf("%s without a key: %d %s", path, status, answer)
		}
		if status, answer := s.call("POST", path, "Authorization", "Bearer open", "Origin", "http://elsewhere"); status != 403 {
			t.Errorf("%s of another site's page: %d %s", path, status, answer)
		}
		if status, answer := s.call("POST", path, "Authorization", "Bearer open"); status != 200 {
			t.Errorf("%s: %d %s", path, status, answer)
		}
	}
	if status, _ := s.call("GET", "/list_workers"); status != 401 {
		t.Errorf("/list_workers: %d", status)
	}
	if status, _ := s.call("GET", "/liveness"); status != 200 {
		t.Errorf("/liveness: %d", status)
	}
}

// TestClientThatLeavesAddsNoWorker while it waits.
func TestClientThatLeavesAddsNoWorker(t *testing.T) {
	t.Parallel()
	s := startSelection(t)
	request, err := http.NewRequestWithContext(t.Context(), "POST", s.Port+"/add_worker?url="+deadURL(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Timeout: 200 * time.Millisecond}
	if response, err := client.Do(request); err == nil {
		response.Body.Close()
		t.Errorf("answered %s", response.Status)
	}
	testkit.Eventually(t, 10*time.Second, "it is gone", func() bool { return len(s.Workers()) == 0 })
}

func TestRouterStartsFromAPeersIndex(t *testing.T) {
	t.Parallel()
	first := startSelection(t)
	first.two()
	second := startSelection(t, "--indexer-peers="+first.Port)
	testkit.Eventually(t, 10*time.Second, "the peer's index is there", func() bool { return len(second.dump()) == len(first.dump()) })
	text := func(s *selectionSite) string { return ask(t, s.Port, "GET", "/dump", nil).Raw }
	if a, b := text(first), text(second); a != b {
		t.Errorf("dumps differ:\n%s\n%s", a, b)
	}
	second.register(1)
	second.want("POST", "/select", prompt12(nil), 200, "worker_id 1", "overlap.longest_matched 8")
}

func TestOverridesOfASelectionAreChecked(t *testing.T) {
	t.Parallel()
	s := startSelection(t)
	s.register(1)
	for _, route := range []struct {
		path string
		more object
	}{
		{"/select", nil}, {"/select_and_reserve", object{"selection_id": "a"}}, {"/potential_loads", nil},
		{"/reservations", object{"worker_id": 1, "selection_id": "b"}},
		{"/route", object{"method": "new", "tokens": []int{1, 2, 3, 4}}}, {"/route", object{"method": "potential_loads", "tokens": []int{1}}},
	} {
		for _, c := range []struct {
			field string
			value any
			says  string
		}{
			{"overlap_score_weight", -0.5, "finite and non-negative"},
			{"overlap_score_credit", -1, "finite and non-negative"},
			{"prefill_load_scale", -1e-9, "finite and non-negative"},
			{"router_temperature", -1, "finite and non-negative"},
			{"router_temperature", json.RawMessage("1e999"), "cannot be a JSON number"},
			{"router_temperature", "hot", "cannot be a JSON string"},
			{"assume_kv_reuse", 1, "cannot be a JSON number"},
			{"track_prefill_tokens", "no", "cannot be a JSON string"},
		} {
			query := prompt12(object{"router_config_override": object{c.field: c.value}})
			for key, value := range route.more {
				query[key] = value
			}
			got := ask(t, s.Port, "POST", route.path, query)
			if says := got.Get("error").String(); got.status != 422 || !strings.Contains(says, c.field) || !strings.Contains(says, c.says) {
				t.Errorf("%s %s %v: %d %s", route.path, c.field, c.value, got.status, got.Raw)
			}
		}
	}
	s.want("GET", "/loads", nil, 200, "0.loads.0.active_requests 0")
}

func TestRegisteredWorkersHaveAPart(t *testing.T) {
	t.Parallel()
	s, _, spec := registeredSite(t)
	s.want("GET", "/workers", nil, 200, "0.role -", "0.bootstrap_host -")
	s.want("PATCH", "/workers/1", object{"role": "prefill", "kind": "sglang", "bootstrap_host": "h", "bootstrap_port": 9000}, 200,
		`role "prefill"`, `kind "sglang"`, `bootstrap_host "h"`, "bootstrap_port 9000", "generation 1", `lifecycle "schedulable"`)
	s.want("GET", "/workers", nil, 200, `0.role "prefill"`, `0.kind "sglang"`, `0.bootstrap_host "h"`, "0.bootstrap_port 9000")
	for _, bad := range []object{{"role": "prefil"}, {"kind": "nccl"}, {"bootstrap_port": 70000}, {"role": 1}} {
		if got := ask(t, s.Port, "PATCH", "/workers/1", bad); got.status/100 != 4 {
			t.Errorf("%v: %d %s", bad, got.status, got.Raw)
		}
	}
	spec["role"] = "decode"
	s.want("POST", "/workers", spec, 201, `role "decode"`, "kind -")
	s.want("GET", "/workers", nil, 200, `0.role "decode"`, "0.kind -", "0.bootstrap_host -")
}

// TestRegisteredWorkerThatNeverAnswersIsSelectedAndNotSentTo: clients of the router port
// forward their requests themselves, and may reach a worker that the router does not.
func TestRegisteredWorkerThatNeverAnswersIsSelectedAndNotSentTo(t *testing.T) {
	t.Parallel()
	s := startSelection(t)
	s.two()
	record := func(id uint64) gjson.Result {
		return ask(t, s.Port, "GET", "/workers", nil).Get(fmt.Sprintf("#(worker_id==%d)", id))
	}
	for id := range uint64(2) {
		testkit.Eventually(t, 10*time.Second, "a health check fails", func() bool { return record(id+1).Get("state").Str == workers.StateConnecting })
	}
	s.want("GET", "/ready", nil, 200, "ready true", "schedulable_workers 2")
	s.want("POST", "/select", prompt12(nil), 200, "worker_id 1", "overlap.longest_matched 8")
	s.want("POST", "/select", prompt12(object{"allowed_worker_ids": []int{2}}), 200, "worker_id 2", "overlap.longest_matched 4")
	s.want("POST", "/select_and_reserve", prompt12(object{"selection_id": "a"}), 200, "worker_id 1")
	s.want("DELETE", "/reservations/a", nil, 200)
	s.want("POST", "/find_best_worker", prompt12(nil), 200, "worker_id 1", "overlap_tokens 8")
	s.calls("GET", "/readiness", 503, `{"reason":"insufficient healthy workers","status":"not ready"}`)
	if status, answer := Post(t, s.OpenAI+"/v1/completions", `{"model":"m","prompt":"a"}`); status != http.StatusServiceUnavailable {
		t.Errorf("completion: %d %s", status, answer)
	}
	if status, _ := testkit.HTTPGet(t, s.OpenAI+"/ready"); status != http.StatusServiceUnavailable {
		t.Errorf("/ready of the OpenAI port: %d", status)
	}

	var served atomic.Int64
	answers := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/completions" {
			served.Add(1)
			io.WriteString(w, `{"choices":[{"text":"x","finish_reason":"stop"}]}`)
		} else if r.URL.Path != "/health" {
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer answers.Close()
	s.want("POST", "/workers", object{"worker_id": 3, "model_name": "m", "endpoint": answers.URL, "block_size": 4, "kv_events_endpoint": "tcp://127.0.0.1:1"}, 201)
	for range 20 {
		if status, answer := Post(t, s.OpenAI+"/v1/completions", `{"model":"m","prompt":"a"}`); status != 200 {
			t.Errorf("completion: %d %s", status, answer)
		}
	}
	if n := served.Load(); n != 20 {
		t.Errorf("the worker that answers got %d of 20 requests", n)
	}
	for name, n := range s.Metrics() {
		if strings.HasPrefix(name, "kvrouter_retries_total") && n != 0 {
			t.Errorf("%s is %v: requests went elsewhere first", name, n)
		}
	}
	s.want("POST", "/select", prompt12(nil), 200, "worker_id 1", "overlap.longest_matched 8")
}
