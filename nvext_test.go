package main

import (
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

func TestHintsAreReadFromBodyAndHeaders(t *testing.T) {
	worker := func(id uint64, rank uint32) *WorkerKey { return &WorkerKey{Worker: id, Rank: rank} }
	for _, c := range []struct {
		nvext                            string
		headerWorker, headerRank         string
		headerPrefill, headerPrefillRank string
		want                             routingHints
		bad                              string // the parameter at fault
	}{
		{nvext: ``},
		{nvext: `null`},
		{nvext: `{}`},
		{nvext: `{"annotations":null,"agent_hints":null,"backend_instance_id":null,"dp_rank":null}`},
		{nvext: `{"annotations":["formatted_prompt","token_ids","x:y",7],"greed_sampling":true,"extra_fields":["worker_id"]}`},
		{nvext: `{"annotations":["llm_metrics","query_instance_id"]}`, want: routingHints{Query: true}},
		{nvext: `{"annotations":["query_instance_id:"]}`, want: routingHints{Query: true}},
		{nvext: `{"annotations":["worker_instance_id:3"]}`, want: routingHints{Pinned: worker(3, 0), Whole: true}},
		{nvext: `{"annotations":["worker_instance_id"]}`},
		{nvext: `{"backend_instance_id":18446744073709551615,"dp_rank":2}`, want: routingHints{Pinned: worker(1<<64-1, 2), Whole: true}},
		{nvext: `{"backend_instance_id":4,"annotations":["worker_instance_id:3","query_instance_id"]}`, want: routingHints{Pinned: worker(4, 0), Whole: true, Query: true}},
		{nvext: `{"backend_instance_id":4,"dp_rank":1}`, headerWorker: "5", headerRank: "6", want: routingHints{Pinned: worker(5, 6), Whole: true}},
		{headerWorker: "5", want: routingHints{Pinned: worker(5, 0), Whole: true}},
		{nvext: `{"decode_worker_id":5,"decode_dp_rank":1}`, want: routingHints{Pinned: worker(5, 1)}},
		{nvext: `{"decode_worker_id":5,"backend_instance_id":4}`, want: routingHints{Pinned: worker(5, 0)}},
		{nvext: `{"decode_worker_id":5}`, headerWorker: "6", want: routingHints{Pinned: worker(6, 0), Whole: true}},
		{nvext: `{"prefill_worker_id":3,"prefill_dp_rank":2}`, want: routingHints{PinnedPrefill: worker(3, 2)}},
		{nvext: `{"prefill_worker_id":3,"decode_worker_id":5}`, want: routingHints{PinnedPrefill: worker(3, 0), Pinned: worker(5, 0)}},
		{nvext: `{"prefill_worker_id":3,"backend_instance_id":5}`, want: routingHints{PinnedPrefill: worker(3, 0), Pinned: worker(5, 0)}},
		{nvext: `{"prefill_worker_id":5,"decode_worker_id":5,"prefill_dp_rank":1,"decode_dp_rank":1}`, want: routingHints{Pinned: worker(5, 1), Whole: true}},
		{nvext: `{"prefill_worker_id":3}`, headerPrefill: "4", headerPrefillRank: "1", want: routingHints{PinnedPrefill: worker(4, 1)}},
		{nvext: `{"agent_hints":{"priority":5,"strict_priority":4294967295,"osl":1024,"speculative_prefill":true}}`,
			want: routingHints{PriorityJump: 5, StrictPriority: 1<<32 - 1, ExpectedOutput: 1024, Prefix: PrefixHints{OSL: LevelHigh}}},
		{nvext: `{"agent_hints":{"priority":-5}}`},
		{nvext: `{"agent_hints":{"priority":995,"latency_sensitivity":2.5}}`, want: routingHints{PriorityJump: 2.5}},

		{nvext: `[]`, bad: "nvext"},
		{nvext: `{"annotations":"query_instance_id"}`, bad: "nvext.annotations"},
		{nvext: `{"annotations":["worker_instance_id:three"]}`, bad: "nvext.annotations"},
		{nvext: `{"backend_instance_id":-1}`, bad: "nvext.backend_instance_id"},
		{nvext: `{"backend_instance_id":1.5}`, bad: "nvext.backend_instance_id"},
		{nvext: `{"backend_instance_id":"1"}`, bad: "nvext.backend_instance_id"},
		{nvext: `{"backend_instance_id":1,"dp_rank":4294967296}`, bad: "nvext.dp_rank"},
		{nvext: `{"dp_rank":1}`, bad: "nvext.dp_rank"},
		{headerRank: "0", bad: headerPinnedRank},
		{headerWorker: "one", bad: headerPinnedWorker},
		{headerPrefillRank: "0", headerWorker: "1", bad: headerPrefillRank},
		{headerPrefill: "-1", bad: headerPinnedPrefill},
		{nvext: `{"prefill_worker_id":"1"}`, bad: "nvext.prefill_worker_id"},
		{nvext: `{"prefill_dp_rank":1,"decode_worker_id":1}`, bad: "nvext.prefill_dp_rank"},
		{nvext: `{"agent_hints":1}`, bad: "nvext.agent_hints"},
		{nvext: `{"agent_hints":{"priority":"high"}}`, bad: "nvext.agent_hints.priority"},
		{nvext: `{"agent_hints":{"priority":1e999}}`, bad: "nvext.agent_hints.priority"},
		{nvext: `{"agent_hints":{"strict_priority":-1}}`, bad: "nvext.agent_hints.strict_priority"},
		{nvext: `{"agent_hints":{"osl":0.5}}`, bad: "nvext.agent_hints.osl"},
	} {
		header := http.Header{}
		for name, value := range map[string]string{
			headerPinnedWorker: c.headerWorker, headerPinnedRank: c.headerRank, headerPinnedPrefill: c.headerPrefill, headerPrefillRank: c.headerPrefillRank,
		} {
			if value != "" {
				header.Set(name, value)
			}
		}
		got, bad := readHints(header, gjson.Parse(c.nvext))
		switch {
		case c.bad != "" && (bad == nil || bad.param != c.bad || !strings.Contains(bad.Error(), c.bad)):
			t.Errorf("%s %v: error %v, want one about %s", c.nvext, header, bad, c.bad)
		case c.bad == "" && (bad != nil || !reflect.DeepEqual(got, c.want)):
			t.Errorf("%s %v: %+v, %v, want %+v", c.nvext, header, got, bad, c.want)
		}
	}
}

func TestHintsReachTheRouter(t *testing.T) {
	key := WorkerKey{Worker: 3, Rank: 1}
	var request Request
	prefill := WorkerKey{Worker: 4}
	applyHints(routingHints{Query: true, Pinned: &key, PinnedPrefill: &prefill, PriorityJump: 2, StrictPriority: 3, ExpectedOutput: 4, Prefix: PrefixHints{ID: "p"}}, &request)
	if want := (Request{QueryOnly: true, Pinned: &key, PinnedPrefill: &prefill, PriorityJump: 2, StrictPriority: 3, ExpectedOutput: 4, Prefix: PrefixHints{ID: "p"}}); !reflect.DeepEqual(request, want) {
		t.Errorf("%+v", request)
	}
}

func TestPinnedWorkerIsNeverReplaced(t *testing.T) {
	answer := func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) }
	zero, one := newFakeWorker(t, answer), newFakeWorker(t, answer)
	dead := newFakeWorker(t, hangUp)
	h := newHouse(t, Config{}, zero.URL, one.URL, dead.URL)
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
		response, body := h.post(t, chatPath, c.body, c.headers...)
		if response.StatusCode != c.status || response.Header.Get(headerWorker) != c.worker {
			t.Errorf("%s %v: %s from worker %q: %s", c.body, c.headers, response.Status, response.Header.Get(headerWorker), body)
		}
		if c.status == 503 && !strings.Contains(gjson.Get(body, "error.message").Str, "no other is taken in its place") {
			t.Errorf("%v: %s", c.headers, body)
		}
	}
	if n := len(zero.received()); n != 0 {
		t.Errorf("%d requests went to a worker that none named", n)
	}
	if got := one.received(); len(got) != 4 || got[2] != `{"model":"m","messages":[],"nvext":{"backend_instance_id":1}}` {
		t.Errorf("the worker got %q", got)
	}
	if n := len(dead.received()); n != 1 {
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
			n += s.rank(target.Key).counts.promptTokens.Load()
		}
		return n
	}
	before := computed()
	_, list := post(t, s.openAI+"/tokenize", string(mustJSON(map[string]any{"messages": say(text)})))
	for _, stream := range []bool{false, true} {
		for range 4 {
			status, body := post(t, s.openAI+chatPath, string(mustJSON(map[string]any{"messages": say(text), "stream": stream,
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
