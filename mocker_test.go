package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"kvrouter/internal/engine"
	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/settings"
	"kvrouter/internal/telemetry"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tokens"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"
	"go.uber.org/goleak"
)

// mockSite is a router over simulated workers, all in this process.
type mockSite struct {
	*site
	rooms *app
	t     testing.TB
	end   func() error
}

// startMockSite starts a router over so many mock workers and waits until it
// follows all of them. It ends with the test.
func startMockSite(t testing.TB, workers int, args ...string) *mockSite {
	t.Helper()
	return startMocks(t, workers, append([]string{fmt.Sprintf("--num-workers=%d", workers)}, args...)...)
}

// startMocks is startMockSite where args say how many workers that is.
func startMocks(t testing.TB, workers int, args ...string) *mockSite {
	t.Helper()
	const ranks = 2 // at most
	ports := testkit.FreePorts(t, 2+workers+3*ranks*workers)
	port := func(flag string, at int) string { return fmt.Sprintf("--%s=%d", flag, ports+at) }
	all := []string{
		"--engine=mocker", "--seed=1", "--speedup-ratio=20", "--drain-timeout=5s",
		port("base-worker-port", 2), port("base-kv-events-port", 2+workers),
		port("base-kv-replay-port", 2+workers+ranks*workers), port("base-metrics-port", 2+workers+2*ranks*workers),
	}
	s := startRooms(t, ports, append(all, args...)...)
	config := s.rooms.config
	testkit.Eventually(t, 20*time.Second, "all workers followed", func() bool {
		return s.followed() == workers*config.Ranks() || !config.KVEvents() && len(s.rooms.router.Targets()) == workers*config.Ranks()
	})
	return s
}

// startRooms starts a router in this process whose own ports are the first two
// from ports on, and waits until both are open. It ends with the test.
func startRooms(t testing.TB, ports int, args ...string) *mockSite {
	t.Helper()
	before := goleak.IgnoreCurrent()
	args = append([]string{fmt.Sprintf("--http-port=%d", ports), fmt.Sprintf("--router-port=%d", ports+1)}, args...)
	s := &mockSite{t: t, site: &site{
		openAI: fmt.Sprintf("http://127.0.0.1:%d", ports), selection: fmt.Sprintf("http://127.0.0.1:%d", ports+1), log: &testkit.LogBuffer{},
	}}
	s.rooms, s.end = runApp(t, s.log, args...)
	t.Cleanup(func() {
		if err := s.end(); err != nil {
			t.Error(err)
		}
		http.DefaultClient.CloseIdleConnections()
		if err := goleak.Find(before); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			log := s.log.String()
			t.Logf("end of the log:\n%s", log[max(0, len(log)-4000):])
		}
	})
	for _, port := range []int{ports, ports + 1} {
		testkit.Eventually(t, 10*time.Second, fmt.Sprintf("port %d is open", port), func() bool {
			conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
			if err == nil {
				conn.Close()
			}
			return err == nil
		})
	}
	return s
}

// runRooms starts a router in this process. end, which may be called again, ends
// it with all that it started.
func runApp(t testing.TB, log io.Writer, args ...string) (r *app, end func() error) {
	t.Helper()
	config, _, err := ParseConfig(args)
	if err != nil {
		t.Fatal(err)
	}
	if r, err = build(t.Context(), config, slog.New(slog.NewTextHandler(log, nil))); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.run(ctx) }()
	return r, sync.OnceValue(func() error {
		cancel()
		defer r.proxy.Client.CloseIdleConnections()
		select {
		case err := <-done:
			return err
		case <-time.After(30 * time.Second):
			return errors.New("the router did not end")
		}
	})
}

// rank is a worker's rank in its latest incarnation.
func (s *mockSite) rank(key kv.WorkerKey) *mocker.Rank {
	return s.rooms.mocker.Worker(int(key.Worker)).Ranks[key.Rank]
}

// followed counts the ranks that are up and whose events are followed.
func (s *mockSite) followed() int {
	n := 0
	streams := s.rooms.fleet.Streams()
	for _, target := range s.rooms.router.Targets() {
		if stats := streams[target.Key]; stats != nil && stats.Connected.Load() && s.rank(target.Key).Events.Pub.Subscribers() > 0 && !stats.Cold.Load() {
			n++
		}
	}
	return n
}

// settle waits until the index has seen all that the workers have published.
func (s *mockSite) settle() {
	s.t.Helper()
	testkit.Eventually(s.t, 20*time.Second, "all events applied", func() bool {
		for key := range s.rooms.fleet.Streams() {
			if !s.inStep(key) {
				return false
			}
		}
		return true
	})
}

// inStep tells whether the index has seen all that a rank's engine has told.
func (s *mockSite) inStep(key kv.WorkerKey) bool {
	stats := s.rooms.fleet.Streams()[key]
	told := s.rank(key).Events.Added.Load()
	return stats != nil && (told == 0 || stats.Batches.Load() > 0 && stats.LastSeq.Load() == told-1)
}

// inFlight is how many requests the router has booked.
func (s *mockSite) inFlight() int {
	n := 0
	for _, target := range s.rooms.router.Targets() {
		n += s.rooms.router.Load(target.Key).InFlight
	}
	return n
}

// say is a chat with one user message.
func say(parts ...string) []map[string]string {
	messages := []map[string]string{}
	for i, text := range parts {
		role := "user"
		if i%2 == 1 {
			role = "assistant"
		}
		messages = append(messages, map[string]string{"role": role, "content": text})
	}
	return messages
}

// post sends a body to a URL and returns status and answer.
func post(t testing.TB, url, body string) (status int, answer []byte) {
	t.Helper()
	response, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err = io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, answer
}

func (s *mockSite) workerURL(i int) string {
	return fmt.Sprintf("http://127.0.0.1:%d", s.rooms.config.BaseWorkerPort+i)
}

func TestMockPredictionsAreExactOneByOne(t *testing.T) {
	variants := [][]string{nil, {"--mock-array-events"}}
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
			if disabled := s.rooms.tokens.Stats().Disabled; len(disabled) > 0 {
				t.Errorf("parity with the mocker fails for %v", disabled)
			}
		})
	}
}

func TestWithoutEventsPromptsAreFoundWhereTheyWent(t *testing.T) {
	for _, args := range [][]string{{"--policy=kv"}, {"--mock-data-parallel-size=2", "--policy=work"}, {"--policy=cache-threshold"}} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			s := startMockSite(t, 2, append(args, "--no-kv-events", "--mock-num-gpu-blocks=200")...)
			if n := len(s.rooms.fleet.Streams()); n > 0 {
				t.Errorf("%d event streams", n)
			}
			if _, sources := testkit.Get(t, s.workerURL(0)+"/kv_event_sources"); string(sources) != "{}\n" && string(sources) != "{}" {
				t.Errorf("the worker publishes at %s", sources)
			}
			for _, target := range s.rooms.router.Targets() {
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
			if err := s.rooms.index.(interface{ Check() error }).Check(); err != nil {
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
	w := s.rooms.mocker.Worker(0)
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
	w := s.rooms.mocker.Worker(int(first.worker))
	testkit.Eventually(t, 20*time.Second, "a request runs", func() bool { return w.Ranks[0].Counts.GenerationTokens.Load() > 3 })
	w.End(mocker.ErrMockCrash)
	if a := <-broken; !a.broken || a.finished {
		t.Errorf("the stream of a crashed worker: %+v", a)
	}
	testkit.Eventually(t, 20*time.Second, "started again", func() bool {
		return s.rooms.mocker.Worker(int(first.worker)) != w && s.followed() == 2
	})
	status := s.rooms.fleet.Workers()[first.worker]
	if status.Generation != 2 || status.Restarts != 1 {
		t.Errorf("%+v", status)
	}
	if blocks := s.rooms.index.Blocks(kv.WorkerKey{Worker: first.worker}); blocks != 0 {
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
	testkit.Eventually(t, 20*time.Second, "worker 1 hangs", s.rooms.mocker.Worker(1).Hung.Load)
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
	config, _, err := ParseConfig([]string{"--engine=none", "--worker", "url=" + s.workerURL(0), fmt.Sprintf("--http-port=%d", ports), fmt.Sprintf("--router-port=%d", ports+1)})
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
	w := s.rooms.mocker.Worker(0)
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
