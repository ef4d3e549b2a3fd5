// Package openai is the OpenAI port: it reads requests, computes their prompt
// tokens, routes and forwards them. Other routes list models, tokenize, and serve
// SGLang's own routes and Dynamo's /busy_threshold.
package openai

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/directives"
	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/quota"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
)

// Settings are the values of the flags that the port reads.
type Settings struct {
	Host             string    // address of the port
	RouterKeys       *web.Keys // of the router port, for /busy_threshold; nil: any trusted client's
	ServedModelName  string    // listed while no worker is up; empty: none
	AllowEngineAdmin bool      // pass administration requests to the workers
	Rollouts         bool      // serve Deps.Workers to trusted clients, and let them administer workers
	CollectUsage     bool      // ask workers for the usage of streams
	PageURL          string    // of the dashboard; empty: there is none
	CORSOrigins      []string  // whose pages may use the port; empty: none
	Places           int       // maximum number of requests at the same time; 0: no limit
	GatewayPlaces    int       // the same of requests that come through gateways

	RequestTimeout    time.Duration                // longest wait for a worker's next byte
	ClassTTFT         map[fair.Class]time.Duration // objective of the time to first token of requests without one
	ClassTPOT         map[fair.Class]time.Duration // the same of the time per further token
	HoldWhenEmpty     time.Duration                // how long requests wait for a first worker
	SessionHeader     string                       // names the session; empty: no header does
	SessionCookie     string                       // likewise
	MinUncachedTokens int                          // fewest uncached prompt tokens for which a prefill worker is used
	EnforceDisagg     bool                         // refuse requests that no pair of workers can serve
	Retries           int                          // further workers to try while nothing was answered
}

// Deps are the parts that the port uses.
type Deps struct {
	Keys      *keys.Ring
	Bodies    *web.Bodies
	Models    *models.Set
	Proxy     *proxy.Proxy
	Metrics   http.Handler // serves GET /metrics
	Hop       web.Hop      // refuses requests that this router has sent
	Cell      http.Handler // serves routers above; nil: nothing does
	Workers   http.Handler // serves workerRoutes
	Observers []Observer   // in the order of their calls
	Stored    *Stored      // stored responses, as far as other routers have said; nil: there are none
	// ShareStored sends other routers the worker and the owner of a response. It must not block.
	// nil: there are no others.
	ShareStored func(id string, worker uint64, owner keys.Owner)
	Log         *slog.Logger
}

// API implements the OpenAI port. It is safe for concurrent use.
type API struct {
	settings  Settings
	keys      *keys.Ring
	bodies    *web.Bodies
	models    *models.Set
	proxy     *proxy.Proxy
	observers observers
	log       *slog.Logger
	engine    *gin.Engine
	stored    *Stored
	aborted   aborts
	controls  controls
	draining  atomic.Bool

	shareStored func(id string, worker uint64, owner keys.Owner) // see Deps
}

// scrapes is the maximum number of answers to /metrics that are being written.
const scrapes = 32

// New returns the port's routes.
func New(s Settings, deps Deps) *API {
	a := &API{
		settings: s, keys: deps.Keys, bodies: deps.Bodies, models: deps.Models, proxy: deps.Proxy, observers: deps.Observers, log: deps.Log,
		engine: web.NewEngine(deps.Log),
		stored: cmp.Or(deps.Stored, &Stored{}), shareStored: deps.ShareStored,
	}
	a.engine.Use(web.CORS(s.CORSOrigins), deps.Hop.Refuse)
	guard, place := a.keys.Guard(web.Fail), a.places()
	a.engine.NoRoute(func(c *gin.Context) {
		if g := gatewayOf(c); g == nil || !g.Any {
			a.fail(c, http.StatusNotFound, "", fmt.Sprintf("no such route: %s %s", c.Request.Method, c.Request.URL.Path))
			c.Abort()
		}
	}, guard, place, func(c *gin.Context) { a.infer(c, "*", tokens.NoPrompt) })
	a.engine.NoMethod(func(c *gin.Context) {
		a.fail(c, http.StatusMethodNotAllowed, "", fmt.Sprintf("%s does not accept %s", c.Request.URL.Path, c.Request.Method))
	})
	a.engine.GET("/", a.welcome)
	a.engine.GET("/health", func(c *gin.Context) { c.Status(http.StatusOK) })
	a.engine.GET("/ready", a.ready)
	a.engine.Match([]string{http.MethodGet, http.MethodPost}, "/ping", func(c *gin.Context) { // SageMaker's question
		if ready, _ := a.Ready(); !ready {
			c.Status(http.StatusServiceUnavailable)
		}
	})
	a.engine.GET("/version", func(c *gin.Context) { c.JSON(http.StatusOK, gin.H{"version": settings.Version()}) })
	a.engine.GET("/metrics", web.Within(quota.New(scrapes), web.Address, func(c *gin.Context) {
		a.fail(c, http.StatusServiceUnavailable, "", "too many readers of /metrics: try again")
	}), gin.WrapH(deps.Metrics))

	clients := a.engine.Group("/", guard, place)
	clients.GET("/v1/models", a.listModels)
	clients.GET("/v1/models/*model", a.listModels) // names have slashes
	for _, version := range []string{"", "/v1"} {
		clients.POST(version+"/tokenize", a.tokenized((*tokens.Source).Tokenize))
		clients.POST(version+"/detokenize", a.tokenized((*tokens.Source).Detokenize))
	}
	clients.GET("/v1/responses/:id", a.storedRoute(""))
	clients.DELETE("/v1/responses/:id", a.storedRoute(""))
	clients.POST("/v1/responses/:id/cancel", a.storedRoute("/cancel"))
	clients.GET("/v1/responses/:id/input_items", a.storedRoute("/input_items"))
	own := web.OwnPages(s.Host, a.keys.Asks(), web.Fail)
	clients.GET(realtimeRoute, web.ListedPages(s.CORSOrigins, own), a.realtime)
	for path, kind := range tokens.Routes {
		clients.POST(path, func(c *gin.Context) { a.infer(c, path, kind) })
	}
	for _, path := range proxy.AdminRoutes {
		clients.Any(path, own, a.admin)
	}
	a.serveNative(clients, own)
	a.serveVLLM(clients, own)
	a.serveThresholds()
	a.serveWorkers(deps.Workers)
	clients.POST("/finish_session", own, a.finishSession)
	a.serveCell(deps.Cell)
	return a
}

// ServeHTTP serves a client's request.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) { a.engine.ServeHTTP(w, azured(r)) }

// gatewayKey is the context key of the gateway that a request came from.
type gatewayKey struct{}

// ServeGateway serves a request of a gateway, which sends it to the chosen worker.
func (a *API) ServeGateway(w http.ResponseWriter, r *http.Request, via *proxy.Gateway) {
	// gin makes its context itself: the request's is the way into it.
	a.engine.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), gatewayKey{}, via)))
}

// gatewayOf returns the gateway that a request came from; nil: it came from a client.
func gatewayOf(c *gin.Context) *proxy.Gateway {
	via, _ := c.Request.Context().Value(gatewayKey{}).(*proxy.Gateway)
	return via
}

// Drain makes /ready fail, so that load balancers send no more requests.
func (a *API) Drain() {
	a.draining.Store(true)
	a.models.StopWaiting()
}

// Ready reports whether requests can be served now, and whether the router shuts down.
func (a *API) Ready() (ready, draining bool) {
	draining = a.draining.Load()
	return !draining && a.models.Ready(), draining
}

// ready answers with that.
func (a *API) ready(c *gin.Context) {
	status := http.StatusServiceUnavailable
	ready, draining := a.Ready()
	if ready {
		status = http.StatusOK
	}
	c.JSON(status, gin.H{"ready": ready, "schedulable_workers": a.models.Schedulable(), "draining": draining})
}

// body reads a request's body within the limits; not ok: it has been answered.
// Else a.done must follow.
func (a *API) body(c *gin.Context) (body []byte, ok bool) {
	body, err := a.bodies.Read(c.Writer, c.Request, a.clientOf(c))
	var bad *web.BodyError
	if errors.As(err, &bad) {
		if bad.Status == http.StatusServiceUnavailable {
			a.log.Warn("request refused: no memory is left for its body", "held", a.bodies.Held())
		}
		a.fail(c, bad.Status, "", bad.Message)
	}
	return body, err == nil
}

// smallBody is body for one of at most that many bytes, which nothing counts.
func (a *API) smallBody(c *gin.Context, most int64) (body []byte, ok bool) {
	body, err := web.ReadBody(c.Writer, c.Request, most)
	var bad *web.BodyError
	if errors.As(err, &bad) {
		a.fail(c, bad.Status, "", bad.Message)
	}
	return body, err == nil
}

// done releases the body of a request.
func (a *API) done(c *gin.Context, body []byte) { a.bodies.Done(a.clientOf(c), body) }

// clientOf names the client of a request.
func (a *API) clientOf(c *gin.Context) string { return clientOf(c.Request, a.keys.Of(c)) }

// workers returns one target of each worker that is up: its ranks share a server.
func (a *API) workers() []kv.Target {
	return kv.OnePerWorker(a.models.Targets())
}

// question is a client's short request as it goes to workers.
func (a *API) question(c *gin.Context, body []byte) proxy.Question {
	return proxy.Question{Method: c.Request.Method, Path: pathOf(c.Request.URL), Header: a.clientHeader(c, false), Body: body}
}

// pathOf returns the path and query of a request as they go to a worker.
func pathOf(u *url.URL) string {
	bare := *u
	bare.RawQuery = web.WithoutKeys(u.RawQuery)
	return bare.RequestURI()
}

// clientHeader returns a client's headers as they go to a worker. See proxy.ClientHeader.
func (a *API) clientHeader(c *gin.Context, pinned bool) http.Header {
	caller, id := a.keys.Of(c), web.RequestID(c)
	if a.keys.Several() { // engines refuse an id that is in use
		id = caller.Owner().Scoped(id)
	}
	header := proxy.ClientHeader(c.Request.Header, id, pinned, a.keys.Asks())
	if !caller.Directs {
		directives.DropHeaders(header)
	}
	if !caller.Trusted {
		hints.DropUntrusted(header)
	}
	return header
}

// noModel refuses a request for a model that no worker serves.
func (a *API) noModel(c *gin.Context, name string) {
	a.fail(c, http.StatusNotFound, "model", fmt.Sprintf("The model `%.256s` does not exist.", name))
}

// fail answers with an error in the dialect of the route.
func (a *API) fail(c *gin.Context, status int, param, message string) {
	web.FailParam(c, status, param, message)
}
