package telemetry

import "github.com/prometheus/client_golang/prometheus"

// edgeCollector shows the panics of parsers at each scrape.
type edgeCollector struct {
	panics func() map[string]uint64
	desc   *prometheus.Desc
}

// WatchEdges adds how often what parses the words of others has panicked, by edge.
// Call it once.
func (t *Metrics) WatchEdges(panics func() map[string]uint64) {
	t.registry.MustRegister(&edgeCollector{panics, prometheus.NewDesc("kvrouter_parser_panics_total", "Panics of what parses what others send, by edge. What was parsed is dropped.", []string{"edge"}, nil)})
}

// Describe implements prometheus.Collector.
func (c *edgeCollector) Describe(out chan<- *prometheus.Desc) { out <- c.desc }

// Collect implements prometheus.Collector.
func (c *edgeCollector) Collect(out chan<- prometheus.Metric) {
	for edge, n := range c.panics() {
		out <- prometheus.MustNewConstMetric(c.desc, prometheus.CounterValue, float64(n), edge)
	}
}
