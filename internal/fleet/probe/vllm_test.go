package probe

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/testkit"
)

const twoRanks = `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5757","topic":"kv"},
	"1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5558","replay_endpoint":null}}`

func TestSettingsReplaceWhatAServerReportsOfItsEvents(t *testing.T) {
	answer := strings.ReplaceAll(twoRanks, "tcp://*:5558", "tcp://0.0.0.0:5558")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, answer) }))
	defer server.Close()
	c, at := newClient(t), Server{ID: 3, URL: server.URL, KVEvents: "tcp://events:1"}
	want := []events.Source{
		{Worker: kv.WorkerKey{Worker: 3, Rank: 0}, Endpoint: "tcp://events:1", Replay: "tcp://127.0.0.1:5757", Topic: "kv"},
		{Worker: kv.WorkerKey{Worker: 3, Rank: 1}, Endpoint: "tcp://127.0.0.1:5558"},
	}
	got, err := c.EventSources(t.Context(), at)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Error(diff, err)
	}

	answer = "not JSON"
	at.Replay = "tcp://events:2"
	want = []events.Source{{Worker: kv.WorkerKey{Worker: 3, Rank: 0}, Endpoint: "tcp://events:1", Replay: "tcp://events:2"}}
	got, err = c.EventSources(t.Context(), at)
	if diff := cmp.Diff(want, got); diff != "" || err == nil {
		t.Error(diff, err)
	}
}

// TestRanksAreThoseOfTheDeployment has the forms of vLLM 0.33: /kv_event_sources is keyed by
// the rank in the deployment, as are the ports and the engines of the metrics page
// (engine_ranks_managed in vllm/v1/engine/core_client.py, offset_endpoint_port in
// vllm/distributed/kv_events.py).
func TestRanksAreThoseOfTheDeployment(t *testing.T) {
	sources := func(ranks ...int) string {
		of := map[string]rankEvents{}
		for _, rank := range ranks {
			of[fmt.Sprint(rank)] = rankEvents{Enable: true, Kind: "zmq", Endpoint: fmt.Sprintf("tcp://*:%d", 5557+rank), Replay: fmt.Sprintf("tcp://*:%d", 5757+rank)}
		}
		text, err := json.Marshal(of)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	for name, test := range map[string]struct {
		sources string // empty: no such route
		engines []int  // on the metrics page
		at      Server
		want    string // rank=event port/replay port
	}{
		"internal balancing":              {sources: sources(0, 1), want: "0=5557/5757 1=5558/5758"},
		"hybrid, second node of two":      {sources: sources(2, 3), want: "2=5559/5759 3=5560/5760"},
		"hybrid, endpoint given":          {sources: sources(2, 3), at: Server{KVEvents: "tcp://127.0.0.1:1", Replay: "tcp://127.0.0.1:2"}, want: "2=1/2 3=5560/5760"},
		"external, rank 3":                {sources: sources(3), want: "3=5560/5760"},
		"external, endpoint given":        {sources: sources(3), at: Server{KVEvents: "tcp://127.0.0.1:1"}, want: "3=1/5760"},
		"no route, nothing known":         {engines: []int{0, 1}, want: ""},
		"no route, default port":          {engines: []int{0, 1}, at: Server{EventsPort: 5557}, want: "0=5557/ 1=5558/"},
		"no route, hybrid":                {engines: []int{2, 3}, at: Server{EventsPort: 5557}, want: "2=5559/ 3=5560/"},
		"no route, endpoint of base port": {engines: []int{2, 3}, at: Server{KVEvents: "tcp://127.0.0.1:6000", Replay: "tcp://127.0.0.1:7000"}, want: "2=6002/7002 3=6003/7003"},
		"no route, endpoint of one rank":  {engines: []int{3}, at: Server{KVEvents: "tcp://127.0.0.1:6000"}, want: "3=6000/"},
		"no route, port beyond the last":  {engines: []int{0, 1}, at: Server{KVEvents: "tcp://127.0.0.1:65535"}, want: "0=65535/"},
		"no route, no page":               {at: Server{KVEvents: "tcp://127.0.0.1:6000"}, want: "0=6000/"},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch {
				case r.URL.Path == "/kv_event_sources" && test.sources != "":
					fmt.Fprint(w, test.sources)
				case r.URL.Path == metricsPath && test.engines != nil:
					for _, engine := range test.engines {
						fmt.Fprintf(w, "vllm:cache_config_info{block_size=\"64\",engine=\"%d\",num_gpu_blocks=\"100\"} 1\n", engine)
					}
				default:
					http.NotFound(w, r)
				}
			}))
			defer server.Close()
			c, at := newClient(t), test.at
			at.URL = server.URL
			found, err := c.EventSources(t.Context(), at)
			if NotFound(err) && (at.EventsPort != 0 || at.KVEvents != "") {
				found, err = c.InferEventSources(t.Context(), at)
			}
			if err != nil && !NotFound(err) {
				t.Fatal(err)
			}
			port := func(endpoint string) string {
				_, port, _ := cutLast(endpoint, ":")
				return port
			}
			var got []string
			for _, s := range found {
				got = append(got, fmt.Sprintf("%d=%s/%s", s.Worker.Rank, port(s.Endpoint), port(s.Replay)))
			}
			if all := strings.Join(got, " "); all != test.want {
				t.Errorf("%q, want %q", all, test.want)
			}
		})
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

// TestRanksOfAServerAreBounded: each takes a connection and a goroutine.
func TestRanksOfAServerAreBounded(t *testing.T) {
	reported := map[string]rankEvents{"x": {Enable: true, Endpoint: "tcp://*:1"}, "-1": {Enable: true, Endpoint: "tcp://*:1"}, "4294967296": {Enable: true, Endpoint: "tcp://*:1"}}
	for i := range 3 * kv.MaxRanks {
		reported[fmt.Sprint(i)] = rankEvents{Enable: true, Kind: "zmq", Endpoint: "tcp://*:9"}
	}
	answer, err := json.Marshal(reported)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(answer) }))
	defer server.Close()
	var out testkit.LogBuffer
	c := New(Settings{}, nil, slog.New(slog.NewTextHandler(&out, nil)))
	sources, err := c.EventSources(t.Context(), Server{ID: 3, URL: server.URL})
	if n := len(sources); err != nil || n != kv.MaxRanks || sources[0].Worker.Rank != 0 || sources[n-1].Worker.Rank != kv.MaxRanks-1 {
		t.Errorf("%d sources, %v", n, err)
	}
	if log := out.String(); !strings.Contains(log, "reports 3072 data-parallel ranks: only the first 1024 are used") {
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
	f.Fuzz(func(t *testing.T, text []byte) {
		sources, err := ParseEventSources(text, Server{ID: 3, URL: "http://gpu:8000"})
		if len(sources) > kv.MaxRanks || err != nil && len(sources) > 0 {
			t.Fatalf("%d sources, %v", len(sources), err)
		}
		for i, source := range sources {
			if source.Worker.Worker != 3 || source.Endpoint == "" || i > 0 && source.Worker.Rank <= sources[i-1].Worker.Rank {
				t.Errorf("source %d: %+v", i, source)
			}
		}
	})
}

func TestABufferThatIsNoNumberIsUnknown(t *testing.T) {
	for text, want := range map[string]int{
		`{"buffer_steps":100}`: 100, `{"buffer_steps":1e300}`: math.MaxInt32, `{"buffer_steps":1e400}`: 0, `{"buffer_steps":-1}`: 0, `{"buffer_steps":"100"}`: 0, `{"buffer_steps":null}`: 0, `{}`: 0,
	} {
		source := rankEvents{}
		if err := json.Unmarshal([]byte(text), &source); err != nil || source.batches() != want {
			t.Errorf("%s: %d, %v; want %d", text, source.batches(), err, want)
		}
		info := ServerInfo{EventsConfig: text}
		if got := info.Sources(Server{KVEvents: "tcp://h:1"})[0].Buffer; got != want {
			t.Errorf("SGLang's --kv-events-config %s: %d, want %d", text, got, want)
		}
	}
}
