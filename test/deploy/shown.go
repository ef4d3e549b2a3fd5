package deploy

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// LongPrompt returns a chat whose prompt is long enough to be computed by a prefill
// worker.
func LongPrompt(i int) []map[string]string {
	return test.Say(strings.Repeat(fmt.Sprintf("prompt %d of many words ", i), 60))
}

// Failing is the place of the router of StartShown whose worker FailingWorker fails: that
// stays ejected.
const Failing, FailingWorker = 2, 0

// StartShown starts the routers whose metrics the boards are held against. The first,
// over prefill and decode workers and with other routers, has served requests; the
// others have keys, or have had what mock workers do not do on their own: workers that
// fail until they are ejected, refuse, and count tokens wrong.
func StartShown(t *testing.T) []*test.Router {
	t.Helper()
	pairs := test.StartPairs(t, kv.KindNIXL, 1, 2, "--cluster=test", "--cluster-port=0")
	for i := range 4 {
		if a, err := pairs.Chat(t.Context(), LongPrompt(i%2), i > 0, 8); err != nil || !a.Finished {
			t.Fatalf("%+v, %v", a, err)
		}
	}
	return []*test.Router{
		pairs.Router, startKeyed(t), startFailing(t),
		startFull(t, 1, http.StatusServiceUnavailable, "--active-prefill-tokens-threshold=5"),
		startFull(t, 2, web.StatusOverloaded, "--router-queue-threshold=0.0001", "--router-queue-limit=1"),
	}
}

// startKeyed starts a router that requires keys and has served a prompt that it cannot
// render.
func startKeyed(t *testing.T) *test.Router {
	t.Helper()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	testkit.WriteFile(t, file, "- {name: a, key: key-a, limits: {requests-per-second: 1}}")
	keyed := test.StartMocks(t, 2, "--api-keys-file="+file)
	body := `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,"}}]}]}`
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, keyed.OpenAI+testkit.ChatPath, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer key-a")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	return keyed.Router
}

// startFakes starts a router over workers that answer chats so.
func startFakes(t *testing.T, chats []http.HandlerFunc, args ...string) *test.Router {
	t.Helper()
	all := []string{"--engine=none", "--no-kv-events", "--drain-timeout=1s", "--model=" + test.BuiltinModel(t), "--served-model-name=m"}
	for i, chat := range chats {
		all = append(all, fmt.Sprintf("--worker=url=%s,id=%d", testkit.NewFakeWorker(t, chat).URL, i))
	}
	s := test.Start(t, append(all, args...)...)
	s.WaitReady(len(chats), 20*time.Second)
	return s
}

// startFailing starts a router over a worker that fails until it is ejected, and one
// that streams its tokens one by one and counts those of the prompt wrong.
func startFailing(t *testing.T) *test.Router {
	t.Helper()
	fails := func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "out of order", http.StatusInternalServerError)
	}
	counts := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, event := range []string{testkit.TokenEvent, testkit.TokenEvent, `{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}`,
			"[DONE]"} {
			fmt.Fprintf(w, "data: %s\n\n", event)
			w.(http.Flusher).Flush()
			select {
			case <-time.After(5 * time.Millisecond):
			case <-r.Context().Done():
			}
		}
	}
	s := startFakes(t, []http.HandlerFunc{fails, counts}, "--policy=round-robin", "--retries=1", "--ejection-time=10m",
		"--max-ejection-time=10m")
	testkit.Eventually(t, 20*time.Second, "the worker that fails is ejected, and the other one's tokens are counted", func() bool {
		if a, err := s.Chat(t.Context(), test.Say("Hi"), true, 2); err != nil || !a.Finished {
			t.Errorf("%+v, %v", a, err)
		}
		page := string(s.MetricsPage())
		for _, name := range []string{"kvrouter_ejections_total{", "kvrouter_retries_total{", "kvrouter_prompt_tokens_mismatch_total{",
			"kvrouter_inter_token_latency_seconds_bucket{"} {
			if !strings.Contains(page, "\n"+name) {
				return false
			}
		}
		return true
	})
	return s
}

// startFull starts a router with a worker that computes a prompt for minutes, with flags
// by which so many chats are all that it takes: a further one is refused with status.
func startFull(t *testing.T, chats, status int, args ...string) *test.Router {
	t.Helper()
	s := test.StartMocker(t, 1, append(args, "--speedup-ratio=0.0001")...)
	ctx, leave := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer clients.Wait()
	defer leave()
	ended := make(chan error, chats+1)
	for range chats + 1 {
		clients.Go(func() {
			_, err := s.Chat(ctx, test.Say("Hi"), true, 2)
			ended <- err
		})
	}
	select {
	case err := <-ended:
		if err == nil || !strings.HasPrefix(err.Error(), fmt.Sprint(status)) {
			t.Fatalf("%q: %v, want a refusal with status %d", args, err, status)
		}
	case <-time.After(20 * time.Second):
		t.Fatalf("%q: no chat is refused", args)
	}
	return s
}
