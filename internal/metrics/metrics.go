// Package metrics makes Prometheus collectors of values that are read at each scrape, so
// that a removed worker or model leaves no series behind.
package metrics

import "github.com/prometheus/client_golang/prometheus"

// Set is the metrics of one collector.
type Set struct{ descs []*prometheus.Desc }

// Metric is a gauge or a counter of a Set.
type Metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

// Gauge adds a gauge with these labels to the set.
func (s *Set) Gauge(name, help string, labels ...string) Metric {
	return Metric{s.Describe(name, help, labels...), prometheus.GaugeValue}
}

// Counter adds a counter with these labels to the set.
func (s *Set) Counter(name, help string, labels ...string) Metric {
	return Metric{s.Describe(name, help, labels...), prometheus.CounterValue}
}

// Describe adds a metric of another type to the set.
func (s *Set) Describe(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc(name, help, labels, nil)
	s.descs = append(s.descs, d)
	return d
}

// Out takes the values of one scrape.
type Out chan<- prometheus.Metric

// Show takes the value of the series with these label values.
func (o Out) Show(m Metric, value float64, labels ...string) {
	o <- prometheus.MustNewConstMetric(m.desc, m.kind, value, labels...)
}

// Bool returns 1 for true and 0 for false.
func Bool(set bool) float64 {
	if set {
		return 1
	}
	return 0
}

// Collector returns the collector of the set. read shows all values, at each scrape.
func (s *Set) Collector(read func(Out)) prometheus.Collector { return collector{s.descs, read} }

type collector struct {
	descs []*prometheus.Desc
	read  func(Out)
}

// Describe implements prometheus.Collector.
func (c collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(out chan<- prometheus.Metric) { c.read(out) }

// Own returns the workers with series of their own, of which own may be nil: all, as nil
// does.
func Own(own func() map[uint64]bool) map[uint64]bool {
	if own == nil {
		return nil
	}
	return own()
}
