package zmq

import (
	"bytes"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-zeromq/zmq4"
)

// QueueLimit is the maximum number of queued messages for a slow subscriber.
// Further messages are lost for that subscriber, as with libzmq.
const QueueLimit = 10_000

// Bounds of what one subscriber may take.
const (
	queueBytes     = 64 << 20         // of messages that wait for it; further ones are lost for it
	maxTopics      = 64               // that it has requested
	maxTopic       = 1 << 10          // bytes of a message in which it requests one
	subscribeLimit = 10 * time.Second // until it requests the first
)

// Publisher is a ZeroMQ PUB socket with a bounded queue for each subscriber.
// zmq4's own has one unbounded queue and leaves goroutines behind. Its methods
// are safe for concurrent use.
type Publisher struct {
	*Listener

	mu          sync.Mutex // guards subscribers and their fields
	subscribers map[*subscriber]bool
	joined      uint64
}

// subscriber is one connected reader.
type subscriber struct {
	topics []string    // prefixes that it requested
	queue  chan []byte // encoded messages; closed when it has gone

	waiting atomic.Int64 // bytes in queue
}

// NewPublisher returns a publisher that listens at address, host:port.
func NewPublisher(address string, options ...Option) (*Publisher, error) {
	p := &Publisher{subscribers: map[*subscriber]bool{}}
	var err error
	p.Listener, err = Listen(address, zmq4.Pub, p.follow, options...)
	return p, err
}

// Publish sends a message to all subscribers of a prefix of its first
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
		if s.waiting.Load()+int64(len(message)) > queueBytes {
			continue
		}
		select {
		case s.queue <- message:
			s.waiting.Add(int64(len(message)))
		default:
		}
	}
}

// Subscribers returns the number of subscriptions.
func (p *Publisher) Subscribers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for s := range p.subscribers {
		n += len(s.topics)
	}
	return n
}

// Joined returns the number of subscriptions so far.
func (p *Publisher) Joined() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.joined
}

// follow serves one reader until its connection ends.
func (p *Publisher) follow(conn *Conn) {
	conn.Limit(maxTopic)
	if ready, err := conn.Wait(time.Now().Add(subscribeLimit)); !ready || err != nil {
		return
	}
	s := &subscriber{queue: make(chan []byte, QueueLimit)}
	p.mu.Lock()
	p.subscribers[s] = true
	p.mu.Unlock()
	var writer sync.WaitGroup
	writer.Go(func() { // ends with queue
		for message := range s.queue {
			s.waiting.Add(-int64(len(message)))
			if conn.sendEncoded(message) != nil {
				_ = conn.Raw.Close() // ends the reading below, too
				for range s.queue {
				}
				return
			}
		}
	})
	defer func() {
		p.mu.Lock()
		delete(p.subscribers, s)
		close(s.queue)
		p.mu.Unlock()
		_ = conn.Raw.Close()
		writer.Wait()
	}()
	for {
		frames, err := conn.Recv()
		if err != nil || !p.subscribe(s, frames[0]) {
			return
		}
	}
}

// subscribe takes a subscription (1, topic) or its end (0, topic). Not ok: there
// are too many.
func (p *Publisher) subscribe(s *subscriber, message []byte) (ok bool) {
	if len(message) == 0 {
		return true
	}
	topic := string(message[1:])
	p.mu.Lock()
	defer p.mu.Unlock()
	switch message[0] {
	case 1:
		s.topics = append(s.topics, topic)
		p.joined++
	case 0:
		if i := slices.Index(s.topics, topic); i >= 0 {
			s.topics = slices.Delete(s.topics, i, i+1)
		}
	}
	return len(s.topics) <= maxTopics
}
