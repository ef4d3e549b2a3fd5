package proxy

import (
	"bytes"
	"net/http"

	"github.com/tidwall/gjson"

	"kvrouter/internal/policy"
)

// EventScanner reads the server-sent events of one stream, however they are cut into
// chunks. It counts them, reads the usage, and removes the usage event where the
// client did not ask for it.
type EventScanner struct {
	HideUsage bool
	pending   []byte // an event of which the end has not come
	out       []byte // reused

	Count  int    // events with a part of the answer that ended in the last chunk
	seen   bool   // an event has come
	done   bool   // the event that ends the stream has come
	status int    // HTTP status of the error that an event tells; 0: none
	finish string // why the answer ended; empty: it has not, or does not say
	Usage  Usage  // as far as reported
}

// ending is how a stream ended that came with an HTTP status and broke off
// nowhere. If it is marked, it must have said that it has ended.
func (s *EventScanner) ending(status int, marked bool) policy.Ending {
	if s.status > 0 {
		status = s.status
	}
	if marked && status == http.StatusOK && !s.done && s.finish == "" {
		return policy.Failed
	}
	return endingOf(status, s.finish)
}

// endingOf returns how a request ended whose answer came whole, by its HTTP status
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

// Scan takes the next chunk and returns what the client gets now, valid until
// the next call.
func (s *EventScanner) Scan(chunk []byte) []byte {
	s.Count = 0
	s.out = s.out[:0]
	rest := chunk
	if len(s.pending) > 0 {
		s.pending = append(s.pending, chunk...)
		rest = s.pending
	}
	for {
		end := eventEnd(rest)
		if end < 0 {
			break
		}
		if event := rest[:end]; !s.take(event) {
			s.out = append(s.out, event...)
		}
		rest = rest[end:]
	}
	if s.HideUsage && len(rest) < BufferedAnswer {
		s.pending = append(s.pending[:0], rest...)
		return s.out
	}
	if s.HideUsage {
		s.out = append(s.out, rest...)
		s.pending = s.pending[:0]
		return s.out
	}
	// Nothing is ever taken out: the chunk goes on as it came, and pending only
	// serves to see the whole event.
	if len(rest) < BufferedAnswer {
		s.pending = append(s.pending[:0], rest...)
	} else {
		s.pending = s.pending[:0]
	}
	return chunk
}

// Rest returns the held-back bytes of an event that never ended.
func (s *EventScanner) Rest() []byte {
	if !s.HideUsage {
		return nil
	}
	return s.pending
}

// take looks at one whole event and tells whether to keep it from the client.
func (s *EventScanner) take(event []byte) bool {
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
			s.status = max(int(told.Get("code").Int()), http.StatusBadRequest)
		}
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
		return s.HideUsage && choices.IsArray() && len(choices.Array()) == 0
	}
	return false
}

// takeNamed looks at an event of the messages or the responses API: a line with
// its name, a line with its data.
func (s *EventScanner) takeNamed(event []byte) {
	line, data, _ := bytes.Cut(event, []byte("\n"))
	name, named := bytes.CutPrefix(bytes.TrimSpace(line), []byte("event: "))
	data, ok := bytes.CutPrefix(data, []byte("data:"))
	if !named || !ok {
		return
	}
	switch string(name) {
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

// reasonGiven tells whether an event names a reason for the answer's end, or
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

// eventEnd returns the length of the first whole event in b with the empty line
// that ends it, or -1.
func eventEnd(b []byte) int {
	lf := bytes.Index(b, []byte("\n\n"))
	crlf := bytes.Index(b, []byte("\r\n\r\n"))
	if crlf >= 0 && (lf < 0 || crlf < lf) {
		return crlf + 4
	}
	if lf >= 0 {
		return lf + 2
	}
	return -1
}
