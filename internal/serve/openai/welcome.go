package openai

import (
	"fmt"
	"html"
	"net"
	"net/http"
	"net/url"
	"strings"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/web"
)

// welcome answers GET /: what this is and where the dashboard is, for browsers as HTML.
func (a *API) welcome(c *gin.Context) {
	at := a.pageAddress(c.Request)
	c.Header("Cache-Control", "no-store")
	c.Header("Vary", "Accept")
	if !strings.Contains(c.GetHeader("Accept"), "text/html") {
		text := "This is kvrouter: an OpenAI endpoint that sends each request to the worker with most of its prompt in the KV cache.\n\n  " +
			"requests   POST /v1/chat/completions, /v1/completions, ...; GET /v1/models\n  state      GET /ready, /health, /version, /metrics\n"
		if at != "" {
			text += "  dashboard  " + at + "\n"
		}
		c.String(http.StatusOK, "%s", text)
		return
	}
	web.Harden(c)
	link := ""
	if at != "" {
		link = fmt.Sprintf(`<p>The <a href="%[1]s">dashboard</a> shows the workers and explains how recent requests were routed: <a href="%[1]s">%[1]s</a></p>`, html.EscapeString(at))
	}
	c.Data(http.StatusOK, "text/html; charset=utf-8", []byte(`<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>kvrouter</title>
<h1>kvrouter</h1>
<p>This is an OpenAI endpoint that sends each request to the worker with most of its prompt in the KV cache.</p>
`+link+`
<ul><li><code>POST /v1/chat/completions</code>, <code>/v1/completions</code>, ...</li>
<li><a href="/v1/models">/v1/models</a></li><li><a href="/ready">/ready</a>, <a href="/version">/version</a>, <a href="/metrics">/metrics</a></li></ul>
</html>
`))
}

// pageAddress is the dashboard's URL for the sender of r: where its port listens on all
// addresses, it has the host that r names. Empty: there is none.
func (a *API) pageAddress(r *http.Request) string {
	u, err := url.Parse(a.settings.PageURL)
	if err != nil || u.Host == "" {
		return ""
	}
	if ip := net.ParseIP(u.Hostname()); ip != nil && ip.IsUnspecified() {
		asked, err := url.Parse("http://" + r.Host)
		if err != nil || asked.Hostname() == "" || asked.User != nil {
			return ""
		}
		u.Host = net.JoinHostPort(asked.Hostname(), u.Port())
	}
	return u.String()
}
