package vllm

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// rollouts sends trajectories in tokens, of which a worker's cache holds a part, under the salts of two versions, and
// compares each prediction with what the engine found. Then it pauses the engine while requests wait.
func rollouts(t *testing.T, worker string) {
	const requests, waiting, resets, burst = 100, 50, 8, 10
	s := test.Start(t, "--engine=none", "--model="+test.ModelFolder(), "--worker=url="+worker, "--decision-headers", "--rollouts")
	s.WaitReady(1, time.Minute)
	random := rand.New(rand.NewPCG(7, 7))
	version := "" // of the weights, as the last answer has it
	generateMore := func(ids []string, n, tokens int, salt string) (answer gjson.Result, predicted int64) {
		body := fmt.Sprintf(`{"token_ids":[%s],"cache_salt":%q,"sampling_params":{"n":%d,"max_tokens":%d,"ignore_eos":true,"logprobs":0}}`, strings.Join(ids, ","), salt, n, tokens)
		response, err := http.Post(s.OpenAI+"/inference/v1/generate", "application/json", strings.NewReader(body))
		if err != nil {
			t.Error(err)
			return answer, 0
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != http.StatusOK {
			t.Errorf("%s %s %v", response.Status, text, err)
		}
		predicted, _ = strconv.ParseInt(response.Header.Get(web.HeaderOverlap), 10, 64)
		if n == 1 && tokens == 4 && len(ids) == 5 {
			version = response.Header.Get(proxy.HeaderVersion)
		}
		return gjson.ParseBytes(text), predicted
	}
	generate := func(ids []string, n int, salt string) (answer gjson.Result, predicted int64) {
		return generateMore(ids, n, 4, salt)
	}
	trajectories := make([][]string, 6)
	var wrong []string
	found := 0
	for i := range requests {
		at := random.IntN(len(trajectories))
		for range 20 + random.IntN(60) { // what the environment says
			trajectories[at] = append(trajectories[at], strconv.Itoa(100+random.IntN(5000)))
		}
		n, salt := 1+i%5/4, fmt.Sprint("m-", 1+2*i/requests)
		answer, predicted := generate(trajectories[at], n, salt)
		cached := answer.Get("usage.prompt_tokens_details.cached_tokens").Int()
		if n == 1 && predicted != cached { // of several answers the engine counts the last, which finds what the first has computed
			wrong = append(wrong, fmt.Sprintf("request %d, n=%d: predicted %d, cached %d of %d", i, n, predicted, cached, len(trajectories[at])))
		}
		if cached > 0 {
			found++
		}
		for _, id := range answer.Get("choices.0.token_ids").Array() {
			trajectories[at] = append(trajectories[at], id.Raw)
		}
		if len(trajectories[at]) > 1200 {
			trajectories[at] = nil
		}
		s.Calm(100 * time.Millisecond)
	}
	if len(wrong) > 0 || found < requests/4 {
		t.Errorf("%d of %d predictions are wrong, %d found something:\n%s", len(wrong), requests, found, strings.Join(wrong, "\n"))
	}

	control := func(at, path, body string) {
		t.Helper()
		response, err := http.Post(at+path, "application/json", strings.NewReader(body))
		if err != nil || response.StatusCode != http.StatusOK {
			t.Fatalf("%s: %v %v", path, response, err)
		}
		response.Body.Close()
	}

	// Resets beside requests that run: of each burst after one, no prompt is expected in the cache, nor found there.
	prompts := make([][]string, burst)
	for i := range prompts {
		for at := range 130 {
			prompts[i] = append(prompts[i], strconv.Itoa(100+131*i+at))
		}
	}
	var exact atomic.Int64
	for range resets {
		var running, together sync.WaitGroup
		for i := range 2 {
			running.Go(func() { generateMore([]string{"1", "2", strconv.Itoa(9 + i)}, 1, 40, "m-3") })
		}
		control(s.OpenAI, "/reset_prefix_cache?reset_running_requests=true", "")
		for i := range prompts {
			together.Go(func() {
				answer, predicted := generateMore(prompts[i], 1, 2, "m-3")
				if cached := answer.Get("usage.prompt_tokens_details.cached_tokens").Int(); cached == predicted {
					exact.Add(1)
				} else {
					t.Logf("prompt %d after a reset: predicted %d, cached %d", i, predicted, cached)
				}
			})
		}
		together.Wait()
		running.Wait()
		s.Calm(100 * time.Millisecond)
		if _, predicted := generateMore(prompts[0], 1, 2, "m-3"); predicted == 0 {
			t.Error("what a burst has left is not known")
		}
		s.Calm(100 * time.Millisecond)
	}
	if exact.Load() != resets*burst {
		t.Errorf("%d of %d predictions after resets are exact", exact.Load(), resets*burst)
	}

	control(s.OpenAI, "/update_weight_version", `{"new_version":"17"}`)
	if generate([]string{"7", "7", "7", "7", "7"}, 1, "m-3"); version != "17" {
		t.Errorf("version %q, want 17", version)
	}
	control(worker, "/update_weight_version", `{"new_version":"18"}`) // not through the router
	testkit.Eventually(t, 20*time.Second, "a version that the engine reports", func() bool {
		generate([]string{"7", "7", "7", "7", "7"}, 1, "m-3")
		return version == "18"
	})

	control(worker, "/pause?mode=keep&clear_cache=false", "") // not through the router, either
	var answers sync.WaitGroup
	for i := range waiting {
		answers.Go(func() {
			if answer, _ := generate([]string{"1", strconv.Itoa(200 + i), "3"}, 1, "m-2"); len(answer.Get("choices.0.token_ids").Array()) != 4 {
				t.Errorf("request %d: %s", i, answer.Raw)
			}
		})
	}
	testkit.Eventually(t, 30*time.Second, "all wait, in the engine or in the router", func() bool {
		page := s.Get(s.OpenAI + "/metrics")
		return test.SumOf(page, "kvrouter_worker_in_flight")+test.SumOf(page, "kvrouter_model_queued_requests") == waiting
	})
	control(s.OpenAI, "/resume", "")
	answers.Wait()
}
