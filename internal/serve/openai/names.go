package openai

import (
	"net/http"
	"strings"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
)

// Members of a body by which a client names its request at an engine.
const (
	ridKey       = "rid"        // of SGLang, which ends all requests whose names begin with one to abort
	requestIDKey = "request_id" // of vLLM; on proxy.ResponsesRoute also the id of the response
)

// renames puts names that are the client's own in place of those by which it names its request,
// and reports whether they have a form that engines read; if not, the request has been answered.
func (r *inference) renames(c *gin.Context) bool {
	if id := r.body.Get(requestIDKey); r.unnamed && id.Type == gjson.String && web.UsableID(id.Str) {
		// vLLM prefers the header, so that it has to have this name.
		r.exchange.ID = strings.Clone(id.Str) // the memory of the body is used again
		c.Request.Header.Set(web.HeaderRequest, r.exchange.ID)
	}
	for _, key := range []string{ridKey, requestIDKey} {
		given := r.body.Get(key)
		if given.Type == gjson.Null || key == requestIDKey && !r.api.keys.Several() {
			continue
		}
		name, ok := scoped(r.caller.Owner(), given)
		if !ok {
			r.api.fail(c, http.StatusBadRequest, key, key+" must be a string or a list of strings")
			return false
		}
		r.body = r.body.With(key, name)
	}
	return true
}

// scoped returns a name, or a list of them, as the owner's; JSON.
func scoped(owner keys.Owner, given gjson.Result) (name string, ok bool) {
	if given.Type == gjson.String {
		return proxy.Quoted(owner.Scoped(given.Str)), true
	}
	list, ok := []byte{'['}, given.IsArray()
	if !ok {
		return "", false
	}
	jsonbody.EachElement(given.Raw, func(one gjson.Result) bool {
		if ok = one.Type == gjson.String; ok {
			list = append(jsonbody.AppendString(list, owner.Scoped(one.Str)), ',')
		}
		return ok
	})
	if len(list) > 1 {
		list = list[:len(list)-1]
	}
	return string(append(list, ']')), ok
}
