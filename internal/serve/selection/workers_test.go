package selection

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/testkit/routertest"
)

// newRegistry returns what the router port answers. Its fleet does not run: no
// worker can be complete.
func newRegistry(t *testing.T, hop web.Hop) (handler http.Handler, ask func(method, path, body string) (int, string)) {
	t.Helper()
	router := routertest.New(t, "kv", 0)
	log := slog.New(slog.DiscardHandler)
	fleet := workers.New(workers.Settings{Hop: hop}, workers.Deps{Index: routertest.Index(router), Log: log})
	handler = New(Settings{KVEvents: true, BlockSize: 4, Hop: hop}, testDeps(router, fleet)).Handler()
	return handler, func(method, path, body string) (int, string) {
		w := httptest.NewRecorder()
		request := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
		request.Host = "127.0.0.1:7000"
		request.Header.Set("Content-Type", "application/json")
		handler.ServeHTTP(w, request)
		return w.Code, w.Body.String()
	}
}

func TestKeysOfRegisteredWorkersAreNeverShown(t *testing.T) {
	_, ask := newRegistry(t, "")
	const spec = `{"worker_id":1,"model_name":"m","endpoint":"http://127.0.0.1:1","api_key":"sesame"}`
	for _, step := range []struct{ method, path, body string }{
		{"POST", "/workers", spec},
		{"GET", "/workers", ""},
		{"PATCH", "/workers/1", `{"total_kv_blocks":5,"api_key":"sesame 2"}`},
		{"GET", "/ready", ""},
		{"GET", "/loads", ""},
		{"DELETE", "/workers/1", ""},
		{"POST", "/workers", `{"worker_id":2,"api_key":["sesame"]}`},
		{"POST", "/workers", `{"worker_id":2,"api_key":"sesame\n"}`},
		{"POST", "/workers", `{"worker_id":2,"endpoint":"http://user:sesame@h:1"}`},
	} {
		if status, answer := ask(step.method, step.path, step.body); strings.Contains(answer, "sesame") || strings.Contains(answer, "***") {
			t.Errorf("%s %s: %d %s", step.method, step.path, status, answer)
		}
	}
}

func TestKeyStaysWithItsAddress(t *testing.T) {
	text := func(s string) *string { return &s }
	key := func(s string) *kv.Secret { k := kv.Secret(s); return &k }
	registered := workerSpec{Endpoint: text("http://a"), APIKey: key("of a")}
	for _, test := range []struct {
		name  string
		patch workerSpec
		want  string
	}{
		{"something else changes", workerSpec{ModelName: text("m")}, "of a"},
		{"the same address", workerSpec{Endpoint: text("http://a")}, "of a"},
		{"another address", workerSpec{Endpoint: text("http://b")}, ""},
		{"another address and key", workerSpec{Endpoint: text("http://b"), APIKey: key("of b")}, "of b"},
		{"another key", workerSpec{APIKey: key("new")}, "new"},
	} {
		if got := Given(registered.patched(test.patch).APIKey, ""); string(got) != test.want {
			t.Errorf("%s: %q, want %q", test.name, string(got), test.want)
		}
	}
}

func TestRegistrationsAreBounded(t *testing.T) {
	_, ask := newRegistry(t, "")
	many := map[string]string{}
	for i := range sparedRanks + 1 {
		many[fmt.Sprint(i)] = "tcp://h:1"
	}
	endpoints, err := json.Marshal(many)
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", 5000)
	for _, test := range []struct{ body, says string }{
		{`"model_name":"` + long + `"`, "model_name"},
		{`"model_name":"a\nb"`, "model_name"},
		{`"routing_group":"` + long + `"`, "routing_group"},
		{`"bootstrap_host":"` + long + `"`, "bootstrap_host"},
		{`"api_key":"` + long + `"`, "api_key"},
		{`"endpoint":"http://` + long + `"`, "endpoint"},
		{`"kv_events_endpoint":"tcp://` + long + `:1"`, "kv_events_endpoint"},
		{`"kv_events_endpoint":"ipc:///run/x"`, "ipc endpoints are for --worker only"},
		{`"kv_events_endpoints":{"0":"ipc:///run/x"}`, "ipc endpoints are for --worker only"},
		{`"replay_endpoint":"ipc:///run/x"`, "ipc endpoints are for --worker only"},
		{`"kv_events_endpoints":` + string(endpoints), "kv_events_endpoints has 65 ranks"},
		{`"kv_events_endpoints":{"7":"tcp://` + long + `:1"}`, "kv_events_endpoints[7]"},
		{`"max_num_batched_tokens":-1`, "max_num_batched_tokens"},
		{`"max_num_batched_tokens":4294967296`, "max_num_batched_tokens"},
		{`"total_kv_blocks":1e18`, "total_kv_blocks"},
		{`"block_size":-1`, "block_size"},
		{`"block_size":2147483648`, "block_size"},
		{`"data_parallel_size":1025`, "data_parallel_size"},
		{`"data_parallel_start_rank":4294967295`, "data_parallel_size"},
	} {
		if status, answer := ask("POST", "/workers", `{"worker_id":1,`+test.body+`}`); status/100 != 4 || !strings.Contains(answer, test.says) {
			t.Errorf("%.60s: %d %.200s", test.body, status, answer)
		}
	}
	if _, answer := ask("GET", "/workers", ""); answer != "[]" {
		t.Errorf("registered after all: %.200s", answer)
	}
}

func TestRanksOfAllWorkersAreBoundedTogether(t *testing.T) {
	_, ask := newRegistry(t, "")
	add := func(id, ranks int) int {
		status, _ := ask("POST", "/workers", fmt.Sprintf(`{"worker_id":%d,"data_parallel_size":%d}`, id, ranks))
		return status
	}
	for id := range maxRanksTogether / maxRanks {
		if status := add(id, maxRanks); status != http.StatusCreated {
			t.Fatalf("worker %d: %d", id, status)
		}
	}
	if status, answer := ask("POST", "/workers", `{"worker_id":9,"data_parallel_size":2}`); status != http.StatusServiceUnavailable || !strings.Contains(answer, "4096") {
		t.Errorf("more ranks: %d %s", status, answer)
	}
	if status := add(9, 1); status != http.StatusCreated {
		t.Errorf("a worker with one rank: %d", status)
	}
	if status := add(0, maxRanks); status != http.StatusCreated {
		t.Errorf("the same again: %d", status)
	}
	if status, _ := ask("DELETE", "/workers/0", ""); status != http.StatusOK {
		t.Errorf("taken out: %d", status)
	}
	if status := add(9, maxRanks); status != http.StatusCreated {
		t.Errorf("in its place: %d", status)
	}
}

func TestTheRouterIsNotItsOwnWorker(t *testing.T) {
	hop := web.NewHop()
	handler, ask := newRegistry(t, hop)
	self := httptest.NewServer(handler)
	defer self.Close()
	body := fmt.Sprintf(`{"worker_id":1,"endpoint":%q}`, self.URL)
	if status, answer := ask("POST", "/workers", body); status != http.StatusBadRequest || !strings.Contains(answer, "address of this router itself") {
		t.Errorf("registered: %d %s", status, answer)
	}
	if status, answer := ask("POST", "/workers", `{"worker_id":1}`); status != http.StatusCreated {
		t.Fatalf("%d %s", status, answer)
	}
	if status, answer := ask("PATCH", "/workers/1", fmt.Sprintf(`{"endpoint":%q}`, self.URL)); status != http.StatusBadRequest {
		t.Errorf("changed: %d %s", status, answer)
	}
}

func FuzzRegistration(f *testing.F) {
	for _, seed := range []string{
		`{"worker_id":3,"model_name":"m","endpoint":"http://h:8100","block_size":4,"kv_events_endpoint":"tcp://h:5557","replay_endpoint":"tcp://h:5757"}`,
		`{"worker_id":3,"block_size":4,"endpoint":"http://h","kv_events_endpoints":{"2":"tcp://h:1","3":"tcp://h:2"},"data_parallel_start_rank":2,"data_parallel_size":2}`,
		`{"worker_id":18446744073709551615,"data_parallel_size":4294967295,"data_parallel_start_rank":4294967295}`,
		`{"worker_id":1,"kv_events_endpoint":"tcp://h:65535","data_parallel_size":3}`,
		`{"worker_id":1,"api_key":"k","role":"prefill","kind":"sglang","bootstrap_host":"h","bootstrap_port":1}`,
		`{"worker_id":1,"role":1}`, `{"worker_id":null}`, `[]`, `{"kv_events_endpoints":{"x":"y"}}`,
	} {
		f.Add([]byte(seed))
	}
	settings := Settings{KVEvents: true, BlockSize: 4, CountsPasses: true}
	f.Fuzz(func(t *testing.T, body []byte) {
		var query struct {
			ID *uint64 `json:"worker_id"`
			workerSpec
		}
		if json.Unmarshal(body, &query) != nil {
			return
		}
		model, group := "m", events.DefaultGroup
		if query.ModelName == nil {
			query.ModelName = &model
		}
		if query.RoutingGroup == nil {
			query.RoutingGroup = &group
		}
		r, missing, err := registeredWorker{id: Given(query.ID, 0), spec: query.workerSpec}.registration(settings)
		if err != nil {
			return
		}
		if len(r.Ranks) > maxRanks || len(r.Sources) > len(r.Ranks) || r.TotalBlocks < 0 || r.MaxBatchedTokens < 0 || !slices.IsSorted(r.Ranks) {
			t.Errorf("%s: %+v", body, r)
		}
		if len(missing) == 0 && (r.URL == "" || len(r.Ranks) == 0 || len(r.Sources) != len(r.Ranks)) {
			t.Errorf("%s is complete: %+v", body, r)
		}
		shown, err := json.Marshal(query.shown())
		if err != nil || strings.Contains(string(shown), "api_key") {
			t.Errorf("%s is shown as %s, %v", body, shown, err)
		}
	})
}

// TestWorkersAreShownUnderNamesThatTheyTake: an attached one was shown under the router's
// --served-model-name, which it refuses.
func TestWorkersAreShownUnderNamesThatTheyTake(t *testing.T) {
	for _, test := range []struct {
		flag   string
		serves []string
		want   string
	}{
		{"m", []string{"/models/m"}, "/models/m"},
		{"m", []string{"base", "m"}, "m"},
		{"m", nil, "m"},
		{"", []string{"base", "adapter"}, "base"},
		{"", nil, events.DefaultModel},
	} {
		deps := testDeps(routertest.New(t, "kv", 0), nil)
		deps.Partitions = NewPartitions(test.flag, deps.Models)
		s := New(Settings{}, deps)
		if got := *s.specOf(workers.Status{Models: test.serves}).ModelName; got != test.want {
			t.Errorf("--served-model-name %q, worker serves %q: shown as %q, want %q", test.flag, test.serves, got, test.want)
		}
	}
}

// BenchmarkRecordOf is what each registration costs beside n workers.
func BenchmarkRecordOf(b *testing.B) {
	for _, n := range []int{512, 4096} {
		b.Run(fmt.Sprintf("workers=%d", n), func(b *testing.B) {
			var attached []workers.Attached
			for i := range n {
				attached = append(attached, workers.Attached{Server: probe.Server{ID: uint64(i), URL: fmt.Sprintf("http://10.0.%d.%d:8000", i/256, i%256)}})
			}
			router := routertest.New(b, "kv", n)
			fleet := workers.New(workers.Settings{Attached: attached}, workers.Deps{Index: routertest.Index(router), Log: slog.New(slog.DiscardHandler)})
			s := New(Settings{}, testDeps(router, fleet))
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if id := uint64(i % n); s.recordOf(id).Lifecycle != LifecycleSchedulable {
					b.Fatalf("worker %d gets no requests", id)
				}
			}
		})
	}
}
