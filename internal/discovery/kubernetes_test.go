package discovery

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic/fake"

	"kvrouter/internal/kv"
	"kvrouter/internal/testkit"
)

func TestSettingsOfKubernetesThatMakeNoSense(t *testing.T) {
	for want, s := range map[string]Settings{
		"--selector x: it is for --discovery kubernetes": {Selector: "x", Discovery: "file:x"},
		"--pool x: it is for --discovery kubernetes":     {Pool: "x"},
		"name the Pods of the workers by --pool":         {Discovery: kubernetes, WorkerPort: 1},
		"leave out --selector":                           {Discovery: kubernetes, WorkerPort: 1, Pool: "p", DecodeSelector: "a=b"},
		"--prefill-selector a=b=c: ":                     {Discovery: kubernetes, WorkerPort: 1, PrefillSelector: "a=b=c"},
		"--worker-port 65536: give 1 to 65535":           {Discovery: kubernetes, WorkerPort: 65536, Pool: "p"},
	} {
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", s, err)
		}
	}
}

// TestWorkersOfAPod: what labels and annotations of others say.
func TestWorkersOfAPod(t *testing.T) {
	prefill := kv.RolePrefill
	marks := func(pairs ...string) map[string]any {
		m := map[string]any{}
		for i := 0; i < len(pairs); i += 2 {
			m[pairs[i]] = pairs[i+1]
		}
		return m
	}
	for name, test := range map[string]struct {
		pod     madePod
		as      *kv.Role
		ports   []uint16 // of a pool
		want    string
		problem string
	}{
		"plain":                   {pod: madePod{}, want: "p=10.0.0.1:8000"},
		"IPv6":                    {pod: madePod{ip: "fd00::1"}, want: "p=[fd00::1]:8000"},
		"no address yet":          {pod: madePod{ip: "-"}, want: ""},
		"ended":                   {pod: madePod{phase: "Failed"}, want: ""},
		"not ready":               {pod: madePod{notReady: true}, want: "p=10.0.0.1:8000 not ready"},
		"ending, ready still":     {pod: madePod{ending: true}, want: "p=10.0.0.1:8000 draining"},
		"llm-d prefill":           {pod: madePod{labels: marks(labelRole, "prefill", labelEngine, "vllm")}, want: "p=10.0.0.1:8000 prefill/nixl"},
		"llm-d decode":            {pod: madePod{labels: marks(labelRole, "decode")}, want: "p=10.0.0.1:8000 decode/none"},
		"llm-d both":              {pod: madePod{labels: marks(labelRole, "prefill-decode", labelEngine, "vllm")}, want: "p=10.0.0.1:8000"},
		"llm-d encode":            {pod: madePod{labels: marks(labelRole, "encode")}, want: ""},
		"role of another kind":    {pod: madePod{labels: marks(labelRole, "router")}, want: "p=10.0.0.1:8000", problem: `"router" is no role`},
		"SGLang prefill":          {pod: madePod{labels: marks(labelRole, "prefill", labelEngine, "SGLang"), annotations: marks(annotationBootstrap, "8998")}, want: "p=10.0.0.1:8000 prefill/sglang 10.0.0.1:8998"},
		"SGLang decode":           {pod: madePod{labels: marks(labelRole, "decode", labelEngine, "sglang"), annotations: marks(annotationBootstrap, "8998")}, want: "p=10.0.0.1:8000 decode/sglang"},
		"by its selector":         {pod: madePod{labels: marks(labelRole, "router"), annotations: marks(annotationBootstrap, "9000")}, as: &prefill, want: "p=10.0.0.1:8000 prefill/sglang 10.0.0.1:9000"},
		"bad bootstrap":           {pod: madePod{annotations: marks(annotationBootstrap, "x")}, want: "p=10.0.0.1:8000", problem: annotationBootstrap},
		"Mooncake":                {pod: madePod{annotations: marks(annotationConnector, "MooncakeConnector", annotationBootstrap, "8998")}, want: "p=10.0.0.1:8000 both/mooncake 10.0.0.1:8998"},
		"smg's ports":             {pod: madePod{annotations: marks(annotationPorts, "9001, 9002")}, want: "p-rank-0=10.0.0.1:9001; p-rank-1=10.0.0.1:9002"},
		"ports of a pool":         {ports: []uint16{8000, 8001}, want: "p-rank-0=10.0.0.1:8000; p-rank-1=10.0.0.1:8001"},
		"active ports":            {pod: madePod{annotations: marks(annotationActive, "8001,9999")}, ports: []uint16{8000, 8001}, want: "p-rank-1=10.0.0.1:8001"},
		"active ports, as before": {pod: madePod{annotations: marks(annotationActiveLegacy, "8000")}, ports: []uint16{8000, 8001}, want: "p-rank-0=10.0.0.1:8000"},
		"active ports, no pool":   {pod: madePod{annotations: marks(annotationActive, "7000")}, want: "p=10.0.0.1:7000"},
		"ports that are none":     {pod: madePod{annotations: marks(annotationActive, "8000,0")}, want: "p=10.0.0.1:8000", problem: `annotation llm-d.ai/active-ports: "0" is no port`},
	} {
		t.Run(name, func(t *testing.T) {
			test.pod.uid = "u"
			if test.pod.ip == "" {
				test.pod.ip = "10.0.0.1"
			}
			content := test.pod.content()
			content["metadata"].(map[string]any)["name"] = "p"
			ports := test.ports
			if ports == nil {
				ports = []uint16{8000}
			}
			list, problem := podOf(&unstructured.Unstructured{Object: content}).workers(test.as, ports, test.ports != nil)
			if got := shown(list); got != test.want || (problem != "") != (test.problem != "") || !strings.Contains(problem, test.problem) {
				t.Errorf("%q, problem %q; want %q", got, problem, test.want)
			}
			for _, w := range list {
				if at := slices.Index(ports, 8001); at > 0 && strings.HasSuffix(w.URL, ":8001") && w.EventsPort != 5558 {
					t.Errorf("events of rank 1 at %d", w.EventsPort)
				}
			}
		})
	}
}

func TestTheLifeOfAPod(t *testing.T) {
	s := newAPIServer(t)
	s.pod("vllm-0", madePod{uid: "a", ip: "10.0.0.1"})
	s.pod("other", madePod{uid: "o", ip: "10.0.0.9", labels: map[string]any{"app": "web"}})
	w := watchCluster(t, s, Settings{Selector: "app=vllm"})
	w.wants("vllm-0=10.0.0.1:8000")
	first := w.last()[0].ID
	s.pod("vllm-1", madePod{uid: "b", notReady: true})
	s.pod("vllm-1", madePod{uid: "b", ip: "10.0.0.2", notReady: true})
	w.wants("vllm-0=10.0.0.1:8000; vllm-1=10.0.0.2:8000 not ready")
	s.pod("vllm-1", madePod{uid: "b", ip: "10.0.0.2"})
	w.wants("vllm-0=10.0.0.1:8000; vllm-1=10.0.0.2:8000")
	s.pod("vllm-0", madePod{uid: "a", ip: "10.0.0.1", ending: true}) // its readiness passes still
	w.wants("vllm-0=10.0.0.1:8000 draining; vllm-1=10.0.0.2:8000")
	s.remove("pods", "vllm-0")
	w.wants("vllm-1=10.0.0.2:8000")
	s.pod("vllm-0", madePod{uid: "c", ip: "10.0.0.1"}) // of a StatefulSet: another incarnation
	w.wants("vllm-0=10.0.0.1:8000; vllm-1=10.0.0.2:8000")
	if again := w.last()[0].ID; again == first {
		t.Error("another pod has the id of the one before")
	}
	s.pod("vllm-1", madePod{uid: "b", ip: "10.0.0.2", labels: map[string]any{"app": "vllm", labelRole: "decode"}})
	w.wants("vllm-0=10.0.0.1:8000; vllm-1=10.0.0.2:8000 decode/none")
	s.pod("vllm-1", madePod{uid: "b", ip: "10.0.0.2", labels: map[string]any{"app": "quarantine"}})
	w.wants("vllm-0=10.0.0.1:8000")
	s.pod("vllm-1", madePod{uid: "b", ip: "10.0.0.2", labels: map[string]any{"app": "vllm", labelRole: "dcode"}})
	w.wants("vllm-0=10.0.0.1:8000; vllm-1=10.0.0.2:8000")
	w.says(`pod vllm-1: label llm-d.ai/role: \"dcode\" is no role: it counts as both`)
	s.pod("vllm-0", madePod{uid: "c", ip: "10.0.0.1", phase: "Succeeded"})
	w.wants("vllm-1=10.0.0.2:8000")
	if w.warnings() != 1 {
		t.Error(w.log.String())
	}
}

func TestSelectorsGiveRoles(t *testing.T) {
	s := newAPIServer(t)
	s.pod("a", madePod{uid: "a", ip: "10.0.0.1", labels: map[string]any{"app": "vllm", "part": "p"}})
	s.pod("b", madePod{uid: "b", ip: "10.0.0.2", labels: map[string]any{"app": "vllm", "part": "d"}})
	s.pod("c", madePod{uid: "c", ip: "10.0.0.3", labels: map[string]any{"app": "vllm"}})
	w := watchCluster(t, s, Settings{Selector: "app=vllm", PrefillSelector: "app=vllm,part=p", DecodeSelector: "part in (d,e)", WorkerPort: 8100})
	w.wants("a=10.0.0.1:8100 prefill/none; b=10.0.0.2:8100 decode/none; c=10.0.0.3:8100")
	s.pod("b", madePod{uid: "b", ip: "10.0.0.2", labels: map[string]any{"app": "vllm", "part": "p"}})
	w.wants("a=10.0.0.1:8100 prefill/none; b=10.0.0.2:8100 prefill/none; c=10.0.0.3:8100")
}

func TestAPoolNamesPodsAndPorts(t *testing.T) {
	s := newAPIServer(t)
	s.pod("a", madePod{uid: "a", ip: "10.0.0.1", labels: map[string]any{"app": "vllm"}})
	s.pod("b", madePod{uid: "b", ip: "10.0.0.2", labels: map[string]any{"app": "next"}})
	s.pool("another", map[string]any{"app": "x"}, 1)
	w := watchCluster(t, s, Settings{Pool: "pool"})
	w.says("there is no InferencePool pool in namespace ns")
	s.pool("pool", map[string]any{}, 8000)
	w.says("InferencePool pool has no spec.selector.matchLabels")
	s.pool("pool", map[string]any{"app": "vllm"})
	w.says("InferencePool pool has no spec.targetPorts")
	s.pool("pool", map[string]any{"app": "vllm"}, 70000)
	w.says("InferencePool pool has a target port that is none: \\\"70000\\\"")
	if w.count() != 0 {
		t.Errorf("%d lists before anything is known", w.count())
	}
	s.pool("pool", map[string]any{"app": "vllm"}, 8000)
	w.wants("a=10.0.0.1:8000")
	s.pool("pool", map[string]any{"app": "vllm"}, 8000, 8001)
	w.wants("a-rank-0=10.0.0.1:8000; a-rank-1=10.0.0.1:8001")
	before := w.count()
	s.pool("pool", map[string]any{"app": "next"}, 8000)
	w.wants("b=10.0.0.2:8000")
	for _, list := range w.all()[before:] {
		if len(list) == 0 {
			t.Error("between the two selectors no worker was known")
		}
	}
	s.remove("inferencepools", "pool")
	testkit.Settles(t, func() error {
		if strings.Count(w.log.String(), "there is no InferencePool pool in namespace ns") != 2 {
			return fmt.Errorf("log: %s", w.log.String())
		}
		return nil
	})
	s.pod("c", madePod{uid: "c", ip: "10.0.0.3", labels: map[string]any{"app": "next"}})
	w.wants("b=10.0.0.2:8000; c=10.0.0.3:8000") // its pods are there, and are followed
}

// TestGapsAreListedAnew: 410 Gone, in a watch and at its start.
func TestGapsAreListedAnew(t *testing.T) {
	for name, old := range map[string]bool{"with streamed lists": false, "older server": true} {
		t.Run(name, func(t *testing.T) {
			s := newAPIServer(t)
			s.set(func() { s.noStream = old })
			s.pod("a", madePod{uid: "a", ip: "10.0.0.1"})
			s.pod("b", madePod{uid: "b", ip: "10.0.0.2"})
			w := watchCluster(t, s, Settings{Selector: "app=vllm"})
			w.wants("a=10.0.0.1:8000; b=10.0.0.2:8000")
			for round := range 3 {
				s.stop()
				s.remove("pods", fmt.Sprintf("%c", 'a'+round))
				s.pod(fmt.Sprintf("%c", 'c'+round), madePod{uid: "n", ip: fmt.Sprintf("10.0.1.%d", round)})
				s.forget()
				s.start()
				testkit.Settles(t, func() error {
					names := []string{}
					for _, worker := range w.last() {
						names = append(names, worker.Name)
					}
					if want := []string{string(rune('b' + round)), string(rune('c' + round))}; !slices.Equal(names, want) {
						return fmt.Errorf("%v, want %v", names, want)
					}
					return nil
				})
			}
			if strings.Contains(w.log.String(), "410") || strings.Contains(w.log.String(), "too old") || strings.Contains(w.log.String(), "sendInitialEvents") {
				t.Errorf("what client-go mends is told: %s", w.log.String())
			}
			for _, list := range w.all() {
				if len(list) == 0 {
					t.Error("meanwhile no worker was known")
				}
			}
			if n := s.questions("list pods"); (n == 0) == old {
				t.Errorf("%d lists", n)
			}
		})
	}
}

func TestWhileTheAPIServerIsAwayAllStaysAsItWas(t *testing.T) {
	s := newAPIServer(t)
	s.pod("a", madePod{uid: "a", ip: "10.0.0.1"})
	s.pool("pool", map[string]any{"app": "vllm"}, 8000)
	w := watchCluster(t, s, Settings{Pool: "pool"})
	w.wants("a=10.0.0.1:8000")
	s.stop()
	w.says("the API server does not answer: dial tcp")
	w.says("the workers stay as they were")
	s.pod("b", madePod{uid: "b", ip: "10.0.0.2"})
	s.start()
	w.wants("a=10.0.0.1:8000; b=10.0.0.2:8000")
	w.says("the API server answers again")
	s.set(func() { s.refuses["watch pods"], s.refuses["list pods"] = 500, 500 })
	s.endWatches()
	w.says("request timed out")
	s.pod("c", madePod{uid: "c", ip: "10.0.0.3"})
	s.set(func() { clear(s.refuses) })
	w.wants("a=10.0.0.1:8000; b=10.0.0.2:8000; c=10.0.0.3:8000")
	if n := w.count(); n != 3 {
		t.Errorf("%d lists", n)
	}
}

func TestMissingRightsAreNamedWithTheRuleThatGivesThem(t *testing.T) {
	podRule := `{apiGroups: [\"\"], resources: [pods], verbs: [list, watch]}`
	poolRule := `{apiGroups: [\"inference.networking.k8s.io\"], resources: [inferencepools], verbs: [list, watch]}`
	for name, test := range map[string]struct {
		refused string
		code    int
		says    []string
	}{
		"watch pods": {"watch pods", 403, []string{"no right to list and watch pods in namespace ns: the Role of system:serviceaccount:ns:router needs the rule " + podRule}},
		"pools":      {"watch inferencepools", 403, []string{"no right to list and watch inferencepools in namespace ns", poolRule}},
		"no token":   {"watch pods", 401, []string{"does not know who asks (401)"}},
		"no pools":   {"watch inferencepools", 404, []string{"the cluster knows no InferencePool", "--selector"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newAPIServer(t)
			s.pool("pool", map[string]any{"app": "vllm"}, 8000)
			s.pod("a", madePod{uid: "a", ip: "10.0.0.1"})
			list := strings.Replace(test.refused, "watch", "list", 1)
			s.set(func() { s.refuses[test.refused], s.refuses[list] = test.code, test.code })
			w := watchCluster(t, s, Settings{Pool: "pool"})
			for _, text := range test.says {
				w.says(text)
			}
			asked := s.questions(list)
			testkit.Eventually(t, 20*time.Second, "it is asked again", func() bool { return s.questions(list) > asked+3 })
			if n := w.warnings(); n != 1 {
				t.Errorf("%d warnings: %s", n, w.log.String())
			}
			s.set(func() { clear(s.refuses) }) // the Role is mended
			w.wants("a=10.0.0.1:8000")
			w.says("the API server answers again")
		})
	}
}

// TestTheFakeClientOfClientGo holds the source against client-go's own idea of a server.
func TestTheFakeClientOfClientGo(t *testing.T) {
	kinds := map[schema.GroupVersionResource]string{podResource: "PodList", poolResource: "InferencePoolList"}
	object := func(content map[string]any, name string) *unstructured.Unstructured {
		u := &unstructured.Unstructured{Object: content}
		u.SetName(name)
		u.SetNamespace("ns")
		return u
	}
	client := fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), kinds, object(madePod{uid: "a", ip: "10.0.0.1"}.content(), "a"))
	w := &watched{t: t}
	w.watch(newKubeSource(Settings{Discovery: kubernetes, Selector: "app=vllm", WorkerPort: 8000}, client, "ns", w.logger()))
	w.wants("a=10.0.0.1:8000")
	testkit.Settles(t, func() error { // a fake watch misses what came before it
		for _, action := range client.Actions() {
			if action.GetVerb() == "watch" {
				return nil
			}
		}
		return fmt.Errorf("no watch: %v", client.Actions())
	})
	if err := client.Tracker().Add(object(madePod{uid: "b", ip: "10.0.0.2"}.content(), "b")); err != nil {
		t.Fatal(err)
	}
	w.wants("a=10.0.0.1:8000; b=10.0.0.2:8000")
}

func TestTheClusterIsThatOfKUBECONFIG(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	path := filepath.Join(t.TempDir(), "config")
	t.Setenv("KUBECONFIG", path)
	settings := Settings{Discovery: kubernetes, Selector: "app=vllm", WorkerPort: 8000}
	w := &watched{t: t}
	if _, err := Open(settings, w.logger()); err == nil || !strings.Contains(err.Error(), "--discovery kubernetes: no cluster") || strings.Contains(err.Error(), "\n") {
		t.Errorf("without a cluster: %v", err)
	}
	const config = "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\ncontexts: [{name: x, context: {cluster: c, namespace: mine, user: u}}]\nusers: [{name: u, user: {token: t}}]\ncurrent-context: x\n"
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	source, err := Open(settings, w.logger())
	if err != nil || source.(*kubeSource).namespace != "mine" {
		t.Fatalf("%+v, %v", source, err)
	}
	settings.Namespace = "given"
	if source, err = Open(settings, w.logger()); err != nil || source.(*kubeSource).namespace != "given" {
		t.Errorf("%+v, %v", source, err)
	}
}

func FuzzPod(f *testing.F) {
	for _, seed := range []string{
		`{"metadata":{"name":"p","labels":{"llm-d.ai/role":"prefill"},"annotations":{"llm-d.ai/active-ports":"1,2"}},"status":{"podIP":"10.0.0.1","conditions":[{"type":"Ready","status":"True"}]}}`,
		`{"metadata":{"labels":3,"annotations":[]},"status":[],"spec":{"targetPorts":[{"number":1}],"selector":{"matchLabels":{"a":"b"}}}}`,
		`{"metadata":{"deletionTimestamp":3},"status":{"conditions":[null,3,{"type":3}],"podIP":"::1%x"}}`, `{}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var u unstructured.Unstructured
		if u.UnmarshalJSON(append([]byte(`{"kind":"Pod","apiVersion":"v1",`), strings.TrimPrefix(string(data), "{")...)) != nil || u.Object == nil {
			return
		}
		list, _ := podOf(&u).workers(nil, []uint16{8000}, false)
		if len(list) > maxPorts {
			t.Errorf("%d workers", len(list))
		}
		for _, w := range list {
			if again, err := kv.ParseURL(w.URL); err != nil || again != w.URL {
				t.Errorf("%q: %v", w.URL, err)
			}
		}
		if p, err := poolOf(&u); err == nil && (len(p.ports) == 0 || len(p.ports) > maxPorts || len(p.labels) == 0) {
			t.Errorf("%+v", p)
		}
	})
}
