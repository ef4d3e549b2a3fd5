package proxy

import "github.com/prometheus/client_golang/prometheus"

// Collectors returns the metric of the events that are read by a parser.
func (p *Proxy) Collectors() []prometheus.Collector {
	return []prometheus.Collector{
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvrouter_stream_events_rewritten_total", Help: "Events of continuable streams that a worker wrote in another form than compact JSON, and that were parsed and rewritten."},
			func() float64 { return float64(p.rewritten.Load()) }),
	}
}
