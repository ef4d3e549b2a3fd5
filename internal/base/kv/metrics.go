package kv

import (
	"strconv"
	"strings"
)

// maxMetricLabel bounds the value of a metric label that a worker has chosen, bytes.
const maxMetricLabel = 200

// RankLabels returns the values of the metric labels worker_id and dp_rank of a rank.
func (n *Names) RankLabels(w WorkerKey) []string {
	return []string{n.Label(w.Worker), strconv.FormatUint(uint64(w.Rank), 10)}
}

// MetricLabel returns a label value that came from a worker as valid UTF-8 of at most
// 200 bytes; without either, a metrics page would fail or grow without bound.
func MetricLabel(value string) string {
	return strings.ToValidUTF8(value[:min(len(value), maxMetricLabel)], "")
}
