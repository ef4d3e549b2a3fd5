package test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/testkit"
)

// trainer is an RL trainer, which knows the URL of a router and those of engines.
type trainer struct {
	*testing.T
	key     string // bearer; empty: none
	session string // x-session-id; empty: none
}

// call sends a request. Its error is that of ctx.
func (tr *trainer) call(ctx context.Context, method, url, body string) (status int, answer gjson.Result, header http.Header, err error) {
	tr.Helper()
	request, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader([]byte(body)))
	if err != nil {
		tr.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	if tr.session != "" {
		request.Header.Set("X-Session-Id", tr.session)
	}
	if tr.key != "" {
		request.Header.Set("Authorization", "Bearer "+tr.key)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, answer, nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, gjson.ParseBytes(text), response.Header, err
}

// gets calls, and fails unless the status is that.
func (tr *trainer) gets(want int, method, url, body string) gjson.Result {
	tr.Helper()
	status, answer, _, err := tr.call(tr.Context(), method, url, body)
	if err != nil || status != want {
		tr.Fatalf("%s %s: %d %s %v, want %d", method, url, status, answer.Raw, err, want)
	}
	return answer
}

// TestATrainerManagesWorkersAtTheOpenAIPort plays a step of slime: it registers SGLang servers, samples, aborts, pauses
// them all, flushes them, goes on, and removes them.
func TestATrainerManagesWorkersAtTheOpenAIPort(t *testing.T) {
	t.Parallel()
	w := StartWorkers(t, 2, "--mock=api=sglang", "--block-size=16")
	r := StartAt(t, Program, testkit.FreePorts(t, 2), nil, "--engine=none", "--rollouts", "--block-size=16", "--policy=work")
	tr := &trainer{T: t}
	sample := func(length, more int) string {
		ids := make([]string, length)
		for i := range ids {
			ids[i] = strconv.Itoa(100 + i%97)
		}
		return fmt.Sprintf(`{"input_ids":[%s],"sampling_params":{"max_new_tokens":%d},"return_logprob":true}`, strings.Join(ids, ","), more)
	}
	var ids []string
	for i := range 2 {
		spec := fmt.Sprintf(`{"url":%q,"worker_type":"regular"}`, w.URL(i))
		ids = append(ids, tr.gets(http.StatusCreated, "POST", r.OpenAI+"/workers", spec).Get("worker_id").Str)
		if again := tr.gets(http.StatusOK, "POST", r.OpenAI+"/workers", spec).Get("worker_id").Str; again != ids[i] {
			t.Errorf("worker %s is worker %s when it is registered again", ids[i], again)
		}
	}
	for i, listed := range tr.gets(http.StatusOK, "GET", r.OpenAI+"/workers", "").Get("workers").Array() {
		if listed.Get("id").Str != ids[i] || listed.Get("url").Str != w.URL(i) || !listed.Get("is_healthy").Bool() {
			t.Errorf("%s", listed.Raw)
		}
	}
	for turn := range 3 {
		meta := tr.gets(http.StatusOK, "POST", r.OpenAI+"/generate", sample(160+16*turn, 8)).Get("meta_info")
		if cached := meta.Get("cached_tokens").Int(); len(meta.Get("output_token_logprobs").Array()) != 8 || cached == 0 != (turn == 0) {
			t.Errorf("turn %d: %s", turn, meta.Raw)
		}
	}
	tr.gets(http.StatusOK, "POST", r.OpenAI+"/abort_request", `{"rid":"0123456789abcdef"}`)
	for i := range 2 {
		tr.gets(http.StatusOK, "POST", w.URL(i)+"/pause_generation", `{}`)
	}
	waiting := make(chan gjson.Result, 1)
	go func() {
		_, answer, _, _ := tr.call(t.Context(), "POST", r.OpenAI+"/generate", sample(48, 2))
		waiting <- answer
	}()
	testkit.Eventually(t, 20*time.Second, "a request waits in an engine, or in the router if that knows of the pauses", func() bool {
		return w.Worker(0).Ranks[0].CurrentLoad().Waiting+w.Worker(1).Ranks[0].CurrentLoad().Waiting+int(SumOf(r.Get(r.OpenAI+"/metrics"), "kvrouter_model_queued_requests")) == 1
	})
	for i := range 2 {
		tr.gets(http.StatusOK, "POST", w.URL(i)+"/continue_generation", `{}`)
	}
	if answer := <-waiting; answer.Get("meta_info.finish_reason.type").Str != "length" {
		t.Errorf("%s", answer.Raw)
	}
	for i := range 2 {
		testkit.Eventually(t, 20*time.Second, "an idle engine is flushed", func() bool {
			status, _, _, _ := tr.call(t.Context(), "POST", w.URL(i)+"/flush_cache", `{}`)
			return status == http.StatusOK
		})
	}
	for _, id := range append(ids, ids...) { // trainers repeat it
		tr.gets(http.StatusAccepted, "DELETE", r.OpenAI+"/workers/"+id, "")
	}
	if left := tr.gets(http.StatusOK, "GET", r.OpenAI+"/workers", ""); left.Get("total").Int() != 0 {
		t.Errorf("%s", left.Raw)
	}
}

// TestWorkersAreManagedWithTheRightKeyOnly: those of the router port, or with --rollouts those of trusted clients.
func TestWorkersAreManagedWithTheRightKeyOnly(t *testing.T) {
	t.Parallel()
	keys := keysFile(t, "- {name: client, key: key-of-a-client}\n- {name: trainer, key: key-of-a-trainer, trust-hints: true}")
	for name, c := range map[string]struct {
		flags                   []string
		client, trainer, router int
	}{
		"neither":    {nil, 403, 403, 401},
		"rollouts":   {[]string{"--rollouts"}, 403, 200, 401},
		"router key": {[]string{"--router-api-key=key-of-the-router"}, 401, 401, 200},
		"both":       {[]string{"--rollouts", "--router-api-key=key-of-the-router"}, 403, 200, 401},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := StartAt(t, Program, testkit.FreePorts(t, 2), nil, append([]string{"--engine=none", keys}, c.flags...)...)
			for key, want := range map[string]int{"": 401, "key-of-a-client": c.client, "key-of-a-trainer": c.trainer, "key-of-the-router": c.router} {
				tr := &trainer{T: t, key: key}
				for method, path := range map[string]string{"GET": "/workers", "POST": "/remove_worker?url=http://127.0.0.1:1"} {
					tr.gets(want, method, r.OpenAI+path, "")
				}
			}
		})
	}
}

// TestASessionIsFinishedByItsKeyOnly has two keys with sessions of one name.
func TestASessionIsFinishedByItsKeyOnly(t *testing.T) {
	t.Parallel()
	keys := keysFile(t, "- {name: alice, key: key-of-alice}\n- {name: bob, key: key-of-bob}")
	s := StartMocks(t, 2, "--policy=round-robin", "--session-header=x-session-id", keys)
	known := func() float64 { return s.Metrics()["kvrouter_sessions"] }
	for _, key := range []string{"key-of-alice", "key-of-bob"} {
		tr := &trainer{t, key, "s1"}
		tr.gets(http.StatusOK, "POST", s.OpenAI+"/v1/completions", `{"prompt":"Hi","max_tokens":1}`)
	}
	if known() != 2 {
		t.Fatalf("%v sessions are known, want 2", known())
	}
	for range 2 {
		(&trainer{T: t, key: "key-of-bob"}).gets(http.StatusOK, "POST", s.OpenAI+"/finish_session?session_id=s1", "")
	}
	if known() != 1 {
		t.Errorf("%v sessions are known, want that of alice", known())
	}
}

func TestWorkersThatMakeNoSenseAreRefused(t *testing.T) {
	t.Parallel()
	r := StartAt(t, Program, testkit.FreePorts(t, 2), nil, "--engine=none", "--rollouts", "--startup-timeout=200ms")
	tr := &trainer{T: t}
	for body, want := range map[string]int{
		`{}`: 422, `{"url":"x y"}`: 422, `{"url":7}`: 422, `{"url":"http://127.0.0.1:1","worker_type":"king"}`: 422, `[`: 400,
		`{"url":"http://127.0.0.1:1"}`:         400, // not there
		fmt.Sprintf(`{"url":%q}`, r.OpenAI):    400, // it is this router
		`{"url":"http://127.0.0.1:1/","a":{}}`: 400,
	} {
		if answer := tr.gets(want, "POST", r.OpenAI+"/workers", body); answer.Get("error").Str == "" {
			t.Errorf("%s: %s", body, answer.Raw)
		}
	}
	tr.gets(404, "GET", r.OpenAI+"/workers/7", "")
	tr.gets(404, "GET", r.OpenAI+"/workers/x", "")
	tr.gets(400, "POST", r.OpenAI+"/finish_session", "")
	if answer := tr.gets(200, "POST", r.OpenAI+"/finish_session?session_id=unknown", ""); answer.Get("status").Str != "ok" || answer.Get("session_id").Str != "unknown" {
		t.Errorf("%s", answer.Raw)
	}
}

// TestTokensInAreRoutedByTheirCache sends prompts in tokens, of a few beginnings, with salts: each
// goes where most of it is cached, and what was predicted is what the engine found.
func TestTokensInAreRoutedByTheirCache(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--policy=work", "--block-size=16", "--decision-headers")
	tr, random := &trainer{T: t}, rand.New(rand.NewPCG(4, 7))
	hits := 0
	for i := range 120 {
		length, begins := 32+random.IntN(200), random.IntN(5)
		ids := make([]string, length)
		for at := range ids {
			ids[at] = strconv.Itoa(1000*begins + at)
		}
		salt := []string{"", `,"cache_salt":"m@1"`, `,"cache_salt":"m@2"`}[random.IntN(3)]
		body := fmt.Sprintf(`{"token_ids":[%s],"sampling_params":{"max_tokens":4,"logprobs":0}%s}`, strings.Join(ids, ","), salt)
		status, answer, header, err := tr.call(t.Context(), "POST", s.OpenAI+"/inference/v1/generate", body)
		if err != nil || status != http.StatusOK {
			t.Fatalf("%d %s %v", status, answer.Raw, err)
		}
		cached := answer.Get("usage.prompt_tokens_details.cached_tokens").Int()
		if predicted, _ := strconv.ParseInt(header.Get(web.HeaderOverlap), 10, 64); predicted != cached {
			t.Errorf("request %d: %d tokens predicted, %d cached", i, predicted, cached)
		}
		if cached > 0 {
			hits++
		}
		if choice := answer.Get("choices.0"); len(choice.Get("token_ids").Array()) != 4 || len(choice.Get("logprobs.content").Array()) != 4 {
			t.Errorf("%s", choice.Raw)
		}
		s.Follow()
	}
	if hits < 60 {
		t.Errorf("%d of 120 found something in a cache", hits)
	}
}
