package proxy

import (
	"encoding/binary"
	"net"
	"sync"

	"kvrouter/internal/base/web"
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

	mu     sync.Mutex // guards the rest, and writing; told is called under it
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
	if c.sent.Within() {
		return
	}
	reason = reason[:min(len(reason), maxReason)]
	frame := binary.BigEndian.AppendUint16([]byte{0x88, byte(2 + len(reason))}, code)
	_, _ = c.Conn.Write(append(frame, reason...))
}

// frames reads the messages of a server. The zero value is at the beginning of a connection.
type frames struct {
	web.Frame
	reads   bool   // the message is of text, and not too long
	message []byte // as far as it has come
}

// take reads the next bytes, and hands each text message to told; nil: none is kept.
func (f *frames) take(b []byte, told func([]byte) error) (err error) {
	for len(b) > 0 && err == nil {
		if f.InHead() {
			whole := f.Head(b[0])
			if b = b[1:]; !whole {
				continue
			}
			f.begin(told != nil)
		}
		n := min(uint64(len(b)), f.Left())
		if f.reads && !f.IsControl() {
			f.message = append(f.message, b[:n]...)
		}
		b = b[n:]
		if f.Pass(n) {
			err = f.end(told)
		}
	}
	return err
}

// begin begins a frame.
func (f *frames) begin(keep bool) {
	if f.BeginsMessage() {
		f.reads, f.message = keep && f.IsText(), f.message[:0]
	}
	if !f.IsControl() && f.Left() > uint64(maxMessage-len(f.message)) {
		f.reads, f.message = false, nil
	}
}

// end ends a frame, and its message if it is the last.
func (f *frames) end(told func([]byte) error) (err error) {
	if f.IsLast() && !f.IsControl() && f.reads {
		err, f.reads = told(f.message), false
	}
	return err
}
