package telemetry

import (
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"kvrouter/internal/base/metrics"
)

// Totals sums the metrics of requests, including those of removed workers.
func (t *Metrics) Totals() metrics.Totals {
	t.forgetGone()
	t.summing.Lock()
	defer t.summing.Unlock()
	sum := t.gone
	sum.FirstToken, sum.InterToken = metrics.Histogram{}, metrics.Histogram{}
	sum.FirstToken.Add(t.gone.FirstToken)
	sum.InterToken.Add(t.gone.InterToken)
	sum.Workers = map[string]metrics.WorkerTotals{}
	t.sum(&sum, func(string) bool { return true })
	return sum
}

// sum adds the series of the workers that of accepts to sum, and to its Workers unless nil.
func (t *Metrics) sum(sum *metrics.Totals, of func(worker string) bool) {
	add := func(metric prometheus.Collector, add func(m *dto.Metric, n uint64, w *metrics.WorkerTotals)) {
		each(metric, func(m *dto.Metric) {
			worker := label(m, "worker_id")
			if !of(worker) {
				return
			}
			part := sum.Workers[worker]
			if add(m, count(m), &part); sum.Workers != nil {
				sum.Workers[worker] = part
			}
		})
	}
	add(t.requests, func(m *dto.Metric, n uint64, w *metrics.WorkerTotals) {
		sum.Requests, w.Requests = sum.Requests+n, w.Requests+n
		if status, _ := strconv.Atoi(label(m, "status")); status >= 500 {
			sum.Errors += n
		}
	})
	add(t.promptTokens, func(_ *dto.Metric, n uint64, _ *metrics.WorkerTotals) { sum.PromptTokens += n })
	add(t.compared, func(_ *dto.Metric, n uint64, w *metrics.WorkerTotals) {
		sum.ComparedTokens, w.ComparedTokens = sum.ComparedTokens+n, w.ComparedTokens+n
	})
	add(t.cached, func(_ *dto.Metric, n uint64, w *metrics.WorkerTotals) {
		sum.CachedTokens, w.CachedTokens = sum.CachedTokens+n, w.CachedTokens+n
	})
	add(t.outputTokens, func(_ *dto.Metric, n uint64, _ *metrics.WorkerTotals) { sum.OutputTokens += n })
	add(t.predictions, func(m *dto.Metric, n uint64, _ *metrics.WorkerTotals) {
		if sum.Compared += n; label(m, "result") == "exact" {
			sum.Exact += n
		}
	})
	add(t.predicted, func(_ *dto.Metric, n uint64, _ *metrics.WorkerTotals) { sum.PredictedTokens += n })
	add(t.firstToken, func(m *dto.Metric, _ uint64, _ *metrics.WorkerTotals) { sum.FirstToken.Add(histogram(m)) })
	add(t.interToken, func(m *dto.Metric, _ uint64, _ *metrics.WorkerTotals) { sum.InterToken.Add(histogram(m)) })
}

// each calls use with every series of a metric.
func each(metric prometheus.Collector, use func(*dto.Metric)) {
	series := make(chan prometheus.Metric, 64)
	go func() { // ends with the series, all of which are read below
		metric.Collect(series)
		close(series)
	}()
	for s := range series {
		var m dto.Metric
		if s.Write(&m) == nil {
			use(&m)
		}
	}
}

// count returns the value of a counter.
func count(m *dto.Metric) uint64 { return uint64(m.GetCounter().GetValue()) }

// label returns a copy of a label of a series; the copy may outlive the series.
func label(m *dto.Metric, name string) string {
	for _, pair := range m.GetLabel() {
		if pair.GetName() == name {
			return strings.Clone(pair.GetValue())
		}
	}
	return ""
}

// labels returns copies of all labels of a series.
func labels(m *dto.Metric) prometheus.Labels {
	all := make(prometheus.Labels, len(m.GetLabel()))
	for _, pair := range m.GetLabel() {
		all[pair.GetName()] = strings.Clone(pair.GetValue())
	}
	return all
}

// histogram converts a series of a histogram.
func histogram(m *dto.Metric) metrics.Histogram {
	from := m.GetHistogram()
	h := metrics.Histogram{}
	for _, b := range from.GetBucket() {
		h.Bounds, h.Counts = append(h.Bounds, b.GetUpperBound()), append(h.Counts, b.GetCumulativeCount())
	}
	h.Counts = append(h.Counts, from.GetSampleCount())
	return h
}
