package tracing

import "github.com/prometheus/client_golang/prometheus"

// Collectors returns the metrics of the spans; a nil Tracer has none.
func (t *Tracer) Collectors() []prometheus.Collector {
	if t == nil {
		return nil
	}
	counter := func(name, help string, n func(Counts) uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvrouter_trace_spans_" + name + "_total", Help: help},
			func() float64 { return float64(n(t.Counts())) })
	}
	return []prometheus.Collector{
		counter("ended", "Spans of traced requests that have ended.", func(c Counts) uint64 { return c.Ended }),
		counter("sent", "Spans accepted by the trace collector.", func(c Counts) uint64 { return c.Sent }),
		counter("failed", "Spans that could not be delivered to the trace collector.", func(c Counts) uint64 { return c.Failed }),
	}
}
