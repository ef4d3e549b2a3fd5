package telemetry

import "github.com/prometheus/client_golang/prometheus"

// Show adds the metrics of another package to the page. Call it before the page
// is served.
func (t *Metrics) Show(metrics prometheus.Collector) { t.registry.MustRegister(metrics) }
