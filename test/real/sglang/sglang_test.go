package sglang

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// realSGLang skips a test that `make test-sglang` does not run.
func realSGLang(t *testing.T) {
	t.Helper()
	if os.Getenv("KVROUTER_SGLANG") == "" {
		t.Skip("make test-sglang runs it")
	}
}

// site is a router whose workers are SGLang's.
type site struct{ *test.Router }

// attach starts a router over workers that run already and waits until it has them.
func attach(t *testing.T, workers []string, args ...string) *site {
	t.Helper()
	all := []string{"--engine=none", "--model=" + test.ModelFolder()}
	for _, url := range workers {
		all = append(all, "--worker=url="+url)
	}
	s := &site{test.Start(t, append(all, args...)...)}
	s.WaitReady(len(workers), time.Minute)
	return s
}

// exchange is what one request came to.
type exchange struct {
	Body      string // of the request
	Status    int
	Worker    string
	Predicted int // tokens of overlap in the header
	Prompt    int // tokens of the prompt
	Cached    int // tokens the engine says it had
	Answer    []byte
}

// ask posts a request and reads its whole answer.
func (s *site) ask(path, body string) exchange {
	s.T.Helper()
	response, err := http.Post(s.OpenAI+path, "application/json", strings.NewReader(body))
	if err != nil {
		s.T.Fatal(err)
	}
	defer response.Body.Close()
	a := exchange{Body: path + " " + body, Status: response.StatusCode, Worker: response.Header.Get(web.HeaderWorker)}
	a.Predicted, _ = strconv.Atoi(response.Header.Get(web.HeaderOverlap))
	if a.Answer, err = io.ReadAll(response.Body); err != nil {
		s.T.Fatalf("%s: %v", path, err)
	}
	if u := test.LastUsage(a.Answer); u.Known {
		a.Prompt, a.Cached = u.PromptTokens, u.CachedTokens
	}
	for line := range strings.Lines(string(a.Answer)) { // SGLang's own API
		if meta := gjson.Get(strings.TrimPrefix(line, "data: "), "meta_info"); meta.Exists() {
			a.Prompt, a.Cached = int(meta.Get("prompt_tokens").Int()), int(meta.Get("cached_tokens").Int())
		}
	}
	return a
}

// calm waits until the events of all answers have come.
func (s *site) calm() {
	s.T.Helper()
	s.Calm(300 * time.Millisecond)
}

// blocks is how many blocks the index has of all workers.
func (s *site) blocks() (n int) {
	for _, w := range s.Workers() {
		n += w.Blocks
	}
	return n
}

// sglangKinds are the kinds of requests whose predictions must be exact, each as a
// path and a body with a place for a text as JSON and, as MODEL, the model's name. SGLang counts each as it renders
// it, which is not always what the template alone says.
var sglangKinds = []struct{ name, path, body string }{
	{"chat", testkit.ChatPath, `{"messages":[{"role":"system","content":%s},{"role":"user","content":"Go on."}],"max_tokens":4}`},
	{"streamed chat", testkit.ChatPath, `{"messages":[{"role":"system","content":%s},{"role":"user","content":"Go on."}],"max_tokens":4,"stream":true,"stream_options":{"include_usage":true}}`},
	{"chat that ends with the assistant", testkit.ChatPath, `{"messages":[{"role":"user","content":%s},{"role":"assistant","content":"The answer"}],"max_tokens":4}`},
	{"final message continued", testkit.ChatPath, `{"messages":[{"role":"user","content":%s},{"role":"assistant","content":"The answer is"}],"continue_final_message":true,"max_tokens":4}`},
	{"content in parts", testkit.ChatPath, `{"messages":[{"role":"user","content":[{"type":"text","text":%s},{"type":"text","text":"And then?"}]}],"max_tokens":4}`},
	{"tools", testkit.ChatPath, `{"messages":[{"role":"user","content":%s}],"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}],"tool_choice":"none","max_tokens":4}`},
	{"salted chat", testkit.ChatPath, `{"messages":[{"role":"user","content":%s}],"cache_salt":"tenant","max_tokens":4}`},
	{"completion", "/v1/completions", `{"prompt":%s,"max_tokens":4}`},
	{"streamed completion", "/v1/completions", `{"prompt":%s,"max_tokens":4,"stream":true,"stream_options":{"include_usage":true}}`},
	{"generate", "/generate", `{"text":%s,"sampling_params":{"max_new_tokens":4,"temperature":0}}`},
	{"streamed generate", "/generate", `{"text":%s,"sampling_params":{"max_new_tokens":4,"temperature":0},"stream":true}`},
	{"responses", "/v1/responses", `{"model":"MODEL","input":%s,"max_output_tokens":4}`},
	{"messages", "/v1/messages", `{"model":"MODEL","messages":[{"role":"user","content":%s}],"max_tokens":4}`},
}

// predictions sends n requests of all kinds one after the other, each kind with a
// few prompts that come again and grow, of shortest words at first, and returns those
// whose prediction was not what the engine found.
func (s *site) predictions(random *rand.Rand, shortest, n int, after func(i int)) (wrong []string, cached int) {
	s.T.Helper()
	texts := make([]string, 4)
	for i := range texts {
		texts[i] = test.Words(random, shortest+60*i)
	}
	model := gjson.GetBytes(s.Get(s.OpenAI+"/v1/models"), "data.0.id").Str
	for i := range n {
		kind := sglangKinds[i%len(sglangKinds)]
		text := &texts[random.IntN(len(texts))]
		a := s.ask(kind.path, strings.Replace(fmt.Sprintf(kind.body, proxy.Quoted(*text)), "MODEL", model, 1))
		if a.Status != http.StatusOK || a.Prompt == 0 {
			s.T.Fatalf("%s: %d %s", kind.name, a.Status, a.Answer)
		}
		if a.Predicted != a.Cached {
			wrong = append(wrong, fmt.Sprintf("request %d, %s: predicted %d, cached %d of %d", i, kind.name, a.Predicted, a.Cached, a.Prompt))
		}
		cached += a.Cached
		s.calm()
		if random.IntN(3) == 0 {
			*text += " " + test.Words(random, 20)
		}
		after(i)
	}
	return wrong, cached
}

// page is the size of the two workers' pages, tokens: not the default.
const page = 16

// predicted sends requests of all kinds to a server whose cache is too small for them,
// through a router over it alone, and compares each prediction with what the server
// found, the index with the server's own count, and prompts with the server's. Then
// another router attaches to the server, by its URL alone.
func predicted(t *testing.T, worker string) {
	s := attach(t, []string{worker}, fmt.Sprintf("--block-size=%d", page))
	evictable := func() int { return int(test.SumOf(s.Get(worker+"/metrics"), "sglang:kv_evictable_tokens")) }
	sameSize := func(router *site) {
		t.Helper()
		// An idle server's figures can be 30 s old.
		testkit.Eventually(t, time.Minute, "an index of the server's own size", func() bool { return router.blocks()*page == evictable() })
	}

	wrong, cached := s.predictions(rand.New(rand.NewPCG(7, 7)), 80, 65, func(i int) {
		if i == 45 {
			if status, answer := test.Post(t, worker+"/flush_cache", ""); status != http.StatusOK {
				t.Fatalf("/flush_cache: %d %s", status, answer)
			}
			testkit.Eventually(t, 10*time.Second, "an empty index after a flush", func() bool { return s.blocks() == 0 })
		}
	})
	if len(wrong) > 0 {
		t.Errorf("%d predictions are wrong:\n%s", len(wrong), strings.Join(wrong, "\n"))
	}
	if cached == 0 || !strings.Contains(string(s.Get(s.OpenAI+"/metrics")), `kind="removed_blocks"`) {
		t.Error("nothing was cached, or nothing evicted: the test shows nothing")
	}
	sameSize(s)

	t.Run("prompts that are kept apart are predicted apart", func(t *testing.T) {
		random := rand.New(rand.NewPCG(8, 8))
		text := proxy.Quoted(test.Words(random, 100))
		chat := func(extra string) exchange {
			a := s.ask(testkit.ChatPath, fmt.Sprintf(`{"messages":[{"role":"user","content":%s}],"max_tokens":4%s}`, text, extra))
			s.calm()
			return a
		}
		for i, test := range []struct {
			extra  string
			cached bool
		}{
			{`,"extra_key":"a"`, false}, {``, false}, {`,"extra_key":"a"`, true}, {`,"extra_key":"b"`, false}, {`,"cache_salt":"a"`, false}, {``, true}, {`,"extra_key":"b"`, true}, {`,"cache_salt":"a"`, true},
		} {
			// The first page is the template's own, and cached since earlier chats.
			if a := chat(test.extra); a.Status != http.StatusOK || a.Predicted != a.Cached || a.Cached > page != test.cached {
				t.Errorf("request %d: %+v", i, a)
			}
		}
	})
	t.Run("several prompts and answers", func(t *testing.T) {
		for _, body := range []string{`{"prompt":["One two three","Four five six"],"max_tokens":4}`, `{"prompt":"Once upon a time","n":2,"max_tokens":4}`} {
			if a := s.ask("/v1/completions", body); a.Status != http.StatusOK {
				t.Errorf("%+v", a)
			}
		}
		if a := s.ask("/generate", `{"text":["One two three","Four five six"],"sampling_params":{"max_new_tokens":4}}`); a.Status != http.StatusOK || len(gjson.ParseBytes(a.Answer).Array()) != 2 {
			t.Errorf("%+v: %s", a, a.Answer)
		}
	})
	t.Run("an empty prompt does not end the server", func(t *testing.T) {
		for _, body := range []string{`{"text":""}`, `{"text":["a",""]}`, `{"input_ids":[]}`} {
			if a := s.ask("/generate", body); a.Status != http.StatusBadRequest {
				t.Errorf("%+v: %s", a, a.Answer)
			}
		}
		if a := s.ask("/generate", `{"text":"a","sampling_params":{"max_new_tokens":2}}`); a.Status != http.StatusOK {
			t.Errorf("afterwards: %+v: %s", a, a.Answer)
		}
	})
	t.Run("prompts equal the server's", func(t *testing.T) {
		equal := 0
		for i, body := range test.ParityChats() {
			own, theirs := s.Tokenize(s.OpenAI, body), s.Tokenize(worker, body)
			if !strings.HasPrefix(theirs, "200 ") {
				continue // SGLang refuses what vLLM takes
			}
			if own != theirs {
				t.Errorf("chat %d: %s\nrouter %s\nserver %s", i, body, own, theirs)
			}
			equal++
		}
		t.Logf("%d chats compared", equal)
		if page := string(s.Get(s.OpenAI + "/metrics")); equal < 20 || strings.Contains(page, "kvrouter_prompt_tokens_mismatch_total{") {
			t.Error("too few were compared, or the server counted other prompt tokens than the router")
		}
	})
	// SGLang samples by seeds only with --enable-deterministic-inference.
	t.Run("answers are the same with the tokens of prompts", func(t *testing.T) { test.CompareTokens(t, worker, false) })
	t.Run("a stream of generate goes through byte for byte", func(t *testing.T) {
		url, sent := recorder(t, worker)
		second := attach(t, []string{url}, fmt.Sprintf("--block-size=%d", page))
		a := second.ask("/generate", `{"text":"Once upon a time there was","sampling_params":{"max_new_tokens":8,"temperature":0},"stream":true}`)
		if theirs := sent(); string(a.Answer) != theirs || !strings.HasSuffix(theirs, "data: [DONE]\n\n") {
			t.Errorf("through the router:\n%s\nfrom the server:\n%s", a.Answer, theirs)
		}
	})
	t.Run("attached by the URL alone", func(t *testing.T) {
		s.attachedAlone(t, worker, page, 1, 26)
	})
}

// recorder is a server in front of a worker that keeps the answers of /generate; sent
// returns them.
func recorder(t *testing.T, worker string) (address string, sent func() string) {
	target, err := url.Parse(worker)
	if err != nil {
		t.Fatal(err)
	}
	kept := &testkit.LogBuffer{}
	between := httputil.NewSingleHostReverseProxy(target)
	between.FlushInterval = -1
	between.ModifyResponse = func(r *http.Response) error {
		if r.Request.URL.Path == "/generate" {
			r.Body = struct {
				io.Reader
				io.Closer
			}{io.TeeReader(r.Body, kept), r.Body}
		}
		return nil
	}
	server := httptest.NewServer(between)
	t.Cleanup(server.Close)
	return server.URL, kept.String
}

// attachedAlone starts a second router that gets nothing but the URL of the
// first one's worker, and holds its predictions. The worker is left emptied.
func (s *site) attachedAlone(t *testing.T, worker string, page, ranks, requests int) {
	second := attach(t, []string{worker}, fmt.Sprintf("--block-size=%d", page))
	testkit.Eventually(t, 20*time.Second, "the same blocks in both indexes, by replay", func() bool { return second.blocks() == s.blocks() && second.blocks() > 0 })
	if n := test.SumOf(second.Get(second.OpenAI+"/metrics"), "kvrouter_kv_events_connected"); int(n) != ranks {
		t.Errorf("%v event streams, want %d", n, ranks)
	}
	wrong, cached := second.predictions(rand.New(rand.NewPCG(9, 9)), 40, requests, func(int) {})
	if len(wrong) > 0 || cached == 0 {
		t.Errorf("%d predictions are wrong, %d tokens cached:\n%s", len(wrong), cached, strings.Join(wrong, "\n"))
	}
}

// TestBothRanksAreUsedAndTrueOnRealSGLang starts a server with two data-parallel
// ranks and pages of the default size.
func TestBothRanksAreUsedAndTrueOnRealSGLang(t *testing.T) {
	realSGLang(t)
	s := &site{test.StartParts(t, []string{"--num-workers=1", "--engine=sglang"}, 1, nil, "--", "--dp-size", "2", "--max-total-tokens", "6000")}
	wrong, cached := s.predictions(rand.New(rand.NewPCG(5, 5)), 40, 26, func(int) {})
	if len(wrong) > 0 || cached == 0 {
		t.Errorf("%d predictions are wrong, %d tokens cached:\n%s", len(wrong), cached, strings.Join(wrong, "\n"))
	}
	page := s.Get(s.OpenAI + "/metrics")
	for rank := range 2 {
		if n := test.SumOf(page, fmt.Sprintf(`kvrouter_worker_blocks{dp_rank="%d",worker_id="0"}`, rank)); n == 0 {
			t.Errorf("rank %d holds no blocks:\n%s", rank, grepLines(page, "kvrouter_worker_blocks"))
		}
	}
	s.attachedAlone(t, *s.Workers()[0].Endpoint, 64, 2, 26)
}

// grepLines returns the lines of a page that begin with a word.
func grepLines(page []byte, word string) string {
	var found strings.Builder
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, word) {
			found.WriteString(line)
		}
	}
	return found.String()
}

// TestTwoWorkersOnRealSGLang has all look at the same two servers that need none of
// their own. In the end it kills one of them under traffic, and then the router.
func TestTwoWorkersOnRealSGLang(t *testing.T) {
	realSGLang(t)
	s := &site{test.StartParts(t, []string{"--num-workers=2", "--engine=sglang", fmt.Sprintf("--block-size=%d", page)}, 2, nil, "--", "--max-total-tokens", "4480", "--max-running-requests", "2")}
	urls := []string{*s.Workers()[0].Endpoint, *s.Workers()[1].Endpoint}
	t.Run("predictions are true", func(t *testing.T) { predicted(t, urls[0]) })
	t.Run("routing pays", func(t *testing.T) { routed(t, s, urls) })
	t.Run("worker and router die", s.killed)
}

// routed has two workers serve prompts with shared prefixes, which fit into both caches
// together but not into one. Then it holds that load is seen.
func routed(t *testing.T, s *site, urls []string) {
	over := func(t *testing.T, policy string) *site {
		return attach(t, urls, fmt.Sprintf("--block-size=%d", page), "--policy="+policy)
	}
	flush := func() {
		for _, url := range urls {
			testkit.Eventually(t, 20*time.Second, "a flushed cache", func() bool {
				status, _ := test.Post(t, url+"/flush_cache", "")
				return status == http.StatusOK
			})
		}
		testkit.Eventually(t, 10*time.Second, "an empty index", func() bool { return s.blocks() == 0 })
	}

	random := rand.New(rand.NewPCG(4, 4))
	prompts := make([]string, 14)
	for i := range prompts {
		prompts[i] = test.Words(random, 350)
	}
	hitRate := func(router *site) float64 {
		flush()
		order := rand.New(rand.NewPCG(1, 1))
		var mu sync.Mutex // guards the rest
		var clients sync.WaitGroup
		total, cached, left := 0, 0, 84
		for range 3 {
			clients.Go(func() {
				for {
					mu.Lock()
					system, number := prompts[order.IntN(len(prompts))], left
					left--
					mu.Unlock()
					if number <= 0 {
						return
					}
					a, err := router.Chat(t.Context(), []map[string]string{test.Message("system", system), test.Message("user", fmt.Sprint("Question ", number))}, true, 4)
					if err != nil || !a.Finished || a.Broken {
						t.Errorf("%+v, %v", a, err)
						return
					}
					mu.Lock()
					total, cached = total+a.Prompt, cached+a.Cached
					mu.Unlock()
				}
			})
		}
		clients.Wait()
		return float64(cached) / float64(max(1, total))
	}
	own, plain := hitRate(over(t, "work")), hitRate(over(t, "round-robin"))
	t.Logf("hit rate: work %.2f, round-robin %.2f", own, plain)
	if own < plain+0.05 {
		t.Errorf("policy work finds %.2f of the prompts cached, round-robin %.2f: routing does not pay", own, plain)
	}

	for _, policy := range []string{"standalone", "work"} {
		t.Run("a queue on one worker is seen within a second, "+policy, func(t *testing.T) {
			router := over(t, policy)
			flush()
			queueOn(t, router, urls[0])
		})
	}
}

// queueOn puts a queue of long requests on worker 0, past the router, and holds that
// the next twenty requests go elsewhere.
func queueOn(t *testing.T, router *site, url string) {
	var queue sync.WaitGroup
	rids := make([]string, 8)
	for i := range rids {
		rids[i] = fmt.Sprintf("queue-%d-%d", i, time.Now().UnixNano())
		queue.Go(func() {
			test.Post(t, url+"/generate", fmt.Sprintf(`{"rid":%q,"text":"Tell story %d","sampling_params":{"max_new_tokens":2000,"ignore_eos":true}}`, rids[i], i))
		})
	}
	defer queue.Wait()
	defer func() {
		for _, rid := range rids {
			test.Post(t, url+"/abort_request", fmt.Sprintf(`{"rid":%q}`, rid))
		}
	}()
	waiting := func() bool { return router.Workers()[0].WaitingReqs >= 4 }
	testkit.Eventually(t, 10*time.Second, "a queue on the server", func() bool {
		return test.SumOf(router.Get(url+"/metrics"), "sglang:num_queue_reqs") >= 4 || waiting()
	})
	testkit.Eventually(t, time.Second, "the queue seen by the router", waiting)
	random := rand.New(rand.NewPCG(2, 2))
	for i := range 20 {
		if a := router.ask(testkit.ChatPath, fmt.Sprintf(`{"messages":[{"role":"user","content":%s}],"max_tokens":2}`, proxy.Quoted(test.Words(random, 30)))); a.Worker != "1" {
			t.Errorf("request %d went to worker %s", i, a.Worker)
		}
	}
}

// killed kills worker 0 under traffic, waits until it is back with an empty index,
// and then kills the router, whose whole family must go.
func (s *site) killed(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 3))
	before := s.Workers()[0]
	stop := make(chan struct{})
	var traffic sync.WaitGroup
	var mu sync.Mutex // guards the rest
	served, broken := 0, 0
	for range 4 {
		text := test.Words(random, 100)
		traffic.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				a, err := s.Chat(t.Context(), []map[string]string{test.Message("user", text)}, true, 16)
				mu.Lock()
				switch {
				case err != nil:
					t.Errorf("a request failed before its first byte: %v", err)
				case a.Broken:
					broken++
				case !a.Finished:
					t.Errorf("a stream ended without [DONE] or an error event: %+v", a)
				}
				served++
				mu.Unlock()
			}
		})
	}
	testkit.Eventually(t, time.Minute, "worker 0 busy", func() bool { return s.Workers()[0].InFlight > 0 })
	if err := syscall.Kill(before.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	enough := served + 12
	mu.Unlock()
	testkit.Eventually(t, 2*time.Minute, "requests served after the kill", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return served >= enough
	})
	close(stop)
	traffic.Wait()
	t.Logf("%d requests, %d streams broken off in the middle", served, broken)
	testkit.Eventually(t, time.Minute, "the worker seen dead", func() bool { return s.Workers()[0].Restarts > 0 })
	s.WaitReady(2, 8*time.Minute)
	if after := s.Workers()[0]; after.Restarts != 1 || after.Generation <= before.Generation || after.Blocks != 0 || after.InFlight != 0 {
		t.Errorf("after the restart: %+v", after)
	}
	wrong, _ := s.predictions(random, 40, 13, func(int) {})
	if len(wrong) > 0 {
		t.Errorf("after the restart %d predictions are wrong:\n%s", len(wrong), strings.Join(wrong, "\n"))
	}

	s.KillFamily(6) // a server, a scheduler and a detokenizer each
}

// TestPrefillAndDecodeWorkersOnRealSGLang has one server compute the prompts and
// another the answers: NIXL carries the blocks between them. In the end it kills one
// after the other.
func TestPrefillAndDecodeWorkersOnRealSGLang(t *testing.T) {
	realSGLang(t)
	s := &test.Pair{Router: test.StartParts(t, []string{"--prefill-workers=1", "--decode-workers=1", "--engine=sglang", "--disagg-min-uncached-tokens=64"}, 2, nil)}
	before := s.Workers()
	for i, role := range []kv.Role{test.Prefill: kv.RolePrefill, test.Decode: kv.RoleDecode} {
		if selection.Given(before[i].Role, kv.RoleBoth) != role || selection.Given(before[i].Kind, kv.KindNone) != kv.KindSGLang {
			t.Errorf("worker %d: %+v", i, before[i])
		}
	}
	random := rand.New(rand.NewPCG(5, 5))
	if a := s.Send(test.Question(test.Words(random, 100)), true, 16); !strings.Contains(a.Text, "Paris") || a.Prefill != "0" {
		t.Errorf("the first chat: %+v", a)
	}
	const chats, clients = 50, 2
	shared := func() float64 { return s.Shared(kv.KindSGLang, proxy.SharedOK) }
	transfers := func() float64 { return s.Engine(test.Prefill, "sglang:kv_transfer_total_mb_count") }
	first, moved := shared(), transfers()
	exact := 0
	answers := s.Traffic(chats, clients, 4, func(random *rand.Rand) func() []map[string]string {
		system := test.Message("system", test.Words(random, 100))
		return func() []map[string]string {
			return []map[string]string{system, test.Message("user", test.Words(random, 120))}
		}
	})
	for _, a := range answers {
		if a.Predicted == a.Cached {
			exact++
		}
	}
	testkit.Eventually(t, 10*time.Second, "all chats counted as shared", func() bool { return shared()-first == chats })
	testkit.Eventually(t, 30*time.Second, "the server's own count of transfers", func() bool { return transfers()-moved >= chats })
	t.Logf("%d of %d overlaps predicted exactly; %v transfers", exact, chats, transfers()-moved)

	// SGLang's decode server never answers several choices: the router must not ask.
	began := time.Now()
	if a := (&site{s.Router}).ask(testkit.ChatPath, fmt.Sprintf(`{"messages":[{"role":"user","content":%s}],"n":2,"max_tokens":4}`, proxy.Quoted(test.Words(random, 200)))); a.Status != http.StatusBadRequest || time.Since(began) > 10*time.Second {
		t.Errorf("two choices of a pair: %+v after %s", a, time.Since(began))
	}

	for _, part := range []int{test.Prefill, test.Decode} {
		legKilled(t, s, part, random)
	}
}

// legKilled kills a worker of a pair while a request is under way. Clients get an
// answer or one error in time; once it is back, requests are shared again.
func legKilled(t *testing.T, s *test.Pair, part int, random *rand.Rand) {
	body, _ := json.Marshal(map[string]any{"messages": test.Question(test.Words(random, 2500)), "max_tokens": 64})
	type result struct {
		status int
		answer []byte
		after  time.Duration
	}
	results := make(chan result, 1)
	began := time.Now()
	go func() {
		status, answer := test.Post(t, s.OpenAI+testkit.ChatPath, string(body))
		results <- result{status, answer, time.Since(began)}
	}()
	testkit.Eventually(t, 30*time.Second, "the worker at work", func() bool { return s.Workers()[part].InFlight > 0 })
	if err := syscall.Kill(-s.Workers()[part].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	select {
	case r := <-results:
		t.Logf("worker %d killed: its request got %d after %s: %.200s", part, r.status, time.Since(killed).Round(100*time.Millisecond), r.answer)
	case <-time.After(90 * time.Second):
		t.Errorf("worker %d killed: its request hangs", part)
	}
	testkit.Eventually(t, time.Minute, "the worker seen dead", func() bool { return s.Workers()[part].Restarts > 0 })
	s.WaitReady(2, 8*time.Minute)
	if a := s.Send(test.Question(test.Words(random, 100)), true, 16); a.Prefill != "0" || !strings.Contains(a.Text, "Paris") {
		t.Errorf("a chat after the restart of worker %d: %+v", part, a)
	}
}
