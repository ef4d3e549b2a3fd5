package test

import (
	"encoding/csv"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/eventstest"
)

// growthTable is what `make growth` measures, a line a value.
type growthTable struct {
	t   *testing.T
	out *csv.Writer
}

func (g *growthTable) add(what string, workers, blocks int, value float64) {
	line := []string{what, strconv.Itoa(workers), strconv.Itoa(blocks), strconv.FormatFloat(value, 'g', 4, 64)}
	g.t.Log(line)
	if err := g.out.Write(line); err != nil {
		g.t.Error(err)
	}
	g.out.Flush()
}

// TestGrowthOfProcess is the second part of `make growth`: it appends to the file that
// $KVROUTER_GROWTH names what a router process costs with idle and publishing workers, as
// CSV. Times are CPU time.
func TestGrowthOfProcess(t *testing.T) {
	path := os.Getenv("KVROUTER_GROWTH")
	if path == "" {
		t.Skip("run `make growth`")
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := PlainProgram(); err != nil { // the first start is measured, not built
		t.Fatal(err)
	}
	for _, n := range growthWorkers {
		t.Run(fmt.Sprintf("workers=%d", n), func(t *testing.T) { (&growthTable{t, csv.NewWriter(file)}).process(n) })
	}
}

// growthWorkers are the numbers of workers that are measured, growthBlock the tokens of a
// block.
var growthWorkers = []int{8, 64, 512, 4096}

const growthBlock = 64

const (
	// growthIdle is over how long a process without requests is watched, growthRest how long
	// its workers have had none by then: the first polls are close together.
	growthIdle, growthRest = time.Minute, 15 * time.Second
	// growthEvents are the KV events that all workers publish together, of so many
	// blocks each.
	growthEvents, growthEventBlocks = 50_000, 4
)

// process measures a router process with n attached workers that are idle, and then
// publish.
func (g *growthTable) process(n int) {
	fleet := newGrowthFleet(g.t, n)
	port := testkit.FreePorts(g.t, 2)
	started := time.Now()
	s := startPlain(g.t, port, append(fleet.flags, "--engine=none", "--served-model-name=m")...)
	s.WaitReady(n, 3*time.Minute)
	g.add("start, s", n, 0, time.Since(started).Seconds())
	g.add("CPU of the start, s", n, 0, g.used(s).Seconds())
	page := func() testkit.MetricsLines {
		_, text := testkit.HTTPGet(g.t, s.OpenAI+"/metrics")
		return testkit.ReadMetricsPage(string(text))
	}
	testkit.Eventually(g.t, 3*time.Minute, "all event streams are connected", func() bool {
		connected := 0.0
		for name, value := range page() {
			if strings.HasPrefix(name, "kvrouter_kv_events_connected{") {
				connected += value
			}
		}
		return connected == float64(n)
	})

	<-time.After(growthRest)
	began, used := time.Now(), g.used(s)
	<-time.After(growthIdle)
	g.add("idle CPU, % of a core", n, 0, 100*(g.used(s)-used).Seconds()/time.Since(began).Seconds())
	g.add("resident, MB", n, 0, g.resident(s))
	const pages = 20
	used = g.used(s)
	for range pages {
		page()
	}
	g.add("/metrics, ms", n, 0, float64((g.used(s)-used).Milliseconds())/pages)

	used = g.used(s)
	began = time.Now()
	fleet.publish()
	blocks := 0
	testkit.Eventually(g.t, 2*time.Minute, "all events are in the index", func() bool {
		blocks = 0
		_, list := testkit.HTTPGet(g.t, s.Port+"/workers")
		for _, w := range gjson.ParseBytes(list).Array() {
			blocks += int(w.Get("blocks").Int())
		}
		return blocks == growthEvents*growthEventBlocks
	})
	cpu := g.used(s) - used
	g.add("KV events a second of CPU", n, blocks, growthEvents/cpu.Seconds())
	g.add("KV events a second", n, blocks, growthEvents/time.Since(began).Seconds())
	g.add("resident with events, MB", n, blocks, g.resident(s))
	s.Stop()
}

// used is the CPU time of the process.
func (g *growthTable) used(s *Router) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.Command.Process.Pid))
	_, rest, found := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	if err != nil || !found || len(fields) < 13 {
		g.t.Fatalf("CPU time of the process: %v", err)
	}
	ticks := 0
	for _, field := range fields[11:13] { // user, system
		n, err := strconv.Atoi(field)
		if err != nil {
			g.t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// resident is the memory of the process, MB.
func (g *growthTable) resident(s *Router) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", s.Command.Process.Pid))
	if err != nil {
		g.t.Fatal(err)
	}
	var all, resident float64
	if _, err := fmt.Sscan(string(text), &all, &resident); err != nil {
		g.t.Fatal(err)
	}
	return resident * float64(os.Getpagesize()) / 1e6
}

// growthFleet is n workers that answer what a router asks, and publish KV events.
type growthFleet struct {
	publishers []*testkit.FakePublisher
	payloads   [][]byte // of each publisher in turn
	flags      []string // that attach the workers
}

func newGrowthFleet(t *testing.T, n int) *growthFleet {
	f := &growthFleet{}
	for i := range n {
		mux := http.NewServeMux()
		publisher := testkit.NewFakePublisher(t)
		f.publishers = append(f.publishers, publisher)
		source := eventstest.SourceOf(publisher)
		answers := map[string]string{
			"/health": "", "/version": `{"version":"0.32.0"}`, "/metrics": "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n",
			"/v1/models":        `{"object":"list","data":[{"id":"m","object":"model","owned_by":"growth","max_model_len":8192}]}`,
			"/kv_event_sources": fmt.Sprintf(`{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":%q,"replay_endpoint":%q,"topic":"kv"}}`, source.Endpoint, source.Replay),
		}
		for path, text := range answers {
			mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) })
		}
		server := httptest.NewServer(mux)
		t.Cleanup(server.Close)
		f.flags = append(f.flags, fmt.Sprintf("--worker=url=%s,id=%d", server.URL, i))
	}
	for i := range growthEvents {
		event := testkit.Event{"stored": growthIDs(i), "tokens": testkit.Tokens(uint32(i*growthEventBlocks*growthBlock), growthEventBlocks*growthBlock), "block_size": growthBlock}
		f.payloads = append(f.payloads, testkit.Payload(t, float64(time.Now().UnixNano())/1e9, event))
	}
	return f
}

// growthIDs are the engine hashes of event i.
func growthIDs(i int) (ids []uint64) {
	for block := range growthEventBlocks {
		ids = append(ids, 1<<63+uint64(i*growthEventBlocks+block))
	}
	return ids
}

// publish has all workers publish at once.
func (f *growthFleet) publish() {
	var wait sync.WaitGroup
	defer wait.Wait()
	for part := range 4 {
		wait.Go(func() {
			for i := part; i < len(f.payloads); i += 4 {
				f.publishers[i%len(f.publishers)].Payload(false, f.payloads[i])
			}
		})
	}
}
