package test

import (
	"bufio"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
)

// TestMockSGLangStreamsGoOnWhenAWorkerDies kills a simulated SGLang worker in the midst of its
// completions and its answers on SGLang's own route: all of them have every token, each of which
// is a byte of their text, and take back nothing. Chats end with one error event that says why.
func TestMockSGLangStreamsGoOnWhenAWorkerDies(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--mock=api=sglang", "--policy=round-robin", "--speedup-ratio=1", "--restart-backoff-max=1s", "--mock=decode-ms=20,0,0")
	const streams, length = 12, 100
	completion := `{"prompt":"story %d","stream":true,"max_tokens":%d,"ignore_eos":true,"return_token_ids":true,"stream_options":{"include_usage":true}}`
	generate := `{"text":"story %d","stream":true,"sampling_params":{"max_new_tokens":%d,"ignore_eos":true}}`
	chat := `{"messages":[{"role":"user","content":"story %d"}],"stream":true,"max_tokens":%d,"ignore_eos":true}`
	read := func(path, body string) (ids []string, text, end, fault string) {
		response, err := http.Post(s.OpenAI+path, "application/json", strings.NewReader(body))
		if err != nil {
			t.Error(err)
			return
		}
		defer response.Body.Close()
		lines := bufio.NewScanner(response.Body)
		for lines.Scan() {
			data, _ := strings.CutPrefix(lines.Text(), "data: ")
			event := gjson.Parse(data)
			if event.Get("error").Exists() {
				fault += event.Get("error.message").Str
			}
			if list := event.Get("output_ids"); list.Exists() {
				before := ids
				if ids = nil; !strings.HasPrefix(event.Get("text").Str, text) {
					t.Errorf("after %q came %q", text, event.Get("text").Str)
				}
				text = event.Get("text").Str
				for _, id := range list.Array() {
					ids = append(ids, id.Raw)
				}
				if len(ids) < len(before) || !slices.Equal(ids[:len(before)], before) {
					t.Errorf("after %q came %q", before, ids)
				}
				end += event.Get("meta_info.finish_reason").Raw
			}
			text += event.Get("choices.0.text").Str
			for _, id := range event.Get("choices.0.token_ids").Array() {
				ids = append(ids, id.Raw)
			}
			end += event.Get("choices.0.finish_reason").Str + event.Get("usage.completion_tokens").Raw
			if data == "[DONE]" {
				end += data
			}
		}
		return ids, text, strings.ReplaceAll(end, "null", ""), fault
	}
	chats := make([]string, 4)
	body := func(i int) (path, body string) {
		if i%2 == 0 {
			return "/v1/completions", fmt.Sprintf(completion, i, length)
		}
		return "/generate", fmt.Sprintf(generate, i, length)
	}
	var jobs sync.WaitGroup
	for i := range chats {
		jobs.Go(func() { _, _, _, chats[i] = read(testkit.ChatPath, fmt.Sprintf(chat, i, length)) })
	}
	testkit.Eventually(t, 20*time.Second, "both workers have chats", func() bool { return s.InFlight() == len(chats) })
	for i := range streams {
		jobs.Go(func() {
			path, request := body(i)
			ids, text, end, fault := read(path, request)
			want := "length100[DONE]"
			if path == "/generate" {
				want = `{"type":"length","length":100}[DONE]`
			}
			if fault != "" || len(ids) != length || len(text) != length || end != want {
				t.Errorf("%s, stream %d: %q, %d tokens, %q, end %q", path, i, fault, len(ids), text, end)
			}
		})
	}
	generated := func() int64 { return s.Rank(kv.WorkerKey{Worker: 0}).Counts.GenerationTokens.Load() }
	testkit.Eventually(t, 20*time.Second, "the first worker answers", func() bool { return generated() > length })
	s.Mocker.Worker(0).End(mocker.ErrMockCrash)
	jobs.Wait()
	if n := s.Metrics()[`kvrouter_migrations_total{result="ok"}`]; n < 2 {
		t.Errorf("%v streams were continued", n)
	}
	if faults := strings.Join(chats, ""); !strings.Contains(faults, "SGLang streams no token ids of chats") {
		t.Errorf("chats ended with %q", faults)
	}
	testkit.Eventually(t, 20*time.Second, "nothing is in flight", s.idle)
}
