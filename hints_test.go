package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/hints"
	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/policy"
	"kvrouter/internal/router"
	"kvrouter/internal/simulate"
	"kvrouter/internal/testkit"
)

func TestDryRunChangesNothing(t *testing.T) {
	s := startMockSite(t, 2, "--policy=kv")
	text := strings.Repeat("who would serve this ", 30)
	warm, err := s.chat(t.Context(), say(text), false, 1)
	if err != nil {
		t.Fatal(err)
	}
	s.settle()
	computed := func() (n int64) {
		for _, target := range s.app.router.Targets() {
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
	for _, load := range s.app.router.Loads() {
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

// TestExpectedLengthDecaysWhatAnAnswerHolds sends two blocks of prompt, of which
// the worker streams 65 tokens and then waits: the answer is in its second
// block, and when that began, all four blocks were weighed by what was still to
// come.
func TestExpectedLengthDecaysWhatAnAnswerHolds(t *testing.T) {
	proceed := make(chan struct{})
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/health":
		case "/v1/models":
			io.WriteString(w, `{"data":[{"id":"m"}]}`)
		case "/v1/completions":
			w.Header().Set("Content-Type", "text/event-stream")
			for range 65 {
				io.WriteString(w, `data: {"choices":[{"index":0,"text":"x"}]}`+"\n\n")
			}
			w.(http.Flusher).Flush()
			select {
			case <-proceed:
			case <-r.Context().Done():
			}
			io.WriteString(w, "data: [DONE]\n\n")
		default:
			http.NotFound(w, r)
		}
	}))
	defer worker.Close()
	prompt, err := json.Marshal(testkit.Tokens(1, 128))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		flag, nvext string
		want        int
	}{
		{"--router-track-output-blocks", ``, 4},
		{"--router-track-output-blocks", `,"nvext":{"agent_hints":{"osl":1000}}`, 4}, // 4 of 0.935
		{"--router-track-output-blocks", `,"nvext":{"agent_hints":{"osl":130}}`, 2},  // 4 of 0.5
		{"--router-track-output-blocks", `,"nvext":{"agent_hints":{"osl":65}}`, 0},
		{"--router-track-output-blocks", `,"nvext":{"agent_hints":{"osl":10}}`, 0},
		{"--no-router-track-output-blocks", `,"nvext":{"agent_hints":{"osl":10}}`, 2},
	} {
		t.Run(c.flag+c.nvext, func(t *testing.T) {
			s := startApp(t, testkit.FreePorts(t, 2), "--engine=none", "--policy=kv", "--drain-timeout=1s", "--worker="+worker.URL, c.flag)
			testkit.Eventually(t, 10*time.Second, "the worker is up", func() bool { return len(s.app.router.Targets()) == 1 })
			done := make(chan string, 1)
			go func() {
				response, err := http.Post(s.openAI+completionsPath, "application/json", strings.NewReader(fmt.Sprintf(`{"model":"m","prompt":%s,"stream":true%s}`, prompt, c.nvext)))
				if err != nil {
					done <- err.Error()
					return
				}
				defer response.Body.Close()
				body, _ := io.ReadAll(response.Body)
				done <- string(body)
			}()
			load := func() policy.Load { return s.app.router.Load(kv.WorkerKey{}) }
			testkit.Eventually(t, 10*time.Second, fmt.Sprintf("%d blocks in use", c.want), func() bool {
				l := load()
				return l.InFlight == 1 && l.PrefillTokens == 0 && l.ActiveBlocks == c.want
			})
			proceed <- struct{}{}
			if body := <-done; !strings.HasSuffix(body, "[DONE]\n\n") {
				t.Errorf("%.300s", body)
			}
			testkit.Eventually(t, 10*time.Second, "nothing in use", func() bool { return load().InFlight == 0 && load().ActiveBlocks == 0 })
		})
	}
}

// TestTokenDataMisleadsNobody sends tokens of one prompt beside the text of
// another: the text is what the worker computes, and what counts.
func TestTokenDataMisleadsNobody(t *testing.T) {
	for _, flag := range []string{"--router-predicted-ttl-secs=60", "--no-kv-events"} {
		t.Run(flag, func(t *testing.T) {
			s := startMockSite(t, 2, "--policy=kv", flag)
			warm, cold := strings.Repeat("a prompt that is known ", 20), strings.Repeat("another one of that kind ", 20)
			first, err := s.chat(t.Context(), say(warm), false, 1)
			if err != nil {
				t.Fatal(err)
			}
			s.settle()
			_, dry := post(t, s.openAI+testkit.ChatPath, string(mocker.MustJSON(map[string]any{"messages": say(warm), "nvext": map[string]any{"annotations": []string{"query_instance_id"}}})))
			tokens := gjson.GetBytes(dry, "nvext.token_data")
			if len(tokens.Array()) != first.prompt {
				t.Fatalf("%.300s", dry)
			}
			for i, text := range []string{cold, cold, warm} {
				nvext := map[string]any{"backend_instance_id": first.worker, "token_data": json.RawMessage(tokens.Raw)}
				answer, predicted := s.ask(t, mocker.MustJSON(map[string]any{"messages": say(text), "max_tokens": 1, "nvext": nvext}))
				if cached := answer.Get("usage.prompt_tokens_details.cached_tokens").Int(); predicted != cached || (cached > 0) != (i > 0) {
					t.Errorf("request %d: %d cached, %d predicted", i, cached, predicted)
				}
				s.settle()
			}
		})
	}
}

func TestOverridesOfASelectionAreChecked(t *testing.T) {
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
			got := ask(t, s.selection, "POST", route.path, query)
			if says := got.Get("error").String(); got.status != 422 || !strings.Contains(says, c.field) || !strings.Contains(says, c.says) {
				t.Errorf("%s %s %v: %d %s", route.path, c.field, c.value, got.status, got.Raw)
			}
		}
	}
	s.want("GET", "/loads", nil, 200, "0.loads.0.active_requests 0")
}

func TestHintsOfARequestAreRecorded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "recording.jsonl")
	s := startMockSite(t, 1, "--record="+file)
	s.ask(t, []byte(`{"max_tokens":2,"messages":[{"role":"user","content":"hi"}],
		"nvext":{"agent_hints":{"prefix_id":"bob","total_requests":7,"osl":2000,"iat":50}}}`))
	if err := s.end(); err != nil {
		t.Fatal(err)
	}
	requests, err := simulate.ReadTrace(file)
	if err != nil || len(requests) != 1 {
		t.Fatal(requests, err)
	}
	hinted := requests[0].Hints
	if want := (hints.Prefix{ID: hinted.ID, Total: 7, OSL: hints.LevelHigh, IAT: hints.LevelLow}); hinted != want || hinted.ID == "" || hinted.ID == "bob" {
		t.Errorf("hints %+v", hinted)
	}
}
