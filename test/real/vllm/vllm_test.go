package vllm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/collector"
	"kvrouter/test"
)

// TestTwoWorkersOnRealVLLM has all look at the same two workers that need none of their
// own, one after the other; the last one kills them.
func TestTwoWorkersOnRealVLLM(t *testing.T) {
	c := collector.Start(t)
	env := []string{"VLLM_SERVER_DEV_MODE=1", "OTEL_EXPORTER_OTLP_ENDPOINT=" + c.HTTP, "OTEL_SERVICE_NAME=my-router", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=" + c.HTTP + "/v1/traces", "OTEL_BSP_SCHEDULE_DELAY=200"}
	s := test.StartEngines(t, 2, env, "--", "--num-gpu-blocks-override", "60", "--max-model-len", strconv.Itoa(longest), "--max-logprobs", "-1", "--otlp-traces-endpoint", c.GRPC)
	t.Run("prediction is true", func(t *testing.T) { predicted(t, *s.Workers()[0].Endpoint) })
	t.Run("rollouts", func(t *testing.T) { rollouts(t, *s.Workers()[0].Endpoint) })
	t.Run("trace", func(t *testing.T) { traced(t, s, c) })
	t.Run("server blocked by log probabilities", func(t *testing.T) { blocked(t, *s.Workers()[0].Endpoint, *s.Workers()[1].Endpoint) })
	t.Run("worker and router die", func(t *testing.T) { killed(t, s) })
}

// longest is the context of the two workers, tokens: a block less than their caches.
const longest = 3776

// predicted holds ten growing conversations with a worker
// whose cache is too small for them, and compares each prediction with what the
// engine found; then every prompt shape with the engine's own tokens.
func predicted(t *testing.T, worker string) {
	s := test.Start(t, "--engine=none", "--model="+test.ModelFolder(), "--worker=url="+worker)
	s.WaitReady(1, time.Minute)
	random := rand.New(rand.NewPCG(7, 7))
	conversations := make([][]map[string]string, 10)
	for i := range conversations {
		conversations[i] = []map[string]string{test.Message("system", test.Words(random, 60+30*i))}
	}
	var wrong []string
	cached := 0
	for i := range 60 {
		if i == 40 {
			response, err := http.Post(worker+"/reset_prefix_cache", "", nil)
			if err != nil || response.StatusCode != http.StatusOK {
				t.Fatalf("/reset_prefix_cache: %v %v", response, err)
			}
			response.Body.Close()
		}
		c := &conversations[random.IntN(len(conversations))]
		*c = append(*c, test.Message("user", test.Words(random, 10+random.IntN(60))))
		a, err := s.Chat(t.Context(), *c, i%2 == 0, 8)
		if err != nil || !a.Finished {
			t.Fatalf("chat %d: %+v, %v", i, a, err)
		}
		cached += a.Cached
		// The engine publishes that it emptied its cache with its next step.
		if a.Predicted != a.Cached && i != 40 {
			wrong = append(wrong, fmt.Sprintf("chat %d: predicted %d, cached %d of %d", i, a.Predicted, a.Cached, a.Prompt))
		}
		s.Settled(*c, a)
		*c = append(*c, test.Message("assistant", a.Text))
	}
	if len(wrong) > 0 {
		t.Errorf("%d of 60 predictions are wrong:\n%s", len(wrong), strings.Join(wrong, "\n"))
	}
	if cached == 0 {
		t.Error("no chat found anything cached: the test shows nothing")
	}
	if !strings.Contains(string(s.Get(s.OpenAI+"/metrics")), `kind="removed_blocks"`) {
		t.Error("metrics do not show evictions")
	}

	t.Run("prompts equal the engine's on every way to them", func(t *testing.T) {
		model := test.OpenModel(t)
		model.SetMaxModelLen(longest)
		compareWithWorker(t, model, worker)
	})
	t.Run("answers are the same with the tokens of prompts", func(t *testing.T) { test.CompareTokens(t, worker, true) })
	t.Run("mock workers answer as the engine", func(t *testing.T) { compareWithMock(t, worker) })
	t.Run("tokens equal the engine's", func(t *testing.T) {
		chats := test.ParityChats()
		if len(chats) < 40 {
			t.Fatalf("%d chats, want 40 at least", len(chats))
		}
		for i, body := range chats {
			own, theirs := s.Tokenize(s.OpenAI, body), s.Tokenize(worker, body)
			if own != theirs {
				t.Errorf("chat %d: %s\nrouter %s\nengine %s", i, body, own, theirs)
			}
		}
		t.Logf("%d chats compared", len(chats))
		if page := string(s.Get(s.OpenAI + "/metrics")); strings.Contains(page, "kvrouter_prompt_tokens_mismatch_total{") {
			t.Error("usage.prompt_tokens differed from the router's count")
		}
	})
}

// blocked asks a worker for all log probabilities of a prompt: its server answers nothing for
// several times as long as a worker may be silent.
func blocked(t *testing.T, first, second string) {
	s := test.Start(t, "--engine=none", "--model="+test.ModelFolder(), "--worker=url="+first, "--worker=url="+second, "--silence-timeout=2s")
	s.WaitReady(2, time.Minute)
	send := func(member string) (took time.Duration) {
		began := time.Now()
		response, err := http.Post(s.OpenAI+"/v1/completions", "application/json", strings.NewReader(`{"prompt":[1`+strings.Repeat(",100", 19)+`],"max_tokens":1`+member+`}`))
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		took = time.Since(began)
		if _, err := io.Copy(io.Discard, response.Body); err != nil || response.StatusCode != http.StatusOK {
			t.Fatalf("status %d after %s, %v", response.StatusCode, took, err)
		}
		return took
	}
	for range 6 { // what is usual
		send("")
	}
	if took := send(`,"prompt_logprobs":-1`); took < 4*time.Second {
		t.Errorf("answered after %s: the test shows nothing", took)
	}
	for _, w := range s.Workers() {
		if w.State != "ready" {
			t.Errorf("worker %s is %s", *w.Endpoint, w.State)
		}
	}
	for name, value := range s.Metrics() {
		for _, of := range []string{"kvrouter_ejections_total", "kvrouter_hedges_total", "kvrouter_retries_total"} {
			if value > 0 && strings.HasPrefix(name, of) {
				t.Errorf("%s is %v", name, value)
			}
		}
	}
}

// killed kills a worker under traffic and then the
// router itself.
func killed(t *testing.T, s *test.Router) {
	random := rand.New(rand.NewPCG(3, 3))
	prompts := make([][]map[string]string, 8)
	for i := range prompts {
		prompts[i] = []map[string]string{test.Message("system", test.Words(random, 150)), test.Message("user", "Go on.")}
	}

	// Traffic, and a kill in the middle of it.
	ctx, stop := context.WithTimeout(t.Context(), 3*time.Minute)
	defer stop()
	killed := make(chan struct{})
	var traffic sync.WaitGroup
	var mu sync.Mutex
	served := map[uint64]int{}
	texts := make([]map[string]int, len(prompts)) // of the answers to each prompt
	for i := range texts {
		texts[i] = map[string]int{}
	}
	for i := range 6 {
		traffic.Go(func() {
			for n := 0; ; n++ {
				which := (i + n) % len(prompts)
				a, err := s.Chat(ctx, prompts[which], true, 24)
				mu.Lock()
				switch {
				case err != nil:
					t.Errorf("a request failed before its first byte: %v", err)
				case a.Broken || !a.Finished || a.Output > 24:
					t.Errorf("a stream did not go on as one answer: %+v", a)
				default:
					served[a.Worker]++
					texts[which][a.Text]++
				}
				enough := served[0] >= 3 && served[1] >= 6
				mu.Unlock()
				select {
				case <-killed:
					if enough {
						return
					}
				default:
				}
				if ctx.Err() != nil {
					return
				}
			}
		})
	}
	testkit.Eventually(t, 2*time.Minute, "worker 0 busy", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return served[0] >= 3 && s.Workers()[0].InFlight > 0
	})
	long := longAnswer(t, ctx, s, 0, random)
	before := s.Workers()[0]
	if err := syscall.Kill(before.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	close(killed)
	if a := <-long; a.Broken || !a.Finished || a.Output != longTokens {
		t.Errorf("the stream that its worker had begun did not go on as one answer: %+v", a)
	}
	traffic.Wait()
	migrated := s.Metrics()[`kvrouter_migrations_total{result="ok"}`]
	t.Logf("served %v, %v streams continued, texts of the answers to each prompt: %v", served, migrated, texts)
	if migrated < 1 {
		t.Error("no stream was continued on the other worker")
	}

	// The worker comes back with an empty index.
	testkit.Eventually(t, time.Minute, "the worker seen dead", func() bool { return s.Workers()[0].Lifecycle != "schedulable" || s.Workers()[0].Restarts > 0 })
	s.WaitReady(2, 5*time.Minute)
	after := s.Workers()[0]
	if after.Restarts != 1 || after.Generation <= before.Generation || after.Blocks != 0 || after.InFlight != 0 {
		t.Errorf("after the restart: %+v", after)
	}
	// Old prompts find what their worker kept, new ones fall on either worker,
	// each sent twice: what the second finds shows that the index filled again.
	refilled := 0
	for i := 0; i < len(prompts) || refilled < 3; i++ {
		if i == 64 {
			t.Fatalf("the restarted worker served %d of %d new prompts", refilled, i)
		}
		c := []map[string]string{test.Message("system", test.Words(random, 150)), test.Message("user", "Go on.")}
		if i%2 == 0 {
			c = prompts[i/2%len(prompts)]
		}
		for range 2 {
			a, err := s.Chat(t.Context(), c, true, 4)
			if err != nil || !a.Finished {
				t.Fatalf("chat after the restart: %+v, %v", a, err)
			}
			if a.Predicted != a.Cached {
				t.Errorf("chat %d after the restart on worker %d: predicted %d, cached %d", i, a.Worker, a.Predicted, a.Cached)
			}
			if a.Worker == 0 && a.Cached > 0 {
				refilled++
			}
			s.Settled(c, a)
		}
	}

	s.KillFamily(4) // two API servers and two engine cores at least
}

// longTokens is the length of an answer that runs for seconds.
const longTokens = 200

// longAnswer starts chats until one is answered by that worker, and returns when its answer
// has begun.
func longAnswer(t *testing.T, ctx context.Context, s *test.Router, worker uint64, random *rand.Rand) <-chan test.Answer {
	t.Helper()
	answer := make(chan test.Answer, 1)
	for range 20 {
		body, _ := json.Marshal(map[string]any{
			"messages": []map[string]string{test.Message("user", test.Words(random, 50))}, "stream": true, "stream_options": map[string]bool{"include_usage": true},
			"max_tokens": longTokens, "ignore_eos": true, "temperature": 0,
		})
		request, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.OpenAI+testkit.ChatPath, bytes.NewReader(body))
		request.Header.Set("Content-Type", "application/json")
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		events := bufio.NewReader(response.Body)
		if _, err := events.Peek(1); err != nil {
			t.Fatal(err)
		}
		if response.Header.Get(web.HeaderWorker) != strconv.FormatUint(worker, 10) {
			defer response.Body.Close() // until then it makes its worker the busier one
			continue
		}
		go func() { // ends with the answer, or with ctx
			defer response.Body.Close()
			a, _ := test.ReadAnswer(response.Header, events, true)
			answer <- a
		}()
		return answer
	}
	t.Fatalf("worker %d answered none of 20 chats", worker)
	return nil
}

// clientTrace is the trace that clients of these tests are in, and clientParent what
// their header says of it.
const (
	clientTrace  = "0af7651916cd43dd8448eb211c80319c"
	clientSpan   = "b7ad6b7169203331"
	clientParent = "00-" + clientTrace + "-" + clientSpan + "-01"
)

// traced has a router and a vLLM worker tell the same collector of one
// chat, whose client is traced, too: it is one tree.
func traced(t *testing.T, s *test.Router, c *collector.Collector) {
	if status := tracedChat(t, s, "What is the capital of France?", true, "traceparent", clientParent); status != http.StatusOK {
		t.Fatal(status)
	}
	engine := func() (of []collector.Span) {
		for _, span := range c.Spans(clientTrace) {
			if span.Service == "vllm" {
				of = append(of, span)
			}
		}
		return of
	}
	testkit.Eventually(t, time.Minute, "spans of the router and of vLLM", func() bool { return len(engine()) > 0 && len(c.Spans(clientTrace)) >= len(engine())+4 })
	spans := c.Spans(clientTrace)
	t.Logf("one trace through router and engine, below the client's span %s:\n%s", clientSpan, collector.Tree(spans, true))
	ids := map[string]collector.Span{}
	for _, span := range spans {
		ids[span.ID] = span
	}
	for _, span := range spans {
		if span.Service == "vllm" && ids[span.Parent].Service != "vllm" && ids[span.Parent].Name != "attempt" {
			t.Errorf("vLLM's %s hangs below %q", span.Name, ids[span.Parent].Name)
		}
		if _, known := ids[span.Parent]; !known && span.Parent != clientSpan {
			t.Errorf("%s hangs below no span of the trace", span.Name)
		}
		if span.Service == "my-router" && span.Kind == "SERVER" && span.Parent != clientSpan {
			t.Errorf("the router's span hangs below %q", span.Parent)
		}
	}
	if n := len(engine()); n == 0 || engine()[0].Attributes["gen_ai.usage.prompt_tokens"] == "" {
		t.Errorf("%d spans of vLLM, none with usage", n)
	}
}

// tracedChat sends a chat with headers of a client's and returns the status.
func tracedChat(t *testing.T, s *test.Router, content string, stream bool, headers ...string) int {
	t.Helper()
	text, _ := json.Marshal(map[string]any{"messages": []map[string]string{test.Message("user", content)}, "max_tokens": 8, "stream": stream})
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.OpenAI+testkit.ChatPath, bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		request.Header.Add(headers[i], headers[i+1])
	}
	return statusOf(t, request)
}

// statusOf sends a request, reads the whole answer and returns its status; 0: there is none.
func statusOf(t *testing.T, request *http.Request) int {
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Error(err)
		return 0
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		t.Error(err)
	}
	return response.StatusCode
}

// tokensIn is the route for prompts in tokens.
const tokensIn = "/inference/v1/generate"

// TestPrefillAndDecodeWorkersOnRealVLLM has one worker compute the prompts and
// another the answers: NIXL carries the blocks between them. In the end it kills
// the first.
func TestPrefillAndDecodeWorkersOnRealVLLM(t *testing.T) {
	s := &test.Pair{Router: test.StartParts(t, []string{"--prefill-workers=1", "--decode-workers=1"}, 2, nil)}
	before := s.Workers()
	for i, role := range []kv.Role{test.Prefill: kv.RolePrefill, test.Decode: kv.RoleDecode} {
		if selection.Given(before[i].Role, kv.RoleBoth) != role || selection.Given(before[i].Kind, kv.KindNone) != kv.KindNIXL {
			t.Errorf("worker %d: %+v", i, before[i])
		}
	}
	shared := func() float64 { return s.Shared(kv.KindNIXL, proxy.SharedOK) }
	random := rand.New(rand.NewPCG(5, 5))

	// The answer is right, streamed or not, and was computed by two.
	for _, stream := range []bool{false, true} {
		messages := test.Question(test.Words(random, 280))
		a := s.Send(messages, stream, 16)
		if !strings.Contains(a.Text, "Paris") || a.Prefill != "0" || a.Prompt < 280 || a.Predicted != a.Cached {
			t.Errorf("streamed %v: %+v", stream, a)
		}
		// What came over is in the decode worker's cache and in the index: it now has
		// most of the same prompt itself.
		s.Settled(messages, a)
		again := s.Send(messages, stream, 16)
		if again.Text != a.Text || again.Prefill != "" || again.Cached < a.Prompt-64 || again.Predicted != again.Cached {
			t.Errorf("streamed %v: %+v and then %+v", stream, a, again)
		}
	}

	// Traffic: four clients with a system prompt each, which the prefill worker
	// keeps.
	const chats, clients = 100, 4
	first, moved := shared(), s.Engine(test.Decode, "vllm:nixl_xfer_time_seconds_count")
	exact, reused := 0, 0
	for _, a := range s.Traffic(chats, clients, 4, func(random *rand.Rand) func() []map[string]string {
		system := test.Message("system", test.Words(random, 140))
		return func() []map[string]string {
			return []map[string]string{system, test.Message("user", test.Words(random, 270))}
		}
	}) {
		if a.Predicted == a.Cached {
			exact++
		}
		if a.Cached > 0 {
			reused++
		}
	}
	// A request is counted when it has ended here, which its client need not wait for.
	testkit.Eventually(t, 10*time.Second, "all chats counted as shared", func() bool { return shared()-first == chats })
	// The engine shows what it counts with its next step, or ten seconds later.
	testkit.Eventually(t, 20*time.Second, "the engine's own count of transfers", func() bool {
		return s.Engine(test.Decode, "vllm:nixl_xfer_time_seconds_count")-moved >= chats
	})
	if n := s.Engine(test.Decode, "vllm:nixl_num_failed_transfers_total") + s.Engine(test.Prefill, "vllm:nixl_num_kv_expired_reqs_total"); n != 0 {
		t.Errorf("%v transfers failed or came too late", n)
	}
	// Clients do not share prompts; each but its first finds its system prompt.
	if reused != chats-clients {
		t.Errorf("%d chats found their system prompt at the prefill worker, want %d", reused, chats-clients)
	}
	t.Logf("%d of %d overlaps predicted exactly; %v transfers in %v s, %v bytes", exact, chats, s.Engine(test.Decode, "vllm:nixl_xfer_time_seconds_count"),
		s.Engine(test.Decode, "vllm:nixl_xfer_time_seconds_sum"), s.Engine(test.Decode, "vllm:nixl_bytes_transferred_sum"))
	nothingHeld(s)

	// Every route with a prompt, streamed or not.
	model := gjson.GetBytes(s.Get(s.OpenAI+"/v1/models"), "data.0.id").Str
	for path, body := range map[string]string{
		"/v1/completions": `{"prompt":%s,"max_tokens":4,"stream":%v}`,
		"/v1/responses":   `{"input":%s,"max_output_tokens":4,"stream":%v}`,
		"/v1/messages":    `{"model":"` + model + `","messages":[{"role":"user","content":%s}],"max_tokens":4,"stream":%v}`,
		tokensIn:          `{"token_ids":%s,"sampling_params":{"max_tokens":4,"ignore_eos":true},"stream":%v}`,
	} {
		for _, stream := range []bool{false, true} {
			first, moved := shared(), s.Engine(test.Decode, "vllm:nixl_xfer_time_seconds_count")
			prompt := proxy.Quoted(test.Words(random, 300))
			if path == tokensIn {
				ids := make([]string, 300)
				for i := range ids {
					ids[i] = strconv.Itoa(100 + random.IntN(5000))
				}
				prompt = "[" + strings.Join(ids, ",") + "]"
			}
			text := fmt.Sprintf(body, prompt, stream)
			if path == "/v1/completions" || path == tokensIn { // the others tell their usage unasked
				text = strings.Replace(text, `"stream":true`, `"stream":true,"stream_options":{"include_usage":true}`, 1)
			}
			status, answer := test.Post(t, s.OpenAI+path, text)
			if u := test.LastUsage(answer); status != http.StatusOK || u.PromptTokens < 300 || u.OutputTokens != 4 {
				t.Errorf("%s streamed %v: %d, usage %+v in %s", path, stream, status, u, answer)
			}
			testkit.Eventually(t, 20*time.Second, path+" counted as shared and as a transfer", func() bool {
				return shared() == first+1 && s.Engine(test.Decode, "vllm:nixl_xfer_time_seconds_count") == moved+1
			})
		}
	}

	namesNoHosts(t, s, model)

	// The prefill worker dies with a prompt: the decode worker does all of it, at
	// once and from then on.
	dying := make(chan test.Answer, 1)
	go func() {
		a, err := s.Chat(t.Context(), []map[string]string{test.Message("user", test.Words(rand.New(rand.NewPCG(7, 7)), 4000))}, true, 4)
		if err != nil {
			t.Errorf("the chat whose prompt died: %v", err)
		}
		dying <- a
	}()
	testkit.Eventually(t, 30*time.Second, "the prefill worker at work", func() bool { return s.Workers()[test.Prefill].InFlight > 0 })
	if err := syscall.Kill(-before[test.Prefill].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if a := s.Send(test.Question(test.Words(random, 280)), true, 16); a.Prefill != "" || !strings.Contains(a.Text, "Paris") {
		t.Errorf("the next chat: %+v", a)
	}
	if a := <-dying; !a.Finished || a.Broken || a.Worker != test.Decode || a.Prefill != "" {
		t.Errorf("the chat whose prompt died: %+v", a)
	}

	// It comes back to its part and its place.
	testkit.Eventually(t, time.Minute, "the prefill worker seen dead", func() bool {
		w := s.Workers()[test.Prefill]
		return w.Restarts > 0 || w.Lifecycle != "schedulable"
	})
	s.WaitReady(2, 5*time.Minute)
	after := s.Workers()[test.Prefill]
	if after.Restarts != 1 || *after.Endpoint != *before[test.Prefill].Endpoint || selection.Given(after.Role, kv.RoleBoth) != kv.RolePrefill {
		t.Errorf("after the restart: %+v", after)
	}
	if a := s.Send(test.Question(test.Words(random, 280)), true, 16); a.Prefill != "0" || !strings.Contains(a.Text, "Paris") {
		t.Errorf("a chat after the restart: %+v", a)
	}
	nothingHeld(s)
}

// namesNoHosts has clients name a host from which the decode worker is to load blocks: it never
// connects there, unless it is asked directly.
func namesNoHosts(t *testing.T, s *test.Pair, model string) {
	foreign, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	var connections atomic.Int32
	go func() { // ends with the listener
		for {
			conn, err := foreign.Accept()
			if err != nil {
				return
			}
			connections.Add(1)
			conn.Close()
		}
	}()
	port := foreign.Addr().(*net.TCPAddr).Port
	params := fmt.Sprintf(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"foreign","remote_request_id":"foreign","remote_block_ids":[[1,2,3,4]],"remote_host":"127.0.0.1","remote_port":%d,"tp_size":1}`, port)
	random := rand.New(rand.NewPCG(9, 9))
	prompt := func() string { return proxy.Quoted(test.Words(random, 300)) }
	chat := func(more string) string {
		return `{"model":"` + model + `","messages":[{"role":"user","content":` + prompt() + `}],"max_tokens":4` + more + `}`
	}
	address := foreign.Addr().String()
	header := http.Header{"X-Prefiller-Host-Port": {address}, "X-Kv-Cache-Source-Host-Port": {address}, "X-Data-Parallel-Host-Port": {address}}
	for _, c := range []struct {
		path, body string
		want       int
	}{
		{"/v1/chat/completions", chat(`,"kv_transfer_params":` + params), 400},
		{"/v1/chat/completions", chat(`,"\u006bv_transfer_params":` + params), 400},
		{"/v1/chat/completions", chat(`,"kv_transfer_params":null,"kv_transfer_params":` + params), 400},
		{"/v1/chat/completions", chat(`,"vllm_xargs":{"kv_transfer_params":"x"}`), 400},
		{"/v1/messages", chat(`,"kv_transfer_params":` + params), 400},
		{"/v1/completions", `{"prompt":` + prompt() + `,"max_tokens":4,"kv_transfer_params":` + params + `}`, 400},
		{"/v1/responses", `{"input":` + prompt() + `,"max_output_tokens":4,"kv_transfer_params":` + params + `}`, 400},
		{"/inference/v1/generate", `{"token_ids":[1,2,3],"sampling_params":{"max_tokens":4,"extra_args":{"kv_transfer_params":` + params + `}}}`, 400},
		{"/v1/chat/completions", chat(`,"kv_transfer_params":null`), 200},
	} {
		request, _ := http.NewRequest(http.MethodPost, s.OpenAI+c.path, strings.NewReader(c.body))
		request.Header = header.Clone()
		request.Header.Set("Content-Type", "application/json")
		if got := statusOf(t, request); got != c.want {
			t.Errorf("%s %.200s: %d, want %d", c.path, c.body[max(0, len(c.body)-200):], got, c.want)
		}
	}
	if n := connections.Load(); n != 0 {
		t.Errorf("%d connections to a host that clients named", n)
	}
	// The same request does so where nothing stands in between.
	request, _ := http.NewRequest(http.MethodPost, *s.Workers()[test.Decode].Endpoint+"/v1/chat/completions", strings.NewReader(chat(`,"kv_transfer_params":`+params)))
	request.Header.Set("Content-Type", "application/json")
	done := make(chan struct{})
	go func() { // ends with the request
		defer close(done)
		statusOf(t, request)
	}()
	testkit.Eventually(t, time.Minute, "a connection to the foreign host", func() bool { return connections.Load() > 0 })
	<-done
}

// nothingHeld checks that an idle site soon holds no bookings and its engines no
// blocks.
func nothingHeld(s *test.Pair) {
	s.T.Helper()
	testkit.Eventually(s.T, 10*time.Second, "both workers without bookings and used blocks", func() bool {
		workers := s.Workers()
		for i, w := range workers {
			if w.InFlight != 0 || w.PrefillTokens != 0 || s.Engine(i, "vllm:kv_cache_usage_perc") != 0 {
				return false
			}
		}
		return len(workers) == 2
	})
}
