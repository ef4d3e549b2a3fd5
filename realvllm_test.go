package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/kv"
	"kvrouter/internal/process"
	"kvrouter/internal/proxy"
	"kvrouter/internal/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/vllm"
)

// TestPredictionIsTrueOnRealVLLM holds ten growing conversations with a worker
// whose cache is too small for them, and compares each prediction with what the
// engine found; then every prompt shape with the engine's own tokens.
func TestPredictionIsTrueOnRealVLLM(t *testing.T) {
	s := startSite(t, 1, []string{"VLLM_SERVER_DEV_MODE=1"}, "--", "--num-gpu-blocks-override", "60", "--max-model-len", "3776")
	worker := *s.workers()[0].Endpoint
	random := rand.New(rand.NewPCG(7, 7))
	conversations := make([][]map[string]string, 10)
	for i := range conversations {
		conversations[i] = []map[string]string{message("system", words(random, 60+30*i))}
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
		*c = append(*c, message("user", words(random, 10+random.IntN(60))))
		a, err := s.chat(t.Context(), *c, i%2 == 0, 8)
		if err != nil || !a.finished {
			t.Fatalf("chat %d: %+v, %v", i, a, err)
		}
		cached += a.cached
		// The engine publishes that it emptied its cache with its next step.
		if a.predicted != a.cached && i != 40 {
			wrong = append(wrong, fmt.Sprintf("chat %d: predicted %d, cached %d of %d", i, a.predicted, a.cached, a.prompt))
		}
		s.settled(*c, a)
		*c = append(*c, message("assistant", a.text))
	}
	if len(wrong) > 0 {
		t.Errorf("%d of 60 predictions are wrong:\n%s", len(wrong), strings.Join(wrong, "\n"))
	}
	if cached == 0 {
		t.Error("no chat found anything cached: the test shows nothing")
	}
	if !strings.Contains(string(s.get(s.openAI+"/metrics")), `kind="removed_blocks"`) {
		t.Error("metrics do not show evictions")
	}

	t.Run("prompts equal the engine's on every way to them", func(t *testing.T) {
		model := testModel(t)
		model.SetMaxModelLen(3776)
		compareWithWorker(t, model, worker)
	})
	t.Run("mock workers answer as the engine", func(t *testing.T) { compareWithMock(t, worker, 3776) })
	t.Run("tokens equal the engine's", func(t *testing.T) {
		chats := parityChats()
		if len(chats) < 40 {
			t.Fatalf("%d chats, want 40 at least", len(chats))
		}
		for i, body := range chats {
			own, theirs := s.tokenize(s.openAI, body), s.tokenize(worker, body)
			if own != theirs {
				t.Errorf("chat %d: %s\nrouter %s\nengine %s", i, body, own, theirs)
			}
		}
		t.Logf("%d chats compared", len(chats))
		if page := string(s.get(s.openAI + "/metrics")); strings.Contains(page, "kvrouter_prompt_tokens_mismatch_total{") {
			t.Error("usage.prompt_tokens differed from the router's count")
		}
	})
}

// TestWorkerAndRouterDeathOnRealVLLM kills a worker under traffic and then the
// router itself.
func TestWorkerAndRouterDeathOnRealVLLM(t *testing.T) {
	s := startSite(t, 2, nil)
	random := rand.New(rand.NewPCG(3, 3))
	prompts := make([][]map[string]string, 8)
	for i := range prompts {
		prompts[i] = []map[string]string{message("system", words(random, 150)), message("user", "Go on.")}
	}

	// Traffic, and a kill in the middle of it.
	ctx, stop := context.WithTimeout(t.Context(), 3*time.Minute)
	defer stop()
	killed := make(chan struct{})
	var traffic sync.WaitGroup
	var mu sync.Mutex
	served, broken := map[uint64]int{}, 0
	for i := range 6 {
		traffic.Go(func() {
			for n := 0; ; n++ {
				a, err := s.chat(ctx, prompts[(i+n)%len(prompts)], true, 24)
				mu.Lock()
				switch {
				case err != nil:
					t.Errorf("a request failed before its first byte: %v", err)
				case a.broken:
					broken++
				case !a.finished:
					t.Errorf("a stream ended without [DONE] or an error event: %+v", a)
				default:
					served[a.worker]++
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
		return served[0] >= 3 && s.workers()[0].InFlight > 0
	})
	before := s.workers()[0]
	if err := syscall.Kill(before.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	close(killed)
	traffic.Wait()
	t.Logf("served %v, %d streams broken off in the middle", served, broken)

	// The worker comes back with an empty index.
	testkit.Eventually(t, time.Minute, "the worker seen dead", func() bool { return s.workers()[0].Lifecycle != "schedulable" || s.workers()[0].Restarts > 0 })
	s.waitReady(2, 5*time.Minute)
	after := s.workers()[0]
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
		c := []map[string]string{message("system", words(random, 150)), message("user", "Go on.")}
		if i%2 == 0 {
			c = prompts[i/2%len(prompts)]
		}
		for range 2 {
			a, err := s.chat(t.Context(), c, true, 4)
			if err != nil || !a.finished {
				t.Fatalf("chat after the restart: %+v, %v", a, err)
			}
			if a.predicted != a.cached {
				t.Errorf("chat %d after the restart on worker %d: predicted %d, cached %d", i, a.worker, a.predicted, a.cached)
			}
			if a.worker == 0 && a.cached > 0 {
				refilled++
			}
			s.settled(c, a)
		}
	}

	s.familyDiesWithIt(4) // two API servers and two engine cores at least
}

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

// prefill and decode are the workers of a pairSite, as ids and as places in the list.
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

// TestMooncakeWorkersOnRealVLLM attaches two vLLM workers with MooncakeConnector,
// which hand prompts over by TCP. In the end it kills the one that computes them
// and starts it again. `make test-mooncake` names the folder of Mooncake's
// engine.
func TestMooncakeWorkersOnRealVLLM(t *testing.T) {
	folder := os.Getenv("KVROUTER_MOONCAKE")
	if folder == "" {
		t.Skip("make test-mooncake runs it")
	}
	const limit = 10 * time.Minute // of a worker's start beside other work
	ports := testkit.FreePorts(t, 11)
	workers := startMooncakeWorkers(t, folder, ports+2)
	started := time.Now()
	kill := workers.start(prefill)
	workers.start(decode)
	s := &pairSite{startProgram(t, ports, nil, "--engine=none", "--model="+workers.cfg.Model,
		fmt.Sprintf("--worker=url=%s,id=0,role=prefill,kind=mooncake,bootstrap=127.0.0.1:%d", workers.cfg.workerPorts().URL(prefill), workers.bootstrap),
		fmt.Sprintf("--worker=url=%s,id=1,role=decode,kind=mooncake", workers.cfg.workerPorts().URL(decode)))}
	s.waitReady(2, limit)
	t.Logf("both workers ready after %.0f s", time.Since(started).Seconds())
	random := rand.New(rand.NewPCG(8, 8))
	shared := func(result string) float64 { return s.shared(kv.KindMooncake, result) }

	// The first of an incarnation also introduces the workers to each other.
	if a := s.send(question(words(random, 280)), true, 16); a.prefill != "0" || !strings.Contains(a.text, "Paris") {
		t.Errorf("the first chat: %+v", a)
	}

	// Four clients, whose prompts begin with two blocks or more of their own.
	const chats, clients, shortest = 100, 4, 280
	fetched := func() float64 {
		return s.engine(decode, fmt.Sprintf(`vllm:prompt_tokens_by_source_total{engine="0",model_name=%q,source="external_kv_transfer"}`, workers.cfg.ServedModelName))
	}
	reused := func() float64 { return s.engine(prefill, "vllm:prefix_cache_hits_total") }
	exact := func() float64 { return sumOf(s.get(s.openAI+"/metrics"), `kvrouter_predictions_total{result="exact"}`) }
	fetchedBefore, reusedBefore, exactBefore, first := fetched(), reused(), exact(), shared(proxy.SharedOK)
	began, tokens := time.Now(), 0
	for _, a := range s.traffic(chats, clients, 16, func(random *rand.Rand) func() []map[string]string {
		own := words(random, 140)
		return func() []map[string]string { return question(own + " " + words(random, shortest)) }
	}) {
		if !strings.Contains(a.text, "Paris") {
			t.Errorf("a wrong answer: %+v", a)
		}
		tokens += a.prompt
	}
	took := time.Since(began)
	testkit.Eventually(t, 10*time.Second, "all chats counted as shared", func() bool { return shared(proxy.SharedOK)-first == chats })
	testkit.Eventually(t, 20*time.Second, "the prompts in the engines' own counts", func() bool {
		return fetched()-fetchedBefore >= chats*shortest && reused()-reusedBefore >= (chats-clients)*2*64
	})
	t.Logf("%d chats in %.1f s: of %d prompt tokens the prefill worker had %v and the decode worker fetched %v; %v overlaps predicted exactly", chats, took.Seconds(),
		tokens, reused()-reusedBefore, fetched()-fetchedBefore, exact()-exactBefore)
	s.nothingHeld()

	// An answer that its first token ends: the prefill worker must not end there, or
	// it would keep nothing.
	for _, stream := range []bool{false, true} {
		const endOfText = 2 // of SmolLM2: <|im_end|>
		body := fmt.Sprintf(`{"messages":[{"role":"user","content":%s}],"max_tokens":8,"stream":%v,"logit_bias":{"%d":100}}`, proxy.Quoted(words(random, 300)), stream, endOfText)
		first, began := shared(proxy.SharedOK), time.Now()
		status, answer := post(t, s.openAI+testkit.ChatPath, body)
		if status != http.StatusOK || !strings.Contains(string(answer), `"finish_reason":"stop"`) || strings.Contains(string(answer), `"error":`) {
			t.Errorf("an answer of no token, streamed %v: %d %s", stream, status, answer)
		}
		testkit.Eventually(t, 10*time.Second, "an answer of no token counted as shared", func() bool { return shared(proxy.SharedOK) == first+1 })
		t.Logf("an answer of no token, streamed %v: after %.2f s", stream, time.Since(began).Seconds())
	}
	s.nothingHeld()

	// Clients that leave while their prompts are computed leave nothing behind.
	const leaving = 20
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	var left sync.WaitGroup
	abandoned := shared(proxy.SharedAbandoned)
	for range leaving {
		text := words(random, 1500)
		left.Go(func() {
			if a, err := s.chat(ctx, []map[string]string{message("user", text)}, true, 200); err == nil {
				t.Errorf("a client that was to leave was answered: %+v", a)
			}
		})
	}
	testkit.Eventually(t, time.Minute, "the prefill worker at work and most of them with it", func() bool {
		running, waiting := s.engine(prefill, "vllm:num_requests_running"), s.engine(prefill, "vllm:num_requests_waiting")
		return running > 0 && running+waiting > leaving/2
	})
	leave()
	left.Wait()
	testkit.Eventually(t, 10*time.Second, "the clients seen to have left", func() bool { return shared(proxy.SharedAbandoned)-abandoned == leaving })
	s.nothingHeld()

	// Without the prefill worker the decode worker does all of it.
	kill()
	began = time.Now()
	if a := s.send(question(words(random, 280)), true, 16); a.prefill != "" || !strings.Contains(a.text, "Paris") {
		t.Errorf("the chat after the kill: %+v", a)
	}
	t.Logf("the chat after the kill: %.2f s", time.Since(began).Seconds())
	testkit.Eventually(t, time.Minute, "the prefill worker seen dead", func() bool { return s.workers()[prefill].Lifecycle != "schedulable" })

	// It comes back to the same ports, and the decode worker fetches from it again.
	began = time.Now()
	workers.start(prefill)
	s.waitReady(2, limit)
	t.Logf("ready again after %.0f s", time.Since(began).Seconds())
	for _, stream := range []bool{false, true} {
		if a := s.send(question(words(random, 280)), stream, 16); a.prefill != "0" || !strings.Contains(a.text, "Paris") {
			t.Errorf("a chat after the restart: %+v", a)
		}
	}
	s.nothingHeld()
}

// mooncakeWorkers starts a prefill and a decode worker as the router starts its
// own, with MooncakeConnector in place of NIXL.
type mooncakeWorkers struct {
	t         *testing.T
	cfg       Config
	bootstrap int // port of the prefill worker's bootstrap server
	environ   []string
}

// startMooncakeWorkers prepares them; they take nine ports from the given one
// on.
func startMooncakeWorkers(t *testing.T, folder string, port int) *mooncakeWorkers {
	t.Helper()
	cfg, _, err := ParseConfig([]string{"--num-workers=2", fmt.Sprintf("--base-worker-port=%d", port), fmt.Sprintf("--base-kv-events-port=%d", port+2),
		fmt.Sprintf("--base-kv-replay-port=%d", port+4), fmt.Sprintf("--base-metrics-port=%d", port+6)})
	if err != nil {
		t.Fatal(err)
	}
	plugin, err := filepath.Abs("testdata/mooncake")
	if err != nil {
		t.Fatal(err)
	}
	return &mooncakeWorkers{t, cfg, port + 8, append(os.Environ(), "PYTHONPATH="+folder+":"+plugin, "PYTHONDONTWRITEBYTECODE=1",
		"VLLM_HOST_IP=127.0.0.1", fmt.Sprintf("VLLM_MOONCAKE_BOOTSTRAP_PORT=%d", port+8))}
}

// start starts worker i. kill kills it with all of its processes, as the end of
// the test does.
func (m *mooncakeWorkers) start(i int) (kill func()) {
	m.t.Helper()
	plugins, err := filepath.Abs("internal/vllm/plugin")
	if err != nil {
		m.t.Fatal(err)
	}
	spec, err := vllm.Engine().Command(m.cfg.engineSettings(), i, plugins, m.environ)
	if err != nil {
		m.t.Fatal(err)
	}
	spec.Argv = append(spec.Argv, "--kv-transfer-config", fmt.Sprintf(
		`{"kv_connector":"MooncakeConnector","kv_role":%q,"kv_load_failure_policy":"recompute","kv_connector_extra_config":{"mooncake_protocol":"tcp"}}`,
		[]string{prefill: "kv_producer", decode: "kv_consumer"}[i]))
	log, pid, ended := &testkit.LogBuffer{}, make(chan int, 1), make(chan error, 1)
	go func() {
		ended <- process.Run(spec, func(id int) { pid <- id }, func(_, text string) { fmt.Fprintln(log, text) })
	}()
	var group int
	select {
	case group = <-pid:
	case err := <-ended:
		m.t.Fatal(err)
	}
	kill = sync.OnceFunc(func() {
		if err := process.SignalGroup(group, syscall.SIGKILL); err != nil {
			m.t.Error(err)
		}
		<-ended
	})
	m.t.Cleanup(func() {
		kill()
		if m.t.Failed() {
			m.t.Logf("end of worker %d's log:\n%s", i, log.Tail())
		}
	})
	return kill
}
