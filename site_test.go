package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/proxy"
	"kvrouter/internal/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"
)

// The end-to-end tests run the built program with real vLLM workers. They need
// what `make setup` prepares; go test -short leaves them out.

// site is a running kvrouter with its workers.
type site struct {
	t         *testing.T
	command   *exec.Cmd
	openAI    string // URL of the OpenAI port
	selection string // URL of the router port
	log       *testkit.LogBuffer
	ended     chan struct{}
	model     string // that chats name; empty: none
}

// program builds kvrouter with the race detector, once for all tests. plainProgram
// builds it without, for tests of memory and time.
var (
	program      = sync.OnceValues(func() (string, error) { return buildProgram("-race") })
	plainProgram = sync.OnceValues(func() (string, error) { return buildProgram("-race=false") })
)

func buildProgram(flag string) (path string, err error) {
	dir, err := os.MkdirTemp("", "kvrouter-e2e")
	if err != nil {
		return "", err
	}
	path = filepath.Join(dir, "kvrouter")
	out, err := exec.Command("go", "build", flag, "-o", path, ".").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
}

// startProgram starts kvrouter on two ports, the second being the one after
// port.
func startProgram(t *testing.T, port int, env []string, args ...string) *site {
	t.Helper()
	all := []string{"--log-level=debug", "--seed=1", "--drain-delay=0s", fmt.Sprintf("--http-port=%d", port), fmt.Sprintf("--router-port=%d", port+1)}
	return startBuilt(t, program, port, env, append(all, args...)...)
}

// startBuilt starts one of the programs above, with no other flags than args.
// Their ports are those that startProgram has.
func startBuilt(t *testing.T, built func() (string, error), port int, env []string, args ...string) *site {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	path, err := built()
	if err != nil {
		t.Fatal(err)
	}
	s := &site{
		t:         t,
		command:   exec.Command(path, args...),
		openAI:    fmt.Sprintf("http://127.0.0.1:%d", port),
		selection: fmt.Sprintf("http://127.0.0.1:%d", port+1),
		log:       &testkit.LogBuffer{},
		ended:     make(chan struct{}),
	}
	s.command.Env = append(os.Environ(), env...)
	s.command.Stdout, s.command.Stderr = s.log, s.log
	s.command.WaitDelay = 5 * time.Second
	if err := s.command.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		s.command.Wait()
		close(s.ended)
	}()
	t.Cleanup(func() {
		s.stop()
		if strings.Contains(s.log.String(), "DATA RACE") {
			t.Error("data race")
		}
		if t.Failed() {
			t.Logf("end of the log:\n%s", s.log.Tail())
		}
	})
	return s
}

// stop ends the program by SIGTERM.
func (s *site) stop() {
	s.command.Process.Signal(syscall.SIGTERM)
	select {
	case <-s.ended:
	case <-time.After(60 * time.Second):
		s.t.Error("kvrouter did not end within 60 s of SIGTERM")
		s.command.Process.Kill()
	}
}

// waitReady waits until that many workers are schedulable.
func (s *site) waitReady(workers int, limit time.Duration) {
	s.t.Helper()
	testkit.Eventually(s.t, limit, fmt.Sprintf("%d workers ready", workers), func() bool {
		select {
		case <-s.ended:
			s.t.Fatal("kvrouter ended")
		default:
		}
		up := 0
		for _, w := range s.workers() {
			if w.Lifecycle == "schedulable" {
				up++
			}
		}
		return up == workers
	})
}

// workers is GET /workers; nil while the port is not open.
func (s *site) workers() []selection.WorkerRecord {
	response, err := http.Get(s.selection + "/workers")
	if err != nil {
		return nil
	}
	defer response.Body.Close()
	var records []selection.WorkerRecord
	json.NewDecoder(response.Body).Decode(&records)
	return records
}

// answer is what one chat came to.
type answer struct {
	text      string
	worker    uint64
	prefill   string // worker that computed the prompt; empty: the same
	predicted int    // tokens of overlap in the header
	cached    int    // tokens the engine says it had
	prompt    int    // tokens of the prompt
	finished  bool
	broken    bool // ended with an error event
}

// chat sends one chat and reads its whole answer.
func (s *site) chat(ctx context.Context, messages []map[string]string, stream bool, maxTokens int) (answer, error) {
	body := map[string]any{"messages": messages, "max_tokens": maxTokens, "temperature": 0, "stream": stream}
	if stream {
		body["stream_options"] = map[string]bool{"include_usage": true}
	}
	if s.model != "" {
		body["model"] = s.model
	}
	text, _ := json.Marshal(body)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.openAI+testkit.ChatPath, bytes.NewReader(text))
	if err != nil {
		return answer{}, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(response.Body)
		return answer{}, fmt.Errorf("%s: %s", response.Status, body)
	}
	return readAnswer(response.Header, response.Body, stream)
}

// readAnswer reads what a chat came to to its end.
func readAnswer(header http.Header, text io.Reader, stream bool) (answer, error) {
	var a answer
	a.worker, _ = strconv.ParseUint(header.Get(web.HeaderWorker), 10, 64)
	a.predicted, _ = strconv.Atoi(header.Get(web.HeaderOverlap))
	a.prefill = header.Get(proxy.HeaderPrefillWorker)
	read := func(chunk []byte) {
		a.text += gjson.GetBytes(chunk, "choices.0.delta.content").String() + gjson.GetBytes(chunk, "choices.0.message.content").String()
		if u := proxy.ReadUsage(chunk); u.Known {
			a.cached, a.prompt = u.CachedTokens, u.PromptTokens
		}
		if gjson.GetBytes(chunk, "error").Exists() {
			a.broken = true
		}
	}
	if !stream {
		body, err := io.ReadAll(text)
		read(body)
		a.finished = err == nil
		return a, err
	}
	lines := bufio.NewScanner(text)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if a.finished = data == "[DONE]"; !a.finished { // and on to the end: closing now would be leaving
			read([]byte(data))
		}
	}
	return a, lines.Err()
}

// settled waits until the index shows the prompt's blocks on the worker that
// has just served it: events travel apart from answers.
func (s *site) settled(messages []map[string]string, a answer) {
	s.t.Helper()
	body, _ := json.Marshal(map[string]any{"messages": messages})
	response, err := http.Post(s.openAI+"/tokenize", "application/json", bytes.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	text, _ := io.ReadAll(response.Body)
	response.Body.Close()
	query := `{"token_ids":` + gjson.GetBytes(text, "tokens").Raw + `}`
	want := int64(a.prompt / 64)
	testkit.Eventually(s.t, 10*time.Second, fmt.Sprintf("%d blocks of the last prompt on worker %d", want, a.worker), func() bool {
		response, err := http.Post(s.selection+"/overlap_scores", "application/json", strings.NewReader(query))
		if err != nil {
			return false
		}
		defer response.Body.Close()
		body, _ := io.ReadAll(response.Body)
		return gjson.GetBytes(body, fmt.Sprintf("workers.#(worker_id==%d).device_blocks", a.worker)).Int() >= want
	})
}

// words returns n words drawn from a small vocabulary.
func words(random *rand.Rand, n int) string {
	vocabulary := strings.Fields("river stone cloud winter paper silver garden engine letter mountain harbour candle forest mirror bridge valley thunder copper orchard lantern")
	out := make([]string, n)
	for i := range out {
		out[i] = vocabulary[random.IntN(len(vocabulary))]
	}
	return strings.Join(out, " ")
}

func message(role, content string) map[string]string {
	return map[string]string{"role": role, "content": content}
}

// tokenize returns the status and tokens that POST /tokenize gives.
func (s *site) tokenize(url string, body []byte) string {
	s.t.Helper()
	response, err := http.Post(url+"/tokenize", "application/json", bytes.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	answer := gjson.ParseBytes(text)
	return fmt.Sprint(response.StatusCode, " ", answer.Get("count").Raw, " ", answer.Get("max_model_len").Raw, " ", answer.Get("tokens").Raw)
}

func (s *site) get(url string) []byte {
	s.t.Helper()
	response, err := http.Get(url)
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	body, _ := io.ReadAll(response.Body)
	return body
}

// processParent returns the parent and the state letter of a process.
func processParent(pid int) (parent int, state string, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, "", err
	}
	// "pid (name) state parent ...", and the name may hold anything
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	parent, err = strconv.Atoi(fields[1])
	return parent, fields[0], err
}

// descendants returns the ids of all processes below pid.
func descendants(pid int) []int {
	children := map[int][]int{}
	entries, _ := filepath.Glob("/proc/[0-9]*")
	for _, entry := range entries {
		child, _ := strconv.Atoi(filepath.Base(entry))
		if parent, _, err := processParent(child); err == nil {
			children[parent] = append(children[parent], child)
		}
	}
	var all []int
	for queue := []int{pid}; len(queue) > 0; queue = queue[1:] {
		all = append(all, children[queue[0]]...)
		queue = append(queue, children[queue[0]]...)
	}
	return all
}

// familyDiesWithIt kills the program by SIGKILL: its descendants, at least so many,
// must go too.
func (s *site) familyDiesWithIt(least int) {
	s.t.Helper()
	family := descendants(s.command.Process.Pid)
	if len(family) < least {
		s.t.Fatalf("only %d descendants: %v", len(family), family)
	}
	s.command.Process.Kill()
	<-s.ended
	testkit.Eventually(s.t, 30*time.Second, "all processes of the workers gone", func() bool {
		family = slices.DeleteFunc(family, func(pid int) bool {
			_, state, err := processParent(pid)
			return err != nil || state == "Z" // nobody may be there to reap it
		})
		return len(family) == 0
	})
}

// mockSite is a router over simulated workers, all in this process.
type mockSite struct {
	*site
	app *app
	t   testing.TB
	end func() error
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
	s := startApp(t, ports, append(all, args...)...)
	config := s.app.config
	testkit.Eventually(t, 20*time.Second, "all workers followed", func() bool {
		return s.followed() == workers*config.Ranks() || !config.KVEvents() && len(s.app.router.Targets()) == workers*config.Ranks()
	})
	return s
}

// startApp starts a router in this process whose own ports are the first two
// from ports on, and waits until both are open. It ends with the test.
func startApp(t testing.TB, ports int, args ...string) *mockSite {
	t.Helper()
	before := goleak.IgnoreCurrent()
	args = append([]string{fmt.Sprintf("--http-port=%d", ports), fmt.Sprintf("--router-port=%d", ports+1)}, args...)
	s := &mockSite{t: t, site: &site{
		openAI: fmt.Sprintf("http://127.0.0.1:%d", ports), selection: fmt.Sprintf("http://127.0.0.1:%d", ports+1), log: &testkit.LogBuffer{},
	}}
	s.app, s.end = runApp(t, s.log, args...)
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

// runApp starts a router in this process. end stops it with all that it started;
// end may be called again.
func runApp(t testing.TB, log io.Writer, args ...string) (r *app, end func() error) {
	t.Helper()
	config, _, err := ParseConfig(append([]string{"--drain-delay=0s"}, args...))
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
		defer r.proxy.Close()
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
	return s.app.mocker.Worker(int(key.Worker)).Ranks[key.Rank]
}

// followed counts the ranks that are up and whose events are followed.
func (s *mockSite) followed() int {
	n := 0
	streams := s.app.fleet.Streams()
	for _, target := range s.app.router.Targets() {
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
		for key := range s.app.fleet.Streams() {
			if !s.inStep(key) {
				return false
			}
		}
		return true
	})
}

// inStep tells whether the index has seen all that a rank's engine has told.
func (s *mockSite) inStep(key kv.WorkerKey) bool {
	stats := s.app.fleet.Streams()[key]
	told := s.rank(key).Events.Added.Load()
	return stats != nil && (told == 0 || stats.Batches.Load() > 0 && stats.LastSeq.Load() == told-1)
}

// inFlight is how many requests the router has booked.
func (s *mockSite) inFlight() int {
	n := 0
	for _, target := range s.app.router.Targets() {
		n += s.app.router.Load(target.Key).InFlight
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
	return fmt.Sprintf("http://127.0.0.1:%d", s.app.config.BaseWorkerPort+i)
}
