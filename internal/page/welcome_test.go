package page

import (
	"net/http"
	"net/http/httptest"

	"github.com/gin-gonic/gin"
)

// serveWelcome asks for GET / of the OpenAI port.
func serveWelcome(p *Page, host, accept string) *httptest.ResponseRecorder {
	engine := gin.New()
	engine.GET("/", func(c *gin.Context) { p.Welcome(c) })
	request := httptest.NewRequest(http.MethodGet, "/", nil)
	request.Host = host
	request.Header.Set("Accept", accept)
	w := httptest.NewRecorder()
	engine.ServeHTTP(w, request)
	return w
}
