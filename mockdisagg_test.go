package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"

	"github.com/tidwall/gjson"
)

// startMockPairs starts a router over prefill and decode mock workers of a kind.
func startMockPairs(t testing.TB, kind kv.Kind, prefills, decodes int, args ...string) *mockSite {
	t.Helper()
	return startMocks(t, prefills+decodes, append([]string{
		fmt.Sprintf("--prefill-workers=%d", prefills), fmt.Sprintf("--decode-workers=%d", decodes), "--mock-disagg-kind=" + kind.String(),
	}, args...)...)
}

// idle tells whether nothing is in flight: no booking, no request, block or room
// of a worker.
func (s *mockSite) idle() bool {
	for _, target := range s.rooms.router.Targets() {
		w := s.rooms.mocker.Worker(int(target.Key.Worker))
		w.Rooms.Mu.Lock()
		rooms := len(w.Rooms.ByID)
		w.Rooms.Mu.Unlock()
		if rooms > 0 || s.rank(target.Key).CurrentLoad() != (mocker.Load{}) {
			return false
		}
	}
	return s.inFlight() == 0
}

// longPrompt is a chat of some 500 tokens of its own.
func longPrompt(i int) []map[string]string {
	return say(fmt.Sprint("topic ", i, strings.Repeat(fmt.Sprint(" words about ", i), 120)))
}

// TestMockPairsAnswerAsOneWorkerDoes: many chats at a time through prefill and
// decode workers, streamed or not; each answer is the one that a worker alone
// gives, and decode workers compute no long prompt.
func TestMockPairsAnswerAsOneWorkerDoes(t *testing.T) {
	const chats = 120
	var alone [chats]answer
	t.Run("alone", func(t *testing.T) {
		s := startMockSite(t, 1)
		for i := range alone {
			var err error
			if alone[i], err = s.chat(t.Context(), longPrompt(i), false, 20); err != nil {
				t.Fatal(err)
			}
		}
	})
	for _, kind := range []kv.Kind{kv.KindNIXL, kv.KindSGLang} {
		t.Run(kind.String(), func(t *testing.T) {
			s := startMockPairs(t, kind, 2, 2)
			var jobs sync.WaitGroup
			next := make(chan int)
			for range 8 {
				jobs.Go(func() {
					for i := range next {
						a, err := s.chat(t.Context(), longPrompt(i), i%2 == 0, 20)
						if want := alone[i]; err != nil || !a.finished || a.broken || a.text != want.text || a.prompt != want.prompt || a.worker < 2 {
							t.Errorf("chat %d: %v, worker %d, %q of %d tokens, want %q of %d", i, err, a.worker, a.text, a.prompt, want.text, want.prompt)
						}
					}
				})
			}
			for i := range chats {
				next <- i
			}
			close(next)
			jobs.Wait()
			testkit.Eventually(t, 20*time.Second, "nothing is in flight", s.idle)
			var prefilled, fetched, decoded int64
			for _, target := range s.rooms.router.Targets() {
				counts := &s.rank(target.Key).Counts
				if target.Role == kv.RolePrefill {
					prefilled += counts.GenerationTokens.Load()
				} else {
					fetched += counts.ExternalHits.Load()
					decoded += counts.GenerationTokens.Load()
				}
			}
			if prefilled != chats || decoded != 20*chats || fetched < 256*chats {
				t.Errorf("prefill workers made %d tokens, want %d; decode workers %d, want %d, of %d fetched", prefilled, chats, decoded, 20*chats, fetched)
			}
		})
	}
}

// TestMockPairsSurviveAPrefillWorker: it dies again and again, and every chat has
// its answer all the same: vLLM's decode workers compute prompts themselves,
// SGLang's need another prefill worker.
func TestMockPairsSurviveAPrefillWorker(t *testing.T) {
	for kind, prefills := range map[kv.Kind]int{kv.KindNIXL: 1, kv.KindSGLang: 2} {
		t.Run(kind.String(), func(t *testing.T) {
			s := startMockPairs(t, kind, prefills, 2, "--speedup-ratio=3", "--restart-backoff-max=1s")
			const chats, rounds = 20, 2
			for round := range rounds {
				var jobs sync.WaitGroup
				next := make(chan int)
				for range 4 {
					jobs.Go(func() {
						for i := range next {
							if a, err := s.chat(t.Context(), longPrompt(i), i%2 == 0, 10); err != nil || !a.finished || a.broken {
								t.Errorf("chat %d: %v %+v", i, err, a)
							}
						}
					})
				}
				for i := range chats {
					next <- round*chats + i
					if i == chats/2 {
						s.rooms.mocker.Worker(0).End(mocker.ErrMockCrash)
					}
				}
				close(next)
				jobs.Wait()
				testkit.Eventually(t, 30*time.Second, "the prefill worker is back", func() bool {
					return int(s.rooms.mocker.Starts.Load()) == prefills+2+round+1 && len(s.rooms.router.Targets()) == prefills+2
				})
			}
			prefilled := func() (n int64) {
				for i := range prefills {
					n += s.rank(kv.WorkerKey{Worker: uint64(i)}).Counts.GenerationTokens.Load()
				}
				return n
			}
			before := prefilled()
			if a, err := s.chat(t.Context(), longPrompt(rounds*chats), false, 10); err != nil || !a.finished {
				t.Error(err, a)
			}
			if after := prefilled(); after != before+1 {
				t.Errorf("back again, prefill workers computed %d prompts of 1", after-before)
			}
			testkit.Eventually(t, 20*time.Second, "nothing is in flight", s.idle)
		})
	}
}

// TestMockNIXLWorkersKeepAndFetchPrompts speaks vLLM's protocol to the workers.
func TestMockNIXLWorkersKeepAndFetchPrompts(t *testing.T) {
	s := startMockPairs(t, kv.KindNIXL, 1, 2, "--mock-kv-lease=500ms")
	prefill := func(i int) (params string, tokens int64) {
		t.Helper()
		status, answer := post(t, s.workerURL(0)+"/v1/chat/completions", fmt.Sprintf(`{"messages":%s,"max_tokens":1,"kv_transfer_params":%s}`, mocker.MustJSON(longPrompt(i)), proxy.PrefillParams))
		if status != http.StatusOK {
			t.Fatalf("%d: %s", status, answer)
		}
		return gjson.GetBytes(answer, "kv_transfer_params").Raw, gjson.GetBytes(answer, "usage.prompt_tokens").Int()
	}
	decode := func(worker, i int, params string) (cached int64) {
		t.Helper()
		status, answer := post(t, s.workerURL(worker)+"/v1/chat/completions", fmt.Sprintf(`{"messages":%s,"max_tokens":5,"kv_transfer_params":%s}`, mocker.MustJSON(longPrompt(i)), params))
		if status != http.StatusOK || gjson.GetBytes(answer, "usage.completion_tokens").Int() != 5 {
			t.Fatalf("%d: %s", status, answer)
		}
		return gjson.GetBytes(answer, "usage.prompt_tokens_details.cached_tokens").Int()
	}
	usage := func() float64 { return s.rank(kv.WorkerKey{}).CurrentLoad().Usage }

	params, tokens := prefill(1)
	for _, name := range []string{"remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"} {
		if mocker.IsNull(gjson.Get(params, name)) {
			t.Errorf("%s is missing in %s", name, params)
		}
	}
	if blocks := gjson.Get(params, "remote_block_ids.0.#").Int(); blocks != (tokens+63)/64 || !gjson.Get(params, "do_remote_prefill").Bool() {
		t.Errorf("%d blocks of %d tokens in %s", blocks, tokens, params)
	}
	testkit.Eventually(t, 10*time.Second, "the blocks are kept", func() bool { return usage() > 0 })
	if cached := decode(1, 1, params); cached != tokens {
		t.Errorf("%d of %d tokens counted as cached", cached, tokens)
	}
	testkit.Eventually(t, 10*time.Second, "fetched, they are kept no longer", func() bool { return usage() == 0 })
	if cached := decode(2, 1, params); cached != 0 {
		t.Errorf("%d tokens cached though another worker had fetched them", cached)
	}

	params, _ = prefill(2)
	testkit.Eventually(t, 10*time.Second, "the lease ends", func() bool { return usage() == 0 })
	if cached := decode(1, 2, params); cached != 0 {
		t.Errorf("%d tokens cached though the lease has ended", cached)
	}
	if cached := decode(1, 3, `{"do_remote_prefill":true}`); cached != 0 {
		t.Errorf("%d tokens cached though nobody said where they are", cached)
	}
}

func TestMockNIXLWorkersFailWhereTold(t *testing.T) {
	s := startMockPairs(t, kv.KindNIXL, 1, 1, "--mock-kv-load-failure=fail")
	const params = `{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"x","remote_request_id":"x","remote_host":"127.0.0.1","remote_port":1}`
	for _, stream := range []bool{false, true} {
		status, answer := post(t, s.workerURL(1)+"/v1/chat/completions", fmt.Sprintf(`{"messages":%s,"stream":%v,"kv_transfer_params":%s}`, mocker.MustJSON(longPrompt(1)), stream, params))
		if stream && (status != http.StatusOK || !strings.Contains(string(answer), `data: {"error":`)) || !stream && status != http.StatusInternalServerError {
			t.Errorf("stream %v: %d %s", stream, status, answer)
		}
	}
	testkit.Eventually(t, 10*time.Second, "nothing is in flight", s.idle)
}

// TestMockSGLangWorkersMeet speaks SGLang's protocol to the workers: neither
// answers alone.
func TestMockSGLangWorkersMeet(t *testing.T) {
	s := startMockPairs(t, kv.KindSGLang, 1, 1, "--mock-bootstrap-timeout=500ms")
	port := s.rooms.config.BaseWorkerPort
	ask := func(worker, room int, more string) (status int, answer []byte) {
		return post(t, s.workerURL(worker)+"/v1/chat/completions", fmt.Sprintf(`{"messages":%s,"max_tokens":5,"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":%d%s}`, mocker.MustJSON(longPrompt(room)), port, room, more))
	}
	for worker := range 2 {
		if status, answer := ask(worker, 1+worker, ""); status != http.StatusInternalServerError {
			t.Errorf("worker %d answered alone: %d %s", worker, status, answer)
		}
	}
	for first := range 2 { // whoever comes first
		room := 10 + first
		var legs sync.WaitGroup
		legs.Go(func() {
			if status, answer := ask(first, room, ""); status != http.StatusOK {
				t.Errorf("worker %d: %d %s", first, status, answer)
			}
		})
		if status, answer := ask(1-first, room, ""); status != http.StatusOK {
			t.Errorf("worker %d: %d %s", 1-first, status, answer)
		}
		legs.Wait()
	}
	if got := s.rank(kv.WorkerKey{}).Counts.GenerationTokens.Load(); got != 2 {
		t.Errorf("the prefill worker made %d tokens, want 2", got)
	}
	if _, info := testkit.Get(t, s.workerURL(0)+"/server_info"); gjson.GetBytes(info, "disaggregation_mode").Str != "prefill" || gjson.GetBytes(info, "disaggregation_bootstrap_port").Int() != int64(port) {
		t.Errorf("server_info: %s", info)
	}
	testkit.Eventually(t, 10*time.Second, "nothing is in flight", s.idle)
}

// TestMockPromptsOfOneNameStayApart: both attempts at a request have its id, and
// a client may use a room twice.
func TestMockPromptsOfOneNameStayApart(t *testing.T) {
	t.Run("nixl", func(t *testing.T) {
		s := startMockPairs(t, kv.KindNIXL, 1, 1, "--mock-kv-lease=200ms")
		names := map[string]bool{}
		for range 3 {
			request, _ := http.NewRequest(http.MethodPost, s.workerURL(0)+testkit.ChatPath, strings.NewReader(fmt.Sprintf(`{"messages":%s,"max_tokens":1,"kv_transfer_params":%s}`, mocker.MustJSON(longPrompt(1)), proxy.PrefillParams)))
			request.Header.Set(web.HeaderRequest, "the-same")
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			answer, _ := io.ReadAll(response.Body)
			response.Body.Close()
			names[gjson.GetBytes(answer, "kv_transfer_params.remote_request_id").Str] = true
		}
		if len(names) != 3 {
			t.Errorf("3 prompts are kept as %v", names)
		}
		testkit.Eventually(t, 10*time.Second, "nothing is in flight", s.idle)
	})
	t.Run("sglang", func(t *testing.T) {
		s := startMockPairs(t, kv.KindSGLang, 1, 1, "--mock-bootstrap-timeout=5s")
		var legs sync.WaitGroup
		for _, worker := range []int{0, 0, 1} {
			legs.Go(func() {
				body := fmt.Sprintf(`{"messages":%s,"max_tokens":5,"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":7}`, mocker.MustJSON(longPrompt(1)), s.rooms.config.BaseWorkerPort)
				if status, answer := post(t, s.workerURL(worker)+testkit.ChatPath, body); status != http.StatusOK {
					t.Errorf("worker %d: %d %s", worker, status, answer)
				}
			})
		}
		legs.Wait()
		testkit.Eventually(t, 10*time.Second, "nothing is in flight", s.idle)
	})
}

func TestMockSGLangWorkersAbortByName(t *testing.T) {
	s := startMockPairs(t, kv.KindSGLang, 1, 1)
	ended := make(chan int, 1)
	go func() {
		status, _ := post(t, s.workerURL(0)+"/v1/chat/completions", fmt.Sprintf(`{"messages":%s,"rid":"abc-1","bootstrap_host":"127.0.0.1","bootstrap_room":1}`, mocker.MustJSON(longPrompt(1))))
		ended <- status
	}()
	w := s.rooms.mocker.Worker(0)
	testkit.Eventually(t, 10*time.Second, "it waits", func() bool {
		w.Mu.Lock()
		defer w.Mu.Unlock()
		return len(w.Running) == 1
	})
	post(t, s.workerURL(0)+"/abort_request", `{"rid":"abc"}`)
	select {
	case status := <-ended:
		if status != http.StatusInternalServerError {
			t.Errorf("status %d", status)
		}
	case <-time.After(10 * time.Second):
		t.Error("it was not aborted")
	}
	testkit.Eventually(t, 10*time.Second, "nothing is in flight", s.idle)
}

func TestMockPairsLeaveNothingOfAClientThatGoes(t *testing.T) {
	for _, kind := range []kv.Kind{kv.KindNIXL, kv.KindSGLang} {
		t.Run(kind.String(), func(t *testing.T) {
			s := startMockPairs(t, kind, 1, 1, "--speedup-ratio=1", "--mock-kv-lease=1s")
			for _, after := range []time.Duration{5, 30, 60, 90} {
				ctx, cancel := context.WithTimeout(t.Context(), after*time.Millisecond)
				_, _ = s.chat(ctx, longPrompt(int(after)), true, 2000)
				cancel()
			}
			testkit.Eventually(t, 20*time.Second, "nothing is in flight", s.idle)
		})
	}
}

// TestSoakOfPairs has clients come, stay and leave over prefill and decode workers
// that crash, one of which also hangs: none waits for ever, and nothing is left
// of them anywhere.
func TestSoakOfPairs(t *testing.T) {
	d := soakTime(t)
	for _, kind := range []kv.Kind{kv.KindNIXL, kv.KindSGLang} {
		t.Run(kind.String(), func(t *testing.T) {
			c := newChurn(t)
			c.chats = 1 << 30 // few have been before, so that most are shared
			c.first = startMockPairs(t, kind, 3, 3, "--speedup-ratio=10", "--mock-num-gpu-blocks=2048", "--disagg-min-uncached-tokens=64",
				"--mock-crash-every=5s", "--mock-hang-worker=2=15s", "--mock-kv-lease=2s", "--mock-bootstrap-timeout=10s",
				"--disagg-prefill-timeout=3s", "--disagg-handover-timeout=3s", "--request-timeout=6s")
			quiet := c.footprint()
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			var clients sync.WaitGroup
			for i := range churnClients {
				clients.Go(func() { c.ask(ctx, rand.New(rand.NewPCG(uint64(i), 6)), c.first.openAI, i%3 == 0) })
			}
			clients.Wait()
			c.client.CloseIdleConnections()
			_, page := testkit.Get(t, c.first.openAI+"/metrics")
			for line := range strings.Lines(string(page)) {
				if strings.HasPrefix(line, "kvrouter_disagg_requests_total") || strings.HasPrefix(line, "kvrouter_retries_total") {
					t.Log(strings.TrimSpace(line))
				}
			}
			t.Logf("%d answers, %d clients left, %d refused, %d cut short, %d hung", c.whole.Load(), c.left.Load(), c.refused.Load(), c.broken.Load(), c.hung.Load())
			if wrong := c.wrong.Load(); wrong != nil {
				t.Error(*wrong)
			}
			if c.hung.Load() > 0 || c.whole.Load() == 0 || c.left.Load() == 0 {
				t.Error("clients hung, or nothing happened")
			}
			c.idle(quiet)
			testkit.Eventually(t, time.Minute, "nothing is left at the workers", c.first.idle) // the one that hangs is started again
			if err := c.first.rooms.router.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}
