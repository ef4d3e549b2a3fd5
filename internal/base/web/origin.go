package web

import (
	"mime"
	"net"
	"net/http"
	"net/url"
	"strings"

	"github.com/gin-gonic/gin"
)

// Loopback reports whether a listen address is reachable from this machine only. Names
// other than localhost, and the empty address, count as reachable from others.
func Loopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// OwnPages refuses cross-origin requests of browsers. host is the address of the
// port; keyed means that the port requires a key, which pages of other origins
// lack.
//
// The Origin of a request must match its Host. Without a key, the Host of a request to a
// loopback port must be a loopback name or address, or host itself: this prevents DNS
// rebinding. fail writes the refusal, a 403.
func OwnPages(host string, keyed bool, fail func(*gin.Context, int, string)) gin.HandlerFunc {
	return func(c *gin.Context) {
		message, name := "", nameOf(c.Request.Host)
		switch {
		case !keyed && Loopback(host) && name != "" && !Loopback(name) && !strings.EqualFold(name, host): // browsers send a Host
			message = "the Host header names another machine: use localhost, or configure an API key"
		case !sameOrigin(c.Request):
			message = "cross-origin request refused: the Origin header differs from Host"
		default:
			return
		}
		fail(c, http.StatusForbidden, message)
		c.Abort()
	}
}

// ListedPages refuses cross-origin requests of browsers that CORS does not hold back, such as for
// WebSockets: their Origin must be one of the list, or own must accept it. A request without
// Origin comes from no page.
func ListedPages(origins []string, own gin.HandlerFunc) gin.HandlerFunc {
	return func(c *gin.Context) {
		if given := c.Request.Header.Values("Origin"); len(given) == 0 || len(given) == 1 && listed(origins, given[0]) != "" {
			return
		}
		own(c)
	}
}

// nameOf returns a Host header without its port.
func nameOf(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		return name
	}
	return strings.Trim(host, "[]")
}

// sameOrigin reports whether a request has no Origin or that of its own host.
func sameOrigin(r *http.Request) bool {
	origins := r.Header.Values("Origin")
	if len(origins) == 0 {
		return true
	}
	origin, err := url.Parse(origins[0])
	return err == nil && len(origins) == 1 && origin.Host != "" && strings.EqualFold(origin.Host, r.Host)
}

// WantJSON refuses bodies of a content type other than application/json: browsers send such
// bodies to other sites without a preflight request. fail writes the refusal, a 415.
func WantJSON(fail func(*gin.Context, int, string)) gin.HandlerFunc {
	return func(c *gin.Context) {
		if c.Request.ContentLength == 0 {
			return
		}
		kind, _, err := mime.ParseMediaType(c.GetHeader("Content-Type"))
		if err == nil && (kind == "application/json" || strings.HasSuffix(kind, "+json")) {
			return
		}
		fail(c, http.StatusUnsupportedMediaType, "the body must be JSON: send Content-Type: application/json")
		c.Abort()
	}
}
