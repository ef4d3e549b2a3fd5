package proxy

import (
	"bytes"
	"errors"
	"io"
	"mime"
	"net/http"
	"strings"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/health"
)

// isJSON reports whether a media type is that of one JSON text.
func isJSON(kind string) bool {
	return kind == "application/json" || strings.HasSuffix(kind, "+json")
}

// isLines reports whether a media type is one of JSON texts, each on its line.
func isLines(kind string) bool {
	switch kind {
	case "application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines", "application/jsonlines", "application/x-json-stream":
		return true
	}
	return false
}

// beginsJSON reports whether a text of an unknown type may be JSON.
func beginsJSON(text []byte) bool {
	text = bytes.TrimLeft(bytes.TrimPrefix(text, byteOrderMark), " \t\r\n")
	return len(text) > 0 && (text[0] == '{' || text[0] == '[')
}

// kind returns the media type of an answer.
func (a *upstreamAnswer) kind() string {
	kind, _, _ := mime.ParseMediaType(a.Header.Get("Content-Type"))
	return kind
}

// madeBefore reports whether an answer that is no stream of events was made before it was sent, so
// that nobody waits for its parts: an error, JSON unless the request asks for a stream, and text
// whose length is known.
func (a *upstreamAnswer) madeBefore(u *sending) bool {
	kind, long := a.kind(), a.ContentLength < 0
	switch {
	case a.StatusCode/100 != 2:
		return true
	case isJSON(kind):
		return !long || u.Body == nil || !u.Body.Get("stream").Bool()
	}
	return !long && (kind == "" || strings.HasPrefix(kind, "text/"))
}

// relayPieces relays an answer that is no stream of events piece by piece, as it comes: audio,
// lines of JSON, and all that comes through a gateway, where no other worker can be tried. Nothing
// is written before the first piece, except to a gateway. The usage of JSON, and of
// what comes through a gateway, is read from the first bufferedAnswer bytes.
func (p *Proxy) relayPieces(w http.ResponseWriter, answer *upstreamAnswer, u *sending, x *Exchange) error {
	var body []byte
	held, whole := int64(0), true // bytes of body; it has all so far
	defer func() { p.answers.Give(u.Client, held) }()
	memory := p.streams.Get().(*streamBuffer)
	defer p.streams.Put(memory)
	kind, started, last := answer.kind(), false, byte('\n')
	start := func() error {
		if !started {
			if !u.claims() {
				return errOutrun
			}
			started = true
			writeHead(w, answer.Response, u, x)
		}
		return nil
	}
	if u.Gateway != nil {
		if err := start(); err != nil {
			return err
		}
	}
	for {
		n, err := answer.Read(memory.buffer[:])
		if n > 0 {
			if len(body) == 0 {
				whole = whole && (isJSON(kind) || !isLines(kind) && beginsJSON(memory.buffer[:n]))
			}
			if err := start(); err != nil {
				return err
			}
			last = memory.buffer[n-1]
			if whole = whole && len(body) < bufferedAnswer && p.answers.Take(u.Client, held, int64(n)); whole {
				body, held = append(body, memory.buffer[:n]...), held+int64(n)
			}
			if _, err := w.Write(memory.buffer[:n]); err != nil {
				return errors.Join(ErrAnswered, err)
			}
			if err := http.NewResponseController(w).Flush(); err != nil {
				return errors.Join(ErrAnswered, err)
			}
		}
		if err == io.EOF {
			if err := start(); err != nil {
				return err
			}
			break
		}
		if err != nil {
			failed := p.unanswered(x.Decision.Target.Key.Worker, err, health.Broken)
			if !started {
				return failed
			}
			if isLines(kind) {
				if last != '\n' {
					w.Write([]byte("\n"))
				}
				w.Write(append(web.DialectOf(x.Route).JSON(failure(x.Worker, err, "")), '\n'))
			}
			if u.Gateway == nil { // which is told otherwise
				cutOff(w)
			}
			return errors.Join(ErrAnswered, failed)
		}
	}
	if u.Route == ResponsesRoute && answer.StatusCode == http.StatusOK {
		u.stores(x, gjson.GetBytes(body, "id").Str)
	}
	x.Usage, x.finish = outcome(u.Route, body)
	x.Ending = endingOf(answer.StatusCode, x.finish)
	return nil
}

// cutOff breaks the connection of an answer that broke off, which has no place for an error: its
// client must not take the part for the whole.
func cutOff(w http.ResponseWriter) {
	connection := http.NewResponseController(w)
	_ = connection.Flush()
	_ = connection.SetWriteDeadline(time.Unix(1, 0))
}
