package openai

import (
	"fmt"
	"net/http"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/directives"
	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/tokens"
)

// undirected refuses a body that directs the engines where its client may not, or that names what
// is in their caches where clients are isolated. It reports whether the body was accepted.
func (a *API) undirected(c *gin.Context, body *jsonbody.Body) (ok bool) {
	path, caller := "", a.keys.Of(c)
	switch {
	case caller.Directs:
	case body.Top != nil:
		path = directives.Find(body)
	default:
		path = directives.FindIn(c.GetHeader("Content-Type"), body.Raw)
	}
	if path != "" {
		a.fail(c, http.StatusBadRequest, path,
			fmt.Sprintf("%s is not accepted: it sets addresses, ranks or code for the engines. Keys with trust-hints: true may send it; with "+
				"--trust-transfer-params, all clients may", path))
		return false
	}
	if caller.Trusted {
		return true
	}
	if path = directives.FindShared(body); path != "" {
		a.fail(c, http.StatusBadRequest, path,
			"uuid is not accepted: it names an entry of a cache that all clients share. Keys with trust-hints: true may send it")
	}
	return path == ""
}

// opensNothing refuses a body by which an SGLang worker would open one of its files, where the
// client may not direct it. It reports whether the body was accepted.
func (r *inference) opensNothing(c *gin.Context) (ok bool) {
	if r.caller.Directs || r.kind != tokens.GeneratePrompt && !r.model.Tokens.SGLang() {
		return true
	}
	member := directives.FindFile(r.body)
	if member != "" {
		r.api.fail(c, http.StatusBadRequest, member,
			member+" refers to a file of the worker's machine: give media as https: or data: URLs, or in base64")
	}
	return member == ""
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
