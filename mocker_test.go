package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/engine"
	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/settings"
	"kvrouter/internal/telemetry"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tokens"
)

func TestMockPredictionsAreExactOneByOne(t *testing.T) {
	variants := [][]string{nil, {"--mock-array-events"}, {"--mock-api=sglang"}, {"--mock-api=sglang", "--block-size=16", "--mock-num-gpu-blocks=240"}}
	if dir := filepath.Join(settings.CacheDir(os.Getenv), "smollm2-135m-instruct"); tokens.FileExists(dir, "tokenizer.json") {
		variants = append(variants, []string{"--model=" + dir})
	}
	for _, args := range append(variants, []string{"--mock-num-gpu-blocks=60", "--mock-duplicate-events=0.3", "--mock-delay-events=3ms"}) {
		t.Run(strings.ReplaceAll(strings.Join(args, " "), "/", "_"), func(t *testing.T) {
			s := startMockSite(t, 3, args...)
			reused, fromAnswers := 0, 0
			for i := range 12 {
				chat := say(fmt.Sprint("topic ", i%4, " ", strings.Repeat("lorem ipsum ", 20+5*(i%4))))
				before := 0
				for turn := range 3 {
					a, err := s.chat(t.Context(), chat, turn%2 == 0, 100)
					if err != nil || !a.finished {
						t.Fatal(err, a)
					}
					if a.predicted != a.cached {
						t.Errorf("chat %d turn %d: predicted %d, the worker had %d of %d", i, turn, a.predicted, a.cached, a.prompt)
					}
					reused += a.cached
					if before > 0 && a.cached > before {
						fromAnswers++
					}
					before = a.prompt
					chat = append(chat, say("", a.text, "go on")[1:]...)
					s.settle()
				}
			}
			if reused == 0 || fromAnswers == 0 {
				t.Errorf("%d tokens reused, %d times some of an answer", reused, fromAnswers)
			}
			testkit.Eventually(t, 20*time.Second, "all bookings freed", func() bool { return s.inFlight() == 0 })
			if disabled := s.app.tokens.Stats().Disabled; len(disabled) > 0 {
				t.Errorf("parity with the mocker fails for %v", disabled)
			}
		})
	}
}

func TestWithoutEventsPromptsAreFoundWhereTheyWent(t *testing.T) {
	for _, args := range [][]string{{"--policy=kv"}, {"--mock-data-parallel-size=2", "--policy=work"}, {"--policy=cache-threshold"}} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			s := startMockSite(t, 2, append(args, "--no-kv-events", "--mock-num-gpu-blocks=200")...)
			if n := len(s.app.fleet.Streams()); n > 0 {
				t.Errorf("%d event streams", n)
			}
			if _, sources := testkit.HTTPGet(t, s.workerURL(0)+"/kv_event_sources"); string(sources) != "{}\n" && string(sources) != "{}" {
				t.Errorf("the worker publishes at %s", sources)
			}
			for _, target := range s.app.router.Targets() {
				if target.TotalBlocks != 199 {
					t.Errorf("%v has %d blocks, want one less than the 200 that its /metrics tell", target.Key, target.TotalBlocks)
				}
			}
			for i := range 3 {
				chat := say(fmt.Sprint(i, strings.Repeat(" growing prompt", 60)))
				worker := uint64(0)
				for turn := range 4 {
					a, err := s.chat(t.Context(), chat, turn%2 == 0, 20)
					if err != nil || !a.finished {
						t.Fatal(err, a)
					}
					if whole := a.prompt / 64 * 64; turn > 0 && (a.worker != worker || a.predicted < 832 || a.predicted > a.cached || a.cached > whole) {
						t.Errorf("chat %d turn %d: worker %d after %d, predicted %d, %d of %d cached", i, turn, a.worker, worker, a.predicted, a.cached, a.prompt)
					}
					worker = a.worker
					chat = append(chat, say("", a.text, "go on")[1:]...)
				}
			}
			if err := s.app.index.(interface{ Check() error }).Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestMockStopsWhenTheClientGoesAway(t *testing.T) {
	s := startMockSite(t, 1, "--speedup-ratio=1")
	ctx, cancel := context.WithCancel(t.Context())
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.openAI+"/v1/chat/completions", strings.NewReader(`{"messages":[{"role":"user","content":"Hi"}],"max_tokens":5000,"ignore_eos":true,"stream":true}`))
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	io.ReadFull(response.Body, make([]byte, 100))
	w := s.app.mocker.Worker(0)
	// The load is published a moment after the first token went out.
	testkit.Eventually(t, 20*time.Second, "one running request", func() bool { return w.Ranks[0].CurrentLoad().Running == 1 })
	cancel()
	response.Body.Close()
	testkit.Eventually(t, 20*time.Second, "aborted and freed", func() bool {
		return w.Ranks[0].CurrentLoad() == mocker.Load{} && w.Ranks[0].Counts.Aborted.Load() == 1 && s.inFlight() == 0
	})
}

func TestMockResetEmptiesTheCache(t *testing.T) {
	s := startMockSite(t, 1)
	chat := say(strings.Repeat("remember this ", 30))
	for range 2 {
		if _, err := s.chat(t.Context(), chat, false, 1); err != nil {
			t.Fatal(err)
		}
	}
	s.settle()
	if _, answer := post(t, s.workerURL(0)+"/reset_prefix_cache", ""); string(answer) != `{"success":true}` {
		t.Fatalf("%s", answer)
	}
	// As in vLLM the next step tells it: this one the router cannot know yet.
	a, err := s.chat(t.Context(), say("something else"), false, 1)
	if err != nil || a.cached != 0 {
		t.Error(a, err)
	}
	s.settle()
	if a, err := s.chat(t.Context(), chat, false, 1); err != nil || a.cached != 0 || a.predicted != 0 {
		t.Error(a, err)
	}

	// While requests hold blocks it is refused.
	rank := s.rank(kv.WorkerKey{})
	rank.Ask(t.Context(), func(e *engine.Engine) {
		held := &engine.Request{Prompt: 200, Output: 2, Tag: &mocker.Choice{Answer: &mocker.Answer{More: make(chan struct{}, 1)}}}
		if err := e.Submit(held); err != nil {
			t.Error(err)
		}
		e.Begin()
		if rank.ResetPrefixCache(e) {
			t.Error("reset while a request holds blocks")
		}
		e.End()
	})
}

func TestMockCrashIsARestart(t *testing.T) {
	s := startMockSite(t, 2, "--speedup-ratio=1")
	chat := say(strings.Repeat("to be forgotten ", 30))
	first, err := s.chat(t.Context(), chat, false, 1)
	if err != nil {
		t.Fatal(err)
	}
	s.settle()
	broken := make(chan answer, 1)
	go func() {
		a, _ := s.chat(context.Background(), chat, true, 2000)
		broken <- a
	}()
	w := s.app.mocker.Worker(int(first.worker))
	testkit.Eventually(t, 20*time.Second, "a request runs", func() bool { return w.Ranks[0].Counts.GenerationTokens.Load() > 3 })
	w.End(mocker.ErrMockCrash)
	if a := <-broken; !a.broken || a.finished {
		t.Errorf("the stream of a crashed worker: %+v", a)
	}
	testkit.Eventually(t, 20*time.Second, "started again", func() bool {
		return s.app.mocker.Worker(int(first.worker)) != w && s.followed() == 2
	})
	status := s.app.fleet.Workers()[first.worker]
	if status.Generation != 2 || status.Restarts != 1 {
		t.Errorf("%+v", status)
	}
	if blocks := s.app.index.Blocks(kv.WorkerKey{Worker: first.worker}); blocks != 0 {
		t.Errorf("the index has %d blocks of the dead", blocks)
	}
	for range 3 {
		if a, err := s.chat(t.Context(), chat, false, 1); err != nil || a.predicted != a.cached {
			t.Error(a, err)
		}
		s.settle()
	}
}

func TestMockErrorsAreAnswers(t *testing.T) {
	s := startMockSite(t, 2, "--mock-error-rate=1")
	status, answer := post(t, s.openAI+"/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}]}`)
	if status != 500 || !gjson.GetBytes(answer, "error.message").Exists() {
		t.Errorf("%d %s", status, answer)
	}
	if s.inFlight() != 0 {
		t.Error("still booked")
	}
}

func TestMockFaultsHitTheNamedWorker(t *testing.T) {
	s := startMockSite(t, 2, "--mock-slow-worker=1=3", "--mock-hang-worker=1=4s", "--request-timeout=1s", "--policy=round-robin")
	if got := s.rank(kv.WorkerKey{Worker: 1}).Engine.Cfg.Timing.Speedup; got != 20.0/3 {
		t.Errorf("speed of the slow worker %v", got)
	}
	testkit.Eventually(t, 20*time.Second, "worker 1 hangs", s.app.mocker.Worker(1).Hung.Load)
	seen := map[int]int{}
	for range 4 {
		status, _ := post(t, s.openAI+"/v1/chat/completions", `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1}`)
		seen[status]++
	}
	if seen[200] == 0 || seen[504] == 0 || len(seen) != 2 {
		t.Errorf("statuses %v, want answers and time-outs", seen)
	}
}

// TestMockWorkerCanBeAttached routes to one mock worker from a second router,
// which learns its event endpoints from the worker itself.
func TestMockWorkerCanBeAttached(t *testing.T) {
	s := startMockSite(t, 1)
	ports := testkit.FreePorts(t, 2)
	config, _, err := ParseConfig([]string{"--engine=none", "--drain-delay=0s", "--worker", "url=" + s.workerURL(0), fmt.Sprintf("--http-port=%d", ports), fmt.Sprintf("--router-port=%d", ports+1)})
	if err != nil {
		t.Fatal(err)
	}
	second, err := build(t.Context(), config, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- second.run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		second.proxy.Client.CloseIdleConnections()
	}()
	testkit.Eventually(t, 20*time.Second, "events followed", func() bool {
		for _, stats := range second.fleet.Streams() {
			return stats.Connected.Load() && s.rank(kv.WorkerKey{}).Events.Pub.Subscribers() == 2
		}
		return false
	})
	attached := &site{openAI: fmt.Sprintf("http://127.0.0.1:%d", ports)}
	chat := say(strings.Repeat("seen by both ", 30))
	if _, err := s.chat(t.Context(), chat, false, 1); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 20*time.Second, "the second router knows the blocks", func() bool { return second.index.Blocks(kv.WorkerKey{}) > 0 })
	if a, err := attached.chat(t.Context(), chat, false, 1); err != nil || a.predicted != a.cached || a.cached == 0 {
		t.Error(a, err)
	}
}

func TestMockSettingsAreChecked(t *testing.T) {
	machine := testMachine(t)
	for _, args := range [][]string{
		{"--mock-error-rate=2"}, {"--mock-drop-events=-1"}, {"--mock-hang-worker=2=1s"}, {"--mock-slow-worker=0=0"},
		{"--mock-api=sglang", "--mock-disagg-kind=nixl"}, {"--mock-api=sglang", "--mock-array-events"}, {"--mock-api=trt"},
		{"--mock-prefill-ms=1,2"}, {"--mock-num-gpu-blocks=0"}, {"--speedup-ratio=-1"}, {"--mock-crash-every=-1s"},
	} {
		if _, _, err := parseConfig(append([]string{"--engine=mocker"}, args...), machine); err == nil {
			t.Errorf("%v was taken", args)
		}
	}
	config := mustParse(t, machine, "--engine=mocker", "--mock-slow-worker=0=2,1=3.5", "--mock-hang-worker=1=10s", "--block-size=16")
	if config.Mock.MockSlowWorker[1] != 3.5 || config.Mock.MockHangWorker[1] != 10*time.Second || config.ServedModelName != "mock" || config.Model != "" {
		t.Errorf("%+v", config)
	}
}

func TestMockedRequestsAreRecorded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "requests.jsonl")
	s := startMockSite(t, 2, "--record="+file)
	chat := say(strings.Repeat("on the record ", 30))
	for range 2 {
		if _, err := s.chat(t.Context(), chat, true, 7); err != nil {
			t.Fatal(err)
		}
		s.settle()
	}
	if err := s.end(); err != nil {
		t.Fatal(err)
	}
	lines := readRecord(t, file)
	if len(lines) != 2 {
		t.Fatalf("%d lines", len(lines))
	}
	a, b := lines[0], lines[1]
	if a.InputLength != 439 || a.OutputLength != 7 || len(a.HashIDs) != 6 || a.HashBlockSize != 64 || a.Route != "/v1/chat/completions" || a.Status != 200 || a.PromptMismatch {
		t.Errorf("%+v", a)
	}
	if !slices.Equal(a.HashIDs, b.HashIDs) || b.PredictedTokens != 384 || b.CachedTokens == nil || *b.CachedTokens != 384 || b.FirstTokenMS == nil || b.Timestamp <= a.Timestamp {
		t.Errorf("%+v", b)
	}
	if text, _ := os.ReadFile(file); strings.Contains(string(text), "on the record") {
		t.Error("the record has text of a prompt")
	}
}

// readRecord reads a file of records.
func readRecord(t *testing.T, file string) (lines []telemetry.RecordLine) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var r telemetry.RecordLine
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, r)
	}
	return lines
}

// TestMockHangEndsStreamsWithAnError: the write deadline that guards against a
// client that reads nothing ends with the wait for the worker, and once cut off
// the event that says what happened.
func TestMockHangEndsStreamsWithAnError(t *testing.T) {
	s := startMockSite(t, 1, "--speedup-ratio=1", "--request-timeout=2s")
	const streams = 20
	answers := make(chan answer, streams)
	for i := range streams {
		go func() {
			a, _ := s.chat(context.Background(), say(fmt.Sprint(i)), true, 1000)
			answers <- a
		}()
	}
	w := s.app.mocker.Worker(0)
	testkit.Eventually(t, 20*time.Second, "all run", func() bool {
		return w.Ranks[0].CurrentLoad().Running == streams && w.Ranks[0].Counts.GenerationTokens.Load() > 2*streams
	})
	w.Hung.Store(true)
	for range streams {
		if a := <-answers; !a.broken || a.finished {
			t.Errorf("%+v", a)
		}
	}
	w.End(mocker.ErrMockCrash) // only that ends the hanging requests
}

// startMockPairs starts a router over prefill and decode mock workers of a kind.
func startMockPairs(t testing.TB, kind kv.Kind, prefills, decodes int, args ...string) *mockSite {
	t.Helper()
	return startMocks(t, prefills+decodes, append([]string{
		fmt.Sprintf("--prefill-workers=%d", prefills), fmt.Sprintf("--decode-workers=%d", decodes), "--mock-disagg-kind=" + kind.String(),
	}, args...)...)
}

// mockPair is a protocol between mock workers and whose servers they are.
type mockPair struct {
	kind kv.Kind
	api  string
}

func (p mockPair) name() string { return p.kind.String() + " " + p.api }

var mockPairs = []mockPair{{kv.KindNIXL, "vllm"}, {kv.KindSGLang, "vllm"}, {kv.KindSGLang, "sglang"}}

// idle tells whether nothing is in flight: no booking, no request, block or room
// of a worker.
func (s *mockSite) idle() bool {
	for _, target := range s.app.router.Targets() {
		w := s.app.mocker.Worker(int(target.Key.Worker))
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
	for _, v := range mockPairs {
		t.Run(v.name(), func(t *testing.T) {
			s := startMockPairs(t, v.kind, 2, 2, "--mock-api="+v.api)
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
			for _, target := range s.app.router.Targets() {
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
	for _, v := range mockPairs {
		prefills := 1
		if v.kind == kv.KindSGLang {
			prefills = 2
		}
		t.Run(v.name(), func(t *testing.T) {
			s := startMockPairs(t, v.kind, prefills, 2, "--speedup-ratio=3", "--restart-backoff-max=1s", "--mock-api="+v.api)
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
						s.app.mocker.Worker(0).End(mocker.ErrMockCrash)
					}
				}
				close(next)
				jobs.Wait()
				testkit.Eventually(t, 30*time.Second, "the prefill worker is back", func() bool {
					return int(s.app.mocker.Starts.Load()) == prefills+2+round+1 && len(s.app.router.Targets()) == prefills+2
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
			_, page := testkit.HTTPGet(t, c.first.openAI+"/metrics")
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
			if err := c.first.app.router.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// streamed is a request for so many tokens to a mock site, with a prompt of its
// own that fills more than a fifth of the memory below.
func streamed(s *mockSite, ctx context.Context, i, tokens int) (*http.Response, error) {
	prompt := strings.Repeat(fmt.Sprintf("prompt %d of many ", i), 8)
	body := fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"max_tokens":%d,"ignore_eos":true,"stream":true}`, prompt, tokens)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.openAI+testkit.ChatPath, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	return http.DefaultClient.Do(request)
}

// TestMockOverloadIs503 has slow workers whose memory one request fills beyond
// the threshold each.
func TestMockOverloadIs503(t *testing.T) {
	s := startMockSite(t, 2, "--policy=kv", "--block-size=4", "--mock-num-gpu-blocks=64", "--speedup-ratio=0.01", "--active-decode-blocks-threshold=0.2")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{}, 3)
	begin := func(i int) {
		go func() {
			if response, err := streamed(s, ctx, i, 8); err == nil {
				io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
			ended <- struct{}{}
		}()
		testkit.Eventually(t, 10*time.Second, "the request is on its way", func() bool { return s.inFlight() == i+1 })
	}
	begin(0)
	begin(1)
	response, err := streamed(s, ctx, 2, 8)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" {
		t.Errorf("a third request: %d, Retry-After %q; want 503 and a time", response.StatusCode, response.Header.Get("Retry-After"))
	}
	if status, answer := post(t, s.openAI+"/busy_threshold", fmt.Sprintf(`{"model":%q,"active_decode_blocks_threshold":1}`, mocker.ModelName)); status != http.StatusOK {
		t.Errorf("a change of the threshold: %d %s", status, answer)
	}
	begin(2)
	cancel()
	for range 3 {
		<-ended
	}
	testkit.Eventually(t, 10*time.Second, "all freed", func() bool { return s.inFlight() == 0 })
	if err := s.app.router.Check(); err != nil {
		t.Error(err)
	}
}

func TestMockQueueServesAllInTheEnd(t *testing.T) {
	s := startMockSite(t, 2, "--policy=kv", "--speedup-ratio=0.5", "--mock-max-num-batched-tokens=1024", "--router-queue-threshold=0", "--router-queue-policy=wspt", "--router-track-output-blocks")
	const requests = 12
	statuses := make(chan int, requests)
	for i := range requests {
		go func() {
			status := 0
			if response, err := streamed(s, t.Context(), i, 3); err == nil {
				status = response.StatusCode
				io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
			statuses <- status
		}()
	}
	testkit.Eventually(t, 10*time.Second, "some wait", func() bool { n, _ := s.app.router.QueueDepth(); return n > 0 })
	for range requests {
		if status := <-statuses; status != http.StatusOK {
			t.Errorf("status %d", status)
		}
	}
	testkit.Eventually(t, 10*time.Second, "all freed", func() bool { return s.inFlight() == 0 })
	if n, tokens := s.app.router.QueueDepth(); n != 0 || tokens != 0 {
		t.Errorf("%d requests of %d tokens wait in the end", n, tokens)
	}
	if err := s.app.router.Check(); err != nil {
		t.Error(err)
	}
}
