package cluster

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// Collectors returns the metrics of the cluster's messages.
func (l *Link) Collectors() []prometheus.Collector {
	counter := func(name, help string, n *atomic.Uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvrouter_cluster_" + name + "_total", Help: help},
			func() float64 { return float64(n.Load()) })
	}
	return []prometheus.Collector{
		counter("unsent", "Messages to the cluster that were not sent: no server connected, or message too large.", &l.Unsent),
		counter("missed", "Messages of the cluster that were lost because this router was behind.", &l.Missed),
	}
}
