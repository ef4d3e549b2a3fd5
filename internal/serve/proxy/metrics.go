package proxy

import "github.com/prometheus/client_golang/prometheus"

// Results of a control call, as labels.
const (
	controlDone   = "done"
	controlFailed = "failed"
)

// newControlCalls returns the count of the calls by which trainers and operators change engines.
func newControlCalls() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvrouter_control_calls_total",
		Help: "Administration calls that were sent to a worker, by path and result: done, failed."}, []string{"path", "result"})
}

// Collectors returns the metrics of the events that are read by a parser, and of control calls.
func (p *Proxy) Collectors() []prometheus.Collector {
	return []prometheus.Collector{
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvrouter_stream_events_rewritten_total", Help: "Events of continuable streams that a worker wrote in another form than compact JSON, and that were parsed and rewritten."},
			func() float64 { return float64(p.rewritten.Load()) }),
		p.controlCalls,
	}
}
