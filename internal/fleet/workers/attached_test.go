package workers

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// attachedServer is a worker that somebody else runs; it can go and come back
// at the same address.
type attachedServer struct {
	t       *testing.T
	address string
	server  *httptest.Server

	mu      sync.Mutex // guards the rest
	sources string     // what /kv_event_sources answers; empty: no such path
	metrics string     // what /metrics answers; empty: no such path
	models  int        // status of /v1/models
	list    string     // what it answers
	listed  int        // times that it was asked
}

func newAttachedServer(t *testing.T, sources string) *attachedServer {
	t.Helper()
	a := &attachedServer{t: t, sources: sources, models: http.StatusOK, list: `{"data":[{"id":"base"},{"id":"adapter"}]}`, address: fmt.Sprintf("127.0.0.1:%d", testkit.FreePorts(t, 1))}
	return a
}

func (a *attachedServer) set(change func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change()
}

func (a *attachedServer) start() {
	a.t.Helper()
	listener, err := net.Listen("tcp", a.address)
	if err != nil {
		a.t.Fatal(err)
	}
	a.server = &httptest.Server{Listener: listener, Config: &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.mu.Lock()
		defer a.mu.Unlock()
		switch {
		case r.URL.Path == "/health":
		case r.URL.Path == "/v1/models" && a.models == http.StatusOK:
			a.listed++
			fmt.Fprint(w, a.list)
		case r.URL.Path == "/v1/models":
			w.WriteHeader(a.models)
		case r.URL.Path == "/kv_event_sources" && a.sources != "":
			fmt.Fprint(w, a.sources)
		case r.URL.Path == "/metrics" && a.metrics != "":
			fmt.Fprint(w, a.metrics)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	})}}
	a.server.Start()
}

// attachedFleet is a fleet of the one attached worker, with id 3.
func attachedFleet(t *testing.T, a *attachedServer, endpoints string) *fakeFleet {
	t.Helper()
	var worker Attached
	if err := worker.UnmarshalText([]byte("id=3,url=http://" + a.address + endpoints)); err != nil {
		t.Fatal(err)
	}
	cfg := fakeConfig(t, 0)
	cfg.fleet.Attached, cfg.fleet.RestartBackoffMax = []Attached{worker}, 30*time.Second
	return newFakeFleet(t, cfg)
}

const twoRanks = `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5757","topic":"kv"},
	"1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5558","replay_endpoint":null}}`

func TestAttachedWorkerGoesAndComesBack(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, twoRanks)
	f := attachedFleet(t, a, "")
	f.start()
	testkit.Settles(t, func() error { // not there at the start: no reason to end
		if !strings.Contains(f.out.String(), "worker 3: not reachable yet") {
			return fmt.Errorf("log: %s", f.out.String())
		}
		return nil
	})
	a.start()
	f.wantEvents("up 3.0 g1", "up 3.1 g1")
	status := f.Workers()[0]
	if status.State != StateReady || !status.Attached || !slices.Equal(status.Ranks, []uint32{0, 1}) || !slices.Equal(status.Models, []string{"base", "adapter"}) {
		t.Errorf("%+v", status)
	}
	if n := len(f.Streams()); n != 2 {
		t.Errorf("%d event streams", n)
	}
	if err := radixtest.Store(f.index, kv.WorkerKey{Worker: 3, Rank: 1}, 0, false, []kv.StoredBlock{{Engine: 1, Local: 2}}); err != nil {
		t.Fatal(err)
	}

	a.server.Close()
	f.ReportFailure(3)
	testkit.Settles(t, func() error {
		if got := f.seen(); len(got) != 4 {
			return fmt.Errorf("events %q", got)
		}
		return nil
	})
	testkit.Settles(t, func() error {
		if n := f.index.Blocks(kv.WorkerKey{Worker: 3, Rank: 1}); n != 0 {
			return fmt.Errorf("%d blocks left", n)
		}
		return nil
	})
	a.start()
	testkit.Settles(t, func() error {
		if got := f.seen(); !slices.Equal(got[4:], []string{"up 3.0 g2", "up 3.1 g2"}) {
			return fmt.Errorf("events %q", got)
		}
		return nil
	})
	f.stop()
	a.server.Close()
}

// notedLoads notes the sources of loads that are to be followed.
type notedLoads struct {
	noLoads
	sources chan probe.LoadSource
}

func (l *notedLoads) FollowLoad(ctx context.Context, s probe.LoadSource, log *slog.Logger, report func(kv.WorkerKey, policy.Published)) {
	l.sources <- s
	l.noLoads.FollowLoad(ctx, s, log, report)
}

func TestAttachedWorkerWithoutEventsIsKnownApproximately(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, "")
	a.start()
	f := attachedFleet(t, a, "")
	loads := make(chan probe.LoadSource, 2)
	f.probe = &notedLoads{noLoads{f.probe}, loads}
	f.start()
	f.wantEvents("up 3.0 g1")
	if got := <-loads; got.URL != "http://"+a.address || got.Socket != "" || got.Apart || !slices.Equal(got.Ranks, []kv.WorkerKey{{Worker: 3}}) {
		t.Errorf("load from %+v", got)
	}
	const warning = "worker 3: its KV cache is known approximately: no KV events of it are followed"
	testkit.Settles(t, func() error {
		if !strings.Contains(f.out.String(), warning) {
			return fmt.Errorf("no warning in:\n%s", f.out.String())
		}
		return nil
	})
	f.stop()
	a.server.Close()
	if n := strings.Count(f.out.String(), warning); n != 1 {
		t.Errorf("warned %d times", n)
	}
}

func TestAttachedWorkerMayNameItsEventsLate(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, "{}")
	a.start()
	f := attachedFleet(t, a, "")
	f.timing = defaultTiming()
	f.timing.healthEvery = fastTiming().healthEvery
	f.start()
	f.wantEvents("up 3.0 g1")
	a.set(func() { a.sources = twoRanks })
	f.wantEvents("up 3.0 g1", "up 3.0 g1", "up 3.1 g1") // now it is known exactly
	f.stop()
	a.server.Close()
}

func TestAttachedWorkerThatHidesItsModelsIsUsedAllTheSame(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, "")
	a.models = http.StatusServiceUnavailable
	a.start()
	f := attachedFleet(t, a, "")
	f.start()
	testkit.Settles(t, func() error {
		if !strings.Contains(f.Workers()[0].LastError, "503 Service Unavailable") {
			return fmt.Errorf("%+v", f.Workers()[0])
		}
		return nil
	})
	f.wantEvents()
	a.set(func() { a.models = http.StatusUnauthorized })
	f.wantEvents("up 3.0 g1")
	f.stop()
	a.server.Close()
}

// TestAServerOfSomeRanksOfADeployment: with --data-parallel-hybrid-lb, vLLM's header names a
// rank from the server's own first one on, and all else by its number in the deployment.
func TestAServerOfSomeRanksOfADeployment(t *testing.T) {
	defer goleak.VerifyNone(t)
	defer http.DefaultClient.CloseIdleConnections()
	a := newAttachedServer(t, `{"2":{"enable_kv_cache_events":true,"endpoint":"tcp://*:5559","replay_endpoint":"tcp://*:5759"},"3":{"enable_kv_cache_events":true,"endpoint":"tcp://*:5560"}}`)
	a.metrics = `vllm:cache_config_info{block_size="64",engine="2",num_gpu_blocks="202"} 1` + "\n" + `vllm:cache_config_info{block_size="64",engine="3",num_gpu_blocks="202"} 1` + "\n"
	a.start()
	f := attachedFleet(t, a, "")
	targets := make(chan kv.Target, 2)
	f.hooks.Up = func(target kv.Target) { f.observed.up(target); targets <- target }
	f.start()
	f.wantEvents("up 3.2 g1", "up 3.3 g1")
	for _, server := range []uint32{0, 1} {
		if target := <-targets; target.Key.Rank != server+2 || target.ServerRank() != server || target.Ranks != 2 || target.TotalBlocks != 100 {
			t.Errorf("rank %d of the server: %+v", server, target)
		}
	}
	if s := f.Workers()[0]; s.KVEvents != "tcp://127.0.0.1:5559" || s.Replay != "tcp://127.0.0.1:5759" || s.Predictions != "" {
		t.Errorf("%+v", s)
	}
	f.stop()
	a.server.Close()
}

// TestRanksThatTheRouterCannotTellApartAreNamed: the server chooses among them by itself.
func TestRanksThatTheRouterCannotTellApartAreNamed(t *testing.T) {
	defer goleak.VerifyNone(t)
	defer http.DefaultClient.CloseIdleConnections()
	a := newAttachedServer(t, `{"0":{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557"}}`)
	a.metrics = `vllm:cache_config_info{block_size="64",engine="0",num_gpu_blocks="202"} 1` + "\n" + `vllm:cache_config_info{block_size="64",engine="1",num_gpu_blocks="202"} 1` + "\n"
	a.start()
	f := attachedFleet(t, a, "")
	f.start()
	f.wantEvents("up 3.0 g1")
	if s := f.Workers()[0]; !strings.Contains(s.Predictions, "2 data-parallel ranks, and the router knows the KV events of 1") {
		t.Errorf("%+v", s)
	}
	if log := f.out.String(); strings.Count(log, "chooses the rank of each request itself") != 1 {
		t.Errorf("log: %s", log)
	}
	f.stop()
	a.server.Close()
}

// TestWhatAWorkerReportsPlacesItsBlocks: of a model with sliding windows only, the interval
// of --prefix-cache-retention-interval says which blocks the hashes of an event are.
func TestWhatAWorkerReportsPlacesItsBlocks(t *testing.T) {
	defer http.DefaultClient.CloseIdleConnections()
	p := testkit.NewFakePublisher(t)
	a := newAttachedServer(t, fmt.Sprintf(`{"0":{"enable_kv_cache_events":true,"endpoint":%q,"replay_endpoint":%q,"topic":"kv"}}`, p.Pub.Endpoint(), p.Router.Endpoint()))
	a.metrics = fmt.Sprintf(`vllm:cache_config_info{block_size="%d",engine="0",num_gpu_blocks="1001",prefix_cache_retention_interval="%d"} 1`+"\n", testkit.BlockSize, 4*testkit.BlockSize)
	a.start()
	stored := testkit.StoredEvent(1, 0, 9) // kept: blocks 3 and 7 before multiples of 4, and block 8 before the prompt's end
	ids := testkit.BlockIDs(1, 0, 9)
	stored["stored"] = append(ids[3:4:4], ids[7], ids[8])
	stored["group_idx"], stored["kv_cache_spec_kind"], stored["kv_cache_spec_sliding_window"] = 0, "sliding_window", testkit.BlockSize
	p.Batch(true, stored)
	f := attachedFleet(t, a, "")
	f.cfg.BlockSize = testkit.BlockSize
	f.start()
	f.wantEvents("up 3.0 g1")
	local := kv.HashBlocks(nil, testkit.PromptTokens(1, 9), testkit.BlockSize, "", "")
	testkit.Settles(t, func() error {
		for blocks, want := range map[int]int{3: 0, 4: 4, 7: 4, 8: 8, 9: 9} {
			found := f.index.Match(local[:blocks], blocks, kv.AllParts, nil)
			if want == 0 && len(found) > 0 && found[0].Blocks > 0 || want > 0 && (len(found) != 1 || found[0].Blocks != want) {
				return fmt.Errorf("of %d blocks: %+v, want %d", blocks, found, want)
			}
		}
		return nil
	})
	f.stop()
	a.server.Close()
}

// TestTheIndexHoldsNoMoreThanAWorkerSaysItsCacheCan: one that never told of a removal
// filled the router's memory.
func TestTheIndexHoldsNoMoreThanAWorkerSaysItsCacheCan(t *testing.T) {
	defer goleak.VerifyNone(t)
	defer http.DefaultClient.CloseIdleConnections()
	t.Run("attached", func(t *testing.T) {
		p := testkit.NewFakePublisher(t)
		a := newAttachedServer(t, fmt.Sprintf(`{"0":{"enable_kv_cache_events":true,"endpoint":%q,"replay_endpoint":%q,"topic":"kv"}}`, p.Pub.Endpoint(), p.Router.Endpoint()))
		a.metrics = "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"4\",engine=\"0\",num_gpu_blocks=\"11\"} 1\n"
		a.start()
		f := attachedFleet(t, a, "")
		f.cfg.BlockSize = testkit.BlockSize
		f.start()
		f.wantEvents("up 3.0 g1")
		p.Batch(true, testkit.StoredEvent(1, 0, 900))
		p.Batch(true, testkit.StoredEvent(2, 0, 900))
		key := kv.WorkerKey{Worker: 3}
		testkit.Settles(t, func() error {
			stats := f.Streams()[key]
			if n := stats.Overflows.Load(); n != 1 || !stats.Cold.Load() || f.index.Blocks(key) > 900 {
				return fmt.Errorf("%d overflows, %d blocks", n, f.index.Blocks(key))
			}
			return nil
		})
		f.stop()
		a.server.Close()
	})
}
