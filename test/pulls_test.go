package test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/testkit"
)

// TestAPrefixIsPulledFromABusyWorker: while the worker that has a prompt computes a long one,
// the idle one pulls the prompt's blocks; if nothing comes, it computes them, and either is
// counted.
func TestAPrefixIsPulledFromABusyWorker(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, result string
		failures     float64
		came         bool
	}{{"the blocks come", "came", 0, true}, {"nothing comes", "failed", 1, false}} {
		t.Run(c.name, func(t *testing.T) {
			s := StartMocks(t, 2, "--policy=work", "--mock-host-blocks=4000", "--mock-peer-bandwidth=25", fmt.Sprintf("--mock-peer-failures=%v", c.failures))
			say := func(text string, tokens int) map[string]any {
				return map[string]any{"messages": Say(text), "max_tokens": tokens}
			}
			source := kv.WorkerKey{Worker: 0}
			prefix := strings.Repeat("a prefix that many share ", 800)
			first := s.pinned(source, say(prefix, 1))
			s.Settle()
			testkit.Eventually(t, 20*time.Second, "the prefix in host memory", func() bool {
				return s.Metrics()[`kvrouter_kv_tier_blocks{dp_rank="0",owner="worker",tier="host",worker_id="0"}`] >= float64(first.Prompt/64)
			})

			busy := make(chan exchange)
			go func() { busy <- s.pinned(source, say(strings.Repeat("something else that is long ", 3000), 1)) }()
			testkit.Eventually(t, 20*time.Second, "the worker computes", func() bool { return s.Rank(source).CurrentLoad() != mocker.Load{} })
			a := s.ask(say(prefix, 1))
			if want := first.Prompt / 64 * 64; a.Worker != "1" || a.Cached > 0 != c.came || c.came && a.Cached < want-64 || a.Predicted != 0 {
				t.Errorf("worker %s found %d of %d tokens, %d were promised", a.Worker, a.Cached, a.Prompt, a.Predicted)
			}
			if e := <-busy; e.StatusCode != 200 {
				t.Errorf("%d %.200s", e.StatusCode, e.Text)
			}
			s.Idle()
			for _, result := range []string{"came", "part", "failed", "unreported"} {
				n := s.Metrics()[fmt.Sprintf(`kvrouter_kv_pulls_total{dp_rank="0",result=%q,worker_id="1"}`, result)]
				if (n == 1) != (result == c.result) {
					t.Errorf("%s: %v", result, n)
				}
			}
		})
	}
}
