package metrics_test

import (
	"maps"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/base/metrics"
	"kvrouter/internal/testkit"
)

// TestSeriesAreThoseOfPrometheus compares with Prometheus' own metrics, where a series has labels
// of the one before, or the same values of other labels.
func TestSeriesAreThoseOfPrometheus(t *testing.T) {
	labels := [][]string{
		{}, {"model"}, {"worker_id", "dp_rank"}, {"worker_id", "dp_rank", "kind"}, {"kind", "worker_id"},
		{"j", "i", "h", "g", "f", "e", "d", "c", "b", "a"},
	}
	series := []struct {
		of     int // of labels
		values []string
	}{
		{2, []string{"1", "0"}}, {3, []string{"1", "0", "x"}}, {3, []string{"1", "0", "y"}}, {4, []string{"1", "0"}}, {4, []string{"1", "1"}},
		{2, []string{"2", "1"}}, {0, nil}, {3, []string{"2", "1", "x"}}, {1, []string{"2"}}, {2, []string{"", ""}},
		{5, []string{"1", "1", "1", "1", "1", "1", "1", "1", "1", "1"}}, {5, []string{"1", "1", "1", "1", "1", "1", "1", "1", "1", "2"}},
	}
	page := func(show func(out metrics.Out, m metrics.Metric, d *prometheus.Desc, kind prometheus.ValueType, value float64, labels []string)) testkit.MetricsLines {
		var set metrics.Set
		return testkit.Scrape(t, set.Collector(func(out metrics.Out) {
			for i, s := range series {
				m, kind, name := set.Gauge, prometheus.GaugeValue, "m"+string(rune('0'+s.of))
				if s.of%2 == 1 {
					m, kind = set.Counter, prometheus.CounterValue
				}
				show(out, m(name, "Help.", labels[s.of]...), set.Describe(name, "Help.", labels[s.of]...), kind, float64(i), s.values)
			}
		}))
	}
	got := page(func(out metrics.Out, m metrics.Metric, _ *prometheus.Desc, _ prometheus.ValueType, value float64, labels []string) {
		out.Show(m, value, labels...)
	})
	want := page(func(out metrics.Out, _ metrics.Metric, d *prometheus.Desc, kind prometheus.ValueType, value float64, labels []string) {
		out.Send(prometheus.MustNewConstMetric(d, kind, value, labels...))
	})
	if len(want) != len(series) || !maps.Equal(got, want) {
		t.Errorf("%v, want the %d of %v", got, len(series), want)
	}
}
