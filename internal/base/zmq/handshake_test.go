package zmq

import (
	"bytes"
	"encoding/binary"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
)

// goodGreeting is what libzmq 4.3 begins with.
var goodGreeting = "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL" + strings.Repeat("\x00", 48)

// property is one of READY's.
func property(name, value string) string {
	return string(rune(len(name))) + name + string(binary.BigEndian.AppendUint32(nil, uint32(len(value)))) + value
}

// readyCommand is a READY command of these properties.
func readyCommand(properties ...string) string {
	body := "\x05READY" + strings.Join(properties, "")
	if len(body) > 255 {
		return "\x06" + string(binary.BigEndian.AppendUint64(nil, uint64(len(body)))) + body
	}
	return "\x04" + string([]byte{byte(len(body))}) + body
}

// said is a connection whose peer says so much at once and hears nothing.
type said struct {
	net.Conn
	*bytes.Reader
}

func (s said) Read(p []byte) (int, error)     { return s.Reader.Read(p) }
func (said) Write(p []byte) (int, error)      { return len(p), nil }
func (said) Close() error                     { return nil }
func (said) SetDeadline(time.Time) error      { return nil }
func (said) SetReadDeadline(time.Time) error  { return nil }
func (said) SetWriteDeadline(time.Time) error { return nil }

// shake opens a connection to a peer that says so much.
func shake(t testing.TB, words string, kind zmq4.SocketType, server bool) (*Conn, error) {
	t.Helper()
	return open(t.Context(), said{Reader: bytes.NewReader([]byte(words))}, kind, server)
}

func TestHandshakeTakesWhatPeersSay(t *testing.T) {
	pub := property("Socket-Type", "PUB")
	for name, ready := range map[string]string{
		"libzmq":                    readyCommand(pub, property("Identity", "")),
		"the type alone":            readyCommand(pub),
		"the type last":             readyCommand(property("Identity", "me"), property("X-Trace", "1"), pub),
		"another case":              readyCommand(property("SOCKET-type", "PUB")),
		"the longest identity":      readyCommand(pub, property("Identity", strings.Repeat("i", 255))),
		"a long header for a short": "\x06" + strings.Repeat("\x00", 7) + readyCommand(pub)[1:],
	} {
		for _, server := range []bool{false, true} {
			c, err := shake(t, goodGreeting+ready+"\x00\x02hi", zmq4.Sub, server)
			if err != nil {
				t.Errorf("%s, server %v: %v", name, server, err)
				continue
			}
			if frames, err := c.Recv(); err != nil || len(frames) != 1 || string(frames[0]) != "hi" {
				t.Errorf("%s, server %v: %q, %v", name, server, frames, err)
			}
			c.Close()
		}
	}
}

// TestHandshakeRefusesWhatZmq4CannotTake has what made zmq4 panic, or take memory
// for what was announced only.
func TestHandshakeRefusesWhatZmq4CannotTake(t *testing.T) {
	pub := property("Socket-Type", "PUB")
	size := func(n uint64) string { return "\x06" + string(binary.BigEndian.AppendUint64(nil, n)) }
	for _, c := range []struct{ name, words, want string }{
		{"nothing", "", "greeting ended after 0 of 64 bytes"},
		{"half a greeting", goodGreeting[:30], "after 30 of 64"},
		{"an HTTP server", "HTTP/1.1 400 Bad Request\r\n" + strings.Repeat(" ", 64), "not a ZeroMQ socket"},
		{"ZMTP 2", goodGreeting[:10] + "\x02" + goodGreeting[11:], "ZMTP 2"},
		{"another mechanism", strings.Replace(goodGreeting, "NULL", "CURV", 1), "mechanism"},
		{"a command of 2^62 bytes", goodGreeting + size(1<<62), "want at most 512"},
		{"a command of 40 GiB", goodGreeting + size(40<<30), "want at most 512"},
		{"a command of 513 bytes", goodGreeting + size(513), "want at most 512"},
		{"a message", goodGreeting + "\x00\x05READY", "flags 0x0"},
		{"two frames", goodGreeting + "\x05\x05READY", "flags 0x5"},
		{"an unknown type", goodGreeting + readyCommand(property("Socket-Type", "FOO")), "unknown socket type"},
		{"an empty type", goodGreeting + readyCommand(property("Socket-Type", "")), "unknown socket type"},
		{"no type", goodGreeting + readyCommand(property("Identity", "x")), "no socket type"},
		{"two types", goodGreeting + readyCommand(pub, pub), "two socket types"},
		{"a type of no use", goodGreeting + readyCommand(property("Socket-Type", "PULL")), "not compatible"},
		{"another command", goodGreeting + "\x04\x06\x05ERROR", `command "ERROR"`},
		{"an empty command", goodGreeting + "\x04\x00", "truncated"},
		{"a name cut short", goodGreeting + "\x04\x08\x05READY\x0bS", "truncated"},
		{"a name without a value", goodGreeting + "\x04\x09\x05READY\x02ab", "truncated"},
		{"a length cut short", goodGreeting + "\x04\x0a\x05READY\x01a\x00\x00", "truncated"},
		{"a value of 4 GiB", goodGreeting + "\x04\x0c\x05READY\x01a\xff\xff\xff\xff", "truncated"},
		{"an empty name", goodGreeting + "\x04\x07\x05READY\x00", "truncated"},
		{"READY cut short", goodGreeting + "\x04\x30\x05READY", "ended after 6 of 48"},
	} {
		for _, server := range []bool{false, true} {
			if _, err := shake(t, c.words, zmq4.Sub, server); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s, server %v: %v, want %q", c.name, server, err, c.want)
			}
		}
	}
}

func FuzzHandshake(f *testing.F) {
	for _, ready := range []string{
		readyCommand(property("Socket-Type", "PUB"), property("Identity", "")), readyCommand(property("Socket-Type", "FOO")), readyCommand(property("socket-type", "ROUTER")),
		"\x06\x40\x00\x00\x00\x00\x00\x00\x00", "\x06\x00\x00\x00\x0a\x00\x00\x00\x00", "\x04\x0a\x05READY\x01a\x00\x00", "\x04\x00", "\x04\x06\x05ERROR", "",
	} {
		f.Add([]byte(goodGreeting+ready), uint8(0), false)
		f.Add([]byte(goodGreeting+ready+"\x00\x02\x01a"), uint8(1), true)
	}
	f.Add([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), uint8(2), false)
	f.Fuzz(func(t *testing.T, words []byte, kind uint8, server bool) {
		kinds := []zmq4.SocketType{zmq4.Sub, zmq4.Pub, zmq4.Dealer, zmq4.Router}
		if c, err := shake(t, string(words), kinds[int(kind)%len(kinds)], server); err == nil {
			c.Close()
		}
	})
}

func FuzzReadMessage(f *testing.F) {
	for _, words := range []string{
		"\x00\x02hi", "\x01\x02kv\x01\x08\x00\x00\x00\x00\x00\x00\x00\x01\x00\x01\x90", "\x02\x00\x00\x00\x00\x00\x00\x00\x02hi", "\x02\x40\x00\x00\x00\x00\x00\x00\x00",
		"\x02\xff\xff\xff\xff\xff\xff\xff\xff", "\x04\x08\x04PING\x00\x01c", "\x04\x00", "\x04\x01\x05", "\x05\x01\x00", "\xff\x01\x00", strings.Repeat("\x01\x00", 20) + "\x00\x00",
		"\x02\x00\x00\x00\x00\x00\x10\x00\x00" + strings.Repeat("x", 100),
	} {
		f.Add([]byte(words))
	}
	f.Fuzz(func(t *testing.T, words []byte) {
		const most = 1 << 16
		c, err := shake(t, goodGreeting+readyCommand(property("Socket-Type", "PUB"))+string(words), zmq4.Sub, false)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.Limit(most)
		for {
			frames, err := c.Recv()
			if err != nil {
				return
			}
			size := 0
			for _, frame := range frames {
				size += len(frame)
			}
			if len(frames) == 0 || len(frames) > maxFrames || size > most {
				t.Fatalf("%d frames of %d bytes", len(frames), size)
			}
		}
	})
}

func TestCommandsWithinAMessageAndLargeOnesEndTheConnection(t *testing.T) {
	for name, words := range map[string]string{
		"command with more":       "\x05\x05\x04PING",
		"command in a message":    "\x01\x01a\x04\x05\x04PING",
		"a large command":         "\x06\x00\x00\x00\x00\x00\x00\x02\x01" + strings.Repeat("x", 513),
		"unknown flags":           "\x10\x01a",
		"more than the limit":     "\x02\x00\x00\x00\x00\x00\x00\x04\x01" + strings.Repeat("x", 1025),
		"more in several frames":  "\x03\x00\x00\x00\x00\x00\x00\x02\x00" + strings.Repeat("x", 512) + "\x02\x00\x00\x00\x00\x00\x00\x02\x01" + strings.Repeat("x", 513),
		"a command without words": "\x04\x00",
	} {
		c, err := shake(t, goodGreeting+readyCommand(property("Socket-Type", "PUB"))+words, zmq4.Sub, false)
		if err != nil {
			t.Fatal(err)
		}
		c.Limit(1024)
		if frames, err := c.Recv(); err == nil {
			t.Errorf("%s: %q", name, frames)
		}
		c.Close()
	}
}
