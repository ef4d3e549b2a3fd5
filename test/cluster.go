package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvrouter/internal/testkit/kubetest"
)

// Cluster is a scripted API server of Kubernetes over mock workers: each is a Pod.
type Cluster struct {
	*kubetest.Server
	workers *Workers
}

// StartCluster starts an API server without Pods. Routers that the test starts from
// now on find it by $KUBECONFIG.
func StartCluster(t *testing.T, w *Workers) *Cluster {
	t.Helper()
	c := &Cluster{Server: kubetest.New(t), workers: w}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	config := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'http://%s'}}]\ncontexts: [{name: x, "+
		"context: {cluster: c, namespace: ns, user: u}}]\nusers: [{name: u, user: {token: t}}]\ncurrent-context: x\n", c.Address)
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", path)
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	return c
}

// Worker makes worker i the Pod of that name, as change has it, which may be nil.
func (c *Cluster) Worker(i int, name string, change func(*kubetest.Pod)) {
	_, port, _ := strings.Cut(strings.TrimPrefix(c.workers.URL(i), "http://"), ":")
	p := kubetest.Pod{UID: fmt.Sprintf("uid-%d", i), IP: "127.0.0.1", Annotations: map[string]any{"smg.ai/worker-ports": port}}
	if change != nil {
		change(&p)
	}
	c.Pod(name, p)
}
