package proxy

import (
	"bytes"
	"net/http"

	"github.com/tidwall/gjson"

	"kvrouter/internal/policy"
)

// maxEvent bounds the kept part of an unfinished event, bytes. A longer
// one goes on unseen but for its beginning.
const maxEvent = 2 << 20

// maxStatus is the largest HTTP status.
const maxStatus = 599

// eventScanner reads the server-sent events of one stream, however they are cut into
// chunks, in time proportional to their length. It counts them, reads the usage,
// and removes the usage event where the client did not request it.
type eventScanner struct {
	HideUsage bool
	Generate  bool       // the stream is one of generateRoute
	Migration *Migration // remembers the events, and changes them for the client; nil: none does
	pending   []byte     // an event of which the end has not come
	out       []byte     // reused
	long      bool       // the event is longer than maxEvent: its beginning has been taken

	Count    int    // events with a part of the answer that ended in the last chunk
	seen     bool   // an event has come
	done     bool   // the event that ends the stream has come
	status   int    // HTTP status of the error in an event; 0: none
	storedID string // id of an answer of the responses API
	finish   string // why the answer ended; empty: it has not, or does not say
	Usage    Usage  // as far as reported

	generated generated
}

// usage returns the tokens that the stream has reported.
func (s *eventScanner) usage() Usage {
	if s.Generate {
		return s.generated.usage()
	}
	return s.Usage
}

// ending is how a stream ended that came with an HTTP status and broke off
// nowhere. If it is marked, it must have said that it has ended.
func (s *eventScanner) ending(status int, marked bool) policy.Ending {
	if s.status > 0 {
		status = s.status
	}
	if marked && status == http.StatusOK && !s.done && s.finish == "" {
		return policy.Failed
	}
	return endingOf(status, s.finish)
}

// endingOf returns how a request with a complete answer ended, by its HTTP status
// and the engine's finish reason.
func endingOf(status int, finish string) policy.Ending {
	switch {
	case status == http.StatusNotImplemented: // no worker could
		return policy.Abandoned
	case status >= http.StatusInternalServerError, finish == "error":
		return policy.Failed
	case status >= http.StatusMultipleChoices, policy.Aborted(finish):
		return policy.Abandoned
	}
	return policy.Finished
}

// Scan reads the next chunk and returns the bytes for the client, valid until the
// next call.
func (s *eventScanner) Scan(chunk []byte) []byte {
	s.Count = 0
	s.out = s.out[:0]
	rest, from := chunk, 0
	carried := len(s.pending) > 0
	if carried {
		from = max(0, len(s.pending)-endMark+1) // the bytes before have been searched
		s.pending = append(s.pending, chunk...)
		rest = s.pending
	}
	whole := true // rest is all of pending
	for {
		end := eventEnd(rest, from)
		if end < 0 && (s.long || len(rest) < maxEvent) {
			break
		}
		if end < 0 || end > maxEvent && !s.long { // too long for its end to be waited for
			s.take(rest[:maxEvent])
			s.long = true
			if end < 0 {
				break
			}
		}
		if s.long {
			s.show(rest[:end])
		} else if event := s.Migration.trim(rest[:end:end]); !s.take(event) {
			s.tell(event)
		}
		rest, from, whole, s.long = rest[end:], 0, false, false
	}
	if s.long { // only what may belong to its end is kept
		keep := min(len(rest), endMark-1)
		s.show(rest[:len(rest)-keep])
		rest, whole = rest[len(rest)-keep:], false
	}
	if !carried || !whole {
		s.pending = append(s.pending[:0], rest...)
	}
	if s.edits() {
		return s.out
	}
	return chunk // nothing is ever taken out
}

// edits reports whether the client does not get the stream as it is.
func (s *eventScanner) edits() bool { return s.HideUsage || s.Migration != nil }

// tell hands a whole event on.
func (s *eventScanner) tell(event []byte) {
	if s.Migration != nil {
		s.out = s.Migration.rewrite(s.out, event, s.status >= http.StatusInternalServerError, s.finish != "")
		return
	}
	s.show(event)
}

// show hands a part of the stream on where parts may be taken out.
func (s *eventScanner) show(part []byte) {
	if s.Migration != nil && s.Migration.tooLong() {
		return
	}
	if s.edits() {
		s.out = append(s.out, part...)
	}
}

// Rest returns the buffered bytes of an incomplete last event.
func (s *eventScanner) Rest() []byte {
	if !s.edits() {
		return nil
	}
	return s.pending
}

// take looks at one whole event and reports whether to keep it from the client.
func (s *eventScanner) take(event []byte) bool {
	data, ok := bytes.CutPrefix(event, []byte("data:"))
	if !ok {
		s.takeNamed(event)
		return false
	}
	if bytes.HasPrefix(bytes.TrimSpace(data), []byte("[DONE]")) {
		s.done = true
		return false
	}
	s.Count++
	first := !s.seen
	s.seen = true
	if first && bytes.Contains(data, []byte(`"error"`)) || bytes.HasPrefix(bytes.TrimSpace(data), []byte(`{"error"`)) {
		if told := gjson.GetBytes(data, "error"); told.IsObject() {
			s.status = min(max(int(told.Get("code").Int()), http.StatusBadRequest), maxStatus)
		}
	}
	if s.Generate {
		s.generated.takeEvent(data)
		s.finish = s.generated.finish
		return false
	}
	if reasonGiven(data) {
		s.finish = gjson.GetBytes(data, "choices.0.finish_reason").Str
	}
	if !bytes.Contains(data, []byte(`"usage"`)) {
		return false
	}
	if usage := ReadUsage(data); usage.Known {
		s.Usage = usage
		choices := gjson.GetBytes(data, "choices")
		return s.HideUsage && choices.IsArray() && !choices.Get("0").Exists()
	}
	return false
}

// takeNamed looks at an event of the messages or the responses API: a line with
// its name, a line with its data.
func (s *eventScanner) takeNamed(event []byte) {
	line, data, _ := bytes.Cut(event, []byte("\n"))
	name, named := bytes.CutPrefix(bytes.TrimSpace(line), []byte("event: "))
	data, ok := bytes.CutPrefix(data, []byte("data:"))
	if !named || !ok {
		return
	}
	switch string(name) {
	case "response.created":
		s.storedID = gjson.GetBytes(data, "response.id").Str
		return
	case "message_stop", "response.completed", "response.incomplete":
		s.done = true
	case "message_delta": // not of its text
	default:
		if bytes.HasSuffix(name, []byte("delta")) {
			s.Count++
		}
		return
	}
	if usage := ReadUsage(data); usage.Known {
		s.Usage = usage
	}
}

// reasonGiven reports whether an event names a reason for the answer's end, or
// for something else. It is asked of every token, so the search begins with a
// byte that is rare in events.
func reasonGiven(data []byte) bool {
	key := []byte(`_reason":`)
	for {
		at := bytes.Index(data, key)
		if at < 0 {
			return false
		}
		data = bytes.TrimLeft(data[at+len(key):], " ")
		if bytes.HasPrefix(data, []byte(`"`)) {
			return true
		}
	}
}

// endMark is the length of the longest mark that ends an event.
const endMark = len("\r\n\r\n")

// eventEnd returns the length of the first whole event in b with the empty line
// that ends it, or -1. No mark ends before from+1.
func eventEnd(b []byte, from int) int {
	for i := from; ; {
		line := bytes.IndexByte(b[i:], '\n')
		if line < 0 {
			return -1
		}
		i += line + 1
		switch {
		case i < len(b) && b[i] == '\n':
			return i + 1
		case i+1 < len(b) && b[i] == '\r' && b[i+1] == '\n' && i >= 2 && b[i-2] == '\r':
			return i + 2
		}
	}
}
