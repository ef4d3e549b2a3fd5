package test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
)

// The soak tests keep simulated workers busy through real sockets. They run for
// KVROUTER_SOAK (such as 60s; `make soak` sets it) and not at all without it.

func soakTime(t *testing.T) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(os.Getenv("KVROUTER_SOAK"))
	if err != nil {
		t.Skip("set KVROUTER_SOAK=60s, or run `make soak`")
	}
	return d
}

// footprint is what the router's process uses.
type footprint struct {
	goroutines int
	heap       uint64 // bytes that are reachable
}

func (f footprint) String() string {
	return fmt.Sprintf("%d goroutines, heap %d MB", f.goroutines, f.heap>>20)
}

// footprint reads the router's metrics page until two collections have run since its
// garbage was made, for 30 s at most: the least heap seen is what is reachable.
func (s *soak) footprint() footprint {
	f := footprint{heap: math.MaxUint64}
	collections := s.router.Metrics()["go_gc_duration_seconds_count"]
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); {
		page := s.router.Metrics()
		f.goroutines, f.heap = int(page["go_goroutines"]), min(f.heap, uint64(page["go_memstats_heap_alloc_bytes"]))
		if page["go_gc_duration_seconds_count"] >= collections+3 {
			break
		}
	}
	return f
}

// startSoaked is StartMocks for a router without the race detector, whose memory counts.
func startSoaked(t *testing.T, workers int, args ...string) *Mocks {
	t.Helper()
	return StartOverAt(t, PlainProgram, testkit.FreePorts(t, 2), StartWorkers(t, workers, args...), append([]string{"--log-level=info"}, args...)...)
}

func TestSoak(t *testing.T) {
	d := soakTime(t)
	site := startSoaked(t, 8, "--speedup-ratio=10", "--mock=num-gpu-blocks=4096")
	s := newSoak(site.Workers, site.Router, 2*time.Minute)
	idle := s.footprint()
	// What fills up to its bound does so before the first look; both looks are
	// at a router without requests, so that what they hold does not count.
	s.run(d/3, d/36, func(time.Duration) {})
	s.freed(t)
	s.quiet(t, idle)
	before := s.footprint()
	s.run(d, d/12, func(elapsed time.Duration) {
		t.Logf("%3.0f s: %s, %d in flight", elapsed.Seconds(), s.footprint(), site.InFlight())
	})
	t.Log(s)
	s.freed(t)
	site.Settle()
	found := s.compare(t, s.prompts, s.indexed)
	t.Log(found)
	if found.wrong > 0 || found.missing > 0 || found.workers < 8 || found.blocks == 0 {
		t.Error("the index is not what the workers hold")
	}
	if answers := s.exact + s.over + s.under; answers == 0 || float64(s.exact) < 0.99*float64(answers) {
		t.Error("too few predictions are exact")
	}
	if s.hung > 0 || s.broken > 0 || len(s.refused) > 0 || len(s.odd) > 0 {
		t.Errorf("not every request was answered: %q", s.odd[:min(5, len(s.odd))])
	}
	s.quiet(t, idle)
	after := s.footprint()
	t.Logf("without requests: at first %s; after %.0f s %s; after %.0f s more %s", idle, (d / 3).Seconds(), before, d.Seconds(), after)
	if after.heap > before.heap+before.heap/4 {
		t.Errorf("the heap grew from %d to %d bytes", before.heap, after.heap)
	}
}

// quiet waits until the goroutines of requests and their connections have ended.
func (s *soak) quiet(t *testing.T, idle footprint) {
	t.Helper()
	testkit.Eventually(t, 15*time.Second, "goroutines gone", func() bool { return int(s.router.Metrics()["go_goroutines"]) <= idle.goroutines+20 })
}

// freed waits until no request is booked and checks that none left anything.
func (s *soak) freed(t *testing.T) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, "nothing in flight", func() bool { return s.router.InFlight() == 0 })
	for _, w := range s.router.Workers() {
		if w.PrefillTokens != 0 {
			t.Errorf("worker %d still has %d prompt tokens in flight", w.WorkerID, w.PrefillTokens)
		}
	}
}

func TestSoakWithFaults(t *testing.T) {
	d := soakTime(t)
	site := startSoaked(t, 8, "--speedup-ratio=10", "--mock=num-gpu-blocks=1536", "--request-timeout=5s",
		"--mock=drop-events=0.01", "--mock=duplicate-events=0.01", "--mock=crash-every=10s", "--mock=hang-worker=7=15s")
	s := newSoak(site.Workers, site.Router, time.Minute)
	looks := 0
	s.run(d, d/12, func(elapsed time.Duration) {
		found := s.look(t)
		t.Logf("%3.0f s: %s", elapsed.Seconds(), found)
		looks += found.workers
		if found.wrong > 0 {
			t.Error("a wrong match outlived a replay")
		}
	})
	t.Log(s)
	site.Settle() // after the last batch that was dropped, too
	found := s.compare(t, s.prompts, s.indexed)
	t.Log(found)
	if found.wrong > 0 || found.blocks == 0 || looks == 0 {
		t.Error("wrong matches are left, or nothing was compared")
	}
	if s.hung > 0 || len(s.odd) > 0 {
		t.Errorf("%d clients hung, odd answers %q", s.hung, s.odd[:min(5, len(s.odd))])
	}
	if s.exact == 0 {
		t.Error("no answers")
	}
	s.freed(t)
	gaps := 0.0
	for name, value := range site.Metrics() {
		if strings.HasPrefix(name, "kvrouter_kv_events_total{") && strings.Contains(name, `kind="gaps"`) {
			gaps += value
		}
	}
	t.Logf("%d restarts, %.0f gaps in the streams", int(site.Starts.Load())-site.Count, gaps)
}

// churn keeps two routers over the same workers busy while all about them comes
// and goes: workers that crash, workers that are registered and taken away,
// clients that leave, and the second router itself.
type churn struct {
	t     *testing.T
	first *Mocks   // has workers of its own
	farm  *Workers // that are registered with the first
	ports int      // of the second router: OpenAI, router port, replica port; then the first's replica port
	chats int      // different ones

	client  *http.Client
	whole   atomic.Int64 // answers that came to their end
	left    atomic.Int64 // clients that went away
	refused atomic.Int64 // clear errors
	broken  atomic.Int64 // answers that a dying worker or router cut short
	hung    atomic.Int64
	changes atomic.Int64 // workers registered or taken away
	routers atomic.Int64 // times that the second router was started
	moved   atomic.Int64 // requests of others that the first router has seen at a time, at most
	wrong   atomic.Pointer[string]
}

const (
	churnClients = 60
	churnWorkers = 4 // that the first router starts, and as many to be registered
	// churnFarmID is the id of the first worker that is registered.
	churnFarmID = 100
)

func TestSoakWithChurn(t *testing.T) {
	d := soakTime(t)
	c := newChurn(t)
	c.ports = testkit.FreePorts(t, 4)
	c.farm = StartWorkers(t, churnWorkers, "--speedup-ratio=10", "--mock=num-gpu-blocks=2048")
	c.first = startSoaked(t, churnWorkers, "--speedup-ratio=10", "--mock=num-gpu-blocks=2048", "--policy=kv", "--mock=crash-every=7s",
		"--cluster=test", fmt.Sprintf("--cluster-port=%d", c.ports+3), fmt.Sprintf("--cluster-peers=127.0.0.1:%d", c.ports+2))
	quiet := c.footprint()
	c.run(d / 4)
	c.idle(quiet)
	early := c.footprint()
	c.run(d)
	c.idle(quiet)
	late := c.footprint()
	t.Logf("%d answers, %d clients left, %d refused, %d cut short, %d hung; %d workers registered or taken away, %d second routers, at most %d of their requests seen at a time",
		c.whole.Load(), c.left.Load(), c.refused.Load(), c.broken.Load(), c.hung.Load(), c.changes.Load(), c.routers.Load(), c.moved.Load())
	t.Logf("without requests: after %s %s; after %s more %s", d/4, early, d, late)
	if wrong := c.wrong.Load(); wrong != nil {
		t.Error(*wrong)
	}
	if c.hung.Load() > 0 || c.whole.Load() == 0 || c.left.Load() == 0 || c.changes.Load() == 0 || c.routers.Load() == 0 || c.moved.Load() == 0 {
		t.Error("clients hung, or nothing happened")
	}
	if late.heap > early.heap+early.heap/4+8<<20 {
		t.Errorf("the heap grew from %d to %d bytes", early.heap, late.heap)
	}
}

func newChurn(t *testing.T) *churn {
	return &churn{t: t, chats: 40, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: churnClients}}}
}

// footprint is what the first router uses without requests.
func (c *churn) footprint() footprint { return (&soak{router: c.first.Router}).footprint() }

// fail keeps the first thing that went wrong in a goroutine.
func (c *churn) fail(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	c.wrong.CompareAndSwap(nil, &text)
}

// run has everything come and go for d, and ends all requests.
func (c *churn) run(d time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	var all sync.WaitGroup
	for i := range churnClients {
		all.Go(func() { c.ask(ctx, rand.New(rand.NewPCG(uint64(i), 3)), c.first.OpenAI, i%3 == 0) })
		if i%3 == 0 {
			all.Go(func() {
				c.ask(ctx, rand.New(rand.NewPCG(uint64(i), 4)), fmt.Sprintf("http://127.0.0.1:%d", c.ports), false)
			})
		}
	}
	all.Go(func() { c.register(ctx) })
	all.Go(func() {
		for c.pause(ctx, 100*time.Millisecond) {
			if n := int64(c.first.Metrics()["kvrouter_cluster_bookings"]); n > c.moved.Load() {
				c.moved.Store(n)
			}
		}
	})
	c.replica(ctx)
	all.Wait()
	c.client.CloseIdleConnections()
}

// pause waits for d; not ok: ctx has ended.
func (c *churn) pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// ask sends one request after the other; leave: some clients go away before the
// end.
func (c *churn) ask(ctx context.Context, random *rand.Rand, url string, leave bool) {
	for ctx.Err() == nil {
		limit := time.Minute
		if leave {
			limit = time.Duration(1+random.IntN(150)) * time.Millisecond
		}
		text := fmt.Sprint("chat ", random.IntN(c.chats), " ", strings.Repeat("come and go ", 20+random.IntN(60)))
		c.one(url, Say(text), random.IntN(2) == 0, 20+random.IntN(100), limit, leave)
		c.pause(ctx, time.Duration(random.IntN(20))*time.Millisecond)
	}
}

// one sends a request and counts how it ended.
func (c *churn) one(url string, messages []map[string]string, stream bool, tokens int, limit time.Duration, leave bool) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	body := strings.NewReader(string(mocker.MustJSON(map[string]any{"messages": messages, "max_tokens": tokens, "stream": stream})))
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+testkit.ChatPath, body)
	request.Header.Set("Content-Type", "application/json")
	response, err := c.client.Do(request)
	end := ""
	if err == nil {
		defer response.Body.Close()
		lines := bufio.NewReader(response.Body)
		for err == nil {
			var line string
			if line, err = lines.ReadString('\n'); strings.TrimSpace(line) != "" {
				end = line
			}
		}
		if err == io.EOF {
			err = nil
		}
	}
	switch {
	case ctx.Err() != nil && leave:
		c.left.Add(1)
	case ctx.Err() != nil:
		c.hung.Add(1)
	case err != nil: // the second router is not there, or went away
		c.broken.Add(1)
	case response.StatusCode != http.StatusOK:
		c.refused.Add(1)
		if !strings.Contains(end, `"error"`) {
			c.fail("%s: %.200s", response.Status, end)
		}
	case stream && strings.TrimSpace(end) != "data: [DONE]":
		c.broken.Add(1)
	default:
		c.whole.Add(1)
	}
}

// register registers the farm's workers with the first router, and takes them
// away again.
func (c *churn) register(ctx context.Context) {
	random := rand.New(rand.NewPCG(5, 5))
	there := make([]bool, churnWorkers)
	toggle := func(i int) {
		source := c.farm.Settings.Ports.Sources(i, 64)[0]
		url, method, body, want := c.first.Port+"/workers", http.MethodPost, string(mocker.MustJSON(map[string]any{
			"worker_id": churnFarmID + i, "model_name": "mock", "endpoint": c.farm.URL(i), "kv_events_endpoint": source.Endpoint, "replay_endpoint": source.Replay, "block_size": 64,
		})), http.StatusCreated
		if there[i] {
			url, method, body, want = fmt.Sprintf("%s/%d", url, churnFarmID+i), http.MethodDelete, "", http.StatusOK
		}
		request, _ := http.NewRequest(method, url, strings.NewReader(body))
		request.Header.Set("Content-Type", "application/json")
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			c.fail("%s %s: %v", method, url, err)
			return
		}
		answer, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != want {
			c.fail("%s %s: %s %s", method, url, response.Status, answer)
		}
		there[i] = !there[i]
		c.changes.Add(1)
	}
	for c.pause(ctx, time.Duration(100+random.IntN(400))*time.Millisecond) {
		toggle(random.IntN(churnWorkers))
	}
	for i, is := range there {
		if is {
			toggle(i)
		}
	}
}

// replica starts the second router over the first one's workers, and ends it
// again.
func (c *churn) replica(ctx context.Context) {
	args := []string{"--engine=none", "--policy=kv", "--drain-timeout=300ms", "--cluster=test",
		fmt.Sprintf("--cluster-port=%d", c.ports+2), fmt.Sprintf("--cluster-peers=127.0.0.1:%d", c.ports+3)}
	args = append(args, c.first.Attach()...)
	for running := true; running; {
		second := startPlain(c.t, c.ports, args...)
		c.routers.Add(1)
		running = c.pause(ctx, 3*time.Second)
		second.Stop()
	}
}

// idle waits until nothing is booked on the first router and nothing runs any
// more that requests have started.
func (c *churn) idle(quiet footprint) {
	c.t.Helper()
	(&soak{router: c.first.Router}).freed(c.t)
	http.DefaultClient.CloseIdleConnections()
	(&soak{router: c.first.Router}).quiet(c.t, quiet)
}
