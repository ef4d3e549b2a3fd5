package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"kvrouter/internal/mocker"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// churn keeps two routers over the same workers busy while all about them comes
// and goes: workers that crash, workers that are registered and taken away,
// clients that leave, and the second router itself.
type churn struct {
	t     *testing.T
	first *mockSite // starts workers of its own
	farm  *mockSite // whose workers are registered with the first
	ports int       // of the second router: OpenAI, router port, replica port; then the first's replica port
	chats int       // different ones

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
	c.farm = startMockSite(t, churnWorkers, "--speedup-ratio=10", "--mock-num-gpu-blocks=2048")
	c.first = startMockSite(t, churnWorkers, "--speedup-ratio=10", "--mock-num-gpu-blocks=2048", "--policy=kv", "--mock-crash-every=7s",
		"--replica-sync", fmt.Sprintf("--replica-sync-port=%d", c.ports+3), fmt.Sprintf("--replica-peers=127.0.0.1:%d", c.ports+2))
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
	for _, site := range []*mockSite{c.first, c.farm} { // both, before either looks for goroutines that are left
		if err := site.end(); err != nil {
			t.Error(err)
		}
	}
}

func newChurn(t *testing.T) *churn {
	return &churn{t: t, chats: 40, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: churnClients}}}
}

// footprint is what is used without requests, without the farm's replay buffers
// too.
func (c *churn) footprint() footprint {
	f := (&soak{site: c.first}).footprint()
	if c.farm == nil {
		return f
	}
	farm := (&soak{site: c.farm}).footprint()
	f.heap -= min(farm.replay, f.heap)
	f.replay += farm.replay
	return f
}

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
		all.Go(func() { c.ask(ctx, rand.New(rand.NewPCG(uint64(i), 3)), c.first.openAI, i%3 == 0) })
		if i%3 == 0 {
			all.Go(func() {
				c.ask(ctx, rand.New(rand.NewPCG(uint64(i), 4)), fmt.Sprintf("http://127.0.0.1:%d", c.ports), false)
			})
		}
	}
	all.Go(func() { c.register(ctx) })
	all.Go(func() {
		for c.pause(ctx, 20*time.Millisecond) {
			if n := c.first.rooms.replicas.Held.Load(); n > c.moved.Load() {
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
		c.one(url, say(text), random.IntN(2) == 0, 20+random.IntN(100), limit, leave)
		c.pause(ctx, time.Duration(random.IntN(20))*time.Millisecond)
	}
}

// one sends a request and counts how it ended.
func (c *churn) one(url string, messages []map[string]string, stream bool, tokens int, limit time.Duration, leave bool) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	body := strings.NewReader(string(mocker.MustJSON(map[string]any{"messages": messages, "max_tokens": tokens, "stream": stream})))
	request, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+testkit.ChatPath, body)
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
		w := c.farm.rooms.fleet.Workers()[i]
		url, method, body, want := c.first.selection+"/workers", http.MethodPost, string(mocker.MustJSON(map[string]any{
			"worker_id": churnFarmID + i, "model_name": "mock", "endpoint": w.URL, "kv_events_endpoint": w.KVEvents, "replay_endpoint": w.Replay, "block_size": 64,
		})), http.StatusCreated
		if there[i] {
			url, method, body, want = fmt.Sprintf("%s/%d", url, churnFarmID+i), http.MethodDelete, "", http.StatusOK
		}
		request, _ := http.NewRequest(method, url, strings.NewReader(body))
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
	args := []string{"--engine=none", "--policy=kv", "--drain-timeout=300ms", "--replica-sync",
		fmt.Sprintf("--http-port=%d", c.ports), fmt.Sprintf("--router-port=%d", c.ports+1),
		fmt.Sprintf("--replica-sync-port=%d", c.ports+2), fmt.Sprintf("--replica-peers=127.0.0.1:%d", c.ports+3)}
	for i := range churnWorkers {
		args = append(args, fmt.Sprintf("--worker=url=%s,id=%d", c.first.workerURL(i), i))
	}
	for running := true; running; {
		second, end := runApp(c.t, io.Discard, args...)
		c.routers.Add(1)
		running = c.pause(ctx, 3*time.Second)
		if err := end(); err != nil && running {
			c.fail("the second router: %v", err)
		}
		c.freed("the second router", second.router)
	}
}

// idle waits until nothing is booked on the first router and nothing runs any
// more that requests have started.
func (c *churn) idle(quiet footprint) {
	c.t.Helper()
	c.freed("the first router", c.first.rooms.router)
	http.DefaultClient.CloseIdleConnections()
	(&soak{site: c.first}).quiet(c.t, quiet)
}

// freed waits until a router has nothing booked.
func (c *churn) freed(what string, rt *router.Router) {
	c.t.Helper()
	var loads []router.WorkerLoad
	defer func() {
		if c.t.Failed() {
			c.t.Logf("%s: %+v", what, loads)
		}
	}()
	testkit.Eventually(c.t, 20*time.Second, what+" has nothing booked", func() bool {
		loads = rt.Loads()
		return !slices.ContainsFunc(loads, func(l router.WorkerLoad) bool { return l != router.WorkerLoad{Key: l.Key} })
	})
}
