package relay

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/metrics"
)

// Collector returns the metrics of the cells below.
func (b *Below) Collector() prometheus.Collector {
	var s metrics.Set
	known := s.Gauge("kvrouter_relay_cell_known", "1 while the relay of a cell has told what its workers hold, otherwise 0.", "worker_id")
	blocks := s.Gauge("kvrouter_relay_cell_blocks", "Different blocks that the relay of a cell tells of.", "worker_id")
	return s.Collector(func(out metrics.Out) {
		for _, c := range b.cells {
			held, worker := c.client.held.Load(), strconv.FormatUint(c.Worker, 10)
			out.Show(known, metrics.Bool(held != nil), worker)
			if held != nil {
				out.Show(blocks, float64(held.count()), worker)
			}
		}
	})
}

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
