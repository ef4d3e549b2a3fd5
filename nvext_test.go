package main

import (
	"fmt"
	"kvrouter/internal/hints"
	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

func TestHintsReachTheRouter(t *testing.T) {
	key := kv.WorkerKey{Worker: 3, Rank: 1}
	var request router.Request
	prefill := kv.WorkerKey{Worker: 4}
	applyHints(hints.Hints{Query: true, Pinned: &key, PinnedPrefill: &prefill, PriorityJump: 2, StrictPriority: 3, ExpectedOutput: 4, Prefix: hints.Prefix{ID: "p"}}, &request)
	if want := (router.Request{QueryOnly: true, Pinned: &key, PinnedPrefill: &prefill, PriorityJump: 2, StrictPriority: 3, ExpectedOutput: 4, Prefix: hints.Prefix{ID: "p"}}); !reflect.DeepEqual(request, want) {
		t.Errorf("%+v", request)
	}
}

func TestPinnedWorkerIsNeverReplaced(t *testing.T) {
	answer := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) }
	zero, one := newFakeWorker(t, answer), newFakeWorker(t, answer)
	dead := newFakeWorker(t, hangUp)
	h := newTestAPI(t, Config{}, zero.URL, one.URL, dead.URL)
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
		if c.status == 503 && !strings.Contains(gjson.Get(body, "error.message").Str, "no other is taken in its place") {
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

func TestDryRunChangesNothing(t *testing.T) {
	s := startMockSite(t, 2, "--policy=kv")
	text := strings.Repeat("who would serve this ", 30)
	warm, err := s.chat(t.Context(), say(text), false, 1)
	if err != nil {
		t.Fatal(err)
	}
	s.settle()
	computed := func() (n int64) {
		for _, target := range s.rooms.router.Targets() {
			n += s.rank(target.Key).Counts.PromptTokens.Load()
		}
		return n
	}
	before := computed()
	_, list := post(t, s.openAI+"/tokenize", string(mocker.MustJSON(map[string]any{"messages": say(text)})))
	for _, stream := range []bool{false, true} {
		for range 4 {
			status, body := post(t, s.openAI+testkit.ChatPath, string(mocker.MustJSON(map[string]any{"messages": say(text), "stream": stream,
				"nvext": map[string]any{"annotations": []string{"query_instance_id", "something_else"}}})))
			answer := string(body)
			if stream {
				events := strings.Split(strings.TrimSpace(answer), "\n\n")
				if len(events) != 2 || events[1] != "data: [DONE]" {
					t.Fatalf("%q", answer)
				}
				answer = strings.TrimPrefix(events[0], "data: ")
			}
			nvext := gjson.Get(answer, "nvext")
			if status != 200 || nvext.Get("worker_instance_id").Uint() != warm.worker || nvext.Get("worker_id.decode_worker_id").Uint() != warm.worker ||
				nvext.Get("worker_id.prefill_dp_rank").Raw != "0" || nvext.Get("overlap_tokens").Int() == 0 {
				t.Errorf("%d %.300s", status, answer)
			}
			if want := gjson.GetBytes(list, "tokens").Raw; nvext.Get("token_data").Raw != want || nvext.Get("token_ids").Raw != want {
				t.Errorf("tokens %.100s, want %.100s", nvext.Get("token_data").Raw, want)
			}
		}
	}
	if after := computed(); after != before {
		t.Errorf("%d prompt tokens reached workers", after-before)
	}
	for _, load := range s.rooms.router.Loads() {
		if load.ActiveRequests != 0 || load.PotentialDecodeBlocks != 0 || load.PotentialPrefillTokens != 0 {
			t.Errorf("booked: %+v", load)
		}
	}
	// A dry run for one worker speaks of that one.
	other := 1 - warm.worker
	_, body := post(t, s.openAI+completionsPath, fmt.Sprintf(`{"prompt":"Hi","nvext":{"annotations":["query_instance_id"],"backend_instance_id":%d}}`, other))
	if nvext := gjson.GetBytes(body, "nvext"); nvext.Get("worker_instance_id").Uint() != other || nvext.Get("token_data").Raw != "[72,105]" || gjson.GetBytes(body, "object").Str != "text_completion" {
		t.Errorf("%s", body)
	}
}
