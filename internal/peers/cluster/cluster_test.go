package cluster

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/peers/replica"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/leaks"
	"kvrouter/internal/testkit/natstest"
	"kvrouter/internal/testkit/routertest"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// logged is what a member has logged.
type logged struct {
	mu   sync.Mutex // guards text
	text strings.Builder
}

// Write implements io.Writer.
func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// count returns how many lines have a text.
func (l *logged) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), text)
}

// testMember is a router in a cluster.
type testMember struct {
	*router.Router
	mesh *replica.Mesh
	link *Link
	log  *logged
	stop func()
}

// testKey is a shared key.
const testKey = "0123456789abcdef"

// start starts a member.
func start(t *testing.T, settings Settings, find func(context.Context, func([]string))) *testMember {
	t.Helper()
	m := &testMember{Router: routertest.New(t, "kv", 2), log: &logged{}}
	log := slog.New(slog.NewTextHandler(m.log, nil))
	var err error
	if m.link, err = Open(settings, Deps{Edges: guard.New(), Log: log, Find: find}); err != nil {
		t.Fatal(err)
	}
	m.mesh = replica.New(replica.Deps{Router: m.Router, Log: log, Link: m.link})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.mesh.Run(ctx)
	}()
	m.stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(m.stop)
	return m
}

// own returns settings of a cluster in the processes.
func own(key string, peers ...*testMember) Settings {
	s := Settings{Cluster: "test", ClusterHost: "127.0.0.1", ClusterKey: key}
	for _, p := range peers {
		s.ClusterPeers = append(s.ClusterPeers, p.address())
	}
	return s
}

// address is that of a member's port.
func (m *testMember) address() string { return m.link.node.ClusterAddr().String() }

// ring starts n members, each of which knows the address of the one before.
func ring(t *testing.T, n int, key string) (all []*testMember) {
	t.Helper()
	for i := range n {
		all = append(all, start(t, own(key, all[max(0, i-1):]...), nil))
	}
	hear(t, all...)
	return all
}

// hear waits until all hear all others.
func hear(t *testing.T, all ...*testMember) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, "all routers hear all others", func() bool {
		return !slices.ContainsFunc(all, func(m *testMember) bool { return m.mesh.Counts().Peers != len(all)-1 })
	})
}

// book books a request.
func (m *testMember) book(t *testing.T, seed int) router.Decision {
	t.Helper()
	d, err := m.Route(t.Context(), router.Request{Tokens: testkit.PromptTokens(seed, 5)})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// inFlight returns the requests in flight that a router knows of.
func (m *testMember) inFlight() (n int) {
	for _, load := range m.Loads() {
		n += load.ActiveRequests
	}
	return n
}

// see waits until all know of that many requests in flight.
func see(t *testing.T, want int, all ...*testMember) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%d requests in flight", want), func() bool {
		return !slices.ContainsFunc(all, func(m *testMember) bool { return m.inFlight() != want })
	})
}

// TestOneAddressIsEnough: members tell each other of the rest.
func TestOneAddressIsEnough(t *testing.T) {
	for _, key := range []string{"", testKey} {
		all := ring(t, 4, key)
		var open []router.Decision
		for i, m := range all {
			open = append(open, m.book(t, i))
		}
		see(t, len(all), all...)
		// Of one that ends nothing is left, at once.
		began := time.Now()
		all[3].stop()
		see(t, 3, all[:3]...)
		if took := time.Since(began); took > 4*time.Second {
			t.Errorf("its end was noticed after %s", took)
		}
		late := start(t, own(key, all[0]), nil)
		see(t, 3, late)
		for _, d := range open {
			d.Booking.End()
		}
		see(t, 0, append(all[:3], late)...)
		late.stop()
		for _, m := range all {
			m.stop()
		}
	}
}

// TestDiscoveryReplacesAddresses: routers that are found are connected to at run time.
func TestDiscoveryReplacesAddresses(t *testing.T) {
	first, second := start(t, own(testKey), nil), start(t, own(testKey), nil)
	lists := make(chan []string, 3)
	third := start(t, own(testKey), func(ctx context.Context, use func([]string)) {
		for {
			select {
			case <-ctx.Done():
				return
			case list := <-lists:
				use(list)
			}
		}
	})
	lists <- []string{first.address(), "no address"}
	hear(t, first, third)
	lists <- []string{first.address(), second.address(), third.address()}
	hear(t, first, second, third)
	if n := third.log.count("NATS connection lost"); n > 0 {
		t.Errorf("a change of the addresses has ended its own connection %d times", n)
	}
}

// TestWhoHasNotTheKeyHearsNothing: with another key, with none, by another name, or with no NATS.
func TestWhoHasNotTheKeyHearsNothing(t *testing.T) {
	inside := ring(t, 2, testKey)
	other := own(testKey, inside[0])
	other.Cluster = "other"
	outside := []*testMember{
		start(t, own("another shared key", inside[0]), nil), start(t, own("", inside[0]), nil), start(t, other, nil),
		start(t, own("another shared key"), nil),
	}
	invited := start(t, own(testKey, outside[3]), nil) // whoever has taken over an address learns nothing
	for _, text := range []string{"", "garbage\r\n", "CONNECT {}\r\nINFO {}\r\nPING\r\n", strings.Repeat("x", 1<<16)} {
		conn, err := net.Dial("tcp", inside[0].address())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = conn.Write([]byte(text))
		defer func() { _ = conn.Close() }()
	}
	d := inside[0].book(t, 1)
	see(t, 1, inside...)
	time.Sleep(3 * time.Second)
	for i, m := range append(outside, invited) {
		if m.inFlight() != 0 || m.mesh.Counts().Peers != 0 {
			t.Errorf("%d: %d in flight, %+v", i, m.inFlight(), m.mesh.Counts())
		}
	}
	for i, m := range []*testMember{outside[0], invited} {
		if n := m.log.count("route handshake error"); n < 1 || n > 2 {
			t.Errorf("%d: %d lines say that the other side has another key: %s", i, n, m.log.text.String())
		}
	}
	d.Booking.End()
	see(t, 0, inside...)
}

// TestAnExistingServerMayGoAndComeBack: while it is away each router goes on with what it knows of
// itself; afterwards all know all again.
func TestAnExistingServerMayGoAndComeBack(t *testing.T) {
	port := testkit.FreePorts(t, 1)
	settings := Settings{Cluster: fmt.Sprintf("nats://127.0.0.1:%d", port), ClusterPrefix: "kvrouter.one"}
	all := []*testMember{start(t, settings, nil)} // it starts before the server
	s := natstest.Start(t, port)
	for range 2 {
		all = append(all, start(t, settings, nil))
	}
	settings.ClusterPrefix = "kvrouter.two"
	apart := start(t, settings, nil)
	hear(t, all...)
	open := []router.Decision{all[0].book(t, 1), all[1].book(t, 2)}
	see(t, 2, all...)

	s.Shutdown()
	s.WaitForShutdown()
	testkit.Eventually(t, 20*time.Second, "nobody hears anybody", func() bool {
		return all[0].mesh.Counts().Peers+all[1].mesh.Counts().Peers+all[2].mesh.Counts().Peers == 0
	})
	for i, want := range []int{1, 1, 0} {
		if got := all[i].inFlight(); got != want {
			t.Errorf("%d knows of %d requests, its own are %d", i, got, want)
		}
	}
	open = append(open, all[2].book(t, 3))
	open[0].Booking.End()
	natstest.Start(t, port)
	see(t, 2, all...)
	if n := all[1].log.count("connection lost"); n != 1 {
		t.Errorf("%d lines say that the server is away: %s", n, all[1].log.text.String())
	}
	for _, d := range open {
		d.Booking.End()
	}
	see(t, 0, all...)
	if counts := apart.mesh.Counts(); counts.Peers != 0 {
		t.Errorf("the fleets are not apart: %+v", counts)
	}
}

// TestForeignMessagesAreBounded: who may publish can send anything, as anybody, and the memory and the
// members that are kept of it are bounded.
func TestForeignMessagesAreBounded(t *testing.T) {
	port := testkit.FreePorts(t, 1)
	natstest.Start(t, port)
	settings := Settings{Cluster: fmt.Sprintf("nats://127.0.0.1:%d", port), ClusterPrefix: "kvrouter"}
	all := []*testMember{start(t, settings, nil), start(t, settings, nil)}
	hear(t, all...)
	d := all[0].book(t, 1)
	see(t, 1, all...)
	liar, err := nats.Connect(settings.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	defer liar.Close()
	for i := range 1000 {
		for _, topic := range []string{"kvrouter.v1", "dynamo.slot-tracker.v1", "x", ""} {
			text := append([]byte{byte(len(topic)), 4, 0, 0, 0}, topic...)
			if err := liar.Publish(fmt.Sprintf("kvrouter.%d", i), append(text, 0x81, 0xa1, byte(i), 0xc1)); err != nil {
				t.Fatal(err)
			}
		}
	}
	_ = liar.Publish("kvrouter."+strings.Repeat("y", 500), nil)
	_ = liar.Publish("kvrouter."+all[0].link.id, []byte{1, 0})
	if err := liar.Flush(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 20*time.Second, "all is refused", func() bool { return all[1].mesh.Counts().Refused >= 4000 })
	if n := all[1].log.count("rejected"); n != 1 {
		t.Errorf("%d lines: %s", n, all[1].log.text.String())
	}
	d.Booking.End()
	see(t, 0, all...)
}

// TestWhoDoesNotReadCostsBoundedMemory: what waits for a router that is behind is bounded there, and
// the others go on.
func TestWhoDoesNotReadCostsBoundedMemory(t *testing.T) {
	first := start(t, own(testKey), nil)
	slow, err := Open(own(testKey, first), Deps{Edges: guard.New(), Log: slog.New(slog.DiscardHandler)}) // Run is not called
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	third := start(t, own(testKey, first), nil)
	hear(t, first, third)
	testkit.Eventually(t, 20*time.Second, "it is connected", func() bool { return first.link.node.NumRoutes() == 2 })
	text := make([]byte, 1<<20)
	testkit.Eventually(t, 60*time.Second, "messages are lost there", func() bool {
		for range 4 {
			first.link.Publish("x", text)
		}
		return slow.Missed.Load() > 0
	})
	if _, bytes, err := slow.inbox.Pending(); err != nil || bytes > inboxBytes {
		t.Errorf("%d bytes wait, %v", bytes, err)
	}
	d := first.book(t, 1)
	see(t, 1, first, third)
	d.Booking.End()
}

// TestATakenPortIsNamed: the server says why it does not start.
func TestATakenPortIsNamed(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	settings := own("")
	settings.ClusterPort = taken.Addr().(*net.TCPAddr).Port
	if _, err := Open(settings, Deps{Edges: guard.New(), Log: slog.New(slog.DiscardHandler)}); err == nil || !strings.Contains(err.Error(), "--cluster-port") || !strings.Contains(err.Error(), "in use") {
		t.Error(err)
	}
}

func TestSettingsThatMakeNoSense(t *testing.T) {
	for want, s := range map[string]Settings{
		"--cluster-peers requires":       {ClusterPeers: []string{"a:1"}},
		"--cluster-key requires":         {Cluster: "nats://a:4222", ClusterKey: testKey},
		"--cluster-credentials requires": {Cluster: "a", ClusterCredentials: "file"},
		"--cluster a.b":                  {Cluster: "a.b"},
		"--cluster: want":                {Cluster: "http://a:4222"},
		"--cluster-key: 5 characters":    {Cluster: "a", ClusterKey: "short"},
		"--cluster-prefix":               {Cluster: "nats://a:4222", ClusterPrefix: "a.>"},
		"--cluster-cert and":             {Cluster: "nats://a:4222", ClusterCert: "file"},
		"--cluster-peers a: want":        {Cluster: "a", ClusterPeers: []string{"a"}},
	} {
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", s, err)
		}
	}
	for _, s := range []Settings{{}, own(testKey), {Cluster: "nats://a:4222,tls://user:pass@b:4222", ClusterCA: "file", ClusterPrefix: "fleets.one"}} {
		if err := s.Validate(); err != nil {
			t.Errorf("%+v: %v", s, err)
		}
	}
}

// FuzzSplit takes any bytes as a batch: what is taken of them lies within them.
func FuzzSplit(f *testing.F) {
	var sent []byte
	b := batch{limit: func() int { return maxPayload }, send: func(text []byte) { sent = slices.Clone(text) }}
	b.add("topic", []byte("text"))
	b.add("", nil)
	b.sendNow()
	f.Add(sent)
	f.Add([]byte{255, 255, 255, 255, 255, 0})
	f.Fuzz(func(t *testing.T, text []byte) {
		taken := 0
		err := split(text, func(topic string, text []byte) error {
			taken += headSize + len(topic) + len(text)
			return nil
		})
		if taken > len(text) || err == nil && taken != len(text) {
			t.Errorf("%d of %d bytes are taken, %v", taken, len(text), err)
		}
	})
}

// TestBatchesKeepTheirLimit: none is larger, none waits for long, and what is too large is refused.
func TestBatchesKeepTheirLimit(t *testing.T) {
	sent := make(chan []byte, 100)
	b := batch{limit: func() int { return 100 }, send: func(text []byte) { sent <- slices.Clone(text) }}
	for range 10 {
		if !b.add("topic", make([]byte, 30)) {
			t.Fatal("not taken")
		}
	}
	if b.add("topic", make([]byte, 91)) || b.add(strings.Repeat("t", 256), nil) {
		t.Error("what is too large is taken")
	}
	for got := 0; got < 10; {
		select {
		case text := <-sent:
			if len(text) > 100 {
				t.Errorf("%d bytes", len(text))
			}
			if err := split(text, func(topic string, text []byte) error {
				got++
				return nil
			}); err != nil {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%d of 10 are sent", got)
		}
	}
}
