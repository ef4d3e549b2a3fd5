package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/hints"
	"kvrouter/internal/jsonbody"
	"kvrouter/internal/keys"
	"kvrouter/internal/kv"
	"kvrouter/internal/models"
	"kvrouter/internal/nativeapi"
	"kvrouter/internal/page"
	"kvrouter/internal/proxy"
	"kvrouter/internal/router"
	"kvrouter/internal/selection"
	"kvrouter/internal/settings"
	"kvrouter/internal/telemetry"
	"kvrouter/internal/tokens"
	"kvrouter/internal/tracing"
	"kvrouter/internal/web"
)

// API is the OpenAI side of the router.
type API struct {
	config    Config
	keys      *keys.Ring
	models    *models.Set
	proxy     *proxy.Proxy
	telemetry *telemetry.Metrics
	recorder  *telemetry.Recorder // nil: nothing is recorded
	tracer    *tracing.Tracer     // nil: nothing is traced
	pairs     *proxy.Pairs
	page      *page.Page // nil: nobody looks
	bodies    *web.Bodies
	log       *slog.Logger
	draining  atomic.Bool
}

// NewAPI returns the OpenAI side over what the router is made of.
func NewAPI(config Config, models *models.Set, px *proxy.Proxy, telemetry *telemetry.Metrics, log *slog.Logger) *API {
	return &API{config: config, keys: keys.New(config.Keys, config.APIKey), models: models, proxy: px, telemetry: telemetry, log: log, pairs: proxy.NewPairs(models, px, config.Disagg, log),
		bodies: web.NewBodies(config.MaxBodyBytes, config.Bodies.MaxInflightBodyBytes)}
}

// Drain makes /ready fail, so that balancers in front send no more requests.
func (a *API) Drain() {
	a.draining.Store(true)
	a.models.EndHolding()
}

// Handler returns the routes of the OpenAI port.
func (a *API) Handler() http.Handler {
	engine := web.NewEngine(a.log)
	engine.Use(a.config.Hop.Refuse)
	guard := a.keys.Guard(web.OpenAIError)
	engine.NoRoute(func(c *gin.Context) {
		if g := proxy.GatewayOf(c.Request.Context()); g != nil && g.Any {
			if guard(c); !c.IsAborted() {
				a.infer(c, "*", tokens.NoPrompt)
			}
			return
		}
		a.fail(c, http.StatusNotFound, "", fmt.Sprintf("no such route: %s %s", c.Request.Method, c.Request.URL.Path))
	})
	engine.NoMethod(func(c *gin.Context) {
		a.fail(c, http.StatusMethodNotAllowed, "", fmt.Sprintf("%s does not take %s", c.Request.URL.Path, c.Request.Method))
	})
	engine.GET("/", func(c *gin.Context) { a.page.Welcome(c) })
	engine.GET("/health", func(c *gin.Context) { c.Status(http.StatusOK) })
	engine.GET("/ready", a.ready)
	engine.GET("/version", func(c *gin.Context) { c.JSON(http.StatusOK, gin.H{"version": settings.Version()}) })
	engine.GET("/metrics", gin.WrapH(a.telemetry.Handler()))

	guarded := engine.Group("/", guard)
	a.short().Serve(guarded)
	for path, kind := range tokens.Routes {
		guarded.POST(path, func(c *gin.Context) { a.infer(c, path, kind) })
	}
	own := web.OwnPages(a.config.Host, a.keys.Asks(), web.OpenAIError)
	for _, path := range proxy.AdminRoutes {
		guarded.Any(path, own, a.admin)
	}
	a.native().Serve(guarded, own, a.admin)
	operators := engine.Group("/", selection.Guards(a.config.Host, a.config.RouterAPIKey, "/busy_threshold is for who has the router port's key (--router-api-key)", web.OpenAIError)...)
	if len(a.config.RouterAPIKey) == 0 {
		operators.Use(a.keys.Guard(web.OpenAIError), a.keys.Trusted(web.OpenAIError))
	}
	thresholds := selection.Thresholds{Models: a.models, Model: a.config.ServedModelName}
	operators.GET("/busy_threshold", thresholds.Show)
	operators.POST("/busy_threshold", thresholds.Change)
	return engine
}

// Ready tells whether requests can be served now, and whether the router ends.
func (a *API) Ready() (ready, draining bool) {
	draining = a.draining.Load()
	return !draining && a.models.Ready(), draining
}

// ready shows that.
func (a *API) ready(c *gin.Context) {
	status := http.StatusServiceUnavailable
	ready, draining := a.Ready()
	if ready {
		status = http.StatusOK
	}
	c.JSON(status, gin.H{"ready": ready, "schedulable_workers": a.models.Schedulable(), "draining": draining})
}

// short are the routes that no worker is chosen for.
func (a *API) short() nativeapi.Short {
	return nativeapi.Short{Models: a.models, Proxy: a.proxy, ModelName: a.config.ServedModelName, Question: a.question, Body: a.body, Done: a.bodies.Done, Told: func(c *gin.Context) bool { return a.keys.Of(c).Told }, Fail: a.fail}
}

// native are SGLang's own short routes.
func (a *API) native() nativeapi.Routes {
	return nativeapi.Routes{Models: a.models, Proxy: a.proxy, Admin: a.config.AllowEngineAdmin, Question: a.question, Fail: func(c *gin.Context, status int, message string) {
		a.fail(c, status, "", message)
	}}
}

// inference is one inference request on its way.
type inference struct {
	api      *API
	ctx      context.Context
	kind     tokens.Kind
	id       string // X-Request-Id
	exchange *proxy.Exchange
	caller   *keys.Caller
	model    *models.Model  // that it is for
	gateway  *proxy.Gateway // that it came from; nil: from a client

	raw      []byte // the body's memory, until the end
	body     *jsonbody.Body
	hints    hints.Hints
	prompt   tokens.Prompt
	multiple bool          // the body has several prompts
	several  bool          // it wants several answers to one
	fatal    bool          // a prompt has no token, which ends an SGLang server
	held     time.Duration // without a worker
	took     time.Duration // until the prompt was known, without that
	request  router.Request
	seen     page.Seen
	recorded *telemetry.RecordedPrompt // nil: nothing is recorded, or nothing is known of the prompt
}

// infer serves one inference request: find out its prompt, choose, forward.
func (a *API) infer(c *gin.Context, path string, kind tokens.Kind) {
	x := &proxy.Exchange{Route: path, Worker: kv.NoWorker, Arrived: time.Now()}
	r := &inference{api: a, ctx: c.Request.Context(), kind: kind, id: web.RequestID(c), exchange: x, caller: a.keys.Of(c), model: a.models.Default(), gateway: proxy.GatewayOf(c.Request.Context())}
	x.Trace = a.tracer.Begin(c.Request, path, x.Arrived, r.caller.Trusted)
	r.seen = a.page.Began(r.id, x)
	defer func() { r.finish(c.Writer.Status()) }()
	if !r.read(c) {
		return
	}
	r.findPrompt()
	if r.fatal {
		a.fail(c, http.StatusBadRequest, "", "a prompt has no token: give it one at least")
		return
	}
	if err := a.keys.Prompt(c, r.request.NumTokens); err != nil {
		a.fail(c, http.StatusTooManyRequests, "", err.Error())
		return
	}
	stream := r.body.Get("stream").Bool()
	shared := kind != tokens.NoPrompt && (r.model.Router.Paired() || a.config.Disagg.EnforceDisagg)
	var why string
	if shared {
		why, r.request.Kinds = proxy.WhyWhole(path, r.body, r.hints.Whole, r.multiple)
	}
	if r.hints.Query {
		r.settle(c, r.answerQuery(c, stream, shared, why))
		return
	}
	a.page.Prompt(r.seen, r.model, &r.request, r.body)
	if r.model == a.models.Default() { // a record is a trace of one model
		r.recorded = a.recorder.Prompt(r.request)
	}
	if err := r.gateway.Follow(&r.request, r.model.Router); err != nil {
		r.settle(c, err)
		return
	}
	u := r.upstream(c)
	if kind != tokens.NoPrompt {
		a.telemetry.Began()
		defer func() { a.telemetry.Ended(x, time.Now()) }()
	}
	var err error
	if shared {
		err = a.pairs.Forward(r.ctx, c.Writer, u, x, r.body, why, r.routePair)
	} else {
		err = a.proxy.Forward(r.ctx, c.Writer, u, x, r.route)
	}
	r.settle(c, err)
	a.keys.Used(c, x.Usage.PromptTokens-r.request.NumTokens)
	if x.Usage.Known && x.Decision.Tokens > 0 && x.Usage.PromptTokens != x.Decision.Tokens {
		r.model.Tokens.PromptMismatch(r.prompt.Shape, x.Decision.Tokens, x.Usage.PromptTokens)
	}
}

// finish counts, records and logs the request. written is the status that went
// to the client, if no other is known.
func (r *inference) finish(written int) {
	x := r.exchange
	if x.Status == 0 {
		x.Status = written
	}
	r.api.bodies.Done(r.raw)
	r.api.telemetry.Finished(*x, time.Now())
	r.api.page.Finished(r.seen, x, time.Now())
	r.api.recorder.Finished(*x, r.recorded, time.Now())
	r.api.log.Debug("request", "id", r.id, "route", x.Route, "status", x.Status, "worker", x.Worker, "tokens", x.Decision.Tokens,
		"overlap", x.Decision.OverlapTokens, "cached", x.Usage.CachedTokens, "seconds", time.Since(x.Arrived).Seconds())
}

// read reads the body and what it asks for. Not ok: it has been answered.
func (r *inference) read(c *gin.Context) (ok bool) {
	a := r.api
	if r.raw, ok = a.body(c); !ok {
		return false
	}
	r.body = &jsonbody.Body{Raw: r.raw}
	if r.kind != tokens.NoPrompt || strings.HasPrefix(c.ContentType(), "application/json") {
		if r.body, ok = jsonbody.Parse(r.raw); !ok {
			a.fail(c, http.StatusBadRequest, "", "the request body is not a JSON object, or one of more than 262,144 members or 10,000 levels")
			return false
		}
	}
	if !r.readHints(c) {
		return false
	}
	r.body = r.gateway.Rename(r.body)
	model, began := r.body.Get("model").String(), time.Now()
	form := r.body.Top == nil
	if form && (len(a.models.All()) > 1 || a.config.Routing.HoldWhenEmpty > 0) { // such as one with a recording
		model = web.FormField(c.GetHeader("Content-Type"), r.raw, "model")
	}
	var known bool
	var err error
	need := router.Need{Model: model, Whole: r.kind == tokens.NoPrompt, Now: !r.hints.MayWait()}
	if a.config.Disagg.EnforceDisagg {
		why, _ := proxy.WhyWhole(r.exchange.Route, r.body, r.hints.Whole, false)
		need.Pair = why == ""
	}
	r.model, known, err = a.models.Find(r.ctx, need)
	if r.held = time.Since(began); !known && !form {
		a.fail(c, http.StatusNotFound, "model", fmt.Sprintf("The model `%s` does not exist.", model))
		return false
	}
	if !form {
		r.exchange.Model = model
	}
	if r.model.Requests.Add(1); err != nil {
		r.settle(c, err)
		return false
	}
	if r.kind == tokens.GeneratePrompt && a.native().Lacks() {
		a.fail(c, http.StatusNotFound, "", nativeapi.ErrNone.Error())
		return false
	}
	if r.body.Get("vllm_xargs").Get("kv_cache_report_mode").Exists() {
		// The engine would report blocks as stored that it only used again, and
		// never as removed: the index could not be kept true.
		a.fail(c, http.StatusBadRequest, "vllm_xargs", "kv_cache_report_mode is not allowed behind a router that follows KV events")
		return false
	}
	if salt, ok := r.caller.Salt(r.body.Get("cache_salt").String()); ok && r.body.Top != nil {
		r.body = r.body.With("cache_salt", proxy.Quoted(salt))
	}
	r.body = r.model.Tokens.KeepApart(r.exchange.Route, r.body)
	return true
}

// readHints reads what the request says about its routing. Not ok: it has been
// answered.
func (r *inference) readHints(c *gin.Context) (ok bool) {
	a := r.api
	given, bad := hints.Read(c.Request.Header, r.body.Get("nvext"), a.models.Names(), r.caller.Trusted)
	if bad != nil {
		a.fail(c, http.StatusBadRequest, bad.Param, bad.Error())
		return false
	}
	if given.Query && !r.caller.Told {
		a.fail(c, http.StatusForbidden, "nvext.annotations", hints.AnnotationQuery+": this key is not told who would serve a request (--decision-headers)")
		return false
	}
	given.Session = hints.Session(c.Request.Header, a.config.Routing.SessionHeader, a.config.Routing.SessionCookie)
	r.hints = given
	return true
}

// findPrompt finds the prompt's tokens and makes the router's form of the request.
func (r *inference) findPrompt() {
	x, began := r.exchange, r.exchange.Trace.Now()
	prompts := r.model.Tokens.Prompts(r.ctx, r.kind, x.Route, r.body)
	r.prompt, r.multiple = tokens.Longest(prompts), len(prompts) > 1
	r.fatal = tokens.HasEmpty(prompts) && (r.kind == tokens.GeneratePrompt || r.model.Tokens.SGLang())
	r.several = proxy.SeveralAnswers(x.Route, r.body)
	x.Source, r.took = r.prompt.Source, time.Since(x.Arrived)-r.held
	x.Trace.Tokens(began, x.Source, len(r.prompt.Tokens))
	adapter, listed := r.model.Router.Adapter(x.Model)
	r.request = router.Request{
		Tokens: r.prompt.Tokens[:r.prompt.Exact], NumTokens: len(r.prompt.Tokens), Media: kv.MediaBlocks(r.prompt.Media, r.model.Router.BlockSize()),
		Salt: r.body.Get("cache_salt").String(), LoRA: r.model.Tokens.Adapter(x.Route, r.body, adapter, listed), Model: x.Model,
		AnsweredWhole: !r.body.Get("stream").Bool() || r.multiple || r.several, SGLang: r.kind == tokens.GeneratePrompt, Explain: x.Trace.Sampled(),
		Session: r.model.Router.SessionOf(r.caller.Name, r.hints.Session), SessionID: router.SessionID(r.caller.Name, r.hints.Session),
	}
	r.request.Follow(r.hints)
}

// upstream is the request as it goes to a worker.
func (r *inference) upstream(c *gin.Context) proxy.Upstream {
	a, body := r.api, r.body
	u := proxy.Upstream{
		Method: c.Request.Method, Path: c.Request.URL.RequestURI(), Header: proxy.ClientHeader(c.Request.Header, r.id, r.hints.Pinned != nil, a.keys.Asks()), Body: body.Raw,
		Route: r.exchange.Route, RequestID: r.id, Arrived: r.exchange.Arrived, EndMarked: r.kind != tokens.NoPrompt, Silent: !r.caller.Told, SeveralAnswers: r.several,
		CachedTokensMislead: r.countsMore() || proxy.ComputesAnew(body),
	}
	if a.config.CollectUsage && (r.kind == tokens.ChatPrompt || r.kind == tokens.CompletionPrompt) {
		u.Head, u.Body, u.HideUsage = proxy.AskForUsage(body)
	}
	if u.Gateway = r.gateway; u.Gateway != nil {
		u.Rebook = func(d router.Decision, taken kv.WorkerKey) (router.Decision, error) {
			return r.model.Router.Rebook(r.request, d, taken)
		}
	} else if r.model.Router.Count() > 1 && r.request.Pinned == nil {
		u.MaxRetries = a.config.Disagg.Retries
	}
	return u
}

// countsMore tells whether the usage will speak of more than one computing of one
// prompt: of several prompts, or of SGLang's answers after the first, whose prompt it
// has computed before.
func (r *inference) countsMore() bool {
	return r.multiple || r.several && (r.kind == tokens.GeneratePrompt || r.model.Tokens.SGLang())
}

// settle answers a request that could not be forwarded, if it still can be
// answered, and finds the status to be counted.
func (r *inference) settle(c *gin.Context, err error) {
	a, x := r.api, r.exchange
	var late *proxy.LegTimeout
	var prefill *proxy.PrefillFailure
	stopped := errors.Is(context.Cause(c.Request.Context()), web.ErrStopped)
	switch {
	case err == nil:
	case stopped && !errors.Is(err, proxy.ErrAnswered):
		c.Header("Retry-After", "1")
		a.fail(c, http.StatusServiceUnavailable, "", web.ErrStopped.Error())
	case !stopped && c.Request.Context().Err() != nil:
		x.Status = proxy.ClientGone
	case errors.Is(err, proxy.ErrAnswered):
		x.Status = http.StatusBadGateway
		if errors.Is(err, proxy.ErrSilent) {
			x.Status = http.StatusGatewayTimeout
		}
		a.log.Warn("answer was cut short", "route", x.Route, "worker", x.Worker, "error", err)
	case errors.As(err, &late):
		a.log.Warn("no pair of workers answered", "route", x.Route, "error", err)
		a.fail(c, http.StatusGatewayTimeout, "", late.Error())
	case errors.Is(err, proxy.ErrSeveralAnswers):
		a.fail(c, http.StatusBadRequest, "n", err.Error())
	case errors.Is(err, proxy.ErrSilent):
		a.fail(c, http.StatusGatewayTimeout, "", fmt.Sprintf("worker %s did not answer within %s", x.Worker, a.config.RequestTimeout))
	case errors.Is(err, router.ErrNoWorker), errors.Is(err, router.ErrBusy), errors.Is(err, router.ErrQueueFull), errors.Is(err, router.ErrQueueTimeout), errors.Is(err, router.ErrNoPair):
		r.refuse(c, err)
	case proxy.OutOfDescriptors(err):
		a.log.Warn("the router has too many files and connections open", "route", x.Route, "error", err)
		c.Header("Retry-After", "1")
		a.fail(c, http.StatusServiceUnavailable, "", "the router has too many connections open: try again")
	case errors.As(err, &prefill):
		a.log.Warn("a prefill worker failed", "route", x.Route, "error", err)
		a.fail(c, http.StatusBadGateway, "", fmt.Sprintf("prefill worker %s failed before it answered", prefill.Called))
	default:
		a.log.Warn("no worker answered", "route", x.Route, "error", err)
		a.fail(c, http.StatusBadGateway, "", fmt.Sprintf("worker %s failed before it answered", x.Worker))
	}
}

// refuse answers a request that no worker may take now.
func (r *inference) refuse(c *gin.Context, err error) {
	a, x := r.api, r.exchange
	status, message, again := http.StatusServiceUnavailable, err.Error(), "1"
	var pinned *hints.PinnedError
	switch {
	case errors.Is(err, router.ErrQueueFull):
		status = web.StatusOverloaded
	case errors.As(err, &pinned):
	case errors.Is(err, router.ErrBusy):
		message = "Service temporarily unavailable: All workers are busy, please retry later"
	case errors.Is(err, router.ErrNoPair):
		message, again = err.Error()+" (--enforce-disagg): try again in a few seconds", "5"
	case errors.Is(err, router.ErrNoWorker):
		message, again = "no worker is ready: try again in a few seconds", "5"
	}
	if r.gateway != nil && !errors.As(err, &pinned) {
		var reason string
		status, reason = r.gateway.Refusal(err)
		c.Header(proxy.HeaderDropped, reason)
	}
	known := "" // the names that clients make up are no labels
	if r.model.Refused.Add(1); r.model.Lists(x.Model) {
		known = x.Model
	}
	a.telemetry.Refused(known, x.Route, err)
	c.Header("Retry-After", again)
	a.fail(c, status, "", message)
}

// body reads a request's body within the limits; not ok: it has been answered.
// Else a.bodies.Done must follow.
func (a *API) body(c *gin.Context) (body []byte, ok bool) {
	body, err := a.bodies.Read(c.Writer, c.Request)
	var bad *web.BodyError
	if errors.As(err, &bad) {
		if bad.Status == http.StatusServiceUnavailable {
			a.log.Warn("a request was refused: no memory is left for its body", "held", a.bodies.Held())
		}
		a.fail(c, bad.Status, "", bad.Message)
	}
	return body, err == nil
}

// workers returns one target of each worker that is up: its ranks share a server.
func (a *API) workers() []kv.Target {
	return kv.OnePerWorker(a.models.Targets())
}

// question is a client's short request as it goes to every worker.
func (a *API) question(c *gin.Context, body []byte) proxy.Question {
	return proxy.Question{Method: c.Request.Method, Path: c.Request.URL.RequestURI(), Header: proxy.ClientHeader(c.Request.Header, web.RequestID(c), false, a.keys.Asks()), Body: body}
}

// admin sends an administration request to every worker and reports what each
// answered; the status is the worst of theirs.
func (a *API) admin(c *gin.Context) {
	if !a.config.AllowEngineAdmin {
		a.fail(c, http.StatusForbidden, "", "this path administers the engines: start the router with --allow-engine-admin to let it through")
		return
	}
	body, ok := a.body(c)
	if !ok {
		return
	}
	defer a.bodies.Done(body)
	c.JSON(a.proxy.Administer(c.Request.Context(), nativeapi.Having(c.FullPath(), a.workers()), a.question(c, body)))
}

// fail answers with an error in OpenAI's shape.
func (a *API) fail(c *gin.Context, status int, param, message string) {
	c.Header(web.HeaderRequest, web.RequestID(c))
	c.Data(status, "application/json", web.ErrorJSON(status, web.ErrorType(status), param, message))
}

// answerQuery answers a dry run: nothing is sent to the worker that is chosen, or
// to the two that may share the request, and nothing booked.
func (r *inference) answerQuery(c *gin.Context, stream, shared bool, why string) error {
	x, request := r.exchange, r.request
	var pair router.Pair
	var err error
	if shared {
		pair, err = r.decidePair(request, why)
	} else {
		pair.Decode, err = r.decide(request)
	}
	if err != nil {
		return err
	}
	x.Receipts = append(pair.Prefill.Receipts, pair.Decode.Receipts...)
	decision, prefill := pair.Decode, pair.Decode.Target.Key
	if shared && pair.Whole == "" {
		decision.OverlapTokens, prefill = pair.Prefill.OverlapTokens, pair.Prefill.Target.Key
	}
	object := "chat.completion"
	switch {
	case r.kind == tokens.CompletionPrompt:
		object = "text_completion"
	case r.kind != tokens.ChatPrompt:
		object = hints.AnnotationQuery
	case stream:
		object = "chat.completion.chunk"
	}
	key := decision.Target.Key
	answer := hints.NewQueryAnswer(web.RequestID(c), object, request.Model, time.Now().Unix(), prefill, key, decision.OverlapTokens, r.prompt.Tokens)
	c.Header(web.HeaderRequest, answer.ID)
	c.Header(web.HeaderWorker, r.api.models.Names().Label(key.Worker))
	c.Header(web.HeaderOverlap, strconv.Itoa(decision.OverlapTokens))
	if !stream {
		c.JSON(http.StatusOK, answer)
		return nil
	}
	text, err := answer.Events()
	if err != nil {
		return err
	}
	c.Data(http.StatusOK, "text/event-stream; charset=utf-8", text)
	return nil
}
