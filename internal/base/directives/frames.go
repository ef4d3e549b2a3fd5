package directives

import (
	"bytes"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
)

// Frames finds the members that direct an engine in what a client sends on a WebSocket connection
// without compression (RFC 6455). It holds back nothing: a message is of no use to the server
// before its end. The zero value is at the beginning of a connection.
type Frames struct {
	frame web.Frame
	names nameScanner
}

// Take returns how many bytes may be forwarded: all of them, or those before the value of a member that
// directs an engine, and then its name.
func (f *Frames) Take(b []byte) (n int, name string) {
	for i, c := range b {
		if f.frame.InHead() {
			if f.frame.Head(c) {
				f.begin()
			}
			continue
		}
		c = f.frame.Unmask(c)
		if f.frame.Pass(1); f.frame.IsControl() {
			continue
		}
		if name = f.names.take(c); name != "" {
			return i, name
		}
	}
	return len(b), ""
}

// begin begins a frame.
func (f *Frames) begin() {
	if f.frame.BeginsMessage() {
		f.names = nameScanner{text: f.names.text[:0]}
	}
	f.frame.Pass(0)
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
