package kubernetes

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"kvrouter/internal/fleet/discovery"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/kubernetes"
)

// TestKubernetesRoutersFindEachOther: the routers behind a headless Service, with the
// rights that the chart gives, also after the API server was away.
func TestKubernetesRoutersFindEachOther(t *testing.T) {
	cluster := kubernetes.Start(t)
	cluster.Create("{apiVersion: v1, kind: Namespace, metadata: {name: inference}}")
	objects := readObjects(t, template(t, chartFolder, chartSets["endpoint-picker"]...))
	for _, object := range objects.of("ServiceAccount", "Role", "RoleBinding") {
		cluster.Create(object.Raw)
	}
	where, _ := chartSettings(t, objects)["cluster-discovery"].(string)
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	t.Setenv("KUBECONFIG", cluster.Kubeconfig("inference", cluster.Token("inference", "kvrouter")))
	var log testkit.LogBuffer
	peers, err := discovery.OpenPeers(where, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var told atomic.Pointer[string]
	done := make(chan struct{})
	go func() {
		defer close(done)
		peers.Run(ctx, func(addresses []string) {
			all := strings.Join(addresses, " ")
			told.Store(&all)
		})
	}()
	defer func() { cancel(); <-done }()
	wants := func(want string) {
		t.Helper()
		testkit.Settles(t, func() error {
			if got := told.Load(); got == nil || *got != want {
				return fmt.Errorf("told %v, want %q\n%s", got, want, log.Tail())
			}
			return nil
		})
	}
	wants("")
	slice := func(name, service, addresses string) string {
		return fmt.Sprintf(`{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: %s, namespace: inference, labels: {kubernetes.io/service-name: %s}},
addressType: IPv4, ports: [{name: cluster, port: 6222}], endpoints: [%s]}`, name, service, addresses)
	}
	cluster.Create(slice("others", "web", "{addresses: [10.0.0.9]}"))
	cluster.Create(slice("routers", "kvrouter-peers", "{addresses: [10.0.0.2], conditions: {ready: false}}, {addresses: [10.0.0.1]}"))
	wants("10.0.0.1:6222 10.0.0.2:6222")
	cluster.KillAPI()
	testkit.Settles(t, func() error {
		if !strings.Contains(log.String(), "the routers are kept") {
			return fmt.Errorf("log: %s", log.Tail())
		}
		return nil
	})
	wants("10.0.0.1:6222 10.0.0.2:6222")
	cluster.StartAPI()
	cluster.Patch(schema.GroupVersionResource{Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices"}, "inference", "routers", `{"endpoints":[{"addresses":["10.0.0.3"]}]}`)
	wants("10.0.0.3:6222")
}
