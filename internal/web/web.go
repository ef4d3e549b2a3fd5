// Package web holds what both HTTP ports share: limits, API keys, header names and
// OpenAI's shape of an error.
package web

import (
	"crypto/rand"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
)

// Names of the headers by which a client learns what was decided.
const (
	HeaderWorker  = "X-Kvrouter-Worker-Id"
	HeaderOverlap = "X-Kvrouter-Overlap-Tokens"
	HeaderRequest = "X-Request-Id"
)

// HeaderRank tells a vLLM worker which of its data-parallel ranks to use.
const HeaderRank = "X-Data-Parallel-Rank"

// HopByHop are the headers that belong to one connection, not to the message.
var HopByHop = []string{"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade"}

// DropHopByHop takes from a message's headers those that belong to one connection:
// HopByHop, and those that its header Connection names.
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
	// HeaderTimeout bounds how long a client may take to send its headers.
	HeaderTimeout = 10 * time.Second
	// keepAlive is how long an idle client connection stays open.
	keepAlive = 2 * time.Minute
)

// StatusOverloaded (529) says that the queue is full.
const StatusOverloaded = 529

// NewEngine returns a gin engine that answers a panic with status 500 and logs
// its stack.
func NewEngine(log *slog.Logger) *gin.Engine {
	gin.SetMode(gin.ReleaseMode)
	engine := gin.New()
	engine.HandleMethodNotAllowed = true
	engine.Use(gin.CustomRecoveryWithWriter(io.Discard, func(c *gin.Context, cause any) {
		log.Error("request failed in the router", "path", c.Request.URL.Path, "cause", cause, "stack", string(debug.Stack()))
		if !c.Writer.Written() {
			OpenAIError(c, http.StatusInternalServerError, "internal error of the router")
		}
	}))
	return engine
}

// NewServer returns an HTTP server with the limits of both ports.
func NewServer(handler http.Handler) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: HeaderTimeout,
		IdleTimeout:       keepAlive,
		MaxHeaderBytes:    headerLimit,
	}
}

// RequireKey refuses requests without one of the bearer keys; with no keys it
// lets every request pass. fail writes the refusal.
func RequireKey(keys []string, fail func(*gin.Context, int, string)) gin.HandlerFunc {
	return func(c *gin.Context) {
		if len(keys) == 0 {
			return
		}
		given, _ := strings.CutPrefix(c.GetHeader("Authorization"), "Bearer ")
		for _, key := range keys {
			if subtle.ConstantTimeCompare([]byte(given), []byte(key)) == 1 {
				return
			}
		}
		fail(c, http.StatusUnauthorized, "missing or unknown API key: send it as Authorization: Bearer KEY")
		c.Abort()
	}
}

// OpenAIError answers a request with an error in OpenAI's shape.
func OpenAIError(c *gin.Context, status int, message string) {
	c.Data(status, "application/json", ErrorJSON(status, ErrorType(status), "", message))
}

// ErrorType returns OpenAI's or vLLM's word for an HTTP status.
func ErrorType(status int) string {
	switch status {
	case http.StatusUnauthorized:
		return "invalid_api_key"
	case http.StatusForbidden:
		return "permission_error"
	case http.StatusNotFound:
		return "NotFoundError"
	case http.StatusServiceUnavailable, http.StatusTooManyRequests, StatusOverloaded:
		return "service_unavailable"
	}
	if status < 500 {
		return "invalid_request_error"
	}
	return "server_error"
}

// ErrorJSON renders an error in OpenAI's shape; an empty param is null.
func ErrorJSON(status int, kind, param, message string) []byte {
	var p any
	if param != "" {
		p = param
	}
	body, _ := json.Marshal(gin.H{"error": gin.H{"message": message, "type": kind, "param": p, "code": status}})
	return body
}

// requestIDLimit bounds a client's own request id, bytes: it goes into logs.
const requestIDLimit = 256

// RequestID returns the request's id: the client's own where it sent a usable
// one, else a new one, which is kept with the request.
func RequestID(c *gin.Context) string {
	id := c.Request.Header.Get(HeaderRequest)
	usable := id != "" && len(id) <= requestIDLimit && !strings.ContainsFunc(id, func(r rune) bool { return r < ' ' || r > '~' })
	if !usable {
		var random [12]byte
		rand.Read(random[:])
		id = "req-" + hex.EncodeToString(random[:])
		c.Request.Header.Set(HeaderRequest, id)
	}
	return id
}
