package proxy

import (
	"bufio"
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"time"

	"kvrouter/internal/health"
	"kvrouter/internal/router"
)

// Tunnel passes a WebSocket connection to the decided worker and back until one side
// closes it, its worker is down, or no byte comes for --request-timeout. The booking of the decision ends with
// it. An error means that the worker could not be reached, and nothing was written to w. Only a
// refused connection counts as the worker's failure: what else ends a connection before its first
// byte, a client can cause by its headers.
func (p *Proxy) Tunnel(w http.ResponseWriter, r *http.Request, header http.Header, decision router.Decision) (failed error) {
	defer decision.Booking.End()
	target := decision.Target
	to, err := url.Parse(target.URL)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	f := p.sent(decision.Booking, target, cancel, watch{})
	defer p.ended(f)
	header = p.header(header, target)
	header.Set("Connection", "Upgrade")
	header.Set("Upgrade", "websocket")
	tunnel := httputil.ReverseProxy{
		Rewrite: func(out *httputil.ProxyRequest) {
			out.SetURL(to)
			out.Out.Header = header
		},
		Transport: p.client.Transport,
		ModifyResponse: func(answer *http.Response) error {
			dropOwn(answer.Header)
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
	tunnel.ServeHTTP(&watchedWriter{ResponseWriter: w, idle: p.settings.RequestTimeout, cancel: cancel, heard: func() { f.heard.Store(p.now().UnixNano()) }}, upgrade)
	return failed
}

// watchedWriter cancels a connection that was hijacked and is idle for too long.
type watchedWriter struct {
	http.ResponseWriter
	idle   time.Duration // 0: no limit
	cancel context.CancelCauseFunc
	heard  func() // called when the worker sends a byte
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
