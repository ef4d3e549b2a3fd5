package workers

import (
	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/kv"
)

// collector reads the state of every rank at each scrape, so that a removed worker
// leaves no series behind.
type collector struct {
	names   *kv.Names
	samples func() []Sample
	all     []*prometheus.Desc

	up, restarts, blocks, inFlight, prefill, running, waiting, usage, events, applied, connected, cold, info *prometheus.Desc
}

// NewCollector returns the metrics of the ranks that samples lists, with names for
// the label worker_id; nil names them by their ids.
func NewCollector(names *kv.Names, samples func() []Sample) prometheus.Collector {
	c := &collector{names: names, samples: samples}
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		d := prometheus.NewDesc(name, help, append([]string{"worker_id", "dp_rank"}, labels...), nil)
		c.all = append(c.all, d)
		return d
	}
	c.up = desc("kvrouter_worker_up", "1 while the worker can receive requests.")
	c.restarts = desc("kvrouter_worker_restarts_total", "Restarts of the worker's process.")
	c.blocks = desc("kvrouter_worker_blocks", "KV blocks of the worker in the index.")
	c.inFlight = desc("kvrouter_worker_in_flight", "In-flight requests on the worker.")
	c.prefill = desc("kvrouter_worker_prefill_tokens", "Uncached prompt tokens of the worker's requests that have no first token yet.")
	c.running = desc("kvrouter_worker_running_requests", "Running requests, as published by the worker.")
	c.waiting = desc("kvrouter_worker_waiting_requests", "Waiting requests, as published by the worker.")
	c.usage = desc("kvrouter_worker_kv_cache_usage", "Used share of the KV cache, 0 to 1, as published by the worker.")
	c.connected = desc("kvrouter_kv_events_connected", "1 while the router is connected to the worker's KV events.")
	c.cold = desc("kvrouter_worker_cold", "1 while the index may lack blocks of the worker because the history of its cache is incomplete.")
	c.info = desc("kvrouter_worker_info", "Always 1; the labels have the worker's URL, its first served model, its role and its engine.", "url", "model", "role", "engine")
	c.applied = desc("dynamo_component_kv_cache_events_applied", "KV events applied to the index, by type and result.", "event_type", "status")
	c.events = desc("kvrouter_kv_events_total", "KV events of the worker, by kind.", "kind")
	return c
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range c.all {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	names := c.names.Now()
	for _, s := range c.samples() {
		rank := names.RankLabels(s.Worker)
		show := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
			out <- prometheus.MustNewConstMetric(d, kind, value, append(rank, labels...)...)
		}
		gauge := func(d *prometheus.Desc, value float64) { show(d, prometheus.GaugeValue, value) }
		flag := func(d *prometheus.Desc, set bool) {
			value := 0.0
			if set {
				value = 1
			}
			gauge(d, value)
		}
		model := ""
		if len(s.Models) > 0 {
			model = s.Models[0]
		}
		show(c.info, prometheus.GaugeValue, 1, kv.MetricLabel(s.URL), kv.MetricLabel(model), s.Role.String(), s.Engine.String())
		flag(c.up, s.Up)
		show(c.restarts, prometheus.CounterValue, float64(s.Restarts))
		gauge(c.blocks, float64(s.Blocks))
		gauge(c.inFlight, float64(s.Load.InFlight))
		gauge(c.prefill, float64(s.Load.PrefillTokens))
		if s.Load.Fresh {
			gauge(c.running, float64(s.Load.Running))
			gauge(c.waiting, float64(s.Load.Waiting))
			gauge(c.usage, s.Load.KVUsage)
		}
		n := s.EventCount
		if n == nil {
			continue
		}
		flag(c.connected, s.Connected)
		flag(c.cold, s.Cold)
		for kind, count := range n {
			show(c.events, prometheus.CounterValue, float64(count), kind)
		}
		applied := func(event, status string, count uint64) {
			show(c.applied, prometheus.CounterValue, float64(count), event, status)
		}
		applied("stored", "ok", n["stored"])
		applied("stored", "parent_block_not_found", n["unknown_parent"])
		applied("stored", "invalid_block", n["invalid_stored"])
		applied("removed", "ok", n["removed"]-n["removed_incomplete"])
		applied("removed", "block_not_found", n["removed_incomplete"])
		applied("cleared", "ok", n["cleared"])
	}
}

// IDs returns the ids of the fleet's workers.
func (f *Fleet) IDs() (ids []uint64) {
	for _, w := range f.Workers() {
		ids = append(ids, w.ID)
	}
	return ids
}
