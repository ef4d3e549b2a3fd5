package web

import "github.com/prometheus/client_golang/prometheus"

// Collectors returns the metrics of the memory that request bodies use.
func (b *Bodies) Collectors() []prometheus.Collector {
	return []prometheus.Collector{
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvrouter_inflight_body_bytes",
			Help: "Memory used by the bodies of in-flight requests, bytes."},
			func() float64 { return float64(b.Held()) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvrouter_bodies_refused_total",
			Help: "Requests rejected because the bodies of in-flight requests used all the memory allowed for them."},
			func() float64 { return float64(b.Refused()) }),
	}
}
