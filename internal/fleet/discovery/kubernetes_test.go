package discovery

import (
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/rest"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/kubetest"
)

// watchCluster watches what the server reports.
func watchCluster(t *testing.T, s *kubetest.Server, settings Settings) *watched {
	t.Helper()
	w := &watched{t: t}
	settings.Discovery = kubernetes
	if settings.WorkerPort == 0 {
		settings.WorkerPort = 8000
	}
	if err := settings.Validate(); err != nil {
		t.Fatal(err)
	}
	source, err := newKubernetes(settings, &rest.Config{Host: "http://" + s.Address}, "ns", w.logger())
	if err != nil {
		t.Fatal(err)
	}
	source.backoff.Duration, source.backoff.Cap, source.pace = 5*time.Millisecond, 20*time.Millisecond, rate.Inf
	w.watch(source)
	return w
}

// warnings counts the warnings of the log.
func (w *watched) warnings() int { return strings.Count(w.log.String(), "level=WARN") }

func TestSettingsOfKubernetesThatMakeNoSense(t *testing.T) {
	for want, s := range map[string]Settings{
		"--selector x: it requires --discovery kubernetes":       {Selector: "x", Discovery: "file:x"},
		"--pool x: it requires --discovery kubernetes":           {Pool: "x"},
		"--worker-port 8100: it requires --discovery kubernetes": {Discovery: "dns://a:1", WorkerPort: 8100},
		"select the workers' Pods by --pool":                     {Discovery: kubernetes, WorkerPort: 1},
		"leave out --selector":                                   {Discovery: kubernetes, WorkerPort: 1, Pool: "p", DecodeSelector: "a=b"},
		"--prefill-selector a=b=c: ":                             {Discovery: kubernetes, WorkerPort: 1, PrefillSelector: "a=b=c"},
		"--worker-port 65536: must be 1 to 65535":                {Discovery: kubernetes, WorkerPort: 65536, Pool: "p"},
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
		pod     kubetest.Pod
		as      *kv.Role
		ports   []uint16 // of a pool
		want    string
		problem string
	}{
		"plain":                   {pod: kubetest.Pod{}, want: "p=10.0.0.1:8000"},
		"IPv6":                    {pod: kubetest.Pod{IP: "fd00::1"}, want: "p=[fd00::1]:8000"},
		"no address yet":          {pod: kubetest.Pod{IP: "-"}, want: ""},
		"ended":                   {pod: kubetest.Pod{Phase: "Failed"}, want: ""},
		"not ready":               {pod: kubetest.Pod{NotReady: true}, want: "p=10.0.0.1:8000 not ready"},
		"ending, ready still":     {pod: kubetest.Pod{Ending: true}, want: "p=10.0.0.1:8000 draining"},
		"llm-d prefill":           {pod: kubetest.Pod{Labels: marks(labelRole, "prefill", labelEngine, "vllm")}, want: "p=10.0.0.1:8000 prefill/nixl"},
		"llm-d decode":            {pod: kubetest.Pod{Labels: marks(labelRole, "decode")}, want: "p=10.0.0.1:8000 decode/none"},
		"llm-d both":              {pod: kubetest.Pod{Labels: marks(labelRole, "prefill-decode", labelEngine, "vllm")}, want: "p=10.0.0.1:8000"},
		"a router below":          {pod: kubetest.Pod{Labels: marks(labelEngine, "kvrouter")}, want: "p=10.0.0.1:8000 both/router"},
		"llm-d encode":            {pod: kubetest.Pod{Labels: marks(labelRole, "encode")}, want: ""},
		"role of another kind":    {pod: kubetest.Pod{Labels: marks(labelRole, "router")}, want: "p=10.0.0.1:8000", problem: `"router" is not a role`},
		"SGLang prefill":          {pod: kubetest.Pod{Labels: marks(labelRole, "prefill", labelEngine, "SGLang"), Annotations: marks(annotationBootstrap, "8998")}, want: "p=10.0.0.1:8000 prefill/sglang 10.0.0.1:8998"},
		"SGLang decode":           {pod: kubetest.Pod{Labels: marks(labelRole, "decode", labelEngine, "sglang"), Annotations: marks(annotationBootstrap, "8998")}, want: "p=10.0.0.1:8000 decode/sglang"},
		"by its selector":         {pod: kubetest.Pod{Labels: marks(labelRole, "router"), Annotations: marks(annotationBootstrap, "9000")}, as: &prefill, want: "p=10.0.0.1:8000 prefill/sglang 10.0.0.1:9000"},
		"pulls":                   {pod: kubetest.Pod{Annotations: marks(annotationP2P, "7777")}, want: "p=10.0.0.1:8000 p2p 10.0.0.1:7777"},
		"bad p2p port":            {pod: kubetest.Pod{Annotations: marks(annotationP2P, "0")}, want: "p=10.0.0.1:8000", problem: annotationP2P},
		"bad bootstrap":           {pod: kubetest.Pod{Annotations: marks(annotationBootstrap, "x")}, want: "p=10.0.0.1:8000", problem: annotationBootstrap},
		"Mooncake":                {pod: kubetest.Pod{Annotations: marks(annotationConnector, "MooncakeConnector", annotationBootstrap, "8998")}, want: "p=10.0.0.1:8000 both/mooncake 10.0.0.1:8998"},
		"smg's ports":             {pod: kubetest.Pod{Annotations: marks(annotationPorts, "9001, 9002")}, want: "p-rank-0=10.0.0.1:9001; p-rank-1=10.0.0.1:9002"},
		"ports of a pool":         {ports: []uint16{8000, 8001}, want: "p-rank-0=10.0.0.1:8000; p-rank-1=10.0.0.1:8001"},
		"active ports":            {pod: kubetest.Pod{Annotations: marks(annotationActive, "8001,9999")}, ports: []uint16{8000, 8001}, want: "p-rank-1=10.0.0.1:8001"},
		"no active port":          {pod: kubetest.Pod{Annotations: marks(annotationActive, "9998,9999")}, ports: []uint16{8000, 8001}, want: "", problem: `none of "9998,9999" is a port of the pool`},
		"active ports, as before": {pod: kubetest.Pod{Annotations: marks(annotationActiveLegacy, "8000")}, ports: []uint16{8000, 8001}, want: "p-rank-0=10.0.0.1:8000"},
		"active ports, no pool":   {pod: kubetest.Pod{Annotations: marks(annotationActive, "7000")}, want: "p=10.0.0.1:7000"},
		"ports that are none":     {pod: kubetest.Pod{Annotations: marks(annotationActive, "8000,0")}, want: "p=10.0.0.1:8000", problem: `annotation llm-d.ai/active-ports: "0" is not a port`},
	} {
		t.Run(name, func(t *testing.T) {
			test.pod.UID = "u"
			if test.pod.IP == "" {
				test.pod.IP = "10.0.0.1"
			}
			content := test.pod.Content()
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
	s := kubetest.New(t)
	s.Pod("vllm-0", kubetest.Pod{UID: "a", IP: "10.0.0.1"})
	s.Pod("other", kubetest.Pod{UID: "o", IP: "10.0.0.9", Labels: map[string]any{"app": "web"}})
	w := watchCluster(t, s, Settings{Selector: "app=vllm"})
	w.wants("vllm-0=10.0.0.1:8000")
	first := w.last()[0].ID
	s.Pod("vllm-1", kubetest.Pod{UID: "b", NotReady: true})
	s.Pod("vllm-1", kubetest.Pod{UID: "b", IP: "10.0.0.2", NotReady: true})
	w.wants("vllm-0=10.0.0.1:8000; vllm-1=10.0.0.2:8000 not ready")
	s.Pod("vllm-1", kubetest.Pod{UID: "b", IP: "10.0.0.2"})
	w.wants("vllm-0=10.0.0.1:8000; vllm-1=10.0.0.2:8000")
	s.Pod("vllm-0", kubetest.Pod{UID: "a", IP: "10.0.0.1", Ending: true}) // its readiness passes still
	w.wants("vllm-0=10.0.0.1:8000 draining; vllm-1=10.0.0.2:8000")
	s.Remove("pods", "vllm-0")
	w.wants("vllm-1=10.0.0.2:8000")
	s.Pod("vllm-0", kubetest.Pod{UID: "c", IP: "10.0.0.1"}) // of a StatefulSet: another incarnation
	w.wants("vllm-0=10.0.0.1:8000; vllm-1=10.0.0.2:8000")
	if again := w.last()[0].ID; again == first {
		t.Error("another pod has the id of the one before")
	}
	s.Pod("vllm-1", kubetest.Pod{UID: "b", IP: "10.0.0.2", Labels: map[string]any{"app": "vllm", labelRole: "decode"}})
	w.wants("vllm-0=10.0.0.1:8000; vllm-1=10.0.0.2:8000 decode/none")
	s.Pod("vllm-1", kubetest.Pod{UID: "b", IP: "10.0.0.2", Labels: map[string]any{"app": "quarantine"}})
	w.wants("vllm-0=10.0.0.1:8000")
	s.Pod("vllm-1", kubetest.Pod{UID: "b", IP: "10.0.0.2", Labels: map[string]any{"app": "vllm", labelRole: "dcode"}})
	w.wants("vllm-0=10.0.0.1:8000; vllm-1=10.0.0.2:8000")
	w.says(`pod vllm-1: label llm-d.ai/role: \"dcode\" is not a role: the role is both`)
	s.Pod("vllm-0", kubetest.Pod{UID: "c", IP: "10.0.0.1", Phase: "Succeeded"})
	w.wants("vllm-1=10.0.0.2:8000")
	if w.warnings() != 1 {
		t.Error(w.log.String())
	}
}

func TestSelectorsGiveRoles(t *testing.T) {
	s := kubetest.New(t)
	s.Pod("a", kubetest.Pod{UID: "a", IP: "10.0.0.1", Labels: map[string]any{"app": "vllm", "part": "p"}})
	s.Pod("b", kubetest.Pod{UID: "b", IP: "10.0.0.2", Labels: map[string]any{"app": "vllm", "part": "d"}})
	s.Pod("c", kubetest.Pod{UID: "c", IP: "10.0.0.3", Labels: map[string]any{"app": "vllm"}})
	w := watchCluster(t, s, Settings{Selector: "app=vllm", PrefillSelector: "app=vllm,part=p", DecodeSelector: "part in (d,e)", WorkerPort: 8100})
	w.wants("a=10.0.0.1:8100 prefill/none; b=10.0.0.2:8100 decode/none; c=10.0.0.3:8100")
	s.Pod("b", kubetest.Pod{UID: "b", IP: "10.0.0.2", Labels: map[string]any{"app": "vllm", "part": "p"}})
	w.wants("a=10.0.0.1:8100 prefill/none; b=10.0.0.2:8100 prefill/none; c=10.0.0.3:8100")
}

func TestAPodOfBothSelectorsIsNamedOnce(t *testing.T) {
	s := kubetest.New(t)
	s.Pod("a", kubetest.Pod{UID: "a", IP: "10.0.0.1", Labels: map[string]any{"app": "vllm", "part": "d"}})
	w := watchCluster(t, s, Settings{PrefillSelector: "app=vllm", DecodeSelector: "part=d"})
	w.wants("a=10.0.0.1:8000 decode/none")
	s.Pod("b", kubetest.Pod{UID: "b", IP: "10.0.0.2"})
	w.wants("a=10.0.0.1:8000 decode/none; b=10.0.0.2:8000 prefill/none")
	w.says("pod a: it matches both --prefill-selector and --decode-selector: its role is decode")
	if w.warnings() != 1 {
		t.Error(w.log.String())
	}
}

func TestOfTooManyWorkersThoseToldBeforeStay(t *testing.T) {
	w := &watched{t: t}
	k := newKubeSource(Settings{}, nil, "ns", w.logger())
	var told, now []kv.Worker
	for i := range maxWorkers {
		told = append(told, kv.Worker{ID: uint64(i), Name: fmt.Sprintf("m%04d", i)})
	}
	for i := range 3 { // before the others by their names
		now = append(now, kv.Worker{ID: uint64(maxWorkers + i), Name: fmt.Sprintf("a%d", i)})
	}
	want := append(slices.Clone(now[:1]), told[1:]...)
	for range 2 {
		if got := k.bounded(append(slices.Clone(now), told[1:]...), told); !slices.Equal(got, want) {
			t.Errorf("%d workers, first %v", len(got), got[:3])
		}
	}
	if got := k.bounded(slices.Clone(told), told); !slices.Equal(got, told) || w.warnings() != 1 {
		t.Errorf("%d workers: %s", len(got), w.log.Tail())
	}
}

// TestErrorsOfTheAPIServerStayTheSame: else each attempt has a line of the log.
func TestErrorsOfTheAPIServerStayTheSame(t *testing.T) {
	k := newKubeSource(Settings{}, nil, "ns", slog.Default())
	for want, failed := range map[string]func(port int) error{
		"the API server does not answer: connection reset by peer": func(port int) error {
			return &net.OpError{Op: "read", Net: "tcp", Source: &net.TCPAddr{Port: port}, Err: syscall.ECONNRESET}
		},
		"the API server does not answer: api: no such host": func(port int) error {
			return &net.OpError{Op: "dial", Net: "tcp", Err: &net.DNSError{Name: "api", Err: "no such host", Server: fmt.Sprint(port)}}
		},
	} {
		for port := range 2 {
			for _, err := range []error{&url.Error{Op: "Get", URL: "x", Err: failed(port)}, fmt.Errorf("reading: %w", failed(port))} {
				if got := k.plainAPI(err, podResource).Error(); got != want {
					t.Errorf("%v: %q, want %q", err, got, want)
				}
			}
		}
	}
}

func TestAPoolNamesPodsAndPorts(t *testing.T) {
	s := kubetest.New(t)
	s.Pod("a", kubetest.Pod{UID: "a", IP: "10.0.0.1", Labels: map[string]any{"app": "vllm"}})
	s.Pod("b", kubetest.Pod{UID: "b", IP: "10.0.0.2", Labels: map[string]any{"app": "next"}})
	s.Pool("another", map[string]any{"app": "x"}, 1)
	w := watchCluster(t, s, Settings{Pool: "pool"})
	w.says("there is no InferencePool pool in namespace ns")
	s.Pool("pool", map[string]any{}, 8000)
	w.says("InferencePool pool has no spec.selector.matchLabels")
	s.Pool("pool", map[string]any{"app": "vllm"})
	w.says("InferencePool pool has no spec.targetPorts")
	s.Pool("pool", map[string]any{"app": "vllm"}, 70000)
	w.says("InferencePool pool has an invalid target port: \\\"70000\\\"")
	if w.count() != 0 {
		t.Errorf("%d lists before anything is known", w.count())
	}
	s.Pool("pool", map[string]any{"app": "vllm"}, 8000)
	w.wants("a=10.0.0.1:8000")
	s.Pool("pool", map[string]any{"app": "vllm"}, 8000, 8001)
	w.wants("a-rank-0=10.0.0.1:8000; a-rank-1=10.0.0.1:8001")
	before := w.count()
	s.Pool("pool", map[string]any{"app": "next"}, 8000)
	w.wants("b=10.0.0.2:8000")
	for _, list := range w.all()[before:] {
		if len(list) == 0 {
			t.Error("between the two selectors no worker was known")
		}
	}
	s.Remove("inferencepools", "pool")
	testkit.Settles(t, func() error {
		if strings.Count(w.log.String(), "there is no InferencePool pool in namespace ns") != 2 {
			return fmt.Errorf("log: %s", w.log.String())
		}
		return nil
	})
	s.Pod("c", kubetest.Pod{UID: "c", IP: "10.0.0.3", Labels: map[string]any{"app": "next"}})
	w.wants("b=10.0.0.2:8000; c=10.0.0.3:8000") // its pods are there, and are followed
}

// TestGapsAreListedAnew: 410 Gone, in a watch and at its start.
func TestGapsAreListedAnew(t *testing.T) {
	for name, old := range map[string]bool{"with streamed lists": false, "older server": true} {
		t.Run(name, func(t *testing.T) {
			s := kubetest.New(t)
			if old {
				s.BeOlder()
			}
			s.Pod("a", kubetest.Pod{UID: "a", IP: "10.0.0.1"})
			s.Pod("b", kubetest.Pod{UID: "b", IP: "10.0.0.2"})
			w := watchCluster(t, s, Settings{Selector: "app=vllm"})
			w.wants("a=10.0.0.1:8000; b=10.0.0.2:8000")
			for round := range 3 {
				s.Stop()
				s.Remove("pods", fmt.Sprintf("%c", 'a'+round))
				s.Pod(fmt.Sprintf("%c", 'c'+round), kubetest.Pod{UID: "n", IP: fmt.Sprintf("10.0.1.%d", round)})
				s.Forget()
				s.Start()
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
			if n := s.Questions("list pods"); (n == 0) == old {
				t.Errorf("%d lists", n)
			}
		})
	}
}

func TestWhileTheAPIServerIsAwayAllStaysAsItWas(t *testing.T) {
	s := kubetest.New(t)
	s.Pod("a", kubetest.Pod{UID: "a", IP: "10.0.0.1"})
	s.Pool("pool", map[string]any{"app": "vllm"}, 8000)
	w := watchCluster(t, s, Settings{Pool: "pool"})
	w.wants("a=10.0.0.1:8000")
	s.Stop()
	w.says("the API server does not answer: connect: connection refused")
	w.says("the workers are kept")
	s.Pod("b", kubetest.Pod{UID: "b", IP: "10.0.0.2"})
	s.Start()
	w.wants("a=10.0.0.1:8000; b=10.0.0.2:8000")
	w.says("the API server is reachable again")
	s.Refuse("watch pods", 500)
	s.Refuse("list pods", 500)
	s.EndWatches()
	w.says("request timed out")
	s.Pod("c", kubetest.Pod{UID: "c", IP: "10.0.0.3"})
	s.Refuse("watch pods", 0)
	s.Refuse("list pods", 0)
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
		"no token":   {"watch pods", 401, []string{"rejects the credentials (401)"}},
		"no pools":   {"watch inferencepools", 404, []string{"the cluster has no resource InferencePool", "--selector"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := kubetest.New(t)
			s.Pool("pool", map[string]any{"app": "vllm"}, 8000)
			s.Pod("a", kubetest.Pod{UID: "a", IP: "10.0.0.1"})
			list := strings.Replace(test.refused, "watch", "list", 1)
			s.Refuse(test.refused, test.code)
			s.Refuse(list, test.code)
			w := watchCluster(t, s, Settings{Pool: "pool"})
			for _, text := range test.says {
				w.says(text)
			}
			asked := s.Questions(list)
			testkit.Eventually(t, 20*time.Second, "it is asked again", func() bool { return s.Questions(list) > asked+3 })
			if n := w.warnings(); n != 1 {
				t.Errorf("%d warnings: %s", n, w.log.String())
			}
			s.Refuse(test.refused, 0) // the Role is mended
			s.Refuse(list, 0)
			w.wants("a=10.0.0.1:8000")
			w.says("the API server is reachable again")
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
	client := fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), kinds, object(kubetest.Pod{UID: "a", IP: "10.0.0.1"}.Content(), "a"))
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
	if err := client.Tracker().Add(object(kubetest.Pod{UID: "b", IP: "10.0.0.2"}.Content(), "b")); err != nil {
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
	if _, err := Open(settings, nil, w.logger()); err == nil || !strings.Contains(err.Error(), "--discovery kubernetes: no cluster") || strings.Contains(err.Error(), "\n") {
		t.Errorf("without a cluster: %v", err)
	}
	const config = "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\ncontexts: [{name: x, context: {cluster: c, namespace: mine, user: u}}]\nusers: [{name: u, user: {token: t}}]\ncurrent-context: x\n"
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	source, err := Open(settings, nil, w.logger())
	if err != nil || source.(*kubeSource).namespace != "mine" {
		t.Fatalf("%+v, %v", source, err)
	}
	settings.Namespace = "given"
	if source, err = Open(settings, nil, w.logger()); err != nil || source.(*kubeSource).namespace != "given" {
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
			if again, err := kv.ParseURL(w.URL); err != nil || again != w.URL || w.Name != plainName(w.Name) {
				t.Errorf("%q of %q: %v", w.URL, w.Name, err)
			}
		}
		if p := poolOf(&u); p.err == nil && (len(p.ports) == 0 || len(p.ports) > maxPorts || len(p.labels) == 0) {
			t.Errorf("%+v", p)
		}
	})
}
