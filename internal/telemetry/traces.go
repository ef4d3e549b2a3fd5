package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/tracing"
)

// WatchTraces adds what becomes of spans to the metrics, and examples of traces to the
// time to the first token, which a scraper gets that asks for OpenMetrics. A nil tracer
// changes nothing. Call it once, before Handler.
func (t *Metrics) WatchTraces(tracer *tracing.Tracer) {
	if tracer == nil {
		return
	}
	t.traced = true
	for _, c := range []struct {
		name, help string
		n          func(tracing.Counts) uint64
	}{
		{"ended", "Spans of traced requests.", func(c tracing.Counts) uint64 { return c.Ended }},
		{"sent", "Spans that the collector took.", func(c tracing.Counts) uint64 { return c.Sent }},
		{"failed", "Spans that the collector did not take.", func(c tracing.Counts) uint64 { return c.Failed }},
	} {
		t.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvrouter_trace_spans_" + c.name + "_total", Help: c.help}, func() float64 {
			return float64(c.n(tracer.Counts()))
		}))
	}
}

// observe records a time, with a trace as an example of it; empty: without.
func observe(into prometheus.Observer, took time.Duration, trace string) {
	if exemplars, can := into.(prometheus.ExemplarObserver); can && trace != "" {
		exemplars.ObserveWithExemplar(took.Seconds(), prometheus.Labels{"trace_id": trace})
		return
	}
	into.Observe(took.Seconds())
}
