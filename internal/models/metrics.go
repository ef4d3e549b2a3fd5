package models

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/kv"
	"kvrouter/internal/outlier"
	"kvrouter/internal/router"
)

// collector reads the state of all models at each scrape, so that a removed model or
// worker leaves no series behind.
type collector struct {
	set *Set
	all []*prometheus.Desc

	info, ranks, inFlight, queued, waiting, saturation, blocks, requests, refused *prometheus.Desc // by model

	decodeBlocks, prefillTokens, queueDepth, queueTokens     *prometheus.Desc // of all models together
	highestSaturation, allWaiting, sessions, sessionRequests *prometheus.Desc
	ejections, ejected, paused, successRate, panicking       *prometheus.Desc
	promptSources, promptFallbacks                           *prometheus.Desc
}

// NewCollector returns the metrics of the models of s: their load, queues, sessions,
// ejected workers and sources of prompt tokens.
func NewCollector(s *Set) prometheus.Collector {
	c := &collector{set: s}
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		d := prometheus.NewDesc(name, help, labels, nil)
		c.all = append(c.all, d)
		return d
	}
	c.info = desc("kvrouter_model_info", "Always 1; the labels have the base model's block size in tokens and where its prompts are tokenized (router, workers, or refused: workers, because its tokenizer or chat template cannot be used).", "model", "block_size", "tokenizer")
	c.ranks = desc("kvrouter_model_ranks", "Ranks of the base model that are up.", "model")
	c.inFlight = desc("kvrouter_model_in_flight", "In-flight requests of the base model.", "model")
	c.queued = desc("kvrouter_model_queued_requests", "Requests of the base model that are queued until a worker has capacity.", "model")
	c.waiting = desc("kvrouter_model_held_requests", "Requests of the base model that wait until a worker is up (--hold-when-empty).", "model")
	c.saturation = desc("kvrouter_model_saturation", "kvrouter_saturation of the base model's workers.", "model")
	c.blocks = desc("kvrouter_model_blocks", "KV blocks in the base model's index.", "model")
	c.requests = desc("kvrouter_model_requests_total", "Requests to the OpenAI port for the base model and its adapters.", "model")
	c.refused = desc("kvrouter_model_refused_total", "Requests to the OpenAI port for the base model and its adapters that no worker could take.", "model")

	c.decodeBlocks = desc("dynamo_frontend_worker_active_decode_blocks", "KV blocks of the worker's in-flight requests; a shared block counts once.", "worker_id", "dp_rank", "worker_type")
	c.prefillTokens = desc("dynamo_frontend_worker_active_prefill_tokens", "Uncached prompt tokens of the worker's requests that have no first token yet.", "worker_id", "dp_rank", "worker_type")
	c.queueDepth = desc("dynamo_frontend_router_queue_pending_requests", "Requests queued until a worker has capacity.")
	c.queueTokens = desc("dynamo_frontend_router_queue_pending_isl_tokens", "Prompt tokens of the requests queued until a worker has capacity.")
	c.highestSaturation = desc("kvrouter_saturation", "Predicted wait of a new request for its first token, divided by --saturation-target: 0 with an idle worker, above 1 with too few workers. Without a worker, 1 while requests wait for one and 0 otherwise. The highest of all models.")
	c.allWaiting = desc("kvrouter_held_requests", "Requests that wait until a worker is up (--hold-when-empty).")
	c.sessions = desc("kvrouter_sessions", "Sessions in memory.")
	c.sessionRequests = desc("kvrouter_session_requests_total", "Routing decisions for requests with a session, by result: new, kept, moved.", "result")

	c.ejections = desc("kvrouter_ejections_total", "Ejections of the worker, by reason.", "worker_id", "dp_rank", "reason")
	c.ejected = desc("kvrouter_worker_ejected", "1 while the worker is ejected for its failures.", "worker_id", "dp_rank")
	c.paused = desc("kvrouter_worker_held", "1 while the worker gets no requests because it asked for a pause or may be misconfigured.", "worker_id", "dp_rank")
	c.successRate = desc("kvrouter_worker_success_rate", "Share of the worker's requests in the last 10 s that succeeded, 0 to 1.", "worker_id", "dp_rank")
	c.panicking = desc("kvrouter_panic_mode", "1 while ejections are ignored because they exceed --max-ejection-percent.")

	c.promptSources = desc("kvrouter_prompt_source_total", "Prompts by the source of their tokens: local, worker_render, worker_tokenize, none (routed by load alone).", "source")
	c.promptFallbacks = desc("kvrouter_prompt_fallbacks_total", "Prompts that the router did not tokenize itself, by reason.", "reason")
	return c
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range c.all {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	flag := func(d *prometheus.Desc, set bool, labels ...string) {
		value := 0.0
		if set {
			value = 1
		}
		gauge(d, value, labels...)
	}
	counter := func(d *prometheus.Desc, n uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	shown := map[string]bool{}
	for _, m := range c.set.Samples() {
		name := kv.MetricLabel(m.Name)
		if shown[name] { // two long names may have the same label, and a series that comes twice fails the page
			continue
		}
		shown[name] = true
		tokenizer := "workers"
		switch {
		case m.FilesRefused:
			tokenizer = "refused"
		case m.Local:
			tokenizer = "router"
		}
		gauge(c.info, 1, name, strconv.Itoa(m.BlockSize), tokenizer)
		gauge(c.ranks, float64(m.Ranks), name)
		gauge(c.inFlight, float64(m.InFlight), name)
		gauge(c.queued, float64(m.Queued), name)
		gauge(c.waiting, float64(m.Waiting), name)
		gauge(c.saturation, m.Saturation, name)
		gauge(c.blocks, float64(m.Blocks), name)
		counter(c.requests, m.Requests, name)
		counter(c.refused, m.Refused, name)
	}

	names := c.set.Names().Now()
	for _, load := range c.set.Loads() {
		labels := append(names.RankLabels(load.Key), workerType(load.Role))
		gauge(c.decodeBlocks, float64(load.PotentialDecodeBlocks), labels...)
		gauge(c.prefillTokens, float64(load.PotentialPrefillTokens), labels...)
	}
	requests, tokens := c.set.QueueDepth()
	gauge(c.queueDepth, float64(requests))
	gauge(c.queueTokens, float64(tokens))
	gauge(c.highestSaturation, c.set.Saturation())
	gauge(c.allWaiting, float64(c.set.Waiting()))
	if c.set.Default().Router.NamesSessions() {
		known, sessions := c.set.Sessions()
		gauge(c.sessions, float64(known))
		counter(c.sessionRequests, sessions.New, router.SessionNew)
		counter(c.sessionRequests, sessions.Kept, router.SessionKept)
		counter(c.sessionRequests, sessions.Moved, router.SessionMoved)
	}

	records, panicking := c.set.Outliers()
	flag(c.panicking, panicking)
	for _, r := range records {
		labels := names.RankLabels(r.Worker)
		flag(c.ejected, r.State == outlier.StateOut, labels...)
		flag(c.paused, r.State == outlier.StateHeld, labels...)
		gauge(c.successRate, r.SuccessRate, labels...)
		for kind, n := range r.Ejections {
			counter(c.ejections, n, append(labels, kind.String())...)
		}
	}

	prompts := c.set.Prompts()
	counter(c.promptSources, prompts.Local, "local")
	counter(c.promptSources, prompts.WorkerRender, "worker_render")
	counter(c.promptSources, prompts.WorkerTokenize, "worker_tokenize")
	counter(c.promptSources, prompts.None, "none")
	for reason, n := range prompts.Reasons {
		counter(c.promptFallbacks, n, reason)
	}
}

// workerType is Dynamo's name of a role; it calls a worker that takes whole requests
// a decode worker.
func workerType(role kv.Role) string {
	if role == kv.RolePrefill {
		return "prefill"
	}
	return "decode"
}
