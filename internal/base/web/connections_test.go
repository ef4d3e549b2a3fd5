package web_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kvrouter/internal/base/web"
	"kvrouter/internal/testkit"
)

// boundPort is a server that takes so many clients at once.
type boundPort struct {
	t       *testing.T
	address string
	release chan struct{} // one ends a request for /slow
	slow    atomic.Int64  // of them that run
	idle    atomic.Int64  // times that a client's request was done with
}

func newBoundPort(t *testing.T, most int) *boundPort {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &boundPort{t: t, address: listener.Addr().String(), release: make(chan struct{})}
	server := &http.Server{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			p.slow.Add(1)
			defer p.slow.Add(-1)
			<-p.release
		}
	})}
	done := make(chan error, 1)
	bound := web.Bound(server, listener, most)
	changed := server.ConnState
	server.ConnState = func(conn net.Conn, state http.ConnState) {
		if changed(conn, state); state == http.StateIdle {
			p.idle.Add(1)
		}
	}
	go func() { done <- server.Serve(bound) }()
	t.Cleanup(func() {
		server.Close()
		if err := <-done; err != http.ErrServerClosed {
			t.Error(err)
		}
	})
	return p
}

// dial connects a client; it may have to wait in the system's queue.
func (p *boundPort) dial() net.Conn {
	p.t.Helper()
	conn, err := net.Dial("tcp", p.address)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { conn.Close() })
	return conn
}

// ask sends a request and returns what came of it.
func (p *boundPort) ask(conn net.Conn, path string) error {
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: h\r\n\r\n", path); err != nil {
		return err
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return err
	}
	return response.Body.Close()
}

func (p *boundPort) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Error(err)
	}
}

// settle asks and waits until the server counts the client as idle again, which is a
// moment after its answer.
func (p *boundPort) settle(conn net.Conn) {
	p.t.Helper()
	before := p.idle.Load()
	p.must(p.ask(conn, "/"))
	testkit.Eventually(p.t, 10*time.Second, "the client is idle again", func() bool { return p.idle.Load() > before })
}

// closed reports whether the server has closed the connection.
func (p *boundPort) closed(conn net.Conn) bool {
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	_, err := conn.Read(make([]byte, 1))
	return err == io.EOF
}

func TestLongestIdleClientMakesRoomForANewOne(t *testing.T) {
	p := newBoundPort(t, 3)
	first, second, silent := p.dial(), p.dial(), p.dial()
	p.settle(second)
	p.settle(first)
	p.settle(second) // first is idle for longer now; silent, which never asked, for longest
	for range 5 {
		p.settle(second)
	}
	time.Sleep(web.FreshFor) // silent counts as idle only then
	p.settle(p.dial())
	if !p.closed(silent) {
		t.Error("the client that has sent nothing stays")
	}
	p.settle(p.dial())
	if !p.closed(first) {
		t.Error("the client that was idle for longest stays")
	}
	p.settle(second)
}

// TestAClientThatHasJustComeKeepsItsPlace: its first request is on its way.
func TestAClientThatHasJustComeKeepsItsPlace(t *testing.T) {
	p := newBoundPort(t, 2)
	for range 20 {
		var all [6]net.Conn
		for i := range all {
			all[i] = p.dial()
		}
		for _, conn := range all {
			p.must(p.ask(conn, "/"))
		}
	}
}

func TestNewClientsWaitWhileAllAreBusy(t *testing.T) {
	p := newBoundPort(t, 2)
	answers := make(chan error, 3)
	for range 2 {
		go func() { answers <- p.ask(p.dial(), "/slow") }()
	}
	testkit.Eventually(t, 10*time.Second, "both are busy", func() bool { return p.slow.Load() == 2 })
	late := make(chan error, 1)
	go func() { late <- p.ask(p.dial(), "/") }()
	select {
	case err := <-late:
		t.Fatalf("a third was served beside two: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	p.release <- struct{}{}
	p.must(<-answers)
	p.must(<-late) // in the place of the one that is idle now
	p.release <- struct{}{}
	p.must(<-answers)
}

func TestServerEndsWhileAClientWaits(t *testing.T) {
	p := newBoundPort(t, 1)
	answered := make(chan error, 1)
	go func() { answered <- p.ask(p.dial(), "/slow") }()
	testkit.Eventually(t, 10*time.Second, "it is busy", func() bool { return p.slow.Load() == 1 })
	p.dial()
	close(p.release)
	p.must(<-answered)
}

// TestManyClientsComeAndGo holds the count of open places: none is lost.
func TestManyClientsComeAndGo(t *testing.T) {
	p := newBoundPort(t, 4)
	for round := range 200 {
		conn := p.dial()
		if round%3 != 0 {
			p.must(p.ask(conn, "/"))
		}
		if round%2 == 0 {
			conn.Close()
		}
	}
	for range 4 {
		go func() { p.ask(p.dial(), "/slow") }()
	}
	testkit.Eventually(t, 10*time.Second, "all places are there", func() bool { return p.slow.Load() == 4 })
	close(p.release)
}

func TestSoftLimitOfOpenFilesIsTheHardOne(t *testing.T) {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if limit.Cur < limit.Max && limit.Cur < 1<<19 {
		t.Errorf("soft limit %d, hard limit %d", limit.Cur, limit.Max)
	}
	if got := web.Descriptors(); got < 1 || uint64(got) > limit.Cur {
		t.Errorf("%d descriptors of %d", got, limit.Cur)
	}
}

func TestClientsNeverTakeAllDescriptors(t *testing.T) {
	for _, asked := range []int{0, 1, 100, 1 << 30} {
		openAI, selection := web.ConnectionSettings{MaxConnections: asked}.Shares(false)
		// Each takes another for its worker.
		if all := 2 * (openAI + selection); openAI < 1 || selection < 1 || all > web.Descriptors()*3/4 {
			t.Errorf("asked for %d: %d and %d of %d descriptors", asked, openAI, selection, web.Descriptors())
		}
		if asked == 100 && web.Descriptors() > 1000 && openAI != asked {
			t.Errorf("asked for %d: %d", asked, openAI)
		}
	}
}

// TestAClientWhoseHeadersAreTooLongIsTold sends more than the server reads: closing
// the connection at once would take the answer with it.
func TestAClientWhoseHeadersAreTooLongIsTold(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := web.NewServer(http.NotFoundHandler())
	done := make(chan error, 1)
	go func() { done <- server.Serve(web.Bound(server, listener, 4)) }()
	conn, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: a\r\nX-A: %s\r\n\r\n", strings.Repeat("a", 300_000))
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || response.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("%v, %v", response, err)
	}
	testkit.Eventually(t, 10*time.Second, "the server has closed the connection", func() bool {
		_, err := conn.Write([]byte("a"))
		return err != nil
	})
	server.Close()
	<-done
}
