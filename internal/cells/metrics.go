package cells

import (
	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/metrics"
	"kvrouter/internal/summary"
)

// Collector returns the metrics of what is told to the routers above.
func (t *Teller) Collector() prometheus.Collector {
	var set metrics.Set
	readers := set.Gauge("kvrouter_cell_readers", "Routers above this one that follow it.")
	told := set.Counter("kvrouter_cell_told_bytes_total", "Bytes of the summary of cached blocks sent to routers above.")
	snapshots := set.Counter("kvrouter_cell_snapshots_total", "Whole summaries sent to routers above: to those that join, or have missed too much.")
	held := set.Gauge("kvrouter_cell_prefixes", "Prefixes held by a worker: in the summary (told), or not because it is as large as it may be (left_out).", "state")
	return set.Collector(func(out metrics.Out) {
		out.Show(readers, float64(t.counts.Readers.Load()))
		out.Show(told, float64(t.counts.Told.Load()))
		out.Show(snapshots, float64(t.counts.Snapshots.Load()))
		var size summary.Size
		if t.deps.Book != nil {
			size = t.deps.Book.Size()
		}
		out.Show(held, float64(size.Held-size.Left), "told")
		out.Show(held, float64(size.Left), "left_out")
	})
}
