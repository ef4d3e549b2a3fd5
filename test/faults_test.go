package test

import (
	"context"
	"fmt"
	"io"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

func TestMockStopsWhenTheClientGoesAway(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 1, "--speedup-ratio=1")
	ctx, cancel := context.WithCancel(t.Context())
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.OpenAI+"/v1/chat/completions", strings.NewReader(`{"messages":[{"role":"user","content":"Hi"}],"max_tokens":5000,"ignore_eos":true,"stream":true}`))
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	io.ReadFull(response.Body, make([]byte, 100))
	w := s.Mocker.Worker(0)
	// The load is published a moment after the first token went out.
	testkit.Eventually(t, 20*time.Second, "one running request", func() bool { return w.Ranks[0].CurrentLoad().Running == 1 })
	cancel()
	response.Body.Close()
	testkit.Eventually(t, 20*time.Second, "aborted and freed", func() bool {
		return w.Ranks[0].CurrentLoad() == mocker.Load{} && w.Ranks[0].Counts.Aborted.Load() == 1 && s.InFlight() == 0
	})
}

func TestMockCrashIsARestart(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--speedup-ratio=1")
	chat := Say(strings.Repeat("to be forgotten ", 30))
	first, err := s.Chat(t.Context(), chat, false, 1)
	if err != nil {
		t.Fatal(err)
	}
	s.Settle()
	whole := make(chan Answer, 1)
	go func() {
		a, _ := s.Chat(context.Background(), chat, true, 2000)
		whole <- a
	}()
	w := s.Mocker.Worker(int(first.Worker))
	testkit.Eventually(t, 20*time.Second, "a request runs", func() bool { return w.Ranks[0].Counts.GenerationTokens.Load() > 3 })
	w.End(mocker.ErrMockCrash)
	if a := <-whole; a.Broken || !a.Finished {
		t.Errorf("the stream of a crashed worker does not go on at the other: %+v", a)
	}
	testkit.Eventually(t, 20*time.Second, "started again", func() bool { return s.Mocker.Worker(int(first.Worker)) != w })
	s.WaitReady(2, 20*time.Second)
	s.Follow()
	testkit.Eventually(t, 10*time.Second, "the index has no blocks of the dead", func() bool { return s.Blocks(kv.WorkerKey{Worker: first.Worker}) == 0 })
	for range 3 {
		if a, err := s.Chat(t.Context(), chat, false, 1); err != nil || a.Predicted != a.Cached {
			t.Error(a, err)
		}
		s.Settle()
	}
}

func TestMockErrorsAreAnswers(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--mock=error-rate=1")
	status, answer := Post(t, s.OpenAI+"/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}]}`)
	if status != 500 || !gjson.GetBytes(answer, "error.message").Exists() {
		t.Errorf("%d %s", status, answer)
	}
	if s.InFlight() != 0 {
		t.Error("still booked")
	}
}

func TestWorkerThatHangsIsATimeOut(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--request-timeout=1s", "--policy=round-robin")
	s.Mocker.Worker(1).Hung.Store(true)
	seen := map[int]int{}
	for range 4 {
		status, _ := Post(t, s.OpenAI+"/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1}`)
		seen[status]++
	}
	if seen[200] == 0 || seen[504] == 0 || len(seen) != 2 {
		t.Errorf("statuses %v, want answers and time-outs", seen)
	}
}

// TestMockHangEndsStreamsWithAnError: the write deadline that guards against a
// client that reads nothing ends with the wait for the worker, and once cut off
// the event that says what happened.
func TestMockHangEndsStreamsWithAnError(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 1, "--speedup-ratio=1", "--request-timeout=2s")
	const streams = 20
	answers := make(chan Answer, streams)
	for i := range streams {
		go func() {
			a, _ := s.Chat(context.Background(), Say(fmt.Sprint(i)), true, 1000)
			answers <- a
		}()
	}
	w := s.Mocker.Worker(0)
	testkit.Eventually(t, 20*time.Second, "all run", func() bool {
		return w.Ranks[0].CurrentLoad().Running == streams && w.Ranks[0].Counts.GenerationTokens.Load() > 2*streams
	})
	w.Hung.Store(true)
	for range streams {
		if a := <-answers; !a.Broken || a.Finished {
			t.Errorf("%+v", a)
		}
	}
	w.End(mocker.ErrMockCrash) // only that ends the hanging requests
}

// TestStartedMockWorkersThatCrashAreStartedAgain is about --mock crash-every.
func TestStartedMockWorkersThatCrashAreStartedAgain(t *testing.T) {
	t.Parallel()
	s := StartMocker(t, 2, "--speedup-ratio=1", "--policy=round-robin", "--mock=crash-every=3s", "--restart-backoff-max=1s", "--migration-limit=0")
	testkit.Eventually(t, time.Minute, "a stream breaks with its worker", func() bool {
		a, _ := s.Chat(context.Background(), Say(strings.Repeat("to be forgotten ", 30)), true, 2000)
		return a.Broken && !a.Finished
	})
	for id := range uint64(2) {
		testkit.Eventually(t, 20*time.Second, "started again", func() bool {
			w, _ := s.Record(id)
			return w.Restarts >= 1 && w.Generation == w.Restarts+1 && w.Lifecycle == selection.LifecycleSchedulable
		})
	}
}

// streamed is a request for so many tokens to a mock site, with a prompt of its
// own that fills more than a fifth of the memory below.
func streamed(s *Router, ctx context.Context, i, tokens int) (*http.Response, error) {
	prompt := strings.Repeat(fmt.Sprintf("prompt %d of many ", i), 8)
	body := fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"max_tokens":%d,"ignore_eos":true,"stream":true}`, prompt, tokens)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.OpenAI+testkit.ChatPath, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	return http.DefaultClient.Do(request)
}

// TestMockOverloadIs503 has slow workers whose memory one request fills beyond
// the threshold each.
func TestMockOverloadIs503(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--policy=kv", "--block-size=4", "--mock=num-gpu-blocks=64", "--speedup-ratio=0.01", "--active-decode-blocks-threshold=0.2")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{}, 3)
	begin := func(i int) {
		go func() {
			if response, err := streamed(s.Router, ctx, i, 8); err == nil {
				io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
			ended <- struct{}{}
		}()
		testkit.Eventually(t, 10*time.Second, "the request is on its way", func() bool { return s.InFlight() == i+1 })
	}
	begin(0)
	begin(1)
	response, err := streamed(s.Router, ctx, 2, 8)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" {
		t.Errorf("a third request: %d, Retry-After %q; want 503 and a time", response.StatusCode, response.Header.Get("Retry-After"))
	}
	if status, answer := Post(t, s.OpenAI+"/busy_threshold", fmt.Sprintf(`{"model":%q,"active_decode_blocks_threshold":1}`, mocker.ModelName)); status != http.StatusOK {
		t.Errorf("a change of the threshold: %d %s", status, answer)
	}
	begin(2)
	cancel()
	for range 3 {
		<-ended
	}
	testkit.Eventually(t, 10*time.Second, "all freed", func() bool { return s.InFlight() == 0 })
	s.wantNothingBooked()
}

func TestMockQueueServesAllInTheEnd(t *testing.T) {
	t.Parallel()
	s := StartMocker(t, 2, "--policy=kv", "--speedup-ratio=0.5", "--mock=max-num-batched-tokens=1024", "--router-queue-threshold=0", "--router-queue-policy=wspt", "--router-track-output-blocks")
	const requests = 12
	statuses := make(chan int, requests)
	for i := range requests {
		go func() {
			status := 0
			if response, err := streamed(s, t.Context(), i, 3); err == nil {
				status = response.StatusCode
				io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
			statuses <- status
		}()
	}
	testkit.Eventually(t, 10*time.Second, "some wait", func() bool { return sum(s.Metrics(), "dynamo_frontend_router_queue_pending_requests") > 0 })
	for range requests {
		if status := <-statuses; status != http.StatusOK {
			t.Errorf("status %d", status)
		}
	}
	testkit.Eventually(t, 10*time.Second, "all freed", func() bool { return s.InFlight() == 0 })
	page := s.Metrics()
	if n, tokens := sum(page, "dynamo_frontend_router_queue_pending_requests"), sum(page, "dynamo_frontend_router_queue_pending_isl_tokens"); n != 0 || tokens != 0 {
		t.Errorf("%v requests of %v tokens wait in the end", n, tokens)
	}
	s.wantNothingBooked()
}

// TestMockWorkerCanBeAttached routes to one mock worker from a second router,
// which learns its event endpoints from the worker itself.
func TestMockWorkerCanBeAttached(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 1)
	second := Start(t, "--engine=none", "--worker=url="+s.URL(0))
	testkit.Eventually(t, 20*time.Second, "events followed", func() bool {
		return second.Gauge("kvrouter_kv_events_connected", kv.WorkerKey{}) == 1 && s.Rank(kv.WorkerKey{}).Events.Pub.Subscribers() == 2
	})
	chat := Say(strings.Repeat("seen by both ", 30))
	if _, err := s.Chat(t.Context(), chat, false, 1); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 20*time.Second, "the second router knows the blocks", func() bool { return second.Blocks(kv.WorkerKey{}) > 0 })
	if a, err := second.Chat(t.Context(), chat, false, 1); err != nil || a.Predicted != a.Cached || a.Cached == 0 {
		t.Error(a, err)
	}
}

// wantNothingBooked wants the router to count nothing for any worker.
func (r *Router) wantNothingBooked() {
	r.T.Helper()
	for _, group := range gjson.ParseBytes(r.Get(r.Port + "/loads")).Array() {
		for _, load := range group.Get("loads").Array() {
			for _, field := range []string{"potential_prefill_tokens", "potential_decode_blocks", "active_requests"} {
				if n := load.Get(field); n.Int() != 0 || !n.Exists() {
					r.T.Errorf("%s in the end: %s", field, load.Raw)
				}
			}
		}
		if group.Get("pending_count").Int() != 0 || group.Get("pending_isl_tokens").Int() != 0 {
			r.T.Errorf("some wait in the end: %s", group.Raw)
		}
	}
}
