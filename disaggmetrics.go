package main

import (
	"context"
	"errors"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
)

// disaggMetrics tell of requests that a prefill worker and a decode worker
// shared, or might have.
type disaggMetrics struct {
	requests *prometheus.CounterVec
	prefill  *prometheus.HistogramVec
	handover *prometheus.HistogramVec
	transfer *prometheus.HistogramVec
}

// Results of shared requests, values of a label.
const (
	sharedOK              = "ok"
	sharedRecomputed      = "recomputed" // the prefill worker named no blocks: the decode worker computed the prompt again
	sharedRefused         = "refused"    // a worker says that the request is wrong
	sharedPrefillFailed   = "prefill_failed"
	sharedPrefillTimeout  = "prefill_timeout"
	sharedHandoverTimeout = "handover_timeout"
	sharedDecodeFailed    = "decode_failed"
	sharedAbandoned       = "abandoned" // the client left
)

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

// whole counts a request that stayed whole.
func (m *disaggMetrics) whole(why string) {
	m.requests.WithLabelValues(KindNone.String(), why).Inc()
}

// ended counts an attempt at a shared request, which came to err.
func (m *disaggMetrics) ended(ctx context.Context, kind Kind, x *Exchange, err error) {
	m.requests.WithLabelValues(kind.String(), x.Shared.result(ctx, x.Status, err)).Inc()
	if first := x.Shared.firstByte(); first > 0 {
		m.transfer.WithLabelValues(kind.String()).Observe(first.Seconds())
	}
}

// result says what came of a shared request that ended with err, or with an
// answer of that HTTP status.
func (r *sharedRequest) result(ctx context.Context, status int, err error) string {
	var late *legTimeout
	var refusal *prefillRefusal
	var prefill *prefillFailure
	switch {
	case err != nil && ctx.Err() != nil:
		return sharedAbandoned
	case err == nil && status >= http.StatusInternalServerError:
		return sharedDecodeFailed
	case err == nil && status >= http.StatusBadRequest:
		return sharedRefused
	case err == nil && r.lost:
		return sharedRecomputed
	case err == nil:
		return sharedOK
	case errors.As(err, &late):
		return late.result
	case errors.As(err, &refusal):
		return sharedRefused
	case errors.As(err, &prefill):
		return sharedPrefillFailed
	}
	return sharedDecodeFailed
}
