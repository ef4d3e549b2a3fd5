package web

import (
	"container/list"
	"errors"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Connections limits the concurrent client connections of one port. At the limit a new
// connection replaces the one that has been idle longest, except those that have just
// been accepted; with none idle it waits in the listen backlog. It is safe for
// concurrent use.
type Connections struct {
	most  int
	stall time.Duration // maximum time without progress of a write

	mu     sync.Mutex // guards the rest
	open   int        // accepted and not closed
	idle   *list.List // of *connection without a request, longest first
	freed  *sync.Cond // on mu: one was closed or became idle, or the port was closed
	closed bool       // the port
}

// FreshFor is the time that a new connection counts as busy before its first request,
// and one of BoundMultiplexed after its last.
const FreshFor = 200 * time.Millisecond

// connection is one client.
type connection struct {
	net.Conn
	all    *Connections
	client string        // see AddressOf
	came   time.Time     // since when it counts as new; zero: it does not. Guarded by all.mu
	at     *list.Element // in all.idle; nil: it has a request, or is closed. Guarded by all.mu
	shut   bool          // it was closed. Guarded by all.mu

	until atomic.Pointer[time.Time] // deadline of writing; nil: none was set

	requests int // that it carries, on a listener of BoundMultiplexed. Guarded by all.mu
}

// boundedPort is a listener that counts its connections.
type boundedPort struct {
	net.Listener
	all *Connections
}

func newConnections(most int, stall time.Duration) *Connections {
	all := &Connections{most: max(1, most), stall: stall, idle: list.New()}
	all.freed = sync.NewCond(&all.mu)
	return all
}

// bound wraps the listener port of server and limits it to most concurrent connections.
// It sets server.ConnState.
func bound(server *http.Server, port net.Listener, most int, stall time.Duration) net.Listener {
	all := newConnections(most, stall)
	server.ConnState = all.changed
	return &boundedPort{port, all}
}

// Accept returns the next connection when one is available below the limit.
func (p *boundedPort) Accept() (net.Conn, error) {
	c, err := p.accept()
	if err != nil {
		return nil, err
	}
	return c, nil
}

func (p *boundedPort) accept() (*connection, error) {
	raw, err := p.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &connection{Conn: raw, all: p.all, client: addressOf(raw.RemoteAddr().String())}
	if !p.all.admit(c) {
		_ = raw.Close()
		return nil, net.ErrClosed
	}
	return c, nil
}

// Close closes the port; open connections stay.
func (p *boundedPort) Close() error {
	p.all.mu.Lock()
	p.all.closed = true
	p.all.freed.Broadcast()
	p.all.mu.Unlock()
	return p.Listener.Close()
}

// admit waits until a connection fits below the limit. Not ok: the port was closed.
func (a *Connections) admit(c *connection) (ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.open >= a.most && !a.closed {
		victim, wait := a.longestIdle()
		if victim == nil {
			a.await(wait)
			continue
		}
		a.mu.Unlock()
		_ = victim.Close()
		a.mu.Lock()
	}
	if a.closed {
		return false
	}
	a.open++
	c.came, c.at = time.Now(), a.idle.PushBack(c)
	return true
}

// await waits until a place may be free, or for wait, if that is not 0. a.mu is held.
func (a *Connections) await(wait time.Duration) {
	if wait > 0 {
		defer time.AfterFunc(wait, a.freed.Broadcast).Stop()
	}
	a.freed.Wait()
}

// longestIdle returns the client to be closed for another; nil: there is none now, or
// only after wait. a.mu is held.
func (a *Connections) longestIdle() (victim *connection, wait time.Duration) {
	for e := a.idle.Front(); e != nil; e = e.Next() {
		c := e.Value.(*connection)
		left := FreshFor - time.Since(c.came)
		if left <= 0 {
			return c, 0
		}
		if wait == 0 {
			wait = left // of the first that came
		}
	}
	return nil, wait
}

// changed is the server's ConnState callback.
func (a *Connections) changed(conn net.Conn, state http.ConnState) {
	c := bounded(conn)
	if c == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case state == http.StateActive:
		c.came = time.Time{}
		c.busy()
	case state == http.StateIdle && c.at == nil && !c.shut:
		c.at = a.idle.PushBack(c)
		a.freed.Signal()
	}
}

// busy takes the client off the list of idle ones; all.mu is held.
func (c *connection) busy() {
	if c.at != nil {
		c.all.idle.Remove(c.at)
		c.at = nil
	}
}

// yield counts the client as idle though its request has not ended: what remains of it need
// not be waited for. It counts as new, so that its answer can go.
func (c *connection) yield() {
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	if c.at == nil && !c.shut {
		c.came, c.at = time.Now(), c.all.idle.PushBack(c)
		c.all.freed.Signal()
	}
}

// looks is how often a write looks for progress within the time of stall.
const looks = 5

// Write writes all bytes as long as the client takes some: it fails once it has taken fewer
// than leastTaken at each look within the time of stall, or at the deadline that was set.
func (c *connection) Write(b []byte) (n int, err error) {
	for quiet := 0; ; {
		at, set := time.Now().Add(c.all.stall/looks), c.until.Load()
		last := set != nil && set.Before(at)
		if last {
			at = *set
		}
		_ = c.Conn.SetWriteDeadline(at) // fails on a closed connection, as does Write
		wrote, err := c.Conn.Write(b[n:])
		n += wrote
		if quiet++; wrote >= leastTaken {
			quiet = 0
		}
		if last || quiet >= looks || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
	}
}

// SetWriteDeadline sets a deadline beside that of Write; zero: none.
func (c *connection) SetWriteDeadline(at time.Time) error {
	if at.IsZero() {
		c.until.Store(nil)
	} else {
		c.until.Store(&at)
	}
	return c.Conn.SetWriteDeadline(at)
}

// SetDeadline sets the deadlines of both directions.
func (c *connection) SetDeadline(at time.Time) error {
	return errors.Join(c.SetWriteDeadline(at), c.Conn.SetReadDeadline(at))
}

// Close closes the connection and frees its slot.
func (c *connection) Close() error {
	c.all.mu.Lock()
	again := c.shut
	if !again {
		c.shut = true
		c.busy()
		c.all.open--
		c.all.freed.Signal()
	}
	c.all.mu.Unlock()
	if again {
		return net.ErrClosed
	}
	return c.Conn.Close()
}

// CloseWrite closes the sending direction. The server needs it to answer a client with
// headers are too long before it closes the connection.
func (c *connection) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// connectionKey marks a request's connection in its context.
type connectionKey struct{}

// LimitUnsent bounds how much of the answer to a request the system keeps for a client that
// does not read: about that many bytes, and what the client's own system keeps.
func LimitUnsent(r *http.Request, bytes int) {
	if c := connectionOf(r); c != nil {
		if tcp, ok := c.Conn.(*net.TCPConn); ok {
			_ = tcp.SetWriteBuffer(bytes)
		}
	}
}

// connectionOf returns the connection of a request on a bounded port; nil: it has another.
func connectionOf(r *http.Request) *connection {
	conn, _ := r.Context().Value(connectionKey{}).(net.Conn)
	return bounded(conn)
}

// bounded returns a server's connection as its bounded port has accepted it; nil: another
// port has.
func bounded(conn net.Conn) *connection {
	if wrapped, ok := conn.(interface{ NetConn() net.Conn }); ok { // TLS
		conn = wrapped.NetConn()
	}
	c, _ := conn.(*connection)
	return c
}

// fewestDescriptors is the assumed limit where it cannot be read.
const fewestDescriptors = 1024

// Descriptors returns the maximum number of open files and connections of this
// process. Go has raised the soft limit to the hard one at the start.
func Descriptors() int {
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil {
		return fewestDescriptors
	}
	return int(min(limit.Cur, 1<<30))
}

// clientSixteenths is the share of the descriptors that clients may take, in
// sixteenths. A request takes two: its client's and its worker's. The rest is for
// unused connections to workers (idleSixteenths), KV events, load, health checks and
// files.
const clientSixteenths = 5

// mostConnections bounds the clients where there are plenty of descriptors: each
// takes about 20 KB while it is idle.
const mostConnections = 16384

// ConnectionSettings are the flags that limit client connections.
type ConnectionSettings struct {
	MaxConnections int `group:"Requests" default:"0" help:"Maximum concurrent client connections to the OpenAI port; the router port gets a seventh of that in addition. Above the limit, idle connections are closed, then new ones wait. 0: derived from the limit of open files (ulimit -n), at most 16384; a higher value is lowered to that limit."`
}

// Shares returns the connection limits of the OpenAI port and of the router port. With
// twoRouters there are two router ports, and each gets half.
func (s ConnectionSettings) Shares(twoRouters bool) (openAI, selection int) {
	allowed := Descriptors() * clientSixteenths / 16 * 7 / 8
	openAI = min(allowed, mostConnections)
	if s.MaxConnections > 0 {
		openAI = min(allowed, s.MaxConnections)
	}
	openAI = max(1, openAI)
	if selection = max(1, openAI/7); twoRouters {
		selection = max(1, selection/2)
	}
	return openAI, selection
}
