// Package zmq implements ZeroMQ connections with limits and deadlines, and PUB and ROUTER
// sockets.
package zmq

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
)

const (
	// handshakeLimit bounds connecting and the exchange of greetings.
	handshakeLimit = 5 * time.Second
	// messageLimit bounds how long the rest of a message may take once its
	// first byte is here.
	messageLimit = 30 * time.Second
	// maxMessage bounds the bytes of one message. A frame's length is sent
	// by the peer; a batch of events for a million tokens takes about 5 MB.
	maxMessage = 64 << 20
	// maxFrames bounds the frames of one message; vLLM sends three or four.
	maxFrames = 16
	// maxCommand bounds the bytes of a command after the handshake. A heartbeat,
	// the only one that is answered, has at most 23.
	maxCommand = 512
	// keptBuffer is how much memory a connection keeps from one message to the
	// next, bytes.
	keptBuffer = 4 << 20
)

// Flags of a ZMTP frame.
const (
	zmtpMore    = 1
	zmtpLong    = 2
	zmtpCommand = 4
)

// Conn is one ZeroMQ connection to one peer, read by one goroutine; any may
// send. The handshake is zmq4's, behind handshakeConn. Messages are read and written
// here, through a buffer and with deadlines: docs/architecture.md, "ZeroMQ sockets", says
// what zmq4's sockets lack. Nothing is queued in between, so a reader that is behind
// pushes back through TCP to the publisher's own queue.
type Conn struct {
	Conn   *zmq4.Conn // reads by zmq4 itself, commands too
	Raw    net.Conn   // closing it breaks the connection, as the death of a peer would
	in     *bufio.Reader
	frames [][]byte // of the last message; views of buf
	buf    []byte
	most   int           // bytes of a message that are read
	stop   func() bool   // ends the watch on the context
	ended  chan struct{} // closed when that watch has run

	sending sync.Mutex // guards writes: one message or command at a time
}

// DialSub is Dialer.DialSub over TCP and Unix sockets.
func DialSub(ctx context.Context, endpoint string, topics ...string) (*Conn, error) {
	return Dialer(nil).DialSub(ctx, endpoint, topics...)
}

// Dial is Dialer.Dial over TCP and Unix sockets.
func Dial(ctx context.Context, endpoint string, kind zmq4.SocketType) (*Conn, error) {
	return Dialer(nil).Dial(ctx, endpoint, kind)
}

// Dialer opens the connection below a Conn: network is "tcp" or "unix". A nil one opens
// sockets.
type Dialer func(ctx context.Context, network, address string) (net.Conn, error)

// DialSub connects to the PUB socket at endpoint ("tcp://host:port" or
// "ipc://path") and subscribes to topics, which are prefixes. The subscription
// takes effect when the publisher has received it: earlier messages are missed.
// When ctx ends, the connection is closed and a pending Wait or Recv returns.
func (d Dialer) DialSub(ctx context.Context, endpoint string, topics ...string) (*Conn, error) {
	c, err := d.Dial(ctx, endpoint, zmq4.Sub)
	if err != nil {
		return nil, err
	}
	for _, topic := range topics {
		if err := c.Send(append([]byte{1}, topic...)); err != nil {
			c.Close()
			return nil, fmt.Errorf("subscribe at %s: %w", endpoint, err)
		}
	}
	return c, nil
}

// Dial connects to endpoint as a socket of that kind. When ctx is done, the
// connection is closed.
func (d Dialer) Dial(ctx context.Context, endpoint string, kind zmq4.SocketType) (*Conn, error) {
	network, address, found := strings.Cut(endpoint, "://")
	switch {
	case found && network == "tcp":
	case found && network == "ipc":
		network = "unix"
	default:
		return nil, fmt.Errorf("endpoint %q: want tcp://host:port or ipc://path", endpoint)
	}
	if d == nil {
		d = dialSocket
	}
	raw, err := d(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", endpoint, err)
	}
	c, err := open(ctx, raw, kind, false)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", endpoint, err)
	}
	return c, nil
}

// dialSocket is the Dialer of sockets.
func dialSocket(ctx context.Context, network, address string) (net.Conn, error) {
	dialer := net.Dialer{
		Timeout: handshakeLimit,
		// ZMTP 3.0 has no heartbeat; without probes a peer that vanished is
		// never noticed.
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3},
	}
	return dialer.DialContext(ctx, network, address)
}

// open exchanges greetings with the peer at the other end of raw, which is
// closed when that fails, when ctx ends or by Close. server is whether this side
// accepted the connection.
func open(ctx context.Context, raw net.Conn, kind zmq4.SocketType, server bool) (*Conn, error) {
	c := &Conn{Raw: raw, in: bufio.NewReaderSize(raw, 16<<10), most: maxMessage, ended: make(chan struct{})}
	c.stop = context.AfterFunc(ctx, func() {
		defer close(c.ended)
		_ = raw.Close()
	})
	_ = raw.SetDeadline(time.Now().Add(handshakeLimit))
	var err error
	c.Conn, err = zmq4.Open(newHandshakeConn(raw, c.in), null.Security(), kind, nil, server, nil)
	if err != nil {
		c.Close()
		return nil, err
	}
	_ = raw.SetDeadline(time.Time{})
	return c, nil
}

// Limit sets the maximum size of later messages, bytes; the default is 64 MB. A
// larger message is an error that ends reading.
func (c *Conn) Limit(bytes int) { c.most = min(bytes, maxMessage) }

// Wait returns true when a message begins to arrive, and false at the time until;
// the zero time waits indefinitely.
func (c *Conn) Wait(until time.Time) (bool, error) {
	if c.in.Buffered() > 0 {
		return true, nil
	}
	_ = c.Raw.SetReadDeadline(until) // fails on a closed connection, as does Peek
	_, err := c.in.Peek(1)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return false, nil
	}
	return err == nil, err
}

// Recv returns the frames of the next message; they are valid until the next
// call. It waits for the message; use Wait to bound that.
func (c *Conn) Recv() ([][]byte, error) {
	for {
		frames, err := c.Next()
		if frames != nil || err != nil {
			return frames, err
		}
	}
}

// Next is Recv, but also returns, without frames, after a command such as a
// heartbeat, which proves that the peer is alive.
func (c *Conn) Next() ([][]byte, error) {
	if _, err := c.in.Peek(1); err != nil {
		return nil, err
	}
	_ = c.Raw.SetReadDeadline(time.Now().Add(messageLimit))
	command, err := c.readMessage()
	_ = c.Raw.SetReadDeadline(time.Time{})
	if err != nil {
		return nil, err
	}
	if command {
		return nil, c.answer(c.frames[0])
	}
	return c.frames, nil
}

// Send sends one message. It may block while the peer does not read; the end of the
// connection's ctx unblocks it.
func (c *Conn) Send(frames ...[]byte) error {
	return c.sendEncoded(encode(frames))
}

// sendEncoded sends what encode has encoded.
func (c *Conn) sendEncoded(message []byte) error {
	c.sending.Lock()
	defer c.sending.Unlock()
	_ = c.Raw.SetWriteDeadline(time.Now().Add(messageLimit))
	_, err := c.Raw.Write(message)
	return err
}

// encode returns a message of frames as it goes over the wire.
func encode(frames [][]byte) []byte {
	size := 0
	for _, frame := range frames {
		size += 9 + len(frame)
	}
	out := make([]byte, 0, size)
	for i, frame := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = zmtpMore
		}
		if len(frame) > 255 {
			out = binary.BigEndian.AppendUint64(append(out, flags|zmtpLong), uint64(len(frame)))
		} else {
			out = append(out, flags, byte(len(frame)))
		}
		out = append(out, frame...)
	}
	return out
}

// Close closes the connection and ends its goroutines.
func (c *Conn) Close() {
	_ = c.Raw.Close()
	if !c.stop() {
		<-c.ended
	}
}

// readMessage reads the frames of one message, or one command.
func (c *Conn) readMessage() (command bool, err error) {
	var ends [maxFrames]int
	n := 0
	if c.buf = c.buf[:0]; cap(c.buf) > keptBuffer {
		c.buf = nil
	}
	for more := true; more; n++ {
		if n == maxFrames {
			return false, fmt.Errorf("message has more than %d frames", maxFrames)
		}
		flags, size, err := readHeader(c.in)
		if err != nil {
			return false, err
		}
		more, command = flags&zmtpMore != 0, flags&zmtpCommand != 0
		switch {
		case flags&^(zmtpMore|zmtpLong|zmtpCommand) != 0:
			return false, fmt.Errorf("frame has unknown flags %#x", flags)
		case command && (more || n > 0):
			return false, errors.New("peer sent a command within a message")
		case command && size > maxCommand:
			return false, fmt.Errorf("command is larger than %d bytes", maxCommand)
		case size > uint64(max(0, c.most-len(c.buf))):
			return false, fmt.Errorf("message is larger than %d bytes", c.most)
		}
		if err := c.readBody(int(size)); err != nil {
			return false, err
		}
		ends[n] = len(c.buf)
	}
	c.frames = c.frames[:0]
	start := 0
	for _, end := range ends[:n] {
		c.frames = append(c.frames, c.buf[start:end:end])
		start = end
	}
	return command, nil
}

// readHeader reads what stands before a frame's body: its flags and its size.
func readHeader(in io.Reader) (flags byte, size uint64, err error) {
	var header [9]byte
	if _, err := io.ReadFull(in, header[:2]); err != nil {
		return 0, 0, err
	}
	if header[0]&zmtpLong == 0 {
		return header[0], uint64(header[1]), nil
	}
	if _, err := io.ReadFull(in, header[2:]); err != nil {
		return 0, 0, err
	}
	return header[0], binary.BigEndian.Uint64(header[1:]), nil
}

// readBody appends size bytes to the buffer, which grows with the bytes
// received, not with the announced size.
func (c *Conn) readBody(size int) error {
	const step = 1 << 20
	for size > 0 {
		n := min(size, step)
		start := len(c.buf)
		if free := cap(c.buf) - start; free < n {
			c.buf = append(c.buf, make([]byte, n)...)
		}
		c.buf = c.buf[:start+n]
		if _, err := io.ReadFull(c.in, c.buf[start:]); err != nil {
			return err
		}
		size -= n
	}
	return nil
}

// answer replies to a heartbeat; other commands of a peer need none.
func (c *Conn) answer(command []byte) error {
	if len(command) < 1 || int(command[0]) > len(command)-1 {
		return errors.New("peer sent a malformed command")
	}
	name, body := command[1:1+command[0]], command[1+command[0]:]
	if string(name) != zmq4.CmdPing {
		return nil
	}
	if len(body) > 2 { // two bytes of time to live, then the context to return
		body = body[2:]
	} else {
		body = nil
	}
	c.sending.Lock()
	defer c.sending.Unlock()
	_ = c.Raw.SetWriteDeadline(time.Now().Add(messageLimit))
	return c.Conn.SendCmd(zmq4.CmdPong, body)
}
