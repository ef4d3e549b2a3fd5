package telemetry

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/models"
	"kvrouter/internal/outlier"
)

// outlierCollector shows which workers are out for their failures at each scrape, so
// that a worker that is gone leaves no series behind.
type outlierCollector struct {
	models                              *models.Set
	ejections, ejected, held, rate, all *prometheus.Desc
}

func newOutlierCollector(models *models.Set) *outlierCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("kvrouter_"+name, help, append([]string{"worker_id", "dp_rank"}, labels...), nil)
	}
	return &outlierCollector{
		models:    models,
		ejections: desc("ejections_total", "How often the worker was taken out for its failures, by reason.", "reason"),
		ejected:   desc("worker_ejected", "1 while the worker is out for its failures."),
		held:      desc("worker_held", "1 while the worker gets no requests because it has asked for a pause, or is suspected of being misconfigured."),
		rate:      desc("worker_success_rate", "Share of the worker's requests of the last 10 s that it did not fail, 0 to 1."),
		all:       prometheus.NewDesc("kvrouter_panic_mode", "1 while more workers are out than --max-ejection-percent allows, so that all are used.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *outlierCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.ejections, c.ejected, c.held, c.rate, c.all} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *outlierCollector) Collect(out chan<- prometheus.Metric) {
	flag := func(d *prometheus.Desc, set bool, labels ...string) {
		value := 0.0
		if set {
			value = 1
		}
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	records, desperate := c.models.Outliers()
	flag(c.all, desperate)
	names := c.models.Names().Now()
	for _, r := range records {
		labels := []string{names.Label(r.Worker.Worker), strconv.FormatUint(uint64(r.Worker.Rank), 10)}
		flag(c.ejected, r.State == outlier.StateOut, labels...)
		flag(c.held, r.State == outlier.StateHeld, labels...)
		out <- prometheus.MustNewConstMetric(c.rate, prometheus.GaugeValue, r.SuccessRate, labels...)
		for kind, n := range r.Ejections {
			out <- prometheus.MustNewConstMetric(c.ejections, prometheus.CounterValue, float64(n), append(labels, kind.String())...)
		}
	}
}
