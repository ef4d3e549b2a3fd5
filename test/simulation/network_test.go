package simulation

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/zeebo/xxh3"
)

// network carries bytes between hosts in virtual time. Connections keep the order, as in
// TCP. On a connection whose listener has losses, a message may be lost, duplicated or
// swapped with the previous one, as a whole.
//
// All random choices are hashes of the seed, the two hosts, the part that dialed, and the
// numbers of connection and packet. They do not depend on the order of goroutines within
// one instant.
type network struct {
	seed  uint64
	delay time.Duration // maximum delay of a packet without faults

	mu        sync.Mutex // guards the rest, and all flows
	faulty    bool       // losses and delay spikes occur
	spike     float64    // share of packets that take up to 2 s longer
	listeners map[string]*listener
	links     []*link        // of the routers that are up
	conns     []*conn        // open ones, one end of each
	cut       map[hosts]bool // pairs that are partitioned
	met       faults
}

// faults count the messages that were lost, sent twice and sent too early, and the packets
// that were delayed.
type faults struct{ Lost, Doubled, Swapped, Delayed int }

// hosts are two hosts, in order.
type hosts [2]string

func pair(a, b string) hosts {
	if a > b {
		a, b = b, a
	}
	return hosts{a, b}
}

// losses are the shares of messages with a fault. The first spared messages of a connection
// have none: a queue that overflows has accepted some.
type losses struct {
	Drop, Twice, Swap float64
	spared            int
}

func newNetwork(seed uint64) *network {
	return &network{seed: seed, listeners: map[string]*listener{}, cut: map[hosts]bool{}}
}

// chance returns a number of [0, 1) that depends on the seed and what.
func (n *network) chance(what ...uint64) float64 {
	return float64(mix(n.seed, what...)>>11) / (1 << 53)
}

// mix hashes numbers.
func mix(seed uint64, what ...uint64) uint64 {
	var text [64]byte
	b := text[:0]
	for _, w := range what {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return xxh3.HashSeed(b, seed)
}

// listener is a net.Listener at an address of the network.
type listener struct {
	net     *network
	address string
	losses  *losses // of messages from its side; nil: none
	waiting []*conn
	wake    chan struct{}
	closed  bool
}

// listen opens an address, host:port.
func (n *network) listen(address string, faults *losses) (net.Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listeners[address] != nil {
		return nil, &net.OpError{Op: "listen", Err: syscall.EADDRINUSE}
	}
	l := &listener{net: n, address: address, losses: faults, wake: make(chan struct{})}
	n.listeners[address] = l
	return l, nil
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	for {
		l.net.mu.Lock()
		if l.closed {
			l.net.mu.Unlock()
			return nil, net.ErrClosed
		}
		if len(l.waiting) > 0 {
			c := l.waiting[0]
			l.waiting = l.waiting[1:]
			l.net.mu.Unlock()
			return c, nil
		}
		wake := l.wake
		l.net.mu.Unlock()
		<-wake
	}
}

// signal wakes Accept. The network is locked.
func (l *listener) signal() {
	close(l.wake)
	l.wake = make(chan struct{})
}

// Close implements net.Listener.
func (l *listener) Close() error {
	l.net.mu.Lock()
	defer l.net.mu.Unlock()
	if l.closed {
		return net.ErrClosed
	}
	l.closed = true
	delete(l.net.listeners, l.address)
	for _, c := range l.waiting {
		c.reset(0)
	}
	l.signal()
	return nil
}

// Addr implements net.Listener.
func (l *listener) Addr() net.Addr { return address(l.address) }

// address is a net.Addr.
type address string

// Network implements net.Addr.
func (address) Network() string { return "tcp" }

// String implements net.Addr.
func (a address) String() string { return string(a) }

// dialer returns the dial function of a part of a host, named by salt. Dialing takes at
// most limit. A connection whose other side has vanished fails after dead.
func (n *network) dialer(from string, salt uint64, limit, dead time.Duration) func(ctx context.Context, network, address string) (net.Conn, error) {
	dials := map[string]uint64{} // by address
	return func(ctx context.Context, _, to string) (net.Conn, error) {
		host, _, err := net.SplitHostPort(to)
		if err != nil {
			return nil, err
		}
		n.mu.Lock()
		dials[to]++
		id := mix(n.seed, xxh3.HashString(from), salt, xxh3.HashString(to), dials[to])
		n.mu.Unlock()
		// Other limits are as long, and their order must not depend on the runtime.
		ctx, cancel := context.WithTimeout(ctx, limit+time.Duration((n.chance(id, 1)-0.5)*1e6))
		defer cancel()
		trip := time.NewTimer(time.Duration(2 * n.chance(id) * float64(n.delay)))
		defer trip.Stop()
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-trip.C:
		}
		c, err := n.connect(from, host, to, id, dead)
		if errors.Is(err, errCut) {
			<-ctx.Done()
			err = os.ErrDeadlineExceeded
		}
		if err != nil {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Addr: address(to), Err: err}
		}
		return c, nil
	}
}

// errCut means that two hosts are partitioned.
var errCut = errors.New("partitioned")

func (n *network) connect(from, host, to string, id uint64, dead time.Duration) (*conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.listeners[to]
	switch {
	case n.cut[pair(from, host)]:
		return nil, errCut
	case l == nil:
		return nil, syscall.ECONNREFUSED
	}
	near := &conn{net: n, local: address(from + ":0"), remote: address(to), between: pair(from, host), dead: dead}
	far := &conn{net: n, local: address(to), remote: address(from + ":0"), between: near.between, dead: dead}
	near.in = &flow{id: id, wake: make(chan struct{}), losses: l.losses}
	far.in = &flow{id: id + 1, wake: make(chan struct{})}
	near.peer, far.peer = far, near
	n.conns = append(n.conns, near)
	l.waiting = append(l.waiting, far)
	l.signal()
	return near, nil
}

// flow is one direction of a connection.
type flow struct {
	id      uint64
	losses  *losses // of its sender's messages; nil: none
	packets []packet
	sent    int       // bytes so far
	count   uint64    // packets so far
	said    int       // messages so far
	last    time.Time // the latest arrival
	wake    chan struct{}

	ends   time.Time // when it ended, with the error end; zero: it has not
	end    error
	silent bool // no packet arrives
}

// packet is the bytes of one Write.
type packet struct {
	at   time.Time
	data []byte
}

// signal wakes the reader. The network is locked.
func (f *flow) signal() {
	close(f.wake)
	f.wake = make(chan struct{})
}

// conn is one end of a connection.
type conn struct {
	net           *network
	local, remote address
	between       hosts
	dead          time.Duration
	in            *flow
	peer          *conn
	closed        bool // by this side
	deadline      time.Time
}

// greeting is the length of ZMTP's greeting, and command the flag of its commands:
// neither is a message.
const greeting, command = 64, 4

// Write implements net.Conn. It never waits.
func (c *conn) Write(b []byte) (int, error) {
	n := c.net
	n.mu.Lock()
	defer n.mu.Unlock()
	f := c.peer.in
	switch {
	case c.closed:
		return 0, net.ErrClosed
	case c.in.end != nil && c.in.end != io.EOF && !time.Now().Before(c.in.ends):
		return 0, &net.OpError{Op: "write", Err: c.in.end}
	case c.peer.closed || f.end != nil:
		return len(b), nil // its answer is in transit
	}
	now := time.Now()
	number := f.count
	f.count++
	at := now.Add(time.Duration((0.1 + n.chance(f.id, number)) * float64(n.delay)))
	if n.faulty && n.spike > 0 && n.chance(f.id, number, 1) < n.spike {
		at = at.Add(time.Duration(n.chance(f.id, number, 2) * 2e9))
		n.met.Delayed++
	}
	if !at.After(f.last) {
		at = f.last.Add(1)
	}
	message := f.losses != nil && n.faulty && f.sent >= greeting && b[0]&command == 0
	f.sent += len(b)
	p := packet{at, slices.Clone(b)}
	if message {
		f.said++
	}
	if message && f.said > f.losses.spared {
		switch chance := n.chance(f.id, number, 3); {
		case chance < f.losses.Drop:
			n.met.Lost++
			return len(b), nil
		case chance < f.losses.Drop+f.losses.Twice:
			f.packets = append(f.packets, p)
			p.at = p.at.Add(1)
			n.met.Doubled++
		case chance < f.losses.Drop+f.losses.Twice+f.losses.Swap && len(f.packets) > 0 && f.packets[len(f.packets)-1].data[0]&command == 0:
			before := &f.packets[len(f.packets)-1]
			before.data, p.data = p.data, before.data
			n.met.Swapped++
		}
	}
	f.packets = append(f.packets, p)
	f.last = p.at
	f.signal()
	return len(b), nil
}

// Read implements net.Conn.
func (c *conn) Read(b []byte) (int, error) {
	for {
		n, wait, err := c.read(b)
		if n > 0 || err != nil {
			return n, err
		}
		wait()
	}
}

// read takes the bytes that have arrived. If there are none, wait waits until there may be
// some.
func (c *conn) read(b []byte) (int, func(), error) {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	f, now := c.in, time.Now()
	cut := c.net.cut[c.between] || f.silent
	switch {
	case c.closed:
		return 0, nil, net.ErrClosed
	case !c.deadline.IsZero() && !now.Before(c.deadline):
		return 0, nil, os.ErrDeadlineExceeded
	case f.end != nil && f.end != io.EOF && !now.Before(f.ends):
		return 0, nil, &net.OpError{Op: "read", Err: f.end}
	case len(f.packets) > 0 && !cut && !now.Before(f.packets[0].at):
		n := copy(b, f.packets[0].data)
		if f.packets[0].data = f.packets[0].data[n:]; len(f.packets[0].data) == 0 {
			f.packets = f.packets[1:]
		}
		return n, nil, nil
	case f.end == io.EOF && len(f.packets) == 0 && !cut && !now.Before(f.ends):
		return 0, nil, io.EOF
	}
	until := c.deadline
	sooner := func(at time.Time) {
		if at.After(now) && (until.IsZero() || at.Before(until)) {
			until = at
		}
	}
	if len(f.packets) > 0 && !cut {
		sooner(f.packets[0].at)
	}
	if f.end != nil {
		sooner(f.ends)
	}
	wake := f.wake
	return 0, func() {
		if until.IsZero() {
			<-wake
			return
		}
		timer := time.NewTimer(until.Sub(now))
		defer timer.Stop()
		select {
		case <-wake:
		case <-timer.C:
		}
	}, nil
}

// finish ends the flow with err, after the bytes already sent. The network is locked.
func (n *network) finish(f *flow, err error, after time.Duration) {
	if f.end != nil {
		return
	}
	f.end, f.ends = err, time.Now().Add(after+time.Duration(n.chance(f.id, f.count, 4)*float64(n.delay)))
	if err == io.EOF && f.ends.Before(f.last) {
		f.ends = f.last
	}
	f.signal()
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.closed = true
	c.in.packets = nil
	c.in.signal()
	c.net.finish(c.peer.in, io.EOF, 0)
	c.net.forget(c)
	return nil
}

// forget drops a connection that both ends have closed. The network is locked.
func (n *network) forget(c *conn) {
	if c.closed && c.peer.closed {
		n.conns = slices.DeleteFunc(n.conns, func(other *conn) bool { return other == c || other == c.peer })
	}
}

// reset breaks the connection at both ends. The network is locked.
func (c *conn) reset(after time.Duration) {
	for _, end := range []*conn{c, c.peer} {
		c.net.finish(end.in, syscall.ECONNRESET, after)
	}
}

// LocalAddr implements net.Conn.
func (c *conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr implements net.Conn.
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline implements net.Conn.
func (c *conn) SetDeadline(t time.Time) error { return c.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn: writing never waits.
func (c *conn) SetWriteDeadline(time.Time) error { return nil }

// SetReadDeadline implements net.Conn.
func (c *conn) SetReadDeadline(t time.Time) error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	c.deadline = t
	c.in.signal()
	return nil
}

// each calls f for the open connections of a host, or those between two. The network is
// locked.
func (n *network) each(a, b string, f func(*conn)) {
	for _, c := range slices.Clone(n.conns) {
		if b == "" && (c.between[0] == a || c.between[1] == a) || b != "" && c.between == pair(a, b) {
			f(c)
		}
	}
}

// partition holds back all packets between two hosts until mend.
func (n *network) partition(a, b string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut[pair(a, b)] = true
}

// mend ends a partition and delivers the packets held back.
func (n *network) mend(a, b string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.cut, pair(a, b))
	n.each(a, b, func(c *conn) {
		for _, end := range []*conn{c, c.peer} {
			f := end.in
			for i := range f.packets {
				at := time.Now().Add(time.Duration(n.chance(f.id, f.count, 5)*float64(n.delay)) + time.Duration(i))
				if f.packets[i].at.Before(at) {
					f.packets[i].at = at
				}
				f.last = f.packets[i].at
			}
			f.signal()
		}
	})
	n.mendLetters(a, b)
}

// resetAll breaks the connections of a host, or those between two. Packets that would
// arrive after the reset are lost.
func (n *network) resetAll(a, b string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.each(a, b, func(c *conn) { c.reset(0) })
	n.loseLetters(a, b, time.Time{})
}

// vanish silences the connections between two hosts in both directions, until their ends
// time out.
func (n *network) vanish(a, b string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.each(a, b, func(c *conn) {
		for _, end := range []*conn{c, c.peer} {
			if end.in.silent = true; end.in.end == io.EOF {
				end.in.end = nil // it does not arrive
			}
			n.finish(end.in, syscall.ETIMEDOUT, c.dead)
		}
	})
	n.loseLetters(a, b, time.Now().Add(routeDead))
}

// calm ends all faults.
func (n *network) calm() {
	n.mu.Lock()
	n.faulty = false
	cut := n.cut
	n.mu.Unlock()
	for p := range cut {
		n.mend(p[0], p[1])
	}
}

// open returns the names of the open connections, for messages.
func (n *network) open() (list []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.conns {
		list = append(list, fmt.Sprintf("%s to %s", c.local, c.remote))
	}
	return list
}
