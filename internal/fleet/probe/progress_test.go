package probe

import (
	"fmt"
	"strings"
	"testing"

	"kvrouter/internal/base/kv"
)

// progressPage is a vLLM server's page that has generated so many tokens.
func progressPage(running, generated, aborted int, usage float64) string {
	return fmt.Sprintf(`# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} %d
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} %v
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0"} %d
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 3
vllm:iteration_tokens_total_sum{engine="0"} 9
vllm:iteration_tokens_total_count{engine="0"} %d
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="abort"} %d
`, running, usage, generated, generated, aborted)
}

func TestOnlyProgressIsASignOfLife(t *testing.T) {
	for _, test := range []struct {
		name, before, after string
		lives               bool
		restarted           bool
	}{
		{"nothing moves while requests run", progressPage(3, 100, 0, 0.5), progressPage(3, 100, 0, 0.5), false, false},
		{"requests come and leave", progressPage(3, 100, 0, 0.5), progressPage(4, 100, 2, 0.5), false, false},
		{"tokens are generated", progressPage(3, 100, 0, 0.5), progressPage(3, 101, 0, 0.5), true, false},
		{"a prompt is computed", progressPage(1, 0, 0, 0.1), progressPage(1, 0, 0, 0.2), true, false},
		{"SGLang generates", "# TYPE sglang:generation_tokens_total counter\nsglang:generation_tokens_total{tp_rank=\"0\"} 7\n", "# TYPE sglang:generation_tokens_total counter\nsglang:generation_tokens_total{tp_rank=\"0\"} 8\n", true, false},
		{"the engine was restarted", progressPage(3, 100, 0, 0.5), progressPage(0, 2, 0, 0), true, true},
		{"an aborted request", progressPage(3, 100, 5, 0.5), progressPage(3, 100, 0, 0.5), false, false},
		{"the counters are missing", "a 1\n", "a 2\n", false, false},
	} {
		lived, restarted := 0, 0
		s := LoadSource{Lives: func() { lived++ }, Restarted: func(kv.WorkerKey) { restarted++ }, Ranks: make([]kv.WorkerKey, 1), progress: new(progress)}
		for _, text := range []string{test.before, test.after} {
			page, err := ParsePage(strings.NewReader(text))
			if err != nil {
				t.Fatal(err)
			}
			s.note(page)
		}
		if want := map[bool]int{true: 1}[test.lives]; lived != want {
			t.Errorf("%s: %d signs of life, want %d", test.name, lived, want)
		}
		if (restarted == 1) != test.restarted {
			t.Errorf("%s: restarted %d times", test.name, restarted)
		}
	}
}
