package web

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"
)

// AnyOrigin allows the pages of all origins.
const AnyOrigin = "*"

// CheckOrigins checks a list of origins such as https://chat.example.com; its errors name
// the flag.
func CheckOrigins(flag string, origins []string) error {
	for _, o := range origins {
		u, err := url.Parse(o)
		if o != AnyOrigin && (err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.Scheme+"://"+u.Host != o) {
			return fmt.Errorf("%s %q: give origins such as https://chat.example.com, without a path, or *", flag, o)
		}
	}
	return nil
}

// CORS lets pages of the given origins use the routes, as Fetch's CORS protocol has it. It
// answers preflight requests. Credentials in cookies are not allowed; API keys in headers
// are.
func CORS(origins []string) gin.HandlerFunc {
	return func(c *gin.Context) {
		origin := c.GetHeader("Origin")
		if len(origins) == 0 || origin == "" {
			return
		}
		h := c.Writer.Header()
		h.Add("Vary", "Origin")
		allowed := listed(origins, origin)
		if allowed == "" {
			return
		}
		h.Set("Access-Control-Allow-Origin", allowed)
		h.Set("Access-Control-Expose-Headers", "*")
		if c.Request.Method != http.MethodOptions || c.GetHeader("Access-Control-Request-Method") == "" {
			return
		}
		h.Add("Vary", "Access-Control-Request-Headers")
		h.Set("Access-Control-Allow-Methods", "GET, POST, DELETE")
		h.Set("Access-Control-Allow-Headers", c.GetHeader("Access-Control-Request-Headers"))
		h.Set("Access-Control-Max-Age", "600")
		c.AbortWithStatus(http.StatusNoContent)
	}
}

// listed returns the origin as the list allows it: AnyOrigin or itself; empty: it does not.
func listed(origins []string, origin string) string {
	switch {
	case slices.Contains(origins, AnyOrigin):
		return AnyOrigin
	case slices.ContainsFunc(origins, func(o string) bool { return strings.EqualFold(o, origin) }):
		return origin
	}
	return ""
}
