package workers

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
)

func TestWorkerInfoIsBounded(t *testing.T) {
	long := strings.Repeat("é", 1000) // what a worker may call its model
	page := testkit.Scrape(t, NewCollector(nil, testkit.Each(func() []Sample {
		return []Sample{
			{Worker: kv.WorkerKey{Worker: 1, Rank: 2}, URL: "http://w", Models: []string{"m", "adapter"}, Role: kv.RolePrefill, Engine: kv.EngineSGLang},
			{Worker: kv.WorkerKey{Worker: 2}, URL: "http://v", Models: []string{"x" + long}},
			{Worker: kv.WorkerKey{Worker: 3}, URL: "http://u", Models: []string{"\xff\xfe"}},
		}
	}), nil))
	for _, want := range []string{
		`kvrouter_worker_info{dp_rank="2",engine="sglang",model="m",role="prefill",url="http://w",worker_id="1"}`,
		fmt.Sprintf(`kvrouter_worker_info{dp_rank="0",engine="vllm",model="x%s",role="both",url="http://v",worker_id="2"}`, strings.Repeat("é", 99)),
		`kvrouter_worker_info{dp_rank="0",engine="vllm",model="",role="both",url="http://u",worker_id="3"}`,
	} {
		if page[want] != 1 {
			t.Errorf("no %s in\n%v", want, page)
		}
	}
}

func TestTiersOfWorkersAreShown(t *testing.T) {
	tiers := new(policy.Tiers)
	tiers.Came(kv.LowerBlocks{Host: 4}, 0)
	tiers.Count(policy.Transfers{})
	tiers.Count(policy.Transfers{HostBytes: 3e9, HostSeconds: 2, HostTokens: 1e5, DiskBytes: 1e9, DiskSeconds: 2, Cached: kv.TierTokens{Device: 1, Host: 2, Disk: 3, External: 4}})
	page := testkit.Scrape(t, NewCollector(nil, testkit.Each(func() []Sample {
		return []Sample{{Worker: kv.WorkerKey{Worker: 1}, Load: policy.Load{Tiers: tiers}}, {Worker: kv.WorkerKey{Worker: 2}}}
	}), nil))
	for want, value := range map[string]float64{
		`kvrouter_worker_tier_trust{dp_rank="0",tier="host",worker_id="1"}`:              0.8,
		`kvrouter_worker_tier_bandwidth_bytes{dp_rank="0",tier="host",worker_id="1"}`:    1.5e9,
		`kvrouter_worker_tier_bandwidth_bytes{dp_rank="0",tier="disk",worker_id="1"}`:    5e8,
		`kvrouter_worker_cached_tokens_total{dp_rank="0",tier="device",worker_id="1"}`:   1,
		`kvrouter_worker_cached_tokens_total{dp_rank="0",tier="external",worker_id="1"}`: 4,
	} {
		if got := page[want]; math.Abs(got-value) > 1e-6*value {
			t.Errorf("%s is %v, want %v", want, got, value)
		}
	}
	for line := range page {
		if strings.HasPrefix(line, "kvrouter_worker_tier_trust") && !strings.Contains(line, `tier="host"`) {
			t.Errorf("%s, for which no answer has shown a share", line)
		}
		if strings.Contains(line, "tier=") && strings.Contains(line, `worker_id="2"`) {
			t.Errorf("%s of a worker without tiers", line)
		}
	}
}

func TestMetricsSayHowCachesAreKnown(t *testing.T) {
	samples := testkit.Each(func() []Sample {
		return []Sample{
			{Worker: kv.WorkerKey{Worker: 1}, Cache: CacheState{BlockSize: 16}},
			{Worker: kv.WorkerKey{Worker: 2}, Cache: CacheState{Known: kv.Approximate, BlockSize: 64}},
			{Worker: kv.WorkerKey{Worker: 3}, Cache: CacheState{Known: kv.LoadOnly, BlockSize: 64}},
			{Worker: kv.WorkerKey{Worker: 4}}, // not attached yet
		}
	})
	page := testkit.Scrape(t, NewCollector(nil, samples, nil))
	for worker, known := range map[int]kv.Knowledge{1: kv.Exact, 2: kv.Approximate, 3: kv.LoadOnly} {
		for k := kv.Exact; k <= kv.LoadOnly; k++ {
			line := fmt.Sprintf(`kvrouter_worker_cache_known{dp_rank="0",known="%s",worker_id="%d"}`, k, worker)
			if got, there := page[line]; !there || (got == 1) != (k == known) {
				t.Errorf("%s is %v", line, got)
			}
		}
	}
	if page[`kvrouter_worker_block_size{dp_rank="0",worker_id="1"}`] != 16 || page[`kvrouter_worker_block_size{dp_rank="0",worker_id="3"}`] != 64 {
		t.Errorf("block sizes: %v", page)
	}
	if _, there := page[`kvrouter_worker_cache_known{dp_rank="0",known="exact",worker_id="4"}`]; there {
		t.Error("a worker that is not attached yet seems to be known")
	}
	page = testkit.Scrape(t, NewCollector(nil, samples, func() map[uint64]bool { return map[uint64]bool{1: true} }))
	for k, want := range map[kv.Knowledge]float64{kv.Exact: 0, kv.Approximate: 1, kv.LoadOnly: 1} {
		if line := fmt.Sprintf(`kvrouter_worker_cache_known{dp_rank="",known="%s",worker_id="(others)"}`, k); page[line] != want {
			t.Errorf("%s is %v, want %v", line, page[line], want)
		}
	}
}

func TestWorkersWithoutSeriesAreSummed(t *testing.T) {
	samples := func() (list []Sample) {
		for i := range uint64(4) {
			list = append(list, Sample{
				Worker: kv.WorkerKey{Worker: i}, Up: true, Blocks: 10, Restarts: 1, Events: new(events.Stats), Connected: i > 1,
				Load: policy.Load{Published: policy.Published{Running: 2, KVUsage: 0.5}, Fresh: true, InFlight: int(i)},
			})
		}
		return list
	}
	page := testkit.Scrape(t, NewCollector(nil, testkit.Each(samples), func() map[uint64]bool { return map[uint64]bool{2: true} }))
	for want, value := range map[string]float64{
		`kvrouter_worker_in_flight{dp_rank="0",worker_id="2"}`:              2,
		`kvrouter_worker_in_flight{dp_rank="",worker_id="(others)"}`:        4,
		`kvrouter_worker_up{dp_rank="",worker_id="(others)"}`:               3,
		`kvrouter_worker_running_requests{dp_rank="",worker_id="(others)"}`: 6,
		`kvrouter_kv_events_connected{dp_rank="",worker_id="(others)"}`:     1,
		`kvrouter_worker_kv_cache_usage{dp_rank="0",worker_id="2"}`:         0.5,
	} {
		if got, there := page[want]; !there || got != value {
			t.Errorf("%s is %v, want %v", want, got, value)
		}
	}
	for line := range page {
		if strings.Contains(line, `"(others)"`) && (strings.Contains(line, "_total") || strings.Contains(line, "usage")) {
			t.Errorf("%s cannot be summed", line)
		}
		if strings.Contains(line, `worker_id="0"`) || strings.Contains(line, `worker_id="3"`) {
			t.Errorf("%s of a worker without series", line)
		}
	}
}
