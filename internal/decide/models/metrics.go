package models

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/metrics"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
)

// NewCollector returns the metrics of the models of s: their load, queues, sessions,
// ejected workers and sources of prompt tokens. own returns the workers with series of
// their own; nil, or if it returns nil: all. Of the others there are the sums of what can be
// added up.
func NewCollector(s *Set, own func() map[uint64]bool) prometheus.Collector {
	var set metrics.Set
	info := set.Gauge("kvrouter_model_info",
		"Always 1; the labels have the base model's block size in tokens and where its prompts are tokenized (router, workers, or refused: "+
			"workers, because its tokenizer or chat template cannot be used).", "model", "block_size", "tokenizer")
	perModel := []struct {
		metrics.Metric
		value func(m *Sample) float64
	}{
		{set.Gauge("kvrouter_model_ranks", "Ranks of the base model that are up.", "model"), func(m *Sample) float64 { return float64(m.Ranks) }},
		{set.Gauge("kvrouter_model_in_flight", "In-flight requests of the base model.", "model"),
			func(m *Sample) float64 { return float64(m.InFlight) }},
		{set.Gauge("kvrouter_model_queued_requests", "Requests of the base model that are queued until a worker has capacity.", "model"),
			func(m *Sample) float64 { return float64(m.Queued) }},
		{set.Gauge("kvrouter_model_held_requests", "Requests of the base model that wait until a worker is up (--hold-when-empty).", "model"),
			func(m *Sample) float64 { return float64(m.Waiting) }},
		{set.Gauge("kvrouter_model_saturation", "kvrouter_saturation of the base model's workers.", "model"),
			func(m *Sample) float64 { return m.Saturation }},
		{set.Gauge("kvrouter_model_blocks", "KV blocks in the base model's index.", "model"),
			func(m *Sample) float64 { return float64(m.Blocks) }},
		{set.Counter("kvrouter_model_requests_total", "Requests to the OpenAI port for the base model and its adapters.", "model"),
			func(m *Sample) float64 { return float64(m.Requests) }},
		{set.Counter("kvrouter_model_refused_total",
			"Requests to the OpenAI port for the base model and its adapters that no worker could serve.", "model"),
			func(m *Sample) float64 { return float64(m.Refused) }},
	}

	roleSaturation := set.Gauge("kvrouter_role_saturation",
		"Saturation of the base model's prefill workers, and of those that decode, by role: prefill (as kvrouter_saturation), decode (share "+
			"in use of what they can decode; above 1 while requests wait).", "model", "role")
	decodeBlocks := set.Gauge("dynamo_frontend_worker_active_decode_blocks",
		"KV blocks of the worker's in-flight requests; a shared block counts once.", "worker_id", "dp_rank", "worker_type")
	prefillTokens := set.Gauge("dynamo_frontend_worker_active_prefill_tokens",
		"Uncached prompt tokens of the worker's requests that have no first token yet.", "worker_id", "dp_rank", "worker_type")
	queueDepth := set.Gauge("dynamo_frontend_router_queue_pending_requests", "Requests queued until a worker has capacity.")
	queueTokens := set.Gauge("dynamo_frontend_router_queue_pending_isl_tokens",
		"Prompt tokens of the requests queued until a worker has capacity.")
	saturation := set.Gauge("kvrouter_saturation",
		"Predicted wait of a new request for its first token, divided by --saturation-target: 0 with an idle worker, above 1 with too few "+
			"workers. Without a worker, 1 while requests wait for one and 0 otherwise. The highest of all models.")
	waiting := set.Gauge("kvrouter_held_requests", "Requests that wait until a worker is up (--hold-when-empty).")
	sessions := set.Gauge("kvrouter_sessions", "Sessions in memory.")
	sessionRequests := set.Counter("kvrouter_session_requests_total",
		"Routing decisions for requests with a session, by result: new, kept, moved.", "result")

	ejections := set.Counter("kvrouter_ejections_total", "Ejections of the worker, by reason.", "worker_id", "dp_rank", "reason")
	ejected := set.Gauge("kvrouter_worker_ejected", "1 while the worker is ejected for its failures.", "worker_id", "dp_rank")
	paused := set.Gauge("kvrouter_worker_held",
		"1 while the worker gets no requests because it requested a pause (Retry-After) or may be misconfigured.", "worker_id", "dp_rank")
	silent := set.Gauge("kvrouter_worker_silent",
		"1 while new requests avoid the worker because it shows no sign of life for longer than its work explains.", "worker_id", "dp_rank")
	successRate := set.Gauge("kvrouter_worker_success_rate", "Share of the worker's requests in the last 10 s that succeeded, 0 to 1.",
		"worker_id", "dp_rank")
	panicMode := set.Gauge("kvrouter_panic_mode", "1 while more workers fail than --max-ejection-percent allows to eject.")
	discredited := set.Gauge("kvrouter_discredited_clients",
		"Clients whose failures are not counted against workers, because they fail at several workers where other clients' requests succeed.")

	showOutlier := func(out metrics.Out, rank []string, r *health.Record) {
		out.Show(ejected, metrics.Bool(r.State == health.StateOut), rank...)
		out.Show(paused, metrics.Bool(r.State == health.StateHeld), rank...)
		out.Show(silent, metrics.Bool(r.State == health.StateSilent), rank...)
		out.Show(successRate, r.SuccessRate, rank...)
		for kind, n := range r.Ejections {
			out.Show(ejections, float64(n), append(rank, kind.String())...)
		}
	}

	promptSources := set.Counter("kvrouter_prompt_source_total",
		"Prompts by the source of their tokens: local, worker_render, worker_tokenize, none (routed by load alone).", "source")
	promptFallbacks := set.Counter("kvrouter_prompt_fallbacks_total", "Prompts that the router did not tokenize itself, by reason.", "reason")
	return set.Collector(func(out metrics.Out) {
		named := map[string]bool{}
		for _, m := range s.Samples() {
			name := kv.MetricLabel(m.Name)
			if named[name] { // two long names may have the same label, and a series that comes twice fails the page
				continue
			}
			named[name] = true
			tokenizer := "workers"
			switch {
			case m.FilesRefused:
				tokenizer = "refused"
			case m.Local:
				tokenizer = "router"
			}
			out.Show(info, 1, name, strconv.Itoa(m.BlockSize), tokenizer)
			for _, metric := range perModel {
				out.Show(metric.Metric, metric.value(&m), name)
			}
			if m.Paired {
				out.Show(roleSaturation, m.Prefill, name, kv.RolePrefill.String())
				out.Show(roleSaturation, m.Decode, name, kv.RoleDecode.String())
			}
		}

		names, shown := s.Names().Now(), metrics.Own(own)
		others := map[string]router.WorkerLoad{} // their sums by worker type
		for _, load := range s.Loads() {
			kind := workerType(load.Role)
			if shown != nil && !shown[load.Key.Worker] {
				sum := others[kind]
				sum.PotentialDecodeBlocks += load.PotentialDecodeBlocks
				sum.PotentialPrefillTokens += load.PotentialPrefillTokens
				others[kind] = sum
				continue
			}
			rank := names.RankLabels(load.Key)
			out.Show(decodeBlocks, float64(load.PotentialDecodeBlocks), append(rank, kind)...)
			out.Show(prefillTokens, float64(load.PotentialPrefillTokens), append(rank, kind)...)
			if r, up := s.Outlier(load.Key); up {
				showOutlier(out, rank, &r)
			}
		}
		for kind, sum := range others {
			out.Show(decodeBlocks, float64(sum.PotentialDecodeBlocks), kv.OtherWorkers, "", kind)
			out.Show(prefillTokens, float64(sum.PotentialPrefillTokens), kv.OtherWorkers, "", kind)
		}
		requests, tokens := s.QueueDepth()
		out.Show(queueDepth, float64(requests))
		out.Show(queueTokens, float64(tokens))
		out.Show(saturation, s.Saturation())
		out.Show(waiting, float64(s.Waiting()))
		if s.settings.Routing.NamesSessions() {
			known, counts := s.Sessions()
			out.Show(sessions, float64(known))
			out.Show(sessionRequests, float64(counts.New), router.SessionNew)
			out.Show(sessionRequests, float64(counts.Kept), router.SessionKept)
			out.Show(sessionRequests, float64(counts.Moved), router.SessionMoved)
		}

		out.Show(panicMode, metrics.Bool(s.Panicking()))
		out.Show(discredited, float64(s.Discredited()))

		prompts := s.Prompts()
		out.Show(promptSources, float64(prompts.Local), "local")
		out.Show(promptSources, float64(prompts.WorkerRender), "worker_render")
		out.Show(promptSources, float64(prompts.WorkerTokenize), "worker_tokenize")
		out.Show(promptSources, float64(prompts.None), "none")
		for reason, n := range prompts.Reasons {
			out.Show(promptFallbacks, float64(n), reason)
		}
	})
}

// workerType is Dynamo's name of a role; it calls a worker that takes whole requests
// a decode worker.
func workerType(role kv.Role) string {
	if role == kv.RolePrefill {
		return "prefill"
	}
	return "decode"
}
