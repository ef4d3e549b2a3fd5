package zmq

import (
	"bytes"
	"slices"
	"sync"

	"github.com/go-zeromq/zmq4"
)

// QueueLimit is how many messages wait for one subscriber that reads too slowly.
// What comes when the queue is full is lost for that subscriber, as with libzmq.
const QueueLimit = 10_000

// Publisher is a ZeroMQ PUB socket with a bounded queue for each subscriber.
// zmq4's own has one unbounded queue and leaves goroutines behind. Its methods
// are safe for concurrent use.
type Publisher struct {
	*Listener

	mu          sync.Mutex // guards subscribers and what they hold
	subscribers map[*subscriber]bool
}

// subscriber is one connected reader.
type subscriber struct {
	topics []string    // prefixes that it asked for
	queue  chan []byte // encoded messages; closed when it has gone
}

// NewPublisher returns a publisher that listens at address, host:port.
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
