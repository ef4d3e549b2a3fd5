package test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
)

// startPulling starts two mock workers that pull from each other. A share of pulls fails.
func startPulling(t *testing.T, failures float64) *Mocks {
	t.Helper()
	return StartMocks(t, 2, "--policy=work", "--mock=host-blocks=4000", "--mock=peer-bandwidth=25", fmt.Sprintf("--mock=peer-failures=%v", failures))
}

// pull asks for a prompt that the first worker has, which computes another one meanwhile. It
// returns the first answer to the prompt and the second.
func (s *Mocks) pull(t *testing.T) (first, second exchange) {
	t.Helper()
	say := func(text string) map[string]any { return map[string]any{"messages": Say(text), "max_tokens": 1} }
	source := kv.WorkerKey{Worker: 0}
	prefix := strings.Repeat("a prefix that many share ", 800)
	first = s.pinned(source, say(prefix))
	s.Settle()
	testkit.Eventually(t, 20*time.Second, "the prefix in host memory", func() bool {
		return s.Metrics()[`kvrouter_kv_tier_blocks{dp_rank="0",owner="worker",tier="host",worker_id="0"}`] >= float64(first.Prompt/64)
	})
	busy := make(chan exchange)
	go func() { busy <- s.pinned(source, say(strings.Repeat("something else that is long ", 3000))) }()
	testkit.Eventually(t, 20*time.Second, "the worker computes", func() bool { return s.Rank(source).CurrentLoad() != mocker.Load{} })
	second = s.ask(say(prefix))
	if e := <-busy; e.StatusCode != 200 {
		t.Errorf("%d %.200s", e.StatusCode, e.Text)
	}
	s.Idle()
	return first, second
}

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
			s := startPulling(t, c.failures)
			first, a := s.pull(t)
			if want := first.Prompt / 64 * 64; a.Worker != "1" || a.Cached > 0 != c.came || c.came && a.Cached < want-64 || a.Predicted != 0 {
				t.Errorf("worker %s found %d of %d tokens, %d were promised", a.Worker, a.Cached, a.Prompt, a.Predicted)
			}
			for _, result := range []string{"came", "part", "failed", "unreported"} {
				n := s.Metrics()[fmt.Sprintf(`kvrouter_kv_pulls_total{dp_rank="0",result=%q,worker_id="1"}`, result)]
				if (n == 1) != (result == c.result) {
					t.Errorf("%s: %v", result, n)
				}
			}
		})
	}
}
