package guard

import "github.com/prometheus/client_golang/prometheus"

// collector reads the panics of Edges at each scrape.
type collector struct {
	edges  *Edges
	panics *prometheus.Desc
}

// NewCollector returns the metric of the panics that e has recovered, by edge.
func NewCollector(e *Edges) prometheus.Collector {
	return collector{e, prometheus.NewDesc("kvrouter_parser_panics_total", "Recovered panics in parsers of external input, by edge. The input is dropped.", []string{"edge"}, nil)}
}

// Describe implements prometheus.Collector.
func (c collector) Describe(out chan<- *prometheus.Desc) { out <- c.panics }

// Collect implements prometheus.Collector.
func (c collector) Collect(out chan<- prometheus.Metric) {
	for edge, n := range c.edges.Panics() {
		out <- prometheus.MustNewConstMetric(c.panics, prometheus.CounterValue, float64(n), edge)
	}
}
