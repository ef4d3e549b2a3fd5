package testkit

import (
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Link is a TCP proxy to another port that can simulate a network partition: both ends
// keep their connections and receive nothing.
type Link struct {
	to       string
	listener net.Listener
	silent   atomic.Bool    // what comes is swallowed, and nothing is closed
	carrying sync.WaitGroup // goroutines; they end with close

	mu     sync.Mutex // guards what follows
	conns  map[*net.TCPConn]bool
	closed bool
}

// NewLink opens a link to an address such as 127.0.0.1:8100. It closes at the end
// of the test.
func NewLink(t testing.TB, to string) *Link {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &Link{to: to, listener: listener, conns: map[*net.TCPConn]bool{}}
	l.carrying.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			l.carrying.Go(func() { l.serve(conn.(*net.TCPConn)) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		l.reset(true)
		l.carrying.Wait()
	})
	return l
}

// Address is the listen address of the link.
func (l *Link) Address() string { return l.listener.Addr().String() }

// Silence discards all data from now on. New connections are still accepted.
func (l *Link) Silence() { l.silent.Store(true) }

// Mend ends a silence and resets the old connections, as a recovered network does.
func (l *Link) Mend() {
	if l.silent.Swap(false) {
		l.reset(false)
	}
}

// reset closes all connections; last: no more are accepted.
func (l *Link) reset(last bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = last
	for conn := range l.conns {
		_ = conn.SetLinger(0)
		_ = conn.Close()
	}
}

// keep registers a connection until it is forgotten; not ok: the link is closed.
func (l *Link) keep(conn *net.TCPConn) (ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = conn.Close()
		return false
	}
	l.conns[conn] = true
	return true
}

func (l *Link) forget(conn *net.TCPConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, conn)
	_ = conn.Close()
}

// serve forwards one connection until both ends have closed it, or it is reset.
func (l *Link) serve(near *net.TCPConn) {
	if !l.keep(near) {
		return
	}
	defer l.forget(near)
	if l.silent.Load() {
		l.carry(nil, near)
		return
	}
	conn, err := net.DialTimeout("tcp", l.to, time.Second)
	if err != nil {
		return
	}
	far := conn.(*net.TCPConn)
	if !l.keep(far) {
		return
	}
	defer l.forget(far)
	var back sync.WaitGroup
	back.Go(func() { l.carry(near, far) })
	l.carry(far, near)
	back.Wait()
}

// carry copies from until its end. The end of a stream is not forwarded during a
// silence either.
func (l *Link) carry(to, from *net.TCPConn) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		silent := l.silent.Load()
		if err == nil && !silent && to != nil {
			_, err = to.Write(buffer[:n])
		}
		if err != nil {
			if !silent && to != nil {
				_ = to.Close()
			}
			return
		}
	}
}
