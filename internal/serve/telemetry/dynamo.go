package telemetry

import (
	"errors"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"kvrouter/internal/decide/router"
)

// dynamoMetrics have the names, units and buckets of Dynamo's router, so that
// dashboards made for Dynamo work with kvrouter.
type dynamoMetrics struct {
	hash, sequence, lookup, schedule, total prometheus.Histogram // ms

	wait         prometheus.Histogram // s
	rejections   *prometheus.CounterVec
	backpressure *prometheus.CounterVec
}

// newDynamoMetrics registers the metrics. The label router_id distinguishes routers;
// as in Dynamo, it is random at each start.
func newDynamoMetrics(register promauto.Factory) *dynamoMetrics {
	id := prometheus.Labels{"router_id": strconv.FormatUint(rand.Uint64(), 10)}
	overhead := func(stage, help string, buckets []float64) prometheus.Histogram {
		return register.NewHistogram(prometheus.HistogramOpts{
			Name: "dynamo_router_overhead_" + stage + "_ms", Help: "Time that a routing decision spends on " + help + ", ms.",
			Buckets: buckets, ConstLabels: id,
		})
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return register.NewCounterVec(prometheus.CounterOpts{Name: "dynamo_frontend_" + name, Help: help}, labels)
	}
	hashing := prometheus.ExponentialBuckets(0.001, 2, 15)
	others := prometheus.ExponentialBuckets(0.01, 3, 17)
	return &dynamoMetrics{
		hash:       overhead("block_hashing", "block hashes", hashing),
		sequence:   overhead("seq_hashing", "sequence hashes", hashing),
		lookup:     overhead("indexer_find_matches", "index lookups", others),
		schedule:   overhead("scheduling", "selecting a worker and reserving capacity, without time in the queue", others),
		total:      overhead("total", "all stages, without time in the queue", others),
		rejections: counter("model_rejection_total", "Requests rejected because all workers were busy.", "model", "endpoint"),
		backpressure: counter("router_queue_backpressure_total", "Requests rejected because the queue was full or they timed out in it.",
			"reason"),
		wait: register.NewHistogram(prometheus.HistogramOpts{
			Name: "kvrouter_queue_wait_seconds", Help: "Time that a request spent in the queue. Requests that were not queued are left out.",
			Buckets: secondsBuckets,
		}),
	}
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

// refused counts a request that no worker could take because of err. model is a served
// model or empty.
func (t *Metrics) refused(model, route string, err error) {
	switch {
	case errors.Is(err, router.ErrQueueFull):
		t.dynamo.backpressure.WithLabelValues("full").Inc()
	case errors.Is(err, router.ErrQueueTimeout):
		t.dynamo.backpressure.WithLabelValues("timeout").Inc()
	case errors.Is(err, router.ErrBusy):
		t.dynamo.rejections.WithLabelValues(model, route).Inc()
	}
}
