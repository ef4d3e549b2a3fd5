package relay

import "github.com/prometheus/client_golang/prometheus"

// Collectors returns the metrics of what the server tells.
func (x *Server) Collectors() []prometheus.Collector {
	return []prometheus.Collector{
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvrouter_relay_blocks", Help: "Different blocks that the relay tells of."},
			func() float64 { return float64(x.holdings.Counts().Blocks) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvrouter_relay_omitted_blocks_total", Help: "Blocks of workers that the relay left out because its filter was full."},
			func() float64 { return float64(x.holdings.Counts().Omitted) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvrouter_relay_subscribers", Help: "Streams that follow the relay's blocks."},
			func() float64 { return float64(x.holdings.Counts().Subscribers) }),
	}
}
