package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"kvrouter/internal/base/metrics"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/decide/thompson"
	"kvrouter/internal/serve/proxy"
)

// thompsonMetrics are the metrics of policy thompson that count requests, under the names
// of the processor of the NeMo Agent Toolkit, which forwards them. On a nil receiver the
// methods do nothing.
type thompsonMetrics struct {
	requests, tokensIn, tokensOut, routerErrors, engineErrors prometheus.Counter
	latency                                                   prometheus.Histogram
	active                                                    prometheus.Gauge
	routed                                                    *prometheus.CounterVec
}

// newThompsonMetrics registers the metrics.
func newThompsonMetrics(register promauto.Factory) *thompsonMetrics {
	counter := func(name, help string) prometheus.Counter {
		return register.NewCounter(prometheus.CounterOpts{Name: "thompson_processor_" + name, Help: help})
	}
	return &thompsonMetrics{
		requests:     counter("requests_total", "Requests with a prompt that were forwarded."),
		tokensIn:     counter("tokens_in_total", "Prompt tokens of forwarded requests."),
		tokensOut:    counter("tokens_out_total", "Output tokens of forwarded requests, as reported in the workers' usage."),
		routerErrors: counter("router_errors_total", "Requests rejected because no worker could serve them."),
		engineErrors: counter("engine_errors_total", "Requests that failed on a worker, including those served by a retry."),
		routed: register.NewCounterVec(prometheus.CounterOpts{Name: "thompson_processor_routing_decisions_total",
			Help: "Requests sent to the worker."}, []string{"worker_id"}),
		latency: register.NewHistogram(prometheus.HistogramOpts{Name: "thompson_processor_request_latency_seconds",
			Help: "Time from the arrival of a request to the end of its response."}),
		active: register.NewGauge(prometheus.GaugeOpts{Name: "thompson_processor_active_requests", Help: "In-flight requests."}),
	}
}

// began counts a request that is about to be forwarded; ended must follow.
func (m *thompsonMetrics) began() {
	if m != nil {
		m.requests.Inc()
		m.active.Inc()
	}
}

func (m *thompsonMetrics) ended(x *proxy.Exchange, now time.Time) {
	if m == nil {
		return
	}
	m.active.Dec()
	m.latency.Observe(now.Sub(x.Arrived).Seconds())
	if x.Usage.Known {
		m.tokensIn.Add(float64(x.Usage.PromptTokens))
	} else {
		m.tokensIn.Add(float64(x.Decision.Tokens))
	}
	m.tokensOut.Add(float64(x.Usage.OutputTokens))
}

func (m *thompsonMetrics) routedTo(worker string) {
	if m != nil {
		m.routed.WithLabelValues(worker).Inc()
	}
}

func (m *thompsonMetrics) refused() {
	if m != nil {
		m.routerErrors.Inc()
	}
}

func (m *thompsonMetrics) engineFailed() {
	if m != nil {
		m.engineErrors.Inc()
	}
}

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
