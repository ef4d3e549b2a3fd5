package web

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"

	"kvrouter/internal/base/quota"
)

const (
	// firstBuffer is the initial buffer of a body, bytes, and growth the factor by which a
	// full buffer grows: memory follows the bytes received, not Content-Length.
	firstBuffer = 32 << 10
	growth      = 4
	// unsetInflight is the default memory limit of Bodies, bytes.
	unsetInflight = 1 << 30
)

// BodySettings are the flags for the bodies of requests.
type BodySettings struct {
	MaxInflightBodyBytes int64 `group:"Requests" default:"0" placeholder:"BYTES" help:"Maximum memory for the bodies of all in-flight requests, bytes. Requests beyond it, or beyond a client's share of 15/16, are answered 503. Whole answers of workers may use half as much in addition. 0: a quarter of the memory of the machine or container, at least --max-body-bytes."`
}

// SetDefault sets the defaults that depend on the machine's memory, bytes; 0: unknown.
func (s *BodySettings) SetDefault(largest, memory int64) {
	if s.MaxInflightBodyBytes == 0 && memory > 0 {
		s.MaxInflightBodyBytes = max(largest, memory/4)
	}
}

// Validate checks the settings; its errors name the flag.
func (s BodySettings) Validate(largest int64) error {
	if n := s.MaxInflightBodyBytes; n < 0 || n > 0 && n < largest {
		return fmt.Errorf("--max-inflight-body-bytes %d must be 0 or at least --max-body-bytes %d", n, largest)
	}
	return nil
}

// Bodies reads request bodies into memory that grows with the bytes received, and
// limits the memory of all bodies together. It is safe for concurrent use.
type Bodies struct {
	largest int64
	memory  *quota.Pool
	refused atomic.Uint64
}

// NewBodies returns Bodies of at most largest bytes each, with that memory, which others may
// share.
func NewBodies(largest int64, memory *quota.Pool) *Bodies {
	return &Bodies{largest: largest, memory: memory}
}

// Memory returns a pool of the memory of bodies, bytes: of the settings, else 1 GiB, and at
// least largest.
func (s BodySettings) Memory(largest int64) *quota.Pool {
	return quota.New(max(largest, cmp.Or(s.MaxInflightBodyBytes, unsetInflight)))
}

// Answers returns a pool of the memory of workers' answers, bytes: half of that of bodies.
func (s BodySettings) Answers() *quota.Pool {
	return quota.New(cmp.Or(s.MaxInflightBodyBytes, unsetInflight) / 2)
}

// Held returns the memory of the bodies in flight, bytes.
func (b *Bodies) Held() int64 { return b.memory.Held() }

// Refused returns the number of requests refused for lack of body memory.
func (b *Bodies) Refused() uint64 { return b.refused.Load() }

// BodyError is the reason why a body was not read, with its HTTP status.
type BodyError struct {
	Status  int
	Message string
}

// Error returns the message.
func (e *BodyError) Error() string { return e.Message }

// Read reads the body of a client's request, without its content coding; the caller calls Done
// when it no longer uses the body. An error is a *BodyError: 413, 415, 400, or 503 with Retry-After, or the one with which
// reading r.Body failed, such as 408 of Steady.
func (b *Bodies) Read(w http.ResponseWriter, r *http.Request, client string) (body []byte, err error) {
	if r.ContentLength > b.largest {
		w.Header().Set("Connection", "close") // the body is not read
		return nil, b.tooLarge()
	}
	coding, err := codingOf(w, r)
	if err != nil {
		return nil, err
	}
	from, announced := content(w, r, coding, b.largest)
	if coding == "" {
		body, err = b.read(from, announced, client, 0)
	} else if err = ErrNoMemory; b.memory.Take(client, 0, decoderMemory) {
		body, err = b.read(from, announced, client, decoderMemory)
		b.memory.Give(client, decoderMemory)
	}
	if err == nil {
		return body, nil
	}
	got := len(body)
	b.Done(client, body)
	var own *BodyError
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &own):
		if own.Status == http.StatusServiceUnavailable {
			w.Header().Set("Retry-After", "1")
		}
		return nil, own
	case errors.Is(err, ErrNoMemory):
		b.refused.Add(1)
		w.Header().Set("Retry-After", "1")
		w.Header().Set("Connection", "close")
		return nil, &BodyError{http.StatusServiceUnavailable,
			fmt.Sprintf("the bodies of in-flight requests have reached the limit of %d bytes (--max-inflight-body-bytes), or your share of it: "+
				"try again", b.memory.All())}
	case errors.As(err, &tooLarge):
		return nil, b.tooLarge()
	case announced > 0:
		return nil, &BodyError{http.StatusBadRequest, fmt.Sprintf("the request body ended after %d of %d bytes", got, announced)}
	}
	return nil, &BodyError{http.StatusBadRequest, "the request body could not be read"}
}

func (b *Bodies) tooLarge() error {
	return &BodyError{http.StatusRequestEntityTooLarge, fmt.Sprintf("the request body is larger than %d bytes (--max-body-bytes)", b.largest)}
}

// Done releases the memory of a client's body of Read; a nil body has none.
func (b *Bodies) Done(client string, body []byte) { b.memory.Give(client, int64(cap(body))) }

// read reads a body with that Content-Length; negative: unknown. The returned
// body counts against the limit, also with an error. The request has so much memory beside it.
func (b *Bodies) read(from io.Reader, announced int64, client string, beside int64) (body []byte, err error) {
	most := b.largest + 1 // one more, to see that it is too large
	if announced >= 0 {
		most = announced
	}
	return Fill(from, announced, most, func(has, n int64) bool { return b.memory.Take(client, has+beside, n) })
}

// ErrNoMemory is the error of Fill where take returns false.
var ErrNoMemory = errors.New("no memory is left")

// Fill reads at most that many bytes, of which so many are announced; negative: unknown. Its
// memory grows with them: take is asked for n more bytes where it has some. With an error it
// returns what it has read.
func Fill(from io.Reader, announced, most int64, take func(has, n int64) bool) (body []byte, err error) {
	for {
		if len(body) == cap(body) {
			if int64(len(body)) == announced {
				return body, nil
			}
			has := int64(cap(body))
			size := min(most, max(firstBuffer, growth*has))
			if !take(has, size-has) {
				return body, ErrNoMemory
			}
			larger := make([]byte, len(body), size)
			copy(larger, body)
			body = larger
		}
		n, err := from.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		switch {
		case err == io.EOF && announced > int64(len(body)):
			return body, io.ErrUnexpectedEOF
		case err == io.EOF:
			return body, nil
		case err != nil:
			return body, err
		}
	}
}
