package test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
)

// mockPair is a protocol between mock workers and whose servers they are.
type mockPair struct {
	kind kv.Kind
	api  string
}

func (p mockPair) name() string { return p.kind.String() + " " + p.api }

var mockPairs = []mockPair{{kv.KindNIXL, "vllm"}, {kv.KindSGLang, "vllm"}, {kv.KindSGLang, "sglang"}}

// idle reports whether nothing is in flight: no booking, no request, block or room
// of a worker.
func (s *Mocks) idle() bool {
	for _, key := range s.Keys() {
		w := s.Mocker.Worker(int(key.Worker))
		if w.Transfers() > 0 || s.Rank(key).CurrentLoad() != (mocker.Load{}) {
			return false
		}
	}
	return s.InFlight() == 0
}

// TestMockPairsAnswerAsOneWorkerDoes: many chats at a time through prefill and
// decode workers, streamed or not; each answer is the one that a worker alone
// gives, and decode workers compute no long prompt.
func TestMockPairsAnswerAsOneWorkerDoes(t *testing.T) {
	t.Parallel()
	const chats = 120
	var alone [chats]Answer
	t.Run("alone", func(t *testing.T) {
		s := StartMocks(t, 1)
		for i := range alone {
			var err error
			if alone[i], err = s.Chat(t.Context(), LongPrompt(i), false, 20); err != nil {
				t.Fatal(err)
			}
		}
	})
	for _, v := range mockPairs {
		t.Run(v.name(), func(t *testing.T) {
			// Workers are asked whether they take tokens by requests, which would count below.
			s := StartPairs(t, v.kind, 2, 2, "--send-tokens=never", "--mock=api="+v.api)
			var jobs sync.WaitGroup
			next := make(chan int)
			for range 8 {
				jobs.Go(func() {
					for i := range next {
						a, err := s.Chat(t.Context(), LongPrompt(i), i%2 == 0, 20)
						if want := alone[i]; err != nil || !a.Finished || a.Broken || a.Text != want.Text || a.Prompt != want.Prompt || a.Worker < 2 {
							t.Errorf("chat %d: %v, worker %d, %q of %d tokens, want %q of %d", i, err, a.Worker, a.Text, a.Prompt, want.Text, want.Prompt)
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
			for _, key := range s.Keys() {
				counts := &s.Rank(key).Counts
				if key.Worker < 2 {
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

// TestTokensInGoThroughPairs: prompts in tokens are computed by one worker and answered by another, with the answers and
// the log probabilities of one alone.
func TestTokensInGoThroughPairs(t *testing.T) {
	t.Parallel()
	answers := func(s *Mocks) (list []string) {
		tr := &trainer{T: t}
		for i := range 20 {
			more := ""
			if i%2 == 1 {
				more = `,"cache_salt":"m-1"`
			}
			status, answer, header, err := tr.call(t.Context(), "POST", s.OpenAI+"/inference/v1/generate", tokensIn(i, 500+i, 6, more))
			if err != nil || status != http.StatusOK {
				t.Fatalf("%d %s %v", status, answer.Raw, err)
			}
			list = append(list, answer.Get("choices.0.token_ids").Raw+answer.Get("choices.0.finish_reason").Raw+answer.Get("usage.prompt_tokens").Raw)
			if s.Count > 1 && (header.Get(web.HeaderWorker) != "1" || header.Get(proxy.HeaderPrefillWorker) != "0") {
				t.Errorf("request %d: answered by worker %s, its prompt computed by worker %s", i, header.Get(web.HeaderWorker), header.Get(proxy.HeaderPrefillWorker))
			}
		}
		return list
	}
	want := answers(StartMocks(t, 1, "--decision-headers"))
	s := StartPairs(t, kv.KindNIXL, 1, 1, "--decision-headers")
	if got := answers(s); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	testkit.Eventually(t, 20*time.Second, "nothing is in flight", s.idle)
	if fetched := s.Rank(kv.WorkerKey{Worker: 1}).Counts.ExternalHits.Load(); fetched < 20*448 {
		t.Errorf("the decode worker has fetched %d tokens", fetched)
	}
}

// TestMockPairsSurviveAPrefillWorker: it dies again and again, and every chat has
// its answer all the same: vLLM's decode workers compute prompts themselves,
// SGLang's need another prefill worker.
func TestMockPairsSurviveAPrefillWorker(t *testing.T) {
	t.Parallel()
	for _, v := range mockPairs {
		prefills := 1
		if v.kind == kv.KindSGLang {
			prefills = 2
		}
		t.Run(v.name(), func(t *testing.T) {
			s := StartPairs(t, v.kind, prefills, 2, "--speedup-ratio=3", "--restart-backoff-max=1s", "--send-tokens=never", "--mock=api="+v.api)
			const chats, rounds = 20, 2
			for round := range rounds {
				var jobs sync.WaitGroup
				next := make(chan int)
				for range 4 {
					jobs.Go(func() {
						for i := range next {
							if a, err := s.Chat(t.Context(), LongPrompt(i), i%2 == 0, 10); err != nil || !a.Finished || a.Broken {
								t.Errorf("chat %d: %v %+v", i, err, a)
							}
						}
					})
				}
				for i := range chats {
					next <- round*chats + i
					if i == chats/2 {
						s.Mocker.Worker(0).End(mocker.ErrMockCrash)
					}
				}
				close(next)
				jobs.Wait()
				testkit.Eventually(t, 30*time.Second, "the prefill worker is back", func() bool {
					return int(s.Starts.Load()) == prefills+2+round+1 && len(s.Ranks()) == prefills+2
				})
			}
			prefilled := func() (n int64) {
				for i := range prefills {
					n += s.Rank(kv.WorkerKey{Worker: uint64(i)}).Counts.GenerationTokens.Load()
				}
				return n
			}
			before := prefilled()
			if a, err := s.Chat(t.Context(), LongPrompt(rounds*chats), false, 10); err != nil || !a.Finished {
				t.Error(err, a)
			}
			if after := prefilled(); after != before+1 {
				t.Errorf("back again, prefill workers computed %d prompts of 1", after-before)
			}
			testkit.Eventually(t, 20*time.Second, "nothing is in flight", s.idle)
		})
	}
}

func TestMockPairsLeaveNothingOfAClientThatGoes(t *testing.T) {
	t.Parallel()
	for _, kind := range []kv.Kind{kv.KindNIXL, kv.KindSGLang} {
		t.Run(kind.String(), func(t *testing.T) {
			s := StartPairs(t, kind, 1, 1, "--speedup-ratio=1", "--mock=kv-lease=1s")
			for _, after := range []time.Duration{5, 30, 60, 90} {
				ctx, cancel := context.WithTimeout(t.Context(), after*time.Millisecond)
				_, _ = s.Chat(ctx, LongPrompt(int(after)), true, 2000)
				cancel()
			}
			testkit.Eventually(t, 20*time.Second, "nothing is in flight", s.idle)
		})
	}
}

// TestSGLangMockPairsAreSpokenToAsTheyCan: several answers, which hang in a pair, are
// refused at once; several prompts, streams and /generate go through.
func TestSGLangMockPairsAreSpokenToAsTheyCan(t *testing.T) {
	t.Parallel()
	s := StartPairs(t, kv.KindSGLang, 1, 1, "--mock=api=sglang", "--block-size=16")
	long := proxy.Quoted(strings.Repeat("hand me over ", 20))
	for _, c := range []struct {
		path, body string
		status     int
	}{
		{"/v1/completions", `{"prompt":%s,"n":2,"max_tokens":3}`, http.StatusBadRequest},
		{"/generate", `{"text":%s,"sampling_params":{"n":2}}`, http.StatusBadRequest},
		{testkit.ChatPath, `{"messages":[{"role":"user","content":%s}],"max_tokens":3}`, http.StatusOK},
		{testkit.ChatPath, `{"messages":[{"role":"user","content":%s}],"max_tokens":3,"stream":true}`, http.StatusOK},
		{"/v1/completions", `{"prompt":[%[1]s,%[1]s],"max_tokens":3}`, http.StatusOK},
		{"/generate", `{"text":%s,"sampling_params":{"max_new_tokens":3}}`, http.StatusOK},
		{"/generate", `{"text":%s,"sampling_params":{"max_new_tokens":3},"stream":true}`, http.StatusOK},
		{"/generate", `{"text":[%[1]s,%[1]s],"sampling_params":{"max_new_tokens":3}}`, http.StatusOK},
	} {
		began := time.Now()
		if a := s.send(c.path, fmt.Sprintf(c.body, long)); a.StatusCode != c.status || time.Since(began) > 10*time.Second || strings.Contains(a.Text, `"abort"`) {
			t.Errorf("%s %s: %d after %s: %s", c.path, c.body, a.StatusCode, time.Since(began), a.Text)
		}
	}
	testkit.Eventually(t, 20*time.Second, "nothing is in flight", s.idle)
}

// TestSharedRequestsTellOnlyWhoMayKnow covers the headers of two workers.
func TestSharedRequestsTellOnlyWhoMayKnow(t *testing.T) {
	t.Parallel()
	s := StartPairs(t, kv.KindNIXL, 1, 1, "--no-decision-headers")
	response := s.as("", map[string]any{"messages": LongPrompt(1), "max_tokens": 2})
	for _, name := range []string{web.HeaderWorker, web.HeaderOverlap, proxy.HeaderPrefillWorker, proxy.HeaderPrefillTime, proxy.HeaderHandoverTime} {
		if got := response.Header.Get(name); got != "" || response.StatusCode != 200 {
			t.Errorf("%s: %s is %q", response.Status, name, got)
		}
	}
}

// TestAttachedSGLangServersArePaired: nothing but their addresses is given.
func TestAttachedSGLangServersArePaired(t *testing.T) {
	t.Parallel()
	w := StartWorkers(t, 2, "--mock=api=sglang", "--prefill-workers=1", "--decode-workers=1")
	s := Start(t, "--engine=none", "--served-model-name=mock", "--drain-timeout=5s", "--worker=url="+w.URL(0)+",id=0", "--worker=url="+w.URL(1)+",id=1")
	s.WaitReady(2, 20*time.Second)
	a := s.ask(map[string]any{"messages": LongPrompt(1), "max_tokens": 3})
	if a.StatusCode != http.StatusOK || a.Header.Get(proxy.HeaderPrefillWorker) != "0" || a.Worker != "1" {
		t.Errorf("%s %v: %s", a.Status, a.Header, a.Text)
	}
	list := ask(t, s.Port, "GET", "/workers", nil)
	if p := list.Get("0"); p.Get("role").Str != "prefill" || p.Get("kind").Str != "sglang" || p.Get("bootstrap_host").Str != "127.0.0.1" || p.Get("bootstrap_port").Int() != int64(w.Settings.Ports.HTTP) {
		t.Errorf("shown as %s", p)
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
			c.first = startSoaked(t, 0, "--prefill-workers=3", "--decode-workers=3", "--mock=disagg-kind="+kind.String(),
				"--speedup-ratio=10", "--mock=num-gpu-blocks=2048", "--disagg-min-uncached-tokens=64",
				"--mock=crash-every=5s", "--mock=hang-worker=2=15s", "--mock=kv-lease=2s", "--mock=bootstrap-timeout=10s",
				"--disagg-prefill-timeout=3s", "--disagg-handover-timeout=3s", "--request-timeout=6s")
			quiet := c.footprint()
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			var clients sync.WaitGroup
			for i := range churnClients {
				clients.Go(func() { c.ask(ctx, rand.New(rand.NewPCG(uint64(i), 6)), c.first.OpenAI, i%3 == 0) })
			}
			clients.Wait()
			c.client.CloseIdleConnections()
			for line := range strings.Lines(string(c.first.Get(c.first.OpenAI + "/metrics"))) {
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
		})
	}
}

// TestMockPairsContinueTheStreamsOfADecodeWorker: it dies in the midst of its answers, and
// the other one continues with them.
func TestMockPairsContinueTheStreamsOfADecodeWorker(t *testing.T) {
	t.Parallel()
	s := StartPairs(t, kv.KindNIXL, 1, 2, "--speedup-ratio=1", "--restart-backoff-max=1s", "--mock=decode-ms=20,0,0")
	const chats, tokens = 8, 100
	var jobs sync.WaitGroup
	for i := range chats {
		jobs.Go(func() {
			a, err := s.Chat(t.Context(), LongPrompt(i), true, tokens)
			if err != nil || !a.Finished || a.Broken || a.Output != tokens || len(a.Text) != tokens {
				t.Errorf("chat %d: %v %+v", i, err, a)
			}
		})
	}
	generated := func() int64 { return s.Rank(kv.WorkerKey{Worker: 1}).Counts.GenerationTokens.Load() }
	testkit.Eventually(t, 20*time.Second, "the first decode worker answers", func() bool { return generated() > tokens/4 })
	s.Mocker.Worker(1).End(mocker.ErrMockCrash)
	jobs.Wait()
	if n := s.Metrics()[`kvrouter_migrations_total{result="ok"}`]; n < 1 {
		t.Errorf("%v streams were continued", n)
	}
	testkit.Eventually(t, 20*time.Second, "nothing is in flight", s.idle)
}
