package web

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"
)

// ErrStopped is the cause of a request's context that ended because the router
// stops: its time to finish was over.
var ErrStopped = errors.New("the router is shutting down")

// cutTime is how long requests that were cut may take to tell their clients.
const cutTime = 2 * time.Second

// Port is an HTTP port that listens. Its end has three steps: Leave, Drain, Close.
type Port struct {
	server   *http.Server
	listener net.Listener
	secure   bool
	leaving  atomic.Bool
	cut      context.CancelCauseFunc // of every request's context
}

// Listen opens a TCP port with the limits of both ports; 0 is any free one. flag
// names where the number came from. secure nil: it speaks plain HTTP.
func Listen(host string, port int, flag string, secure *tls.Config) (*Port, error) {
	listener, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("%s %d: %w: free the port or choose another", flag, port, err)
	}
	base, cut := context.WithCancelCause(context.Background())
	p := &Port{listener: listener, secure: secure != nil, cut: cut}
	p.server = NewServer(nil)
	p.server.BaseContext = func(net.Listener) context.Context { return base }
	p.server.TLSConfig = secure
	return p, nil
}

// Bound has at most so many clients connected at once. It must come before Serve.
func (p *Port) Bound(most int) { p.listener = Bound(p.server, p.listener, most) }

// URL returns the port's address, such as http://127.0.0.1:8000.
func (p *Port) URL() string {
	if p.secure {
		return "https://" + p.listener.Addr().String()
	}
	return "http://" + p.listener.Addr().String()
}

// Serve answers requests with handler until Drain or Close; then it returns nil.
func (p *Port) Serve(handler http.Handler) error {
	p.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p.leaving.Load() {
			w.Header().Set("Connection", "close")
		}
		handler.ServeHTTP(w, r)
	})
	serve := p.server.Serve
	if p.secure {
		serve = func(l net.Listener) error { return p.server.ServeTLS(l, "", "") }
	}
	if err := serve(p.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("port %s: %w", p.listener.Addr(), err)
	}
	return nil
}

// Leave goes on serving, but has each answer end its connection, so that clients
// open the next one elsewhere.
func (p *Port) Leave() { p.leaving.Store(true) }

// Drain takes no new connection, and waits until all requests have ended, for
// limit at most. Those that run then are cut: their contexts end with the cause
// ErrStopped, and they have cutTime to say so. whole tells that none was.
func (p *Port) Drain(limit time.Duration) (whole bool) {
	p.Leave()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if p.server.Shutdown(ctx) == nil {
		return true
	}
	p.cut(ErrStopped)
	told, cancel := context.WithTimeout(context.Background(), cutTime)
	defer cancel()
	if p.server.Shutdown(told) != nil {
		p.Close()
	}
	return false
}

// Close ends the listening and every connection at once.
func (p *Port) Close() {
	p.cut(ErrStopped)
	p.server.Close()
	p.listener.Close() // where Serve was not reached
}
