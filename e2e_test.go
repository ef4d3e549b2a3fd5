package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
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

	"kvrouter/internal/proxy"
	"kvrouter/internal/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"

	"github.com/tidwall/gjson"
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
}

// program builds kvrouter once for all tests.
var program = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "kvrouter-e2e")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "kvrouter")
	out, err := exec.Command("go", "build", "-race", "-o", path, ".").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

// startSite starts kvrouter with real workers and waits until all are ready.
func startSite(t *testing.T, workers int, env []string, args ...string) *site {
	t.Helper()
	return startParts(t, []string{fmt.Sprintf("--num-workers=%d", workers)}, workers, env, args...)
}

// startParts is startSite where parts, flags, say what the workers do.
func startParts(t *testing.T, parts []string, workers int, env []string, args ...string) *site {
	t.Helper()
	ports := testkit.FreePorts(t, 2+5*workers)
	port := func(flag string, at int) string { return fmt.Sprintf("--%s=%d", flag, ports+at) }
	all := append(parts,
		port("base-worker-port", 2), port("base-kv-events-port", 2+workers), port("base-kv-replay-port", 2+2*workers),
		port("base-metrics-port", 2+3*workers), port("base-nixl-port", 2+4*workers),
	)
	s := startProgram(t, ports, env, append(all, args...)...)
	s.waitReady(workers, 5*time.Minute)
	return s
}

// startProgram starts kvrouter on two ports, the second being the one after
// port.
func startProgram(t *testing.T, port int, env []string, args ...string) *site {
	t.Helper()
	if testing.Short() {
		t.Skip("starts real vLLM workers")
	}
	path, err := program()
	if err != nil {
		t.Fatal(err)
	}
	all := []string{"--log-level=debug", "--seed=1", fmt.Sprintf("--http-port=%d", port), fmt.Sprintf("--router-port=%d", port+1)}
	s := &site{
		t:         t,
		command:   exec.Command(path, append(all, args...)...),
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
		s.command.Process.Signal(syscall.SIGTERM)
		select {
		case <-s.ended:
		case <-time.After(60 * time.Second):
			t.Error("kvrouter did not end within 60 s of SIGTERM")
			s.command.Process.Kill()
		}
		if strings.Contains(s.log.String(), "DATA RACE") {
			t.Error("data race")
		}
		if t.Failed() {
			t.Logf("end of the log:\n%s", s.log.End())
		}
	})
	return s
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
	var a answer
	a.worker, _ = strconv.ParseUint(response.Header.Get(web.HeaderWorker), 10, 64)
	a.predicted, _ = strconv.Atoi(response.Header.Get(web.HeaderOverlap))
	a.prefill = response.Header.Get(proxy.HeaderPrefillWorker)
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
		body, err := io.ReadAll(response.Body)
		read(body)
		a.finished = err == nil
		return a, err
	}
	lines := bufio.NewScanner(response.Body)
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

	// kill -9 of the router: its whole family must go.
	family := descendants(s.command.Process.Pid)
	if len(family) < 4 { // two API servers and two engine cores at least
		t.Fatalf("only %d descendants: %v", len(family), family)
	}
	s.command.Process.Kill()
	<-s.ended
	testkit.Eventually(t, 30*time.Second, "all processes of the workers gone", func() bool {
		family = slices.DeleteFunc(family, func(pid int) bool {
			_, state, err := processParent(pid)
			return err != nil || state == "Z" // nobody may be there to reap it
		})
		return len(family) == 0
	})
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
