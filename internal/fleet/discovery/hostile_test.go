package discovery

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/kubetest"
)

// TestHostilePods have names, addresses, ports and marks that no API server would let in.
func TestHostilePods(t *testing.T) {
	long := strings.Repeat("8,", 1<<19) // 1 MiB
	for name, test := range map[string]struct {
		pod     string // its name
		content kubetest.Pod
		want    string
		problem string
	}{
		"a name with ..":        {"../../etc/passwd", kubetest.Pod{UID: "a", IP: "10.0.0.1"}, "../../etc/passwd=10.0.0.1:8000", ""},
		"a name of two lines":   {"a\r\nSet-Cookie: b\x00\x1b[31m", kubetest.Pod{IP: "10.0.0.1"}, "a__Set-Cookie: b__[31m=10.0.0.1:8000", ""},
		"a name of 1 MiB":       {strings.Repeat("n", 1<<20), kubetest.Pod{IP: "10.0.0.1"}, strings.Repeat("n", maxName) + "=10.0.0.1:8000", ""},
		"no name":               {"", kubetest.Pod{IP: "10.0.0.1"}, "10.0.0.1:8000", ""},
		"a URL as address":      {"a", kubetest.Pod{IP: "10.0.0.1:22/x?"}, "", ""},
		"a host as address":     {"a", kubetest.Pod{IP: "metadata.google.internal"}, "", ""},
		"an address in a zone":  {"a", kubetest.Pod{IP: "fe80::1%../x"}, "a=[fe80::1]:8000", ""},
		"ports of 1 MiB":        {"a", kubetest.Pod{IP: "10.0.0.1", Annotations: map[string]any{annotationPorts: long}}, "a=10.0.0.1:8000", annotationPorts},
		"a role of 1 MiB":       {"a", kubetest.Pod{IP: "10.0.0.1", Labels: map[string]any{labelRole: long}}, "a=10.0.0.1:8000", labelRole},
		"an engine of 1 MiB":    {"a", kubetest.Pod{IP: "10.0.0.1", Labels: map[string]any{labelEngine: long}}, "a=10.0.0.1:8000", ""},
		"a connector of 1 MiB":  {"a", kubetest.Pod{IP: "10.0.0.1", Annotations: map[string]any{annotationConnector: long}}, "a=10.0.0.1:8000", ""},
		"a bootstrap of 1 MiB":  {"a", kubetest.Pod{IP: "10.0.0.1", Annotations: map[string]any{annotationBootstrap: long}}, "a=10.0.0.1:8000", annotationBootstrap},
		"port 0":                {"a", kubetest.Pod{IP: "10.0.0.1", Annotations: map[string]any{annotationPorts: "0"}}, "a=10.0.0.1:8000", "is not a port"},
		"port -1":               {"a", kubetest.Pod{IP: "10.0.0.1", Annotations: map[string]any{annotationPorts: "-1"}}, "a=10.0.0.1:8000", "is not a port"},
		"port 70000":            {"a", kubetest.Pod{IP: "10.0.0.1", Annotations: map[string]any{annotationPorts: "8001,70000"}}, "a=10.0.0.1:8000", "is not a port"},
		"bootstrap port 70000":  {"a", kubetest.Pod{IP: "10.0.0.1", Annotations: map[string]any{annotationBootstrap: "70000"}}, "a=10.0.0.1:8000", "is not a port"},
		"one port many times":   {"a", kubetest.Pod{IP: "10.0.0.1", Annotations: map[string]any{annotationPorts: "9,9, 9,9"}}, "a=10.0.0.1:9", ""},
		"numbers as labels":     {"a", kubetest.Pod{IP: "10.0.0.1", Labels: map[string]any{labelRole: 3}}, "a=10.0.0.1:8000", ""},
		"objects as annotation": {"a", kubetest.Pod{IP: "10.0.0.1", Annotations: map[string]any{annotationPorts: []any{1}}}, "a=10.0.0.1:8000", ""},
	} {
		t.Run(name, func(t *testing.T) {
			content := test.content.Content()
			content["metadata"].(map[string]any)["name"] = test.pod
			p := podOf(&unstructured.Unstructured{Object: content})
			if n := len(p.role) + len(p.engine) + len(p.active) + len(p.ports) + len(p.connector) + len(p.bootstrap) + len(p.p2p); n > 7*maxMark+6*4 {
				t.Errorf("%d bytes of its marks are kept", n)
			}
			list, problem := p.workers(nil, []uint16{8000}, false)
			if got := shown(list); got != test.want && got != "="+test.want {
				t.Errorf("%.300q, want %.300q", got, test.want)
			}
			if len(problem) > 300 || !strings.Contains(problem, test.problem) || test.problem == "" && problem != "" {
				t.Errorf("problem %.400q, want one of %q", problem, test.problem)
			}
			for _, w := range list {
				if again, err := kv.ParseURL(w.URL); err != nil || again != w.URL {
					t.Errorf("%q: %v", w.URL, err)
				}
			}
		})
	}
}

// TestPodsOfOneAddress: a Pod's identity is its own, so each is listed; the fleet uses
// an address once.
func TestPodsOfOneAddress(t *testing.T) {
	s := kubetest.New(t)
	for _, name := range []string{"a", "b", "c"} {
		s.Pod(name, kubetest.Pod{UID: "same", IP: "169.254.0.1"})
	}
	w := watchCluster(t, s, Settings{Selector: "app=vllm"})
	w.wants("a=169.254.0.1:8000; b=169.254.0.1:8000; c=169.254.0.1:8000")
	if list := w.last(); list[0].ID == list[1].ID || list[1].ID == list[2].ID {
		t.Errorf("one id for several Pods: %v", list)
	}
}

// TestTwentyThousandPods: the workers of the first are used, and the log has one line.
func TestTwentyThousandPods(t *testing.T) {
	const pods = 20_000
	s := kubetest.New(t)
	items := make([]string, pods)
	for i := range items {
		items[i] = fmt.Sprintf(`{"kind":"Pod","apiVersion":"v1","metadata":{"name":"p%05d","namespace":"ns","uid":"u%d","labels":{"app":"vllm"}},"status":{"podIP":"10.0.%d.%d","conditions":[{"type":"Ready","status":"True"}]}}`, i, i, i/256, i%256)
	}
	list := fmt.Sprintf(`{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"100"},"items":[%s]}`, strings.Join(items, ","))
	s.BeOlder()
	s.Instead(func(w http.ResponseWriter, r *http.Request, verb string) bool {
		if verb != "list" {
			return false
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, list)
		return true
	})
	w := watchCluster(t, s, Settings{Selector: "app=vllm"})
	testkit.Eventually(t, 60*time.Second, "workers are known", func() bool { return len(w.last()) == maxWorkers })
	w.says("too many workers")
	if n := w.warnings(); n != 1 {
		t.Errorf("%d warnings: %s", n, w.log.Tail())
	}
	if first := w.last()[0]; first.Name != "p00000" {
		t.Errorf("the first is %s", first.Name)
	}
}

// watchOnePod watches an API server with Pod a, with the pauses of the program.
func watchOnePod(t *testing.T) (*kubetest.Server, *watched) {
	t.Helper()
	s := kubetest.New(t)
	s.Pod("a", kubetest.Pod{UID: "a", IP: "10.0.0.1"})
	w := &watched{t: t}
	source, err := newKubernetes(Settings{Discovery: kubernetes, Selector: "app=vllm", WorkerPort: 8000}, &rest.Config{Host: "http://" + s.Address}, "ns", w.logger())
	if err != nil {
		t.Fatal(err)
	}
	w.watch(source)
	w.wants("a=10.0.0.1:8000")
	return s, w
}

// goesOn checks that the worker of watchOnePod stayed while API server s failed, and
// that another one is found afterwards.
func (w *watched) goesOn(s *kubetest.Server) {
	w.t.Helper()
	if got := shown(w.last()); got != "a=10.0.0.1:8000" {
		w.t.Errorf("the workers are %q", got)
	}
	s.Instead(nil)
	s.Pod("b", kubetest.Pod{UID: "b", IP: "10.0.0.2"})
	w.wants("a=10.0.0.1:8000; b=10.0.0.2:8000")
}

// TestAnAPIServerThatAlwaysSaysGone is asked less and less, and the workers stay.
func TestAnAPIServerThatAlwaysSaysGone(t *testing.T) {
	const gone = `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","message":"too old resource version","code":410}`
	for name, instead := range map[string]func(w http.ResponseWriter, r *http.Request, verb string) bool{
		"in every watch": func(w http.ResponseWriter, r *http.Request, verb string) bool {
			if verb == "watch" {
				w.Header().Set("Content-Type", "application/json")
				_, _ = io.WriteString(w, `{"type":"ERROR","object":`+gone+"}\n")
			}
			return verb == "watch"
		},
		"to every request": func(w http.ResponseWriter, _ *http.Request, _ string) bool {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusGone)
			_, _ = io.WriteString(w, gone)
			return true
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, w := watchOnePod(t)
			s.Instead(instead)
			before := s.Questions("list pods") + s.Questions("watch pods")
			s.EndWatches()
			<-time.After(4 * time.Second)
			if n := s.Questions("list pods") + s.Questions("watch pods") - before; n == 0 || n > 24 {
				t.Errorf("%d requests in 4 s", n)
			}
			w.goesOn(s)
		})
	}
}

// TestAWatchWhoseLineNeverEnds is given up, and the workers stay.
func TestAWatchWhoseLineNeverEnds(t *testing.T) {
	s, w := watchOnePod(t)
	sent := make(chan int, 100)
	s.Instead(func(w http.ResponseWriter, r *http.Request, verb string) bool {
		if verb != "watch" {
			return false
		}
		w.Header().Set("Content-Type", "application/json")
		n, part := 0, bytes.Repeat([]byte("x"), 1<<20)
		for _, err := io.WriteString(w, `{"type":"ADDED","object":{"kind":"`); err == nil && n < 1<<30; _, err = w.Write(part) {
			n += len(part)
		}
		sent <- n
		return true
	})
	s.EndWatches()
	select {
	case n := <-sent:
		if n > 64<<20 {
			t.Errorf("%d MiB were read", n>>20)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("no watch")
	}
	w.says("an object has more than 8 MiB, which is the maximum")
	w.goesOn(s)
}

// TestAWatchOfAnotherContentTypeIsClosed, and the workers stay.
func TestAWatchOfAnotherContentTypeIsClosed(t *testing.T) {
	s, w := watchOnePod(t)
	closed := make(chan struct{}, 1)
	s.Instead(func(w http.ResponseWriter, r *http.Request, verb string) bool {
		if verb != "watch" {
			return false
		}
		w.Header().Set("Content-Type", "text/plain")
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		select {
		case closed <- struct{}{}:
		default:
		}
		return true
	})
	s.EndWatches()
	select {
	case <-closed:
	case <-time.After(30 * time.Second):
		t.Error("its connection stays open")
	}
	w.says("the content type of a watch is")
	w.goesOn(s)
}

// TestAnAnswerOfTheAPIServerIsBounded at each place in it where a line may end.
func TestAnAnswerOfTheAPIServerIsBounded(t *testing.T) {
	for _, test := range []struct {
		text  string
		watch bool
		fails bool
	}{
		{"12345678", false, false}, {"123456789", false, true}, {"1234\n6789", false, true},
		{"12345678", true, false}, {"123456789", true, true}, {"1234\n6789\n12345678\n", true, false}, {"1\n234567890", true, true},
	} {
		for _, size := range []int{1, 3, 100} {
			told := 0
			body := &apiBody{ReadCloser: io.NopCloser(strings.NewReader(test.text)), watch: test.watch, most: 8, left: 8, over: func(error) { told++ }}
			text, err := io.ReadAll(struct{ io.Reader }{readerOf(size, body)})
			if (err != nil) != test.fails || !test.fails && string(text) != test.text || told != map[bool]int{true: 1}[test.fails] {
				t.Errorf("%q in parts of %d: %q, %v, %d notes", test.text, size, text, err, told)
			}
		}
	}
}

// readerOf reads parts of that size.
func readerOf(size int, from io.Reader) io.Reader {
	return readerFunc(func(to []byte) (int, error) { return from.Read(to[:min(size, len(to))]) })
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(to []byte) (int, error) { return f(to) }

// TestHostileEndpointSlices: only addresses and ports of routers are taken, each once.
func TestHostileEndpointSlices(t *testing.T) {
	s := kubetest.New(t)
	s.Slice("hostile", "routers", "replica", 7100, "x=../../etc", "y=metadata.google.internal", "=", "z=10.0.0.1:22", "u=10.0.0.2", "u=10.0.0.2", "v=10.0.0.2", "w=fe80::1%../x", "m=::ffff:10.0.0.3")
	for i, port := range []any{0, -1, 70000, 1 << 40, 71.5, "7100", nil, map[string]any{}} {
		s.Slice(fmt.Sprint("port-", i), "routers", "replica", port, fmt.Sprintf("10.0.1.%d", i))
	}
	told := peersOfService(t, s, "service://ns/routers:replica")
	told.wants("10.0.0.2:7100 10.0.0.3:7100 [fe80::1]:7100")
	var many []string
	for i := range 10_000 {
		many = append(many, fmt.Sprintf("10.2.%d.%d", i/256, i%256))
	}
	s.Slice("many", "routers", "replica", 7100, many...)
	told.says("too many routers")
	testkit.Settles(t, func() error {
		told.mu.Lock()
		defer told.mu.Unlock()
		last := strings.Fields(told.lists[len(told.lists)-1])
		if len(told.lists) != 2 || len(last) != maxPeers || last[0] != "10.0.0.2:7100" {
			return fmt.Errorf("%d lists, the last of %d", len(told.lists), len(last))
		}
		return nil
	})
}
