package zmq

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/go-zeromq/zmq4"
)

// Bounds of a peer's bytes before its first message (ZMTP 3.0, rfc.zeromq.org/spec/23).
const (
	greetingSize = 64  // bytes
	maxReady     = 512 // bytes of READY; libzmq sends about 40, with the longest identity 290
)

// handshakeConn lets zmq4 read a peer's greeting and its READY command, each only
// once it has come whole and was checked: zmq4 v0.17 takes memory for any length
// that a peer announces, and panics at an unknown socket type and at properties
// that are cut short. Of READY it gets the socket type only, in our own words.
// After that it reads what comes.
type handshakeConn struct {
	net.Conn
	in    *bufio.Reader
	steps []func(io.Reader) ([]byte, error) // read and check what comes next of the handshake
	rest  []byte                            // checked, and not yet read by zmq4
}

func newHandshakeConn(raw net.Conn, in *bufio.Reader) *handshakeConn {
	return &handshakeConn{Conn: raw, in: in, steps: []func(io.Reader) ([]byte, error){readGreeting, readReady}}
}

// Read implements net.Conn.
func (h *handshakeConn) Read(p []byte) (n int, err error) {
	if len(h.rest) == 0 && len(h.steps) > 0 {
		if h.rest, err = h.steps[0](h.in); err != nil {
			return 0, err
		}
		h.steps = h.steps[1:]
	}
	if len(h.rest) == 0 {
		return h.in.Read(p)
	}
	n = copy(p, h.rest)
	h.rest = h.rest[n:]
	return n, nil
}

// readGreeting returns a peer's greeting.
func readGreeting(in io.Reader) ([]byte, error) {
	greeting := make([]byte, greetingSize)
	if n, err := io.ReadFull(in, greeting); err != nil {
		return nil, fmt.Errorf("greeting ended after %d of %d bytes: %w", n, greetingSize, err)
	}
	mechanism, _, _ := bytes.Cut(greeting[12:32], []byte{0})
	switch {
	case greeting[0] != 0xff || greeting[9] != 0x7f:
		return nil, fmt.Errorf("the peer is not a ZeroMQ socket: its greeting starts with %q", greeting[:10])
	case greeting[10] < 3:
		return nil, fmt.Errorf("peer speaks ZMTP %d, want 3 or later", greeting[10])
	case string(mechanism) != string(zmq4.NullSecurity):
		return nil, fmt.Errorf("peer uses the security mechanism %q, want %s", mechanism, zmq4.NullSecurity)
	case greeting[32] > 1:
		return nil, fmt.Errorf("greeting has %d in the as-server field, want 0 or 1", greeting[32])
	}
	return greeting, nil
}

// readReady reads a peer's READY command and returns one that says the same of the
// peer's socket type, and nothing else.
func readReady(in io.Reader) ([]byte, error) {
	flags, size, err := readHeader(in)
	switch {
	case err != nil:
		return nil, fmt.Errorf("peer's READY: %w", err)
	case flags&^zmtpLong != zmtpCommand:
		return nil, fmt.Errorf("peer's first frame has the flags %#x, want those of one command", flags)
	case size > maxReady:
		return nil, fmt.Errorf("peer's READY has %d bytes, want at most %d", size, maxReady)
	}
	body := make([]byte, size)
	if n, err := io.ReadFull(in, body); err != nil {
		return nil, fmt.Errorf("peer's READY ended after %d of %d bytes: %w", n, size, err)
	}
	kind, err := socketType(body)
	if err != nil {
		return nil, fmt.Errorf("peer's READY: %w", err)
	}
	ready := append([]byte{zmtpCommand, 0}, "\x05READY\x0bSocket-Type"...)
	ready = append(binary.BigEndian.AppendUint32(ready, uint32(len(kind))), kind...)
	ready[1] = byte(len(ready) - 2)
	return ready, nil
}

// errCutShort means that a command ends within a name or a value.
var errCutShort = errors.New("truncated")

// socketType returns the socket type that a READY command names. Every property
// must be whole, and the type one that zmq4 knows.
func socketType(command []byte) (kind zmq4.SocketType, err error) {
	name, rest, ok := cutName(command)
	if !ok {
		return "", errCutShort
	}
	if name != zmq4.CmdReady {
		return "", fmt.Errorf("unexpected command %q", name)
	}
	for len(rest) > 0 {
		if name, rest, ok = cutName(rest); !ok || len(rest) < 4 {
			return "", errCutShort
		}
		size := uint64(binary.BigEndian.Uint32(rest))
		if rest = rest[4:]; size > uint64(len(rest)) {
			return "", errCutShort
		}
		value := zmq4.SocketType(rest[:size])
		rest = rest[size:]
		if !strings.EqualFold(name, "Socket-Type") {
			continue
		}
		if kind != "" {
			return "", errors.New("two socket types")
		}
		switch kind = value; kind {
		case zmq4.Pair, zmq4.Pub, zmq4.Sub, zmq4.Req, zmq4.Rep, zmq4.Dealer, zmq4.Router, zmq4.Pull, zmq4.Push, zmq4.XPub, zmq4.XSub:
		default:
			return "", fmt.Errorf("unknown socket type %q", value)
		}
	}
	if kind == "" {
		return "", errors.New("no socket type")
	}
	return kind, nil
}

// cutName takes a name of 1 to 255 bytes off, before which stands its length.
func cutName(text []byte) (name string, rest []byte, ok bool) {
	if len(text) == 0 || text[0] == 0 || int(text[0]) > len(text)-1 {
		return "", nil, false
	}
	n := 1 + int(text[0])
	return string(text[1:n]), text[n:], true
}
