package workers

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/zmq"
)

const metricsPage = `# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:%s gauge
vllm:%s{engine="0",model_name="m"} 0.25
vllm:%s{engine="1",model_name="m"} 0.5
`

func TestMetricsPageGivesTheLoad(t *testing.T) {
	for _, usage := range []string{"kv_cache_usage_perc", "gpu_cache_usage_perc"} {
		p, err := parseMetrics(strings.NewReader(fmt.Sprintf(metricsPage, usage, usage, usage)), "")
		if err != nil {
			t.Fatal(err)
		}
		if p.Running != 5 || p.Waiting != 7 || p.KVUsage != 0.5 || p.At.IsZero() {
			t.Errorf("%s: %+v", usage, p)
		}
	}
}

func TestMetricsPageGivesTheLoadOfOneEngine(t *testing.T) {
	const name = "kv_cache_usage_perc"
	page := fmt.Sprintf(metricsPage, name, name, name)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, page) }))
	defer server.Close()
	for engine, want := range map[string]policy.Published{"": {Running: 5, Waiting: 7, KVUsage: 0.5}, "#0": {Running: 3, Waiting: 7, KVUsage: 0.25}, "#1": {Running: 2, KVUsage: 0.5}} {
		got, err := GetMetrics(t.Context(), http.DefaultClient, server.URL+"/metrics"+engine)
		if got.At = (time.Time{}); err != nil || got != want {
			t.Errorf("engine %q: %+v, %v, want %+v", engine, got, err, want)
		}
	}
}

func TestMetricsPageWithoutLoadIsAnError(t *testing.T) {
	for _, page := range []string{"", "go_goroutines 4\n", "vllm:num_requests_running 1\n", "{{{"} {
		if p, err := parseMetrics(strings.NewReader(page), ""); err == nil {
			t.Errorf("%q gave %+v", page, p)
		}
	}
}

func FuzzMetricsPage(f *testing.F) {
	f.Add(fmt.Sprintf(metricsPage, "kv_cache_usage_perc", "kv_cache_usage_perc", "kv_cache_usage_perc"))
	f.Fuzz(func(t *testing.T, page string) { parseMetrics(strings.NewReader(page), "") })
}

// follow runs FollowLoad until the test ends and returns the last load seen.
func follow(t *testing.T, socket, page string) *atomic.Pointer[policy.Published] {
	t.Helper()
	var last atomic.Pointer[policy.Published]
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		followLoad(ctx, http.DefaultClient, kv.WorkerKey{}, socket, page, func(_ kv.WorkerKey, p policy.Published) { last.Store(&p) }, slog.New(slog.DiscardHandler))
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case <-done:
		case <-time.After(20 * time.Second):
			t.Error("FollowLoad did not end with its context")
		}
	})
	return &last
}

func TestLoadSocketIsFollowedThroughARestart(t *testing.T) {
	listen := func(address string) *zmq.Publisher {
		p, err := zmq.NewPublisher(address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		return p
	}
	pub := listen("127.0.0.1:0")
	last := follow(t, pub.Endpoint(), "")
	waiting := func(n int) func() bool {
		return func() bool {
			pub.Publish(fmt.Appendf(nil, `{"num_waiting_reqs":%d,"num_running_reqs":1,"kv_cache_usage":0.5}`, n))
			p := last.Load()
			return p != nil && p.Waiting == n && p.Running == 1 && p.KVUsage == 0.5
		}
	}
	testkit.Eventually(t, 20*time.Second, "the first load", waiting(3))
	pub.Close()
	pub = listen(strings.TrimPrefix(pub.Endpoint(), "tcp://"))
	testkit.Eventually(t, 20*time.Second, "a load after the restart", waiting(4))
	pub.Publish([]byte(`not JSON`))
	testkit.Eventually(t, 20*time.Second, "a load after a broken message", waiting(5))
}

func TestWorkersWithoutALoadSocketArePolled(t *testing.T) {
	var fail atomic.Bool
	fail.Store(true)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if fail.Load() {
			http.Error(w, "starting", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, metricsPage, "kv_cache_usage_perc", "kv_cache_usage_perc", "kv_cache_usage_perc")
	}))
	defer server.Close()
	defer http.DefaultClient.CloseIdleConnections()
	last := follow(t, "", server.URL)
	fail.Store(false)
	testkit.Eventually(t, 20*time.Second, "the load", func() bool { p := last.Load(); return p != nil && p.Waiting == 7 })
}

func TestCacheSizesAreReadByRank(t *testing.T) {
	page := "# TYPE vllm:cache_config_info gauge\n" +
		`vllm:cache_config_info{block_size="64",engine="0",num_gpu_blocks="100"} 1` + "\n" +
		`vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="100",num_cpu_blocks="7"} 1` + "\n" +
		`vllm:cache_config_info{block_size="64",engine="2",num_gpu_blocks="None"} 1` + "\n"
	sizes, err := parseCacheSizes(strings.NewReader(page))
	if err != nil || len(sizes) != 2 || sizes[0] != 6336 || sizes[1] != 3168 {
		t.Errorf("%v %v", sizes, err)
	}
	if sizes, err := parseCacheSizes(strings.NewReader("")); err != nil || len(sizes) != 0 {
		t.Errorf("empty page: %v %v", sizes, err)
	}
	if _, err := parseCacheSizes(strings.NewReader("{")); err == nil {
		t.Error("a broken page is read")
	}
}

func FuzzParseCacheSizes(f *testing.F) {
	f.Add(`vllm:cache_config_info{block_size="64",engine="0",num_gpu_blocks="100"} 1`)
	f.Fuzz(func(t *testing.T, page string) {
		sizes, _ := parseCacheSizes(strings.NewReader(page))
		for rank, tokens := range sizes {
			if tokens <= 0 {
				t.Errorf("rank %d has %d tokens", rank, tokens)
			}
		}
	})
}
