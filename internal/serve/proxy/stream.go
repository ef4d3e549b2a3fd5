package proxy

import (
	"bytes"
	"cmp"
	"net/http"
	"strings"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/policy"
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
	Numbered  bool       // its events have numbers: it is one of ResponsesRoute
	Migration *Migration // remembers the events, and changes them for the client; nil: none does
	pending   []byte     // an event of which the end has not come
	out       []byte     // reused
	line      []byte     // where nothing is taken out: a line of which the end has not come
	long      bool       // the event is longer than maxEvent: its beginning has been taken
	returns   bool       // a carriage return has come: lines may end with it

	Count    int    // events with a part of the answer that ended in the last chunk
	begun    bool   // an event has come that is more than an opening
	unended  bool   // the last event has no end, and is a whole one all the same
	seen     bool   // an event has come
	done     bool   // the event that ends the stream has come
	status   int    // HTTP status of the error in an event; 0: none
	storedID string // id of an answer of the responses API
	finish   string // why the answer ended; empty: it has not, or does not say
	last     []byte // data of the last event with a number, if they have one
	Usage    Usage  // as far as reported

	generated generated
	own       int // where the description is in the last event of SGLang's own form; 0: it has another one
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
	s.returns = s.returns || bytes.IndexByte(chunk, '\r') >= 0
	for {
		var m message
		end := 0
		if from == 0 && !s.returns && !s.long {
			m, end = lineMessage(rest)
		}
		if end == 0 {
			end = eventEnd(rest, from)
		}
		if end < 0 && (s.long || len(rest) < maxEvent) {
			break
		}
		if end < 0 || end > maxEvent && !s.long { // too long for its end to be waited for
			s.take(readMessage(rest[:maxEvent]))
			s.long = true
			if end < 0 {
				break
			}
		}
		if s.long {
			s.show(rest[:end])
		} else {
			event := s.Migration.trim(rest[:end:end])
			if !m.plain || len(event) < end {
				m = readMessage(event)
			}
			if !s.take(m) {
				s.handOn(event)
			}
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
	return s.wholeLines(chunk)
}

// wholeLines returns the lines of a stream in which nothing is changed that end in chunk. The
// beginning of another one is kept: of a stream that breaks off, it would be read as an event.
func (s *eventScanner) wholeLines(chunk []byte) []byte {
	end := max(bytes.LastIndexByte(chunk, '\n'), bytes.LastIndexByte(chunk, '\r')) + 1
	if end == len(chunk) && len(s.line) == 0 {
		return chunk
	}
	if end == 0 && len(s.line)+len(chunk) > maxEvent { // nobody waits for its end
		end = len(chunk)
	}
	if end == 0 {
		s.line = append(s.line, chunk...)
		return nil
	}
	s.out = append(append(s.out[:0], s.line...), chunk[:end]...)
	s.line = append(s.line[:0], chunk[end:]...)
	return s.out
}

// End reads what has no end at the end of the stream as an event, as clients do, and returns its
// bytes for the client.
func (s *eventScanner) End() []byte {
	s.Count = 0
	s.out = s.out[:0]
	if event := s.pending; len(event) > 0 && !s.long {
		if m := readMessage(event); isDone(m.data) || gjson.ValidBytes(m.data) {
			if s.pending = nil; s.Migration != nil {
				event = append(event, "\n\n"...)
			}
			s.unended = s.Migration == nil
			if event = s.Migration.trim(event); !s.take(readMessage(event)) {
				s.handOn(event)
			}
		}
	}
	switch {
	case !s.edits():
		return s.line
	case s.Migration == nil: // of an answer that may be continued, it could have token ids
		return append(s.out, s.pending...)
	}
	return s.out
}

// edits reports whether the client does not get the stream as it is.
func (s *eventScanner) edits() bool { return s.HideUsage || s.Migration != nil }

// handOn hands a whole event on.
func (s *eventScanner) handOn(event []byte) {
	if s.Migration != nil {
		facts := eventFacts{failed: s.status >= http.StatusInternalServerError, finished: s.finish != "", own: s.own > 0}
		s.out = s.Migration.rewrite(s.out, event, facts)
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

// open reports whether the client has data of an event without its end.
func (s *eventScanner) open() bool {
	return !s.edits() && hasData(s.pending[:max(0, len(s.pending)-len(s.line))])
}

// sequence returns the number of the last event.
func (s *eventScanner) sequence() int64 { return gjson.GetBytes(s.last, "sequence_number").Int() }

// take looks at what one whole event says, and reports whether to keep it from the client.
func (s *eventScanner) take(m message) (hide bool) {
	s.own = 0
	switch {
	case len(m.data) == 0: // a comment
		return false
	case isDone(m.data):
		s.begun, s.done = true, true
		return false
	}
	if s.Numbered && (bytes.Contains(m.data, []byte(`"sequence_number"`)) || jsonbody.EscapesNames(m.data)) {
		s.last = append(s.last[:0], m.data...)
	}
	usual := false // as almost all events that have no names
	if s.Generate {
		s.own = ownMeta(m.data)
		usual = s.own > 0
	} else {
		usual = bytes.Contains(m.data, []byte(`"choices"`))
	}
	name := jsonbody.View(m.name)
	if unnamed := name == "" || name == "message"; unnamed && usual {
		name = ""
	} else if unnamed {
		name = gjson.GetBytes(m.data, "type").Str
	}
	if name != "" {
		s.takeNamed(name, m.data)
		return false
	}
	if !usual || !s.seen {
		if object := gjson.GetBytes(m.data, "error"); object.IsObject() {
			s.status = errorStatus(object, http.StatusBadRequest)
		}
	}
	s.begun, s.seen = true, true
	s.Count++
	if s.Generate {
		if s.generated.takeEvent(m.data, s.own); !m.plain {
			s.own = 0
		}
		s.finish = s.generated.finish
		return false
	}
	escaped := jsonbody.EscapesNames(m.data)
	if escaped || reasonGiven(m.data) {
		s.finish = cmp.Or(gjson.GetBytes(m.data, "choices.0.finish_reason").Str, s.finish)
	}
	if !escaped && !bytes.Contains(m.data, []byte(`"usage"`)) {
		return false
	}
	if usage := ReadUsage(m.data); usage.Known {
		s.Usage = usage
		choices := gjson.GetBytes(m.data, "choices")
		return s.HideUsage && choices.IsArray() && !choices.Get("0").Exists()
	}
	return false
}

// isDone reports whether data are the mark that ends a stream.
func isDone(data []byte) bool { return bytes.HasPrefix(data, []byte("[DONE]")) }

// takeNamed looks at an event of the messages or the responses API.
func (s *eventScanner) takeNamed(name string, data []byte) {
	switch name {
	case "ping", "message_start", "response.in_progress", "response.queued": // which may be followed by a failure
		return
	case "response.created":
		s.storedID = gjson.GetBytes(data, "response.id").Str
		return
	}
	s.begun = true
	switch name {
	case "error":
		object := gjson.GetBytes(data, "error")
		if !object.IsObject() {
			object = gjson.ParseBytes(data)
		}
		s.status = errorStatus(object, http.StatusInternalServerError)
		return
	case "response.failed":
		s.status = errorStatus(gjson.GetBytes(data, "response.error"), http.StatusInternalServerError)
		s.done = true
	case "message_stop", "response.completed", "response.incomplete", "response.cancelled":
		s.done = true
	case "message_delta": // not of its text
	default:
		if strings.HasSuffix(name, "delta") {
			s.Count++
		}
		return
	}
	if usage := ReadUsage(data); usage.Known {
		s.Usage = usage
	}
}

// errorStatus returns the HTTP status of an error in a stream: its code, or what its type or its
// code calls itself, or that of others.
func errorStatus(object gjson.Result, others int) int {
	if code := int(object.Get("code").Int()); code != 0 {
		return min(max(code, http.StatusBadRequest), maxStatus)
	}
	for _, name := range []string{object.Get("type").Str, object.Get("code").Str} {
		if status := web.AnthropicStatus(name); status > 0 {
			return status
		}
		switch name = strings.ToLower(name); {
		case strings.Contains(name, "internal"), name == "server_error":
			return http.StatusInternalServerError
		case name == "rate_limit_exceeded":
			return http.StatusTooManyRequests
		case strings.HasPrefix(name, "invalid"), strings.HasPrefix(name, "badrequest"), strings.HasPrefix(name, "notfound"):
			return http.StatusBadRequest
		}
	}
	return others
}

// reasonGiven reports whether an event names a reason for the answer's end, or for something else,
// if no name in it is escaped. It is asked of every token, so the search begins with a byte that
// is rare in events.
func reasonGiven(data []byte) bool {
	key := []byte(`_reason"`)
	for rest := data; ; {
		at := bytes.Index(rest, key)
		if at < 0 {
			return false
		}
		for rest = rest[at+len(key):]; len(rest) > 0 && (rest[0] == ':' || rest[0] <= ' '); {
			rest = rest[1:]
		}
		if bytes.HasPrefix(rest, []byte(`"`)) {
			return true
		}
	}
}
