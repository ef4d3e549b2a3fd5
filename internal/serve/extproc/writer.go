package extproc

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
)

const (
	// maxOwnAnswer is the maximum size of the router's own answers, bytes: lists of models,
	// tokens, errors.
	maxOwnAnswer = 16 << 20
	// shortAnswer is the size of an answer that needs no reservation, bytes: errors are
	// answered even if the memory of all streams is used up.
	shortAnswer = 4 << 10
)

// writer is the handler's ResponseWriter. A worker's answer goes to the gateway piece by
// piece, the router's own in one message at the end.
type writer struct {
	stream *stream
	header http.Header
	status int
	body   []byte // of the router's own answer
	err    error  // of the first failed message

	mu   sync.Mutex // guards over
	over bool
}

// Header returns the answer's headers.
func (w *writer) Header() http.Header { return w.header }

// WriteHeader sets the status, and sends the headers of a worker's answer to the
// gateway.
func (w *writer) WriteHeader(status int) {
	if w.status != 0 {
		return
	}
	w.status = status
	s := w.stream
	if !s.answering || s.refused() {
		return
	}
	if given := s.request.Header.Get(headerTestPick); given != "" && s.server.settings.ExtProcConformance {
		w.header.Set(headerTestServed, cmp.Or(s.served, s.target))
	}
	m := mutation(s.came, w.header)
	s.headed = true
	headers := &extprocv3.HeadersResponse{Response: &extprocv3.CommonResponse{HeaderMutation: m}}
	w.err = s.send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: headers}})
}

// Write sends a piece of a worker's answer, and buffers a piece of the router's own
// answer.
func (w *writer) Write(piece []byte) (int, error) {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	switch {
	case w.err != nil:
		return 0, w.err
	case !w.stream.headed:
		if len(w.body)+len(piece) > maxOwnAnswer {
			w.err = status.Errorf(codes.ResourceExhausted, "the answer is longer than %d bytes", maxOwnAnswer)
			return 0, w.err
		}
		if beyond := len(w.body) + len(piece) - shortAnswer; beyond > 0 && !w.stream.share.take(int64(min(beyond, len(piece)))) {
			err := w.stream.server.memory.full()
			w.stream.server.count(err)
			w.err = status.Error(codes.ResourceExhausted, err.Error())
			return 0, w.err
		}
		w.body = append(w.body, piece...)
	case !w.stream.empty:
		if _, w.err = (&pieceWriter{send: w.stream.sendAnswered}).Write(piece); w.err != nil {
			return 0, w.err
		}
	}
	return len(piece), nil
}

// Flush does nothing: each piece is sent at once.
func (w *writer) Flush() {}

// SetReadDeadline limits the time until the request's body is complete; zero: no
// limit.
func (w *writer) SetReadDeadline(at time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if asked := w.stream.asked; asked.timer != nil {
		asked.timer.Stop()
		asked.timer = nil
	}
	if !at.IsZero() && !w.over {
		w.stream.asked.timer = time.AfterFunc(time.Until(at), func() { w.stream.asked.end(os.ErrDeadlineExceeded) })
	}
	return nil
}

// stop ends the deadline: the handler has ended.
func (w *writer) stop() {
	_ = w.SetReadDeadline(time.Time{})
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
}

// failure renders an error in the dialect of the request's route.
func (w *writer) failure(status int, err error) []byte {
	f, d := web.Fault{Status: status, Message: err.Error()}, web.DialectOpenAI
	if r := w.stream.request; r != nil {
		d = web.DialectOf(r.URL.Path)
	}
	return d.JSON(f)
}

// refuse answers with an error: with the status of a web.BodyError, otherwise as an invalid
// request.
func (w *writer) refuse(err error) error {
	code := http.StatusBadRequest
	var own *web.BodyError
	if errors.As(err, &own) {
		code = own.Status
	}
	if code == http.StatusServiceUnavailable {
		w.header.Set("Retry-After", "1")
	}
	w.header.Set("Content-Type", "application/json")
	w.WriteHeader(code)
	if _, err := w.Write(w.failure(code, err)); err != nil {
		return err
	}
	return w.finish()
}

// finish sends the rest once the handler has ended.
func (w *writer) finish() error {
	s := w.stream
	if !s.phase.CompareAndSwap(waits, handled) && s.phase.Load() == own {
		select {
		case <-s.over:
			return nil
		case <-s.grpc.Context().Done():
			return status.Error(codes.Canceled, "the request has ended")
		}
	}
	switch {
	case w.err != nil:
		return w.err
	case s.refused() && s.headed:
		return status.Error(codes.Internal, proxy.ErrGateway.Error()) // which resets the client's stream
	case s.refused():
		w.status, w.body = http.StatusBadGateway, w.failure(http.StatusBadGateway, proxy.ErrGateway)
		w.header = http.Header{"Content-Type": {"application/json"}}
	case s.headed && s.empty:
		return nil
	case s.headed && s.answered.trailed():
		return s.send(trailersResponse())
	// such a stream has ended with an error event
	case s.headed && !s.answered.whole() && !strings.HasPrefix(s.came.Get("Content-Type"), "text/event-stream"):
		return status.Error(codes.Internal, proxy.ErrAnswered.Error()) // which resets the client's stream
	case s.headed:
		return s.sendAnswered(nil, true)
	case w.status == 0 || context.Cause(s.ctx) == errGone:
		return status.Error(codes.Canceled, "the request has ended")
	}
	return s.send(&extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ImmediateResponse{ImmediateResponse: w.immediate()}})
}

// immediate is the router's own answer.
func (w *writer) immediate() *extprocv3.ImmediateResponse {
	web.DropHopByHop(w.header)
	m := new(extprocv3.HeaderMutation)
	for name, values := range w.header {
		if name != "Content-Length" {
			m.SetHeaders = appendHeader(m.SetHeaders, name, values...)
		}
	}
	return &extprocv3.ImmediateResponse{
		Status: &typev3.HttpStatus{Code: typev3.StatusCode(w.status)}, Headers: m, Body: w.body,
		Details: "kvrouter_" + strings.ReplaceAll(strings.ToLower(http.StatusText(w.status)), " ", "_"),
	}
}
