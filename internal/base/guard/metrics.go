package guard

import (
	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/base/metrics"
)

// NewCollector returns the metric of the panics that e has recovered, by edge.
func NewCollector(e *Edges) prometheus.Collector {
	var set metrics.Set
	panics := set.Counter("kvrouter_parser_panics_total", "Recovered panics in parsers of external input, by edge. The input is dropped.",
		"edge")
	return set.Collector(func(out metrics.Out) {
		for edge, n := range e.Panics() {
			out.Show(panics, float64(n), edge)
		}
	})
}
