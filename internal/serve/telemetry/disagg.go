package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"kvrouter/internal/base/kv"
)

// disaggMetrics count and time disaggregated requests, and count those that one worker
// served whole although workers have roles.
type disaggMetrics struct {
	requests *prometheus.CounterVec
	prefill  *prometheus.HistogramVec
	handover *prometheus.HistogramVec
	transfer *prometheus.HistogramVec
}

// handoverBuckets range from 10 µs to 1 s.
var handoverBuckets = []float64{.00001, .000025, .00005, .0001, .00025, .0005, .001, .0025, .005, .01, .025, .1, 1}

func newDisaggMetrics(register promauto.Factory) *disaggMetrics {
	histogram := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		return register.NewHistogramVec(prometheus.HistogramOpts{Name: "kvrouter_disagg_" + name, Help: help, Buckets: buckets}, []string{"kind"})
	}
	return &disaggMetrics{
		requests: register.NewCounterVec(prometheus.CounterOpts{
			Name: "kvrouter_disagg_requests_total",
			Help: "Request attempts while a worker has a role, by KV connector and result. Kind none: the request was aggregated; the result has " +
				"the reason.",
		}, []string{"kind", "result"}),
		prefill: histogram("prefill_seconds", "Time from sending a prefill request to the end of its response.", secondsBuckets),
		handover: histogram("handover_seconds",
			"Time from the end of a prefill response to the decode request having been sent, where decode follows prefill.", handoverBuckets),
		transfer: histogram("transfer_seconds", "Time from the end of a prefill response to the first byte of the decode response.",
			secondsBuckets),
	}
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
