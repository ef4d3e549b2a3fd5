package openai

import (
	"fmt"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/serve/proxy"
)

// read reads the body and finds its model. Not ok: it has been answered.
func (r *inference) read(c *gin.Context) (ok bool) {
	a := r.api
	if r.raw, ok = a.body(c); !ok {
		return false
	}
	if r.body, ok = jsonbody.Parse(r.raw); !ok {
		r.body = &jsonbody.Body{Raw: r.raw}
		if r.kind != tokens.NoPrompt || web.IsJSON(c.GetHeader("Content-Type"), len(r.raw)) {
			a.fail(c, http.StatusBadRequest, "", jsonbody.Refusal(r.raw))
			return false
		}
	}
	if r.exchange.Route == tokens.InvocationsRoute {
		r.exchange.Route, r.kind = tokens.Invoked(r.body)
	}
	if !r.readHints(c) || !a.undirected(c, r.body) {
		return false
	}
	r.body = r.gateway.Rename(r.body)
	model, began := r.body.Get("model").String(), time.Now()
	form := r.body.Top == nil
	if form && (len(a.models.All()) > 1 || a.settings.HoldWhenEmpty > 0) { // such as one with a recording
		model = web.FormField(c.GetHeader("Content-Type"), r.raw, "model")
	}
	var known bool
	var err error
	need := router.Need{Model: model, Whole: !r.kind.Pairs(), Now: !r.hints.MayWait()}
	if a.settings.EnforceDisagg {
		why, _ := proxy.WhyWhole(r.exchange.Route, r.body, r.hints.Whole, false)
		need.Pair = why == ""
	}
	r.model, known, err = a.models.Find(r.ctx, need)
	if r.held = time.Since(began); !known && !form {
		a.noModel(c, model)
		return false
	}
	if !form {
		r.exchange.Model = model
	}
	if r.model.Requests.Add(1); err != nil {
		r.settle(c, err)
		return false
	}
	if !r.opensNothing(c) {
		return false
	}
	if r.kind == tokens.GeneratePrompt && a.lacksSGLang() {
		a.fail(c, http.StatusNotFound, "", errNoSGLang.Error())
		return false
	}
	if r.body.Get("vllm_xargs").Get("kv_cache_report_mode").Exists() {
		// The engine would report reused blocks as stored, and never as removed: the
		// index could not be kept exact.
		a.fail(c, http.StatusBadRequest, "vllm_xargs", "kv_cache_report_mode is not supported: the router follows KV events")
		return false
	}
	if !r.renames(c) {
		return false
	}
	salt := r.body.Get("cache_salt").String()
	if salt, ok := r.caller.Salt(salt, salt != "" || r.body.Get("extra_key").Type != gjson.Null); ok && r.body.Top != nil {
		r.body = r.body.With("cache_salt", proxy.Quoted(salt))
	}
	r.body = r.model.Tokens.KeepApart(r.exchange.Route, r.body)
	return true
}

const (
	// headerVersions says which versions of the weights a request takes, as SMG's does: see router.ParseVersionPolicy.
	headerVersions = "X-Smg-Version-Policy"
	// headerPaused says what becomes of a request whose prompt is cached on a paused worker while others run: it goes to
	// one of these (pausedMove, the default), or waits (pausedWait).
	headerPaused           = "X-Kvrouter-Paused"
	pausedMove, pausedWait = "move", "wait"
)

// readHints reads the routing hints of the request. Not ok: it has been answered.
func (r *inference) readHints(c *gin.Context) (ok bool) {
	a := r.api
	given, bad := hints.Read(c.Request.Header, r.body.Get("nvext"), a.models.Names(), r.caller.Trusted)
	if bad != nil {
		a.fail(c, http.StatusBadRequest, bad.Param, bad.Error())
		return false
	}
	if given.Query && !r.caller.SeesDecisions {
		a.fail(c, http.StatusForbidden, "nvext.annotations", hints.AnnotationQuery+
			": this key may not see routing decisions (--decision-headers)")
		return false
	}
	if given.Prefix.ID != "" && a.keys.Several() {
		given.Prefix.ID = r.caller.Owner().Scoped(given.Prefix.ID)
	}
	var err error
	if r.versions, err = router.ParseVersionPolicy(c.GetHeader(headerVersions)); err != nil {
		a.fail(c, http.StatusBadRequest, headerVersions, headerVersions+" is "+err.Error())
		return false
	}
	switch given := c.GetHeader(headerPaused); given {
	case "", pausedMove:
	case pausedWait:
		r.waitsForPaused = true
	default:
		a.fail(c, http.StatusBadRequest, headerPaused, fmt.Sprintf("%s is %.40q: want %s or %s", headerPaused, given, pausedMove, pausedWait))
		return false
	}
	given.Session = hints.Session(c.Request.Header, a.settings.SessionHeader, a.settings.SessionCookie)
	r.hints = given
	return true
}

// findPrompt finds the prompt's tokens and makes the router's form of the request.
func (r *inference) findPrompt(path string) {
	x, began := r.exchange, r.exchange.Trace.Now()
	prompts := r.model.Tokens.Prompts(r.ctx, r.kind, x.Route, r.body)
	r.prompt, r.multiple = tokens.Longest(prompts), len(prompts) > 1
	r.tokens, r.unknown = tokens.Total(prompts)
	r.empty = tokens.HasEmpty(prompts) && (r.kind == tokens.GeneratePrompt || r.model.Tokens.SGLang())
	r.several = proxy.SeveralAnswers(x.Route, r.body)
	x.Source, x.Prepared = r.prompt.Source, time.Since(x.Arrived)-r.held
	x.Trace.Tokens(began, x.Source, len(r.prompt.Tokens))
	adapter, listed := r.model.Router.Adapter(x.Model)
	r.request = router.Request{
		Tokens: r.prompt.Tokens[:r.prompt.Exact], NumTokens: len(r.prompt.Tokens),
		Items: r.prompt.Media,
		Salt:  r.body.Get("cache_salt").String(), LoRA: r.model.Tokens.Adapter(x.Route, r.body, adapter, listed), Model: x.Model,
		Client:        r.client,
		AnsweredWhole: !r.body.Get("stream").Bool() || r.multiple || r.several, SGLang: r.kind == tokens.GeneratePrompt,
		Explain: x.Trace.Sampled(), Versions: r.versions, WaitsForPaused: r.waitsForPaused,
		Session: r.model.Router.SessionOf(r.caller.Name, r.hints.Session), SessionID: router.SessionID(r.caller.Name, r.hints.Session),
	}
	if r.prompt.Source == tokens.SourceNone && len(r.prompt.Tokens) == 0 && r.kind != tokens.NoPrompt && r.model.Router.Approximates() {
		if text := tokens.Text(r.body); len(text) > 0 {
			x.Source = tokens.SourceText
			r.request.Tokens, r.request.NumTokens, r.request.Text = text, len(text), true
		}
	}
	r.request.Work = r.work(path)
	if r.request.Text { // its words stand for them
		r.request.Unseen = 0
	}
	r.request.Follow(r.hints)
	r.setTenant()
	r.body = r.withoutPriority(r.body)
	r.request.Pulls = !r.multiple && proxy.Pulls(x.Route, r.body)
}

const (
	// promptBytes is the least number of bytes of a body for each token of a prompt that is not
	// known, and unseenMost bounds these tokens: most of a long body are images.
	promptBytes, unseenMost = 4, 64 << 10
)

// work estimates what of the request explains that its engine is silent.
func (r *inference) work(path string) router.Work {
	w := router.Work{Task: health.TaskOf(path, r.kind != tokens.NoPrompt), Output: proxy.TokenLimit(r.exchange.Route, r.body)}
	if w.Unseen = r.tokens - len(r.prompt.Tokens); r.unknown || r.kind == tokens.NoPrompt {
		w.Unseen = max(w.Unseen, min(len(r.raw)/promptBytes, unseenMost))
	}
	output := w.Output
	if !r.request.AnsweredWhole { // each of its events shows that the server works
		output = 0
	}
	w.Logprobs = proxy.Logprobs(r.body, len(r.prompt.Tokens)+w.Unseen, output)
	return w
}
