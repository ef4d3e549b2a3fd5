// Package probe queries inference servers: health, models, role, KV event
// endpoints, load, block size and cache sizes. Code for a single engine is in the
// file of its name.
package probe

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
)

const (
	// maxBody bounds the part of an answer that is read, bytes. An SGLang server reports 20 KB
	// for each of its ranks.
	maxBody = 4 << 20
	// maxHeader bounds the headers of an answer, bytes.
	maxHeader = 64 << 10
	// answerLimit bounds the wait for an answer, unless a method takes another limit.
	answerLimit = 5 * time.Second
	// atOnce bounds concurrent health checks, if there are enough file descriptors:
	// of servers that have been healthy, and the same again of all others, so that
	// unreachable addresses delay nothing.
	atOnce = 128
)

// Server is an inference server with its settings, which take precedence over its
// answers.
type Server struct {
	ID        uint64
	URL       string // http://host:port, no slash at the end
	KVEvents  string // ZMQ endpoint of rank 0's KV events; empty: ask the server
	Replay    string // ZMQ endpoint of their replay; empty: ask the server
	Load      string // ZMQ endpoint of its load; empty: ask the server, else poll its /metrics
	kv.Disagg        // empty fields: ask the server

	// EventsPort is the port where rank 0 of a vLLM server publishes KV events if the
	// server has no route that names it; rank i uses this port plus i. 0: none.
	EventsPort uint16

	Key kv.Secret // bearer key of the server; may be empty
}

// Settings are the settings of requests to servers.
type Settings struct {
	TLS *tls.Config // for https URLs; nil: the system's roots
	Hop web.Hop     // this router, in the Via header of each request
}

// Client queries servers. It is safe for concurrent use.
type Client struct {
	hop    web.Hop
	probes *http.Client // for single questions: a new connection each time, which depends on no old one
	pages  *http.Client // for polled pages: it keeps connections
	edges  *guard.Edges
	log    *slog.Logger

	looks, firstLooks chan struct{} // hold a token for each running health check: of servers that have been healthy, and of others
	questions         chan struct{} // holds one for each other single question
}

// New returns a Client. edges counts the panics of parsers; nil counts nothing.
func New(settings Settings, edges *guard.Edges, log *slog.Logger) *Client {
	probes, pages := web.NewTransport(settings.TLS), web.NewTransport(settings.TLS)
	probes.DisableKeepAlives = true
	for _, t := range []*http.Transport{probes, pages} {
		t.WriteBufferSize = 0 // requests without bodies: 4 KB, not 64, for each connection
		t.MaxResponseHeaderBytes = maxHeader
	}
	checks := max(4, min(atOnce, web.Descriptors()/16))
	return &Client{
		hop: settings.Hop, probes: web.NewClient(probes), pages: web.NewClient(pages), edges: edges, log: log,
		looks: make(chan struct{}, checks), firstLooks: make(chan struct{}, checks), questions: make(chan struct{}, checks),
	}
}

// Close closes the kept connections that are idle.
func (c *Client) Close() { c.pages.CloseIdleConnections() }

// StatusError is an HTTP answer other than 200.
type StatusError struct {
	Path   string // that was requested
	Status int
}

// Error returns the message of the error.
func (e *StatusError) Error() string {
	return fmt.Sprintf("GET %s answered %d %s", e.Path, e.Status, http.StatusText(e.Status))
}

// ErrLeadsBack means that an address is the router's own.
var ErrLeadsBack = errors.New("the address is this router's own: use the address of the worker")

// statusOf returns the status of an answer other than 200; 0: err is no such answer.
func statusOf(err error) int {
	var status *StatusError
	if errors.As(err, &status) {
		return status.Status
	}
	return 0
}

// Answered reports whether err is an HTTP answer of the server.
func Answered(err error) bool { return statusOf(err) > 0 }

// NotFound reports whether err is an answer of status 404: the server has no such path.
func NotFound(err error) bool { return statusOf(err) == http.StatusNotFound }

// Rejected reports whether err is an answer of a status from 400 to 499, or 501: the server
// has no such path, or denies access. It runs; whether it is healthy is unknown.
func Rejected(err error) bool {
	return statusOf(err)/100 == 4 || statusOf(err) == http.StatusNotImplemented
}

// Refused reports whether err is a refused connection: no process listens, as opposed
// to one that is slow.
func Refused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// TimedOut reports whether a server did not answer in time. It may be busy.
func TimedOut(err error) bool {
	var late net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &late) && late.Timeout()
}

// Health checks a server's health, when the limit of concurrent checks permits: one without
// /health is healthy if it lists its models. Each request may take up to limit. known means
// that the server has been healthy before. The error may be a *StatusError or ErrLeadsBack.
func (c *Client) Health(ctx context.Context, s Server, limit time.Duration, known bool) error {
	err := c.check(ctx, s, "/health", limit, known)
	if Rejected(err) {
		if listed := c.check(ctx, s, modelsPath, limit, known); !Rejected(listed) {
			return listed
		}
	}
	if !known && errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		// An SGLang server computes a token for /health, which may take longer.
		if pinged := c.check(ctx, s, "/ping", limit, known); !Rejected(pinged) {
			return pinged
		}
	}
	return err
}

// Ping is Health of an SGLang server that has been healthy, at a path that computes no
// token.
func (c *Client) Ping(ctx context.Context, s Server, limit time.Duration) error {
	return c.check(ctx, s, "/ping", limit, true)
}

// AnswersChats checks that a server that has neither /health nor a list of models has the route
// of chats, by a chat without messages.
func (c *Client) AnswersChats(ctx context.Context, s Server) error {
	const path = "/v1/chat/completions"
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	body, err := c.request(ctx, c.probes, http.MethodPost, s, path, strings.NewReader("{}"))
	switch status := statusOf(err); {
	case err == nil:
		_ = body.Close()
	case status == http.StatusNotFound, status == http.StatusMethodNotAllowed, status == http.StatusNotImplemented:
		return fmt.Errorf("%s has neither /health nor %s nor %s: it is not the URL of an OpenAI server", s.URL, modelsPath, path)
	case !Rejected(err):
		return err
	}
	return nil
}

// check is a health check at one path.
func (c *Client) check(ctx context.Context, s Server, path string, limit time.Duration, known bool) error {
	room := c.firstLooks
	if known {
		room = c.looks
	}
	select {
	case room <- struct{}{}:
		defer func() { <-room }()
	case <-ctx.Done():
		return ctx.Err()
	}
	return c.get(ctx, s, path, limit, nil)
}

// LeadsBack reports whether a URL is this router's own, as far as that can be
// determined before ctx is done.
func (c *Client) LeadsBack(ctx context.Context, url string) bool {
	return c.hop != "" && errors.Is(c.get(ctx, Server{URL: url}, "/health", answerLimit, nil), ErrLeadsBack)
}

// Models is the models of a server.
type Models struct {
	Names    []string // nil: unknown; the server may serve any model
	Adapters []string // LoRA adapters among Names: the models with a parent
	Root     string   // that the base model was loaded from; empty: unknown
	SGLang   bool     // the list is an SGLang server's
}

// modelsPath is where servers list their models.
const modelsPath = "/v1/models"

// Models queries a server's models. A server that denies access, or has no such
// path, serves an unknown one.
func (c *Client) Models(ctx context.Context, s Server) (served Models, err error) {
	var list struct {
		Data []struct {
			ID     string  `json:"id"`
			Root   string  `json:"root"`
			Owner  string  `json:"owned_by"`
			Parent *string `json:"parent"`
		} `json:"data"`
	}
	err = c.get(ctx, s, modelsPath, answerLimit, &list)
	if Answered(err) && statusOf(err) < 500 {
		return Models{}, nil
	}
	if err != nil {
		return Models{}, err
	}
	for _, model := range list.Data {
		served.Names = append(served.Names, model.ID)
		served.SGLang = served.SGLang || model.Owner == "sglang"
		if model.Parent != nil && *model.Parent != "" {
			served.Adapters = append(served.Adapters, model.ID)
		} else if served.Root == "" {
			served.Root = model.Root
		}
	}
	return served, nil
}

// Caches is what a server reports about the KV caches of its ranks.
type Caches struct {
	Tokens  map[uint32]int // that the cache of each rank holds; ranks of unknown size are left out
	Engines int            // data-parallel ranks that a vLLM server's metrics page shows; 0: unknown
	Block   int            // tokens a block, of a vLLM server; 0: unknown
	// Retention is vLLM's --prefix-cache-retention-interval, tokens: windows are kept at
	// multiples of it, too. 0: unknown, or none are.
	Retention int
}

// Caches queries the KV caches of a server's ranks. info is the caller's data on an
// SGLang server; nil: it is queried. Sizes may be returned with an error.
func (c *Client) Caches(ctx context.Context, s Server, engine kv.Engine, info *ServerInfo, ranks []uint32) (Caches, error) {
	if engine == kv.EngineSGLang {
		sizes, err := c.sglangCaches(ctx, s, info, ranks)
		return Caches{Tokens: sizes}, err
	}
	page, err := c.page(ctx, s, []string{cacheName})
	return Caches{Tokens: page.cacheTokens(), Engines: len(page.engines()), Block: page.blockSize(), Retention: page.retention()}, err
}

// get fetches a path of a server within limit and, unless into is nil, decodes its JSON.
// A *StatusError is an answer other than 200, ErrLeadsBack one of this router.
func (c *Client) get(ctx context.Context, s Server, path string, limit time.Duration, into any) error {
	return c.getBy(ctx, c.probes, s, path, limit, into)
}

// getBy is get by one of the clients.
func (c *Client) getBy(ctx context.Context, client *http.Client, s Server, path string, limit time.Duration, into any) error {
	if into != nil && limit <= answerLimit { // thousands of servers may be discovered at once
		select {
		case c.questions <- struct{}{}:
			defer func() { <-c.questions }()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	body, err := c.open(ctx, client, s, path)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(body, maxBody)).Decode(into); err != nil {
		return fmt.Errorf("GET %s%s: the answer is not the JSON of an OpenAI server: %w", s.URL, path, err)
	}
	return nil
}

// open sends a GET to a server, with its key if it has one, and returns the body of an
// answer of 200; it must be closed.
func (c *Client) open(ctx context.Context, client *http.Client, s Server, path string) (io.ReadCloser, error) {
	return c.request(ctx, client, http.MethodGet, s, path, nil)
}

// request is open with another method and a body of JSON; nil: none.
func (c *Client) request(ctx context.Context, client *http.Client, method string, s Server, path string, sent io.Reader) (io.ReadCloser, error) {
	request, err := http.NewRequestWithContext(ctx, method, s.URL+path, sent)
	if err != nil {
		return nil, fmt.Errorf("%s %s%s: %w", method, s.URL, path, err)
	}
	if sent != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	if s.Key != "" {
		request.Header.Set("Authorization", "Bearer "+string(s.Key))
	}
	c.hop.Sign(request.Header)
	response, err := client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("worker at %s does not answer: %w", s.URL, explainTLS(errors.Unwrap(err)))
	}
	if response.StatusCode == http.StatusOK {
		return response.Body, nil
	}
	_ = response.Body.Close()
	if response.StatusCode == http.StatusLoopDetected {
		return nil, ErrLeadsBack
	}
	return nil, &StatusError{path, response.StatusCode}
}

// explainTLS adds a remedy to the error of a connection with https.
func explainTLS(err error) error {
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err, &unknown):
		return fmt.Errorf("%w: set --worker-ca to the certificate authority that signed its certificate", err)
	case errors.As(err, &name):
		return fmt.Errorf("%w: use a name of its certificate in the URL", err)
	case errors.As(err, &invalid):
		return fmt.Errorf("%w: give the worker another certificate", err)
	case errors.Is(err, http.ErrSchemeMismatch):
		return fmt.Errorf("%w: the worker does not use TLS on this port, use http:// in its URL", err)
	}
	return err
}

// HostOf returns the host of a server's URL; empty: it has none.
func HostOf(base string) string {
	if u, err := url.Parse(base); err == nil {
		return u.Hostname()
	}
	return ""
}
