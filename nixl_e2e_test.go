package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// TestPrefillAndDecodeWorkersOnRealVLLM has one worker compute the prompts and
// another the answers: NIXL carries the blocks between them. In the end it kills
// the first.
func TestPrefillAndDecodeWorkersOnRealVLLM(t *testing.T) {
	s := startParts(t, []string{"--prefill-workers=1", "--decode-workers=1"}, 2, nil)
	const prefill, decode = 0, 1
	before := s.workers()
	for i, role := range []Role{prefill: RolePrefill, decode: RoleDecode} {
		if given(before[i].Role, RoleBoth) != role || given(before[i].Kind, KindNone) != KindNIXL {
			t.Errorf("worker %d: %+v", i, before[i])
		}
	}
	engine := func(worker int, name string) float64 { return sumOf(s.get(*before[worker].Endpoint+"/metrics"), name) }
	shared := func() float64 {
		return sumOf(s.get(s.openAI+"/metrics"), `kvrouter_disagg_requests_total{kind="nixl",result="ok"}`)
	}
	random := rand.New(rand.NewPCG(5, 5))
	// Long enough to be shared: --disagg-min-uncached-tokens is 256.
	chat := func() []map[string]string {
		return []map[string]string{message("system", "Ignore this list: "+words(random, 280)+"."), message("user", "What is the capital of France?")}
	}
	send := func(messages []map[string]string, stream bool, maxTokens int) answer {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		a, err := s.chat(ctx, messages, stream, maxTokens)
		if err != nil || !a.finished || a.broken || a.worker != decode {
			t.Fatalf("%+v, %v", a, err)
		}
		return a
	}
	nothingHeld := func() {
		t.Helper()
		for i, w := range s.workers() {
			if w.InFlight != 0 || w.PrefillTokens != 0 {
				t.Errorf("worker %d has nothing to do and is booked: %+v", i, w)
			}
		}
		eventually(t, 10*time.Second, "both engines without used blocks", func() bool {
			return engine(prefill, "vllm:kv_cache_usage_perc") == 0 && engine(decode, "vllm:kv_cache_usage_perc") == 0
		})
	}

	// The answer is right, streamed or not, and was computed by two.
	for _, stream := range []bool{false, true} {
		messages := chat()
		a := send(messages, stream, 16)
		if !strings.Contains(a.text, "Paris") || a.prefill != "0" || a.prompt < 280 || a.predicted != a.cached {
			t.Errorf("streamed %v: %+v", stream, a)
		}
		// What came over is in the decode worker's cache and in the index: it now has
		// most of the same prompt itself.
		s.settled(messages, a)
		again := send(messages, stream, 16)
		if again.text != a.text || again.prefill != "" || again.cached < a.prompt-64 || again.predicted != again.cached {
			t.Errorf("streamed %v: %+v and then %+v", stream, a, again)
		}
	}

	// Traffic: four clients with a system prompt each, which the prefill worker
	// keeps.
	const chats, clients = 100, 4
	first, moved := shared(), engine(decode, "vllm:nixl_xfer_time_seconds_count")
	var traffic sync.WaitGroup
	var mu sync.Mutex // guards the rest
	exact, reused, failed := 0, 0, []string{}
	for client := range clients {
		random := rand.New(rand.NewPCG(6, uint64(client)))
		system := message("system", words(random, 140))
		traffic.Go(func() {
			for range chats / clients {
				a, err := s.chat(t.Context(), []map[string]string{system, message("user", words(random, 270))}, true, 4)
				mu.Lock()
				if err != nil || !a.finished || a.broken || a.worker != decode || a.prefill != "0" {
					failed = append(failed, fmt.Sprintf("%+v, %v", a, err))
				}
				if a.predicted == a.cached {
					exact++
				}
				if a.cached > 0 {
					reused++
				}
				mu.Unlock()
			}
		})
	}
	traffic.Wait()
	if len(failed) > 0 {
		t.Errorf("%d of %d chats failed or were not shared, the first: %s", len(failed), chats, failed[0])
	}
	if got := shared() - first; got != chats {
		t.Errorf("the router counts %v shared requests, want %d", got, chats)
	}
	// The engine shows what it counts with its next step, or ten seconds later.
	eventually(t, 20*time.Second, "the engine's own count of transfers", func() bool {
		return engine(decode, "vllm:nixl_xfer_time_seconds_count")-moved >= chats
	})
	if n := engine(decode, "vllm:nixl_num_failed_transfers_total") + engine(prefill, "vllm:nixl_num_kv_expired_reqs_total"); n != 0 {
		t.Errorf("%v transfers failed or came too late", n)
	}
	// Clients do not share prompts; each but its first finds its system prompt.
	if reused != chats-clients {
		t.Errorf("%d chats found their system prompt at the prefill worker, want %d", reused, chats-clients)
	}
	t.Logf("%d of %d overlaps predicted exactly; %v transfers in %v s, %v bytes", exact, chats, engine(decode, "vllm:nixl_xfer_time_seconds_count"),
		engine(decode, "vllm:nixl_xfer_time_seconds_sum"), engine(decode, "vllm:nixl_bytes_transferred_sum"))
	nothingHeld()

	// Every route with a prompt, streamed or not.
	model := gjson.GetBytes(s.get(s.openAI+"/v1/models"), "data.0.id").Str
	for path, body := range map[string]string{
		"/v1/completions": `{"prompt":%s,"max_tokens":4,"stream":%v}`,
		"/v1/responses":   `{"input":%s,"max_output_tokens":4,"stream":%v}`,
		"/v1/messages":    `{"model":"` + model + `","messages":[{"role":"user","content":%s}],"max_tokens":4,"stream":%v}`,
	} {
		for _, stream := range []bool{false, true} {
			first, moved := shared(), engine(decode, "vllm:nixl_xfer_time_seconds_count")
			text := fmt.Sprintf(body, quoted(words(random, 300)), stream)
			if path == "/v1/completions" { // the others tell their usage unasked
				text = strings.Replace(text, `"stream":true`, `"stream":true,"stream_options":{"include_usage":true}`, 1)
			}
			status, answer := post(t, s.openAI+path, text)
			if u := lastUsage(answer); status != http.StatusOK || u.PromptTokens < 300 || u.OutputTokens != 4 {
				t.Errorf("%s streamed %v: %d, usage %+v in %s", path, stream, status, u, answer)
			}
			if got := shared() - first; got != 1 {
				t.Errorf("%s streamed %v: %v shared requests counted", path, stream, got)
			}
			eventually(t, 20*time.Second, path+" counted as a transfer", func() bool { return engine(decode, "vllm:nixl_xfer_time_seconds_count") == moved+1 })
		}
	}

	// The prefill worker dies with a prompt: the decode worker does all of it, at
	// once and from then on.
	dying := make(chan answer, 1)
	go func() {
		a, err := s.chat(t.Context(), []map[string]string{message("user", words(rand.New(rand.NewPCG(7, 7)), 4000))}, true, 4)
		if err != nil {
			t.Errorf("the chat whose prompt died: %v", err)
		}
		dying <- a
	}()
	eventually(t, 30*time.Second, "the prefill worker at work", func() bool { return s.workers()[prefill].InFlight > 0 })
	if err := syscall.Kill(-before[prefill].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if a := send(chat(), true, 16); a.prefill != "" || !strings.Contains(a.text, "Paris") {
		t.Errorf("the next chat: %+v", a)
	}
	if a := <-dying; !a.finished || a.broken || a.worker != decode || a.prefill != "" {
		t.Errorf("the chat whose prompt died: %+v", a)
	}

	// It comes back to its part and its place.
	eventually(t, time.Minute, "the prefill worker seen dead", func() bool {
		w := s.workers()[prefill]
		return w.Restarts > 0 || w.Lifecycle != "schedulable"
	})
	s.waitReady(2, 5*time.Minute)
	after := s.workers()[prefill]
	if after.Restarts != 1 || *after.Endpoint != *before[prefill].Endpoint || given(after.Role, RoleBoth) != RolePrefill {
		t.Errorf("after the restart: %+v", after)
	}
	if a := send(chat(), true, 16); a.prefill != "0" || !strings.Contains(a.text, "Paris") {
		t.Errorf("a chat after the restart: %+v", a)
	}
	nothingHeld()
}

// lastUsage returns the last usage that an answer tells, be it a stream or not.
func lastUsage(answer []byte) (last Usage) {
	for line := range bytes.Lines(answer) {
		if u := readUsage(bytes.TrimPrefix(line, []byte("data: "))); u.Known {
			last = u
		}
	}
	return last
}

// sumOf adds up the values of a metric, given by its name with or without all of
// its labels, on a page of Prometheus text.
func sumOf(page []byte, name string) (sum float64) {
	for line := range strings.Lines(string(page)) {
		rest, found := strings.CutPrefix(line, name)
		if !found || (rest[0] != ' ' && rest[0] != '{') {
			continue
		}
		value, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(line, ' '):]), 64)
		if err == nil {
			sum += value
		}
	}
	return sum
}
