package test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

// tokensIn is a request with length tokens that begin with one of several beginnings.
func tokensIn(begins, length, more int, rest string) string {
	ids := make([]string, length)
	for i := range ids {
		ids[i] = strconv.Itoa(1000*begins + i)
	}
	return fmt.Sprintf(`{"token_ids":[%s],"sampling_params":{"max_tokens":%d,"ignore_eos":true}%s}`, strings.Join(ids, ","), more, rest)
}

// answered is what came of a request.
type answered struct {
	status int
	answer gjson.Result
	header http.Header
}

func (a *answered) cached() int64 {
	return a.answer.Get("usage.prompt_tokens_details.cached_tokens").Int()
}

func (a *answered) predicted() int64 {
	n, _ := strconv.ParseInt(a.header.Get(web.HeaderOverlap), 10, 64)
	return n
}

// trainingStep is a trainer with a router over mock workers.
type trainingStep struct {
	*Mocks
	trainer
}

func startTraining(t *testing.T, workers int, args ...string) *trainingStep {
	s := StartMocks(t, workers, append([]string{"--policy=work", "--block-size=16", "--decision-headers", "--rollouts"}, args...)...)
	return &trainingStep{s, trainer{T: t}}
}

// sends sends a request with headers, each as "name: value".
func (r *trainingStep) sends(ctx context.Context, url, body string, headers ...string) (a answered) {
	r.trainer.Helper()
	request, err := http.NewRequestWithContext(ctx, "POST", url, strings.NewReader(body))
	if err != nil {
		r.trainer.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	for _, header := range headers {
		name, value, _ := strings.Cut(header, ": ")
		request.Header.Set(name, value)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		r.trainer.Error(err)
		return a
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		r.trainer.Error(err)
	}
	return answered{response.StatusCode, gjson.ParseBytes(text), response.Header}
}

// generates is sends to the router's route for tokens.
func (r *trainingStep) generates(body string, headers ...string) answered {
	r.trainer.Helper()
	return r.sends(r.trainer.Context(), r.OpenAI+"/inference/v1/generate", body, headers...)
}

// later is generates beside the test.
func (r *trainingStep) later(body string, headers ...string) <-chan answered {
	answers := make(chan answered, 1)
	go func() { answers <- r.generates(body, headers...) }()
	return answers
}

// state waits until the router shows a worker in that state.
func (r *trainingStep) state(worker int, want string) {
	r.trainer.Helper()
	testkit.Eventually(r.trainer.T, 20*time.Second, fmt.Sprintf("worker %d is %s", worker, want), func() bool {
		return r.trainer.gets(http.StatusOK, "GET", fmt.Sprintf("%s/workers/%d", r.OpenAI, worker), "").Get("engine_state").Str == want
	})
}

// queued waits until so many requests wait in the router.
func (r *trainingStep) queued(want int) {
	r.trainer.Helper()
	testkit.Eventually(r.trainer.T, 20*time.Second, fmt.Sprintf("%d requests wait in the router", want), func() bool {
		return int(SumOf(r.Get(r.OpenAI+"/metrics"), "kvrouter_model_queued_requests")) == want
	})
}

// TestPausesAreSeenAtTheEngines: a trainer pauses the engines itself. Requests go to those that run, or wait.
func TestPausesAreSeenAtTheEngines(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ flag, pause, resume, body string }{
		"vllm":        {"--mock=api=vllm", "/pause?mode=keep", "/resume", ""},
		"vllm asleep": {"--mock=api=vllm", "/sleep", "/wake_up", ""},
		"sglang":      {"--mock=api=sglang", "/pause_generation", "/continue_generation", "{}"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startTraining(t, 2, c.flag)
			want := "paused"
			if name == "vllm asleep" {
				want = "asleep"
			}
			send := func(headers ...string) answered {
				if strings.Contains(c.flag, "sglang") {
					return r.sends(t.Context(), r.OpenAI+"/v1/completions", `{"prompt":"a prompt of a few words","max_tokens":4}`, headers...)
				}
				return r.generates(tokensIn(1, 100, 4, ""), headers...)
			}
			r.trainer.gets(http.StatusOK, "POST", r.URL(0)+c.pause, c.body)
			r.state(0, want)
			for range 6 {
				if a := send(); a.status != http.StatusOK || a.header.Get(web.HeaderWorker) != "1" {
					t.Fatalf("%d by worker %s: %s", a.status, a.header.Get(web.HeaderWorker), a.answer.Raw)
				}
			}
			r.trainer.gets(http.StatusOK, "POST", r.URL(1)+c.pause, c.body)
			r.state(1, want)
			answers := make(chan answered, 3)
			for range cap(answers) {
				go func() { answers <- send() }()
			}
			r.queued(cap(answers))
			r.trainer.gets(http.StatusOK, "POST", r.URL(0)+c.resume, c.body)
			for range cap(answers) {
				if a := <-answers; a.status != http.StatusOK || a.header.Get(web.HeaderWorker) != "0" {
					t.Errorf("%d by worker %s: %s", a.status, a.header.Get(web.HeaderWorker), a.answer.Raw)
				}
			}
		})
	}
}

// TestARequestWaitsForThePausedWorkerThatHasItsPrompt if its client wants that.
func TestARequestWaitsForThePausedWorkerThatHasItsPrompt(t *testing.T) {
	t.Parallel()
	r := startTraining(t, 2)
	first := r.generates(tokensIn(1, 200, 4, ""))
	r.Settle()
	holder := first.header.Get(web.HeaderWorker)
	control := func(path string) {
		t.Helper()
		if a := r.sends(t.Context(), r.OpenAI+path, "", "X-Kvrouter-Workers: "+holder); a.status != http.StatusOK {
			t.Fatalf("%s: %d %s", path, a.status, a.answer.Raw)
		}
	}
	control("/pause?mode=keep&clear_cache=false")
	waits := r.later(tokensIn(1, 200, 4, ""), "X-Kvrouter-Paused: wait")
	r.queued(1)
	if a := r.generates(tokensIn(1, 200, 4, "")); a.status != http.StatusOK || a.header.Get(web.HeaderWorker) == holder {
		t.Errorf("%d by worker %s, which is paused", a.status, holder)
	}
	control("/resume")
	if a := <-waits; a.header.Get(web.HeaderWorker) != holder || a.cached() == 0 || a.cached() != a.predicted() {
		t.Errorf("%d by worker %s, want %s: %d cached, %d predicted", a.status, a.header.Get(web.HeaderWorker), holder, a.cached(), a.predicted())
	}
	if a := r.generates(tokensIn(1, 20, 1, ""), "X-Kvrouter-Paused: perhaps"); a.status != http.StatusBadRequest {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
}

// TestAPauseIsNoSilence: what runs on a paused worker goes on afterwards, though the pause is longer than all limits.
func TestAPauseIsNoSilence(t *testing.T) {
	t.Parallel()
	r := startTraining(t, 2, "--silence-timeout=1s", "--request-timeout=2s")
	running := []<-chan answered{r.later(tokensIn(1, 100, 400, "")), r.later(tokensIn(2, 100, 400, `,"stream":true`))}
	testkit.Eventually(t, 20*time.Second, "two run", func() bool {
		return SumOf(r.Get(r.OpenAI+"/metrics"), "kvrouter_worker_in_flight") == 2
	})
	r.trainer.gets(http.StatusOK, "POST", r.OpenAI+"/pause?mode=keep&clear_cache=false", "")
	over := time.Now().Add(5 * time.Second)
	testkit.Eventually(t, 20*time.Second, "a long pause", func() bool { return time.Now().After(over) })
	r.trainer.gets(http.StatusOK, "POST", r.OpenAI+"/resume", "")
	for i, answers := range running {
		if a := <-answers; a.status != http.StatusOK || i == 0 && len(a.answer.Get("choices.0.token_ids").Array()) != 400 {
			t.Errorf("request %d: %d %.300s", i, a.status, a.answer.Raw)
		}
	}
	for line, value := range r.Metrics() {
		if strings.HasPrefix(line, "kvrouter_ejections_total") && value > 0 {
			t.Errorf("%s %v", line, value)
		}
	}
}

// TestAResetIsKnownAtOnce: the first requests after a reset that passes the router, or in a pause with clearing, are
// predicted as the engine finds them, before any of its events has told.
func TestAResetIsKnownAtOnce(t *testing.T) {
	t.Parallel()
	for name, calls := range map[string][]string{
		"reset": {"/reset_prefix_cache"}, "pause": {"/pause?mode=keep", "/resume"}, "sleep": {"/sleep", "/wake_up"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := startTraining(t, 2)
			for round := range 10 {
				for begins := range 4 {
					a := r.generates(tokensIn(begins, 100, 4, ""))
					if r.Calm(50 * time.Millisecond); a.cached() != a.predicted() {
						t.Errorf("round %d: %d cached, %d predicted", round, a.cached(), a.predicted())
					}
				}
				for _, call := range calls {
					r.trainer.gets(http.StatusOK, "POST", r.OpenAI+call, "")
				}
				first := r.generates(tokensIn(round%4, 100, 4, ""))
				if first.cached() != 0 || first.predicted() != 0 {
					t.Errorf("round %d, first after %s: %d cached, %d predicted", round, name, first.cached(), first.predicted())
				}
				r.Calm(50 * time.Millisecond)
			}
		})
	}
}

// TestRequestsTakeTheVersionsThatTheyWant has two workers with weights of two versions.
func TestRequestsTakeTheVersionsThatTheyWant(t *testing.T) {
	t.Parallel()
	r := startTraining(t, 2)
	update := func(worker, version string) {
		t.Helper()
		body := fmt.Sprintf(`{"new_version":%q}`, version)
		if a := r.sends(t.Context(), r.OpenAI+"/update_weight_version", body, "X-Kvrouter-Workers: "+worker); a.status != http.StatusOK {
			t.Fatalf("%d %s", a.status, a.answer.Raw)
		}
	}
	update("0", "17")
	update("1", "18")
	for policy, want := range map[string]string{"latest-only": "1", "min-version:18": "1", "max-staleness:0": "1"} {
		for i := range 6 {
			a := r.generates(tokensIn(i, 100, 2, ""), "X-SMG-Version-Policy: "+policy)
			if a.header.Get(web.HeaderWorker) != want || a.header.Get(proxy.HeaderVersion) != "18" {
				t.Errorf("%s: worker %s, version %s", policy, a.header.Get(web.HeaderWorker), a.header.Get(proxy.HeaderVersion))
			}
		}
	}
	served := map[string]bool{}
	for i := range 12 {
		served[r.generates(tokensIn(20+i, 100, 2, ""), "X-SMG-Version-Policy: max-staleness:1").header.Get(web.HeaderWorker)] = true
	}
	if len(served) != 2 {
		t.Errorf("max-staleness:1: only %v", served)
	}
	waits := r.later(tokensIn(3, 100, 2, ""), "X-SMG-Version-Policy: min-version:19")
	r.queued(1)
	update("0", "19")
	if a := <-waits; a.status != http.StatusOK || a.header.Get(web.HeaderWorker) != "0" {
		t.Errorf("%d by worker %s", a.status, a.header.Get(web.HeaderWorker))
	}
	if a := r.generates(tokensIn(1, 20, 1, ""), "X-SMG-Version-Policy: newest"); a.status != http.StatusBadRequest {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
}

// TestACallReachesTheNamedWorkersOnce: all or those that it names, with a result for each, 207 where some fail, and
// once if it has a name.
func TestACallReachesTheNamedWorkersOnce(t *testing.T) {
	t.Parallel()
	r := startTraining(t, 3)
	call := func(path string, headers ...string) answered {
		return r.sends(t.Context(), r.OpenAI+path, "", headers...)
	}
	if a := call("/reset_prefix_cache"); a.status != http.StatusOK || len(a.answer.Array()) != 3 {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
	if a := call("/reset_prefix_cache", "X-Kvrouter-Workers: 2, 0"); a.answer.Get("#.worker_id").Raw != "[0,2]" {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
	if a := call("/reset_prefix_cache", "X-Kvrouter-Workers: "); a.status != http.StatusNotFound {
		t.Errorf("no name: %d %s", a.status, a.answer.Raw)
	}
	if a := call("/%70ause?mode=keep", "X-Kvrouter-Rolling: 1"); a.status != http.StatusOK {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
	for i := range 3 { // at once, without a question to the engines
		if got := r.trainer.gets(http.StatusOK, "GET", fmt.Sprintf("%s/workers/%d", r.OpenAI, i), "").Get("engine_state").Str; got != "paused" {
			t.Errorf("worker %d is %s after a rolling pause", i, got)
		}
	}
	call("/resume")
	if a := call("/reset_prefix_cache", "X-Kvrouter-Workers: 7"); a.status != http.StatusNotFound {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
	if a := call("/reset_prefix_cache", "X-Kvrouter-Rolling: 0"); a.status != http.StatusBadRequest {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
	if a := call("/reset_prefix_cache", "X-Kvrouter-Rolling: 1"); a.status != http.StatusOK || len(a.answer.Array()) != 3 {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
	busy := r.later(tokensIn(1, 100, 400, ""))
	testkit.Eventually(t, 20*time.Second, "one runs", func() bool {
		return SumOf(r.Get(r.OpenAI+"/metrics"), "kvrouter_worker_in_flight") == 1
	})
	if a := call("/reset_prefix_cache"); a.status != http.StatusMultiStatus || len(a.answer.Get("#(answer.success==false)#").Array()) != 1 {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
	<-busy

	version := func(id, version string) answered {
		return r.sends(t.Context(), r.OpenAI+"/update_weight_version", fmt.Sprintf(`{"new_version":%q}`, version), "Idempotency-Key: "+id)
	}
	version("a", "1")
	version("b", "2")
	if a := version("a", "1"); a.status != http.StatusOK || a.header.Get("Idempotent-Replayed") != "true" || len(a.answer.Array()) != 3 {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
	for i := range 3 {
		if got := r.trainer.gets(http.StatusOK, "GET", fmt.Sprintf("%s/workers/%d", r.OpenAI, i), "").Get("weight_version").Str; got != "2" {
			t.Errorf("worker %d has version %s after the first call was sent again", i, got)
		}
	}
	if a := call("/pause", "Idempotency-Key: a"); a.status != http.StatusUnprocessableEntity {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
	if a := version("a", "3"); a.status != http.StatusUnprocessableEntity {
		t.Errorf("another body: %d %s", a.status, a.answer.Raw)
	}
	other := r.sends(t.Context(), r.OpenAI+"/update_weight_version", `{"new_version":"1"}`, "Idempotency-Key: a", "X-Kvrouter-Workers: 1")
	if other.status != http.StatusUnprocessableEntity {
		t.Errorf("other workers: %d %s", other.status, other.answer.Raw)
	}
	if n := r.Metrics()[`kvrouter_control_calls_total{path="/update_weight_version",result="done"}`]; n != 6 {
		t.Errorf("%v calls were counted, want 6", n)
	}
}

// TestAWorkerThatIsRemovedInAPauseIsNotWaitedFor: what waits for it goes to another one, or is refused.
func TestAWorkerThatIsRemovedInAPauseIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	w := StartWorkers(t, 2, "--block-size=16")
	r := StartAt(t, Program, testkit.FreePorts(t, 2), nil, "--engine=none", "--rollouts", "--block-size=16", "--decision-headers")
	step := &trainingStep{&Mocks{Router: r, Workers: w, T: t}, trainer{T: t}}
	var ids []string
	for i := range 2 {
		ids = append(ids, step.trainer.gets(http.StatusCreated, "POST", r.OpenAI+"/workers", fmt.Sprintf(`{"url":%q}`, w.URL(i))).Get("worker_id").Str)
	}
	step.trainer.gets(http.StatusOK, "POST", r.OpenAI+"/pause?mode=keep", "")
	waits := step.later(tokensIn(1, 100, 2, ""))
	step.queued(1)
	step.trainer.gets(http.StatusAccepted, "DELETE", r.OpenAI+"/workers/"+ids[0], "")
	step.queued(1)
	if a := step.sends(t.Context(), r.OpenAI+"/resume", "", "X-Kvrouter-Workers: "+ids[0]); a.status != http.StatusNotFound {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
	step.trainer.gets(http.StatusOK, "POST", r.OpenAI+"/resume", "")
	if a := <-waits; a.status != http.StatusOK || a.header.Get(web.HeaderWorker) != ids[1] {
		t.Errorf("%d by worker %s: %s", a.status, a.header.Get(web.HeaderWorker), a.answer.Raw)
	}
	step.trainer.gets(http.StatusOK, "POST", r.OpenAI+"/pause?mode=keep", "")
	waits = step.later(tokensIn(1, 100, 2, ""))
	step.queued(1)
	step.trainer.gets(http.StatusAccepted, "DELETE", r.OpenAI+"/workers/"+ids[1], "")
	if a := <-waits; a.status != http.StatusServiceUnavailable || a.answer.Get("error.message").Str == "" {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
}

// TestAVersionThatNobodyHasKeepsOthersFromNothing: a request for it waits alone, with any order of the queue.
func TestAVersionThatNobodyHasKeepsOthersFromNothing(t *testing.T) {
	t.Parallel()
	for _, policy := range []string{"fcfs", "fair"} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			r := startTraining(t, 2, "--router-queue-policy="+policy)
			r.trainer.gets(http.StatusOK, "POST", r.OpenAI+"/pause?mode=keep", "")
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				request, _ := http.NewRequestWithContext(ctx, "POST", r.OpenAI+"/inference/v1/generate", strings.NewReader(tokensIn(1, 100, 2, "")))
				request.Header.Set("X-SMG-Version-Policy", "min-version:999")
				if response, err := http.DefaultClient.Do(request); err == nil {
					response.Body.Close()
					t.Errorf("%s", response.Status)
				}
			}()
			r.queued(1)
			others := []<-chan answered{r.later(tokensIn(2, 100, 2, "")), r.later(tokensIn(3, 100, 2, ""))}
			r.queued(3)
			r.trainer.gets(http.StatusOK, "POST", r.OpenAI+"/resume", "")
			for _, answers := range others {
				if a := <-answers; a.status != http.StatusOK {
					t.Errorf("%d %s", a.status, a.answer.Raw)
				}
			}
			leave()
			<-gone
		})
	}
}

// TestAnAnswerThatATrainerAbortsIsPassedOn whole or streamed, though the pause does not pass the router.
func TestAnAnswerThatATrainerAbortsIsPassedOn(t *testing.T) {
	t.Parallel()
	r := startTraining(t, 2)
	var running []<-chan answered
	for i := range 4 {
		running = append(running, r.later(tokensIn(i, 100, 400, "")))
	}
	testkit.Eventually(t, 20*time.Second, "all run", func() bool {
		return r.Worker(0).Ranks[0].CurrentLoad().Running+r.Worker(1).Ranks[0].CurrentLoad().Running == 4
	})
	for i := range 2 {
		r.trainer.gets(http.StatusOK, "POST", r.URL(i)+"/pause?mode=abort", "")
	}
	for i, answers := range running {
		if a := <-answers; a.status != http.StatusOK || a.answer.Get("choices.0.finish_reason").Str != "abort" {
			t.Errorf("request %d: %d %.300s", i, a.status, a.answer.Raw)
		}
	}
}

// TestAPauseThatTheEngineHasEndedIsOver, also where the router asks engines only while they are paused.
func TestAPauseThatTheEngineHasEndedIsOver(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 1, "--allow-engine-admin")
	r := &trainingStep{s, trainer{T: t}}
	r.trainer.gets(http.StatusOK, "POST", r.OpenAI+"/pause?mode=keep", "")
	waits := r.later(tokensIn(1, 100, 2, ""))
	r.queued(1)
	r.trainer.gets(http.StatusOK, "POST", r.URL(0)+"/resume", "")
	if a := <-waits; a.status != http.StatusOK {
		t.Errorf("%d %s", a.status, a.answer.Raw)
	}
}
