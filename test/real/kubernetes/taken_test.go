package kubernetes

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/kubernetes"
	"kvrouter/test/deploy"
)

// chartSurroundings are the namespaces of the sets of values, and what the Prometheus
// operator and the gateways define, as far as an API server must know of it. The
// namespace of the routers takes no Pod that asks for more than it needs.
const chartSurroundings = `
{apiVersion: v1, kind: Namespace, metadata: {name: inference, labels: {pod-security.kubernetes.io/enforce: restricted}}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: gpus}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: vllm}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: monitoring}}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: servicemonitors.monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  scope: Namespaced
  names: {kind: ServiceMonitor, plural: servicemonitors}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: prometheusrules.monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  scope: Namespaced
  names: {kind: PrometheusRule, plural: prometheusrules}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: httproutes.gateway.networking.k8s.io
  annotations: {api-approved.kubernetes.io: "https://github.com/kubernetes-sigs/gateway-api"}
spec:
  group: gateway.networking.k8s.io
  scope: Namespaced
  names: {kind: HTTPRoute, plural: httproutes}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]
---
` + poolKind

func TestKubernetesChartIsTakenByAnAPIServer(t *testing.T) {
	cluster := kubernetes.Start(t)
	cluster.Create(chartSurroundings)
	testkit.Eventually(t, 30*time.Second, "the API server knows what the Prometheus operator and the gateways define", func() bool {
		return cluster.DryRun([]byte("{apiVersion: inference.networking.k8s.io/v1, kind: InferencePool, metadata: {name: p}, spec: {selector: {matchLabels: {a: b}}, targetPorts: [{number: 1}]}}\n---\n{apiVersion: gateway.networking.k8s.io/v1, kind: HTTPRoute, metadata: {name: h}}\n---\n{apiVersion: monitoring.coreos.com/v1, kind: ServiceMonitor, metadata: {name: m}}\n---\n{apiVersion: monitoring.coreos.com/v1, kind: PrometheusRule, metadata: {name: r}}")) == nil
	})
	eachChartSet(t, func(t *testing.T, stream string, objects chartObjects) {
		if err := cluster.DryRun([]byte(stream)); err != nil {
			t.Fatal(err)
		}
		load := objects.of("Deployment")[0]
		pod := fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"pod","namespace":"inference","labels":%s},"spec":%s}`, load.Get("spec.template.metadata.labels"), load.Get("spec.template.spec"))
		if err := cluster.DryRun([]byte(pod)); err != nil {
			t.Fatal(err)
		}
		var kinds []string
		for _, object := range objects {
			kinds = append(kinds, object.Get("kind").Str)
		}
		slices.Sort(kinds)
		t.Logf("taken: %s, and a Pod under pod-security restricted", strings.Join(kinds, ", "))
		if wrong := strings.Replace(stream, "minReadySeconds:", "minReadySecond:", 1); cluster.DryRun([]byte(wrong)) == nil {
			t.Error("a wrong field is taken, too")
		}
	})
	if err := cluster.DryRun([]byte(deploy.Read(t, "helm/kvrouter/examples/vllm.yaml"))); err != nil {
		t.Error(err)
	}
}

// TestKubernetesChartGivesTheLeastRights asks for more than the router needs, as the
// router.
func TestKubernetesChartGivesTheLeastRights(t *testing.T) {
	cluster := kubernetes.Start(t)
	cluster.Create(chartSurroundings)
	pools := schema.GroupVersionResource{Group: "inference.networking.k8s.io", Version: "v1", Resource: "inferencepools"}
	core := func(resource string) schema.GroupVersionResource {
		return schema.GroupVersionResource{Version: "v1", Resource: resource}
	}
	endpointSlices := schema.GroupVersionResource{Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices"}
	for set, roles := range map[string]int{"labels": 1, "pool": 1, "endpoint-picker": 2} {
		objects := readObjects(t, template(t, chartFolder, append(slices.Clone(chartSets[set]), "--set=fullnameOverride="+set)...))
		for _, object := range objects.of("ServiceAccount", "Role", "RoleBinding") {
			cluster.Create(object.Raw)
		}
		if n := len(objects.of("Role", "RoleBinding")); n != 2*roles || len(objects.of("ClusterRole", "ClusterRoleBinding")) > 0 {
			t.Fatalf("%s: %d Roles and bindings", set, n)
		}
		config, err := clientcmd.BuildConfigFromFlags("", cluster.Kubeconfig("inference", cluster.Token("inference", set)))
		if err != nil {
			t.Fatal(err)
		}
		connections, err := rest.HTTPClientFor(config)
		if err != nil {
			t.Fatal(err)
		}
		defer connections.CloseIdleConnections()
		client, err := dynamic.NewForConfigAndClient(config, connections)
		if err != nil {
			t.Fatal(err)
		}
		picks := set == "endpoint-picker" // in the namespace of its workers
		for _, c := range []struct {
			what      schema.GroupVersionResource
			namespace string
			may       bool
		}{
			{core("pods"), "vllm", !picks},
			{pools, "vllm", set == "pool"},
			{core("pods"), "inference", picks},
			{pools, "inference", picks},
			{endpointSlices, "inference", picks},
			{endpointSlices, "vllm", false},
			{core("pods"), "", false},
			{core("secrets"), "vllm", false},
			{core("secrets"), "inference", false},
			{core("configmaps"), "vllm", false},
		} {
			var is bool
			testkit.Eventually(t, 10*time.Second, "the rights have reached the API server", func() bool {
				_, err := client.Resource(c.what).Namespace(c.namespace).List(t.Context(), metav1.ListOptions{})
				is = !apierrors.IsForbidden(err)
				return is == c.may
			})
			t.Logf("%s: list %s in %q: %t", set, c.what.Resource, c.namespace, is)
		}
		if err := client.Resource(core("pods")).Namespace("vllm").Delete(t.Context(), "p", metav1.DeleteOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("%s: it may delete Pods: %v", set, err)
		}
	}
}
