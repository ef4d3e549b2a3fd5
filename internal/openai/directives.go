package openai

import (
	"fmt"
	"net/http"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/directives"
	"kvrouter/internal/jsonbody"
)

// undirected refuses a body that directs the engines where its client may not. It reports whether
// the body was accepted.
func (a *API) undirected(c *gin.Context, body *jsonbody.Body) (ok bool) {
	if a.keys.Of(c).Directs {
		return true
	}
	path := ""
	if body.Top != nil {
		path = directives.Find(body)
	} else {
		path = directives.FindIn(c.GetHeader("Content-Type"), body.Raw)
	}
	if path != "" {
		a.fail(c, http.StatusBadRequest, path, fmt.Sprintf("%s is not accepted: it tells the engines what to connect to or to run. Keys with trust-hints: true may send it, and all clients with --trust-transfer-params", path))
	}
	return path == ""
}

// withoutPriority returns the body of a client that is not trusted without the priority by which
// an engine would prefer it to others: that of vLLM is below 0, that of SGLang above.
func (r *inference) withoutPriority(body *jsonbody.Body) *jsonbody.Body {
	priority := body.Get("priority")
	if r.caller.Trusted || !priority.Exists() || priority.Type == gjson.Null {
		return body
	}
	if above := priority.Num > 0; priority.Type == gjson.Number && (priority.Num == 0 || above != r.model.Tokens.SGLang()) {
		return body
	}
	return body.Without("priority")
}
