package zmq

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

// ZmqQueue is how many messages wait for one subscriber that reads too slowly;
// what comes when it is full is lost for that subscriber, as with libzmq.
const QueueLimit = 10_000

// acceptRetry is the pause after a connection could not be accepted.
const acceptRetry = 50 * time.Millisecond

// zmqListener accepts ZeroMQ connections at one address and hands each to serve
// in a goroutine of its own. All of them end with Close.
type Listener struct {
	listener net.Listener
	kind     zmq4.SocketType
	serve    func(*Conn)
	ctx      context.Context // its end closes every connection
	cancel   context.CancelFunc
	running  sync.WaitGroup
}

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

// Endpoint is where to connect to, tcp://host:port.
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

// ZMQPublisher is a ZeroMQ PUB socket with a bounded queue for each subscriber.
// zmq4's own has one unbounded queue and leaves goroutines behind. Its methods
// are safe for concurrent use.
type Publisher struct {
	*Listener

	mu          sync.Mutex // guards subscribers and what they hold
	subscribers map[*subscriber]bool
}

// zmqSubscriber is one connected reader.
type subscriber struct {
	topics []string    // prefixes that it asked for
	queue  chan []byte // encoded messages; closed when it has gone
}

// NewZMQPublisher listens at address, host:port.
func NewPublisher(address string) (*Publisher, error) {
	p := &Publisher{subscribers: map[*subscriber]bool{}}
	var err error
	p.Listener, err = Listen(address, zmq4.Pub, p.follow)
	return p, err
}

// Publish sends a message to everyone who subscribed to a prefix of its first
// frame. It never waits. The frames may be reused afterwards.
func (p *Publisher) Publish(frames ...[]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var message []byte
	for s := range p.subscribers {
		wanted := slices.ContainsFunc(s.topics, func(topic string) bool { return bytes.HasPrefix(frames[0], []byte(topic)) })
		if !wanted {
			continue
		}
		if message == nil {
			message = encode(frames)
		}
		select {
		case s.queue <- message:
		default:
		}
	}
}

// Subscribers returns how many subscriptions there are.
func (p *Publisher) Subscribers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for s := range p.subscribers {
		n += len(s.topics)
	}
	return n
}

// follow serves one reader until its connection ends.
func (p *Publisher) follow(conn *Conn) {
	s := &subscriber{queue: make(chan []byte, QueueLimit)}
	p.mu.Lock()
	p.subscribers[s] = true
	p.mu.Unlock()
	var writer sync.WaitGroup
	writer.Go(func() { // ends with queue
		for message := range s.queue {
			if conn.sendEncoded(message) != nil {
				_ = conn.Raw.Close() // ends the reading below, too
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
	_ = conn.Raw.Close()
	writer.Wait()
}

// subscribe takes a subscription (1, topic) or its end (0, topic).
func (p *Publisher) subscribe(s *subscriber, message []byte) {
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
type Router struct{ *Listener }

// NewZMQRouter listens at address, host:port. answer is called for each
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

// Break closes the connection in the middle of what it does, as a peer that dies
// would. Unlike Close it does not wait.
func (c *Conn) Break() { _ = c.Raw.Close() }

// RecvMsg is Recv that also shows the peer's commands, such as the answers to
// heartbeats.
func (c *Conn) RecvMsg() (zmq4.Msg, error) { return c.Conn.RecvMsg() }
