package telemetry

import (
	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/base/metrics"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/decide/thompson"
)

// thompsonCollector returns the metrics of what the policy knows, under the names of the
// router of the NeMo Agent Toolkit, which decides. Those of workers have one series for
// each worker rank of the fleet that has series of its own.
func thompsonCollector(of *router.Router, fleet func() []uint64, hasOwn func(worker string, workers int) bool) prometheus.Collector {
	var set metrics.Set
	const prefix = "thompson_router_"
	perRank := []struct {
		metrics.Metric
		value func(w *thompson.WorkerStats) float64
	}{
		{set.Counter(prefix+"decisions_total", "Decisions for the worker.", "worker_id", "dp_rank"),
			func(w *thompson.WorkerStats) float64 { return float64(w.Decisions) }},
		{set.Gauge(prefix+"kv_overlap", "Cached share of the prompt at the last decision for the worker, 0 to 1.", "worker_id", "dp_rank"),
			func(w *thompson.WorkerStats) float64 { return w.Overlap }},
		{set.Gauge(prefix+"reward", "The worker's last reward, 0 to 1; 0.5 equals the baseline latency.", "worker_id", "dp_rank"),
			func(w *thompson.WorkerStats) float64 { return w.Reward }},
		{set.Gauge(prefix+"beta_alpha", "Alpha of the worker's Beta distribution of rewards.", "worker_id", "dp_rank"),
			func(w *thompson.WorkerStats) float64 { return w.Alpha }},
		{set.Gauge(prefix+"beta_beta", "Beta of the worker's Beta distribution of rewards.", "worker_id", "dp_rank"),
			func(w *thompson.WorkerStats) float64 { return w.Beta }},
	}
	feedback := set.Describe(prefix+"feedback_latency_seconds", "Latencies reported to the policy as feedback.", "worker_id", "dp_rank")
	reuse := set.Describe(prefix+"reuse_budget", "Remaining requests of the series at each decision.")
	tokens := set.Describe(prefix+"tokens_per_request", "Prompt tokens of each decision.")
	pending := set.Gauge(prefix+"pending_decisions", "Decisions that await feedback.")
	series := set.Gauge(prefix+"prefix_state_size", "Series of requests with remaining requests.")
	timeouts := set.Counter(prefix+"timeout_penalties_total", "Decisions counted as failed because their feedback timed out.")
	stayed := set.Counter(prefix+"sticky_decisions_total", "Decisions for the worker that had served the series before.")
	switched := set.Counter(prefix+"switch_decisions_total", "Decisions for another worker than the one that had served the series before.")
	return set.Collector(func(out metrics.Out) {
		there := map[uint64]bool{}
		for _, id := range fleet() {
			there[id] = true
		}
		var stats thompson.Stats
		thompson.With(of.WithPolicy, func(p *thompson.Policy) { stats = p.Stats() })
		histogram := func(d *prometheus.Desc, h thompson.Histogram, labels ...string) {
			buckets := map[float64]uint64{}
			for i, bound := range h.Bounds {
				buckets[bound] = h.Counts[i]
			}
			out.Send(prometheus.MustNewConstHistogram(d, h.Count, h.Sum, buckets, labels...))
		}
		names := of.Names().Now()
		for _, w := range stats.Workers {
			labels := names.RankLabels(w.Worker)
			if !there[w.Worker.Worker] || !hasOwn(labels[0], len(there)) {
				continue
			}
			for _, metric := range perRank {
				out.Show(metric.Metric, metric.value(&w), labels...)
			}
			if w.Latency.Count > 0 {
				histogram(feedback, w.Latency, labels...)
			}
		}
		histogram(reuse, stats.Reuse)
		histogram(tokens, stats.Tokens)
		out.Show(pending, float64(stats.Pending))
		out.Show(series, float64(stats.Series))
		out.Show(timeouts, float64(stats.Timeouts))
		out.Show(stayed, float64(stats.Stayed))
		out.Show(switched, float64(stats.Switched))
	})
}
