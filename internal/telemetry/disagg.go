package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/kv"
)

// disaggMetrics count and time requests that a prefill worker and a decode worker
// share, and those that stay whole although workers have roles.
type disaggMetrics struct {
	requests *prometheus.CounterVec
	prefill  *prometheus.HistogramVec
	handover *prometheus.HistogramVec
	transfer *prometheus.HistogramVec
}

// handoverBuckets spans 10 µs to 1 s.
var handoverBuckets = []float64{.00001, .000025, .00005, .0001, .00025, .0005, .001, .0025, .005, .01, .025, .1, 1}

func newDisaggMetrics(registry *prometheus.Registry) *disaggMetrics {
	histogram := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "kvrouter_disagg_" + name, Help: help, Buckets: buckets}, []string{"kind"})
	}
	m := &disaggMetrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kvrouter_disagg_requests_total",
			Help: "Attempts at requests while a worker has a role, by how the workers hand prompts over and what came of it; kind none: the request stayed whole, and why.",
		}, []string{"kind", "result"}),
		prefill:  histogram("prefill_seconds", "From sending a prefill leg to the end of its answer.", secondsBuckets),
		handover: histogram("handover_seconds", "From there to the decode request having been sent, where legs follow each other.", handoverBuckets),
		transfer: histogram("transfer_seconds", "From the end of a prefill leg to the first byte of the answer.", secondsBuckets),
	}
	registry.MustRegister(m.requests, m.prefill, m.handover, m.transfer)
	return m
}

// StayedWhole implements proxy.Observer.
func (t *Metrics) StayedWhole(why string) {
	t.disagg.requests.WithLabelValues(kv.KindNone.String(), why).Inc()
}

// Prefilled implements proxy.Observer.
func (t *Metrics) Prefilled(kind kv.Kind, took time.Duration) {
	t.disagg.prefill.WithLabelValues(kind.String()).Observe(took.Seconds())
}

// HandedOver implements proxy.Observer.
func (t *Metrics) HandedOver(kind kv.Kind, took time.Duration) {
	t.disagg.handover.WithLabelValues(kind.String()).Observe(took.Seconds())
}

// SharedEnded implements proxy.Observer.
func (t *Metrics) SharedEnded(kind kv.Kind, result string, firstByte time.Duration) {
	t.disagg.requests.WithLabelValues(kind.String(), result).Inc()
	if firstByte > 0 {
		t.disagg.transfer.WithLabelValues(kind.String()).Observe(firstByte.Seconds())
	}
}
