package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/directives"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
)

// Terms are what the client of a Tunnel may do.
type Terms struct {
	Directs bool                   // it may direct the worker
	Used    func(used Usage) error // gets what the worker reports; an error ends the connection. nil: it is not read
}

// Tunnel passes a WebSocket connection to the decided worker and back until one side
// closes it, its worker is down, or no byte comes for --request-timeout. Where the client may not
// direct the worker, a message that does ends the connection, as does the end of the router: the
// client gets a close frame. The booking of the decision ends with the connection. An error means that the worker could not be reached, and nothing was written to w. Only a refused
// connection counts as the worker's failure: what else ends a connection before its first byte, a
// client can cause by its headers.
func (p *Proxy) Tunnel(w http.ResponseWriter, r *http.Request, header http.Header, decision router.Decision, terms Terms) (failed error) {
	defer decision.Booking.End()
	target := decision.Target
	to, err := url.Parse(target.URL)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	f := p.sent(decision.Booking, target, cancel, new(sending), false)
	f.reads.Store(false) // a connection may be idle
	defer p.ended(f)
	header = p.header(header, target)
	header.Set("Connection", "Upgrade")
	header.Set("Upgrade", "websocket")
	watched := &watchedWriter{ResponseWriter: w, idle: p.settings.RequestTimeout, cancel: cancel, heard: func() { f.heard.Store(p.now().UnixNano()) }}
	if !terms.Directs || terms.Used != nil {
		header.Del("Sec-Websocket-Extensions") // compressed messages could not be read
	}
	if !terms.Directs {
		watched.frames = new(directives.Frames)
	}
	if terms.Used != nil {
		watched.told = func(message []byte) error {
			if used := ReadUsage(message); used.Known {
				return terms.Used(used)
			}
			return nil
		}
	}
	defer context.AfterFunc(ctx, func() { watched.leave(context.Cause(ctx)) })()
	tunnel := httputil.ReverseProxy{
		Rewrite: func(out *httputil.ProxyRequest) {
			out.SetURL(to)
			out.Out.URL.RawQuery = web.WithoutKeys(out.Out.URL.RawQuery)
			out.Out.Header = header
		},
		Transport: p.client.Transport,
		ModifyResponse: func(answer *http.Response) error {
			dropOwn(answer.Header)
			if protocol := web.FirstProtocol(r.Header); protocol != "" && answer.StatusCode == http.StatusSwitchingProtocols && answer.Header.Get(web.HeaderProtocol) == "" {
				answer.Header.Set(web.HeaderProtocol, protocol) // browsers close a connection without one of those that they offered
			}
			return nil
		},
		ErrorHandler: func(_ http.ResponseWriter, _ *http.Request, err error) {
			e := p.unanswered(target.Key.Worker, cause(ctx, err), health.Refused)
			if failed = e; r.Context().Err() != nil {
				return
			}
			if e.kind == health.Refused {
				decision.Booking.FailAs(e.kind, e.Error())
			}
			p.failed(target.Key.Worker)
		},
		ErrorLog: log.New(io.Discard, "", 0),
	}
	upgrade := r.WithContext(ctx)
	upgrade.Header = header
	tunnel.ServeHTTP(watched, upgrade)
	return failed
}

// watchedWriter cancels a connection that was hijacked and is idle for too long.
type watchedWriter struct {
	http.ResponseWriter
	idle   time.Duration // 0: no limit
	cancel context.CancelCauseFunc
	frames *directives.Frames // of the client; nil: it may send everything
	heard  func()             // called when the worker sends a byte

	told   func(message []byte) error // see socketConn
	socket atomic.Pointer[socketConn] // nil: not hijacked
}

// leave tells the client why the router ends the connection.
func (w *watchedWriter) leave(why error) {
	if c := w.socket.Load(); c != nil && errors.Is(why, web.ErrStopped) {
		c.leave(goingAway, web.ErrStopped.Error())
	}
}

// Unwrap returns the writer of the HTTP server.
func (w *watchedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Hijack implements http.Hijacker.
func (w *watchedWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err != nil {
		return conn, buffered, err
	}
	w.heard()
	socket := &socketConn{Conn: conn, told: w.told}
	if w.socket.Store(socket); w.frames != nil {
		conn = &confinedConn{socketConn: socket, frames: w.frames}
	} else {
		conn = socket
	}
	watched := &watchedConn{Conn: conn, idle: w.idle, heard: w.heard}
	if w.idle > 0 {
		watched.timer = time.AfterFunc(w.idle, func() { w.cancel(ErrSilent) })
	}
	return watched, buffered, nil
}

// watchedConn sets the timer back with each byte that passes.
type watchedConn struct {
	net.Conn
	idle  time.Duration
	timer *time.Timer // nil: no limit
	heard func()
}

func (c *watchedConn) passed(n int) {
	if n > 0 && c.timer != nil {
		c.timer.Reset(c.idle)
	}
}

func (c *watchedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.passed(n)
	return n, err
}

func (c *watchedConn) Write(b []byte) (int, error) {
	c.heard()
	n, err := c.Conn.Write(b)
	c.passed(n)
	return n, err
}

// Close ends the watch, too.
func (c *watchedConn) Close() error {
	if c.timer != nil {
		c.timer.Stop()
	}
	return c.Conn.Close()
}

// confinedConn ends with a client's message that directs the worker.
type confinedConn struct {
	*socketConn
	frames *directives.Frames
}

// Read implements net.Conn.
func (c *confinedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	passed, name := c.frames.Take(b[:n])
	if name == "" {
		return n, err
	}
	c.leave(policyViolation, name+" is not accepted: see --trust-transfer-params")
	return passed, fmt.Errorf("a message has %s", name)
}
