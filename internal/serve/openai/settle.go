package openai

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/serve/proxy"
)

// settle answers a request that could not be forwarded, if it still can be
// answered, and sets the status to be counted.
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
	case errors.Is(err, errSeveralAnswers):
		a.fail(c, http.StatusBadRequest, "n", err.Error())
	case errors.Is(err, web.ErrUnsendable):
		a.log.Debug("a request cannot be forwarded", "route", x.Route, "error", err)
		a.fail(c, http.StatusBadRequest, "", "the path or a header cannot be forwarded")
	case errors.Is(err, proxy.ErrSilent):
		a.fail(c, http.StatusGatewayTimeout, "", fmt.Sprintf("worker %s did not answer within %s", x.Worker, a.settings.RequestTimeout))
	case errors.Is(err, router.ErrNoWorker), errors.Is(err, router.ErrBusy), errors.Is(err, router.ErrQueueFull),
		errors.Is(err, router.ErrQueueTimeout), errors.Is(err, router.ErrShed), errors.Is(err, router.ErrNoPair):
		r.refuse(c, err)
	case proxy.OutOfDescriptors(err):
		a.log.Warn("too many open files or connections", "route", x.Route, "error", err)
		c.Header("Retry-After", "1")
		a.fail(c, http.StatusServiceUnavailable, "", "the router has too many connections open: try again")
	case errors.Is(err, proxy.ErrGateway):
		a.log.Warn("malformed answer of a gateway", "route", x.Route, "worker", x.Worker)
		a.fail(c, http.StatusBadGateway, "", proxy.ErrGateway.Error())
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
	var shed *router.ShedError
	switch {
	case errors.Is(err, router.ErrQueueFull):
		status = web.StatusOverloaded
	case errors.As(err, &shed):
		status, again = http.StatusTooManyRequests, strconv.Itoa(shed.Seconds())
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
	if r.model.Refused.Add(1); r.model.Lists(x.Model) {
		x.Served = x.Model
	}
	x.Refused = err
	c.Header("Retry-After", again)
	a.fail(c, status, "", message)
}
