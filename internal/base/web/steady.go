package web

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

const (
	// Stall is the maximum time without progress: of a client that sends a body, and of
	// one that is to take an answer. A slow but steady client is not limited.
	Stall = 10 * time.Second
	// leastTaken is the number of bytes of an answer that count as progress: fewer are less
	// than a segment, and only hold the place.
	leastTaken = 1 << 10
	// linger is the time for the rest of a body that nobody reads, before the answer: most
	// have come, and the connection can then carry the client's next request. Otherwise it
	// is closed, up to lingerOn after the answer, so that the client can read that.
	linger   = 20 * time.Millisecond
	lingerOn = 500 * time.Millisecond
	// lingering is the part of a body that is read for that, bytes; net/http has the same.
	lingering = 256 << 10
	// paced is the part of an answer on HTTP/2 that must go within Stall, bytes.
	paced = 64 << 10
)

// steadyBody is the body of Steady.
type steadyBody struct {
	io.ReadCloser
	connection *http.ResponseController
	stall      time.Duration
	got        int64
	err        error // with which it ended; nil: it has not
}

// Steady returns the request with a body that must keep coming: reading it fails with a
// *BodyError once no byte has come for that time. w must be able to set a deadline for
// reading.
func Steady(w http.ResponseWriter, r *http.Request, stall time.Duration) *http.Request {
	steady, _ := steadied(http.NewResponseController(w), r, stall)
	return steady
}

// steadied is Steady with the body; nil: the request has none.
func steadied(connection *http.ResponseController, r *http.Request, stall time.Duration) (*http.Request, *steadyBody) {
	if r.Body == nil || r.Body == http.NoBody {
		return r, nil
	}
	body := &steadyBody{ReadCloser: r.Body, connection: connection, stall: stall}
	copied := *r // the server looks at the body of its own
	copied.Body = body
	return &copied, body
}

// Read reads the next bytes.
func (b *steadyBody) Read(into []byte) (n int, err error) {
	if b.err != nil {
		return 0, b.err
	}
	_ = b.connection.SetReadDeadline(time.Now().Add(b.stall)) // not every connection can
	n, err = b.ReadCloser.Read(into)
	b.got += int64(n)
	switch {
	case err == io.EOF:
		_ = b.connection.SetReadDeadline(time.Time{})
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = &BodyError{http.StatusRequestTimeout, fmt.Sprintf("no byte of the request body arrived for %s: it ended after %d bytes", b.stall,
			b.got)}
	}
	b.err = err
	return n, err
}

// leave ends a body that its handler has not read to the end; over HTTP/2 the server does.
func (b *steadyBody) leave(w http.ResponseWriter, r *http.Request) {
	if b.err != nil || r.ProtoMajor != 1 {
		return
	}
	if r.ContentLength-b.got <= lingering && r.Header.Get("Expect") == "" {
		_ = b.connection.SetReadDeadline(time.Now().Add(linger))
		if _, err := io.CopyN(io.Discard, b.ReadCloser, lingering); err == io.EOF {
			_ = b.connection.SetReadDeadline(time.Time{})
			return
		}
	}
	w.Header().Set("Connection", "close") // net/http waits for no more of it before the answer
	_ = b.connection.SetReadDeadline(time.Now().Add(lingerOn))
	if c := connectionOf(r); c != nil {
		c.yield()
	}
}

// serveSteadily serves a request so that neither a body that does not come nor an answer
// that is not taken holds its place. Over HTTP/1 the connection sees to the answer.
func serveSteadily(w http.ResponseWriter, r *http.Request, handler http.Handler, stall time.Duration) {
	connection := http.NewResponseController(w)
	steady, body := steadied(connection, r, stall)
	if body != nil {
		defer body.leave(w, r)
	}
	if r.ProtoMajor == 1 && body != nil {
		_ = connection.SetReadDeadline(time.Now().Add(linger)) // for net/http, before a long answer
	}
	if r.ProtoMajor == 2 {
		paced := &pacedWriter{ResponseWriter: w, connection: connection, stall: stall}
		defer paced.end()
		w = paced
	}
	handler.ServeHTTP(w, steady)
}

// pacedWriter ends an answer on a stream of HTTP/2 whose client takes nothing for the time of stall:
// the connection may be busy with others.
type pacedWriter struct {
	http.ResponseWriter
	connection *http.ResponseController
	stall      time.Duration
	timer      *time.Timer // nil: nothing was written
}

// Unwrap returns the server's writer.
func (w *pacedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Write writes part by part, each within that time.
func (w *pacedWriter) Write(b []byte) (n int, err error) {
	for first := true; err == nil && (first || n < len(b)); first = false {
		var wrote int
		w.arm()
		wrote, err = w.ResponseWriter.Write(b[n:min(len(b), n+paced)])
		w.timer.Stop()
		n += wrote
	}
	return n, err
}

// Flush sends what is buffered, within that time.
func (w *pacedWriter) Flush() { _ = w.FlushError() }

// FlushError is Flush with its error.
func (w *pacedWriter) FlushError() error {
	w.arm()
	defer w.timer.Stop()
	return w.connection.Flush()
}

// arm starts the time.
func (w *pacedWriter) arm() {
	if w.timer == nil {
		w.timer = time.AfterFunc(w.stall, func() { _ = w.connection.SetWriteDeadline(time.Unix(1, 0)) })
		return
	}
	w.timer.Reset(w.stall)
}

// end limits the time for what the server still has of the answer.
func (w *pacedWriter) end() { _ = w.connection.SetWriteDeadline(time.Now().Add(w.stall)) }
