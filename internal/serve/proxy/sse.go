package proxy

import (
	"bytes"
)

// byteOrderMark may stand at the beginning of a stream.
var byteOrderMark = []byte("\xef\xbb\xbf")

// message is what a server-sent event says.
type message struct {
	name, data []byte
	plain      bool // the event is one line of data
}

// readMessage reads a whole event, in any form that the standard of server-sent events allows:
// with any line ends, comments, and data in several lines.
func readMessage(event []byte) (m message) {
	if data, ok := bytes.CutPrefix(event, []byte("data:")); ok {
		line := bytes.IndexByte(data, '\n')
		if rest := len(data) - line - 1; line >= 0 && (rest == 1 || rest == 2 && data[line+1] == '\r') {
			if m.data = bytes.TrimSpace(data[:line]); bytes.IndexByte(m.data, '\r') < 0 {
				m.plain = true
				return m
			}
			m.data = nil
		}
	}
	for line := range lines(bytes.TrimPrefix(event, byteOrderMark)) {
		field, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch {
		case string(field) == "event":
			m.name = value
		case string(field) != "data":
		case m.data == nil:
			m.data = value[:len(value):len(value)]
		default: // which is copied
			m.data = append(append(m.data, '\n'), value...)
		}
	}
	m.data = bytes.TrimSpace(m.data)
	return m
}

// lineMessage reads the event with which b begins if it is one line of data, without a carriage
// return, and whole. end is its length; 0: it is none.
func lineMessage(b []byte) (m message, end int) {
	if len(b) < len("data:\n\n") || string(b[:len("data:")]) != "data:" {
		return m, 0
	}
	line := bytes.IndexByte(b, '\n')
	if line < 0 || line+1 >= len(b) || b[line+1] != '\n' {
		return m, 0
	}
	return message{data: bytes.TrimSpace(b[len("data:"):line]), plain: true}, line + 2
}

// lines yields the lines of an event without their ends.
func lines(event []byte) func(yield func([]byte) bool) {
	return func(yield func([]byte) bool) {
		for len(event) > 0 {
			end := lineEnd(event)
			if end < 0 {
				end = len(event)
			}
			if !yield(event[:end]) {
				return
			}
			event = event[min(len(event), end+endLength(event[end:])):]
		}
	}
}

// lineEnd returns the place of the first line end in b, or -1.
func lineEnd(b []byte) int {
	at := bytes.IndexByte(b, '\n')
	if at >= 0 {
		b = b[:at]
	}
	if cr := bytes.IndexByte(b, '\r'); cr >= 0 {
		return cr
	}
	return at
}

// endLength returns the length of the line end with which b begins; 0: it begins with none.
func endLength(b []byte) int {
	switch {
	case len(b) == 0:
		return 0
	case b[0] == '\n':
		return 1
	case b[0] != '\r':
		return 0
	case len(b) > 1 && b[1] == '\n':
		return 2
	}
	return 1
}

// endMark is the length of the longest mark that ends an event.
const endMark = len("\r\n\r\n")

// eventEnd returns the length of the first whole event in b with the empty line that ends it, or
// -1. No mark ends before from+1. An empty line that may go on with the next byte is none yet.
func eventEnd(b []byte, from int) int {
	for i := from; ; {
		line := lineEnd(b[i:])
		if line < 0 {
			return -1
		}
		i += line
		i += endLength(b[i:])
		end := i + endLength(b[i:])
		switch {
		case i < len(b) && b[i-1] == '\r' && b[i] == '\r': // all line ends are this one
			return i + 1
		case end == len(b) && b[end-1] == '\r':
			return -1
		case end > i:
			return end
		}
	}
}

// hasData reports whether a part of an event has a line of data.
func hasData(part []byte) bool {
	for line := range lines(part) {
		if field, _, _ := bytes.Cut(line, []byte(":")); string(field) == "data" {
			return true
		}
	}
	return false
}
