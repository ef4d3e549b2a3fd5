package web

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync/atomic"
	"syscall"
)

// ErrUnsendable means that a request could not be sent because of its own content, such as a header
// with a control character. No peer is the cause.
var ErrUnsendable = errors.New("the request cannot be sent")

// mayResendKey is the context's key of the function of WithResends.
type mayResendKey struct{}

// WithResends returns a context whose requests are sent once more, on a new connection, only if
// may allows it when that is due: a peer may also end its connection because of a request, and
// read it twice then. Without it, all are.
func WithResends(ctx context.Context, may func() bool) context.Context {
	return context.WithValue(ctx, mayResendKey{}, may)
}

// resender sends a request once more, on a new connection, if it was sent on a used one that ended
// before any byte of the answer: a peer that closes an idle connection may do so just as a request
// arrives, and has not read it.
type resender struct {
	kept *http.Transport // keeps connections
	once *http.Transport // opens one for each request
}

func newResender(transport *http.Transport) *resender {
	once := transport.Clone()
	once.DisableKeepAlives = true
	return &resender{transport, once}
}

// sending is what happened to one attempt of a request.
type sending struct {
	trace    httptrace.ClientTrace
	began    bool        // the transport has accepted the request and asks for a connection
	reused   bool        // the connection had served another request
	answered atomic.Bool // a byte of the answer came
}

// RoundTrip implements http.RoundTripper. If the second attempt cannot connect, the error is that of
// the first one: the peer may have read the request.
func (r *resender) RoundTrip(request *http.Request) (*http.Response, error) {
	s := new(sending)
	s.trace = httptrace.ClientTrace{
		GetConn:              func(string) { s.began = true },
		GotConn:              func(info httptrace.GotConnInfo) { s.reused = info.Reused },
		GotFirstResponseByte: func() { s.answered.Store(true) },
	}
	ctx := request.Context()
	response, err := r.kept.RoundTrip(request.WithContext(httptrace.WithClientTrace(ctx, &s.trace)))
	switch {
	case err == nil || ctx.Err() != nil:
		return response, err
	case !s.began:
		return nil, fmt.Errorf("%w: %w", ErrUnsendable, err)
	case !s.reused || s.answered.Load() || isTimeout(err):
		return nil, err
	}
	again, ok := rewound(request)
	if !ok {
		return nil, err
	}
	if may, limited := ctx.Value(mayResendKey{}).(func() bool); limited && !may() {
		return nil, err
	}
	response, failed := r.once.RoundTrip(again)
	if Undialed(failed) && !OwnFault(failed) {
		return nil, err
	}
	return response, failed
}

// rewound returns the request with its body from the beginning; not ok: that is gone.
func rewound(request *http.Request) (again *http.Request, ok bool) {
	again = request.WithContext(request.Context())
	if request.Body == nil || request.Body == http.NoBody {
		return again, true
	}
	if request.GetBody == nil {
		return nil, false
	}
	body, err := request.GetBody()
	again.Body = body
	return again, err == nil
}

// Undialed reports whether a request failed with err because no connection could be opened.
func Undialed(err error) bool {
	var connecting *net.OpError
	return errors.As(err, &connecting) && connecting.Op == "dial"
}

func isTimeout(err error) bool {
	var late net.Error
	return errors.As(err, &late) && late.Timeout()
}

// CloseIdleConnections closes the kept connections that are idle.
func (r *resender) CloseIdleConnections() { r.kept.CloseIdleConnections() }

// readableConn is a connection whose answer can be read after the peer has stopped reading. A peer
// that refuses a request by its headers or size answers and closes; package http would drop that
// answer at the first failed write of the body.
type readableConn struct {
	net.Conn
	ended atomic.Bool // a read has failed
}

// Read implements net.Conn.
func (c *readableConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil {
		c.ended.Store(true)
	}
	return n, err
}

// Write drops what a peer that has closed the connection does not read, until its answer, or the
// end, has been read.
func (c *readableConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if (errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)) && !c.ended.Load() {
		return len(b), nil
	}
	return n, err
}

// SyscallConn implements syscall.Conn.
func (c *readableConn) SyscallConn() (syscall.RawConn, error) {
	if raw, ok := c.Conn.(syscall.Conn); ok {
		return raw.SyscallConn()
	}
	return nil, http.ErrNotSupported
}

// CloseWrite ends the stream to the peer.
func (c *readableConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return http.ErrNotSupported
}
