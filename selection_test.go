package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/selection"
	"kvrouter/internal/testkit"
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

func TestSelectionRefusesBodiesOver8MiB(t *testing.T) {
	h := newTestAPI(t, Config{}, "http://a")
	for _, path := range []string{"/select", "/workers", "/reservations", "/route", "/find_best_worker"} {
		got := ask(t, h.selection.URL, "POST", path, object{"token_ids": strings.Repeat("x", selection.SelectionBodyLimit)})
		if got.status != 413 || !strings.Contains(got.Get("error").String(), "8388608") {
			t.Errorf("%s: %d %s", path, got.status, got.Raw)
		}
	}
}
