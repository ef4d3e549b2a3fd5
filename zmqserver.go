package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
)

// zmqQueue is how many messages wait for one subscriber that reads too slowly;
// what comes when it is full is lost for that subscriber, as with libzmq.
const zmqQueue = 10_000

// acceptRetry is the pause after a connection could not be accepted.
const acceptRetry = 50 * time.Millisecond

// zmqListener accepts ZeroMQ connections at one address and hands each to serve
// in a goroutine of its own. All of them end with Close.
type zmqListener struct {
	listener net.Listener
	kind     zmq4.SocketType
	serve    func(*ZMQConn)
	ctx      context.Context // its end closes every connection
	cancel   context.CancelFunc
	running  sync.WaitGroup
}

func listenZMQ(address string, kind zmq4.SocketType, serve func(*ZMQConn)) (*zmqListener, error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("ZeroMQ socket: %w", err)
	}
	l := &zmqListener{listener: listener, kind: kind, serve: serve}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.running.Go(l.accept)
	return l, nil
}

// Endpoint is where to connect to, tcp://host:port.
func (l *zmqListener) Endpoint() string { return "tcp://" + l.listener.Addr().String() }

// Close ends the socket and all its connections at once: what waits to be sent
// is lost. It returns when every goroutine has ended.
func (l *zmqListener) Close() {
	_ = l.listener.Close()
	l.cancel()
	l.running.Wait()
}

func (l *zmqListener) accept() {
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
			conn, err := openZMQ(l.ctx, raw, l.kind, true)
			if err != nil {
				return
			}
			defer conn.Close()
			l.serve(conn)
		})
	}
}

// ZMQPublisher is a ZeroMQ PUB socket with a bounded queue for each subscriber.
// zmq4's own has one unbounded queue and leaves goroutines behind. Its methods
// are safe for concurrent use.
type ZMQPublisher struct {
	*zmqListener

	mu          sync.Mutex // guards subscribers and what they hold
	subscribers map[*zmqSubscriber]bool
}

// zmqSubscriber is one connected reader.
type zmqSubscriber struct {
	topics []string    // prefixes that it asked for
	queue  chan []byte // encoded messages; closed when it has gone
}

// NewZMQPublisher listens at address, host:port.
func NewZMQPublisher(address string) (*ZMQPublisher, error) {
	p := &ZMQPublisher{subscribers: map[*zmqSubscriber]bool{}}
	var err error
	p.zmqListener, err = listenZMQ(address, zmq4.Pub, p.follow)
	return p, err
}

// Publish sends a message to everyone who subscribed to a prefix of its first
// frame. It never waits. The frames may be reused afterwards.
func (p *ZMQPublisher) Publish(frames ...[]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var message []byte
	for s := range p.subscribers {
		wanted := slices.ContainsFunc(s.topics, func(topic string) bool { return bytes.HasPrefix(frames[0], []byte(topic)) })
		if !wanted {
			continue
		}
		if message == nil {
			message = encodeZMQ(frames)
		}
		select {
		case s.queue <- message:
		default:
		}
	}
}

// Subscribers returns how many subscriptions there are.
func (p *ZMQPublisher) Subscribers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for s := range p.subscribers {
		n += len(s.topics)
	}
	return n
}

// follow serves one reader until its connection ends.
func (p *ZMQPublisher) follow(conn *ZMQConn) {
	s := &zmqSubscriber{queue: make(chan []byte, zmqQueue)}
	p.mu.Lock()
	p.subscribers[s] = true
	p.mu.Unlock()
	var writer sync.WaitGroup
	writer.Go(func() { // ends with queue
		for message := range s.queue {
			if conn.sendEncoded(message) != nil {
				_ = conn.raw.Close() // ends the reading below, too
				for range s.queue {
				}
				return
			}
		}
	})
	for {
		frames, err := conn.Recv()
		if err != nil {
			break
		}
		p.subscribe(s, frames[0])
	}
	p.mu.Lock()
	delete(p.subscribers, s)
	close(s.queue)
	p.mu.Unlock()
	_ = conn.raw.Close()
	writer.Wait()
}

// subscribe takes a subscription (1, topic) or its end (0, topic).
func (p *ZMQPublisher) subscribe(s *zmqSubscriber, message []byte) {
	if len(message) == 0 {
		return
	}
	topic := string(message[1:])
	p.mu.Lock()
	defer p.mu.Unlock()
	switch message[0] {
	case 1:
		s.topics = append(s.topics, topic)
	case 0:
		if i := slices.Index(s.topics, topic); i >= 0 {
			s.topics = slices.Delete(s.topics, i, i+1)
		}
	}
}

// ZMQRouter is a ZeroMQ ROUTER socket that answers requests.
type ZMQRouter struct{ *zmqListener }

// NewZMQRouter listens at address, host:port. answer is called for each
// request, by several goroutines at once if there are several peers; reply
// sends one message back to the asking peer. The request's frames are valid
// during the call only.
func NewZMQRouter(address string, answer func(request [][]byte, reply func(frames ...[]byte) error)) (*ZMQRouter, error) {
	l, err := listenZMQ(address, zmq4.Router, func(conn *ZMQConn) {
		for {
			request, err := conn.Recv()
			if err != nil {
				return
			}
			answer(request, conn.Send)
		}
	})
	return &ZMQRouter{l}, err
}

// Break closes the connection in the middle of what it does, as a peer that dies
// would. Unlike Close it does not wait.
func (c *ZMQConn) Break() { _ = c.raw.Close() }

// RecvMsg is Recv that also shows the peer's commands, such as the answers to
// heartbeats.
func (c *ZMQConn) RecvMsg() (zmq4.Msg, error) { return c.conn.RecvMsg() }
