package extproc

import (
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"

	"kvrouter/internal/base/web"
)

const (
	// streamMemory is the memory of a stream without its messages, bytes: goroutines,
	// stacks and gRPC's buffers. Measured with 10,000 streams.
	streamMemory = 16 << 10
	// headerMemory is the memory of a header without its text, bytes, in the request and in
	// the copy for the worker: strings, slices and map entries.
	headerMemory = 256
)

// memory limits the total memory of all streams: their headers, and the pieces of bodies
// that have not been passed on. It is safe for concurrent use.
type memory struct {
	most int64 // bytes
	held atomic.Int64
}

// take reserves n bytes, if that many are left.
func (m *memory) take(n int64) bool {
	if m.held.Add(n) <= m.most {
		return true
	}
	m.held.Add(-n)
	return false
}

// give releases n bytes.
func (m *memory) give(n int64) { m.held.Add(-n) }

// full is the refusal of a request that does not fit.
func (m *memory) full() error {
	return &refusal{reasonMemory, web.BodyError{Status: http.StatusServiceUnavailable,
		Message: fmt.Sprintf("the requests of gateways have reached the limit of %d bytes (--ext-proc-max-inflight-bytes): try again", m.most)}}
}

// share is the part of a memory that one stream has reserved. It is safe for concurrent
// use.
type share struct {
	of *memory

	mu   sync.Mutex // guards the rest
	held int64
	over bool
}

// take reserves n bytes until give, or until the end of the stream. After the end it
// reserves nothing.
func (s *share) take(n int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.over:
	case !s.of.take(n):
		return false
	default:
		s.held += n
	}
	return true
}

// give releases n bytes.
func (s *share) give(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n = min(n, s.held)
	s.held -= n
	s.of.give(n)
}

// end releases everything: the stream has ended.
func (s *share) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.of.give(s.held)
	s.held, s.over = 0, true
}

// memoryOf returns the memory of headers.
func memoryOf(headers map[string][]string) (n int64) {
	for name, values := range headers {
		for _, value := range values {
			n += int64(len(name)+len(value)) + headerMemory
		}
	}
	return n
}

// refusal is the limit that a stream exceeds, with status and message for the client if it
// can still be answered.
type refusal struct {
	reason reason
	web.BodyError
}

// Unwrap returns the answer to the client.
func (r *refusal) Unwrap() error { return &r.BodyError }

// reason counts refusals.
type reason int

const (
	reasonHeaders reason = iota // too many or too large headers or metadata
	reasonBody                  // a body is longer than announced
	reasonMessage               // a message is larger than maxMessage
	reasonMemory                // the memory of all streams is used up
	reasonSilence               // the first message of a stream is late
	reasons
)

// String returns the reason's label in metrics.
func (r reason) String() string {
	return [reasons]string{"headers", "body", "message", "memory", "silence"}[r]
}

// count counts err if it is a refusal, and reports whether it is.
func (p *Server) count(err error) (ok bool) {
	var refused *refusal
	if ok = errors.As(err, &refused); ok {
		p.refused[refused.reason].Add(1)
	}
	return ok
}
