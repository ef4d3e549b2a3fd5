package openai

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/serve/proxy"
)

// errSeveralAnswers refuses a request for several answers where only pairs of SGLang
// workers are up: their decode workers never answer it.
var errSeveralAnswers = errors.New("several answers to one prompt (n, best_of, beams) are not supported by disaggregated SGLang " +
	"workers: send one request for each, or run a worker without a role")

// Route implements proxy.Chooser.
func (r *inference) Route(exclude []uint64) (router.Decision, error) {
	r.request.Exclude = exclude
	d, err := r.decide(r.request)
	if err != nil {
		return d, err
	}
	pair := router.Pair{Decode: d, Whole: router.WholeNoPair}
	r.decided(&pair)
	return pair.Decode, nil
}

// Continue implements proxy.Chooser.
func (r *inference) Continue(exclude []uint64, answered []uint32) (router.Decision, error) {
	request := r.request
	request.Exclude, request.Tokens = exclude, slices.Concat(r.prompt.Tokens, answered)
	request.NumTokens, request.Text = len(request.Tokens), false
	request.ID, request.Sheddable = "", false
	if request.Deadline.IsZero() {
		request.Deadline = r.exchange.Arrived // its client waits for the next token
	}
	return r.decide(request)
}

// Beside implements proxy.Chooser. A session stays where it is: the first worker may answer.
func (r *inference) Beside(ctx context.Context, exclude []uint64) (router.Pair, error) {
	request := r.request
	request.Exclude, request.Beside, request.ID, request.Session, request.Home = exclude, true, "", 0, nil
	if r.paired {
		return r.model.Router.RoutePair(ctx, request, router.PairRule{LeastUncached: r.api.settings.MinUncachedTokens, Whole: r.whole,
			Enforce: r.api.settings.EnforceDisagg})
	}
	decision, err := r.model.Router.Route(ctx, request)
	return router.Pair{Decode: decision, Whole: router.WholeNoPair}, err
}

// Answers implements proxy.Chooser.
func (r *inference) Answers(pair router.Pair) { r.decided(&pair) }

// RoutePair implements proxy.Chooser.
func (r *inference) RoutePair(exclude []uint64, why string) (router.Pair, error) {
	r.request.Exclude = exclude
	pair, err := r.decidePair(r.request, why)
	switch {
	case err == nil:
		r.decided(&pair)
	case errors.Is(err, router.ErrNoWorker) && r.several && r.model.Router.Has(isSGLangDecode):
		err = errSeveralAnswers
	}
	return pair, err
}

// isSGLangDecode reports whether a worker is one of SGLang's that only continues the
// prompts of prefill workers.
func isSGLangDecode(t *kv.Target) bool { return t.Kind == kv.KindSGLang && t.Role == kv.RoleDecode }

// Rebook implements proxy.Chooser.
func (r *inference) Rebook(d router.Decision, to kv.WorkerKey) (router.Decision, error) {
	return r.model.Router.Rebook(r.request, d, to)
}

// IsUp implements proxy.Chooser.
func (r *inference) IsUp(t kv.Target) bool { return r.model.Router.IsUp(t) }

// decided reports a decision. If the usage counts more than the prompt, its tokens
// must not be compared.
func (r *inference) decided(pair *router.Pair) {
	if r.countsMore() {
		pair.Decode.Tokens = 0
	}
	r.api.observers.decided(r.exchange, pair)
}

// decide routes a request; the error of one that is pinned names its worker.
func (r *inference) decide(request router.Request) (router.Decision, error) {
	decision, err := r.model.Router.Route(r.ctx, request)
	if err != nil && request.Pinned != nil {
		err = &hints.PinnedError{Worker: request.Pinned, Names: r.api.models.Names(), Err: err}
	}
	return decision, err
}

// decidePair is decide for a request that two workers may serve; why says why one
// must, if it must.
func (r *inference) decidePair(request router.Request, why string) (router.Pair, error) {
	rule := router.PairRule{LeastUncached: r.api.settings.MinUncachedTokens, Whole: why, Enforce: r.api.settings.EnforceDisagg}
	if request.PinnedPrefill != nil && why == proxy.WholePrefilled {
		return router.Pair{}, router.ErrNoPair // its prefill worker has failed
	}
	pair, err := r.model.Router.RoutePair(r.ctx, request, rule)
	if err != nil && (request.Pinned != nil || request.PinnedPrefill != nil) {
		err = &hints.PinnedError{Worker: request.Pinned, Prefill: request.PinnedPrefill, Names: r.api.models.Names(), Err: err}
	}
	return pair, err
}

// answerQuery answers a dry run: nothing is sent to the chosen workers, and nothing
// booked.
func (r *inference) answerQuery(c *gin.Context) error {
	x, request, stream := r.exchange, r.request, r.body.Get("stream").Bool()
	var pair router.Pair
	var err error
	if r.paired {
		pair, err = r.decidePair(request, r.whole)
	} else {
		pair.Decode, err = r.decide(request)
	}
	if err != nil {
		return err
	}
	x.Receipts = append(pair.Prefill.Receipts, pair.Decode.Receipts...)
	decision, prefill := pair.Decode, pair.Decode.Target.Key
	if r.paired && pair.Whole == "" {
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
	answer := hints.NewQueryAnswer(x.ID, object, request.Model, time.Now().Unix(), prefill, key, decision.OverlapTokens, r.prompt.Tokens)
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
