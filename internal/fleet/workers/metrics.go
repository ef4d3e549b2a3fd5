package workers

import (
	"iter"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/metrics"
	"kvrouter/internal/decide/policy"
)

// NewCollector returns the metrics of the ranks that samples lists, with names for
// the label worker_id; nil names them by their ids. own returns the workers with series of
// their own; nil, or if it returns nil: all. Of the others there are the sums of what can be
// added up.
func NewCollector(names *kv.Names, samples iter.Seq[*Sample], own func() map[uint64]bool) prometheus.Collector {
	var set metrics.Set
	gauge := func(name, help string) metrics.Metric { return set.Gauge(name, help, "worker_id", "dp_rank") }
	type metric struct {
		metrics.Metric
		value func(s *Sample) float64
	}
	restarts := set.Counter("kvrouter_worker_restarts_total", "Restarts of the worker's process.", "worker_id", "dp_rank")
	always := []metric{
		{gauge("kvrouter_worker_up", "1 while the worker can receive requests."), func(s *Sample) float64 { return metrics.Bool(s.Up) }},
		{restarts, func(s *Sample) float64 { return float64(s.Restarts) }},
		{gauge("kvrouter_worker_blocks", "KV blocks of the worker in the index."), func(s *Sample) float64 { return float64(s.Blocks) }},
		{gauge("kvrouter_worker_in_flight", "In-flight requests on the worker."), func(s *Sample) float64 { return float64(s.Load.InFlight) }},
		{gauge("kvrouter_worker_prefill_tokens", "Uncached prompt tokens of the worker's requests that have no first token yet."),
			func(s *Sample) float64 { return float64(s.Load.PrefillTokens) }},
	}
	published := []metric{
		{gauge("kvrouter_worker_running_requests", "Running requests, as published by the worker."),
			func(s *Sample) float64 { return float64(s.Load.Running) }},
		{gauge("kvrouter_worker_waiting_requests", "Waiting requests, as published by the worker."),
			func(s *Sample) float64 { return float64(s.Load.Waiting) }},
		{gauge("kvrouter_worker_kv_cache_usage", "Used share of the KV cache, 0 to 1, as published by the worker."),
			func(s *Sample) float64 { return s.Load.KVUsage }},
	}
	followed := []metric{
		{gauge("kvrouter_kv_events_connected", "1 while the router is connected to the worker's KV events."),
			func(s *Sample) float64 { return metrics.Bool(s.Connected) }},
		{gauge("kvrouter_worker_cold", "1 while the index may lack blocks of the worker because the history of its cache is incomplete."),
			func(s *Sample) float64 { return metrics.Bool(s.Cold) }},
	}
	trust := set.Gauge("kvrouter_worker_tier_trust",
		"Recent share of the blocks expected in the tier that requests found there, 0 to 1. On the device: blocks that count as cached without an event.",
		"worker_id", "dp_rank", "tier")
	bandwidth := set.Gauge("kvrouter_worker_tier_bandwidth_bytes",
		"Bytes per second of loads from host memory to the device (host) or from slower tiers to host memory (disk), by the worker's counters.",
		"worker_id", "dp_rank", "tier")
	cached := set.Counter("kvrouter_worker_cached_tokens_total", "Cached prompt tokens by tier, as counted by the worker, of all its clients.",
		"worker_id", "dp_rank", "tier")
	pulls := set.Counter("kvrouter_kv_pulls_total",
		"Requests for which the worker was to pull blocks from another worker, by result: came, part, failed, unreported.", "worker_id",
		"dp_rank", "result")
	pulled := set.Counter("kvrouter_kv_pulled_tokens_total", "Prompt tokens pulled from other workers, by the worker's responses.",
		"worker_id", "dp_rank")
	pullsOf := func(out metrics.Out, rank []string, t *policy.Tiers) {
		counts := t.PullCounts()
		if counts == (policy.PullCounts{}) {
			return
		}
		for result := policy.PullUnreported; int(result) < len(policy.PullResults); result++ {
			out.Show(pulls, float64(counts.Results[result]), append(rank, policy.PullResults[result])...)
		}
		out.Show(pulled, float64(counts.Tokens), rank...)
	}
	tiers := func(out metrics.Out, rank []string, t *policy.Tiers) {
		if t == nil {
			return
		}
		for tier := kv.Device; tier <= kv.External; tier++ {
			if t.Asked(tier) {
				out.Show(trust, t.Trust(tier), append(rank, tier.String())...)
			}
		}
		for _, tier := range kv.LowerTiers {
			if b := t.Bandwidth(tier); b > 0 && tier != kv.External {
				out.Show(bandwidth, b, append(rank, tier.String())...)
			}
		}
		if counted, ok := t.Counted(); ok && (counted.HostBytes > 0 || counted.Cached.Total() > counted.Cached.Device) {
			for tier := kv.Device; tier <= kv.External; tier++ {
				out.Show(cached, float64(counted.Cached.Of(tier)), append(rank, tier.String())...)
			}
		}
	}
	adapters := set.Counter("kvrouter_adapter_requests_total",
		"Requests with a LoRA adapter that were sent to the worker, by what the adapter was expected to need: ready, load, wait.", "worker_id",
		"dp_rank", "result")
	info := set.Gauge("kvrouter_worker_info", "Always 1; the labels have the worker's URL, its first served model, its role and its engine.",
		"worker_id", "dp_rank", "url", "model", "role", "engine")
	engine := set.Gauge("kvrouter_worker_engine_info",
		"Always 1, for workers that trainers change; the labels have the engine's state (running, paused, updating, asleep) and the version of its weights.",
		"worker_id", "dp_rank", "state", "weight_version")
	knowledge := set.Gauge("kvrouter_worker_cache_known", "1 for how the worker's KV cache is known: exact, approximate, load_only.",
		"worker_id", "dp_rank", "known")
	blockSize := gauge("kvrouter_worker_block_size", "Tokens in a block of the worker's KV cache.")
	applied := set.Counter("dynamo_component_kv_cache_events_applied", "KV events applied to the index, by type and result.",
		"worker_id", "dp_rank", "event_type", "status")
	events := set.Counter("kvrouter_kv_events_total", "KV events of the worker, by kind.", "worker_id", "dp_rank", "kind")
	lower := set.Gauge("kvrouter_kv_tier_blocks",
		"KV blocks in the index that the worker can load from a lower tier, by owner: worker or store.", "worker_id", "dp_rank", "tier", "owner")
	lowerEvents := set.Counter("kvrouter_kv_tier_event_blocks_total", "KV blocks in events of lower tiers, by kind.",
		"worker_id", "dp_rank", "tier", "kind")
	waiting := gauge("kvrouter_kv_tier_waiting_blocks", "KV blocks of lower tiers whose place in a prompt is not known yet.")
	doubtful := gauge("kvrouter_kv_tier_doubtful", "1 while the worker's lower tiers may have been emptied without an event.")
	cells := showCells(&set)
	summed := slices.DeleteFunc(slices.Concat(always, published[:2], followed), func(m metric) bool { return m.Metric == restarts })
	return set.Collector(func(out metrics.Out) {
		names, shown := names.Now(), metrics.Own(own)
		others := make([]float64, len(summed))
		var known [kv.LoadOnly + 1]float64 // of the others
		for s := range samples {
			if shown != nil && !shown[s.Worker.Worker] {
				for i := range summed {
					others[i] += summed[i].value(s)
				}
				if s.Cache.BlockSize > 0 {
					known[s.Cache.Known]++
				}
				continue
			}
			rank := names.RankLabels(s.Worker)
			showAll := func(list []metric) {
				for _, m := range list {
					out.Show(m.Metric, m.value(s), rank...)
				}
			}
			model := ""
			if len(s.Models) > 0 {
				model = s.Models[0]
			}
			out.Show(info, 1, append(rank, kv.MetricLabel(s.URL), kv.MetricLabel(model), s.Role.String(), s.Engine.String())...)
			if s.Load.State != 0 || s.Version != "" {
				out.Show(engine, 1, append(rank, s.Load.State.String(), kv.MetricLabel(s.Version))...)
			}
			if s.Cache.BlockSize > 0 {
				out.Show(blockSize, float64(s.Cache.BlockSize), rank...)
				for k := kv.Exact; k <= kv.LoadOnly; k++ {
					out.Show(knowledge, metrics.Bool(s.Cache.Known == k), append(rank, k.String())...)
				}
			}
			showAll(always)
			if s.Load.Fresh {
				showAll(published)
			}
			cells(out, rank[0], s)
			tiers(out, rank, s.Load.Tiers)
			pullsOf(out, rank, s.Load.Tiers)
			if s.Load.Adapters != nil {
				for state, n := range s.Load.Adapters.Counts() {
					out.Show(adapters, float64(n), append(rank, policy.AdapterStates[state])...)
				}
			}
			if s.Events == nil {
				continue
			}
			n := s.Events.Counts()
			showAll(followed)
			for kind, count := range n {
				out.Show(events, float64(count), append(rank, kind)...)
			}
			for _, tier := range kv.LowerTiers {
				for owner, blocks := range map[string]kv.LowerBlocks{"worker": s.Lower.Own, "store": s.Lower.Shared} {
					if n := blocks.Of(tier); n > 0 {
						out.Show(lower, float64(n), append(rank, tier.String(), owner)...)
					}
				}
			}
			tiered := false
			for _, tier := range kv.LowerTiers {
				n := &s.Events.Lower[tier]
				stored, removed, unknown := n.Stored.Load(), n.Removed.Load(), n.UnknownRemoved.Load()
				if stored+removed+unknown == 0 {
					continue
				}
				tiered = true
				out.Show(lowerEvents, float64(stored), append(rank, tier.String(), "stored")...)
				out.Show(lowerEvents, float64(removed), append(rank, tier.String(), "removed")...)
				out.Show(lowerEvents, float64(unknown), append(rank, tier.String(), "unknown_removed")...)
			}
			if tiered {
				out.Show(waiting, float64(s.Lower.Waiting), rank...)
				out.Show(doubtful, metrics.Bool(s.Lower.Doubt != 0), rank...)
			}
			show := func(event, status string, count uint64) {
				out.Show(applied, float64(count), append(rank, event, status)...)
			}
			show("stored", "ok", n["stored"])
			show("stored", "parent_block_not_found", n["unknown_parent"])
			show("stored", "invalid_block", n["invalid_stored"])
			show("removed", "ok", n["removed"]-n["removed_incomplete"])
			show("removed", "block_not_found", n["removed_incomplete"])
			show("cleared", "ok", n["cleared"])
		}
		if shown != nil {
			for i, sum := range others {
				out.Show(summed[i].Metric, sum, kv.OtherWorkers, "")
			}
			for k, n := range known {
				out.Show(knowledge, n, kv.OtherWorkers, "", kv.Knowledge(k).String())
			}
		}
	})
}

// showCells adds the metrics of routers below this one to the set, and returns what shows those of
// one.
func showCells(set *metrics.Set) func(out metrics.Out, id string, s *Sample) {
	below := set.Gauge("kvrouter_cell_workers", "Workers of the cell that are up.", "worker_id")
	network := set.Gauge("kvrouter_cell_network_seconds", "Round trip to the cell: the shortest of the last 16.", "worker_id")
	wait := set.Gauge("kvrouter_cell_wait_seconds", "Time to first token of a new request predicted by the cell, by class.",
		"worker_id", "class")
	found := set.Gauge("kvrouter_cell_found_ratio", "Recent share of the reported overlap that the cell's chosen worker had, 0 to 1.",
		"worker_id")
	late := set.Gauge("kvrouter_cell_late_seconds",
		"Delay of first tokens beyond the cell's prediction: lower confidence bound of the last 16.", "worker_id")
	memory := set.Gauge("kvrouter_cell_summary_bytes", "Memory of the cell's summary; 0: it reports no usable one.", "worker_id")
	received := set.Counter("kvrouter_cell_summary_received_bytes_total", "Bytes of the summary received since the cell was attached.",
		"worker_id")
	snapshots := set.Counter("kvrouter_cell_summary_snapshots_total", "Whole summaries received since the cell was attached.", "worker_id")
	return func(out metrics.Out, id string, s *Sample) {
		if s.Cell == nil {
			return
		}
		out.Show(below, float64(s.Cell.Workers), id)
		out.Show(network, s.Cell.NetworkMS/1000, id)
		out.Show(memory, float64(s.Cell.SummaryBytes), id)
		out.Show(received, float64(s.Cell.Received), id)
		out.Show(snapshots, float64(s.Cell.Snapshots), id)
		if c := s.Load.Cell; c != nil {
			for _, class := range fair.Classes {
				out.Show(wait, c.Waits[class.Place()].Seconds(), id, class.String())
			}
			out.Show(found, c.Finds(), id)
			out.Show(late, c.Lateness().Seconds(), id)
		}
	}
}

// IDs returns the ids of the fleet's workers.
func (f *Fleet) IDs() []uint64 {
	workers := f.all()
	ids := make([]uint64, len(workers))
	for i, w := range workers {
		ids[i] = w.id
	}
	return ids
}
