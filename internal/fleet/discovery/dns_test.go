package discovery

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// nameServer answers questions over UDP as a test says.
type nameServer struct {
	conn net.PacketConn
	done chan struct{}

	mu        sync.Mutex // guards the rest
	addresses map[string][]string
	services  map[string][]dnsmessage.SRVResource
	code      dnsmessage.RCode // of every answer, unless it is 0
	failing   map[string]bool  // names that no answer can be had about
	failingA  bool             // nor about any IPv4 address
	asked     int
	asking    []net.Conn // of resolvers
	closed    bool
	streams   sync.WaitGroup // of dialStream
}

func newNameServer(t *testing.T) *nameServer {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &nameServer{conn: conn, done: make(chan struct{}), addresses: map[string][]string{}, services: map[string][]dnsmessage.SRVResource{}, failing: map[string]bool{}}
	go s.serve()
	t.Cleanup(s.close)
	return s
}

// close ends the server, and what resolvers still ask: they continue after their caller.
func (s *nameServer) close() {
	s.set(func() {
		s.closed = true
		for _, conn := range s.asking {
			_ = conn.Close()
		}
	})
	_ = s.conn.Close()
	<-s.done
	s.streams.Wait()
}

// dialStream connects a resolver as TCP does, which has room for 64 KB an answer.
func (s *nameServer) dialStream(context.Context, string, string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	closed := false
	s.set(func() {
		if closed = s.closed; !closed {
			s.asking = append(s.asking, theirs)
			s.streams.Go(func() { s.serveStream(ours) })
		}
	})
	if closed {
		return nil, net.ErrClosed
	}
	return theirs, nil
}

// serveStream answers until the resolver closes the connection.
func (s *nameServer) serveStream(conn net.Conn) {
	defer conn.Close()
	for {
		var size [2]byte
		if _, err := io.ReadFull(conn, size[:]); err != nil {
			return
		}
		text := make([]byte, binary.BigEndian.Uint16(size[:]))
		var question dnsmessage.Message
		if _, err := io.ReadFull(conn, text); err != nil || question.Unpack(text) != nil {
			return
		}
		answer := s.answer(question)
		packed, err := answer.Pack()
		if err != nil || len(packed) > math.MaxUint16 {
			return
		}
		if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(packed))), packed...)); err != nil {
			return
		}
	}
}

// dial connects a resolver.
func (s *nameServer) dial(ctx context.Context, _, _ string) (conn net.Conn, err error) {
	var d net.Dialer
	s.set(func() {
		if err = net.ErrClosed; s.closed {
			return
		}
		if conn, err = d.DialContext(ctx, "udp", s.conn.LocalAddr().String()); err == nil {
			s.asking = append(s.asking, conn)
		}
	})
	return conn, err
}

func (s *nameServer) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// serve answers until the socket is closed.
func (s *nameServer) serve() {
	defer close(s.done)
	buffer := make([]byte, 4096)
	for {
		n, from, err := s.conn.ReadFrom(buffer)
		if err != nil {
			return
		}
		var question dnsmessage.Message
		if question.Unpack(buffer[:n]) != nil {
			continue
		}
		answer := s.answer(question)
		if packed, err := answer.Pack(); err == nil {
			_, _ = s.conn.WriteTo(packed, from)
		}
	}
}

func (s *nameServer) answer(question dnsmessage.Message) dnsmessage.Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked++
	asked := question.Questions[0]
	answer := dnsmessage.Message{Header: dnsmessage.Header{ID: question.ID, Response: true, RecursionAvailable: true, RCode: s.code}, Questions: question.Questions}
	name := strings.TrimSuffix(asked.Name.String(), ".")
	if s.failing[name] || s.failingA && asked.Type == dnsmessage.TypeA {
		answer.RCode = dnsmessage.RCodeServerFailure
	}
	if answer.RCode != 0 {
		return answer
	}
	header := dnsmessage.ResourceHeader{Name: asked.Name, Class: dnsmessage.ClassINET, TTL: 5}
	for _, text := range s.addresses[name] {
		address := netip.MustParseAddr(text)
		switch {
		case address.Is4() && asked.Type == dnsmessage.TypeA:
			answer.Answers = append(answer.Answers, dnsmessage.Resource{Header: header, Body: &dnsmessage.AResource{A: address.As4()}})
		case address.Is6() && asked.Type == dnsmessage.TypeAAAA:
			answer.Answers = append(answer.Answers, dnsmessage.Resource{Header: header, Body: &dnsmessage.AAAAResource{AAAA: address.As16()}})
		}
	}
	if asked.Type == dnsmessage.TypeSRV {
		for _, service := range s.services[name] {
			answer.Answers = append(answer.Answers, dnsmessage.Resource{Header: header, Body: &service})
		}
	}
	_, isAddress := s.addresses[name]
	if _, isService := s.services[name]; !isAddress && !isService {
		answer.RCode = dnsmessage.RCodeNameError
	}
	return answer
}

// watchDNS watches what the server reports.
func watchDNS(t *testing.T, s *nameServer, value string, keep time.Duration) *watched {
	t.Helper()
	w := &watched{t: t}
	source, err := openDNS(value, w.logger())
	if err != nil {
		t.Fatal(err)
	}
	source.every, source.keep = 5*time.Millisecond, keep
	source.resolver = &net.Resolver{PreferGo: true, Dial: s.dial}
	w.watch(source)
	return w
}

func TestAddressesOfAName(t *testing.T) {
	s := newNameServer(t)
	s.set(func() { s.addresses["vllm.ns.test"] = []string{"10.0.0.2", "10.0.0.1", "fd00::1"} })
	w := watchDNS(t, s, "dns://vllm.ns.test:8100", time.Hour)
	w.wants("10.0.0.1:8100=10.0.0.1:8100; 10.0.0.2:8100=10.0.0.2:8100; [fd00::1]:8100=[fd00::1]:8100")
	before := w.last()[0].ID
	s.between(t, func() { s.addresses["vllm.ns.test"] = []string{"10.0.0.3", "10.0.0.1", "10.0.0.1"} })
	w.wants("10.0.0.1:8100=10.0.0.1:8100; 10.0.0.3:8100=10.0.0.3:8100")
	s.answers(t, 8)
	if w.last()[0].ID != before || w.count() != 3 || w.log.String() != "" {
		t.Errorf("%d lists, %+v: %s", w.count(), w.last(), w.log.String())
	}
}

func TestSRVRecordsNameHostsAndPorts(t *testing.T) {
	s := newNameServer(t)
	const name = "_http._tcp.vllm.ns.test"
	s.set(func() {
		s.services[name] = []dnsmessage.SRVResource{
			{Port: 8000, Target: dnsmessage.MustNewName("vllm-0.vllm.ns.test.")},
			{Port: 8001, Target: dnsmessage.MustNewName("vllm-0.vllm.ns.test.")},
			{Port: 8000, Target: dnsmessage.MustNewName("several.ns.test.")},
		}
		s.addresses["vllm-0.vllm.ns.test"] = []string{"10.0.0.9"}
		s.addresses["several.ns.test"] = []string{"10.0.0.4", "10.0.0.5"}
	})
	w := watchDNS(t, s, "dns+srv://"+name, time.Hour)
	both := "10.0.0.4:8000=10.0.0.4:8000; 10.0.0.5:8000=10.0.0.5:8000; vllm-0.vllm.ns.test:8000=10.0.0.9:8000; vllm-0.vllm.ns.test:8001=10.0.0.9:8001"
	w.wants(both)
	s.set(func() { s.failing["several.ns.test"] = true })
	w.says("several.ns.test.: server misbehaving; the other addresses of the answer are used")
	s.answers(t, 8)
	w.wants(both)
	s.set(func() { s.failing["several.ns.test"] = false })
	w.says("recovered")
	s.set(func() { s.services[name] = s.services[name][1:] }) // no other waits for one that goes
	w.wants("10.0.0.4:8000=10.0.0.4:8000; 10.0.0.5:8000=10.0.0.5:8000; vllm-0.vllm.ns.test:8001=10.0.0.9:8001")
	s.set(func() { delete(s.addresses, "several.ns.test") }) // a record whose host nobody knows
	w.says("several.ns.test.: no such host; the other addresses of the answer are used")
	w.wants("vllm-0.vllm.ns.test:8001=10.0.0.9:8001")
}

// TestARecordWithABadNameSpoilsNoOther: the resolver gives records and an error.
func TestARecordWithABadNameSpoilsNoOther(t *testing.T) {
	s := newNameServer(t)
	const name = "_http._tcp.vllm.ns.test"
	s.set(func() {
		s.services[name] = []dnsmessage.SRVResource{{Port: 8000, Target: dnsmessage.MustNewName("a.ns.test.")}, {Port: 8000, Target: dnsmessage.MustNewName("b b!.ns.test.")}}
		s.addresses["a.ns.test"] = []string{"10.0.0.9"}
	})
	w := watchDNS(t, s, "dns+srv://"+name, time.Hour)
	w.wants("a.ns.test:8000=10.0.0.9:8000")
	w.says("contained records which contain invalid names; the other addresses of the answer are used")
}

func TestHostsThatNobodyKnowsAreNamedInOrder(t *testing.T) {
	s := newNameServer(t)
	const name = "_http._tcp.vllm.ns.test"
	s.set(func() {
		for _, host := range []string{"d", "b", "a", "c", "b"} {
			s.services[name] = append(s.services[name], dnsmessage.SRVResource{Port: 8000, Target: dnsmessage.MustNewName(host + ".ns.test.")})
		}
	})
	w := watchDNS(t, s, "dns+srv://"+name, time.Hour)
	w.says("a.ns.test.: no such host, b.ns.test.: no such host, c.ns.test.: no such host and 1 more; no worker is known")
	s.answers(t, 30)
	if n := strings.Count(w.log.String(), "WARN"); n != 1 {
		t.Errorf("%d warnings: %s", n, w.log.String())
	}
}

// between changes what the server answers between two look-ups of a name, each of which
// asks for its A and its AAAA records.
func (s *nameServer) between(t *testing.T, change func()) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, "no look-up is under way", func() (done bool) {
		s.set(func() {
			if done = s.asked%2 == 0; done {
				change()
			}
		})
		return done
	})
}

// answers waits until that many questions more are answered.
func (s *nameServer) answers(t *testing.T, more int) {
	t.Helper()
	var asked int
	s.set(func() { asked = s.asked })
	testkit.Eventually(t, 20*time.Second, "it is asked again", func() (again bool) {
		s.set(func() { again = s.asked > asked+more })
		return again
	})
}

// TestAnAnswerInPartDropsNoWorker: until three in a row leave it out.
func TestAnAnswerInPartDropsNoWorker(t *testing.T) {
	d := &dnsSource{}
	a, b, c := kv.Worker{ID: 1, Name: "a"}, kv.Worker{ID: 2, Name: "b"}, kv.Worker{ID: 3, Name: "c"}
	known := []kv.Worker{a, b}
	for i, step := range []struct{ answer, want []kv.Worker }{
		{[]kv.Worker{a}, []kv.Worker{a, b}},
		{[]kv.Worker{c, a}, []kv.Worker{a, b, c}},
		{[]kv.Worker{b, a}, []kv.Worker{a, b, c}}, // b is back: it counts anew
		{[]kv.Worker{a}, []kv.Worker{a, b, c}},
		{[]kv.Worker{a}, []kv.Worker{a, b}},
		{[]kv.Worker{a}, []kv.Worker{a}},
	} {
		if known = d.settled(step.answer, known); !slices.Equal(known, step.want) {
			t.Errorf("step %d: %v, want %v", i, shown(known), shown(step.want))
		}
	}
}

// TestAnswersThatNameNobodyAreNotBelievedAtOnce: neither is silence.
func TestAnswersThatNameNobodyAreNotBelievedAtOnce(t *testing.T) {
	for why, change := range map[string]func(*nameServer){
		"no such host":              func(s *nameServer) { clear(s.addresses) },
		"server misbehaving":        func(s *nameServer) { s.code = dnsmessage.RCodeServerFailure },
		"misbehaving; the workers":  func(s *nameServer) { s.failingA = true }, // while AAAA has an answer, which is empty
		"no such host; the workers": func(s *nameServer) { s.addresses["vllm.ns.test"] = nil },
	} {
		t.Run(why, func(t *testing.T) {
			s := newNameServer(t)
			s.set(func() { s.addresses["vllm.ns.test"] = []string{"10.0.0.1"} })
			w := watchDNS(t, s, "dns://vllm.ns.test:8100", time.Hour)
			w.wants("10.0.0.1:8100=10.0.0.1:8100")
			s.set(func() { change(s) })
			w.says(why)
			w.says("the workers are kept")
			if strings.Contains(w.log.String(), "for 1h0m0s at most") == strings.Contains(why, "misbehaving") {
				t.Error(w.log.String())
			}
			s.answers(t, 8)
			if w.count() != 1 || strings.Count(w.log.String(), "WARN") != 1 {
				t.Errorf("%d lists: %s", w.count(), w.log.String())
			}
			s.set(func() { s.failingA = false })
			s.set(func() { s.code, s.addresses["vllm.ns.test"] = 0, []string{"10.0.0.1"} })
			w.says("recovered")
		})
	}
}

func TestWorkersThatNoAnswerConfirmsGoInTheEnd(t *testing.T) {
	s := newNameServer(t)
	w := watchDNS(t, s, "dns://vllm.ns.test:8100", 100*time.Millisecond)
	w.says("no such host; no worker is known")
	s.set(func() { s.addresses["vllm.ns.test"] = []string{"10.0.0.1"} })
	w.wants("10.0.0.1:8100=10.0.0.1:8100")
	s.set(func() { s.failing["vllm.ns.test"] = true })
	w.says("server misbehaving; the workers are kept")
	failing := time.Now()
	testkit.Eventually(t, 20*time.Second, "silence lasts longer than workers are kept", func() bool { return time.Since(failing) > 200*time.Millisecond })
	s.answers(t, 4)
	w.wants("10.0.0.1:8100=10.0.0.1:8100")
	s.set(func() { clear(s.addresses); clear(s.failing) })
	w.wants("")
	w.says("for 100ms; its workers are removed")
}

// addressesFrom are n addresses, IPv4 and IPv6 in turn.
func addressesFrom(n int) (list []string) {
	for i := range n {
		if i%2 == 0 {
			list = append(list, fmt.Sprintf("10.1.%d.%d", i/512, i/2%256))
		} else {
			list = append(list, fmt.Sprintf("fd00::%x", i))
		}
	}
	return list
}

// TestAnAnswerOfTooManyAddressesIsRefused: those of a name, for
// which one answer of each kind has room, and those of 1,000 hosts, of which most are not asked for.
func TestAnAnswerOfTooManyAddressesIsRefused(t *testing.T) {
	t.Run("a name", func(t *testing.T) {
		s := newNameServer(t)
		s.set(func() { s.addresses["vllm.ns.test"] = []string{"10.0.0.1", "10.0.0.2"} })
		w := &watched{t: t}
		source, err := openDNS("dns://vllm.ns.test:8100", w.logger())
		if err != nil {
			t.Fatal(err)
		}
		source.every, source.keep = 5*time.Millisecond, time.Nanosecond
		source.resolver = &net.Resolver{PreferGo: true, Dial: s.dialStream}
		w.watch(source)
		w.wants("10.0.0.1:8100=10.0.0.1:8100; 10.0.0.2:8100=10.0.0.2:8100")
		s.between(t, func() { s.addresses["vllm.ns.test"] = addressesFrom(4400) })
		w.says("--discovery dns://vllm.ns.test:8100: the answer contains 4400 workers, the maximum is 4096")
		asked := func() (n int) {
			s.set(func() { n = s.asked })
			return n
		}
		later := asked() + 20
		testkit.Eventually(t, 20*time.Second, "it is asked on", func() bool { return asked() > later })
		if got := shown(w.last()); got != "10.0.0.1:8100=10.0.0.1:8100; 10.0.0.2:8100=10.0.0.2:8100" || w.count() != 1 {
			t.Errorf("%d lists, the last %.200s", w.count(), got)
		}
		if n := strings.Count(w.log.String(), "level=WARN"); n != 1 {
			t.Errorf("%d warnings", n)
		}
		s.between(t, func() { s.addresses["vllm.ns.test"] = []string{"10.0.0.1", "10.0.0.3"} })
		w.wants("10.0.0.1:8100=10.0.0.1:8100; 10.0.0.3:8100=10.0.0.3:8100")
	})
	t.Run("hosts of SRV records", func(t *testing.T) {
		s := newNameServer(t)
		many := addressesFrom(2000)
		s.set(func() {
			for i := range 1000 {
				host := fmt.Sprintf("h%d.test", i)
				s.addresses[host] = many
				s.services["_http._tcp.test"] = append(s.services["_http._tcp.test"], dnsmessage.SRVResource{Target: dnsmessage.MustNewName(host + "."), Port: 8000})
			}
		})
		var log testkit.LogBuffer
		source, err := openDNS("dns+srv://_http._tcp.test", testLog(&log))
		if err != nil {
			t.Fatal(err)
		}
		source.resolver = &net.Resolver{PreferGo: true, Dial: s.dialStream}
		list, err := source.ask(t.Context())
		if err == nil || err.Error() != "the hosts of the 1000 SRV records have more than 4096 addresses, which is the maximum" || len(list) != 0 || len(source.hosts) != 0 {
			t.Errorf("%d workers, %d hosts are kept, %v", len(list), len(source.hosts), err)
		}
		s.set(func() {
			if most := 1 + 2*(dnsMost+3); s.asked > most { // an A and an AAAA question for each host
				t.Errorf("%d questions, want %d at most", s.asked, most)
			}
		})
	})
}
