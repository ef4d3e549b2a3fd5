package probe

// progressNames are the counters that show that an engine makes progress. Those of a histogram's
// passes have the name of its count alone, without its buckets.
var progressNames = [...]string{
	"vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count", "vllm:request_success_total",
	"sglang:generation_tokens_total", "sglang:prompt_tokens_total", "sglang:num_requests_total",
}

// progress is how far an engine is, by its pages. It has no unit: only a change says anything.
type progress struct {
	known  bool
	counts float64 // sum of the counters
	usage  float64 // of the KV cache, which grows while a prompt is computed
}

// note calls Lives if the page shows progress since the last one, and Restarted if the counters of
// the engine began again.
func (s *LoadSource) note(page Page) {
	if page == nil || s.Lives == nil && s.Restarted == nil {
		return
	}
	now := progress{known: true}
	for _, name := range progressNames {
		// its client did that
		now.counts += page.counter(name, "", func(_ string, labels map[string]string) bool { return labels["finished_reason"] != "abort" })
	}
	for _, name := range [...]string{vllmLoadNames[2], vllmLoadNames[3], sglangUsage} {
		for _, metric := range page[name].GetMetric() {
			now.usage += gauge(metric.GetGauge().GetValue(), 1)
		}
	}
	if s.Restarted != nil && now.counts < s.progress.counts {
		for _, rank := range s.Ranks {
			s.Restarted(rank)
		}
	}
	if s.Lives != nil && s.progress.known && now != *s.progress {
		s.Lives()
	}
	*s.progress = now
}
