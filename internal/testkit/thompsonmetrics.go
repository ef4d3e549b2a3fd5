package testkit

import (
	"strconv"
	"strings"
)

// metricsLines is a metrics page, by line: the value of each series.
type MetricsLines map[string]float64

func ReadMetricsPage(page string) MetricsLines {
	lines := MetricsLines{}
	for line := range strings.SplitSeq(page, "\n") {
		name, value, _ := strings.Cut(line, " ")
		if n, err := strconv.ParseFloat(value, 64); err == nil && !strings.HasPrefix(line, "#") {
			lines[name] = n
		}
	}
	return lines
}
