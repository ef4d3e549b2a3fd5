package relay

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/base/metrics"
)

// Collector returns the metrics of the cells below.
func (b *Below) Collector() prometheus.Collector {
	var s metrics.Set
	known := s.Gauge("kvrouter_relay_cell_known", "1 while the blocks of a cell are known from its relay, otherwise 0.", "worker_id")
	blocks := s.Gauge("kvrouter_relay_cell_blocks", "Different blocks that the relay of a cell reports.", "worker_id")
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
