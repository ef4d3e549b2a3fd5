package proxy

import (
	"encoding/binary"
	"net"
	"sync"
)

// Codes with which a WebSocket connection is closed (RFC 6455, section 7.4.1).
const (
	goingAway       = 1001
	policyViolation = 1008
)

const (
	// maxReason bounds the reason of a close frame, bytes.
	maxReason = 123
	// maxMessage bounds a message that is read, bytes; longer ones pass unread.
	maxMessage = 1 << 20
)

// socketConn is the client's end of a WebSocket connection. It sees where the worker's frames
// end, so that the router can close the connection between two of them.
type socketConn struct {
	net.Conn
	told func(message []byte) error // gets the worker's text messages; nil: they are not read

	mu     sync.Mutex // guards the rest, and writing
	sent   frames     // of the worker
	closed bool       // the router has closed it
}

// Write sends what comes from the worker.
func (c *socketConn) Write(b []byte) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, net.ErrClosed
	}
	if n, err = c.Conn.Write(b); err == nil {
		err = c.sent.take(b, c.told)
	}
	if err != nil && n == len(b) {
		c.end(policyViolation, err.Error())
	}
	return n, err
}

// leave closes the connection with a code and a reason.
func (c *socketConn) leave(code uint16, reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.end(code, reason)
}

// end is leave; c.mu is held. Within a frame of the worker, the client gets no reason.
func (c *socketConn) end(code uint16, reason string) {
	if c.closed {
		return
	}
	c.closed = true
	if c.sent.within() {
		return
	}
	reason = reason[:min(len(reason), maxReason)]
	frame := binary.BigEndian.AppendUint16([]byte{0x88, byte(2 + len(reason))}, code)
	_, _ = c.Conn.Write(append(frame, reason...))
}

// frames reads the frames of a server, which are not masked. The zero value is at the beginning
// of a connection.
type frames struct {
	head    [10]byte
	have    int    // bytes of the head
	left    uint64 // bytes of the payload
	reads   bool   // the message is of text, and not too long
	message []byte // as far as it has come
}

// within reports whether a frame has begun and not ended.
func (f *frames) within() bool { return f.have > 0 || f.left > 0 }

// take reads the next bytes, and hands each text message to told; nil: none is kept.
func (f *frames) take(b []byte, told func([]byte) error) (err error) {
	for len(b) > 0 && err == nil {
		if f.left == 0 && f.have < f.size() {
			f.head[f.have] = b[0]
			f.have++
			b = b[1:]
			if f.have < f.size() {
				continue
			}
			f.begin(told != nil)
		}
		n := int(min(uint64(len(b)), f.left))
		if f.reads && f.head[0]&0x8 == 0 {
			f.message = append(f.message, b[:n]...)
		}
		b, f.left = b[n:], f.left-uint64(n)
		if f.left == 0 && f.have == f.size() {
			err = f.end(told)
		}
	}
	return err
}

// size returns the length of the head, as far as it is known.
func (f *frames) size() int {
	switch {
	case f.have < 2 || f.head[1]&0x7f < 126:
		return 2
	case f.head[1]&0x7f == 126:
		return 4
	}
	return 10
}

// begin reads a head.
func (f *frames) begin(keep bool) {
	switch short := f.head[1] & 0x7f; short {
	case 126:
		f.left = uint64(binary.BigEndian.Uint16(f.head[2:]))
	case 127:
		f.left = binary.BigEndian.Uint64(f.head[2:])
	default:
		f.left = uint64(short)
	}
	if opcode := f.head[0] & 0xf; opcode == 1 || opcode == 2 { // a message begins
		f.reads, f.message = keep && opcode == 1, f.message[:0]
	}
	if f.head[0]&0x8 == 0 && uint64(len(f.message))+f.left > maxMessage {
		f.reads, f.message = false, nil
	}
}

// end ends a frame, and its message if it is the last.
func (f *frames) end(told func([]byte) error) (err error) {
	last, control := f.head[0]&0x80 != 0, f.head[0]&0x8 != 0
	if last && !control && f.reads {
		err, f.reads = told(f.message), false
	}
	f.have = 0
	return err
}
