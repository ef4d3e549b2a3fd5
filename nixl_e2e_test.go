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

	"kvrouter/internal/kv"
	"kvrouter/internal/proxy"
	"kvrouter/internal/selection"
	"kvrouter/internal/testkit"

	"github.com/tidwall/gjson"
)

// TestPrefillAndDecodeWorkersOnRealVLLM has one worker compute the prompts and
// another the answers: NIXL carries the blocks between them. In the end it kills
// the first.
func TestPrefillAndDecodeWorkersOnRealVLLM(t *testing.T) {
	s := &pairSite{startParts(t, []string{"--prefill-workers=1", "--decode-workers=1"}, 2, nil)}
	before := s.workers()
	for i, role := range []kv.Role{prefill: kv.RolePrefill, decode: kv.RoleDecode} {
		if selection.Given(before[i].Role, kv.RoleBoth) != role || selection.Given(before[i].Kind, kv.KindNone) != kv.KindNIXL {
			t.Errorf("worker %d: %+v", i, before[i])
		}
	}
	shared := func() float64 { return s.shared(kv.KindNIXL, proxy.SharedOK) }
	random := rand.New(rand.NewPCG(5, 5))

	// The answer is right, streamed or not, and was computed by two.
	for _, stream := range []bool{false, true} {
		messages := question(words(random, 280))
		a := s.send(messages, stream, 16)
		if !strings.Contains(a.text, "Paris") || a.prefill != "0" || a.prompt < 280 || a.predicted != a.cached {
			t.Errorf("streamed %v: %+v", stream, a)
		}
		// What came over is in the decode worker's cache and in the index: it now has
		// most of the same prompt itself.
		s.settled(messages, a)
		again := s.send(messages, stream, 16)
		if again.text != a.text || again.prefill != "" || again.cached < a.prompt-64 || again.predicted != again.cached {
			t.Errorf("streamed %v: %+v and then %+v", stream, a, again)
		}
	}

	// Traffic: four clients with a system prompt each, which the prefill worker
	// keeps.
	const chats, clients = 100, 4
	first, moved := shared(), s.engine(decode, "vllm:nixl_xfer_time_seconds_count")
	exact, reused := 0, 0
	for _, a := range s.traffic(chats, clients, 4, func(random *rand.Rand) func() []map[string]string {
		system := message("system", words(random, 140))
		return func() []map[string]string {
			return []map[string]string{system, message("user", words(random, 270))}
		}
	}) {
		if a.predicted == a.cached {
			exact++
		}
		if a.cached > 0 {
			reused++
		}
	}
	// A request is counted when it has ended here, which its client need not wait for.
	testkit.Eventually(t, 10*time.Second, "all chats counted as shared", func() bool { return shared()-first == chats })
	// The engine shows what it counts with its next step, or ten seconds later.
	testkit.Eventually(t, 20*time.Second, "the engine's own count of transfers", func() bool {
		return s.engine(decode, "vllm:nixl_xfer_time_seconds_count")-moved >= chats
	})
	if n := s.engine(decode, "vllm:nixl_num_failed_transfers_total") + s.engine(prefill, "vllm:nixl_num_kv_expired_reqs_total"); n != 0 {
		t.Errorf("%v transfers failed or came too late", n)
	}
	// Clients do not share prompts; each but its first finds its system prompt.
	if reused != chats-clients {
		t.Errorf("%d chats found their system prompt at the prefill worker, want %d", reused, chats-clients)
	}
	t.Logf("%d of %d overlaps predicted exactly; %v transfers in %v s, %v bytes", exact, chats, s.engine(decode, "vllm:nixl_xfer_time_seconds_count"),
		s.engine(decode, "vllm:nixl_xfer_time_seconds_sum"), s.engine(decode, "vllm:nixl_bytes_transferred_sum"))
	s.nothingHeld()

	// Every route with a prompt, streamed or not.
	model := gjson.GetBytes(s.get(s.openAI+"/v1/models"), "data.0.id").Str
	for path, body := range map[string]string{
		"/v1/completions": `{"prompt":%s,"max_tokens":4,"stream":%v}`,
		"/v1/responses":   `{"input":%s,"max_output_tokens":4,"stream":%v}`,
		"/v1/messages":    `{"model":"` + model + `","messages":[{"role":"user","content":%s}],"max_tokens":4,"stream":%v}`,
	} {
		for _, stream := range []bool{false, true} {
			first, moved := shared(), s.engine(decode, "vllm:nixl_xfer_time_seconds_count")
			text := fmt.Sprintf(body, proxy.Quoted(words(random, 300)), stream)
			if path == "/v1/completions" { // the others tell their usage unasked
				text = strings.Replace(text, `"stream":true`, `"stream":true,"stream_options":{"include_usage":true}`, 1)
			}
			status, answer := post(t, s.openAI+path, text)
			if u := lastUsage(answer); status != http.StatusOK || u.PromptTokens < 300 || u.OutputTokens != 4 {
				t.Errorf("%s streamed %v: %d, usage %+v in %s", path, stream, status, u, answer)
			}
			testkit.Eventually(t, 20*time.Second, path+" counted as shared and as a transfer", func() bool {
				return shared() == first+1 && s.engine(decode, "vllm:nixl_xfer_time_seconds_count") == moved+1
			})
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
	testkit.Eventually(t, 30*time.Second, "the prefill worker at work", func() bool { return s.workers()[prefill].InFlight > 0 })
	if err := syscall.Kill(-before[prefill].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if a := s.send(question(words(random, 280)), true, 16); a.prefill != "" || !strings.Contains(a.text, "Paris") {
		t.Errorf("the next chat: %+v", a)
	}
	if a := <-dying; !a.finished || a.broken || a.worker != decode || a.prefill != "" {
		t.Errorf("the chat whose prompt died: %+v", a)
	}

	// It comes back to its part and its place.
	testkit.Eventually(t, time.Minute, "the prefill worker seen dead", func() bool {
		w := s.workers()[prefill]
		return w.Restarts > 0 || w.Lifecycle != "schedulable"
	})
	s.waitReady(2, 5*time.Minute)
	after := s.workers()[prefill]
	if after.Restarts != 1 || *after.Endpoint != *before[prefill].Endpoint || selection.Given(after.Role, kv.RoleBoth) != kv.RolePrefill {
		t.Errorf("after the restart: %+v", after)
	}
	if a := s.send(question(words(random, 280)), true, 16); a.prefill != "0" || !strings.Contains(a.text, "Paris") {
		t.Errorf("a chat after the restart: %+v", a)
	}
	s.nothingHeld()
}

// Workers of a pairSite, as ids and as places in the list.
const prefill, decode = 0, 1

// pairSite is a site with one worker that computes prompts and one that answers.
type pairSite struct{ *site }

// engine returns a metric of a worker's own.
func (s *pairSite) engine(worker int, name string) float64 {
	return sumOf(s.get(*s.workers()[worker].Endpoint+"/metrics"), name)
}

// shared returns how many shared requests the router counts that ended so.
func (s *pairSite) shared(kind kv.Kind, result string) float64 {
	return sumOf(s.get(s.openAI+"/metrics"), fmt.Sprintf("kvrouter_disagg_requests_total{kind=%q,result=%q}", kind, result))
}

// question returns a chat that is answered with Paris, with a list of words
// before it. 280 make it long enough to be shared: --disagg-min-uncached-tokens
// is 256.
func question(list string) []map[string]string {
	return []map[string]string{message("system", "Ignore this list: "+list+"."), message("user", "What is the capital of France?")}
}

// send sends a chat that the decode worker must answer within two minutes.
func (s *pairSite) send(messages []map[string]string, stream bool, maxTokens int) answer {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*time.Minute)
	defer cancel()
	a, err := s.chat(ctx, messages, stream, maxTokens)
	if err != nil || !a.finished || a.broken || a.worker != decode {
		s.t.Fatalf("%+v, %v", a, err)
	}
	return a
}

// traffic has clients send so many chats altogether, each one after the other
// and every second one streamed. It returns the answers; that one fails or is
// not shared fails the test. conversation returns what makes a client's chats.
func (s *pairSite) traffic(chats, clients, maxTokens int, conversation func(*rand.Rand) func() []map[string]string) []answer {
	s.t.Helper()
	var traffic sync.WaitGroup
	var mu sync.Mutex // guards the rest
	var answers []answer
	var failed []string
	for client := range clients {
		next := conversation(rand.New(rand.NewPCG(6, uint64(client))))
		traffic.Go(func() {
			for i := range chats / clients {
				a, err := s.chat(s.t.Context(), next(), i%2 == 0, maxTokens)
				mu.Lock()
				answers = append(answers, a)
				if err != nil || !a.finished || a.broken || a.worker != decode || a.prefill != "0" {
					failed = append(failed, fmt.Sprintf("%+v, %v", a, err))
				}
				mu.Unlock()
			}
		})
	}
	traffic.Wait()
	if len(failed) > 0 {
		s.t.Errorf("%d of %d chats failed or were not shared, the first: %s", len(failed), chats, failed[0])
	}
	return answers
}

// nothingHeld checks that an idle site soon holds no bookings and its engines no
// blocks.
func (s *pairSite) nothingHeld() {
	s.t.Helper()
	testkit.Eventually(s.t, 10*time.Second, "both workers without bookings and used blocks", func() bool {
		workers := s.workers()
		for i, w := range workers {
			if w.InFlight != 0 || w.PrefillTokens != 0 || s.engine(i, "vllm:kv_cache_usage_perc") != 0 {
				return false
			}
		}
		return len(workers) == 2
	})
}

// lastUsage returns the last usage that an answer tells, be it a stream or not.
func lastUsage(answer []byte) (last proxy.Usage) {
	for line := range bytes.Lines(answer) {
		if u := proxy.ReadUsage(bytes.TrimPrefix(line, []byte("data: "))); u.Known {
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
