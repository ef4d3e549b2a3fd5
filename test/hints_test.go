package test

import (
	"encoding/json"
	"fmt"
	"io"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

func TestDryRunChangesNothing(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--policy=kv", "--send-tokens=never")
	text := strings.Repeat("who would serve this ", 30)
	warm, err := s.Chat(t.Context(), Say(text), false, 1)
	if err != nil {
		t.Fatal(err)
	}
	s.Settle()
	computed := func() (n int64) {
		for _, key := range s.Keys() {
			n += s.Rank(key).Counts.PromptTokens.Load()
		}
		return n
	}
	before := computed()
	_, list := Post(t, s.OpenAI+"/tokenize", string(mocker.MustJSON(map[string]any{"messages": Say(text)})))
	for _, stream := range []bool{false, true} {
		for range 4 {
			status, body := Post(t, s.OpenAI+testkit.ChatPath, string(mocker.MustJSON(map[string]any{"messages": Say(text), "stream": stream,
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
			if status != 200 || nvext.Get("worker_instance_id").Uint() != warm.Worker || nvext.Get("worker_id.decode_worker_id").Uint() != warm.Worker ||
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
	s.wantNothingBooked()
	// A dry run for one worker speaks of that one.
	other := 1 - warm.Worker
	_, body := Post(t, s.OpenAI+completionsPath, fmt.Sprintf(`{"prompt":"Hi","nvext":{"annotations":["query_instance_id"],"backend_instance_id":%d}}`, other))
	if nvext := gjson.GetBytes(body, "nvext"); nvext.Get("worker_instance_id").Uint() != other || nvext.Get("token_data").Raw != "[72,105]" || gjson.GetBytes(body, "object").Str != "text_completion" {
		t.Errorf("%s", body)
	}
}

// TestExpectedLengthDecaysWhatAnAnswerHolds sends two blocks of prompt, of which
// the worker streams 65 tokens and then waits: the answer is in its second
// block, and when that began, all four blocks were weighed by what was still to
// come.
func TestExpectedLengthDecaysWhatAnAnswerHolds(t *testing.T) {
	t.Parallel()
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
	t.Cleanup(worker.Close)
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
			s := Start(t, "--engine=none", "--policy=kv", "--drain-timeout=1s", "--worker="+worker.URL, c.flag)
			s.WaitReady(1, 10*time.Second)
			done := make(chan string, 1)
			go func() {
				response, err := http.Post(s.OpenAI+completionsPath, "application/json", strings.NewReader(fmt.Sprintf(`{"model":"m","prompt":%s,"stream":true%s}`, prompt, c.nvext)))
				if err != nil {
					done <- err.Error()
					return
				}
				defer response.Body.Close()
				body, _ := io.ReadAll(response.Body)
				done <- string(body)
			}()
			blocks := func() int {
				return int(sum(s.Metrics(), "dynamo_frontend_worker_active_decode_blocks"))
			}
			testkit.Eventually(t, 10*time.Second, fmt.Sprintf("%d blocks in use", c.want), func() bool {
				w, _ := s.Record(0)
				return w.InFlight == 1 && w.PrefillTokens == 0 && blocks() == c.want
			})
			proceed <- struct{}{}
			if body := <-done; !strings.HasSuffix(body, "[DONE]\n\n") {
				t.Errorf("%.300s", body)
			}
			testkit.Eventually(t, 10*time.Second, "nothing in use", func() bool { return s.InFlight() == 0 && blocks() == 0 })
		})
	}
}
