package web

import "github.com/gin-gonic/gin"

// contentPolicy limits a browser on the router's pages: load from and connect to
// the same origin only, and be shown in no frame.
const contentPolicy = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'"

// Harden sets the security headers of a page's answers. They are not to be cached.
func Harden(c *gin.Context) {
	header := c.Writer.Header()
	header.Set("Content-Security-Policy", contentPolicy)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Referrer-Policy", "no-referrer")
	header.Set("Cross-Origin-Opener-Policy", "same-origin")
	header.Set("Cross-Origin-Resource-Policy", "same-origin")
	header.Set("Cache-Control", "no-store")
}
