package zmq

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/transport"
)

// This file compares zmq4's sockets with this package; docs/architecture.md, "ZeroMQ
// sockets", has the results.

// checked is a transport for zmq4's sockets whose connections read through a buffer and
// check the heads of frames as readMessage does.
type checked struct{ transport.Transport }

func (c checked) Dial(ctx context.Context, dialer transport.Dialer, address string) (net.Conn, error) {
	raw, err := c.Transport.Dial(ctx, dialer, address)
	if err != nil {
		return nil, err
	}
	in := bufio.NewReaderSize(raw, 16<<10)
	return &checkedConn{handshakeConn: newHandshakeConn(raw, in)}, nil
}

// checkedConn is a connection of checked.
type checkedConn struct {
	*handshakeConn
	body, total, frames int // bytes to come of a frame's body; bytes and frames of its message
}

func (c *checkedConn) Read(p []byte) (int, error) {
	if len(c.steps) > 0 || len(c.rest) > 0 { // the handshake, or a head
		return c.handshakeConn.Read(p)
	}
	if c.body == 0 {
		if c.frames == 0 {
			if _, err := c.in.Peek(1); err != nil {
				return 0, err
			}
			_ = c.SetReadDeadline(time.Now().Add(messageLimit))
		}
		flags, size, err := readHeader(c.in)
		switch {
		case err != nil:
			return 0, err
		case flags&^(zmtpMore|zmtpLong) != 0 || c.frames == maxFrames || size > uint64(maxMessage-c.total):
			return 0, fmt.Errorf("frame has the flags %#x, %d bytes, in a message of %d frames, %d bytes", flags, size, c.frames, c.total)
		}
		if c.rest = append(c.rest, flags); flags&zmtpLong == 0 {
			c.rest = append(c.rest, byte(size))
		} else {
			c.rest = binary.BigEndian.AppendUint64(c.rest, size)
		}
		c.body, c.total, c.frames = int(size), c.total+int(size), c.frames+1
		if flags&zmtpMore == 0 {
			c.total, c.frames = 0, 0
		}
		return c.handshakeConn.Read(p)
	}
	n, err := c.in.Read(p[:min(len(p), c.body)])
	if c.body -= n; c.body == 0 && c.frames == 0 {
		_ = c.SetReadDeadline(time.Time{})
	}
	return n, err
}

// BenchmarkReceive takes event batches from a TCP connection. The CPU time includes the
// sender's.
func BenchmarkReceive(b *testing.B) {
	_ = zmq4.RegisterTransport("checked", checked{transport.New("tcp")}) // an error: it is registered already
	for _, size := range []int{760, 9610} {                              // batches of 8 and of 128 blocks of 16 tokens
		message := encode([][]byte{[]byte("kv-events"), make([]byte, 8), make([]byte, size)})
		b.Run(fmt.Sprintf("bytes=%d/sockets=ours", size), func(b *testing.B) {
			address, _ := repeat(b, message)
			conn, err := DialSub(b.Context(), "tcp://"+address, "kv")
			if err != nil {
				b.Fatal(err)
			}
			defer conn.Close()
			receive(b, func() ([][]byte, error) {
				if _, err := conn.Wait(time.Now().Add(time.Minute)); err != nil {
					return nil, err
				}
				return conn.Recv()
			})
		})
		b.Run(fmt.Sprintf("bytes=%d/sockets=zmq4", size), func(b *testing.B) {
			address, stop := repeat(b, message)
			socket := zmq4.NewSub(b.Context())
			if err := socket.Dial("checked://" + address); err != nil {
				b.Fatal(err)
			}
			receive(b, func() ([][]byte, error) {
				msg, err := socket.Recv()
				return msg.Frames, err
			})
			stop()
			for err := error(nil); err == nil; { // its reader does not end while messages are queued
				_, err = socket.Recv()
			}
			_ = socket.Close()
		})
	}
}

// receive measures recv, which returns a message of three frames.
func receive(b *testing.B, recv func() ([][]byte, error)) {
	b.ReportAllocs()
	before := cpu(b)
	for b.Loop() {
		if frames, err := recv(); len(frames) != 3 || err != nil {
			b.Fatal(len(frames), err)
		}
	}
	b.ReportMetric(float64(cpu(b)-before)/float64(b.N), "cpu-ns/op")
}

// cpu returns the process's CPU time, ns.
func cpu(b *testing.B) int64 {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return used.Utime.Nano() + used.Stime.Nano()
}

// repeat sends message repeatedly to whoever connects to address, until stop or
// the end of the benchmark.
func repeat(b *testing.B, message []byte) (address string, stop func()) {
	l, err := Listen("127.0.0.1:0", zmq4.Pub, func(conn *Conn) {
		many := bytes.Repeat(message, 1+(256<<10)/len(message))
		for conn.sendEncoded(many) == nil {
		}
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(l.Close)
	return l.listener.Addr().String(), l.Close
}

// TestRouterPeersDoNotHoldUpEachOther logs what peers of zmq4's ROUTER do to each other.
func TestRouterPeersDoNotHoldUpEachOther(t *testing.T) {
	large := make([]byte, 1<<20)
	ours, err := NewRouter("127.0.0.1:0", func(_ [][]byte, reply func(...[]byte) error) { _ = reply(large) })
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	theirs := zmq4.NewRouter(t.Context(), zmq4.WithLogger(log.New(io.Discard, "", 0)))
	if err := theirs.Listen("tcp://127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	var answering sync.WaitGroup
	defer answering.Wait()
	defer func() { _ = theirs.Close() }()
	answering.Go(func() { // ends with theirs
		for msg, err := theirs.Recv(); err == nil; msg, err = theirs.Recv() {
			answering.Go(func() { _ = theirs.Send(zmq4.NewMsgFrom(msg.Frames[0], large)) })
		}
	})
	connects, answered := besideBadPeers(t, ours.Endpoint(), 20*time.Second)
	if !connects || !answered {
		t.Errorf("beside a silent peer one connects: %v; beside one that does not read one is answered: %v", connects, answered)
	}
	connects, answered = besideBadPeers(t, "tcp://"+theirs.Addr().String(), 300*time.Millisecond)
	t.Logf("zmq4: beside a silent peer one connects: %v; beside one that does not read one is answered: %v", connects, answered)
}

// besideBadPeers returns whether one can connect to the router at endpoint while another
// peer sends no greeting, and is answered while another does not read its answers.
func besideBadPeers(t *testing.T, endpoint string, limit time.Duration) (connects, answered bool) {
	t.Helper()
	silent, err := net.Dial("tcp", strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if conn, err := Dial(ctx, endpoint, zmq4.Dealer); err == nil {
		conn.Close()
		connects = true
	}
	silent.Close()

	ask := func(times int) *Conn {
		conn, err := Dial(t.Context(), endpoint, zmq4.Dealer)
		if err != nil {
			t.Fatal(err)
		}
		for range times {
			if err := conn.Send([]byte("request")); err != nil {
				t.Fatal(err)
			}
		}
		return conn
	}
	greedy := ask(20)
	defer greedy.Close()
	<-time.After(100 * time.Millisecond) // until its answers fill the connection
	polite := ask(1)
	defer polite.Close()
	answered, _ = polite.Wait(time.Now().Add(limit))
	return connects, answered
}
