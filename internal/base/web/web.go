// Package web is the common part of the HTTP ports: listening and shutdown, TLS,
// connection and body limits, key checks, header names and the forms of errors.
package web

import (
	"bytes"
	"context"
	"io"
	stdlog "log"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/google/uuid"
)

// Response headers that describe the routing decision.
const (
	HeaderWorker  = "X-Kvrouter-Worker-Id"
	HeaderOverlap = "X-Kvrouter-Overlap-Tokens"
	HeaderRequest = "X-Request-Id"

	// Of the decision of a router below this one.
	HeaderCellWorker  = "X-Kvrouter-Cell-Worker-Id"
	HeaderCellOverlap = "X-Kvrouter-Cell-Overlap-Tokens"

	// HeaderOwn is how the names of all headers begin that are a router's own.
	HeaderOwn = "X-Kvrouter-"
)

// HeaderRank selects the data-parallel rank of a vLLM worker.
const HeaderRank = "X-Data-Parallel-Rank"

// HopByHop are the hop-by-hop headers, which apply to one connection only.
var HopByHop = []string{"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "Te", "Trailer",
	"Transfer-Encoding", "Upgrade"}

// Names reports whether a header that lists tokens has one, in whatever case.
func Names(values []string, token string) bool {
	return slices.ContainsFunc(values, func(value string) bool {
		for part := range strings.SplitSeq(value, ",") {
			if strings.EqualFold(strings.TrimSpace(part), token) {
				return true
			}
		}
		return false
	})
}

// DropHopByHop removes hop-by-hop headers: HopByHop, and those that the header
// Connection names.
func DropHopByHop(header http.Header) {
	for _, named := range header["Connection"] {
		for name := range strings.SplitSeq(named, ",") {
			header.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range HopByHop {
		header.Del(name)
	}
}

const (
	// headerLimit bounds a request's headers, in bytes.
	headerLimit = 64 << 10
	// HeaderTimeout is the maximum time for a client to send its headers.
	HeaderTimeout = 10 * time.Second
	// maxStreams bounds the concurrent requests on a connection of HTTP/2.
	maxStreams = 128
	// keepAlive is the time that an idle client connection stays open.
	keepAlive = 2 * time.Minute
)

// StatusOverloaded (529) means that the queue is full.
const StatusOverloaded = 529

// NewEngine returns a gin engine that answers a panic with status 500 and logs
// its stack.
func NewEngine(log *slog.Logger) *gin.Engine {
	gin.SetMode(gin.ReleaseMode)
	engine := gin.New()
	engine.HandleMethodNotAllowed = true
	engine.Use(gin.CustomRecoveryWithWriter(io.Discard, func(c *gin.Context, cause any) {
		log.Error("panic in a request handler", "path", c.Request.URL.Path, "cause", cause, "stack", string(debug.Stack()))
		if !c.Writer.Written() {
			Fail(c, http.StatusInternalServerError, "internal router error")
		}
	}))
	return engine
}

// serverLog is the log of an HTTP server. Aborted TLS handshakes are logged at debug
// level: port checks cause them.
type serverLog struct{ log *slog.Logger }

// Write logs one line.
func (l serverLog) Write(line []byte) (int, error) {
	level := slog.LevelWarn
	if bytes.HasPrefix(line, []byte("http: TLS handshake error")) {
		level = slog.LevelDebug
	}
	l.log.Log(context.Background(), level, string(bytes.TrimSpace(line)))
	return len(line), nil
}

// newServer returns an HTTP server with the limits of all ports, without a handler.
func newServer() *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true) // of clients that begin with it
	return &http.Server{
		Protocols:         protocols,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		ErrorLog:          stdlog.New(serverLog{slog.Default()}, "", 0),
		ReadHeaderTimeout: HeaderTimeout,
		IdleTimeout:       keepAlive,
		MaxHeaderBytes:    headerLimit,
		ConnContext: func(ctx context.Context, conn net.Conn) context.Context {
			return context.WithValue(ctx, connectionKey{}, conn)
		},
	}
}

// Fail answers a request with an error in the dialect of its route.
func Fail(c *gin.Context, status int, message string) {
	FailParam(c, status, "", message)
}

// FailParam is Fail for a fault of one member of the request.
func FailParam(c *gin.Context, status int, param, message string) {
	id := RequestID(c)
	c.Header(HeaderRequest, id)
	c.Data(status, "application/json", DialectOf(c.Request.URL.Path).JSON(Fault{Status: status, Param: param, Message: message, Request: id}))
}

// errorType returns OpenAI's or vLLM's error type for an HTTP status.
func errorType(status int) string {
	switch status {
	case http.StatusUnauthorized:
		return "invalid_api_key"
	case http.StatusForbidden:
		return "permission_error"
	case http.StatusNotFound:
		return "NotFoundError"
	case http.StatusTooManyRequests:
		return "rate_limit_exceeded"
	case http.StatusServiceUnavailable, StatusOverloaded:
		return "service_unavailable"
	}
	if status < 500 {
		return "invalid_request_error"
	}
	return "server_error"
}

// requestIDLimit bounds a client's own request id, bytes: it goes into logs.
const requestIDLimit = 256

// addressInID precedes an address in an id from which vLLM's MoRI-IO connector connects to it.
const addressInID = "_addr_"

// UsableID reports whether a client's own request id is used.
func UsableID(id string) bool {
	return id != "" && len(id) <= requestIDLimit && !strings.Contains(id, addressInID) &&
		!strings.ContainsFunc(id, func(r rune) bool { return r < ' ' || r > '~' })
}

// RequestID returns the request's id: the client's own if it is usable, otherwise a
// new one, which is stored with the request.
func RequestID(c *gin.Context) string {
	id := c.Request.Header.Get(HeaderRequest)
	if !UsableID(id) {
		id = uuid.NewString() // llama.cpp's Python server refuses all others
		c.Request.Header.Set(HeaderRequest, id)
	}
	return id
}
