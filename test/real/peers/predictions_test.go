package peers

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// captured are captures of real vLLM engines, in internal/cache/events/testdata/zoo, and the
// block sizes of their events.
var captured = []struct {
	name  string
	block int
}{
	{"vllm-0.32.0-llama", 32}, // full attention alone: shows that all routers follow the events
	{"vllm-0.32.0-gemma3", 32},
	{"vllm-0.32.0-gptoss", 32},
	{"vllm-0.32.0-engine-dense", 32}, // all blocks of its windows are kept
	{"vllm-0.32.0-lfm2", 32},
	{"vllm-0.33.0-qwen3next", 640},
	{"vllm-0.32.0-mistralsw", 32},
}

// follower is a router that follows an engine's KV events.
type follower struct {
	name string
	// caughtUp reports whether it has applied so many batches.
	caughtUp func(batches int) bool
	// found asks it for the tokens of a prompt that it takes the engine to hold.
	found func(prompt []uint32) int

	exact, most int // predictions: exact ones; tokens promised too much, at most
	sum         int // tokens that it took the engine to hold, of all requests
}

// capturedRequest is a request of a capture and what the engine found.
type capturedRequest struct {
	before  [][]byte // batches that are not the request's
	prompt  []uint32
	cached  int
	batches [][]byte // of the request, and until the next
}

// capturedLine is a line of a capture: a batch of events or a request.
type capturedLine struct {
	Kind    string
	Payload []byte
	IDs     []uint32 `json:"prompt_token_ids"`
	Usage   struct {
		Details struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	tierRequest
}

// readLines reads a capture of internal/cache/events/testdata.
func readLines(t *testing.T, name string) (all []capturedLine) {
	t.Helper()
	file, err := os.Open(filepath.Join("internal/cache/events/testdata", name+".jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	zip, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(zip)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var line capturedLine
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		all = append(all, line)
	}
	if lines.Err() != nil || len(all) == 0 {
		t.Fatalf("%d lines: %v", len(all), lines.Err())
	}
	return all
}

// readCapture reads a capture whose requests stand behind their batches.
func readCapture(t *testing.T, name string) (requests []capturedRequest) {
	t.Helper()
	var batches [][]byte
	for _, line := range readLines(t, "zoo/"+name) {
		if line.Kind == "event" {
			batches = append(batches, line.Payload)
			continue
		}
		requests = append(requests, capturedRequest{nil, line.IDs, line.Usage.Details.Cached, batches})
		batches = nil
	}
	return requests
}

// peers returns the programs to compare with: KVROUTER_PEERS_DYNAMO, a Python with
// ai-dynamo-runtime, and KVROUTER_PEERS_VLLM_ROUTER, the program vllm-router.
func peers(t *testing.T) (python, program string) {
	t.Helper()
	python, program = os.Getenv("KVROUTER_PEERS_DYNAMO"), os.Getenv("KVROUTER_PEERS_VLLM_ROUTER")
	if python == "" || program == "" {
		t.Skip("run scripts/peers.sh predictions")
	}
	return python, program
}

// TestPeersPredictions is scripts/peers.sh predictions: it publishes captured KV events
// to kvrouter, Dynamo's selection service and vllm-router at once, asks each before
// every captured request how much of its prompt is cached, and compares that with what
// the engine found.
func TestPeersPredictions(t *testing.T) {
	python, program := peers(t)
	var table strings.Builder
	out := tabwriter.NewWriter(&table, 0, 0, 1, ' ', tabwriter.Debug)
	for i, c := range captured {
		t.Run(c.name, func(t *testing.T) {
			requests := readCapture(t, c.name)
			followers := compare(t, requests, c.block, python, program)
			if i == 0 {
				fmt.Fprint(out, "capture\trequests\t")
				for _, f := range followers {
					fmt.Fprintf(out, "%s\t", f.name)
				}
				fmt.Fprintln(out)
			}
			fmt.Fprintf(out, "%s\t%d\t", c.name, len(requests))
			for _, f := range followers {
				fmt.Fprintf(out, "%d, +%d\t", f.exact, f.most)
			}
			fmt.Fprintln(out)
			if ours := followers[0]; ours.exact < len(requests)-1 {
				t.Errorf("%d of %d predictions of kvrouter were exact", ours.exact, len(requests))
			}
		})
	}
	out.Flush()
	t.Logf("exact predictions, and the most tokens promised too much:\n%s", table.String())
}

// compare publishes the events of a capture to all routers, and asks them.
func compare(t *testing.T, requests []capturedRequest, block int, python, program string) []*follower {
	// vllm-router reads batches without a topic only, kvrouter those of an engine's topic.
	topical, bare := testkit.NewTestPublisher(t), testkit.NewTestPublisher(t)
	engine := httptest.NewServer(http.HandlerFunc(answer))
	t.Cleanup(engine.Close)
	followers := []*follower{
		followKvrouter(t, topical.Endpoint(), engine.URL, block),
		followDynamo(t, python, topical.Endpoint(), engine.URL, block),
		followVLLMRouter(t, program, bare.Endpoint(), engine.URL, block),
	}
	testkit.Eventually(t, 30*time.Second, "all routers follow the events", func() bool { return topical.Subscribers() >= 2 && bare.Subscribers() >= 1 })
	published := 0
	publish := func(batches [][]byte) {
		for _, payload := range batches {
			seq := binary.BigEndian.AppendUint64(nil, uint64(published))
			topical.Publish([]byte("kv-events"), seq, payload)
			bare.Publish(nil, seq, payload)
			published++
		}
	}
	for _, r := range requests {
		publish(r.before)
		most := (len(r.prompt) - 1) / block * block // an engine computes the last token
		for _, f := range followers {
			testkit.Eventually(t, 30*time.Second, fmt.Sprintf("%s has applied %d batches", f.name, published), func() bool { return f.caughtUp(published) })
			found := min(f.found(r.prompt), most)
			if found == r.cached {
				f.exact++
			}
			f.most = max(f.most, found-r.cached)
			f.sum += found
		}
		publish(r.batches)
	}
	return followers
}

// answer is an engine that answers at once.
func answer(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	w.Header().Set("Content-Type", "application/json")
	switch r.URL.Path {
	case "/v1/models":
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model","owned_by":"peers","max_model_len":8192}]}`)
	case "/v1/completions":
		fmt.Fprint(w, `{"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"m","choices":[{"index":0,"text":" a","finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`)
	}
}

// post sends a request and returns the answer, which must be a success.
func post(t *testing.T, url string, query any) gjson.Result {
	t.Helper()
	body, err := json.Marshal(query)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.Post(url, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode >= 300 {
		t.Fatalf("POST %s: %s: %v: %.500s", url, response.Status, err, text)
	}
	return gjson.ParseBytes(text)
}

// register adds the worker to a selection service.
func register(t *testing.T, service, events, engine string, block int) {
	t.Helper()
	post(t, service+"/workers", map[string]any{
		"worker_id": 0, "model_name": "m", "endpoint": engine, "block_size": block, "max_num_batched_tokens": 8192, "total_kv_blocks": 1000, "kv_events_endpoint": events,
	})
}

// overlap asks a selection service how much of a prompt the worker holds in all tiers, in
// tokens.
func overlap(t *testing.T, service string, block int, prompt []uint32) int {
	t.Helper()
	rows := post(t, service+"/overlap_scores", map[string]any{"model_name": "m", "token_ids": prompt}).Get("workers").Array()
	if len(rows) != 1 {
		return 0
	}
	return int(rows[0].Get("disk_blocks").Int()) * block // with those of the tiers above
}

// followKvrouter starts kvrouter, whose decisions say what a worker has in each tier.
func followKvrouter(t *testing.T, events, engine string, block int) *follower {
	s := test.Start(t, "--engine=none", fmt.Sprintf("--block-size=%d", block))
	register(t, s.Port, events, engine, block)
	s.Get(s.Port + "/decisions")
	return &follower{
		name: "kvrouter",
		caughtUp: func(batches int) bool {
			return int(s.Metrics()[`kvrouter_kv_events_total{dp_rank="0",kind="batches",worker_id="0"}`]) >= batches
		},
		found: func(prompt []uint32) int {
			post(t, s.Port+"/select", map[string]any{"model_name": "m", "token_ids": prompt})
			c := gjson.GetBytes(s.Get(s.Port+"/decisions?last=1"), "decisions.0.candidates.0")
			blocks := 0
			for _, tier := range []string{"overlap", "host", "disk", "external"} {
				blocks += int(c.Get(tier + "_blocks").Int())
			}
			return blocks * block
		},
	}
}

// followDynamo starts Dynamo's selection service. It does not say how many batches it
// has applied: it has caught up when two answers a while apart are alike.
func followDynamo(t *testing.T, python, events, engine string, block int) *follower {
	const apart = 150 * time.Millisecond
	url := fmt.Sprintf("http://127.0.0.1:%d", testkit.FreePorts(t, 1))
	startPeer(t, url+"/health", python, "-m", "dynamo.select_service", "--port", url[strings.LastIndex(url, ":")+1:])
	register(t, url, events, engine, block)
	return &follower{
		name:     "Dynamo 1.6.1",
		caughtUp: func(int) bool { return true },
		found: func(prompt []uint32) int {
			before, since := -1, time.Now()
			testkit.Eventually(t, 30*time.Second, "two answers are alike", func() bool {
				now := overlap(t, url, block, prompt)
				if now != before {
					before, since = now, time.Now()
				}
				return time.Since(since) >= apart
			})
			return before
		},
	}
}

var (
	colors   = regexp.MustCompile("\x1b\\[[0-9;]*m")
	advanced = regexp.MustCompile(`kv_index (live sequence advanced|decode batch: )`) // applied, or left out whole
	decided  = regexp.MustCompile(`KV prefix decision .*credited_prefix_tokens=(\d+)`)
)

// followVLLMRouter starts vllm-router, which sends requests to engine. Its debug log has
// the batches that it has applied and what it credits a request with.
func followVLLMRouter(t *testing.T, program, events, engine string, block int) *follower {
	ports := testkit.FreePorts(t, 2)
	url := fmt.Sprintf("http://127.0.0.1:%d", ports)
	log := startPeer(t, url+"/health", program, "--port", fmt.Sprint(ports), "--prometheus-port", fmt.Sprint(ports+1), "--worker-urls", engine,
		"--worker-startup-check-interval", "1", "--policy", "kv_aware", "--kv-event-source", engine+"="+events,
		"--kv-event-block-size", fmt.Sprint(block), "--kv-event-model", "m", "--log-level", "debug",
		"--kv-penalty-host", "1", "--kv-penalty-disk", "1", "--kv-penalty-external", "1") // of a token cached there
	read := func(line *regexp.Regexp) []string {
		var numbers []string
		for _, match := range line.FindAllStringSubmatch(colors.ReplaceAllString(log.String(), ""), -1) {
			numbers = append(numbers, match[1])
		}
		return numbers
	}
	return &follower{
		name: "vllm-router 0.1.17",
		caughtUp: func(batches int) bool {
			return len(read(advanced)) >= batches
		},
		found: func(prompt []uint32) int {
			before := len(read(decided))
			post(t, url+"/v1/completions", map[string]any{"model": "m", "prompt": prompt, "max_tokens": 1})
			testkit.Eventually(t, 10*time.Second, "vllm-router logs its decision", func() bool { return len(read(decided)) > before })
			tokens, err := strconv.Atoi(read(decided)[before])
			if err != nil {
				t.Fatal(err)
			}
			return tokens
		},
	}
}

// startPeer starts a program and waits until health answers. It ends with the test.
func startPeer(t *testing.T, health, program string, args ...string) *testkit.LogBuffer {
	t.Helper()
	command := exec.Command(program, args...)
	log := &testkit.LogBuffer{}
	command.Stdout, command.Stderr, command.WaitDelay = log, log, 5*time.Second
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { // until the program ends
		_ = command.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		_ = command.Process.Signal(syscall.SIGTERM)
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			_ = command.Process.Kill()
			<-ended
		}
		if t.Failed() {
			t.Logf("end of its log:\n%s", log.Tail())
		}
	})
	testkit.Eventually(t, 60*time.Second, health+" answers", func() bool {
		response, err := http.Get(health)
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return log
}
