package directives

import (
	"bytes"
	"encoding/binary"

	"github.com/tidwall/gjson"
)

// Frames finds the members that direct an engine in what a client sends on a WebSocket connection
// without compression (RFC 6455). It holds back nothing: a message is of no use to the server
// before its end. The zero value is at the beginning of a connection.
type Frames struct {
	head   [14]byte // of the frame
	have   int      // bytes of it; all of them: its payload follows
	left   uint64   // bytes of the payload
	passed uint64   // those before
	names  nameScanner
}

// Take returns how many bytes may go on: all of them, or those before the value of a member that
// directs an engine, and then its name.
func (f *Frames) Take(b []byte) (n int, name string) {
	for i, c := range b {
		if f.left == 0 {
			f.begin(c)
			continue
		}
		if mask, masked := f.mask(); masked {
			c ^= mask[f.passed%4]
		}
		f.left, f.passed = f.left-1, f.passed+1
		if f.left == 0 {
			f.have = 0
		}
		if control := f.head[0]&0x8 != 0; control {
			continue
		}
		if name = f.names.take(c); name != "" {
			return i, name
		}
	}
	return len(b), ""
}

// begin takes a byte of a frame's head.
func (f *Frames) begin(c byte) {
	f.head[f.have] = c
	if f.have++; f.have < f.size() {
		return
	}
	switch short := f.head[1] & 0x7f; short {
	case 126:
		f.left = uint64(binary.BigEndian.Uint16(f.head[2:]))
	case 127:
		f.left = binary.BigEndian.Uint64(f.head[2:])
	default:
		f.left = uint64(short)
	}
	f.passed = 0
	if opcode := f.head[0] & 0xf; opcode == 1 || opcode == 2 { // a message begins
		f.names = nameScanner{text: f.names.text[:0]}
	}
	if f.left == 0 {
		f.have = 0
	}
}

// size returns the length of a frame's head, as far as it is known.
func (f *Frames) size() int {
	if f.have < 2 {
		return 2
	}
	size := 2
	switch f.head[1] & 0x7f {
	case 126:
		size += 2
	case 127:
		size += 8
	}
	if f.head[1]&0x80 != 0 {
		size += 4
	}
	return size
}

// mask returns the mask of the frame.
func (f *Frames) mask() (mask []byte, masked bool) {
	size := f.size()
	return f.head[max(0, size-4):size], f.head[1]&0x80 != 0
}

// longestName bounds the text of a name, bytes: each of its characters may be escaped.
const longestName = 6 * 32

// nameScanner finds names in JSON text that comes in pieces.
type nameScanner struct {
	text          []byte // of the string, without quotes
	inside, slash bool   // in a string, behind a backslash of it
	ended         bool   // a string has ended: it is a name if a colon follows
}

// take takes the next byte. It returns the name that directs an engine and ends there.
func (s *nameScanner) take(c byte) string {
	if s.inside {
		switch {
		case s.slash:
			s.slash = false
		case c == '\\':
			s.slash = true
		case c == '"':
			s.inside, s.ended = false, true
			return ""
		}
		if len(s.text) <= longestName {
			s.text = append(s.text, c)
		}
		return ""
	}
	switch {
	case c == '"':
		s.inside, s.ended, s.text = true, false, s.text[:0]
	case c == ':' && s.ended:
		s.ended = false
		return s.found()
	case c > ' ':
		s.ended = false
	}
	return ""
}

// found returns the name that has ended if it directs an engine.
func (s *nameScanner) found() string {
	switch {
	case len(s.text) > longestName:
		return ""
	case bytes.IndexByte(s.text, '\\') >= 0:
		if name := gjson.Parse(`"` + string(s.text) + `"`).Str; names[name] {
			return name
		}
	case names[string(s.text)]:
		return string(s.text)
	}
	return ""
}
