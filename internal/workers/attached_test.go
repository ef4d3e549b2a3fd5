package workers

import (
	"context"
	"encoding/json"
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

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/radix"
	"kvrouter/internal/testkit"
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
	if err := f.index.Store(kv.WorkerKey{Worker: 3, Rank: 1}, 0, false, []kv.StoredBlock{{Engine: 1, Local: 2}}); err != nil {
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

func TestAttachedWorkerWithoutEventsIsRoutedByLoadAlone(t *testing.T) {
	defer goleak.VerifyNone(t)
	a := newAttachedServer(t, "")
	a.start()
	f := attachedFleet(t, a, "")
	loads := make(chan loadSource, 2)
	f.loads = func(_ loadReader, ctx context.Context, s loadSource, _ func(kv.WorkerKey, policy.Published)) {
		loads <- s
		<-ctx.Done()
	}
	f.start()
	f.wantEvents("up 3.0 g1")
	if got, want := fmt.Sprint(<-loads), fmt.Sprint(loadSource{ranks: []kv.WorkerKey{{Worker: 3}}, page: "http://" + a.address + "/metrics"}); got != want {
		t.Errorf("load from %s, want %s", got, want)
	}
	const warning = "worker 3: publishes no KV events: routed by load only"
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
	f.Timing = defaultTiming()
	f.Timing.HealthEvery = fastTiming().HealthEvery
	f.start()
	f.wantEvents("up 3.0 g1")
	a.set(func() { a.sources = twoRanks })
	f.wantEvents("up 3.0 g1", "up 3.1 g1")
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

func TestFlagsGoBeforeWhatAWorkerSaysOfItsEvents(t *testing.T) {
	a := newAttachedServer(t, strings.ReplaceAll(twoRanks, "tcp://*:5558", "tcp://0.0.0.0:5558"))
	a.start()
	defer a.server.Close()
	f := attachedFleet(t, a, ",kv-events=tcp://events:1")
	want := []events.Source{
		{Worker: kv.WorkerKey{Worker: 3, Rank: 0}, Endpoint: "tcp://events:1", Replay: "tcp://127.0.0.1:5757", Topic: "kv", BlockSize: 64},
		{Worker: kv.WorkerKey{Worker: 3, Rank: 1}, Endpoint: "tcp://127.0.0.1:5558", BlockSize: 64},
	}
	if diff := cmp.Diff(want, f.eventSources(t.Context(), &worker{Spec: f.cfg.Attached[0]})); diff != "" {
		t.Error(diff)
	}

	a.set(func() { a.sources = "not JSON" })
	spec := f.cfg.Attached[0]
	spec.Replay = "tcp://events:2"
	want = []events.Source{{Worker: kv.WorkerKey{Worker: 3, Rank: 0}, Endpoint: "tcp://events:1", Replay: "tcp://events:2", BlockSize: 64}}
	if diff := cmp.Diff(want, f.eventSources(t.Context(), &worker{Spec: spec})); diff != "" {
		t.Error(diff)
	}
}

func TestWildcardsBecomeTheHostOfTheURL(t *testing.T) {
	for _, test := range []struct{ endpoint, host, want string }{
		{"tcp://*:5557", "10.0.0.1", "tcp://10.0.0.1:5557"},
		{"tcp://0.0.0.0:5557", "gpu-1", "tcp://gpu-1:5557"},
		{"tcp://[::]:5557", "fd00::1", "tcp://[fd00::1]:5557"},
		{"tcp://10.0.0.2:5557", "gpu-1", "tcp://10.0.0.2:5557"},
		{"ipc:///run/events", "gpu-1", "ipc:///run/events"},
		{"", "gpu-1", ""},
	} {
		if got := reachable(test.endpoint, test.host); got != test.want {
			t.Errorf("reachable(%q, %q) = %q, want %q", test.endpoint, test.host, got, test.want)
		}
	}
}

// TestRanksOfAWorkerAreBounded: each takes a connection and a goroutine.
func TestRanksOfAWorkerAreBounded(t *testing.T) {
	f := newFakeFleet(t, fakeConfig(t, 0))
	told := map[string]kvEventSource{"x": {Enable: true, Endpoint: "tcp://*:1"}, "-1": {Enable: true, Endpoint: "tcp://*:1"}, "4294967296": {Enable: true, Endpoint: "tcp://*:1"}}
	for i := range 3 * kv.MaxRanks {
		told[fmt.Sprint(i)] = kvEventSource{Enable: true, Kind: "zmq", Endpoint: "tcp://*:9"}
	}
	sources := f.sourcesOf(told, Attached{ID: 3, URL: "http://gpu:8000"})
	if n := len(sources); n != kv.MaxRanks || sources[0].Worker.Rank != 0 || sources[n-1].Worker.Rank != kv.MaxRanks-1 {
		t.Errorf("%d sources", n)
	}
	if log := f.out.String(); !strings.Contains(log, "names 3072 data-parallel ranks: only the first 1024 are followed") {
		t.Errorf("log:\n%s", log)
	}
}

func FuzzEventSources(f *testing.F) {
	for _, text := range []string{
		twoRanks, `{"0":{"enable_kv_cache_events":true,"endpoint":"tcp://[::]:5557"}}`, `{"4294967295":{"enable_kv_cache_events":true,"endpoint":"ipc://x"},"00":{"enable_kv_cache_events":true,"endpoint":"x"}}`,
		`{"0":null}`, `{"0":{"endpoint":5}}`, `null`, `[]`, ``,
	} {
		f.Add([]byte(text))
	}
	fleet := NewFleet(Settings{BlockSize: 64}, nil, radix.NewTree(), Hooks{}, slog.New(slog.DiscardHandler))
	f.Fuzz(func(t *testing.T, text []byte) {
		var told map[string]kvEventSource
		if json.Unmarshal(text, &told) != nil {
			return
		}
		sources := fleet.sourcesOf(told, Attached{ID: 3, URL: "http://gpu:8000"})
		if len(sources) > kv.MaxRanks {
			t.Fatalf("%d sources", len(sources))
		}
		for i, source := range sources {
			if source.Worker.Worker != 3 || source.BlockSize != 64 || source.Endpoint == "" || i > 0 && source.Worker.Rank <= sources[i-1].Worker.Rank {
				t.Errorf("source %d: %+v", i, source)
			}
		}
	})
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
