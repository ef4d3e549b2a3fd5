package logs

import (
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
)

// NewCollector returns the metric of the lines that a log of New has suppressed.
func NewCollector(log *slog.Logger) prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "kvrouter_log_lines_suppressed_total", Help: "Log lines suppressed by the rate limit of their call site.",
	}, func() float64 { return float64(suppressed(log)) })
}
