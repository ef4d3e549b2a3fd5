package openai

import (
	"net/http"
	"net/url"
	"strings"

	"kvrouter/internal/prompt/tokens"
)

// azured returns the request with the path of OpenAI's API, if it has one of Azure's clients:
// /openai/v1/..., /openai/deployments/NAME/..., the same behind a base URL that ends with /v1, or
// /openai/realtime. The name of the deployment is the model, which is in the body too.
func azured(r *http.Request) *http.Request {
	rest, azure := strings.CutPrefix(r.URL.Path, "/openai/")
	if !azure {
		if rest, azure = strings.CutPrefix(r.URL.Path, "/v1/"); !azure || !strings.HasPrefix(rest, "deployments/") {
			return r
		}
	}
	path, query := "/v1/"+strings.TrimPrefix(rest, "v1/"), r.URL.RawQuery
	if deployment, named := strings.CutPrefix(rest, "deployments/"); named {
		if path = routeIn(deployment); path == "" {
			return r
		}
	}
	if given := r.URL.Query(); path == realtimeRoute && !given.Has("model") && given.Has("deployment") {
		query += "&model=" + url.QueryEscape(given.Get("deployment"))
	}
	to := *r
	to.URL = &url.URL{Path: path, RawQuery: query}
	return &to
}

// routeIn returns the route with which the path of a deployment ends, whose name may have
// slashes; empty: there is none.
func routeIn(deployment string) (longest string) {
	for route := range tokens.Routes {
		if rest, of := strings.CutPrefix(route, "/v1"); of && strings.HasSuffix(deployment, rest) && len(deployment) > len(rest) &&
			len(route) > len(longest) {
			longest = route
		}
	}
	return longest
}
