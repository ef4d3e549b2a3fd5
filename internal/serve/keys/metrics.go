package keys

import (
	"github.com/prometheus/client_golang/prometheus"
)

// Collector exports the results of each key's requests by its name. Series of removed names
// are deleted.
type Collector struct {
	ring              *Ring
	requests, limited *prometheus.Desc
}

// NewCollector returns the metrics of a ring.
func NewCollector(r *Ring) Collector {
	return Collector{
		ring: r,
		requests: prometheus.NewDesc("kvrouter_key_requests_total",
			"Requests by name of the API key (empty: unknown key) and result: ok, refused (4xx), failed (5xx), limited.", []string{"key", "result"},
			nil),
		limited: prometheus.NewDesc("kvrouter_key_limited_total",
			"Requests refused with 429, by name of the API key and limit: requests, concurrent, prompt_tokens.", []string{"key", "limit"}, nil),
	}
}

// Describe implements prometheus.Collector.
func (c Collector) Describe(out chan<- *prometheus.Desc) {
	out <- c.requests
	out <- c.limited
}

// Collect implements prometheus.Collector.
func (c Collector) Collect(out chan<- prometheus.Metric) {
	if !c.ring.Asks() {
		return
	}
	show := func(d *prometheus.Desc, n uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	show(c.requests, c.ring.unknown.Load(), "", resultRefused)
	for _, caller := range c.ring.current.Load().order {
		n := caller.count
		show(c.requests, n.ok.Load(), caller.Name, resultOK)
		show(c.requests, n.refused.Load(), caller.Name, resultRefused)
		show(c.requests, n.failed.Load(), caller.Name, resultFailed)
		show(c.requests, n.limited.Load(), caller.Name, resultLimited)
		if b := caller.bounds; b.asked != nil {
			show(c.limited, n.byRequests.Load(), caller.Name, limitRequests)
		}
		if caller.bounds.concurrent > 0 {
			show(c.limited, n.byConcurrent.Load(), caller.Name, limitConcurrent)
		}
		if caller.bounds.promptTokens > 0 {
			show(c.limited, n.byPromptSize.Load(), caller.Name, limitPromptTokens)
		}
	}
}
