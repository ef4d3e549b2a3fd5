package probe

import (
	"context"
	"log/slog"
	"math"
	"slices"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

const (
	// transfersEvery is the time between two readings of a worker's counters of loads from
	// lower tiers.
	transfersEvery = 5 * time.Second
	// transfersLook is the same for a worker that shows no such counters.
	transfersLook = time.Minute
	// mostCounted bounds counters, bytes.
	mostCounted = 1 << 60
)

// vLLM's counters. Those of totals have a label for the direction, and the older names of
// the first two.
const (
	vllmLoadBytes   = "vllm:kv_offload_load_bytes"
	vllmLoadTime    = "vllm:kv_offload_load_time"
	vllmTotalBytes  = "vllm:kv_offload_total_bytes"
	vllmTotalTime   = "vllm:kv_offload_total_time"
	vllmReadBytes   = "vllm:kv_offload_tiering_read_bytes"
	vllmReadTime    = "vllm:kv_offload_tiering_read_time"
	vllmLookups     = "vllm:kv_offload_lookup_async_delay_seconds"
	vllmBySource    = "vllm:prompt_tokens_cached_by_source"
	vllmLoadingType = "CPU_to_GPU"
	vllmHits        = "vllm:prefix_cache_hits" // tokens
	vllmPeers       = ":p2p"                   // ends the label tier of the tier whose blocks other workers have
)

// SGLang's counters.
const (
	sglangLoadBytes  = "sglang:load_back_bytes"
	sglangLoadTime   = "sglang:load_back_duration_seconds"
	sglangLoadTokens = "sglang:load_back_tokens"
	sglangBySource   = "sglang:cached_tokens"
)

// transferNames are all of them. A counter's name may end with _total.
var transferNames = []string{
	vllmLoadBytes, vllmLoadTime, vllmTotalBytes, vllmTotalTime, vllmReadBytes, vllmReadTime, vllmLookups, vllmBySource, vllmHits,
	sglangLoadBytes, sglangLoadTime, sglangLoadTokens, sglangBySource,
}

// Counters get what an engine's pages show of loads from lower tiers, and of LoRA adapters, for
// each rank.
type Counters struct {
	Transfers func(kv.WorkerKey, policy.Transfers)
	Adapters  func(kv.WorkerKey, policy.AdapterReport)
}

// count reports the counters of a page, and returns the time until they are due again: 5 s, or a
// minute while the page shows none.
func (s *LoadSource) count(page Page) (pause time.Duration) {
	pause = transfersLook
	for _, rank := range s.Ranks {
		t, shown := page.Transfers(s.engine(rank))
		if shown {
			pause = transfersEvery
		}
		if shown || t.Hits >= 0 {
			s.Counters.Transfers(rank, t)
		}
		if a, shown := page.Adapters(); shown {
			pause = transfersEvery
			if s.Apart { // the names are of any rank
				a.Active, a.Stamp = nil, 0
			}
			s.Counters.Adapters(rank, a)
		}
	}
	return pause
}

// FollowCounters reports the counters of a source's pages until ctx is done. It is for a source
// of which FollowLoad does not poll the pages for all ranks.
func (c *Client) FollowCounters(ctx context.Context, s LoadSource, log *slog.Logger) {
	s.progress = new(progress)
	for ctx.Err() == nil {
		pause := transfersLook
		_ = c.edges.Do(guard.WorkerLoad, log, func() error { // FollowLoad reports what fails
			page, err := c.page(ctx, s.server(), counterNames)
			if err == nil {
				s.note(page)
				pause = s.count(page)
			}
			return err
		})
		if s.Rest != nil {
			pause = max(pause, s.Rest())
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// Transfers returns the counters of loads from lower tiers of an engine by its number or,
// if that is empty, of all together. shown is false if the engine has loaded nothing yet.
func (p Page) Transfers(engine string) (t policy.Transfers, shown bool) {
	all := func(string, map[string]string) bool { return true }
	loads := func(_ string, labels map[string]string) bool { return labels["transfer_type"] == vllmLoadingType }
	source := func(names ...string) func(string, map[string]string) bool {
		return func(_ string, labels map[string]string) bool {
			return slices.Contains(names, labels["source"]) || slices.Contains(names, labels["cache_source"])
		}
	}
	sum := func(name string, is func(string, map[string]string) bool) float64 { return p.counter(name, engine, is) }
	cached := func(sources ...string) int {
		return int(sum(vllmBySource, source(sources...)) + sum(sglangBySource, source(sources...)))
	}
	t.Cached = kv.TierTokens{Device: cached("device"), Host: cached("host"), Disk: cached("disk", "storage"),
		External: cached("p2p", "external_unspecified")}
	loaded := t.Cached.Total() - t.Cached.Device
	if p.family(sglangLoadBytes) != nil {
		// Each rank of a tensor-parallel group counts all tokens, the time, and its own bytes.
		t.HostBytes, t.HostSeconds = sum(sglangLoadBytes, all), sum(sglangLoadTime, all)
		t.HostTokens = sum(sglangLoadTokens, func(_ string, labels map[string]string) bool { return labels["pool"] == "kv" })
	} else if t.HostBytes, t.HostSeconds = sum(vllmLoadBytes, all), sum(vllmLoadTime, all); t.HostBytes == 0 {
		t.HostBytes, t.HostSeconds = sum(vllmTotalBytes, loads), sum(vllmTotalTime, loads)
	}
	if t.HostTokens == 0 {
		t.HostTokens = float64(loaded)
	}
	peers := func(_ string, labels map[string]string) bool { return strings.HasSuffix(labels["tier"], vllmPeers) }
	files := func(_ string, labels map[string]string) bool { return !strings.HasSuffix(labels["tier"], vllmPeers) }
	t.DiskBytes, t.DiskSeconds = sum(vllmReadBytes, files), sum(vllmReadTime, files)
	t.PeerBytes, t.PeerSeconds = sum(vllmReadBytes, peers), sum(vllmReadTime, peers)
	t.Lookups, t.LookupSeconds = p.histogram(vllmLookups, engine)
	t.Hits = -1
	if p.family(vllmHits) != nil {
		t.Hits = sum(vllmHits, all)
	} else if p.family(sglangBySource) != nil {
		t.Hits = float64(t.Cached.Device)
	}
	return t, t.HostBytes > 0 || loaded > 0
}

// family returns the metrics of a name, or of the name with _total.
func (p Page) family(name string) *dto.MetricFamily {
	if f := p[name]; f != nil {
		return f
	}
	return p[name+"_total"]
}

// counter sums the samples of an engine with certain labels. A histogram counts with
// its sum.
func (p Page) counter(name, engine string, is func(name string, labels map[string]string) bool) (sum float64) {
	for _, metric := range p.family(name).GetMetric() {
		if labels := labelsOf(metric); ofEngine(labels, engine) && is(name, labels) {
			value := metric.GetCounter().GetValue()
			switch {
			case metric.Histogram != nil:
				value = metric.GetHistogram().GetSampleSum()
			case metric.Gauge != nil:
				value = metric.GetGauge().GetValue()
			case metric.Untyped != nil:
				value = metric.GetUntyped().GetValue()
			}
			sum += counted(value)
		}
	}
	return sum
}

// histogram sums the observations of an engine.
func (p Page) histogram(name, engine string) (count, sum float64) {
	for _, metric := range p.family(name).GetMetric() {
		if h := metric.GetHistogram(); h != nil && ofEngine(labelsOf(metric), engine) {
			count, sum = count+counted(float64(h.GetSampleCount())), sum+counted(h.GetSampleSum())
		}
	}
	return count, sum
}

// ofEngine reports whether a sample is of the engine of that number; empty: of any.
func ofEngine(labels map[string]string, engine string) bool {
	at := labels["engine"]
	if at == "" {
		at = labels["dp_rank"]
	}
	return engine == "" || at == "" || at == engine
}

// counted limits a counter; one that is no number counts nothing.
func counted(value float64) float64 {
	if math.IsNaN(value) {
		return 0
	}
	return min(max(value, 0), mostCounted)
}
