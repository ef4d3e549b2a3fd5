package web

import (
	"context"
	"net/http"
	"strconv"
)

// serveHead answers HEAD as GET is answered, without the body. An answer that flushes, such as
// a stream, ends with its headers.
func serveHead(w http.ResponseWriter, r *http.Request, handler http.Handler) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	get := r.WithContext(ctx)
	get.Method = http.MethodGet
	only := &headWriter{ResponseWriter: w, cut: cancel}
	defer only.end()
	handler.ServeHTTP(only, get)
}

// headWriter passes on an answer without its body.
type headWriter struct {
	http.ResponseWriter
	cut    context.CancelFunc // of the request
	status int                // 0: not written
	length int
	sent   bool
}

// Unwrap returns the server's writer.
func (w *headWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// WriteHeader keeps the status until the length of the body is known.
func (w *headWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
}

// Write counts the bytes.
func (w *headWriter) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	w.length += len(b)
	return len(b), nil
}

// Flush sends the headers of an answer of unknown length, and ends the request.
func (w *headWriter) Flush() {
	w.WriteHeader(http.StatusOK)
	w.send()
	w.cut()
}

// FlushError is Flush.
func (w *headWriter) FlushError() error {
	w.Flush()
	return nil
}

func (w *headWriter) send() {
	if !w.sent {
		w.sent = true
		w.ResponseWriter.WriteHeader(w.status)
	}
}

// end sends the headers of an answer that is whole.
func (w *headWriter) end() {
	w.WriteHeader(http.StatusOK)
	hasBody := w.status != http.StatusNoContent && w.status != http.StatusNotModified
	if !w.sent && hasBody && w.Header().Get("Content-Length") == "" {
		w.Header().Set("Content-Length", strconv.Itoa(w.length))
	}
	w.send()
}
