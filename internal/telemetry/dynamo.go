package telemetry

import (
	"errors"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/kv"
	"kvrouter/internal/models"
	"kvrouter/internal/router"
)

// dynamoMetrics have the names, units and buckets of Dynamo's router, so that
// dashboards made for Dynamo work here too.
type dynamoMetrics struct {
	hash, sequence, lookup, schedule, total prometheus.Histogram // ms

	wait         prometheus.Histogram // s
	rejections   *prometheus.CounterVec
	backpressure *prometheus.CounterVec
}

// newDynamoMetrics registers the metrics. The label router_id tells several routers
// apart; like Dynamo's it is drawn at random at each start.
func newDynamoMetrics(registry *prometheus.Registry) *dynamoMetrics {
	id := prometheus.Labels{"router_id": strconv.FormatUint(rand.Uint64(), 10)}
	overhead := func(stage, help string, buckets []float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "dynamo_router_overhead_" + stage + "_ms", Help: "Time of a routing decision spent on " + help + ", ms.",
			Buckets: buckets, ConstLabels: id,
		})
		registry.MustRegister(h)
		return h
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dynamo_frontend_" + name, Help: help}, labels)
		registry.MustRegister(c)
		return c
	}
	hashing := prometheus.ExponentialBuckets(0.001, 2, 15)
	others := prometheus.ExponentialBuckets(0.01, 3, 17)
	m := &dynamoMetrics{
		hash:         overhead("block_hashing", "the hashes of the prompt's blocks", hashing),
		sequence:     overhead("seq_hashing", "the hashes of the prompt's prefixes", hashing),
		lookup:       overhead("indexer_find_matches", "the index", others),
		schedule:     overhead("scheduling", "choosing and booking, without a wait in the queue", others),
		total:        overhead("total", "all its stages, without a wait in the queue", others),
		rejections:   counter("model_rejection_total", "Requests refused because all workers were busy.", "model", "endpoint"),
		backpressure: counter("router_queue_backpressure_total", "Requests refused because the queue was full, or because they waited in it for too long.", "reason"),
		wait: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvrouter_queue_wait_seconds", Help: "Time that a request waited for a worker with room; those that found one at once are left out.", Buckets: secondsBuckets,
		}),
	}
	registry.MustRegister(m.wait)
	return m
}

// decided records the stages of one decision.
func (m *dynamoMetrics) decided(d router.Decision) {
	observe := func(h prometheus.Histogram, d time.Duration) { h.Observe(milliseconds(d)) }
	observe(m.hash, d.HashTime)
	observe(m.lookup, d.LookupTime)
	observe(m.schedule, d.ScheduleTime)
	if d.SequenceTime > 0 { // only policies that count blocks in use need them
		observe(m.sequence, d.SequenceTime)
	}
	observe(m.total, d.HashTime+d.LookupTime+d.SequenceTime+d.ScheduleTime)
	if d.QueueTime > 0 {
		m.wait.Observe(d.QueueTime.Seconds())
	}
}

// Refused counts a request that no worker could take, for reason err. model must
// be one that is served, or empty.
func (t *Metrics) Refused(model, route string, err error) {
	t.thompson.refused()
	switch {
	case errors.Is(err, router.ErrQueueFull):
		t.dynamo.backpressure.WithLabelValues("full").Inc()
	case errors.Is(err, router.ErrQueueTimeout):
		t.dynamo.backpressure.WithLabelValues("timeout").Inc()
	case errors.Is(err, router.ErrBusy):
		t.dynamo.rejections.WithLabelValues(model, route).Inc()
	}
}

// appliedCount is the number of events of one type with one status.
type appliedCount struct {
	event, status string
	n             uint64
}

// appliedEvents maps an event stream's counts (events.Stats.Counts) to Dynamo's
// event types and statuses.
func appliedEvents(counts map[string]uint64) []appliedCount {
	if counts == nil {
		return nil
	}
	return []appliedCount{
		{"stored", "ok", counts["stored"]},
		{"stored", "parent_block_not_found", counts["unknown_parent"]},
		{"stored", "invalid_block", counts["invalid_stored"]},
		{"removed", "ok", counts["removed"] - counts["removed_incomplete"]},
		{"removed", "block_not_found", counts["removed_incomplete"]},
		{"cleared", "ok", counts["cleared"]},
	}
}

// routerCollector shows the books of all models' routers at each scrape.
type routerCollector struct {
	models                            *models.Set
	blocks, tokens, pending, promised *prometheus.Desc
	saturation, held, known, sessions *prometheus.Desc
}

// Watch adds the books of all models to the metrics, which call workers as they do. Call
// it once, before anything is counted.
func (t *Metrics) Watch(models *models.Set) {
	t.names = models.Names()
	t.registry.MustRegister(newOutlierCollector(models), newModelCollector(models))
	worker := []string{"worker_id", "dp_rank", "worker_type"}
	t.registry.MustRegister(&routerCollector{
		models:   models,
		blocks:   prometheus.NewDesc("dynamo_frontend_worker_active_decode_blocks", "Blocks of the requests in flight on the worker; those that several share count once.", worker, nil),
		tokens:   prometheus.NewDesc("dynamo_frontend_worker_active_prefill_tokens", "Uncached prompt tokens of the requests on the worker whose first token has not come.", worker, nil),
		pending:  prometheus.NewDesc("dynamo_frontend_router_queue_pending_requests", "Requests that wait for a worker with room.", nil, nil),
		promised: prometheus.NewDesc("dynamo_frontend_router_queue_pending_isl_tokens", "Prompt tokens of the requests that wait for a worker with room.", nil, nil),

		saturation: prometheus.NewDesc("kvrouter_saturation", "Predicted wait for the first token of a request that comes now, by --saturation-target: 0 with an idle worker, beyond 1 with too few. Without any worker 1 while requests are held, else 0. Of several models the highest.", nil, nil),
		held:       prometheus.NewDesc("kvrouter_held_requests", "Requests that wait for a worker to come (--hold-when-empty).", nil, nil),
		known:      prometheus.NewDesc("kvrouter_sessions", "Sessions that are remembered.", nil, nil),
		sessions:   prometheus.NewDesc("kvrouter_session_requests_total", "Choices of a worker for requests with a session, by what became of it: new, kept, moved.", []string{"result"}, nil),
	})
}

// workerType is Dynamo's name of a role: a worker that takes whole requests is a
// decode worker there.
func workerType(role kv.Role) string {
	if role == kv.RolePrefill {
		return "prefill"
	}
	return "decode"
}

// Describe implements prometheus.Collector.
func (c *routerCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.blocks, c.tokens, c.pending, c.promised, c.saturation, c.held, c.known, c.sessions} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *routerCollector) Collect(out chan<- prometheus.Metric) {
	names := c.models.Names().Now()
	for _, load := range c.models.Loads() {
		labels := []string{names.Label(load.Key.Worker), strconv.FormatUint(uint64(load.Key.Rank), 10), workerType(load.Role)}
		out <- prometheus.MustNewConstMetric(c.blocks, prometheus.GaugeValue, float64(load.PotentialDecodeBlocks), labels...)
		out <- prometheus.MustNewConstMetric(c.tokens, prometheus.GaugeValue, float64(load.PotentialPrefillTokens), labels...)
	}
	requests, tokens := c.models.QueueDepth()
	out <- prometheus.MustNewConstMetric(c.pending, prometheus.GaugeValue, float64(requests))
	out <- prometheus.MustNewConstMetric(c.promised, prometheus.GaugeValue, float64(tokens))
	out <- prometheus.MustNewConstMetric(c.saturation, prometheus.GaugeValue, c.models.Saturation())
	out <- prometheus.MustNewConstMetric(c.held, prometheus.GaugeValue, float64(c.models.Awaiting()))
	if !c.models.Default().Router.NamesSessions() {
		return
	}
	known, sessions := c.models.Sessions()
	out <- prometheus.MustNewConstMetric(c.known, prometheus.GaugeValue, float64(known))
	for result, n := range map[string]uint64{router.SessionNew: sessions.New, router.SessionKept: sessions.Kept, router.SessionMoved: sessions.Moved} {
		out <- prometheus.MustNewConstMetric(c.sessions, prometheus.CounterValue, float64(n), result)
	}
}
