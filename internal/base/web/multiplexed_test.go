package web_test

import (
	"net"
	"testing"
	"time"

	"kvrouter/internal/base/web"
)

// multiplexedPort accepts up to two connections at once.
type multiplexedPort struct {
	t        *testing.T
	address  string
	accepted chan net.Conn
}

func newMultiplexedPort(t *testing.T) *multiplexedPort {
	t.Helper()
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := web.BoundMultiplexed(raw, 2)
	p := &multiplexedPort{t, raw.Addr().String(), make(chan net.Conn, 16)}
	done := make(chan struct{})
	go func() { // until the listener is closed
		defer close(done)
		for {
			c, err := port.Accept()
			if err != nil {
				return
			}
			p.accepted <- c
		}
	}()
	t.Cleanup(func() {
		port.Close()
		<-done
		for {
			select {
			case c := <-p.accepted:
				c.Close()
			default:
				return
			}
		}
	})
	return p
}

// dial opens a connection and returns both its ends.
func (p *multiplexedPort) dial() (client, server net.Conn) {
	p.t.Helper()
	client, err := net.Dial("tcp", p.address)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { client.Close() })
	select {
	case server = <-p.accepted:
	case <-time.After(10 * time.Second):
		p.t.Fatal("the connection is not accepted")
	}
	p.t.Cleanup(func() { server.Close() })
	return client, server
}

// waits opens a connection that is not accepted for now.
func (p *multiplexedPort) waits() {
	p.t.Helper()
	late, err := net.Dial("tcp", p.address)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { late.Close() })
	select {
	case server := <-p.accepted:
		server.Close()
		p.t.Error("a connection was accepted beyond the limit of busy ones")
	case <-time.After(50 * time.Millisecond):
	}
}

// closes waits until the port has closed a connection.
func (p *multiplexedPort) closes(client net.Conn) {
	p.t.Helper()
	client.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := client.Read(make([]byte, 1)); err == nil || isTimeout(err) {
		p.t.Errorf("the connection stays open: %v", err)
	}
}

// stays checks that the port has not closed a connection.
func (p *multiplexedPort) stays(client net.Conn) {
	p.t.Helper()
	client.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if _, err := client.Read(make([]byte, 1)); !isTimeout(err) {
		p.t.Errorf("the connection is closed: %v", err)
	}
}

func isTimeout(err error) bool {
	failed, ok := err.(net.Error)
	return ok && failed.Timeout()
}

func TestConnectionWithoutRequestsMakesRoom(t *testing.T) {
	p := newMultiplexedPort(t)
	busy, busyServer := p.dial()
	first, second := web.Busy(busyServer.RemoteAddr()), web.Busy(busyServer.RemoteAddr())
	silent, _ := p.dial()
	third, thirdServer := p.dial()
	p.closes(silent)
	p.stays(busy)

	done := web.Busy(thirdServer.RemoteAddr())
	first()
	first() // counts once
	p.waits()
	second()
	p.closes(busy)
	p.stays(third)
	done()
}

func TestABusyAddressOfAnotherListenerIsIgnored(t *testing.T) {
	web.Busy(&net.TCPAddr{})()
	web.Busy(nil)()
}

// TestRequestsEndAfterTheirConnection: its place is given away once.
func TestRequestsEndAfterTheirConnection(t *testing.T) {
	p := newMultiplexedPort(t)
	for range 5 {
		_, server := p.dial()
		done := web.Busy(server.RemoteAddr())
		server.Close()
		done()
	}
	a, aServer := p.dial()
	web.Busy(aServer.RemoteAddr())
	b, bServer := p.dial()
	web.Busy(bServer.RemoteAddr())
	p.waits()
	p.stays(a)
	p.stays(b)
}
