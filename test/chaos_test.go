package test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"kvrouter/internal/testkit"
)

// The chaos tests run router processes of the built program for KVROUTER_CHAOS
// (such as 10m; `make chaos` sets it) and not at all without it.

func chaosTime(t *testing.T) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(os.Getenv("KVROUTER_CHAOS"))
	if err != nil {
		t.Skip("set KVROUTER_CHAOS=2m, or run `make chaos`")
	}
	return d
}

const (
	chaosWorkers = 8
	// chaosSilent is the worker that falls silent now and then.
	chaosSilent = chaosWorkers - 1
	// chaosPhase is how long a worker stays stuck or failing: longer than
	// chaosLimit, so that who is not let go shows.
	chaosPhase = 40 * time.Second
	// chaosLimit is how long a request may take before it counts as hung: 10 s
	// until a worker is known as bad, 5 s to be answered elsewhere, and twice that.
	chaosLimit = 30 * time.Second
	// readyPoll is how often clients look whether a router is ready.
	readyPoll = 200 * time.Millisecond
	// readyLimit is how long a router may take until it is ready.
	readyLimit = 30 * time.Second
	// slowMocks has simulated workers take 15 ms for a token, so that the machine's
	// two cores suffice for all.
	slowMocks = "--speedup-ratio=4 --mock-decode-ms=60,54,-25"
)

// startPlain starts the program without the race detector, at two ports from port
// on.
func startPlain(t *testing.T, port int, args ...string) *Router {
	t.Helper()
	return StartAt(t, PlainProgram, port, nil, append([]string{"--log-level=info", "--drain-delay=5s"}, args...)...)
}

// rollout is several router processes, of which clients use those that are ready.
type rollout struct {
	t      *testing.T
	args   []string
	client *http.Client // asks whether they are ready

	mu       sync.Mutex // guards what follows
	sites    []*Router
	ready    []bool
	restarts []int
	next     int
}

// startRollout starts n routers and waits until each is ready. They end with the
// test.
func startRollout(t *testing.T, n int, args ...string) *rollout {
	t.Helper()
	r := &rollout{t: t, args: append([]string{"--engine=none"}, args...), ready: make([]bool, n), restarts: make([]int, n)}
	// A probe opens a connection of its own, as Kubernetes does.
	r.client = &http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	ports := testkit.FreePorts(t, 2*n)
	for i := range n {
		r.sites = append(r.sites, startPlain(t, ports+2*i, r.args...))
	}
	ctx, cancel := context.WithCancel(context.Background())
	var polling sync.WaitGroup
	polling.Go(func() { r.poll(ctx) })
	t.Cleanup(func() {
		cancel()
		polling.Wait()
	})
	for i := range n {
		r.waitReady(i)
	}
	return r
}

// poll keeps in mind which routers are ready, until ctx ends.
func (r *rollout) poll(ctx context.Context) {
	ticker := time.NewTicker(readyPoll)
	defer ticker.Stop()
	for {
		for i := range r.ready {
			response, err := r.client.Get(r.router(i).OpenAI + "/ready")
			if err == nil {
				response.Body.Close()
			}
			r.mu.Lock()
			r.ready[i] = err == nil && response.StatusCode == http.StatusOK
			r.mu.Unlock()
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (r *rollout) router(i int) *Router {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sites[i]
}

func (r *rollout) waitReady(i int) {
	r.t.Helper()
	testkit.Eventually(r.t, readyLimit, fmt.Sprintf("router %d is ready", i), func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.ready[i]
	})
}

// where returns the URL of the next ready router in turn; without one it waits.
func (r *rollout) where() string {
	for deadline := time.Now().Add(readyLimit); ; {
		r.mu.Lock()
		r.next++
		for i := range r.sites {
			if at := (r.next + i) % len(r.sites); r.ready[at] || time.Now().After(deadline) {
				defer r.mu.Unlock()
				return r.sites[at].OpenAI
			}
		}
		r.mu.Unlock()
		<-time.After(readyPoll)
	}
}

// restart ends router i by SIGTERM and starts it again at the same ports.
func (r *rollout) restart(i int) {
	r.t.Helper()
	r.replace(i, restart(r.t, r.router(i), r.args...))
}

// kill ends router i by SIGKILL and starts it again at the same ports, with further
// flags.
func (r *rollout) kill(i int, args ...string) {
	r.t.Helper()
	old := r.router(i)
	old.Kill()
	r.replace(i, startPlain(r.t, portOf(old), append(slices.Clone(r.args), args...)...))
}

// replace has router i be another process, and waits until that is ready.
func (r *rollout) replace(i int, with *Router) {
	r.t.Helper()
	r.mu.Lock()
	r.sites[i], r.ready[i] = with, false
	r.restarts[i]++
	r.mu.Unlock()
	r.waitReady(i)
}

// restart ends a router by SIGTERM, which must go well, and starts it again at
// the same ports.
func restart(t *testing.T, s *Router, args ...string) *Router {
	t.Helper()
	s.Stop()
	if state := s.Command.ProcessState; !state.Success() {
		t.Errorf("after SIGTERM: %s", state)
	}
	return startPlain(t, portOf(s), args...)
}

// portOf is the number of the OpenAI port.
func portOf(s *Router) int {
	port, _ := strconv.Atoi(s.OpenAI[strings.LastIndexByte(s.OpenAI, ':')+1:])
	return port
}

// size is what a process uses.
type size struct {
	memory      float64 // MB, resident
	goroutines  float64
	descriptors float64
}

// sizeOf asks the kernel and the program itself; not ok: it is just not there.
func sizeOf(s *Router) (now size, ok bool) {
	dir := fmt.Sprintf("/proc/%d", s.Command.Process.Pid)
	open, err := os.ReadDir(dir + "/fd")
	response, failed := http.Get(s.OpenAI + "/metrics")
	if failed != nil {
		return now, false
	}
	defer response.Body.Close()
	page, failed := io.ReadAll(response.Body)
	resident, known := memoryOf(s, "VmRSS")
	if err != nil || failed != nil || !known {
		return now, false
	}
	return size{resident, testkit.ReadMetricsPage(string(page))["go_goroutines"], float64(len(open))}, true
}

// memoryOf reads a size of the process in MB: VmRSS, or VmHWM, its peak.
func memoryOf(s *Router, name string) (megabytes float64, ok bool) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.Command.Process.Pid))
	_, rest, found := strings.Cut(string(status), name+":")
	if err != nil || !found {
		return 0, false
	}
	kilobytes, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
	return kilobytes / 1024, err == nil
}

// middle returns the median of what of gives of each.
func middle[T any](all []T, of func(T) float64) float64 {
	if len(all) == 0 {
		return math.NaN()
	}
	values := make([]float64, 0, len(all))
	for _, one := range all {
		values = append(values, of(one))
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// quantile is percentile in whole milliseconds.
func quantile(all []time.Duration, q float64) time.Duration {
	return percentile(all, q).Round(time.Millisecond)
}

// percentile returns the value below which the share q of all lie.
func percentile(all []time.Duration, q float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[int(q*float64(len(all)-1))]
}

// chaos is two routers over eight simulated workers, and all that goes wrong.
type chaos struct {
	t       *testing.T
	farm    *Mocks // starts the workers, and follows their events as the routers do
	routers *rollout
	links   []*testkit.Link // to the worker that falls silent
	soak    *soak

	mu    sync.Mutex // guards what follows
	sizes [3][]size  // of the first router, in each third of the run
}

// TestChaos keeps two routers busy while workers crash, fail fast, stand still and
// fall silent, events get lost, clients leave, and the routers are restarted in
// turn. Each request must come to an answer or one clear error.
func TestChaos(t *testing.T) {
	d := chaosTime(t)
	c := newChaos(t)
	ctx, cancel := context.WithCancel(t.Context())
	var beside sync.WaitGroup
	began := time.Now()
	beside.Go(func() { c.faults(ctx, began) })
	beside.Go(func() { c.measure(ctx, began, d) })
	turn, looks, wrong := 0, 0, 0
	c.soak.run(d, min(20*time.Second, d/6), func(elapsed time.Duration) {
		// From the second third on the first router stays, to see whether it grows.
		which := turn % 2
		if elapsed > d/3 {
			which = 1
		}
		turn++
		c.routers.restart(which)
		found := c.soak.look(t)
		looks, wrong = looks+found.workers, wrong+found.wrong
		t.Logf("%3.0f s: %s", elapsed.Seconds(), found)
	})
	cancel()
	beside.Wait()
	wrong += c.settle()
	c.report(d, looks, wrong)
}

func newChaos(t *testing.T) *chaos {
	c := &chaos{t: t}
	c.farm = StartMocks(t, chaosWorkers, append(strings.Fields(slowMocks), "--mock-num-gpu-blocks=4096", "--mock-drop-events=0.01", "--mock-crash-every=10s")...)
	var workers []string
	workers = append(workers, c.farm.Attach()[:chaosSilent]...)
	ports := c.farm.Settings.Ports
	for _, base := range []int{ports.HTTP, ports.KVEvents, ports.KVReplay, ports.Load} {
		c.links = append(c.links, testkit.NewLink(t, fmt.Sprintf("127.0.0.1:%d", base+chaosSilent)))
	}
	workers = append(workers, fmt.Sprintf("--worker=url=http://%s,id=%d,kv-events=tcp://%s,replay=tcp://%s,load=tcp://%s",
		c.links[0].Address(), chaosSilent, c.links[1].Address(), c.links[2].Address(), c.links[3].Address()))
	c.routers = startRollout(t, 2, workers...)
	c.soak = newSoak(c.farm.Workers, c.farm.Router, chaosLimit)
	c.soak.where, c.soak.leaving = c.routers.where, 0.05
	return c
}

// faults has one worker fail fast, one stand still and one be silent, in turn,
// until ctx ends; then all are well.
func (c *chaos) faults(ctx context.Context, began time.Time) {
	kinds := []int32{http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout, 529}
	ticker := time.NewTicker(100 * time.Millisecond) // a worker that was started again is well
	defer ticker.Stop()
	for running := true; running; {
		select {
		case <-ctx.Done():
			running = false
		case <-ticker.C:
		}
		elapsed := time.Since(began)
		phase := int(elapsed / chaosPhase)
		for i := range chaosSilent {
			w := c.farm.Worker(i)
			failing := int32(0)
			if running && i == phase%chaosSilent {
				failing = kinds[int(elapsed.Seconds())%len(kinds)]
			}
			w.Failing.Store(failing)
			w.Stuck.Store(running && i == (phase+3)%chaosSilent)
		}
		for _, link := range c.links {
			if running && elapsed%chaosPhase > chaosPhase/2 {
				link.Silence()
			} else {
				link.Mend()
			}
		}
	}
}

// measure notes the size of the first router in each third of the run.
func (c *chaos) measure(ctx context.Context, began time.Time, d time.Duration) {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		third := int(3 * time.Since(began) / d)
		if now, ok := sizeOf(c.routers.router(0)); ok && third < 3 {
			c.mu.Lock()
			c.sizes[third] = append(c.sizes[third], now)
			c.mu.Unlock()
		}
	}
}

// settle waits until nothing is booked any more, and holds what both routers know
// against the workers' caches; wrong are the matches that go too far.
func (c *chaos) settle() (wrong int) {
	for i := range c.routers.sites {
		router := c.routers.router(i)
		testkit.Eventually(c.t, 2*chaosLimit, fmt.Sprintf("router %d has nothing booked and all workers", i), func() bool {
			booked, up := 0, 0
			for _, w := range router.Workers() {
				booked += w.InFlight
				if w.Lifecycle == "schedulable" {
					up++
				}
			}
			return booked == 0 && up == chaosWorkers
		})
		var found standing
		// A removal that was lost last shows when a quiet stream is asked again.
		for limit := time.Now().Add(chaosLimit); time.Now().Before(limit); <-time.After(time.Second) {
			if found = c.soak.compare(c.t, c.soak.some(), matches(router)); found.wrong == 0 && found.workers == chaosWorkers {
				break
			}
		}
		c.t.Logf("router %d in the end: %s", i, found)
		if found.blocks == 0 {
			c.t.Error("nothing was compared")
		}
		wrong += found.wrong
	}
	return wrong
}

// report prints the table, and fails on what must not be.
func (c *chaos) report(d time.Duration, looks, wrong int) {
	t, s := c.t, c.soak
	refused := s.broken
	for _, n := range s.refused {
		refused += n
	}
	answered, lost := len(s.wholes), len(s.odd)
	share := float64(answered+refused) / float64(max(1, answered+refused+lost+s.hung))
	crashes := int(c.farm.Starts.Load()) - c.farm.Count
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	row := func(cells ...any) {
		for _, cell := range cells {
			fmt.Fprintf(table, "%v\t", cell)
		}
		fmt.Fprintln(table)
	}
	row("routers restarted", fmt.Sprint(c.routers.restarts, " times, workers crashed ", crashes, " times"))
	row("answered", answered)
	row("one clear error", refused, fmt.Sprint("streams ", s.broken, ", status ", s.refused))
	row("clients that left", s.left)
	row("lost", lost)
	row("hung", s.hung, fmt.Sprint(s.stalled, " after the answer had begun"))
	row("answered or one clear error", fmt.Sprintf("%.3f %%", 100*share))
	row("wrong matches", wrong, fmt.Sprintf("in %d looks at a worker's cache", looks+2*chaosWorkers))
	row("predicted too much", fmt.Sprintf("%.2f %% of the answers", 100*float64(s.over)/float64(max(1, answered))))
	row("", "p50", "p99")
	row("first byte", quantile(s.firsts, 0.5), quantile(s.firsts, 0.99))
	row("whole answer", quantile(s.wholes, 0.5), quantile(s.wholes, 0.99))
	row("first router", "beginning", "middle", "end")
	for _, of := range []struct {
		name  string
		slack float64 // that is no growth
		of    func(size) float64
	}{
		{"memory, MB", 16, func(s size) float64 { return s.memory }},
		{"goroutines", 50, func(s size) float64 { return s.goroutines }},
		{"descriptors", 50, func(s size) float64 { return s.descriptors }},
	} {
		first, second, third := middle(c.sizes[0], of.of), middle(c.sizes[1], of.of), middle(c.sizes[2], of.of)
		row(of.name, fmt.Sprintf("%.0f", first), fmt.Sprintf("%.0f", second), fmt.Sprintf("%.0f", third))
		if !(third <= second*1.1+of.slack) {
			t.Errorf("%s: %.0f in the last third after %.0f in the second", of.name, third, second)
		}
	}
	table.Flush()
	t.Logf("chaos of %s, %d workers, %d clients\n%s", d, chaosWorkers, s.clients, &text)
	if s.hung > 0 || wrong > 0 || looks == 0 || answered == 0 || share < 0.999 {
		t.Errorf("hung %d, wrong matches %d, %.3f %% came to an answer or one clear error; the first of %d others: %q", s.hung, wrong, 100*share, lost, s.odd[:min(5, lost)])
	}
}

// TestChaosRollingRestart restarts two routers and four workers, one after the
// other, under 100 requests. Nobody may lose an answer by it.
func TestChaosRollingRestart(t *testing.T) {
	chaosTime(t)
	const workers = 4
	var farm []*Router
	var args []string
	worker := func(port int) []string {
		return append(strings.Fields(slowMocks), "--engine=mocker", "--num-workers=1", "--mock-shutdown-timeout=8s",
			fmt.Sprintf("--base-worker-port=%d", port+2), fmt.Sprintf("--base-kv-events-port=%d", port+3),
			fmt.Sprintf("--base-kv-replay-port=%d", port+4), fmt.Sprintf("--base-metrics-port=%d", port+5))
	}
	ports := testkit.FreePorts(t, 6*workers)
	for i := range workers {
		port := ports + 6*i
		farm = append(farm, startPlain(t, port, worker(port)...))
		farm[i].WaitReady(1, readyLimit)
		args = append(args, fmt.Sprintf("--worker=url=http://127.0.0.1:%d,id=%d", port+2, i))
	}
	routers := startRollout(t, 2, args...)
	settled := func() {
		for i := range routers.sites {
			routers.router(i).WaitReady(workers, readyLimit)
		}
	}
	settled()
	s := newSoak(nil, nil, chaosLimit)
	s.where, s.clients = routers.where, 100
	ctx, cancel := context.WithCancel(t.Context())
	var load sync.WaitGroup
	load.Go(func() { s.load(ctx, time.Second) })
	defer load.Wait()
	defer cancel()
	warm := func(answers int) {
		testkit.Eventually(t, chaosLimit, "answers come", func() (enough bool) {
			s.note(func() { enough = len(s.wholes) >= answers })
			return enough
		})
	}
	warm(s.clients)
	began := time.Now()
	for i := range routers.sites {
		routers.restart(i)
		settled()
	}
	for i := range farm {
		farm[i] = restart(t, farm[i], worker(ports+6*i)...)
		settled()
	}
	took := time.Since(began)
	var answered int
	s.note(func() { answered = len(s.wholes) })
	warm(answered + s.clients)
	cancel()
	load.Wait()
	t.Logf("2 routers and %d workers restarted within %s: %d answered, %d lost, refused %v, %d streams cut, %d hung; whole answer p50 %s, p99 %s, longest %s",
		workers, took.Round(time.Second), len(s.wholes), len(s.odd), s.refused, s.broken, s.hung, quantile(s.wholes, 0.5), quantile(s.wholes, 0.99), quantile(s.wholes, 1))
	if len(s.odd) > 0 || len(s.refused) > 0 || s.broken > 0 || s.hung > 0 {
		t.Errorf("not every request was answered: %q", s.odd[:min(5, len(s.odd))])
	}
}

// TestChaosMemory has a router meet what takes memory and time all at once: bodies
// that were announced and do not come, a list of token ids and prompts far beyond
// what the model takes, for 5 s. Small chats beside them may not wait.
func TestChaosMemory(t *testing.T) {
	chaosTime(t)
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":1}}`)
	})
	s := startPlain(t, testkit.FreePorts(t, 2), "--engine=none", "--served-model-name=m",
		"--model="+ModelFolder(), "--worker=url="+worker.URL)
	s.WaitReady(1, readyLimit)
	idle, _ := memoryOf(s, "VmHWM")
	for range 200 {
		conn, err := net.Dial("tcp", strings.TrimPrefix(s.OpenAI, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n{", testkit.ChatPath, 64<<20)
	}
	send := func(path, body string) { // again and again for a while
		for end := time.Now().Add(5 * time.Second); time.Now().Before(end); {
			response, err := http.Post(s.OpenAI+path, "application/json", strings.NewReader(body))
			if err != nil {
				t.Errorf("%s: %v", path, err)
				return
			}
			io.Copy(io.Discard, response.Body)
			response.Body.Close()
			if response.StatusCode/100 == 5 {
				t.Errorf("%s with %d MB: %s", path, len(body)>>20, response.Status)
			}
		}
	}
	var big sync.WaitGroup
	ids := `{"model":"m","prompt":[` + strings.Repeat("1,", 10<<20) + `1]}`
	big.Go(func() { send("/v1/completions", ids) })
	text := soakText(rand.New(rand.NewPCG(1, 1)), 12<<20)
	for i := range 3 {
		big.Go(func() {
			body, _ := json.Marshal(map[string]any{"model": "m", "messages": Say(fmt.Sprint(i, " ", text))})
			send(testkit.ChatPath, string(body))
		})
	}
	done := make(chan struct{})
	go func() {
		big.Wait()
		close(done)
	}()
	var longest time.Duration
	small := 0
	for running := true; running; small++ {
		select {
		case <-done:
			running = false
		case <-time.After(20 * time.Millisecond):
		}
		began := time.Now()
		if _, err := s.Chat(t.Context(), Say(fmt.Sprint("small chat ", small)), false, 1); err != nil {
			t.Error("a small chat: ", err)
		}
		longest = max(longest, time.Since(began))
	}
	peak, _ := memoryOf(s, "VmHWM")
	t.Logf("peak resident memory %.0f MB (%.0f before), the longest of %d small chats %s", peak, idle, small, longest.Round(time.Millisecond))
	if peak > 250 || longest > 500*time.Millisecond || small < 10 {
		t.Error("more than 250 MB, or a small chat that waited for more than 0.5 s, or too few of them")
	}
}
