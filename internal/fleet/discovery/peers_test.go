package discovery

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/kubetest"
)

// peersTold is what Run reports while a test runs.
type peersTold struct {
	t     *testing.T
	log   testkit.LogBuffer // has a lock of its own
	mu    sync.Mutex        // guards lists
	lists []string
}

// run has p tell until the test ends.
func (told *peersTold) run(p *Peers) {
	told.t.Helper()
	ctx, cancel := context.WithCancel(told.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.Run(ctx, func(addresses []string) {
			told.mu.Lock()
			defer told.mu.Unlock()
			told.lists = append(told.lists, strings.Join(addresses, " "))
			clear(addresses) // it is use's own
		})
	}()
	told.t.Cleanup(func() { cancel(); <-done })
}

// wants waits until all that was reported is that.
func (told *peersTold) wants(want ...string) {
	told.t.Helper()
	testkit.Settles(told.t, func() error {
		told.mu.Lock()
		defer told.mu.Unlock()
		if !slices.Equal(told.lists, want) {
			return fmt.Errorf("told %q, want %q\n%s", told.lists, want, told.log.Tail())
		}
		return nil
	})
}

// says waits until the log has that text.
func (told *peersTold) says(text string) {
	told.t.Helper()
	testkit.Settles(told.t, func() error {
		if !strings.Contains(told.log.String(), text) {
			return fmt.Errorf("the log has no %q:\n%s", text, told.log.Tail())
		}
		return nil
	})
}

// peersOfService asks the server for the peers that spec names.
func peersOfService(t *testing.T, s *kubetest.Server, spec string) *peersTold {
	t.Helper()
	told := &peersTold{t: t}
	p, err := ParsePeers(spec)
	if err != nil {
		t.Fatal(err)
	}
	client, idle, err := connect(&rest.Config{Host: "http://" + s.Address}, testLog(&told.log))
	if err != nil {
		t.Fatal(err)
	}
	p.kube = newCluster(client, "ns", "--cluster-discovery "+spec, "the routers are kept", testLog(&told.log))
	p.kube.idle = idle
	p.kube.backoff.Duration, p.kube.backoff.Cap, p.kube.pace = 5*time.Millisecond, 20*time.Millisecond, rate.Inf
	told.run(p)
	return told
}

func TestPeersThatMakeNoSense(t *testing.T) {
	for _, spec := range []string{
		"", "routers:7100", "dns://routers", "dns://routers:0", "dns+srv://routers", "dns://routers:replica", "service://routers", "service://:7100", "service:///routers:7100",
		"service://ns/:7100", "service://a/b/c:7100", "service://routers:70000", "service://routers:0", "service://routers:Replica", "service://routers:", "http://routers:7100",
	} {
		if p, err := ParsePeers(spec); err == nil || !strings.Contains(err.Error(), "--cluster-discovery "+spec+": give dns://") {
			t.Errorf("%q: %+v, %v", spec, p, err)
		}
	}
	for spec, want := range map[string]Peers{
		"dns://routers.ns:7100":        {dns: dnsQuestion{"routers.ns", 7100}},
		"service://routers:7100":       {service: "routers", port: "7100"},
		"service://ns/routers:replica": {namespace: "ns", service: "routers", port: "replica"},
	} {
		want.spec = spec
		if p, err := ParsePeers(spec); err != nil || *p != want {
			t.Errorf("%q: %+v, %v", spec, p, err)
		}
	}
}

func TestPeersOfAName(t *testing.T) {
	s := newNameServer(t)
	s.set(func() { s.addresses["routers.ns.test"] = []string{"10.0.0.2", "10.0.0.1", "fd00::1"} })
	told := &peersTold{t: t}
	p, err := ParsePeers("dns://routers.ns.test:7100")
	if err == nil {
		err = p.open(testLog(&told.log))
	}
	if err != nil {
		t.Fatal(err)
	}
	p.names.every, p.names.resolver = 5*time.Millisecond, &net.Resolver{PreferGo: true, Dial: s.dial}
	told.run(p)
	all := "10.0.0.1:7100 10.0.0.2:7100 [fd00::1]:7100"
	told.wants(all)
	s.set(func() { s.failing["routers.ns.test"] = true })
	told.says("the routers are kept")
	s.answers(t, 8)
	told.wants(all)
	s.set(func() {
		s.failing["routers.ns.test"], s.addresses["routers.ns.test"] = false, []string{"10.0.0.1", "10.0.0.3"}
	})
	told.says("recovered")
	told.wants(all, "10.0.0.1:7100 10.0.0.2:7100 10.0.0.3:7100 [fd00::1]:7100", "10.0.0.1:7100 10.0.0.3:7100")
}

func TestPeersOfAService(t *testing.T) {
	for name, spec := range map[string]string{"port by number": "service://routers:7100", "port by name": "service://ns/routers:replica"} {
		t.Run(name, func(t *testing.T) {
			s := kubetest.New(t)
			s.Slice("other", "web", "replica", 7100, "10.0.0.9")
			told := peersOfService(t, s, spec)
			told.wants("") // it is known that there is none
			s.Slice("routers-a", "routers", "replica", 7100, "a=10.0.0.2", "b=10.0.0.1")
			told.wants("", "10.0.0.1:7100 10.0.0.2:7100")
			s.Slice("routers-b", "routers", "replica", 7100, "c=10.0.0.10", "a=10.0.0.2") // as it moves from one to the other
			told.wants("", "10.0.0.1:7100 10.0.0.2:7100", "10.0.0.10:7100 10.0.0.1:7100 10.0.0.2:7100")
			s.Slice("routers-6", "routers", "replica", 7100, "a=fd00::1", "b=fd00::2", "c=fd00::3") // the same Pods
			s.Remove("endpointslices", "routers-a")
			want := []string{"", "10.0.0.1:7100 10.0.0.2:7100", "10.0.0.10:7100 10.0.0.1:7100 10.0.0.2:7100", "10.0.0.10:7100 10.0.0.2:7100 [fd00::2]:7100"}
			told.wants(want...)
			s.Remove("endpointslices", "routers-b")
			s.Remove("endpointslices", "routers-6")
			testkit.Settles(t, func() error {
				told.mu.Lock()
				defer told.mu.Unlock()
				if last := told.lists[len(told.lists)-1]; last != "" {
					return fmt.Errorf("there is none, and it told %q", last)
				}
				return nil
			})
			if text := told.log.String(); text != "" {
				t.Error(text)
			}
		})
	}
}

func TestPeersStayWhileTheAPIServerIsAway(t *testing.T) {
	s := kubetest.New(t)
	s.Slice("routers-a", "routers", "replica", 7100, "10.0.0.1")
	told := peersOfService(t, s, "service://routers:7100")
	told.wants("10.0.0.1:7100")
	s.Stop()
	told.says("the API server does not answer: connect: connection refused; the routers are kept")
	s.Slice("routers-a", "routers", "replica", 7100, "10.0.0.1", "10.0.0.2")
	s.Forget() // 410 Gone
	told.wants("10.0.0.1:7100")
	s.Start()
	told.wants("10.0.0.1:7100", "10.0.0.1:7100 10.0.0.2:7100")
	told.says("the API server is reachable again")
	s.Refuse("watch endpointslices", 403)
	s.Refuse("list endpointslices", 403)
	s.EndWatches()
	told.says(`{apiGroups: [\"discovery.k8s.io\"], resources: [endpointslices], verbs: [list, watch]}`)
	s.Slice("routers-a", "routers", "replica", 7100, "10.0.0.3")
	s.Refuse("watch endpointslices", 0)
	s.Refuse("list endpointslices", 0)
	told.wants("10.0.0.1:7100", "10.0.0.1:7100 10.0.0.2:7100", "10.0.0.3:7100")
}

func TestAServiceWithoutThePortIsTold(t *testing.T) {
	s := kubetest.New(t)
	s.Slice("routers-a", "routers", "http", 8000, "10.0.0.1")
	told := peersOfService(t, s, "service://routers:replica")
	told.says("the Service has no port replica")
	s.Slice("routers-a", "routers", "replica", 7200, "10.0.0.1")
	told.wants("", "10.0.0.1:7200")
	told.says("recovered")
}

func TestOfTooManyPeersThoseToldBeforeStay(t *testing.T) {
	var told, now []string
	for i := range maxPeers {
		told = append(told, fmt.Sprintf("10.0.1.%03d:7100", i))
	}
	now = append(now, "10.0.0.1:7100", "10.0.0.2:7100", "10.0.0.2:7100") // before the others in their order
	now = append(now, told[1:]...)
	want := append([]string{"10.0.0.1:7100"}, told[1:]...)
	var text testkit.LogBuffer
	crowded := false
	for range 2 {
		if got := boundPeers(slices.Clone(now), told, &crowded, "--cluster-discovery x", testLog(&text)); !slices.Equal(got, want) {
			t.Errorf("%d peers, first %v", len(got), got[:3])
		}
	}
	if n := strings.Count(text.String(), "too many routers"); n != 1 || !crowded {
		t.Errorf("told %d times: %s", n, text.String())
	}
	if got := boundPeers(slices.Clone(told), told, &crowded, "", testLog(&text)); !slices.Equal(got, told) || crowded {
		t.Errorf("%d peers, crowded %t", len(got), crowded)
	}
}

func FuzzEndpointSlice(f *testing.F) {
	for _, seed := range []string{
		`{"ports":[{"name":"replica","port":7100}],"endpoints":[{"addresses":["10.0.0.1"],"targetRef":{"uid":"a"}}]}`,
		`{"ports":[null,{"name":3,"port":"x"},{"name":"replica","port":70000}],"endpoints":[null,{"addresses":[]},{"addresses":[3]},{"addresses":["fe80::1%x"]}]}`,
		`{"ports":{},"endpoints":7}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var u unstructured.Unstructured
		if u.UnmarshalJSON(append([]byte(`{"kind":"EndpointSlice","apiVersion":"v1",`), strings.TrimPrefix(string(data), "{")...)) != nil || u.Object == nil {
			return
		}
		for _, port := range []string{"replica", "7100"} {
			s := sliceOf(&u, port)
			addresses, portless := peersOf(map[string]endpointSlice{"a": s, "b": s})
			if len(s.endpoints) > maxWorkers || len(addresses) > len(s.endpoints) || portless && len(addresses) > 0 {
				t.Errorf("%+v: %q", s, addresses)
			}
			for _, address := range addresses {
				if host, _, err := net.SplitHostPort(address); err != nil || net.ParseIP(host) == nil {
					t.Errorf("%q: %v", address, err)
				}
			}
		}
	})
}
