package openai

import (
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
)

// realtimeRoute is the route of WebSocket connections.
const realtimeRoute = "/v1/realtime"

// realtime passes a WebSocket connection to the least loaded worker of the model that the
// query names. What passes on it is read for directives, and for the usage of a key with a limit.
func (a *API) realtime(c *gin.Context) {
	caller := a.keys.Of(c)
	x := &proxy.Exchange{ID: web.RequestID(c), Route: realtimeRoute, Worker: kv.NoWorker, Arrived: time.Now(), Trusted: caller.Trusted,
		Model: c.Query("model")}
	r := &inference{api: a, ctx: c.Request.Context(), exchange: x, caller: caller, model: a.models.Default()}
	r.client = clientOf(c.Request, caller)
	r.ctx = router.ForClient(r.ctx, r.client)
	a.observers.began(c.Request, x)
	defer func() { r.finish(c.Writer.Status()) }()
	switch header := c.Request.Header; {
	case header.Get("Upgrade") == "":
		a.fail(c, http.StatusUpgradeRequired, "", "open a WebSocket connection")
		return
	case !web.Names(header["Upgrade"], "websocket") || !web.Names(header["Connection"], "upgrade"):
		a.fail(c, http.StatusBadRequest, "", `the headers of a WebSocket connection are "Connection: Upgrade" and "Upgrade: websocket"`)
		return
	}
	model, known, err := a.models.Find(r.ctx, router.Need{Model: x.Model, Whole: true})
	if !known {
		a.noModel(c, x.Model)
		return
	}
	r.model = model
	if err == nil {
		charge, limited := a.keys.Prompt(c, 0, true)
		if limited != nil {
			a.fail(c, http.StatusTooManyRequests, "", limited.Error())
			return
		}
		r.request = router.Request{Model: x.Model, Client: r.client, Tenant: fair.Tenant{Name: caller.Name, Weight: caller.Weight},
			Class: caller.Class, AnsweredWhole: true}
		var decision router.Decision
		if decision, err = r.Route(nil); err == nil {
			x.Decision, x.Worker = decision, a.models.Names().Label(decision.Target.Key.Worker)
			err = a.proxy.Tunnel(c.Writer, c.Request, a.clientHeader(c, false), decision, terms(caller, charge))
		}
	}
	if err == nil && c.Writer.Status() == http.StatusOK { // nothing else was written
		x.Status = http.StatusSwitchingProtocols
	}
	r.settle(c, err)
}

// terms are those of a caller's WebSocket connection: the tokens that the worker reports are
// charged, and the connection ends once the key is in debt.
func terms(caller *keys.Caller, charge *keys.Charge) proxy.Terms {
	t := proxy.Terms{Directs: caller.Directs}
	if charge != nil {
		t.Used = func(used proxy.Usage) error {
			charge.Settle(charge.Tokens() + used.PromptTokens)
			return charge.Debt()
		}
	}
	return t
}
