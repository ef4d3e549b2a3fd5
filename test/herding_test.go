package test

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
)

// What the herd is: requests that all begin with the same cached prompt, of which each
// router sees a part.
const (
	herdWorkers  = 4
	herdRouters  = 3
	herdInFlight = 300
	herdRequests = 1500
	herdRounds   = 3
	herdPrefix   = 4000            // bytes of the shared prompt, each about a token
	herdTail     = 300             // bytes that follow
	herdAnswer   = 32              // tokens on average
	herdRise     = 2 * time.Second // until all clients have begun: else they come in waves
)

// herdSetup is who routes.
type herdSetup struct {
	name    string
	routers int
	mesh    bool
}

// herdRun is what a run came to.
type herdRun struct {
	spread         float64 // requests of the fullest worker / mean
	mean, p50, p99 time.Duration
}

// herd is some routers over the same mock workers.
type herd struct {
	t       *testing.T
	farm    *Workers
	routers []*Mocks
	client  *http.Client
	prefix  string
}

// TestHerding measures how routers that share workers spread requests that all want
// the same cache.
func TestHerding(t *testing.T) {
	if os.Getenv("KVROUTER_HERDING_BENCH") == "" {
		t.Skip("make bench-herding runs it")
	}
	setups := []herdSetup{{"one router", 1, false}, {"three, each for itself", herdRouters, false}, {"three in a cluster", herdRouters, true}}
	policies := []string{"work", "kv"}
	found := map[string][]herdRun{}
	key := func(policy string, s herdSetup) string { return policy + " " + s.name }
	for round := range herdRounds {
		for _, policy := range policies {
			for i := range setups { // another one begins each round
				s := setups[(i+round)%len(setups)]
				t.Run(fmt.Sprintf("%s %s %d", policy, s.name, round), func(t *testing.T) {
					run := runHerd(t, policy, s, uint64(round))
					t.Logf("spread %.3f, first token mean %v, p50 %v, p99 %v", run.spread, run.mean, run.p50, run.p99)
					found[key(policy, s)] = append(found[key(policy, s)], run)
				})
			}
		}
	}
	if t.Failed() {
		return
	}
	fmt.Printf("\n%d requests, %d in flight, %d workers, a shared prompt of %d tokens; medians of %d rounds, in brackets against one router\n\n", herdRequests, herdInFlight, herdWorkers, herdPrefix, herdRounds)
	fmt.Println("| policy | routers | fullest worker / mean | first token, mean ms | p50 ms | p99 ms |\n|---|---|---|---|---|---|")
	for _, policy := range policies {
		alone := found[key(policy, setups[0])]
		for _, s := range setups {
			runs := found[key(policy, s)]
			if len(runs) == 0 || len(alone) == 0 { // by -run
				continue
			}
			cell := func(of func(herdRun) float64, format string) string {
				value, one := herdMedian(runs, of), herdMedian(alone, of)
				return fmt.Sprintf(format+" (%.2f)", value, value/one)
			}
			ms := func(of func(herdRun) time.Duration) string {
				return cell(func(r herdRun) float64 { return float64(of(r)) / float64(time.Millisecond) }, "%.0f")
			}
			fmt.Printf("| %s | %s | %s | %s | %s | %s |\n", policy, s.name, cell(func(r herdRun) float64 { return r.spread }, "%.3f"),
				ms(func(r herdRun) time.Duration { return r.mean }), ms(func(r herdRun) time.Duration { return r.p50 }), ms(func(r herdRun) time.Duration { return r.p99 }))
		}
	}
}

// herdMedian is the median of what the runs came to.
func herdMedian(runs []herdRun, of func(herdRun) float64) float64 {
	var values []float64
	for _, run := range runs {
		values = append(values, of(run))
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// runHerd starts workers and routers, and sends the herd through them.
func runHerd(t *testing.T, policy string, s herdSetup, seed uint64) herdRun {
	t.Helper()
	h := &herd{
		t: t, farm: StartWorkers(t, herdWorkers, "--speedup-ratio=0.5"),
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: herdInFlight}},
		prefix: Words(rand.New(rand.NewPCG(seed, 1)), herdPrefix)[:herdPrefix],
	}
	t.Cleanup(h.client.CloseIdleConnections)
	ports := testkit.FreePorts(t, s.routers)
	for i := range s.routers {
		args := []string{"--policy=" + policy, fmt.Sprintf("--seed=%d", i+1), "--log-level=info"}
		if s.mesh {
			var peers []string
			for other := range s.routers {
				if other != i {
					peers = append(peers, fmt.Sprintf("127.0.0.1:%d", ports+other))
				}
			}
			args = append(args, "--cluster=test", fmt.Sprintf("--cluster-port=%d", ports+i), "--cluster-peers="+strings.Join(peers, ","))
		}
		h.routers = append(h.routers, StartOverAt(t, PlainProgram, testkit.FreePorts(t, 2), h.farm, args...))
	}
	h.warm(s.mesh)
	return h.run(seed)
}

// warm waits until every router hears the others and knows where
// the shared prompt is cached.
func (h *herd) warm(mesh bool) {
	h.t.Helper()
	if _, _, err := h.one(h.routers[0], "warm", herdAnswer); err != nil {
		h.t.Fatal(err)
	}
	if mesh {
		testkit.Eventually(h.t, 20*time.Second, "the routers hear each other", func() bool {
			all := true
			for _, r := range h.routers {
				if _, _, err := h.one(r, "warm", herdAnswer); err != nil {
					h.t.Fatal(err)
				}
			}
			for _, r := range h.routers {
				all = all && r.Metrics()["kvrouter_cluster_received_total"] > 0
			}
			return all
		})
	}
	for _, r := range h.routers {
		testkit.Eventually(h.t, 20*time.Second, "the router knows what is cached", func() bool {
			for w := range uint64(herdWorkers) {
				key := kv.WorkerKey{Worker: w}
				if r.Blocks(key) != h.farm.Held(key) {
					return false
				}
			}
			return r.InFlight() == 0
		})
	}
}

// run sends the herd: each client keeps to one router, and asks again as soon as it has
// its answer.
func (h *herd) run(seed uint64) herdRun {
	h.t.Helper()
	var next atomic.Int64
	var mu sync.Mutex // guards the rest
	var waits []time.Duration
	requests := map[string]int{}
	var clients sync.WaitGroup
	for client := range herdInFlight {
		clients.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(client)))
			time.Sleep(herdRise * time.Duration(client) / herdInFlight) // its turn to begin
			for next.Add(1) <= herdRequests {
				wait, worker, err := h.one(h.routers[client%len(h.routers)], Words(random, herdTail)[:herdTail], herdAnswer/2+random.IntN(herdAnswer+1))
				mu.Lock()
				if err != nil {
					h.t.Error(err)
				}
				waits = append(waits, wait)
				requests[worker]++
				mu.Unlock()
			}
		})
	}
	clients.Wait()
	slices.Sort(waits)
	if len(waits) != herdRequests || h.t.Failed() {
		h.t.Fatalf("%d of %d requests were answered", len(waits), herdRequests)
	}
	var run herdRun
	for _, wait := range waits {
		run.mean += wait / herdRequests
	}
	run.p50, run.p99 = waits[herdRequests/2], waits[herdRequests*99/100]
	for _, n := range requests {
		run.spread = max(run.spread, float64(n)*herdWorkers/herdRequests)
	}
	return run
}

// one sends a request to a router and reads its whole answer, of so many tokens: when
// its first token came, and from which worker.
func (h *herd) one(r *Mocks, tail string, tokens int) (wait time.Duration, worker string, err error) {
	ctx, cancel := context.WithTimeout(h.t.Context(), time.Minute)
	defer cancel()
	body := mocker.MustJSON(map[string]any{"messages": Say(h.prefix + " " + tail), "max_tokens": tokens, "ignore_eos": true, "stream": true})
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, r.OpenAI+testkit.ChatPath, strings.NewReader(string(body)))
	if err != nil {
		return 0, "", err
	}
	request.Header.Set("Content-Type", "application/json")
	start := time.Now()
	response, err := h.client.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	last := ""
	for lines.Scan() {
		text := lines.Text()
		if wait == 0 && gjson.Get(strings.TrimPrefix(text, "data: "), "choices.0.delta.content").Str != "" {
			wait = time.Since(start)
		}
		last = cmp.Or(text, last)
	}
	if response.StatusCode != http.StatusOK || wait == 0 || last != "data: [DONE]" {
		return 0, "", fmt.Errorf("%s, first token after %v, at the end %.200q: %v", response.Status, wait, last, cmp.Or(lines.Err(), context.Cause(ctx)))
	}
	return wait, response.Header.Get(web.HeaderWorker), nil
}
