package probe

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
)

// offloadingPage is of vLLM 0.32 with a CPU tier and files, and two ranks.
const offloadingPage = `# HELP vllm:prompt_tokens_cached_by_source_total Prefix-cache hit tokens by the cache tier that supplied them.
# TYPE vllm:prompt_tokens_cached_by_source_total counter
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="device"} 1280.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="host"} 3840.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="p2p"} 0.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="disk"} 640.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="external_unspecified"} 0.0
vllm:prompt_tokens_cached_by_source_total{engine="1",model_name="m",source="device"} 7.0
# TYPE vllm:prompt_tokens_cached_by_source_created gauge
vllm:prompt_tokens_cached_by_source_created{engine="0",model_name="m",source="device"} 1.7954e+09
# TYPE vllm:kv_offload_load_bytes_total counter
vllm:kv_offload_load_bytes_total{engine="0",model_name="m"} 1.032192e+08
# TYPE vllm:kv_offload_load_time_total counter
vllm:kv_offload_load_time_total{engine="0",model_name="m"} 0.028
# TYPE vllm:kv_offload_total_bytes_total counter
vllm:kv_offload_total_bytes_total{engine="0",model_name="m",transfer_type="CPU_to_GPU"} 1.032192e+08
vllm:kv_offload_total_bytes_total{engine="0",model_name="m",transfer_type="GPU_to_CPU"} 9e+09
# TYPE vllm:kv_offload_total_time_total counter
vllm:kv_offload_total_time_total{engine="0",model_name="m",transfer_type="CPU_to_GPU"} 0.028
vllm:kv_offload_total_time_total{engine="0",model_name="m",transfer_type="GPU_to_CPU"} 7.0
# TYPE vllm:kv_offload_tiering_read_bytes_total counter
vllm:kv_offload_tiering_read_bytes_total{engine="0",model_name="m",tier="1:fs"} 1.47456e+07
# TYPE vllm:kv_offload_tiering_read_time_total counter
vllm:kv_offload_tiering_read_time_total{engine="0",model_name="m",tier="1:fs"} 0.0079
# TYPE vllm:kv_offload_lookup_async_delay_seconds histogram
vllm:kv_offload_lookup_async_delay_seconds_bucket{engine="0",model_name="m",le="0.1"} 10
vllm:kv_offload_lookup_async_delay_seconds_bucket{engine="0",model_name="m",le="+Inf"} 10
vllm:kv_offload_lookup_async_delay_seconds_sum{engine="0",model_name="m"} 0.276
vllm:kv_offload_lookup_async_delay_seconds_count{engine="0",model_name="m"} 10
`

// hicachePage is of SGLang 0.5.23 with two tensor-parallel ranks, of which each counts all
// tokens.
const hicachePage = `# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",model_name="m",dp_rank="0"} 100.0
sglang:cached_tokens_total{cache_source="host",model_name="m",dp_rank="0"} 1472.0
sglang:cached_tokens_total{cache_source="storage",model_name="m",dp_rank="0"} 640.0
sglang:cached_tokens_total{cache_source="total",model_name="m",dp_rank="0"} 2212.0
# TYPE sglang:load_back_bytes_total counter
sglang:load_back_bytes_total{dp_rank="0",tp_rank="0"} 1e+06
sglang:load_back_bytes_total{dp_rank="0",tp_rank="1"} 1e+06
# TYPE sglang:load_back_tokens_total counter
sglang:load_back_tokens_total{dp_rank="0",pool="kv",tp_rank="0"} 1000.0
sglang:load_back_tokens_total{dp_rank="0",pool="kv",tp_rank="1"} 1000.0
sglang:load_back_tokens_total{dp_rank="0",pool="swa",tp_rank="0"} 77.0
# TYPE sglang:load_back_duration_seconds histogram
sglang:load_back_duration_seconds_bucket{dp_rank="0",tp_rank="0",le="+Inf"} 3
sglang:load_back_duration_seconds_sum{dp_rank="0",tp_rank="0"} 0.5
sglang:load_back_duration_seconds_count{dp_rank="0",tp_rank="0"} 3
sglang:load_back_duration_seconds_bucket{dp_rank="0",tp_rank="1",le="+Inf"} 3
sglang:load_back_duration_seconds_sum{dp_rank="0",tp_rank="1"} 0.5
sglang:load_back_duration_seconds_count{dp_rank="0",tp_rank="1"} 3
`

func transfersOn(t *testing.T, page, engine string) (policy.Transfers, bool) {
	t.Helper()
	shown, err := parsePage(strings.NewReader(page), transferNames, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return shown.Transfers(engine)
}

func TestPageShowsLoadsFromLowerTiers(t *testing.T) {
	older := strings.NewReplacer("vllm:kv_offload_load_bytes", "vllm:none", "vllm:kv_offload_load_time", "vllm:no").Replace(offloadingPage)
	offloading := policy.Transfers{
		HostBytes: 103_219_200, HostSeconds: 0.028, HostTokens: 4480, DiskBytes: 14_745_600, DiskSeconds: 0.0079, Lookups: 10, LookupSeconds: 0.276,
		Cached: kv.TierTokens{Device: 1280, Host: 3840, Disk: 640},
	}
	for _, test := range []struct {
		name, page, engine string
		want               policy.Transfers
		shown              bool
	}{
		{"vLLM", offloadingPage, "0", offloading, true},
		{"older names", older, "0", offloading, true},
		{"another rank", offloadingPage, "1", policy.Transfers{Cached: kv.TierTokens{Device: 7}}, false},
		{"SGLang", hicachePage, "", policy.Transfers{HostBytes: 2e6, HostSeconds: 1, HostTokens: 2000, Cached: kv.TierTokens{Device: 100, Host: 1472, Disk: 640}, Hits: 100}, true},
		{"hits alone", "vllm:prefix_cache_hits_total{engine=\"0\"} 96\nvllm:prefix_cache_hits_total{engine=\"1\"} 5\n", "0", policy.Transfers{Hits: 96}, false},
		{"another engine", "# TYPE x counter\nx 1\n", "", policy.Transfers{}, false},
		{"blocks of other workers", "vllm:kv_offload_load_bytes_total 7\nvllm:kv_offload_tiering_read_bytes_total{tier=\"1:fs\"} 3\nvllm:kv_offload_tiering_read_bytes_total{tier=\"2:p2p\"} 5\nvllm:kv_offload_tiering_read_time_total{tier=\"2:p2p\"} 2\n", "", policy.Transfers{HostBytes: 7, DiskBytes: 3, PeerBytes: 5, PeerSeconds: 2}, true},
		{"foreign numbers", "vllm:kv_offload_load_bytes_total 1e300\nvllm:kv_offload_load_time_total NaN\nvllm:kv_offload_tiering_read_bytes_total -5\n", "", policy.Transfers{HostBytes: mostCounted}, true},
	} {
		if test.want.Hits == 0 {
			test.want.Hits = -1
		}
		if got, shown := transfersOn(t, test.page, test.engine); got != test.want || shown != test.shown {
			t.Errorf("%s: %+v, %v; want %+v, %v", test.name, got, shown, test.want, test.shown)
		}
	}
}

func TestTransfersAreFollowed(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, offloadingPage) }))
	defer server.Close()
	c := newClient(t)
	ctx, cancel := context.WithCancel(t.Context())
	heard, done := make(chan kv.WorkerKey, 9), make(chan struct{})
	go func() { // ends with ctx
		defer close(done)
		ranks := []kv.WorkerKey{{Worker: 3}, {Worker: 3, Rank: 1}}
		c.FollowCounters(ctx, LoadSource{URL: server.URL, Ranks: ranks, Apart: true, Key: noKey, Counters: &Counters{Transfers: func(w kv.WorkerKey, _ policy.Transfers) { heard <- w }}}, c.log)
	}()
	testkit.Eventually(t, 20*time.Second, "the counters of the rank that loads", func() bool { return len(heard) == 1 && <-heard == kv.WorkerKey{Worker: 3} })
	cancel()
	<-done
}

func FuzzTransfers(f *testing.F) {
	f.Add(offloadingPage)
	f.Add(hicachePage)
	f.Fuzz(func(t *testing.T, text string) {
		page, err := parsePage(strings.NewReader(text), transferNames, nil, nil)
		if err != nil {
			return
		}
		got, _ := page.Transfers("")
		for _, n := range []float64{got.HostBytes, got.HostSeconds, got.HostTokens, got.DiskBytes, got.DiskSeconds, got.Lookups, got.LookupSeconds, float64(got.Cached.Total())} {
			if !(n >= 0) || math.IsInf(n, 0) {
				t.Errorf("%+v", got)
			}
		}
	})
}
