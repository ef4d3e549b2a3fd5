// Package telemetry shows what the router does: Prometheus metrics, and a record of
// finished requests that simulate can replay.
package telemetry

import (
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"kvrouter/internal/jsonbody"
	"kvrouter/internal/kv"
	"kvrouter/internal/proxy"
	"kvrouter/internal/replica"
	"kvrouter/internal/router"
	"kvrouter/internal/workers"
)

// Metrics holds every metric of the router. Names start with kvrouter_; the
// label worker_id has one value a worker, what it is called, so its number of series is
// bounded by the fleet.
type Metrics struct {
	registry *prometheus.Registry
	names    *kv.Names // of workers; nil: all are called by their ids
	dynamo   *dynamoMetrics
	disagg   *disaggMetrics
	thompson *thompsonMetrics // nil: another policy
	traced   bool             // the page goes out as OpenMetrics to who asks for that

	requests      *prometheus.CounterVec
	duration      *prometheus.HistogramVec
	firstToken    *prometheus.HistogramVec
	interToken    *prometheus.HistogramVec
	decision      *prometheus.HistogramVec
	promptTokens  *prometheus.CounterVec
	outputTokens  *prometheus.CounterVec
	predicted     *prometheus.CounterVec
	cached        *prometheus.CounterVec
	compared      *prometheus.CounterVec
	predictions   *prometheus.CounterVec
	promptDiffers *prometheus.CounterVec
	retries       *prometheus.CounterVec
	denied        prometheus.Counter
	eventLag      *prometheus.HistogramVec

	// seen has the labels of the workers that series above may speak of: a sync.Map,
	// as requests mostly look up what is there.
	seen  sync.Map
	fleet func() []uint64 // nil: workers never go

	summing sync.Mutex   // held while series are summed up, or go
	gone    proxy.Totals // of workers that are gone
}

// PromptSample counts prompts by how their tokens were found.
type PromptSample struct {
	Sources map[string]uint64 // where the tokens came from
	Reasons map[string]uint64 // why they were not computed here
}

// secondsBuckets spans a token step of a fast engine to a long prompt on a slow
// one.
var secondsBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300}

// decisionBuckets spans a lookup to a prompt that a worker had to render.
var decisionBuckets = prometheus.ExponentialBuckets(0.000001, 3, 16)

// New returns metrics whose per-worker gauges and prompt counters come from the
// given functions at each scrape.
func New(fleet func() []workers.Sample, prompts func() PromptSample) *Metrics {
	t := &Metrics{registry: prometheus.NewRegistry()}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvrouter_" + name, Help: help}, labels)
		t.registry.MustRegister(c)
		return c
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "kvrouter_" + name, Help: help, Buckets: buckets}, labels)
		t.registry.MustRegister(h)
		return h
	}
	t.requests = counter("requests_total", "Requests answered, by the worker that answered (none: no worker did), route and HTTP status (499: the client went away).", "worker_id", "route", "status")
	t.duration = histogram("request_duration_seconds", "From a request's arrival to the end of its answer.", secondsBuckets, "route")
	t.firstToken = histogram("time_to_first_token_seconds", "From a request's arrival to the first chunk of its stream.", secondsBuckets, "worker_id")
	t.interToken = histogram("inter_token_latency_seconds", "Between two chunks of a stream.", secondsBuckets, "worker_id")
	t.decision = histogram("decision_seconds", "Time spent on a routing decision, by stage: tokens, hash, lookup, schedule, total.", decisionBuckets, "stage")
	t.promptTokens = counter("prompt_tokens_total", "Prompt tokens of routed requests, as the workers' usage reports them.", "worker_id")
	t.outputTokens = counter("output_tokens_total", "Output tokens, as the workers' usage reports them.", "worker_id")
	t.predicted = counter("overlap_tokens_predicted_total", "Prompt tokens that the index expected in the chosen worker's cache.", "worker_id")
	t.cached = counter("cached_tokens_reported_total", "Prompt tokens that the worker reported as cached.", "worker_id")
	t.compared = counter("compared_prompt_tokens_total", "Prompt tokens of the requests whose cached tokens kvrouter_cached_tokens_reported_total counts.", "worker_id")
	t.predictions = counter("predictions_total", "Answers that report cached tokens, by how the prediction compares: exact, over, under.", "result")
	t.promptDiffers = counter("prompt_tokens_mismatch_total", "Answers whose usage.prompt_tokens differs from the router's own count, by where the tokens came from.", "source")
	t.retries = counter("retries_total", "Requests sent to another worker after one failed before its first byte.", "worker_id")
	t.denied = prometheus.NewCounter(prometheus.CounterOpts{Name: "kvrouter_retry_budget_exhausted_total", Help: "Requests not sent to another worker because the budget of retries was used up."})
	t.registry.MustRegister(t.denied)
	t.eventLag = histogram("kv_event_lag_seconds", "From the engine's time stamp of a KV event batch to its arrival here.", secondsBuckets, "worker_id")
	t.dynamo = newDynamoMetrics(t.registry)
	t.disagg = newDisaggMetrics(t.registry)
	t.registry.MustRegister(
		newFleetCollector(t, fleet, prompts),
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return t
}

// Handler serves the metrics page.
func (t *Metrics) Handler() http.Handler {
	page := promhttp.HandlerFor(t.registry, promhttp.HandlerOpts{EnableOpenMetrics: t.traced})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t.forgetGone()
		page.ServeHTTP(w, r)
	})
}

// WatchFleet makes the series of workers go that are not in the fleet any more, at
// the next scrape. Call it once, before the first request.
func (t *Metrics) WatchFleet(fleet func() []uint64) { t.fleet = fleet }

// see notes that there is a series of a worker.
func (t *Metrics) see(worker string) {
	if _, known := t.seen.Load(worker); !known {
		t.seen.Store(worker, nil)
	}
}

// perWorker lists the metrics whose series have the label worker_id and stay until
// they are deleted.
func (t *Metrics) perWorker() []interface {
	DeletePartialMatch(labels prometheus.Labels) int
} {
	return []interface {
		DeletePartialMatch(labels prometheus.Labels) int
	}{t.requests, t.firstToken, t.interToken, t.promptTokens, t.outputTokens, t.predicted, t.cached, t.compared, t.retries, t.eventLag}
}

// forgetGone deletes the series of workers that are gone. A request that was still
// on its way to one may make some anew: they go the next time.
func (t *Metrics) forgetGone() {
	if t.fleet == nil {
		return
	}
	t.summing.Lock()
	defer t.summing.Unlock()
	there := map[string]bool{noWorker: true}
	for _, id := range t.fleet() {
		there[t.names.Label(id)] = true
	}
	gone := map[string]bool{}
	t.seen.Range(func(worker, _ any) bool {
		if !there[worker.(string)] {
			t.seen.Delete(worker) // first: who makes a series now will note it again
			gone[worker.(string)] = true
		}
		return true
	})
	if len(gone) == 0 {
		return
	}
	t.sum(&t.gone, func(worker string) bool { return gone[worker] })
	for worker := range gone {
		for _, metric := range t.perWorker() {
			metric.DeletePartialMatch(prometheus.Labels{"worker_id": worker})
		}
	}
}

// noWorker is the label of requests that no worker has answered.
const noWorker = kv.NoWorker

// Guards counts what keeps the router itself within bounds, at each scrape.
type Guards struct {
	BodyBytes       func() int64  // that the bodies of requests in flight take
	BodiesRefused   func() uint64 // requests that found no memory for their body
	LinesSuppressed func() uint64 // log lines left out
	LinesLost       func() uint64 // lines missing in the records of requests and of KV events
}

// WatchGuards adds these counts to the metrics. Call it once.
func (t *Metrics) WatchGuards(g Guards) {
	count := func(name, help string, n func() uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvrouter_" + name + "_total", Help: help}, func() float64 { return float64(n()) })
	}
	t.registry.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvrouter_inflight_body_bytes", Help: "Memory that the bodies of requests in flight take, bytes."}, func() float64 { return float64(g.BodyBytes()) }),
		count("bodies_refused", "Requests refused because the bodies in flight took all memory that they may.", g.BodiesRefused),
		count("log_lines_suppressed", "Log lines left out because their place in the program had written too many.", g.LinesSuppressed),
		count("record_lines_lost", "Lines missing in the records of requests and of KV events: the disk was full or slow, or the file of events has its size.", g.LinesLost),
	)
}

// Began implements openai.Observer.
func (t *Metrics) Began(*http.Request, *proxy.Exchange) {}

// Accepted implements openai.Observer: it counts a request that has a prompt.
func (t *Metrics) Accepted(x *proxy.Exchange, _ *jsonbody.Body) {
	if x.Source != "" {
		t.thompson.began()
	}
}

// Decided implements openai.Observer: it records the times of one routing decision of a
// request that has a prompt.
func (t *Metrics) Decided(x *proxy.Exchange, pair *router.Pair) {
	if x.Source == "" {
		return
	}
	tokens, d := x.Prepared, pair.Took()
	t.decision.WithLabelValues("tokens").Observe(tokens.Seconds())
	t.decision.WithLabelValues("hash").Observe(d.HashTime.Seconds())
	t.decision.WithLabelValues("lookup").Observe(d.LookupTime.Seconds())
	t.decision.WithLabelValues("schedule").Observe(d.ScheduleTime.Seconds())
	t.decision.WithLabelValues("total").Observe((tokens + d.HashTime + d.LookupTime + d.ScheduleTime).Seconds())
	t.dynamo.decided(d)
	t.thompson.routedTo(d.Target.Key)
}

// EngineFailed implements proxy.Observer.
func (t *Metrics) EngineFailed() { t.thompson.engineFailed() }

// Retried implements proxy.Observer.
func (t *Metrics) Retried(worker uint64) {
	label := t.names.Label(worker)
	t.see(label)
	t.retries.WithLabelValues(label).Inc()
}

// RetryDenied implements proxy.Observer.
func (t *Metrics) RetryDenied() { t.denied.Inc() }

// InterToken implements proxy.Observer.
func (t *Metrics) InterToken(worker string, gap time.Duration, n int) {
	observer := t.interToken.WithLabelValues(worker)
	for range n {
		observer.Observe(gap.Seconds() / float64(n))
	}
}

// EventLag records the age of a KV event batch of w at its arrival.
func (t *Metrics) EventLag(w kv.WorkerKey, lag time.Duration) {
	label := t.names.Label(w.Worker)
	t.see(label)
	t.eventLag.WithLabelValues(label).Observe(lag.Seconds())
}

// Finished implements openai.Observer: it records a request that has ended.
func (t *Metrics) Finished(x *proxy.Exchange, now time.Time) {
	if x.Request != nil && x.Source != "" {
		t.thompson.ended(x, now)
	}
	if x.Refused != nil {
		t.refused(x.Served, x.Route, x.Refused)
	}
	t.see(x.Worker)
	if x.Shared != nil {
		t.see(x.Shared.Worker)
	}
	t.requests.WithLabelValues(x.Worker, x.Route, strconv.Itoa(x.Status)).Inc()
	t.duration.WithLabelValues(x.Route).Observe(now.Sub(x.Arrived).Seconds())
	if !x.FirstChunk.IsZero() {
		observe(t.firstToken.WithLabelValues(x.Worker), x.FirstChunk.Sub(x.Arrived), x.Trace.SampledID())
	}
	if !x.Usage.Known {
		return
	}
	t.promptTokens.WithLabelValues(x.Worker).Add(float64(x.Usage.PromptTokens))
	t.outputTokens.WithLabelValues(x.Worker).Add(float64(x.Usage.OutputTokens))
	if x.Decision.Tokens > 0 && x.Usage.PromptTokens != x.Decision.Tokens {
		t.promptDiffers.WithLabelValues(x.Source).Inc()
	}
	if x.Decision.Tokens > 0 && x.Usage.CachedKnown {
		worker := x.Worker
		if x.Shared != nil { // it is the prompt's worker that was expected to hold blocks
			worker = x.Shared.Worker
		}
		t.predicted.WithLabelValues(worker).Add(float64(x.Decision.OverlapTokens))
		t.cached.WithLabelValues(worker).Add(float64(x.Usage.CachedTokens))
		t.compared.WithLabelValues(worker).Add(float64(x.Usage.PromptTokens))
		result := "exact"
		if x.Decision.OverlapTokens > x.Usage.CachedTokens {
			result = "over"
		} else if x.Decision.OverlapTokens < x.Usage.CachedTokens {
			result = "under"
		}
		t.predictions.WithLabelValues(result).Inc()
	}
}

// fleetCollector reads the counts of other components at each scrape, so that a
// worker that is gone leaves no series behind.
type fleetCollector struct {
	metrics  *Metrics
	workers  func() []workers.Sample
	prompts  func() PromptSample
	up       *prometheus.Desc
	restarts *prometheus.Desc
	blocks   *prometheus.Desc
	inFlight *prometheus.Desc
	prefill  *prometheus.Desc
	running  *prometheus.Desc
	waiting  *prometheus.Desc
	usage    *prometheus.Desc
	events   *prometheus.Desc
	applied  *prometheus.Desc
	linked   *prometheus.Desc
	cold     *prometheus.Desc
	info     *prometheus.Desc
	sources  *prometheus.Desc
	reasons  *prometheus.Desc
}

func newFleetCollector(metrics *Metrics, fleet func() []workers.Sample, prompts func() PromptSample) *fleetCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("kvrouter_"+name, help, append([]string{"worker_id", "dp_rank"}, labels...), nil)
	}
	return &fleetCollector{
		metrics:  metrics,
		workers:  fleet,
		prompts:  prompts,
		sources:  prometheus.NewDesc("kvrouter_prompt_source_total", "Prompts by where their tokens came from: local, worker_render, worker_tokenize, none (routed by load alone).", []string{"source"}, nil),
		reasons:  prometheus.NewDesc("kvrouter_prompt_fallbacks_total", "Prompts whose tokens were not computed here, by reason.", []string{"reason"}, nil),
		up:       desc("worker_up", "1 while requests may go to the worker."),
		restarts: desc("worker_restarts_total", "How often the worker's process was started again."),
		blocks:   desc("worker_blocks", "KV blocks that the index knows the worker to hold."),
		inFlight: desc("worker_in_flight", "Requests sent to the worker and not yet ended."),
		prefill:  desc("worker_prefill_tokens", "Uncached prompt tokens sent to the worker whose first token has not come."),
		running:  desc("worker_running_requests", "Running requests, as published by the worker."),
		waiting:  desc("worker_waiting_requests", "Waiting requests, as published by the worker."),
		usage:    desc("worker_kv_cache_usage", "Share of the KV cache in use, 0 to 1, as published by the worker."),
		linked:   desc("kv_events_connected", "1 while the worker's KV events are subscribed to."),
		cold:     desc("worker_cold", "1 while blocks of the worker may be missing in the index, because the history of its cache is not known in full."),
		info:     desc("worker_info", "What the worker is, always 1: its URL, the first model that it serves, its role and its engine.", "url", "model", "role", "engine"),
		applied:  prometheus.NewDesc("dynamo_component_kv_cache_events_applied", "KV events applied to the index, by type and by what came of them.", []string{"worker_id", "dp_rank", "event_type", "status"}, nil),
		events:   desc("kv_events_total", "KV event stream of the worker, counted by kind.", "kind"),
	}
}

// Describe implements prometheus.Collector.
func (c *fleetCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.up, c.restarts, c.blocks, c.inFlight, c.prefill, c.running, c.waiting, c.usage, c.events, c.applied, c.linked, c.cold, c.info, c.sources, c.reasons} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *fleetCollector) Collect(out chan<- prometheus.Metric) {
	names := c.metrics.names.Now()
	for _, s := range c.workers() {
		labels := []string{names.Label(s.Worker.Worker), strconv.FormatUint(uint64(s.Worker.Rank), 10)}
		gauge := func(d *prometheus.Desc, value float64) {
			out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
		}
		flag := func(d *prometheus.Desc, set bool) {
			value := 0.0
			if set {
				value = 1
			}
			gauge(d, value)
		}
		out <- prometheus.MustNewConstMetric(c.info, prometheus.GaugeValue, 1, append(labels, infoLabels(s)...)...)
		flag(c.up, s.Up)
		out <- prometheus.MustNewConstMetric(c.restarts, prometheus.CounterValue, float64(s.Restarts), labels...)
		gauge(c.blocks, float64(s.Blocks))
		gauge(c.inFlight, float64(s.Load.InFlight))
		gauge(c.prefill, float64(s.Load.PrefillTokens))
		if s.Load.Fresh {
			gauge(c.running, float64(s.Load.Running))
			gauge(c.waiting, float64(s.Load.Waiting))
			gauge(c.usage, s.Load.KVUsage)
		}
		if s.EventCount != nil {
			flag(c.linked, s.Connected)
			flag(c.cold, s.Cold)
		}
		for kind, n := range s.EventCount {
			out <- prometheus.MustNewConstMetric(c.events, prometheus.CounterValue, float64(n), append(labels, kind)...)
		}
		for _, a := range appliedEvents(s.EventCount) {
			out <- prometheus.MustNewConstMetric(c.applied, prometheus.CounterValue, float64(a.n), append(labels, a.event, a.status)...)
		}
	}
	prompts := c.prompts()
	for source, n := range prompts.Sources {
		out <- prometheus.MustNewConstMetric(c.sources, prometheus.CounterValue, float64(n), source)
	}
	for reason, n := range prompts.Reasons {
		out <- prometheus.MustNewConstMetric(c.reasons, prometheus.CounterValue, float64(n), reason)
	}
}

// WatchReplicas adds what is told to and heard of other routers to the metrics.
// Call it once.
func (t *Metrics) WatchReplicas(counts func() replica.Counts) {
	count := func(name, help string, n func(replica.Counts) uint64) {
		t.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvrouter_replica_" + name + "_total", Help: help},
			func() float64 { return float64(n(counts())) }))
	}
	count("sent", "Changes told to other routers.", func(c replica.Counts) uint64 { return c.Sent })
	count("received", "Changes that other routers told.", func(c replica.Counts) uint64 { return c.Received })
	count("dropped", "Changes that there was no room for, or that make no sense.", func(c replica.Counts) uint64 { return c.Dropped })
	count("resent", "Requests in flight that were told to other routers again, which had missed them or had just come.", func(c replica.Counts) uint64 { return c.Resent })
	count("refused", "Messages of other routers that are not sealed by --replica-key, or are malformed.", func(c replica.Counts) uint64 { return c.Refused })
	count("lost", "Times that another router was no longer heard, and what it had booked forgotten.", func(c replica.Counts) uint64 { return c.Lost })
	t.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvrouter_replica_bookings", Help: "Requests in flight from other routers."},
		func() float64 { return float64(counts().Held) }))
	t.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvrouter_replica_peers", Help: "Other routers that are heard."},
		func() float64 { return float64(counts().Peers) }))
}
