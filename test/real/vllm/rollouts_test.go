package vllm

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// rollouts sends trajectories in tokens, of which a worker's cache holds a part, under the salts of two versions, and
// compares each prediction with what the engine found. Then it pauses the engine while requests wait.
func rollouts(t *testing.T, worker string) {
	const requests, waiting = 100, 50
	s := test.Start(t, "--engine=none", "--model="+test.ModelFolder(), "--worker=url="+worker, "--decision-headers")
	s.WaitReady(1, time.Minute)
	random := rand.New(rand.NewPCG(7, 7))
	generate := func(ids []string, n int, salt string) (answer gjson.Result, predicted int64) {
		body := fmt.Sprintf(`{"token_ids":[%s],"cache_salt":%q,"sampling_params":{"n":%d,"max_tokens":4,"ignore_eos":true,"logprobs":0}}`, strings.Join(ids, ","), salt, n)
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
		return gjson.ParseBytes(text), predicted
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

	control := func(path string) {
		t.Helper()
		response, err := http.Post(worker+path, "", nil)
		if err != nil || response.StatusCode != http.StatusOK {
			t.Fatalf("%s: %v %v", path, response, err)
		}
		response.Body.Close()
	}
	control("/pause?mode=keep&clear_cache=false")
	var answers sync.WaitGroup
	for i := range waiting {
		answers.Go(func() {
			if answer, _ := generate([]string{"1", strconv.Itoa(200 + i), "3"}, 1, "m-2"); len(answer.Get("choices.0.token_ids").Array()) != 4 {
				t.Errorf("request %d: %s", i, answer.Raw)
			}
		})
	}
	testkit.Eventually(t, 30*time.Second, "all are with the router", func() bool {
		return test.SumOf(s.Get(s.OpenAI+"/metrics"), "kvrouter_worker_in_flight") == waiting
	})
	control("/resume")
	answers.Wait()
}
