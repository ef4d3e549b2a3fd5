package kubernetes

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/kubernetes"
)

var roleResource = schema.GroupVersionResource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "roles"}

// poolKind defines InferencePool as far as the router reads it and the chart makes it.
const poolKind = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: inferencepools.inference.networking.k8s.io
  annotations: {api-approved.kubernetes.io: "https://github.com/kubernetes-sigs/gateway-api-inference-extension"}
spec:
  group: inference.networking.k8s.io
  names: {kind: InferencePool, listKind: InferencePoolList, plural: inferencepools, singular: inferencepool}
  scope: Namespaced
  versions:
    - name: v1
      served: true
      storage: true
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec:
              type: object
              properties:
                selector: {type: object, properties: {matchLabels: {type: object, additionalProperties: {type: string}}}}
                targetPorts: {type: array, items: {type: object, properties: {number: {type: integer}}}}
                endpointPickerRef:
                  type: object
                  properties:
                    name: {type: string}
                    port: {type: object, properties: {number: {type: integer}}}
                    failureMode: {type: string, enum: [FailOpen, FailClose]}
`

// pool makes the InferencePool vllm-pool, as soon as the API server knows of such.
func (k *kubeSite) pool() {
	k.t.Helper()
	pool := fmt.Sprintf(`{apiVersion: inference.networking.k8s.io/v1, kind: InferencePool, metadata: {name: vllm-pool, namespace: vllm},
spec: {selector: {matchLabels: {app: vllm}}, targetPorts: [{number: %d}]}}`, k.port)
	testkit.Eventually(k.t, kubeLimit, "the API server knows InferencePools", func() bool { return k.cluster.DryRun([]byte(pool)) == nil })
	k.cluster.Create(pool)
}

// TestKubernetesPoolIsFollowed: a router with --pool starts before the cluster knows what
// an InferencePool is, with the documented Role and no more.
func TestKubernetesPoolIsFollowed(t *testing.T) {
	k := startKube(t)
	k.nodes(kubernetes.Inside(t))
	k.deploy("mock", 2, 0)
	k.route("kvrouter", "--pool=vllm-pool")
	k.says("the cluster has no resource InferencePool (inference.networking.k8s.io/v1)")
	k.cluster.Create(poolKind)
	k.pool()
	k.schedulable(2)
	k.change("mock", `{"spec":{"replicas":3}}`)
	k.schedulable(3)
	k.cluster.Patch(schema.GroupVersionResource{Group: "inference.networking.k8s.io", Version: "v1", Resource: "inferencepools"}, kubeNamespace, "vllm-pool",
		`{"spec":{"selector":{"matchLabels":{"app":null,"model":"other"}}}}`)
	testkit.Eventually(t, kubeLimit, "the Pods of another label are none of its workers", func() bool { return len(k.Workers()) == 0 })
}

// TestKubernetesMissingRightsAreNamed: with less than the documented Role the router says
// which rule is missing, and works as soon as it is there.
func TestKubernetesMissingRightsAreNamed(t *testing.T) {
	k := startKube(t)
	k.nodes(kubernetes.Inside(t))
	k.cluster.Create(poolKind)
	k.pool()
	k.deploy("mock", 2, 0)
	const (
		pods  = `{"apiGroups":[""],"resources":["pods"],"verbs":["list","watch"]}`
		pools = `{"apiGroups":["inference.networking.k8s.io"],"resources":["inferencepools"],"verbs":["list","watch"]}`
		names = `no right to list and watch %s in namespace vllm: the Role of system:serviceaccount:vllm:%s needs the rule {apiGroups: ["%s"], resources: [%[1]s], verbs: [list, watch]}`
	)
	for name, test := range map[string]struct {
		has           string // rules
		resource, api string // that are missed
		args          []string
	}{
		"nothing":   {"", "pods", "", nil},
		"list-only": {`{"apiGroups":[""],"resources":["pods"],"verbs":["list","get"]}`, "pods", "", nil},
		"other":     {`{"apiGroups":[""],"resources":["services"],"verbs":["*"]}`, "pods", "", nil},
		"no-pool":   {pods, "inferencepools", "inference.networking.k8s.io", []string{"--pool=vllm-pool"}},
		"only-pool": {pools, "pods", "", []string{"--pool=vllm-pool"}},
	} {
		t.Run(name, func(t *testing.T) {
			sub := &kubeSite{t: t, cluster: k.cluster, kubelet: k.kubelet, port: k.port}
			sub.cluster.Create(fmt.Sprintf(`{"kind":"Role","apiVersion":"rbac.authorization.k8s.io/v1","metadata":{"name":%q,"namespace":"vllm"},"rules":[%s]}`, name, test.has))
			sub.account(name, name)
			sub.route(name, test.args...)
			want := fmt.Sprintf(names, test.resource, name, test.api)
			sub.says(strings.ReplaceAll(want, `"`, `\"`))               // as the log writes it
			if n := len(sub.Workers()); n != 0 && name != "list-only" { // which knows them once, and follows none
				t.Errorf("%d workers", n)
			}
			sub.cluster.Patch(roleResource, kubeNamespace, name, fmt.Sprintf(`{"rules":[%s,%s]}`, pods, pools))
			sub.schedulable(2)
			if n := strings.Count(sub.Log.String(), "no right to list"); n != 1 {
				t.Errorf("it is said %d times", n)
			}
		})
	}
}

// TestKubernetesDryRunRefusesWhatIsWrong holds the helper by which manifests are looked
// at.
func TestKubernetesDryRunRefusesWhatIsWrong(t *testing.T) {
	c := kubernetes.Start(t)
	const good = "{apiVersion: v1, kind: ConfigMap, metadata: {name: a}, data: {k: v}}"
	deployment := func(container string) string {
		return "{apiVersion: apps/v1, kind: Deployment, metadata: {name: d}, spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [" + container + "]}}}}"
	}
	for name, test := range map[string]struct{ yaml, problem string }{
		"right":             {good + "\n---\n# nothing\n---\n" + deployment("{name: c, image: x}"), ""},
		"right, of no ns":   {"{apiVersion: v1, kind: Namespace, metadata: {name: new}}", ""},
		"image: y":          {deployment("{name: c, image: y}"), "Deployment d: "},
		"an unknown field":  {deployment("{name: c, image: x, comand: [a]}"), `unknown field "spec.template.spec.containers[0].comand"`},
		"a wrong value":     {deployment("{name: C, image: x}"), "Deployment d: "},
		"an unknown kind":   {"{apiVersion: apps/v1, kind: Deploiment, metadata: {name: d}}", "the API server knows no Deploiment of apps/v1"},
		"no such namespace": {"{apiVersion: v1, kind: ConfigMap, metadata: {name: a, namespace: nowhere}}", `namespaces "nowhere" not found`},
		"the second":        {good + "\n---\n{apiVersion: v1, kind: ConfigMap, metadata: {name: A_}}", "ConfigMap A_: "},
		"nothing":           {"# nothing\n", "there is no object"},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.DryRun([]byte(test.yaml))
			if (err != nil) != (test.problem != "") || err != nil && !strings.Contains(err.Error(), test.problem) {
				t.Errorf("%v, want %q", err, test.problem)
			}
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	left, err := c.Client.Resource(deploymentResource).Namespace(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil || len(left.Items) > 0 {
		t.Errorf("%d Deployments are left, %v", len(left.Items), err)
	}
}
