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

// ErrStopped is the cause of the context of a request that was cancelled because the
// shutdown timeout expired.
var ErrStopped = errors.New("the router is shutting down")

// cutTime is the time for cancelled requests to send their last bytes to clients.
const cutTime = 2 * time.Second

// Port is an HTTP port that listens. Its end has three steps: Leave, Drain, Close.
type Port struct {
	server   *http.Server
	listener net.Listener
	secure   bool
	stall    time.Duration // see Stall
	leaving  atomic.Bool
	running  atomic.Int64            // requests, those on hijacked connections too
	cut      context.CancelCauseFunc // of every request's context
}

// Listen opens a TCP port for at most that many concurrent connections, with the limits of
// all ports; port 0 selects a free port. flag is the port's flag in errors. With secure nil
// it serves plain HTTP.
func Listen(host string, port int, flag string, connections int, secure *tls.Config) (*Port, error) {
	return listen(host, port, flag, connections, secure, Stall)
}

func listen(host string, port int, flag string, connections int, secure *tls.Config, stall time.Duration) (*Port, error) {
	listener, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("%s %d: %w: free the port or choose another", flag, port, err)
	}
	base, cut := context.WithCancelCause(context.Background())
	p := &Port{secure: secure != nil, stall: stall, cut: cut}
	p.server = newServer()
	p.listener = bound(p.server, listener, connections, stall)
	p.server.BaseContext = func(net.Listener) context.Context { return base }
	p.server.TLSConfig = secure
	return p, nil
}

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
		p.running.Add(1)
		defer p.running.Add(-1)
		serve := handler.ServeHTTP
		if r.Method == http.MethodHead {
			serve = func(w http.ResponseWriter, r *http.Request) { serveHead(w, r, handler) }
		}
		serveSteadily(w, r, http.HandlerFunc(serve), p.stall)
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

// Leave keeps serving, but closes each connection after its response, so that clients
// reconnect elsewhere.
func (p *Port) Leave() { p.leaving.Store(true) }

// Drain accepts no new connections and waits up to limit until all requests have ended.
// Then it cancels the contexts of the rest with the cause ErrStopped and gives them
// cutTime to end. whole reports whether no request was cancelled.
func (p *Port) Drain(limit time.Duration) (whole bool) {
	p.Leave()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if p.ended(ctx) {
		return true
	}
	p.cut(ErrStopped)
	ending, cancel := context.WithTimeout(context.Background(), cutTime)
	defer cancel()
	if !p.ended(ending) {
		p.Close()
	}
	return false
}

// drainPoll is the interval of looks for requests on hijacked connections, which the server does
// not wait for.
const drainPoll = 20 * time.Millisecond

// ended shuts the server down and waits until all requests have ended. Not ok: ctx ended before.
func (p *Port) ended(ctx context.Context) (ok bool) {
	if p.server.Shutdown(ctx) != nil {
		return false
	}
	look := time.NewTicker(drainPoll)
	defer look.Stop()
	for p.running.Load() > 0 {
		select {
		case <-ctx.Done():
			return false
		case <-look.C:
		}
	}
	return true
}

// Close closes the listener and all connections immediately.
func (p *Port) Close() {
	p.cut(ErrStopped)
	p.server.Close()
	p.listener.Close() // where Serve was not reached
}
