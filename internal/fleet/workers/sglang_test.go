package workers

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vmihailenco/msgpack/v5"
	"go.uber.org/goleak"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/testkit"
)

// sglangInfo is what a real SGLang 0.5.23 answered to GET /server_info, with some of its
// fields changed.
func sglangInfo(t testing.TB, changes map[string]any) string {
	t.Helper()
	text, err := os.ReadFile("../probe/testdata/sglang_server_info.json")
	if err != nil {
		t.Fatal(err)
	}
	var info map[string]any
	if err := json.Unmarshal(text, &info); err != nil {
		t.Fatal(err)
	}
	maps.Copy(info, changes)
	changed, err := json.Marshal(info)
	if err != nil {
		t.Fatal(err)
	}
	return string(changed)
}

// publisher is the kv_events of a server whose first ports these are; 0: it has none.
func publisher(kv, replay, load, ranks int) map[string]any {
	p := map[string]any{"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": kv, "topic": "kv-events", "block_size": 64, "dp_size": ranks}
	if replay > 0 {
		p["replay_endpoint_port_base"] = replay
	}
	if load > 0 {
		p["load_endpoint_port_base"], p["load_topic"] = load, "load"
	}
	return p
}

// sglangServer is an attached SGLang server. It closes at the end of the test, which
// fails if goroutines are left.
type sglangServer struct {
	*httptest.Server

	mu    sync.Mutex     // guards the rest
	pages map[string]any // what paths answer: a text, or the status of an error
	hangs map[string]bool
	asked map[string]int // times, by path
	let   chan struct{}  // closed at the end
}

func newSGLangServer(t *testing.T, changes map[string]any) *sglangServer {
	t.Helper()
	before := goleak.IgnoreCurrent()
	s := &sglangServer{asked: map[string]int{}, hangs: map[string]bool{}, let: make(chan struct{}), pages: map[string]any{
		"/health": "", "/ping": "", "/server_info": sglangInfo(t, changes),
		"/v1/models": `{"object":"list","data":[{"id":"/models/m","object":"model","owned_by":"sglang","root":"/models/m","parent":null}]}`,
	}}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.asked[r.URL.Path]++
		page, hangs := s.pages[r.URL.Path], s.hangs[r.URL.Path]
		s.mu.Unlock()
		if hangs {
			select {
			case <-s.let:
			case <-r.Context().Done():
			}
			return
		}
		switch page := page.(type) {
		case string:
			fmt.Fprint(w, page)
		case int:
			w.WriteHeader(page)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(func() {
		close(s.let)
		s.Close()
		goleak.VerifyNone(t, before)
	})
	return s
}

func (s *sglangServer) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

func (s *sglangServer) times(path string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[path]
}

// sglangFleet is a fleet of the one attached worker, with id 3; given is what --worker
// says beside its URL.
func sglangFleet(t *testing.T, s *sglangServer, given string) (*fakeFleet, *targets) {
	t.Helper()
	var worker Attached
	if err := worker.UnmarshalText([]byte("id=3,url=" + s.URL + given)); err != nil {
		t.Fatal(err)
	}
	cfg := fakeConfig(t, 0)
	cfg.fleet.Attached = []Attached{worker}
	f := newFakeFleet(t, cfg)
	up := &targets{}
	f.hooks.Up = up.add
	f.hooks.Load = up.load
	return f, up
}

// targets are those that were announced, and their loads.
type targets struct {
	mu    sync.Mutex
	list  []kv.Target
	loads map[kv.WorkerKey]policy.Published
}

func (t *targets) add(target kv.Target) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.list = append(t.list, target)
}

func (t *targets) load(key kv.WorkerKey, p policy.Published) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.loads == nil {
		t.loads = map[kv.WorkerKey]policy.Published{}
	}
	p.At = time.Time{}
	t.loads[key] = p
}

// want waits for so many targets.
func (t *targets) want(test *testing.T, n int) []kv.Target {
	test.Helper()
	var list []kv.Target
	testkit.Settles(test, func() error {
		t.mu.Lock()
		defer t.mu.Unlock()
		if list = slices.Clone(t.list); len(list) != n {
			return fmt.Errorf("%d targets, want %d: %+v", len(list), n, list)
		}
		return nil
	})
	return list
}

// wantLoad waits until a rank's load is that.
func (t *targets) wantLoad(test *testing.T, rank uint32, want policy.Published) {
	test.Helper()
	testkit.Settles(test, func() error {
		t.mu.Lock()
		defer t.mu.Unlock()
		if got, ok := t.loads[kv.WorkerKey{Worker: 3, Rank: rank}]; !ok || got != want {
			return fmt.Errorf("load of rank %d: %+v, want %+v", rank, got, want)
		}
		return nil
	})
}

func TestSGLangWorkerShowsWhatIsKnownOfItsPredictions(t *testing.T) {
	s := newSGLangServer(t, map[string]any{"kv_events": nil, "uses_mamba_radix_cache": true, "speculative_algorithm": "EAGLE"})
	f, up := sglangFleet(t, s, "")
	f.probe = noLoads{f.probe}
	f.start()
	up.want(t, 1)
	status := f.Workers()[0]
	if !strings.HasPrefix(status.Predictions, "upper bound: ") || status.Speculation != "EAGLE" {
		t.Errorf("%+v", status)
	}
	f.stop()
}

// TestSGLangIsKnownByItsURLAlone: it was followed as a vLLM server that reports nothing.
func TestSGLangIsKnownByItsURLAlone(t *testing.T) {
	for _, test := range []struct {
		name        string
		changes     map[string]any
		ranks       int
		blocks      int   // of the cache
		block       int32 // tokens; 0: 16
		pass        int
		events      string // endpoint of rank 0, "HOST" for the server's
		replay      string
		lastEvents  string // of the last rank
		lastReplay  string
		streams     int
		wantsDisagg kv.Disagg
	}{
		{
			name: "as captured", ranks: 1, blocks: 20000 / 16, pass: 4096, streams: 1,
			events: "tcp://HOST:35557", replay: "tcp://HOST:36557", lastEvents: "tcp://HOST:35557", lastReplay: "tcp://HOST:36557",
		},
		{
			name: "two replicas", changes: map[string]any{"dp_size": 2, "kv_events": publisher(5557, 5757, 0, 2)}, ranks: 2, block: 64, blocks: 20000 / 64, pass: 4096, streams: 2,
			events: "tcp://HOST:5557", replay: "tcp://HOST:5757", lastEvents: "tcp://HOST:5558", lastReplay: "tcp://HOST:5758",
		},
		{name: "two replicas without events", changes: map[string]any{"dp_size": 2, "kv_events": nil}, ranks: 2, blocks: 20000 / 16, pass: 4096},
		{name: "ranks of attention", changes: map[string]any{"dp_size": 1, "attn_dp_size": 4, "kv_events": nil}, ranks: 4, blocks: 20000 / 16, pass: 4096},
		{name: "ranks of attention in an older version", changes: map[string]any{"dp_size": 4, "attn_dp_size": nil, "enable_dp_attention": true, "kv_events": nil}, ranks: 4, blocks: 20000 / 16, pass: 4096},
		{name: "ranks of attention reported twice", changes: map[string]any{"dp_size": 4, "attn_dp_size": 4, "enable_dp_attention": true, "kv_events": nil}, ranks: 4, blocks: 20000 / 16, pass: 4096},
		{
			name: "a host of its own and no replay", changes: map[string]any{"kv_events": map[string]any{"publisher": "zmq", "endpoint_host": "10.0.0.7", "endpoint_port_base": 5557, "topic": "", "block_size": 64, "dp_size": 1}},
			ranks: 1, block: 64, blocks: 20000 / 64, pass: 4096, streams: 1, events: "tcp://10.0.0.7:5557", lastEvents: "tcp://10.0.0.7:5557",
		},
		{name: "numbers that cannot be", changes: map[string]any{"dp_size": -3, "attn_dp_size": -1, "kv_events": nil, "max_total_num_tokens": -5, "chunked_prefill_size": -1}, ranks: 1},
		{name: "fields of other types", changes: map[string]any{"dp_size": "many", "max_total_num_tokens": 1e30, "chunked_prefill_size": nil, "kv_events": "off"}, ranks: 1},
		{name: "a publisher of another kind", changes: map[string]any{"kv_events": map[string]any{"publisher": "null", "endpoint_host": "*", "endpoint_port_base": 5557}}, ranks: 1, blocks: 20000 / 16, pass: 4096},
		{name: "a host that is none", changes: map[string]any{"kv_events": map[string]any{"publisher": "zmq", "endpoint_host": "a b", "endpoint_port_base": 5557}}, ranks: 1, blocks: 20000 / 16, pass: 4096},
		{
			name: "a decode server", changes: map[string]any{"disaggregation_mode": "decode", "kv_events": nil}, ranks: 1, blocks: 20000 / 16, pass: 4096,
			wantsDisagg: kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindSGLang},
		},
		{
			name: "a prefill server", changes: map[string]any{"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9001, "kv_events": nil}, ranks: 1, blocks: 20000 / 16, pass: 4096,
			wantsDisagg: kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: kv.Bootstrap{Host: "127.0.0.1", Port: 9001}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSGLangServer(t, test.changes)
			f, up := sglangFleet(t, s, "")
			f.probe = noLoads{f.probe}
			f.start()
			for rank, target := range up.want(t, test.ranks) {
				want := kv.Target{
					Key: kv.WorkerKey{Worker: 3, Rank: uint32(rank)}, URL: s.URL, Engine: kv.EngineSGLang, Ranks: test.ranks, Generation: 1,
					Models: []string{"/models/m"}, MaxBatchedTokens: int32(test.pass), TotalBlocks: test.blocks, Disagg: test.wantsDisagg, BlockSize: max(test.block, 16),
				}
				switch {
				case test.wantsDisagg.Role == kv.RoleDecode: // it keeps no prompts
					want.Known = kv.LoadOnly
				case test.streams == 0:
					want.Known = kv.Approximate
				}
				if diff := cmp.Diff(want, target); diff != "" {
					t.Error(diff)
				}
			}
			host := func(endpoint string) string { return strings.Replace(endpoint, "HOST", "127.0.0.1", 1) }
			status := f.Workers()[0]
			if status.Engine != kv.EngineSGLang || status.KVEvents != host(test.events) || status.Replay != host(test.replay) || len(status.Ranks) != test.ranks {
				t.Errorf("%+v", status)
			}
			sources := map[uint32]events.Source{}
			for key, stream := range streamsOf(f.Fleet) {
				sources[key.Rank] = stream
			}
			if len(sources) != test.streams {
				t.Errorf("%d event streams, want %d", len(sources), test.streams)
			}
			if last := sources[uint32(test.ranks-1)]; last.Endpoint != host(test.lastEvents) || last.Replay != host(test.lastReplay) {
				t.Errorf("the last rank's events: %+v", last)
			}
			if s.times("/kv_event_sources") != 0 || s.times("/server_info") != 1 {
				t.Errorf("asked %v", s.asked)
			}
			if log := f.out.String(); strings.Contains(log, "api_key") {
				t.Errorf("log:\n%s", log)
			}
			f.stop()
		})
	}
}

// TestRanksHaveCachesOfTheirOwnSize: what the server reports of itself is rank 0's.
func TestRanksHaveCachesOfTheirOwnSize(t *testing.T) {
	s := newSGLangServer(t, map[string]any{"dp_size": 3, "kv_events": nil, "max_total_num_tokens": 3392})
	s.set(func() {
		s.pages["/v1/loads"] = `{"loads":[{"dp_rank":1,"max_total_num_tokens":5952},{"dp_rank":0,"max_total_num_tokens":3392},{"dp_rank":-1,"max_total_num_tokens":1},{"dp_rank":2,"max_total_num_tokens":-1}]}`
	})
	f, up := sglangFleet(t, s, "")
	f.probe = noLoads{f.probe}
	f.start()
	var got []int
	for _, target := range up.want(t, 3) {
		got = append(got, target.TotalBlocks)
	}
	if want := []int{3392 / 16, 5952 / 16, 3392 / 16}; !slices.Equal(got, want) {
		t.Errorf("blocks %d, want %d", got, want)
	}
	f.stop()
}

// noLoads follows no load.
type noLoads struct{ prober }

func (noLoads) FollowCounters(ctx context.Context, _ probe.LoadSource, _ *slog.Logger) {
	<-ctx.Done()
}

func (noLoads) FollowLoad(ctx context.Context, _ probe.LoadSource, _ *slog.Logger, _ func(kv.WorkerKey, policy.Published)) {
	<-ctx.Done()
}

// impatient waits for less long than a Client.
type impatient struct{ prober }

func (p impatient) ServerInfo(ctx context.Context, s probe.Server) (*probe.ServerInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	return p.prober.ServerInfo(ctx, s)
}

// testPublisher is a PUB socket on a port of the test's choice.
type testPublisher struct{ *zmq.Publisher }

func listenAt(t *testing.T, port int) *testPublisher {
	t.Helper()
	p, err := zmq.NewPublisher(fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return &testPublisher{p}
}

// loadStat is a load message as SGLang 0.5.23 sends it.
func loadStat(running, waiting, used, capacity int) string {
	text, err := msgpack.Marshal([]any{"LoadStat", running, waiting, used, capacity, 0, 0, 0, 8, 63, 2060476})
	if err != nil {
		panic(err) // of the test's own numbers
	}
	return string(text)
}

// shown is a page that an SGLang server with two ranks has shown.
func shown(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("../probe/testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// streamsOf returns the sources of the event streams that run.
func streamsOf(f *Fleet) map[kv.WorkerKey]events.Source {
	sources := map[kv.WorkerKey]events.Source{}
	for _, w := range f.all() {
		w.mu.Lock()
		for key, stream := range w.streams {
			sources[key] = stream.Src
		}
		w.mu.Unlock()
	}
	return sources
}

// TestWhatIsNotLearnedIsSaidWithItsRemedy: a server without events was routed to blindly,
// and nothing said so.
func TestWhatIsNotLearnedIsSaidWithItsRemedy(t *testing.T) {
	const silent, noReplay, keepsNone = "worker 3: its KV cache is known approximately: no KV events", "worker 3: its KV events have no replay", "worker 3: routed by load only: its engine keeps no prompts"
	all := []string{silent, noReplay, keepsNone}
	for _, test := range []struct {
		name    string
		changes map[string]any
		given   string
		says    string // the only one of all; empty: none
		remedy  string
	}{
		{"all is there", map[string]any{"kv_events": publisher(5557, 5757, 5657, 1)}, "", "", ""},
		{"events are off", map[string]any{"kv_events": nil, "kv_events_config": nil}, "", silent, `start it with the arguments that kvrouter doctor prints`},
		{"events are off, and given", map[string]any{"kv_events": nil, "kv_events_config": nil}, ",kv-events=tcp://h:1,replay=tcp://h:2", "", ""},
		{"not over TCP", map[string]any{"kv_events": nil}, "", silent, "names no publisher over TCP"},
		{"no replay", map[string]any{"kv_events": publisher(5557, 0, 0, 1)}, "", noReplay, `\"replay_endpoint\":\"tcp://*:5757\"`},
		{"replay given", map[string]any{"kv_events": publisher(5557, 0, 0, 1)}, ",replay=tcp://h:2", "", ""},
		{"decode", map[string]any{"disaggregation_mode": "decode", "kv_events": publisher(5557, 5757, 0, 1)}, "", keepsNone, "--disaggregation-decode-enable-radix-cache"},
		{"decode that keeps prompts", map[string]any{"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": true, "kv_events": publisher(5557, 5757, 0, 1)}, "", "", ""},
		{"no cache", map[string]any{"disable_radix_cache": true, "kv_events": publisher(5557, 5757, 0, 1)}, "", keepsNone, "without --disable-radix-cache"},
		{"another page size", map[string]any{"page_size": 7, "kv_events": publisher(5557, 5757, 5657, 1)}, "", "", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSGLangServer(t, test.changes)
			f, up := sglangFleet(t, s, test.given)
			f.probe = noLoads{f.probe}
			f.start()
			up.want(t, 1)
			testkit.Eventually(t, 20*time.Second, "some looks at its health", func() bool { return s.times("/ping") > 5 })
			f.stop()
			log := f.out.String()
			for _, text := range all {
				want := 0
				if text == test.says {
					want = 1
				}
				if n := strings.Count(log, text); n != want {
					t.Errorf("%q is said %d times, want %d:\n%s", text, n, want, log)
				}
			}
			if !strings.Contains(log, test.remedy) {
				t.Errorf("no remedy %q in\n%s", test.remedy, log)
			}
		})
	}
}

// TestBothRanksAreFollowed: the second rank's blocks and load were not seen, and requests
// were pinned to none.
func TestBothRanksAreFollowed(t *testing.T) {
	base := testkit.FreePorts(t, 6)
	s := newSGLangServer(t, map[string]any{"dp_size": 2, "kv_events": publisher(base, base+2, base+4, 2)})
	load := func(rank int) *testPublisher { return listenAt(t, base+4+rank) }
	loads := []*testPublisher{load(0), load(1)}
	f, up := sglangFleet(t, s, "")
	f.start()
	for rank, target := range up.want(t, 2) {
		if target.Key.Rank != uint32(rank) || target.Ranks != 2 {
			t.Errorf("%+v", target)
		}
	}
	publish := func(rank int, payload string) {
		testkit.Eventually(t, 20*time.Second, "subscribed", func() bool { return loads[rank].Subscribers() > 0 })
		loads[rank].Publish([]byte("load"), []byte("\x00\x00\x00\x00\x00\x00\x00\x01"), []byte(payload))
	}
	publish(0, loadStat(1, 7, 100, 400))
	publish(1, loadStat(2, 0, 300, 400))
	up.wantLoad(t, 0, policy.Published{Running: 1, Waiting: 7, KVUsage: 0.25})
	up.wantLoad(t, 1, policy.Published{Running: 2, KVUsage: 0.75})
	if n := len(f.Streams()); n != 2 {
		t.Errorf("%d event streams", n)
	}
	f.stop()
}

// TestPagesStandInForALoadSocketThatIsNotThere: its bind may fail, and the server names
// its port all the same.
func TestPagesStandInForALoadSocketThatIsNotThere(t *testing.T) {
	dead := testkit.FreePorts(t, 1)
	for _, test := range []struct {
		name  string
		load  int // port that the server names
		pages map[string]any
		lags  bool
	}{
		{"metrics for a socket", dead, map[string]any{"/metrics": shown(t, "sglang_metrics.txt")}, false},
		{"metrics", 0, map[string]any{"/metrics": shown(t, "sglang_metrics.txt")}, false},
		{"list of loads", 0, map[string]any{"/v1/loads": shown(t, "sglang_loads.json")}, true},
		{"list of loads, a page that lacks them", 0, map[string]any{"/metrics": "python_info 1\n", "/v1/loads": shown(t, "sglang_loads.json")}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSGLangServer(t, map[string]any{"dp_size": 2, "kv_events": publisher(1, 0, test.load, 2)})
			s.set(func() { maps.Copy(s.pages, test.pages) })
			f, up := sglangFleet(t, s, "")
			f.start()
			up.wantLoad(t, 0, policy.Published{Running: 1, Waiting: 12, KVUsage: 0.25})
			up.wantLoad(t, 1, policy.Published{Running: 3, KVUsage: 0.5})
			if test.lags {
				testkit.Eventually(t, 20*time.Second, "said that it lags", func() bool { return strings.Contains(f.out.String(), "/v1/loads, which lags") })
			} else if strings.Contains(f.out.String(), "lags") {
				t.Error("said that it lags")
			}
			f.stop()
		})
	}
}

// TestALookAtSGLangCostsNoToken: its /health computes one, and takes a second for it.
func TestALookAtSGLangCostsNoToken(t *testing.T) {
	s := newSGLangServer(t, map[string]any{"kv_events": nil})
	f, up := sglangFleet(t, s, "")
	f.probe = noLoads{f.probe}
	f.start()
	up.want(t, 1)
	testkit.Eventually(t, 20*time.Second, "looks at /ping", func() bool { return s.times("/ping") > 20 })
	if n := s.times("/health"); n != 1 {
		t.Errorf("asked for /health %d times, want once", n)
	}
	s.set(func() { s.pages["/ping"] = http.StatusServiceUnavailable })
	f.wantState(StateDown, "503")
	s.set(func() { s.pages["/ping"] = nil }) // an older version
	f.wantState(StateReady, "")
	f.stop()
}

// TestSlowHealthOfSGLangKeepsItNotOut: on a busy machine the token takes longer than a
// look may.
func TestSlowHealthOfSGLangKeepsItNotOut(t *testing.T) {
	s := newSGLangServer(t, map[string]any{"kv_events": nil})
	s.set(func() { s.hangs["/health"] = true })
	f, up := sglangFleet(t, s, "")
	f.probe = noLoads{f.probe}
	f.timing.healthLimit = 50 * time.Millisecond
	f.start()
	up.want(t, 1)
	f.stop()
}

// TestHungSchedulerIsFound: the HTTP side of the server answers /ping all the same.
func TestHungSchedulerIsFound(t *testing.T) {
	s := newSGLangServer(t, map[string]any{"kv_events": nil})
	f, up := sglangFleet(t, s, "")
	f.probe = noLoads{f.probe}
	f.timing.engineEvery, f.timing.engineLimit = 10*time.Millisecond, 100*time.Millisecond
	f.start()
	up.want(t, 1)
	testkit.Eventually(t, 20*time.Second, "looks at its schedulers", func() bool { return s.times("/server_info") > 3 })
	s.set(func() { s.hangs["/server_info"] = true })
	f.wantState(StateDown, "its scheduler has not answered for 100ms")
	s.set(func() { s.hangs["/server_info"] = false })
	f.wantState(StateReady, "")
	f.stop()
}

// TestSchedulersThatSpeakAreNotAsked: each look would cost a round through all of them.
func TestSchedulersThatSpeakAreNotAsked(t *testing.T) {
	port := testkit.FreePorts(t, 1)
	pub := listenAt(t, port)
	s := newSGLangServer(t, map[string]any{"kv_events": publisher(1, 0, port, 1)})
	f, up := sglangFleet(t, s, "")
	f.timing.engineEvery, f.timing.engineLimit = time.Second, 20*time.Second
	f.start()
	up.want(t, 1)
	testkit.Eventually(t, 20*time.Second, "subscribed", func() bool { return pub.Subscribers() > 0 })
	began, asked := time.Now(), s.times("/server_info")
	testkit.Eventually(t, 20*time.Second, "some looks", func() bool {
		pub.Publish([]byte("load"), make([]byte, 8), []byte(loadStat(1, 2, 3, 4)))
		return time.Since(began) > 4*time.Second
	})
	if n := s.times("/server_info") - asked; n > 1 { // before the first message, perhaps
		t.Errorf("asked %d times in 4 s", n)
	}
	f.stop()
}

// TestSGLangWhoseEngineIsBusyIsAskedAgain: it answers between two passes only, and
// without its answer it would be taken for another engine.
func TestSGLangWhoseEngineIsBusyIsAskedAgain(t *testing.T) {
	s := newSGLangServer(t, nil)
	s.set(func() { s.hangs["/server_info"] = true })
	f, up := sglangFleet(t, s, "")
	f.probe = noLoads{f.probe}
	f.probe = impatient{f.probe}
	f.start()
	testkit.Eventually(t, 20*time.Second, "asked again", func() bool { return s.times("/server_info") > 2 })
	up.want(t, 0)
	s.set(func() { s.hangs["/server_info"] = false })
	if target := up.want(t, 1)[0]; target.Engine != kv.EngineSGLang {
		t.Errorf("%+v", target)
	}
	f.stop()
}

// TestRouterWhoseSGLangWorkersComeLaterIsFollowedAnew: while it has none it says
// nothing of SGLang.
func TestRouterWhoseSGLangWorkersComeLaterIsFollowedAnew(t *testing.T) {
	s := newSGLangServer(t, nil)
	sglangs := s.pages["/v1/models"]
	s.set(func() {
		s.pages["/server_info"] = http.StatusForbidden
		s.pages["/v1/models"] = `{"object":"list","data":[{"id":"m","object":"model","owned_by":"kvrouter"}]}`
	})
	f, up := sglangFleet(t, s, "")
	f.probe = noLoads{f.probe}
	f.timing.modelsEvery = f.timing.healthEvery
	f.start()
	if target := up.want(t, 1)[0]; target.Engine != kv.EngineVLLM {
		t.Fatalf("%+v", target)
	}
	s.set(func() { s.pages["/v1/models"] = sglangs })
	if target := up.want(t, 2)[1]; target.Engine != kv.EngineSGLang || target.Generation != 2 {
		t.Errorf("%+v", target)
	}
	f.stop()
}

// TestRegisteredSGLangIsKnown: what was said of it stays; the rest it tells itself.
func TestRegisteredSGLangIsKnown(t *testing.T) {
	base := testkit.FreePorts(t, 2)
	pub := listenAt(t, base+1)
	s := newSGLangServer(t, map[string]any{"dp_size": 2, "kv_events": publisher(1, 0, base, 2)})
	f := newFakeFleet(t, fakeConfig(t, 0))
	up := &targets{}
	f.hooks.Up, f.hooks.Load = up.add, up.load
	f.start()
	f.register(Registration{ID: 3, URL: s.URL, Model: "as registered", Ranks: []uint32{1}, TotalBlocks: 7})
	list := up.want(t, 2)
	if first := list[0]; first.Engine != kv.EngineVLLM || first.Ranks != 1 {
		t.Errorf("before it was asked: %+v", first)
	}
	want := kv.Target{
		Key: kv.WorkerKey{Worker: 3, Rank: 1}, URL: s.URL, Engine: kv.EngineSGLang, Ranks: 2, Generation: 1,
		Models: []string{"as registered"}, MaxBatchedTokens: 4096, TotalBlocks: 7, BlockSize: int32(f.cfg.BlockSize), Known: kv.Approximate,
	}
	if diff := cmp.Diff(want, list[1]); diff != "" {
		t.Error(diff)
	}
	testkit.Eventually(t, 20*time.Second, "subscribed", func() bool { return pub.Subscribers() > 0 })
	pub.Publish([]byte("load"), make([]byte, 8), []byte(loadStat(1, 5, 1, 2)))
	up.wantLoad(t, 1, policy.Published{Running: 1, Waiting: 5, KVUsage: 0.5})
	f.stop()
}

// TestLoadOfARegisteredRankIsItsOwn, not that of all ranks of its server.
func TestLoadOfARegisteredRankIsItsOwn(t *testing.T) {
	s := newSGLangServer(t, map[string]any{"dp_size": 2, "kv_events": publisher(1, 0, 0, 2)})
	s.set(func() { s.pages["/metrics"] = shown(t, "sglang_metrics.txt") })
	f := newFakeFleet(t, fakeConfig(t, 0))
	up := &targets{}
	f.hooks.Up, f.hooks.Load = up.add, up.load
	f.start()
	f.register(Registration{ID: 3, URL: s.URL, Model: "m", Ranks: []uint32{1}})
	up.want(t, 2)
	up.wantLoad(t, 1, policy.Published{Running: 3, KVUsage: 0.5})
	f.stop()
}

// TestRegisteredWorkerWithoutServerInfoHasItsPart: what fails to tell it is no SGLang
// server.
func TestRegisteredWorkerWithoutServerInfoHasItsPart(t *testing.T) {
	s := newSGLangServer(t, nil)
	s.set(func() { s.pages["/server_info"] = http.StatusInternalServerError })
	f := newFakeFleet(t, fakeConfig(t, 0))
	up := &targets{}
	f.hooks.Up, f.probe = up.add, noLoads{f.probe}
	f.start()
	f.register(Registration{ID: 3, URL: s.URL, Model: "m", Ranks: []uint32{0}, Disagg: kv.Disagg{Role: kv.RolePrefill}})
	if target := up.want(t, 2)[1]; target.Kind != kv.KindNIXL || target.Engine != kv.EngineVLLM {
		t.Errorf("%+v", target)
	}
	f.stop()
}
