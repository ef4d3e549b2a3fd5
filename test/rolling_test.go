package test

import (
	"bufio"
	"cmp"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/serve/page"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
)

// rollingDecode is the time between the tokens of the answers that outlive all their workers.
const rollingDecode = 40 * time.Millisecond

// TestRollingRestartLosesNoLongAnswer drains and restarts four workers one after the other
// under answers that run all the time: of 20 s and more, or of KVROUTER_ROLLING (such as 10m).
func TestRollingRestartLosesNoLongAnswer(t *testing.T) {
	t.Parallel()
	lasts, err := time.ParseDuration(cmp.Or(os.Getenv("KVROUTER_ROLLING"), "20s"))
	if err != nil {
		t.Fatalf("KVROUTER_ROLLING: %v", err)
	}
	const workers, streams = 4, 12
	rollingTokens := int(lasts / rollingDecode)
	s := StartMocks(t, workers, "--router-api-key="+pageKey, "--drain-migrate-after=1s", "--speedup-ratio=1", fmt.Sprintf("--mock=decode-ms=%d,0,0", rollingDecode.Milliseconds()))
	v := look(t, s.Port)
	judge := StartWorkers(t, 1, "--speedup-ratio=1000") // which answers the same at once
	answers := make([][]uint32, streams)
	prompts := make([][]uint32, streams)
	var running sync.WaitGroup
	begun := make(chan struct{}, streams)
	for i := range streams {
		running.Go(func() {
			body := fmt.Sprintf(`{"messages":[{"role":"user","content":"story %d"}],"stream":true,"max_tokens":%d,"ignore_eos":true,"return_token_ids":true,"stream_options":{"include_usage":true}}`, i, rollingTokens)
			response, err := http.Post(s.OpenAI+testkit.ChatPath, "application/json", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				begun <- struct{}{}
				return
			}
			defer response.Body.Close()
			finish, ended, output := "", false, 0
			lines := bufio.NewScanner(response.Body)
			for lines.Scan() {
				data, _ := strings.CutPrefix(lines.Text(), "data: ")
				event := gjson.Parse(data)
				for _, id := range event.Get("prompt_token_ids").Array() {
					prompts[i] = append(prompts[i], uint32(id.Uint()))
				}
				for _, id := range event.Get("choices.0.token_ids").Array() {
					if answers[i] = append(answers[i], uint32(id.Uint())); len(answers[i]) == 1 {
						begun <- struct{}{}
					}
				}
				if event.Get("error").Exists() {
					t.Errorf("stream %d: %s", i, data)
				}
				finish += event.Get("choices.0.finish_reason").Str
				ended = ended || data == "[DONE]"
				if usage := proxy.ReadUsage([]byte(data)); usage.Known {
					output = usage.OutputTokens
				}
			}
			if finish != "length" || !ended || output != rollingTokens || len(answers[i]) != rollingTokens {
				t.Errorf("stream %d: finish reason %q, ended %v, %d tokens, usage of %d", i, finish, ended, len(answers[i]), output)
			}
		})
	}
	for range streams {
		<-begun
	}
	for i := range workers {
		act := func(action string) {
			if response, answer := v.send("POST", fmt.Sprintf("/ui/workers/%d/%s", i, action), ""); response.StatusCode != http.StatusNoContent {
				t.Fatalf("%s: %s %s", action, response.Status, answer)
			}
		}
		act("drain")
		began := time.Now()
		testkit.Eventually(t, 10*time.Second, fmt.Sprintf("worker %d is drained", i), func() bool {
			record, ok := s.Record(uint64(i))
			return ok && record.InFlight == 0
		})
		t.Logf("worker %d drained in %.1f s", i, time.Since(began).Seconds())
		before := s.Worker(i)
		before.End(errStopped)
		testkit.Eventually(t, 20*time.Second, "it is started again", func() bool { return s.Worker(i) != before })
		act("readmit")
		v.until("it is ready", func(state *page.State) bool { return state.Workers[i].State == page.StateReady })
	}
	running.Wait()
	for i := range answers {
		if !judge.answered(prompts[i], answers[i]) {
			t.Errorf("stream %d has tokens that no worker answers after those before them", i)
		}
	}
	moved := s.Metrics()[`kvrouter_migrations_total{result="ok"}`]
	t.Logf("%v streams went on at other workers", moved)
	if moved < streams/2 {
		t.Error("too few streams outlived their workers")
	}
	for name, n := range s.Metrics() {
		if strings.HasPrefix(name, `kvrouter_predictions_total{result="over"`) && n > 0 {
			t.Errorf("%s %v", name, n)
		}
	}
}

// answered reports whether workers, one after the other, answer a prompt with those tokens.
func (w *Workers) answered(prompt, answer []uint32) bool {
	if len(answer) == 0 {
		return true
	}
	body := mocker.MustJSON(map[string]any{"prompt": prompt, "max_tokens": len(answer), "ignore_eos": true, "return_token_ids": true})
	_, text := Post(w.t, w.URL(0)+"/v1/completions", string(body))
	same := 0
	for _, id := range gjson.GetBytes(text, "choices.0.token_ids").Array() {
		if same == len(answer) || uint32(id.Uint()) != answer[same] {
			break
		}
		same++
	}
	// The next worker's first tokens may be those that the last one would have made, too.
	for cut := same; cut > max(0, same-12); cut-- {
		if w.answered(append(append([]uint32{}, prompt...), answer[:cut]...), answer[cut:]) {
			return true
		}
	}
	return false
}
