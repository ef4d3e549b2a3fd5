package web

import (
	"net"
	"sync"
	"time"
)

// BoundMultiplexed limits the concurrent connections of a listener as those of a Port are, for a
// server whose connections carry several requests at once. The server reports each
// request by Busy; a connection without one is idle.
func BoundMultiplexed(port net.Listener, most int) net.Listener {
	return multiplexedPort{&boundedPort{port, newConnections(most, Stall)}}
}

type multiplexedPort struct{ *boundedPort }

// Accept returns the next connection, whose remote address leads Busy to it.
func (p multiplexedPort) Accept() (net.Conn, error) {
	c, err := p.accept()
	if err != nil {
		return nil, err
	}
	return multiplexed{c}, nil
}

type multiplexed struct{ *connection }

// RemoteAddr returns the client's address.
func (c multiplexed) RemoteAddr() net.Addr { return client{c.Conn.RemoteAddr(), c.connection} }

// client is a client's address, and its connection.
type client struct {
	net.Addr
	connection *connection
}

// Busy counts a request of the client with that address, as its connection on a listener
// of BoundMultiplexed reports it, until done is called: a connection with a request is
// not closed for another. Any other address is ignored.
func Busy(address net.Addr) (done func()) {
	from, ok := address.(client)
	if !ok {
		return func() {}
	}
	c := from.connection
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	c.requests++
	c.came = time.Time{}
	c.busy()
	return sync.OnceFunc(c.done)
}

// done ends one request of the connection. The last bytes of its answer may still be on
// their way: the connection counts as new again.
func (c *connection) done() {
	c.all.mu.Lock()
	defer c.all.mu.Unlock()
	if c.requests--; c.requests == 0 && !c.shut {
		c.came = time.Now()
		c.at = c.all.idle.PushBack(c)
		c.all.freed.Signal()
	}
}
