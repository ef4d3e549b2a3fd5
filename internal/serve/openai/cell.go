package openai

import (
	"net/http"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/web"
	"kvrouter/internal/peers/cells"
	"kvrouter/internal/prompt/hints"
)

// serveCell adds the stream for routers above. It needs a key of the router port, or that of a
// trusted client, as the requests have that come from there.
func (a *API) serveCell(stream http.Handler) {
	if stream == nil {
		return
	}
	s := &a.settings
	keyed := s.RouterKeys.Asked() || a.keys.Asks()
	a.engine.GET(cells.Path, web.OwnPages(s.Host, keyed, web.Fail), func(c *gin.Context) {
		if s.RouterKeys.Asked() && s.RouterKeys.Holds(c.Request) {
			return
		} else if s.RouterKeys.Asked() && !a.keys.Asks() {
			s.RouterKeys.Refuse(c, cells.Path+" needs a key of the router port (--router-api-key)", web.Fail)
			return
		}
		caller, err := a.keys.Caller(c.Request)
		switch {
		case err != nil:
			a.fail(c, http.StatusUnauthorized, "", web.AskForKey(c, err.Error()))
			c.Abort()
		case !caller.Trusted:
			a.fail(c, http.StatusForbidden, "", cells.Path+" needs a key of the router port (--router-api-key), or one whose hints are honored")
			c.Abort()
		}
	}, gin.WrapH(stream))
}

// explains reports whether the answer names the chosen worker and the reason. A trusted router above
// learns from them, and GET /cell sends it the workers' prefixes in any case.
func (r *inference) explains() bool {
	return r.caller.SeesDecisions || r.caller.Trusted && r.hints.FromAbove
}

// below sets the headers by which the request goes to a router below this one.
func (r *inference) below(header http.Header) {
	q := &r.request
	hints.Routed{
		Tenant: q.Tenant.Name, Class: q.Class, Deadline: q.Deadline, TPOT: q.TPOT, Output: q.ExpectedOutput,
		SessionHeader: r.api.settings.SessionHeader, Session: q.SessionID, Series: q.Prefix.ID,
	}.Sign(header, r.model.Router.Now())
}
