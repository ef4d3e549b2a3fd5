package test

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
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/testkit"
)

// Router is a running kvrouter and its two ports.
type Router struct {
	*Process
	OpenAI string // URL of the OpenAI port
	Port   string // URL of the router port
	Model  string // that chats name; empty: none
	Key    string // of the router port; empty: none
}

// Start starts kvrouter with args on two free ports and waits until both are open. It
// ends with the test.
func Start(t testing.TB, args ...string) *Router {
	t.Helper()
	return StartAt(t, Program, testkit.FreePorts(t, 2), nil, args...)
}

// StartAt is Start for a given program, the OpenAI port at port and the router port
// after it, and env beside the environment.
func StartAt(t testing.TB, program func() (string, error), port int, env []string, args ...string) *Router {
	t.Helper()
	r := launch(t, program, port, env, args...)
	for _, p := range []int{port, port + 1} {
		testkit.Eventually(t, 30*time.Second, fmt.Sprintf("port %d is open", p), func() bool {
			r.alive()
			conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", p))
			if err == nil {
				conn.Close()
			}
			return err == nil
		})
	}
	return r
}

// launch is StartAt that waits for nothing.
func launch(t testing.TB, program func() (string, error), port int, env []string, args ...string) *Router {
	t.Helper()
	all := []string{"--log-level=debug", "--seed=1", "--drain-delay=0s", fmt.Sprintf("--http-port=%d", port),
		fmt.Sprintf("--router-port=%d", port+1)}
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	key := ""
	for _, arg := range args {
		if given, ok := strings.CutPrefix(arg, "--router-api-key="); ok {
			key = given
		}
	}
	return &Router{
		Key:     key,
		Process: Run(t, program, env, append(all, args...)...),
		OpenAI:  fmt.Sprintf("http://127.0.0.1:%d", port), Port: fmt.Sprintf("http://127.0.0.1:%d", port+1),
	}
}

// StartEngines starts kvrouter with so many real engines and waits until all are
// ready, for 8 minutes at most.
func StartEngines(t testing.TB, workers int, env []string, args ...string) *Router {
	t.Helper()
	return StartParts(t, []string{fmt.Sprintf("--num-workers=%d", workers)}, workers, env, args...)
}

// StartParts is StartEngines where parts, flags, say what the workers do.
func StartParts(t testing.TB, parts []string, workers int, env []string, args ...string) *Router {
	t.Helper()
	const ranks = 2 // of a worker at most
	slots := workers * ranks
	ports := testkit.FreePorts(t, 2+6*slots)
	all := slices.Clone(parts)
	for i, flag := range []string{"base-worker-port", "base-kv-events-port", "base-kv-replay-port", "base-metrics-port", "base-nixl-port",
		"base-bootstrap-port"} {
		all = append(all, fmt.Sprintf("--%s=%d", flag, ports+2+i*slots))
	}
	r := launch(t, Program, ports, env, append(all, forThisCPU(args)...)...)
	r.WaitReady(workers, 8*time.Minute)
	return r
}

// forThisCPU has vLLM compute in float32 on a CPU without AVX-512: bfloat16, the
// model's own type, takes three times as long there.
func forThisCPU(args []string) []string {
	info, err := os.ReadFile("/proc/cpuinfo")
	_, noGPU := exec.LookPath("nvidia-smi")
	if err != nil || noGPU == nil || strings.Contains(string(info), " avx512f") {
		return args
	}
	if !slices.Contains(args, "--") {
		args = append(args, "--")
	}
	return append(args, "--dtype", "float32")
}

// WaitReady waits until that many workers are schedulable.
func (r *Router) WaitReady(workers int, limit time.Duration) {
	r.T.Helper()
	testkit.Eventually(r.T, limit, fmt.Sprintf("%d workers ready", workers), func() bool {
		r.alive()
		up := 0
		for _, w := range r.Workers() {
			if w.Lifecycle == "schedulable" {
				up++
			}
		}
		return up == workers
	})
}

// Workers is GET /workers; nil while the port is not open.
func (r *Router) Workers() []selection.WorkerRecord {
	request, err := http.NewRequest(http.MethodGet, r.Port+"/workers", nil)
	if err != nil {
		return nil
	}
	request.Header.Set("Authorization", "Bearer "+r.Key)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil
	}
	defer response.Body.Close()
	var records []selection.WorkerRecord
	json.NewDecoder(response.Body).Decode(&records)
	return records
}

// Record returns a worker's record of GET /workers; ok: there is one.
func (r *Router) Record(id uint64) (record selection.WorkerRecord, ok bool) {
	for _, w := range r.Workers() {
		if w.WorkerID == id {
			return w, true
		}
	}
	return record, false
}

// MetricsPage is the whole metrics page, which the router port serves.
func (r *Router) MetricsPage() []byte {
	r.T.Helper()
	request, err := http.NewRequest(http.MethodGet, r.Port+"/metrics", nil)
	if err != nil {
		r.T.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+r.Key)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		r.T.Fatal(err)
	}
	defer response.Body.Close()
	page, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		r.T.Fatalf("%s: %s, %v", r.Port+"/metrics", response.Status, err)
	}
	return page
}

// Metrics is the metrics page, sample by sample.
func (r *Router) Metrics() testkit.MetricsLines {
	return testkit.ReadMetricsPage(string(r.MetricsPage()))
}

// Gauge returns the value of a worker's sample: of name{worker_id,dp_rank}.
func (r *Router) Gauge(name string, key kv.WorkerKey) float64 {
	r.T.Helper()
	page := string(r.Get(r.OpenAI + "/metrics"))
	for line := range strings.Lines(page) {
		labels, value, ok := strings.Cut(strings.TrimSpace(line), "} ")
		if !ok || !strings.HasPrefix(labels, name+"{") || !strings.Contains(labels, fmt.Sprintf(`worker_id="%d"`, key.Worker)) ||
			!strings.Contains(labels, fmt.Sprintf(`dp_rank="%d"`, key.Rank)) {
			continue
		}
		number, err := strconv.ParseFloat(value, 64)
		if err != nil {
			r.T.Fatal(err)
		}
		return number
	}
	return 0
}

// Blocks returns how many blocks the index knows a rank to hold.
func (r *Router) Blocks(key kv.WorkerKey) int {
	return int(r.Gauge("kvrouter_worker_blocks", key))
}

// Ranks returns the ranks that requests may go to, in order.
func (r *Router) Ranks() []kv.WorkerKey {
	var keys []kv.WorkerKey
	for line := range strings.Lines(string(r.Get(r.OpenAI + "/metrics"))) {
		labels, up := strings.CutPrefix(line, "kvrouter_worker_up{")
		if !up || !strings.HasSuffix(strings.TrimSpace(line), "} 1") {
			continue
		}
		var key kv.WorkerKey
		for label := range strings.SplitSeq(strings.TrimRight(labels, "} 1\n"), ",") {
			name, quoted, _ := strings.Cut(label, "=")
			value, err := strconv.ParseUint(strings.Trim(quoted, `"`), 10, 64)
			switch {
			case err != nil: // a name of its own
			case name == "worker_id":
				key.Worker = value
			case name == "dp_rank":
				key.Rank = uint32(value)
			}
		}
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b kv.WorkerKey) int {
		return strings.Compare(fmt.Sprintf("%08d.%d", a.Worker, a.Rank), fmt.Sprintf("%08d.%d", b.Worker, b.Rank))
	})
	return keys
}

// InFlight is how many requests the router counts as in flight.
func (r *Router) InFlight() int {
	n := 0
	for _, w := range r.Workers() {
		n += w.InFlight
	}
	return n
}

// Answer is the result of one chat.
type Answer struct {
	Text      string
	Worker    uint64
	Prefill   string // worker that computed the prompt; empty: the same
	Predicted int    // tokens of overlap in the header
	Cached    int    // tokens the engine says it had
	Prompt    int    // tokens of the prompt
	Output    int    // tokens of the answer
	Finished  bool
	Broken    bool // ended with an error event
}

// Chat sends one chat, with headers in pairs, and reads its whole answer.
func (r *Router) Chat(ctx context.Context, messages []map[string]string, stream bool, maxTokens int, headers ...string) (Answer, error) {
	body := map[string]any{"messages": messages, "max_tokens": maxTokens, "temperature": 0, "stream": stream}
	if stream {
		body["stream_options"] = map[string]bool{"include_usage": true}
	}
	if r.Model != "" {
		body["model"] = r.Model
	}
	text, _ := json.Marshal(body)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, r.OpenAI+testkit.ChatPath, bytes.NewReader(text))
	if err != nil {
		return Answer{}, err
	}
	request.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return Answer{}, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(response.Body)
		return Answer{}, fmt.Errorf("%s: %s", response.Status, body)
	}
	return ReadAnswer(response.Header, response.Body, stream)
}

// ReadAnswer reads the answer to a chat to its end.
func ReadAnswer(header http.Header, text io.Reader, stream bool) (Answer, error) {
	var a Answer
	a.Worker, _ = strconv.ParseUint(header.Get(web.HeaderWorker), 10, 64)
	a.Predicted, _ = strconv.Atoi(header.Get(web.HeaderOverlap))
	a.Prefill = header.Get(proxy.HeaderPrefillWorker)
	read := func(chunk []byte) {
		a.Text += gjson.GetBytes(chunk, "choices.0.delta.content").String() + gjson.GetBytes(chunk, "choices.0.message.content").String()
		if u := proxy.ReadUsage(chunk); u.Known {
			a.Cached, a.Prompt, a.Output = u.CachedTokens, u.PromptTokens, u.OutputTokens
		}
		if gjson.GetBytes(chunk, "error").Exists() {
			a.Broken = true
		}
	}
	if !stream {
		body, err := io.ReadAll(text)
		read(body)
		a.Finished = err == nil
		return a, err
	}
	lines := bufio.NewScanner(text)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if a.Finished = data == "[DONE]"; !a.Finished { // and on to the end: closing now would be leaving
			read([]byte(data))
		}
	}
	return a, lines.Err()
}

// Settled waits until the index shows the prompt's blocks of 64 tokens on the worker
// that has just served it: events travel apart from answers.
func (r *Router) Settled(messages []map[string]string, a Answer) {
	r.T.Helper()
	body, _ := json.Marshal(map[string]any{"messages": messages})
	_, text := Post(r.T, r.OpenAI+"/tokenize", string(body))
	query := `{"token_ids":` + gjson.GetBytes(text, "tokens").Raw + `}`
	want := int64(a.Prompt / 64)
	testkit.Eventually(r.T, 10*time.Second, fmt.Sprintf("%d blocks of the last prompt on worker %d", want, a.Worker), func() bool {
		_, body := Post(r.T, r.Port+"/overlap_scores", query)
		return gjson.GetBytes(body, fmt.Sprintf("workers.#(worker_id==%d).device_blocks", a.Worker)).Int() >= want
	})
}

// Calm waits until no KV event has come for so long: events travel apart from answers, and
// those of an answer's own blocks and of lower tiers come after it.
func (r *Router) Calm(quiet time.Duration) {
	r.T.Helper()
	last, since := -1.0, time.Now()
	testkit.Eventually(r.T, time.Minute, "no more KV events", func() bool {
		if n := SumOf(r.Get(r.OpenAI+"/metrics"), "kvrouter_kv_events_total"); n != last {
			last, since = n, time.Now()
		}
		return time.Since(since) > quiet
	})
}

// Tokenize returns the status and tokens that POST /tokenize gives.
func (r *Router) Tokenize(url string, body []byte) string {
	r.T.Helper()
	status, text := Post(r.T, url+"/tokenize", string(body))
	answer := gjson.ParseBytes(text)
	return fmt.Sprint(status, " ", answer.Get("count").Raw, " ", answer.Get("max_model_len").Raw, " ", answer.Get("tokens").Raw)
}

// Get returns the body of GET url.
func (r *Router) Get(url string) []byte {
	r.T.Helper()
	_, body := testkit.HTTPGet(r.T, url)
	return body
}

// Post sends a body of JSON to a URL and returns status and answer.
func Post(t testing.TB, url, body string) (status int, answer []byte) {
	t.Helper()
	return PostAs(t, url, "application/json", strings.NewReader(body))
}

// PostAs is Post of a body with that content type.
func PostAs(t testing.TB, url, kind string, body io.Reader) (status int, answer []byte) {
	t.Helper()
	response, err := http.Post(url, kind, body)
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

// Words returns n words drawn from a small vocabulary.
func Words(random *rand.Rand, n int) string {
	vocabulary := strings.Fields("river stone cloud winter paper silver garden engine letter mountain harbour candle forest mirror bridge " +
		"valley thunder copper orchard lantern")
	out := make([]string, n)
	for i := range out {
		out[i] = vocabulary[random.IntN(len(vocabulary))]
	}
	return strings.Join(out, " ")
}

// Message is a message of a chat.
func Message(role, content string) map[string]string {
	return map[string]string{"role": role, "content": content}
}

// Say is a chat of the given messages, a user's first, then an assistant's, and so on.
func Say(parts ...string) []map[string]string {
	messages := []map[string]string{}
	for i, text := range parts {
		role := "user"
		if i%2 == 1 {
			role = "assistant"
		}
		messages = append(messages, Message(role, text))
	}
	return messages
}

// processParent returns the parent of a process.
func processParent(pid int) (parent int, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// "pid (name) state parent ...", and the name may hold anything
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	return strconv.Atoi(fields[1])
}

// Descendants returns the ids of all processes below pid.
func Descendants(pid int) []int {
	children := map[int][]int{}
	entries, _ := filepath.Glob("/proc/[0-9]*")
	for _, entry := range entries {
		child, _ := strconv.Atoi(filepath.Base(entry))
		if parent, err := processParent(child); err == nil {
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
