package telemetry

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/models"
)

// modelCollector shows every base model at each scrape, so that one that is gone leaves
// no series behind.
type modelCollector struct {
	models *models.Set

	info, ranks, inFlight, queued, held, saturation, blocks, requests, refused *prometheus.Desc
}

func newModelCollector(models *models.Set) *modelCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("kvrouter_model_"+name, help, append([]string{"model"}, labels...), nil)
	}
	return &modelCollector{
		models:     models,
		info:       desc("info", "What the router has for the base model, always 1: its block size in tokens, and where prompt tokens are computed (router, workers).", "block_size", "tokenizer"),
		ranks:      desc("ranks", "Ranks of the base model's workers that are up."),
		inFlight:   desc("in_flight", "Requests sent to workers of the base model and not yet ended."),
		queued:     desc("queued_requests", "Requests that wait for a worker of the base model with room."),
		held:       desc("held_requests", "Requests that wait for a worker of the base model to come (--hold-when-empty)."),
		saturation: desc("saturation", "kvrouter_saturation of the base model's workers alone."),
		blocks:     desc("blocks", "KV blocks that the base model's index knows its workers to hold."),
		requests:   desc("requests_total", "Requests of the OpenAI port for the base model, its adapters included."),
		refused:    desc("refused_total", "Those that no worker could take."),
	}
}

// Describe implements prometheus.Collector.
func (c *modelCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.info, c.ranks, c.inFlight, c.queued, c.held, c.saturation, c.blocks, c.requests, c.refused} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *modelCollector) Collect(out chan<- prometheus.Metric) {
	shown := map[string]bool{}
	for _, m := range c.models.Samples() {
		name := boundedLabel(m.Name)
		if shown[name] { // two long names may be the same in short, and a series that comes twice is an error
			continue
		}
		shown[name] = true
		show := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
			out <- prometheus.MustNewConstMetric(d, kind, value, append([]string{name}, labels...)...)
		}
		tokenizer := "workers"
		if m.Local {
			tokenizer = "router"
		}
		show(c.info, prometheus.GaugeValue, 1, strconv.Itoa(m.BlockSize), tokenizer)
		show(c.ranks, prometheus.GaugeValue, float64(m.Ranks))
		show(c.inFlight, prometheus.GaugeValue, float64(m.InFlight))
		show(c.queued, prometheus.GaugeValue, float64(m.Queued))
		show(c.held, prometheus.GaugeValue, float64(m.Held))
		show(c.saturation, prometheus.GaugeValue, m.Saturation)
		show(c.blocks, prometheus.GaugeValue, float64(m.Blocks))
		show(c.requests, prometheus.CounterValue, float64(m.Requests))
		show(c.refused, prometheus.CounterValue, float64(m.Refused))
	}
}
