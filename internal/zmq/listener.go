package zmq

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
)

// acceptRetry is the pause after a connection could not be accepted.
const acceptRetry = 50 * time.Millisecond

// Listener accepts ZeroMQ connections at one address and hands each to serve
// in a goroutine of its own. All of them end with Close.
type Listener struct {
	listener net.Listener
	kind     zmq4.SocketType
	serve    func(*Conn)
	ctx      context.Context // its end closes every connection
	cancel   context.CancelFunc
	running  sync.WaitGroup
}

// Listen listens at address, host:port, as a socket of that kind. serve gets each
// connection, in a goroutine of its own, and the connection ends with it.
func Listen(address string, kind zmq4.SocketType, serve func(*Conn)) (*Listener, error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("ZeroMQ socket: %w", err)
	}
	l := &Listener{listener: listener, kind: kind, serve: serve}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.running.Go(l.accept)
	return l, nil
}

// Endpoint returns where to connect to, tcp://host:port.
func (l *Listener) Endpoint() string { return "tcp://" + l.listener.Addr().String() }

// Close ends the socket and all its connections at once: what waits to be sent
// is lost. It returns when every goroutine has ended.
func (l *Listener) Close() {
	_ = l.listener.Close()
	l.cancel()
	l.running.Wait()
}

func (l *Listener) accept() {
	for {
		raw, err := l.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // too many open files, for one
			select {
			case <-l.ctx.Done():
			case <-time.After(acceptRetry):
			}
			continue
		}
		l.running.Go(func() {
			conn, err := open(l.ctx, raw, l.kind, true)
			if err != nil {
				return
			}
			defer conn.Close()
			l.serve(conn)
		})
	}
}

// Router is a ZeroMQ ROUTER socket that answers requests.
type Router struct{ *Listener }

// NewRouter returns a router that listens at address, host:port. answer is called for each
// request, by several goroutines at once if there are several peers; reply
// sends one message back to the asking peer. The request's frames are valid
// during the call only.
func NewRouter(address string, answer func(request [][]byte, reply func(frames ...[]byte) error)) (*Router, error) {
	l, err := Listen(address, zmq4.Router, func(conn *Conn) {
		for {
			request, err := conn.Recv()
			if err != nil {
				return
			}
			answer(request, conn.Send)
		}
	})
	return &Router{l}, err
}
