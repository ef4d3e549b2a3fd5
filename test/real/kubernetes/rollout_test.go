package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/kubetest"
	"kvrouter/test"
)

// TestRolloutsInKubernetesLoseNothing: Pods come, end as a rolling update has them end,
// and the API server goes away in the middle, while answers stream.
func TestRolloutsInKubernetesLoseNothing(t *testing.T) {
	const workers = 4
	mocks := test.StartWorkers(t, workers, "--speedup-ratio=2", "--mock=shutdown-timeout=20s")
	c := test.StartCluster(t, mocks)
	pod := func(i int, change func(*kubetest.Pod)) { c.Worker(i, fmt.Sprintf("vllm-%d", i), change) }
	pod(0, nil)
	pod(1, nil)
	s := test.Start(t, "--engine=none", "--model="+test.BuiltinModel(t), "--served-model-name=mock", "--discovery=kubernetes", "--policy=least-loaded", "--selector=app=vllm")
	ready := func(i int) string { return fmt.Sprintf("vllm-%d %s", i, selection.LifecycleSchedulable) }
	wantLifecycles(s, ready(0), ready(1))

	more, stop := keepAsking(s, 24, 48, 30*time.Second)
	more()
	pod(2, func(p *kubetest.Pod) { p.NotReady = true })
	pod(3, func(p *kubetest.Pod) { p.NotReady = true })
	more()
	if n := len(s.Workers()); n != 2 {
		t.Errorf("%d workers while two Pods are not ready", n)
	}
	pod(2, nil)
	wantLifecycles(s, ready(0), ready(1), ready(2))

	logged := func(text string) {
		testkit.Eventually(t, 30*time.Second, fmt.Sprintf("the log says %q", text), func() bool { return strings.Contains(s.Log.String(), text) })
	}
	c.Stop() // and the rollout continues
	more()
	logged("the API server does not answer")
	pod(3, nil)
	pod(0, func(p *kubetest.Pod) { p.Ending = true })
	c.Start()
	logged("the API server is reachable again")
	draining := func(i int) string { return fmt.Sprintf("vllm-%d %s draining", i, selection.LifecycleUnschedulable) }
	wantLifecycles(s, draining(0), ready(1), ready(2), ready(3))
	for i := range 2 {
		if i > 0 {
			pod(i, func(p *kubetest.Pod) { p.Ending = true })
			wantLifecycles(s, draining(i), ready(2), ready(3))
		}
		// From here on nothing new may come; the container gets its SIGTERM.
		rank := mocks.Rank(kv.WorkerKey{Worker: uint64(i)})
		ending := mocks.Worker(i)
		var id uint64
		for _, w := range s.Workers() {
			if w.Name == fmt.Sprintf("vllm-%d", i) {
				id = w.WorkerID
			}
		}
		inFlight := func() int {
			w, _ := s.Record(id)
			return w.InFlight
		}
		began := inFlight()
		ending.Stop(errors.New("its Pod ends"))
		testkit.Eventually(t, 30*time.Second, "its requests have ended", func() bool {
			now := inFlight()
			if now > began {
				t.Errorf("worker %d: %d requests after %d", i, now, began)
			}
			began = now
			return now == 0
		})
		if n := rank.Counts.Aborted.Load(); n > 0 {
			t.Errorf("worker %d: %d requests were cut", i, n)
		}
		c.Remove("pods", fmt.Sprintf("vllm-%d", i))
		testkit.Eventually(t, 30*time.Second, "it is taken out", func() bool {
			return s.Blocks(kv.WorkerKey{Worker: id}) == 0 && len(s.Workers()) == workers-1-i
		})
		more()
	}
	wantLifecycles(s, ready(2), ready(3))
	stop()
}

// wantLifecycles waits until the router port shows these workers: name lifecycle reasons.
func wantLifecycles(s *test.Router, want ...string) {
	s.T.Helper()
	testkit.Eventually(s.T, 20*time.Second, "workers "+strings.Join(want, ", "), func() bool {
		got := map[string]bool{}
		all := s.Workers()
		for _, w := range all {
			text := w.Name + " " + w.Lifecycle
			if len(w.Reasons) > 0 {
				text += " " + w.Reasons[0]
			}
			got[text] = true
		}
		for _, one := range want {
			if !got[one] {
				return false
			}
		}
		return len(all) == len(want)
	})
}

// keepAsking has clients stream one answer after the other until stop is called; each
// must end whole. more waits, for a limited time, until so many more have ended.
func keepAsking(s *test.Router, clients int, answers int64, limit time.Duration) (more, stop func()) {
	ctx, cancel := context.WithCancel(s.T.Context())
	var running sync.WaitGroup
	var answered atomic.Int64
	for i := range clients {
		running.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				a, err := s.Chat(s.T.Context(), test.Say(fmt.Sprintf("client %d asks %d", i, n), strings.Repeat("and ", 50)+"so on"), true, 30)
				if err != nil || !a.Finished || a.Broken {
					s.T.Errorf("client %d, request %d: %+v, %v", i, n, a, err)
					return
				}
				answered.Add(1)
			}
		})
	}
	more = func() {
		before := answered.Load()
		testkit.Eventually(s.T, limit, "requests are answered", func() bool { return answered.Load() > before+answers })
	}
	return more, func() {
		cancel()
		running.Wait()
	}
}
