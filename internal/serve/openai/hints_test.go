package openai

import (
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/routertest"
)

func TestHintsReachTheRouter(t *testing.T) {
	key := kv.WorkerKey{Worker: 3, Rank: 1}
	var request router.Request
	prefill := kv.WorkerKey{Worker: 4}
	request.Follow(hints.Hints{Query: true, Pinned: &key, PinnedPrefill: &prefill, PriorityJump: 2, StrictPriority: 3, ExpectedOutput: 4, Prefix: hints.Prefix{ID: "p"}})
	if want := (router.Request{QueryOnly: true, Pinned: &key, PinnedPrefill: &prefill, PriorityJump: 2, StrictPriority: 3, ExpectedOutput: 4, Prefix: hints.Prefix{ID: "p"}}); !reflect.DeepEqual(request, want) {
		t.Errorf("%+v", request)
	}
}

func TestPinnedWorkerIsNeverReplaced(t *testing.T) {
	answer := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) }
	zero, one := testkit.NewFakeWorker(t, answer), testkit.NewFakeWorker(t, answer)
	dead := testkit.NewFakeWorker(t, hangUp)
	h := newTestAPI(t, setup{}, zero.URL, one.URL, dead.URL)
	plain := `{"model":"m","messages":[]}`
	for _, c := range []struct {
		body    string
		headers []string
		status  int
		worker  string
	}{
		{plain, []string{"x-worker-instance-id", "1"}, 200, "1"},
		{plain, []string{"x-worker-instance-id", "1", "x-dp-rank", "0"}, 200, "1"},
		{`{"model":"m","messages":[],"nvext":{"backend_instance_id":1}}`, nil, 200, "1"},
		{`{"model":"m","messages":[],"nvext":{"annotations":["worker_instance_id:1"]}}`, nil, 200, "1"},
		{plain, []string{"x-worker-instance-id", "2"}, 502, ""},
		{plain, []string{"x-worker-instance-id", "7"}, 503, ""},
		{plain, []string{"x-worker-instance-id", "1", "x-dp-rank", "1"}, 503, ""},
		{plain, []string{"x-worker-instance-id", "one"}, 400, ""},
		{plain, []string{"x-dp-rank", "1"}, 400, ""},
	} {
		response, body := h.post(t, testkit.ChatPath, c.body, c.headers...)
		if response.StatusCode != c.status || response.Header.Get(web.HeaderWorker) != c.worker {
			t.Errorf("%s %v: %s from worker %q: %s", c.body, c.headers, response.Status, response.Header.Get(web.HeaderWorker), body)
		}
		if c.status == 503 && !strings.Contains(gjson.Get(body, "error.message").Str, "no other worker is used") {
			t.Errorf("%v: %s", c.headers, body)
		}
	}
	if n := len(zero.Received()); n != 0 {
		t.Errorf("%d requests went to a worker that none named", n)
	}
	if got := one.Received(); len(got) != 4 || got[2] != `{"model":"m","messages":[],"nvext":{"backend_instance_id":1}}` {
		t.Errorf("the worker got %q", got)
	}
	if n := len(dead.Received()); n != 1 {
		t.Errorf("the dead worker was tried %d times", n)
	}
}

func TestPrefixHintsReachThePolicy(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	policy := new(policytest.Clerk)
	h := newTestAPIWith(t, routertest.New(t, "", 0, routertest.WithPolicy(policy)), setup{}, nil, targetsAt(worker.URL)...)
	body := `{"prompt":"p","messages":[],"nvext":{"agent_hints":{"prefix_id":"s","osl":2000},"annotations":["iat:LOW"]}}`
	for _, path := range []string{testkit.ChatPath, completionsPath, "/v1/responses", "/v1/messages", "/v1/embeddings"} {
		if response, answer := h.post(t, path, body, "x-prefix-total-requests", "4"); response.StatusCode != 200 {
			t.Fatalf("%s: %s", path, answer)
		}
		queries := policy.Queries()
		if got, want := queries[len(queries)-1].Prefix, (hints.Prefix{ID: "s", Total: 4, OSL: hints.LevelHigh, IAT: hints.LevelLow}); got != want {
			t.Errorf("%s: the policy saw %+v, want %+v", path, got, want)
		}
	}
	for _, got := range worker.Received() {
		if got != body {
			t.Errorf("the worker got %s", got)
		}
	}
}
