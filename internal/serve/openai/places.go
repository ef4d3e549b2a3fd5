package openai

import (
	"fmt"
	"net/http"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/web"
)

// places gives each request a place among those in flight, of which every client has its share.
// Requests of gateways have their own: they take no connection.
func (a *API) places() gin.HandlerFunc {
	direct, byGateway := a.among(a.settings.Places, "--max-connections"), a.among(a.settings.GatewayPlaces, "--ext-proc-max-inflight-bytes")
	return func(c *gin.Context) {
		if gatewayOf(c) != nil {
			byGateway(c)
		} else {
			direct(c)
		}
	}
}

// among is places for so many, which the flag bounds.
func (a *API) among(most int, flag string) gin.HandlerFunc {
	return web.Within(web.Places(most), a.clientOf, func(c *gin.Context) {
		a.fail(c, http.StatusServiceUnavailable, "", fmt.Sprintf("all %d places for requests (%s), or your share of them, are taken: try again",
			most, flag))
	})
}
