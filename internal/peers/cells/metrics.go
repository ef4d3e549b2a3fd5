package cells

import (
	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/base/metrics"
	"kvrouter/internal/cache/summary"
)

// Collector returns the metrics of what is sent to the routers above.
func (t *Reporter) Collector() prometheus.Collector {
	var set metrics.Set
	readers := set.Gauge("kvrouter_cell_readers", "Routers above that follow this one.")
	sent := set.Counter("kvrouter_cell_sent_bytes_total", "Bytes of the summary of cached blocks sent to routers above.")
	snapshots := set.Counter("kvrouter_cell_snapshots_total", "Whole summaries sent to routers above that join, or have missed too much.")
	held := set.Gauge("kvrouter_cell_prefixes", "Prefixes cached by a worker, by state: listed in the summary, omitted (summary full).",
		"state")
	return set.Collector(func(out metrics.Out) {
		out.Show(readers, float64(t.counts.Readers.Load()))
		out.Show(sent, float64(t.counts.Sent.Load()))
		out.Show(snapshots, float64(t.counts.Snapshots.Load()))
		var size summary.Size
		if t.deps.Book != nil {
			size = t.deps.Book.Size()
		}
		out.Show(held, float64(size.Held-size.Left), "listed")
		out.Show(held, float64(size.Left), "omitted")
	})
}
