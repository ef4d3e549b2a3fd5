package telemetry

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/kv"
	"kvrouter/internal/proxy"
	"kvrouter/internal/router"
	"kvrouter/internal/thompson"
)

// thompsonMetrics are the metrics of policy thompson under the names of the NeMo
// Agent Toolkit: thompson_processor_ for its processor, which forwards requests,
// and thompson_router_ for its router, which decides. Metrics of workers have one
// series for each worker rank. On a nil receiver the methods do nothing.
type thompsonMetrics struct {
	router *router.Router
	fleet  func() []uint64

	requests, tokensIn, tokensOut, routerErrors, engineErrors prometheus.Counter
	latency                                                   prometheus.Histogram
	active                                                    prometheus.Gauge
	routed                                                    *prometheus.CounterVec

	decisions, overlap, reward, alpha, beta     *prometheus.Desc
	feedback, reuse, tokens                     *prometheus.Desc
	pending, series, timeouts, stayed, switched *prometheus.Desc

	mu   sync.Mutex      // guards seen
	seen map[string]bool // workers that routed has series of
}

// watchThompson adds these metrics if thompson is the router's policy. The series of
// removed workers are deleted at each scrape.
func (t *Metrics) watchThompson(router *router.Router, fleet func() []uint64) {
	processor := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Name: "thompson_processor_" + name, Help: help}
	}
	perRank := []string{"worker_id", "dp_rank"}
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("thompson_router_"+name, help, labels, nil)
	}
	m := &thompsonMetrics{
		router: router, fleet: fleet, seen: map[string]bool{},

		requests:     prometheus.NewCounter(processor("requests_total", "Requests with a prompt that were forwarded.")),
		tokensIn:     prometheus.NewCounter(processor("tokens_in_total", "Prompt tokens of forwarded requests.")),
		tokensOut:    prometheus.NewCounter(processor("tokens_out_total", "Output tokens of forwarded requests, as reported in the workers' usage.")),
		routerErrors: prometheus.NewCounter(processor("router_errors_total", "Requests rejected because no worker could serve them.")),
		engineErrors: prometheus.NewCounter(processor("engine_errors_total", "Requests that failed on a worker, including those served by a retry.")),
		routed:       prometheus.NewCounterVec(processor("routing_decisions_total", "Requests sent to the worker."), []string{"worker_id"}),
		latency:      prometheus.NewHistogram(prometheus.HistogramOpts{Name: "thompson_processor_request_latency_seconds", Help: "Time from the arrival of a request to the end of its response."}),
		active:       prometheus.NewGauge(prometheus.GaugeOpts{Name: "thompson_processor_active_requests", Help: "In-flight requests."}),

		feedback: desc("feedback_latency_seconds", "Latencies reported to the policy as feedback.", perRank...),
		reuse:    desc("reuse_budget", "Remaining requests of the series at each decision."),
		tokens:   desc("tokens_per_request", "Prompt tokens of each decision."),

		decisions: desc("decisions_total", "Decisions for the worker.", perRank...),
		overlap:   desc("kv_overlap", "Cached share of the prompt at the last decision for the worker, 0 to 1.", perRank...),
		reward:    desc("reward", "The worker's last reward, 0 to 1; 0.5 equals the baseline latency.", perRank...),
		alpha:     desc("beta_alpha", "Alpha of the worker's Beta distribution of rewards.", perRank...),
		beta:      desc("beta_beta", "Beta of the worker's Beta distribution of rewards.", perRank...),
		pending:   desc("pending_decisions", "Decisions that await feedback."),
		series:    desc("prefix_state_size", "Series of requests with remaining requests."),
		timeouts:  desc("timeout_penalties_total", "Decisions counted as failed because their feedback timed out."),
		stayed:    desc("sticky_decisions_total", "Decisions for the worker that had served the series before."),
		switched:  desc("switch_decisions_total", "Decisions for another worker than the one that had served the series before."),
	}
	if !thompson.With(router.WithPolicy, func(*thompson.Policy) {}) {
		return
	}
	t.thompson = m
	t.registry.MustRegister(m)
}

func (m *thompsonMetrics) counters() []prometheus.Collector {
	return []prometheus.Collector{
		m.requests, m.tokensIn, m.tokensOut, m.routerErrors, m.engineErrors, m.routed, m.latency, m.active,
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

func (m *thompsonMetrics) routedTo(w kv.WorkerKey) {
	if m != nil {
		m.see(w.Worker)
		m.routed.WithLabelValues(m.router.Names().Label(w.Worker)).Inc()
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

func (m *thompsonMetrics) see(worker uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seen[m.router.Names().Label(worker)] = true
}

func rankLabels(names *kv.Names, w kv.WorkerKey) []string {
	return []string{names.Label(w.Worker), strconv.FormatUint(uint64(w.Rank), 10)}
}

// forgetBut deletes the series of workers that are not in the fleet.
func (m *thompsonMetrics) forgetBut(fleet map[string]bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for worker := range m.seen {
		if !fleet[worker] {
			m.routed.DeletePartialMatch(prometheus.Labels{"worker_id": worker})
			delete(m.seen, worker)
		}
	}
}

// Describe implements prometheus.Collector.
func (m *thompsonMetrics) Describe(out chan<- *prometheus.Desc) {
	for _, c := range m.counters() {
		c.Describe(out)
	}
	for _, d := range []*prometheus.Desc{m.decisions, m.overlap, m.reward, m.alpha, m.beta, m.feedback, m.reuse, m.tokens, m.pending, m.series, m.timeouts, m.stayed, m.switched} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (m *thompsonMetrics) Collect(out chan<- prometheus.Metric) {
	fleet, names := map[string]bool{}, m.router.Names().Now()
	for _, id := range m.fleet() {
		fleet[names.Label(id)] = true
	}
	m.forgetBut(fleet)
	for _, c := range m.counters() {
		c.Collect(out)
	}
	var stats thompson.Stats
	thompson.With(m.router.WithPolicy, func(p *thompson.Policy) { stats = p.Stats() })
	show := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, kind, value, labels...)
	}
	histogram := func(d *prometheus.Desc, h thompson.Histogram, labels ...string) {
		buckets := map[float64]uint64{}
		for i, bound := range h.Bounds {
			buckets[bound] = h.Counts[i]
		}
		out <- prometheus.MustNewConstHistogram(d, h.Count, h.Sum, buckets, labels...)
	}
	for _, w := range stats.Workers {
		labels := rankLabels(names, w.Worker)
		if !fleet[labels[0]] {
			continue
		}
		show(m.decisions, prometheus.CounterValue, float64(w.Decisions), labels...)
		show(m.overlap, prometheus.GaugeValue, w.Overlap, labels...)
		show(m.reward, prometheus.GaugeValue, w.Reward, labels...)
		show(m.alpha, prometheus.GaugeValue, w.Alpha, labels...)
		show(m.beta, prometheus.GaugeValue, w.Beta, labels...)
		if w.Latency.Count > 0 {
			histogram(m.feedback, w.Latency, labels...)
		}
	}
	histogram(m.reuse, stats.Reuse)
	histogram(m.tokens, stats.Tokens)
	show(m.pending, prometheus.GaugeValue, float64(stats.Pending))
	show(m.series, prometheus.GaugeValue, float64(stats.Series))
	show(m.timeouts, prometheus.CounterValue, float64(stats.Timeouts))
	show(m.stayed, prometheus.CounterValue, float64(stats.Stayed))
	show(m.switched, prometheus.CounterValue, float64(stats.Switched))
}
