package openai

import (
	"context"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
)

// inference is one inference request. It chooses its workers for the proxy.
type inference struct {
	api      *API
	ctx      context.Context
	kind     tokens.Kind
	exchange *proxy.Exchange
	caller   *keys.Caller
	client   string         // whose failures it shares
	model    *models.Model  // that it is for
	gateway  *proxy.Gateway // that it came from; nil: from a client

	unnamed        bool   // no header gives it a name
	raw            []byte // the body's memory, until the end
	body           *jsonbody.Body
	hints          hints.Hints
	versions       router.VersionPolicy
	prompt         tokens.Prompt
	multiple       bool          // the body has several prompts
	tokens         int           // of all of them together
	unknown        bool          // the tokens of some are not known
	several        bool          // it wants several answers to one
	empty          bool          // a prompt has no token, which crashes an SGLang server
	held           time.Duration // without a worker
	waitsForPaused bool          // see headerPaused
	request        router.Request
	paired         bool   // two workers may serve it,
	whole          string // unless this says why one worker must
}

// infer serves one inference request: it finds the prompt, chooses and forwards.
func (a *API) infer(c *gin.Context, path string, kind tokens.Kind) {
	caller, given := a.keys.Of(c), c.GetHeader(web.HeaderRequest)
	x := &proxy.Exchange{ID: web.RequestID(c), Route: path, Worker: kv.NoWorker, Arrived: time.Now(), Trusted: caller.Trusted}
	r := &inference{api: a, ctx: c.Request.Context(), kind: kind, exchange: x, caller: caller, model: a.models.Default(),
		gateway: gatewayOf(c), unnamed: x.ID != given}
	r.client = clientOf(c.Request, caller)
	r.ctx = router.ForClient(r.ctx, r.client)
	a.observers.began(c.Request, x)
	defer func() { r.finish(c.Writer.Status()) }()
	if !r.read(c) {
		return
	}
	if !r.owns(c) {
		return
	}
	r.findPrompt(c.Request.URL.Path)
	if !r.stays(c) {
		return
	}
	if r.empty {
		a.fail(c, http.StatusBadRequest, "", "the prompt must contain at least one token")
		return
	}
	if r.paired = r.kind.Pairs() && (r.model.Router.Paired() || a.settings.EnforceDisagg); r.paired {
		r.whole, r.request.Kinds = a.proxy.WhyWhole(x.Route, r.body, r.hints.Whole, r.multiple)
	}
	if r.hints.Query {
		r.settle(c, r.answerQuery(c))
		return
	}
	charge, ok := r.charge(c)
	if !ok {
		return
	}
	x.Request, x.Default = &r.request, r.model == a.models.Default()
	a.observers.accepted(x, r.body)
	err := r.gateway.Follow(&r.request, r.model.Router, proxy.Client{Key: caller.Name, Model: x.Model, Trusted: caller.Trusted})
	if err == nil {
		err = a.proxy.Forward(r.ctx, c.Writer, r.upstream(c), x, r)
	}
	r.settle(c, err)
	r.settleCharge(charge, err)
	if x.Usage.Known && x.Decision.Tokens > 0 && x.Usage.PromptTokens != x.Decision.Tokens {
		r.model.Tokens.PromptMismatch(r.prompt.Shape, x.Decision.Tokens, x.Usage.PromptTokens)
	}
}

// finish reports and logs the request. written is the status that went to the client,
// if no other is known.
func (r *inference) finish(written int) {
	x := r.exchange
	if x.Status == 0 {
		x.Status = written
	}
	r.api.bodies.Done(r.client, r.raw)
	r.api.observers.finished(x)
	r.api.log.Debug("request", "id", x.ID, "route", x.Route, "status", x.Status, "worker", x.Worker, "tokens", x.Decision.Tokens,
		"overlap", x.Decision.OverlapTokens, "cached", x.Usage.CachedTokens, "seconds", time.Since(x.Arrived).Seconds())
}

// upstream is the request as it goes to a worker.
func (r *inference) upstream(c *gin.Context) proxy.Upstream {
	a, body, x := r.api, r.body, r.exchange
	header := a.clientHeader(c, r.hints.Pinned != nil)
	id := header.Get(web.HeaderRequest)
	u := proxy.Upstream{
		Method: c.Request.Method, Path: pathOf(c.Request.URL), Header: header, Body: body,
		AskUsage: a.settings.CollectUsage && (r.kind == tokens.ChatPrompt || r.kind == tokens.CompletionPrompt),
		Route:    x.Route, RequestID: x.ID, Client: r.client, EndMarked: r.kind != tokens.NoPrompt, Silent: !r.explains(), SeveralAnswers: r.several,
		CachedTokensMislead: r.countsMore() || proxy.ComputesAnew(body), Paired: r.paired, Aggregated: r.whole, Gateway: r.gateway, Below: r.below,
		Aborted: func() bool { return a.aborted.has(id) },
	}
	if x.Route == proxy.ResponsesRoute && body.Get("store").Type != gjson.False {
		u.Stored = func(worker uint64, id string) { a.noteStored(id, worker, r.caller.Owner()) }
	}
	if r.gateway == nil && r.request.Pinned == nil {
		if r.model.Router.Count() > 1 {
			u.MaxRetries = a.settings.Retries
		}
		if r.model.Router.Several() {
			u.Migration = proxy.NewMigration(x.Route, body, r.prompt.Tokens, r.prompt.Exact == len(r.prompt.Tokens) && len(r.prompt.Media) == 0,
				r.multiple || r.several,
				func(ids []uint32) (string, error) { return r.model.Tokens.TextOf(r.ctx, ids) })
		}
	}
	if r.gateway == nil && !r.multiple && len(r.prompt.Tokens) >= tokens.SendFrom {
		u.PromptTokens = proxy.NewPromptTokens(x.Route, body, r.prompt.Tokens, func(t *kv.Target) bool {
			return r.model.Tokens.Sends(t.Key.Worker, t.Generation, &r.prompt, proxy.TokenLimit(x.Route, body))
		})
	}
	return u
}

// countsMore reports whether the usage counts a prompt more than once, or for an answer after the
// first, whose prompt is cached by then: SGLang adds all of them, vLLM gives the last one.
func (r *inference) countsMore() bool { return r.multiple || r.several }
