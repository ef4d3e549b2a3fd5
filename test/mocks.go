package test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alecthomas/kong"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/engine"
	"kvrouter/internal/tools/mocker"
)

// Workers are mock workers in this process. They are started again when they end.
type Workers struct {
	*mocker.Mocker
	Settings mocker.Settings
	Count    int
	Log      *testkit.LogBuffer

	t testing.TB
}

// mockFlags are the flags of kvrouter that StartWorkers reads itself.
type mockFlags struct {
	Mock            mocker.Flags `embed:""`
	Model           string
	ServedModelName string
	BlockSize       int    `default:"64"`
	Seed            uint64 `default:"1"`
	PrefillWorkers  int
	DecodeWorkers   int

	Settings mocker.Settings `kong:"-"` // of Mock
}

// errStopped is why mock workers end with their test.
var errStopped = errors.New("the test is over")

// restartPause is how long a mock worker that has ended stays away.
const restartPause = 50 * time.Millisecond

// parseMocks splits args into the flags of mock workers and the others, which are for
// the router. --model, --block-size and --seed are for both.
func parseMocks(t testing.TB, args []string) (flags mockFlags, router []string) {
	t.Helper()
	parser, err := kong.New(&flags, kong.Exit(func(int) { t.Fatal("bad flags of mock workers") }))
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, flag := range parser.Model.Flags {
		known[flag.Name] = true
	}
	mine := []string{"--speedup-ratio=20"}
	for _, arg := range args {
		name, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		if known[name] {
			mine = append(mine, arg)
		}
		switch name {
		case "model", "block-size", "seed":
			router = append(router, arg)
		default:
			if !known[name] {
				router = append(router, arg)
			}
		}
	}
	if _, err := parser.Parse(mine); err != nil {
		t.Fatal(err)
	}
	if flags.Settings, err = flags.Mock.Settings(); err != nil {
		t.Fatal(err)
	}
	return flags, router
}

// StartWorkers starts so many mock workers with kvrouter's flags for them, such as
// --mock=lora=one, on free ports. With --prefill-workers and --decode-workers it
// starts as many as these say, those that compute prompts first. They end with the
// test.
func StartWorkers(t testing.TB, count int, args ...string) *Workers {
	t.Helper()
	flags, _ := parseMocks(t, args)
	if flags.PrefillWorkers > 0 {
		count = flags.PrefillWorkers + flags.DecodeWorkers
	}
	s := flags.Settings
	ranks := max(1, s.DataParallelSize)
	base := testkit.FreePorts(t, count+3*ranks*count)
	s.ServedModelName = flags.ServedModelName
	if s.ServedModelName == "" {
		s.ServedModelName = mocker.ModelName
		if flags.Model != "" {
			s.ServedModelName = filepath.Base(flags.Model)
		}
	}
	s.BlockSize, s.Seed, s.KVEvents = flags.BlockSize, flags.Seed, true
	s.Ports = process.Ports{HTTP: base, KVEvents: base + count, KVReplay: base + count + ranks*count, Load: base + count + 2*ranks*count,
		Ranks: ranks}
	for i := range count {
		s.Parts = append(s.Parts, partOf(s, i, flags.PrefillWorkers))
	}
	if err := s.Validate(count); err != nil {
		t.Fatal(err)
	}
	model, err := openModel(t, flags.Model)
	if err != nil {
		t.Fatal(err)
	}
	w := &Workers{Settings: s, Count: count, Log: &testkit.LogBuffer{}, t: t}
	if w.Mocker, err = mocker.NewMocker(s, model, slog.New(slog.NewTextHandler(w.Log, nil))); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for i := range count {
		worker, err := w.Start(i)
		if err != nil {
			t.Fatal(err)
		}
		running.Go(func() { w.supervise(ctx, i, worker) })
	}
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return w
}

// openModel opens the tokenizer of a folder; empty: that of mock workers.
func openModel(t testing.TB, folder string) (*tokens.Model, error) {
	if folder == "" {
		return mocker.OpenBuiltinModel()
	}
	return tokens.Open(t.Context(), tokens.Opening{Name: folder}, slog.New(slog.DiscardHandler))
}

// partOf returns the part of mock worker i of whom the first prefills compute prompts.
func partOf(s mocker.Settings, i, prefills int) kv.Disagg {
	if prefills == 0 {
		return kv.Disagg{}
	}
	d := kv.Disagg{Role: kv.RoleDecode, Kind: s.DisaggKind()}
	if i < prefills {
		d.Role = kv.RolePrefill
		if d.Kind == kv.KindSGLang {
			d.Bootstrap = kv.Bootstrap{Host: "127.0.0.1", Port: uint16(s.Ports.HTTP + i)}
		}
	}
	return d
}

// supervise starts worker i again whenever it ends, until ctx ends.
func (w *Workers) supervise(ctx context.Context, i int, worker *mocker.Worker) {
	for {
		select {
		case <-ctx.Done():
			worker.End(errStopped)
			<-worker.Ended()
			return
		case <-worker.Ended():
		}
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(restartPause):
			}
			again, err := w.Start(i)
			if err == nil {
				worker = again
				break
			}
		}
	}
}

// URL returns where worker i listens.
func (w *Workers) URL(i int) string { return w.Settings.Ports.URL(i) }

// Rank returns a worker's rank in its latest incarnation.
func (w *Workers) Rank(key kv.WorkerKey) *mocker.Rank {
	return w.Worker(int(key.Worker)).Ranks[key.Rank]
}

// Keys returns all ranks of all workers.
func (w *Workers) Keys() (keys []kv.WorkerKey) {
	for i := range w.Count {
		for rank := range w.Settings.Ports.Ranks {
			keys = append(keys, kv.WorkerKey{Worker: uint64(i), Rank: uint32(rank)})
		}
	}
	return keys
}

// Held returns how many blocks a rank's cache holds, the truth beside the index; -1: it
// has ended.
func (w *Workers) Held(key kv.WorkerKey) (blocks int) {
	if !w.Rank(key).Ask(w.t.Context(), func(e *engine.Engine) { blocks = e.Pool.Keys() }) {
		return -1 // it has ended
	}
	return blocks
}

// Attach returns the flags by which a router attaches the workers, by their numbers.
func (w *Workers) Attach() (args []string) {
	for i, part := range w.Settings.Parts {
		flag := fmt.Sprintf("--worker=url=%s,id=%d", w.URL(i), i)
		if part.Role != kv.RoleBoth {
			flag += fmt.Sprintf(",role=%s,kind=%s", part.Role, part.Kind)
		}
		if w.Settings.PeerBandwidth > 0 {
			flag += ",p2p=" + strings.TrimPrefix(w.URL(i), "http://")
		}
		args = append(args, flag)
	}
	return args
}

// BuiltinModel writes the mock workers' model into a folder, for --model.
func BuiltinModel(t testing.TB) (folder string) {
	t.Helper()
	folder = t.TempDir()
	tokenizer, err := mocker.BuiltinTokenizer()
	if err != nil {
		t.Fatal(err)
	}
	config, err := json.Marshal(map[string]any{"chat_template": mocker.BuiltinTemplate, "eos_token": "<|im_end|>", "model_max_length": 131072})
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"tokenizer.json": tokenizer, "tokenizer_config.json": config,
		"config.json": []byte(`{"max_position_embeddings":131072}`)} {
		if err := os.WriteFile(filepath.Join(folder, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// Mocks is a kvrouter over mock workers in this process, which it attaches.
type Mocks struct {
	*Router
	*Workers
	T testing.TB
}

// StartMocks starts a router over so many mock workers and waits until it follows all
// of them. args are kvrouter's flags: those of mock workers go to these. Both end with
// the test.
func StartMocks(t testing.TB, workers int, args ...string) *Mocks {
	t.Helper()
	return StartOver(t, StartWorkers(t, workers, args...), args...)
}

// StartPairs is StartMocks over workers of which some compute prompts and the others
// answer, which hand prompts over by a protocol.
func StartPairs(t testing.TB, kind kv.Kind, prefills, decodes int, args ...string) *Mocks {
	t.Helper()
	parts := []string{fmt.Sprintf("--prefill-workers=%d", prefills), fmt.Sprintf("--decode-workers=%d", decodes),
		"--mock=disagg-kind=" + kind.String()}
	return StartMocks(t, prefills+decodes, append(parts, args...)...)
}

// StartOver starts a router over mock workers that run and waits until it follows all
// of them.
func StartOver(t testing.TB, w *Workers, args ...string) *Mocks {
	t.Helper()
	return StartOverAt(t, Program, testkit.FreePorts(t, 2), w, args...)
}

// StartOverAt is StartOver for a given program, the OpenAI port at port and the router
// port after it.
func StartOverAt(t testing.TB, program func() (string, error), port int, w *Workers, args ...string) *Mocks {
	t.Helper()
	return startOverIn(t, nil, program, port, w, args...)
}

// startOverIn is StartOverAt with env beside the environment.
func startOverIn(t testing.TB, env []string, program func() (string, error), port int, w *Workers, args ...string) *Mocks {
	t.Helper()
	_, router := parseMocks(t, args)
	all := append([]string{"--engine=none", "--drain-timeout=5s", "--model=" + BuiltinModel(t),
		"--served-model-name=" + w.Settings.ServedModelName}, w.Attach()...)
	s := &Mocks{Router: StartAt(t, program, port, env, append(all, router...)...), Workers: w, T: t}
	s.WaitReady(w.Count, 30*time.Second)
	s.Follow()
	return s
}

// StartMocker starts a router that starts so many mock workers itself, in its own
// process (--engine mocker), and waits until all are ready.
func StartMocker(t testing.TB, workers int, args ...string) *Router {
	t.Helper()
	return startMocker(t, Program, workers, args...)
}

// startMocker is StartMocker for a given program.
func startMocker(t testing.TB, program func() (string, error), workers int, args ...string) *Router {
	t.Helper()
	const ranks = 2 // at most
	ports := testkit.FreePorts(t, 2+workers+3*ranks*workers)
	at := 2
	all := []string{"--engine=mocker", fmt.Sprintf("--num-workers=%d", workers), "--speedup-ratio=20", "--drain-timeout=5s"}
	for _, kind := range []struct {
		flag  string
		ports int
	}{{"base-worker-port", workers}, {"base-kv-events-port", ranks * workers}, {"base-kv-replay-port", ranks * workers},
		{"base-metrics-port", ranks * workers}} {
		all = append(all, fmt.Sprintf("--%s=%d", kind.flag, ports+at))
		at += kind.ports
	}
	r := StartAt(t, program, ports, nil, append(all, args...)...)
	r.WaitReady(workers, 30*time.Second)
	return r
}

// Follow waits until the router's index follows the KV events of every rank, unless
// it has no use for them.
func (s *Mocks) Follow() {
	s.T.Helper()
	testkit.Eventually(s.T, 30*time.Second, "all workers followed", func() bool {
		page := s.Metrics()
		for _, key := range s.Keys() {
			labels := fmt.Sprintf(`{dp_rank="%d",worker_id="%d"}`, key.Rank, key.Worker)
			connected, follows := page["kvrouter_kv_events_connected"+labels]
			if follows && (connected == 0 || page["kvrouter_worker_cold"+labels] != 0 || s.Rank(key).Events.Pub.Subscribers() == 0) ||
				page["kvrouter_worker_up"+labels] == 0 {
				return false
			}
		}
		return true
	})
}

// Settle waits until the index has seen every block that the workers store and no
// other.
func (s *Mocks) Settle() {
	s.T.Helper()
	testkit.Eventually(s.T, 20*time.Second, "all events applied", func() bool {
		page := s.Metrics()
		for _, key := range s.Keys() {
			if !s.inStep(page, key, s.Held(key)) {
				return false
			}
		}
		return true
	})
}

// inStep reports whether a router with that metrics page has seen all that a rank has
// published, whose cache holds so many blocks. Of a rank's first incarnation every batch
// is counted; of later ones only the blocks are compared.
func (w *Workers) inStep(page testkit.MetricsLines, key kv.WorkerKey, held int) bool {
	labels := fmt.Sprintf(`dp_rank="%d"`, key.Rank)
	if _, follows := page[fmt.Sprintf(`kvrouter_kv_events_connected{%s,worker_id="%d"}`, labels, key.Worker)]; !follows {
		return true
	}
	worker := fmt.Sprintf(`worker_id="%d"`, key.Worker)
	if int(w.Starts.Load()) == w.Count {
		count := func(kind string) float64 {
			return page[fmt.Sprintf(`kvrouter_kv_events_total{%s,kind="%s",%s}`, labels, kind, worker)]
		}
		if count("batches")+count("replayed_batches") < float64(w.Rank(key).Events.Added.Load()) {
			return false
		}
	}
	return int(page[fmt.Sprintf("kvrouter_worker_blocks{%s,%s}", labels, worker)]) == held
}

// Idle waits until no request is in flight.
func (s *Mocks) Idle() {
	s.T.Helper()
	testkit.Eventually(s.T, 20*time.Second, "nothing in flight", func() bool { return s.InFlight() == 0 })
	http.DefaultClient.CloseIdleConnections()
}

// BareWorker returns the URL of a worker that is well and answers completions with the
// rank that they name: it is for tests of the router port, whose clients send requests
// themselves.
func BareWorker(t testing.TB) (url string) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("POST /v1/completions", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, `{"choices":[{"text":%q,"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":1}}`,
			r.Header.Get(web.HeaderRank))
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL
}
