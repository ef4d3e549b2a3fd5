package replica

import "github.com/prometheus/client_golang/prometheus"

// Collectors returns the metrics of the updates exchanged with peer routers.
func (r *Mesh) Collectors() []prometheus.Collector {
	counter := func(name, help string, n func(Counts) uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvrouter_cluster_" + name + "_total", Help: help},
			func() float64 { return float64(n(r.Counts())) })
	}
	return []prometheus.Collector{
		counter("sent", "Updates sent to peer routers.", func(c Counts) uint64 { return c.Sent }),
		counter("received", "Updates received from peer routers.", func(c Counts) uint64 { return c.Received }),
		counter("dropped", "Updates dropped because a queue was full or the update was invalid.", func(c Counts) uint64 { return c.Dropped }),
		counter("resent", "In-flight requests sent again to peer routers that had missed them or had just joined.",
			func(c Counts) uint64 { return c.Resent }),
		counter("refused", "Messages of peer routers rejected as malformed, or of more routers than are taken.",
			func(c Counts) uint64 { return c.Refused }),
		counter("lost", "Times a peer router timed out and its reservations were removed.", func(c Counts) uint64 { return c.Lost }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvrouter_cluster_bookings", Help: "In-flight requests of peer routers."},
			func() float64 { return float64(r.Counts().Held) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvrouter_cluster_peers", Help: "Connected peer routers."},
			func() float64 { return float64(r.Counts().Peers) }),
	}
}
