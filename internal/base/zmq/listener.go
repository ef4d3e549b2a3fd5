package zmq

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zeromq/zmq4"
)

const (
	// acceptRetry is the pause after a connection could not be accepted.
	acceptRetry = 50 * time.Millisecond
	// maxConnections is the number of connections that a Listener has at a time. Each takes
	// about 0.3 MB; routers and workers have a handful.
	maxConnections = 128
)

// Listener accepts ZeroMQ connections at one address and calls serve for each in
// its own goroutine. It has at most 128 connections; further ones are closed at
// once. All of them end with Close.
type Listener struct {
	listen   func(address string) (net.Listener, error)
	listener net.Listener
	kind     zmq4.SocketType
	serve    func(*Conn)
	guard    func(func() error) error // runs each connection
	slots    chan struct{}            // holds a token for each connection
	refused  atomic.Uint64
	ctx      context.Context // its end closes every connection
	cancel   context.CancelFunc
	running  sync.WaitGroup
}

// Option configures how a Listener treats connections.
type Option func(*Listener)

// WithGuard makes run call the function that reads from a connection, so that run
// can convert a panic to an error. The error ends the connection.
func WithGuard(run func(func() error) error) Option { return func(l *Listener) { l.guard = run } }

// WithListen has listen open the listener, in place of a TCP socket.
func WithListen(listen func(address string) (net.Listener, error)) Option {
	return func(l *Listener) { l.listen = listen }
}

// Listen listens at address, host:port, as a socket of that kind. serve gets each
// connection, in a goroutine of its own, and the connection ends with it.
func Listen(address string, kind zmq4.SocketType, serve func(*Conn), options ...Option) (*Listener, error) {
	l := &Listener{
		kind: kind, serve: serve, slots: make(chan struct{}, maxConnections),
		listen: func(address string) (net.Listener, error) { return net.Listen("tcp", address) },
		guard:  func(f func() error) error { return f() },
	}
	for _, option := range options {
		option(l)
	}
	var err error
	if l.listener, err = l.listen(address); err != nil {
		return nil, fmt.Errorf("ZeroMQ socket: %w", err)
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.running.Go(l.accept)
	return l, nil
}

// Endpoint returns the endpoint for clients, tcp://host:port.
func (l *Listener) Endpoint() string { return "tcp://" + l.listener.Addr().String() }

// Close closes the socket and all connections at once; queued messages are lost. It
// returns when all goroutines have ended.
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
		select {
		case l.slots <- struct{}{}:
			l.running.Go(func() {
				defer func() { <-l.slots }()
				_ = l.guard(func() error { return l.follow(raw) })
			})
		default:
			l.refused.Add(1)
			_ = raw.Close()
		}
	}
}

// follow serves one connection until it ends.
func (l *Listener) follow(raw net.Conn) error {
	defer func() { _ = raw.Close() }() // where open has not come to it
	conn, err := open(l.ctx, raw, l.kind, true)
	if err != nil {
		return err
	}
	defer conn.Close()
	l.serve(conn)
	return nil
}

// Refused returns the number of connections closed because of the limit.
func (l *Listener) Refused() uint64 { return l.refused.Load() }

// maxRequest bounds the bytes of a request to a Router; a replay is requested with 8.
const maxRequest = 64 << 10

// Router is a ZeroMQ ROUTER socket that answers requests.
type Router struct{ *Listener }

// NewRouter returns a router that listens at address, host:port. answer is called
// for each request, concurrently for several peers; reply sends one message to the
// requesting peer. The request's frames are valid only during the call.
func NewRouter(address string, answer func(request [][]byte, reply func(frames ...[]byte) error), options ...Option) (*Router, error) {
	l, err := Listen(address, zmq4.Router, func(conn *Conn) {
		conn.Limit(maxRequest)
		for {
			request, err := conn.Recv()
			if err != nil {
				return
			}
			answer(request, conn.Send)
		}
	}, options...)
	return &Router{l}, err
}
