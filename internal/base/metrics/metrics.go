// Package metrics makes Prometheus collectors of values that are read at each scrape, so
// that a removed worker or model leaves no series behind, and sums up finished requests.
package metrics

import (
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Set is the metrics of one collector.
type Set struct{ descs []*prometheus.Desc }

// Metric is a gauge or a counter of a Set.
type Metric struct{ *metric }

type metric struct {
	desc    *prometheus.Desc
	counter bool
	labels  []string // names
	places  []int    // of the labels on the page, where they are sorted by name
}

// Gauge adds a gauge with these labels to the set.
func (s *Set) Gauge(name, help string, labels ...string) Metric {
	return s.add(name, help, labels, false)
}

// Counter adds a counter with these labels to the set.
func (s *Set) Counter(name, help string, labels ...string) Metric {
	return s.add(name, help, labels, true)
}

func (s *Set) add(name, help string, labels []string, counter bool) Metric {
	m := &metric{desc: s.Describe(name, help, labels...), counter: counter, labels: labels}
	sorted := slices.Sorted(slices.Values(labels))
	for _, label := range labels {
		m.places = append(m.places, slices.Index(sorted, label))
	}
	return Metric{m}
}

// Describe adds a metric of another type to the set.
func (s *Set) Describe(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc(name, help, labels, nil)
	s.descs = append(s.descs, d)
	return d
}

// Out takes the values of one scrape, from one goroutine.
type Out struct {
	to   chan<- prometheus.Metric
	last *[8]*dto.LabelPair // the first labels of the last series
}

// Show takes the value of the series with these label values. It panics if there are not as many
// of them as labels.
func (o Out) Show(m Metric, value float64, labels ...string) {
	if len(labels) != len(m.labels) {
		panic(fmt.Sprintf("metrics: %d label values for %v: want %d", len(labels), m.desc, len(m.labels)))
	}
	s := &series{metric: m.metric, value: value, labels: make([]*dto.LabelPair, len(labels))}
	for i, value := range labels {
		s.labels[m.places[i]] = o.label(i, &m.labels[i], value)
	}
	o.to <- s
}

// Send takes a series of another type.
func (o Out) Send(m prometheus.Metric) { o.to <- m }

// label returns label i of a series: that of the last series if it is the same, as most of a
// worker's are, because thousands of series are mostly labels.
func (o Out) label(i int, name *string, value string) *dto.LabelPair {
	if i < len(o.last) && o.last[i] != nil && *o.last[i].Value == value && *o.last[i].Name == *name {
		return o.last[i]
	}
	own := value
	pair := &dto.LabelPair{Name: name, Value: &own}
	if i < len(o.last) {
		o.last[i] = pair
	}
	return pair
}

// series is a value of a Metric. Those of Prometheus allocate three times as often.
type series struct {
	*metric
	value  float64
	labels []*dto.LabelPair // by name; shared with other series
}

// Desc implements prometheus.Metric.
func (s *series) Desc() *prometheus.Desc { return s.desc }

// Write implements prometheus.Metric.
func (s *series) Write(m *dto.Metric) error {
	m.Label = s.labels
	if s.counter {
		m.Counter = &dto.Counter{Value: &s.value}
	} else {
		m.Gauge = &dto.Gauge{Value: &s.value}
	}
	return nil
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
func (c collector) Collect(out chan<- prometheus.Metric) { c.read(Out{out, new([8]*dto.LabelPair)}) }

// Own returns the workers with series of their own, of which own may be nil: all, as nil
// does.
func Own(own func() map[uint64]bool) map[uint64]bool {
	if own == nil {
		return nil
	}
	return own()
}
