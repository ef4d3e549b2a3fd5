package gateway

import (
	"bufio"
	"bytes"
	"context"
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
	"sync"
	"syscall"
	"testing"
	"time"

	"kvrouter/internal/base/web"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/envoy"
	"kvrouter/internal/testkit/tokenstest"
	"kvrouter/test"
	"kvrouter/test/real/peers"
)

// Environment of the measurements: `make bench-gateway` sets the first, the file of the
// tables; TestBenchGateway starts the parts that are its own, by the second.
const (
	gatewayBench = "KVROUTER_GATEWAY_BENCH"
	gatewayPart  = "KVROUTER_GATEWAY_PART" // engine ADDRESS, or echo ADDRESS ENGINE
)

// Sizes of the measurements.
const (
	benchRounds    = 6
	benchBlocks    = 1 << 20 // that the engine caches at most
	benchModelLen  = 1 << 18 // tokens
	benchPrefixes  = 8       // of the long prompts
	benchLongWarm  = 16      // long prompts before those that are measured
	benchLong      = 100     // long prompts that are measured
	benchLongAtOne = 4       // at the same time
)

// TestGatewayPart is a process of TestBenchGateway. It ends with its stdin.
func TestGatewayPart(t *testing.T) {
	part := strings.Fields(os.Getenv(gatewayPart))
	if len(part) < 2 {
		t.Skip("TestBenchGateway starts it")
	}
	listener, err := net.Listen("tcp", part[1])
	if err != nil {
		t.Fatal(err)
	}
	if part[0] == "echo" {
		defer (&envoy.Echo{Addresses: part[2]}).Serve(listener)()
	} else {
		model := test.OpenModel(t)
		model.SetMaxModelLen(benchModelLen)
		engine := peers.NewBackend(t, "0", model, benchBlocks)
		server := &http.Server{Handler: benchEngine(engine)}
		var running sync.WaitGroup
		running.Go(engine.Publish)
		running.Go(func() { _ = server.Serve(listener) })
		defer func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			if err := server.Shutdown(ctx); err != nil {
				t.Error(err)
				return
			}
			engine.Close() // no request is left that has any
			running.Wait()
		}()
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// benchEngine answers a chat at once: as a whole, or in 32 events where it is to be
// streamed.
func benchEngine(b *peers.Backend) http.Handler {
	rest := b.Handler()
	whole := []byte(`{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Yes."},"finish_reason":"stop"}]}`)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case testkit.ChatPath:
			body := make([]byte, max(0, r.ContentLength))
			var err error
			if r.ContentLength >= 0 {
				_, err = io.ReadFull(r.Body, body)
			} else {
				body, err = io.ReadAll(r.Body)
			}
			if err != nil {
				return
			}
			if bytes.HasSuffix(body, []byte(`"stream":true}`)) {
				r.Body = io.NopCloser(bytes.NewReader(body))
				rest.ServeHTTP(w, r)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(whole)
			b.Note(body)
		case "/v1/models":
			fmt.Fprintf(w, `{"object":"list","data":[{"id":"m","object":"model","max_model_len":%d}]}`, benchModelLen)
		default:
			rest.ServeHTTP(w, r)
		}
	})
}

// startPart starts a part of the measurements as a process of its own, and waits until
// its port is open.
func startPart(t *testing.T, part, address string, more ...string) (pid int) {
	t.Helper()
	own, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(own, "-test.run", "^TestGatewayPart$", "-test.timeout", "0")
	command.Env = append(os.Environ(), gatewayPart+"="+strings.Join(append([]string{part, address}, more...), " "))
	command.Stderr = os.Stderr
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stdin, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		_ = command.Wait()
	})
	testkit.Eventually(t, 30*time.Second, part+" is there", func() bool {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return command.Process.Pid
}

// cpuOf returns the CPU time that a process has used.
func cpuOf(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	ticks := 0
	for _, field := range fields[11:13] { // in user mode, and in the kernel
		n, err := strconv.Atoi(field)
		if err != nil {
			t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond // Linux has 100 ticks a second in /proc
}

// benchWay is a way to the engine, with the processes on it.
type benchWay struct {
	name string
	url  string
	pids map[string]int // of partEnvoy, partPicker and partEngine, as far as they are on it
}

// The processes on a way.
const (
	partEnvoy  = "Envoy"
	partPicker = "the picker or router"
	partEngine = "the engine"
)

// benchLoad is what is sent on each way.
type benchLoad struct {
	name     string
	body     []byte
	clients  int
	requests int // in a round
}

// percentile returns the value below which the share q of all lie.
func percentile(all []time.Duration, q float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[int(q*float64(len(all)-1))]
}

// benchResult is what a load on a way came to.
type benchResult struct {
	took     []time.Duration          // of each request
	cpu      map[string]time.Duration // of each process
	overlap  int64                    // tokens, as the router has said
	requests int
}

// bench is what the measurements need.
type bench struct {
	t      *testing.T
	client *http.Client
	engine string // its URL
}

// run sends bodies, each once, and adds what came of it to r.
func (b *bench) run(r *benchResult, way benchWay, bodies [][]byte, clients int) {
	b.t.Helper()
	before := map[string]time.Duration{}
	for name, pid := range way.pids {
		before[name] = cpuOf(b.t, pid)
	}
	var mu sync.Mutex // guards next and r
	next := 0
	var sending sync.WaitGroup
	for range clients {
		sending.Go(func() {
			for {
				mu.Lock()
				i := next
				next++
				mu.Unlock()
				if i >= len(bodies) {
					return
				}
				began := time.Now()
				response, err := b.client.Post(way.url+testkit.ChatPath, "application/json", bytes.NewReader(bodies[i]))
				if err != nil {
					b.t.Errorf("%s: %v", way.name, err)
					return
				}
				answer, err := io.ReadAll(response.Body)
				response.Body.Close()
				took := time.Since(began)
				if err != nil || response.StatusCode != http.StatusOK || len(answer) < 100 {
					b.t.Errorf("%s: %s, %v: %.200s", way.name, response.Status, err, answer)
					return
				}
				overlap, _ := strconv.ParseInt(response.Header.Get(web.HeaderOverlap), 10, 64)
				mu.Lock()
				r.took = append(r.took, took)
				r.overlap += overlap
				mu.Unlock()
			}
		})
	}
	sending.Wait()
	r.requests += len(bodies)
	if r.cpu == nil {
		r.cpu = map[string]time.Duration{}
	}
	for name, pid := range way.pids {
		r.cpu[name] += cpuOf(b.t, pid) - before[name]
	}
}

// milliseconds of a time for each of n.
func milliseconds(d time.Duration, n int) string {
	return strconv.FormatFloat(float64(d)/float64(max(1, n))/float64(time.Millisecond), 'f', 3, 64)
}

// TestBenchGateway measures what the picker costs, beside the least of pickers and the
// router's own port, all in one run and in turns. Each part is a process of its own.
func TestBenchGateway(t *testing.T) {
	file := os.Getenv(gatewayBench)
	if file == "" {
		t.Skip("make bench-gateway runs it")
	}
	model := test.OpenModel(t)
	model.SetMaxModelLen(benchModelLen)
	words := peers.EnglishWords(model)
	p := newPicker(t)
	ports := testkit.FreePorts(t, 4)
	at := func(i int) string { return fmt.Sprintf("127.0.0.1:%d", ports+i) }
	engine, echo := at(0), at(1)
	b := &bench{t: t, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}, engine: "http://" + engine}
	t.Cleanup(b.client.CloseIdleConnections)
	enginePID, echoPID := startPart(t, "engine", engine), startPart(t, "echo", echo, engine)
	s := test.StartAt(t, test.PlainProgram, ports+2, nil, p.flags("--engine=none", "--model="+test.ModelFolder(), "--served-model-name=m", "--worker=url="+b.engine)...)
	s.WaitReady(1, 30*time.Second)
	way := func(name, url string, pids map[string]int) benchWay {
		pids[partEngine] = enginePID
		return benchWay{name, url, pids}
	}
	gateway := func(name, picker string, pids map[string]int) benchWay {
		e := envoy.Start(t, envoy.Options{Picker: picker, Workers: []string{engine}})
		if picker != "" {
			e.WaitForPicker(true)
		}
		pids[partEnvoy] = e.PID
		return way(name, e.URL, pids)
	}
	ways := []benchWay{
		way("engine alone", b.engine, map[string]int{}),
		gateway("Envoy alone", "", map[string]int{}),
		gateway("Envoy + trivial picker", echo, map[string]int{partPicker: echoPID}),
		gateway("Envoy + kvrouter", p.address(), map[string]int{partPicker: s.Command.Process.Pid}),
		way("kvrouter alone", s.OpenAI, map[string]int{partPicker: s.Command.Process.Pid}),
	}
	out := &strings.Builder{}
	b.side(out, ways, words)
	b.long(out, ways[3], model, words)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(out.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	w := bufio.NewWriter(os.Stdout)
	fmt.Fprint(w, "\n", out.String())
	_ = w.Flush()
}

// benchBody is a chat of about n bytes, whose answer is streamed or not.
func benchBody(words []string, n int, stream bool, contents ...string) []byte {
	if n > 0 {
		contents = []string{peers.Prose(rand.New(rand.NewPCG(5, uint64(n))), words, n/5)[:n]}
	}
	body := peers.ChatBody(contents...)
	if !stream {
		body = bytes.Replace(body, []byte(`"stream":true}`), []byte(`"stream":false}`), 1)
	}
	return body
}

// side measures the ways side by side.
func (b *bench) side(out io.Writer, ways []benchWay, words []string) {
	small, large := benchBody(words, 6<<10, false), benchBody(words, 220<<10, false)
	loads := []benchLoad{
		{"6 KB, 1 at a time", small, 1, 400},
		{"6 KB, 20 at a time", small, 20, 1600},
		{"220 KB, 1 at a time", large, 1, 100},
		{"220 KB, 20 at a time", large, 20, 300},
		{"6 KB, 20 at a time, 32 events", benchBody(words, 6<<10, true), 20, 400},
	}
	results := make([][]benchResult, len(loads))
	for i := range loads {
		results[i] = make([]benchResult, len(ways))
	}
	for _, load := range loads { // all is hot from here on
		for _, way := range ways {
			b.run(&benchResult{}, way, slices.Repeat([][]byte{load.body}, max(20, 2*load.clients)), load.clients)
		}
	}
	for round := range benchRounds {
		for i, load := range loads {
			for j := range ways {
				if round%2 == 1 {
					j = len(ways) - 1 - j
				}
				b.run(&results[i][j], ways[j], slices.Repeat([][]byte{load.body}, load.requests), load.clients)
			}
		}
	}
	for i, load := range loads {
		fmt.Fprintf(out, "%s (%d requests each)\n\n| | p50, ms | p99, ms | over the trivial picker, p50 | CPU of Envoy, ms | of the picker or router, ms | of the engine, ms |\n|---|---|---|---|---|---|---|\n", load.name, benchRounds*load.requests)
		trivial := percentile(results[i][2].took, 0.5)
		for j, way := range ways {
			r := &results[i][j]
			cpu := func(part string) string {
				if way.pids[part] == 0 {
					return ""
				}
				return milliseconds(r.cpu[part], r.requests)
			}
			over := ""
			if way.name == "Envoy + kvrouter" {
				over = milliseconds(percentile(r.took, 0.5)-trivial, 1)
				if r.overlap == 0 {
					b.t.Errorf("%s: nothing was hot", load.name)
				}
			}
			fmt.Fprintf(out, "| %s | %s | %s | %s | %s | %s | %s |\n", way.name, milliseconds(percentile(r.took, 0.5), 1), milliseconds(percentile(r.took, 0.99), 1), over, cpu(partEnvoy), cpu(partPicker), cpu(partEngine))
		}
		fmt.Fprintln(out)
	}
}

// long measures prompts of 100,000 tokens, hot by 80 %, in both senses: each prompt by
// its first 80,000 tokens, or four prompts of five as a whole.
func (b *bench) long(out io.Writer, way benchWay, model *tokens.Model, words []string) {
	// The sample reports how many words that is.
	random := rand.New(rand.NewPCG(9, 9))
	const sample = 20_000
	ids, err := tokenstest.Chat(model, peers.ChatBody(peers.Prose(random, words, sample)))
	if err != nil {
		b.t.Fatal(err)
	}
	prose := func(tokens int) string { return peers.Prose(random, words, tokens*sample/len(ids)) }
	var prefixes []string
	for range benchPrefixes {
		prefixes = append(prefixes, prose(80_000))
	}
	extended := func(i int) []byte {
		return benchBody(words, 0, false, prefixes[i%benchPrefixes], "I see.", prose(20_000))
	}
	var whole [][]byte
	for i := range benchPrefixes {
		whole = append(whole, extended(i))
	}
	fmt.Fprintf(out, "100,000 tokens, %d at a time (%d requests each)\n\n| hot | bytes of a body | tokens | predicted as cached | p50, ms | CPU of the picker, ms | requests/s a core |\n|---|---|---|---|---|---|---|\n", benchLongAtOne, benchLong)
	for _, load := range []struct {
		name string
		body func(i int) []byte
	}{
		{"the first 80 % of each prompt", extended},
		{"four prompts of five", func(i int) []byte {
			if i%5 == 4 {
				return benchBody(words, 0, false, prose(100_000))
			}
			return whole[i%benchPrefixes]
		}},
	} {
		var warm, bodies [][]byte
		for i := range benchLongWarm {
			warm = append(warm, load.body(i))
		}
		for i := range benchLong {
			bodies = append(bodies, load.body(i))
		}
		b.run(&benchResult{}, way, append(slices.Clone(whole), warm...), benchLongAtOne)
		b.caughtUp()
		var r benchResult
		b.run(&r, way, bodies, benchLongAtOne)
		length, counted := 0, 0
		for _, body := range bodies[:5] {
			ids, err := tokenstest.Chat(model, body)
			if err != nil {
				b.t.Fatal(err)
			}
			length += len(body)
			counted += len(ids)
		}
		cpu := r.cpu[partPicker]
		fmt.Fprintf(out, "| %s | %d | %d | %.0f %% | %s | %s | %.0f |\n", load.name, length/5, counted/5, 100*float64(r.overlap)/float64(r.requests)/(float64(counted)/5),
			milliseconds(percentile(r.took, 0.5), 1), milliseconds(cpu, r.requests), float64(r.requests)/cpu.Seconds())
	}
	fmt.Fprintln(out)
}

// caughtUp waits until the engine has reported all prompts.
func (b *bench) caughtUp() {
	b.t.Helper()
	testkit.Eventually(b.t, time.Minute, "the engine has told of all prompts", func() bool {
		status, _ := testkit.HTTPGet(b.t, b.engine+"/peers_blocks")
		return status == http.StatusOK
	})
}
