package zmq

import (
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
)

func TestListenerHasSoManyConnectionsAtATime(t *testing.T) {
	p := NewTestPublisher(t)
	address := strings.TrimPrefix(p.Endpoint(), "tcp://")
	var idle []net.Conn
	for range maxConnections {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		idle = append(idle, c)
	}
	Eventually(t, 20*time.Second, "all are served", func() bool { return len(p.slots) == maxConnections })
	more, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer more.Close()
	_ = more.SetReadDeadline(time.Now().Add(20 * time.Second))
	if n, err := more.Read(make([]byte, 1)); n != 0 || err == nil || isTimeout(err) {
		t.Errorf("one more reads %d bytes, %v", n, err)
	}
	if n := p.Refused(); n != 1 {
		t.Errorf("%d refused", n)
	}
	for _, c := range idle {
		c.Close()
	}
	Eventually(t, 20*time.Second, "they are forgotten", func() bool { return len(p.slots) == 0 })
	subscribe(t, p, "") // there is room again
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func TestListenerLivesOnAfterAPanicOfOneConnection(t *testing.T) {
	caught := make(chan any, 1)
	first := true
	l, err := Listen("127.0.0.1:0", zmq4.Pub, func(conn *Conn) {
		if first {
			first = false
			panic("a parser's")
		}
		_ = conn.Send([]byte("well"))
		_, _ = conn.Recv()
	}, WithGuard(func(f func() error) (err error) {
		defer func() {
			if cause := recover(); cause != nil {
				caught <- cause
			}
		}()
		return f()
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := DialSub(t.Context(), l.Endpoint(), "")
	if err == nil { // the greeting went well; the rest does not
		if _, err := conn.Recv(); err == nil {
			t.Error("a connection whose server has panicked lives on")
		}
		conn.Close()
	}
	if cause := <-caught; cause != "a parser's" {
		t.Error(cause)
	}
	next, err := DialSub(t.Context(), l.Endpoint(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	if frames, err := next.Recv(); err != nil || string(frames[0]) != "well" {
		t.Errorf("%q, %v", frames, err)
	}
}

func TestPublisherEndsWhoAsksForTooMuch(t *testing.T) {
	for name, ask := range map[string]func(c *Conn){ // sending may fail: the end comes meanwhile
		"too many topics": func(c *Conn) {
			for i := range maxTopics + 1 {
				_ = c.Send([]byte{1, byte(i)})
			}
		},
		"a topic that is too long": func(c *Conn) { _ = c.Send(append([]byte{1}, strings.Repeat("t", maxTopic)...)) },
	} {
		t.Run(name, func(t *testing.T) {
			p := NewTestPublisher(t)
			c := subscribe(t, p, "")
			ask(c)
			_ = c.Raw.SetReadDeadline(time.Now().Add(20 * time.Second))
			if _, err := io.ReadAll(c.Raw); isTimeout(err) {
				t.Error("the connection lives on")
			}
			Eventually(t, 20*time.Second, "forgotten", func() bool { return p.Subscribers() == 0 })
		})
	}
}

func TestPublisherKeepsSoManyBytesForASubscriber(t *testing.T) {
	p := NewTestPublisher(t)
	slow := subscribe(t, p, "")
	message := make([]byte, 1<<20)
	for range 3 * queueBytes / len(message) {
		p.Publish(message)
	}
	p.mu.Lock()
	for s := range p.subscribers {
		if n := s.waiting.Load(); n > queueBytes {
			t.Errorf("%d bytes wait", n)
		}
	}
	p.mu.Unlock()
	_ = slow.Raw.Close()
	Eventually(t, 20*time.Second, "forgotten", func() bool { return p.Subscribers() == 0 })
}
