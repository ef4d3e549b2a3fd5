package extproc

import "github.com/prometheus/client_golang/prometheus"

// Collectors returns the metrics of the picker's limits and of session tokens.
func (p *Server) Collectors() []prometheus.Collector {
	all := []prometheus.Collector{
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvrouter_ext_proc_inflight_bytes",
			Help: "Memory used by the in-flight requests of gateways, bytes."},
			func() float64 { return float64(p.memory.held.Load()) }),
	}
	for r := range reasons {
		all = append(all, prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvrouter_ext_proc_refused_total",
			Help: "Requests of gateways refused because of a limit.", ConstLabels: prometheus.Labels{"reason": r.String()}},
			func() float64 { return float64(p.refused[r].Load()) }))
	}
	return append(all, p.tokens.Collectors()...)
}
