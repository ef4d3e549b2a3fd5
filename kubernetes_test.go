package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/kubetest"
)

// cluster is a scripted API server over the workers of a mock site: each is a Pod.
type cluster struct {
	*kubetest.Server
	mocks *mockSite
}

// startCluster starts mock workers without Pods, and has KUBECONFIG name the server.
func startCluster(t *testing.T, workers int) *cluster {
	t.Helper()
	c := &cluster{mocks: startMockSite(t, workers, "--speedup-ratio=2", "--mock-shutdown-timeout=20s")}
	c.Server = kubetest.New(t)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	config := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'http://%s'}}]\ncontexts: [{name: x, context: {cluster: c, namespace: ns, user: u}}]\nusers: [{name: u, user: {token: t}}]\ncurrent-context: x\n", c.Address)
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", path)
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	return c
}

// pod makes a Pod of worker i.
func (c *cluster) pod(i int, change func(*kubetest.Pod)) {
	_, port, _ := strings.Cut(strings.TrimPrefix(c.mocks.workerURL(i), "http://"), ":")
	p := kubetest.Pod{UID: fmt.Sprintf("uid-%d", i), IP: "127.0.0.1", Annotations: map[string]any{"smg.ai/worker-ports": port}}
	if change != nil {
		change(&p)
	}
	c.Pod(fmt.Sprintf("vllm-%d", i), p)
}

// TestRolloutsInKubernetesLoseNothing: Pods come, end as a rolling update has them end,
// and the API server goes away in the middle, while answers stream.
func TestRolloutsInKubernetesLoseNothing(t *testing.T) {
	const workers = 4
	c := startCluster(t, workers)
	c.pod(0, nil)
	c.pod(1, nil)
	s := c.mocks.route("--discovery=kubernetes", "--policy=least-loaded", "--selector=app=vllm")
	ready := func(i int) string { return fmt.Sprintf("vllm-%d %s", i, selection.LifecycleSchedulable) }
	s.wantLifecycles(ready(0), ready(1))

	more, stop := s.keepAsking(t, 24, 48, 30*time.Second)
	more()
	c.pod(2, func(p *kubetest.Pod) { p.NotReady = true })
	c.pod(3, func(p *kubetest.Pod) { p.NotReady = true })
	more()
	if n := len(s.workers()); n != 2 {
		t.Errorf("%d workers while two Pods are not ready", n)
	}
	c.pod(2, nil)
	s.wantLifecycles(ready(0), ready(1), ready(2))

	c.Stop() // and the rollout goes on
	more()
	c.pod(3, nil)
	c.pod(0, func(p *kubetest.Pod) { p.Ending = true })
	c.Start()
	draining := func(i int) string { return fmt.Sprintf("vllm-%d %s draining", i, selection.LifecycleUnschedulable) }
	s.wantLifecycles(draining(0), ready(1), ready(2), ready(3))
	for i := range 2 {
		if i > 0 {
			c.pod(i, func(p *kubetest.Pod) { p.Ending = true })
			s.wantLifecycles(draining(i), ready(2), ready(3))
		}
		// From here on nothing new may come; the container gets its SIGTERM.
		rank := c.mocks.rank(kv.WorkerKey{Worker: uint64(i)})
		ending := c.mocks.app.mocker.Worker(i)
		var id uint64
		for _, w := range s.workers() {
			if w.Name == fmt.Sprintf("vllm-%d", i) {
				id = w.WorkerID
			}
		}
		began := s.app.router.Load(kv.WorkerKey{Worker: id}).InFlight
		ending.Stop(errMockStopped)
		testkit.Eventually(t, 30*time.Second, "its requests have ended", func() bool {
			now := s.app.router.Load(kv.WorkerKey{Worker: id}).InFlight
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
			return s.app.index.Blocks(kv.WorkerKey{Worker: id}) == 0 && len(s.workers()) == workers-1-i
		})
		more()
	}
	s.wantLifecycles(ready(2), ready(3))
	stop()
	for _, text := range []string{"the API server does not answer", "the API server is reachable again"} {
		if !strings.Contains(s.log.String(), text) {
			t.Errorf("the log does not say %q", text)
		}
	}
}
