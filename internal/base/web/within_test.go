package web

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/gin-gonic/gin"
)

// TestRequestsOfAClientLeavePlacesForOthers: those beyond its share are refused, and places come
// back, after a panic, too.
func TestRequestsOfAClientLeavePlacesForOthers(t *testing.T) {
	gin.SetMode(gin.TestMode)
	places, come, leave := Places(4), make(chan bool), make(chan bool)
	engine := gin.New()
	engine.Use(gin.CustomRecovery(func(c *gin.Context, _ any) { c.Status(http.StatusInternalServerError) }), Within(places, func(c *gin.Context) string { return c.GetHeader("X-Client") }, func(c *gin.Context) { c.Status(http.StatusServiceUnavailable) }))
	engine.GET("/", func(*gin.Context) {
		come <- true
		if !<-leave {
			panic("it fails")
		}
	})
	answers := make(chan *httptest.ResponseRecorder)
	ask := func(client string) {
		go func() { // until its answer is read
			w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil)
			r.Header.Set("X-Client", client)
			engine.ServeHTTP(w, r)
			answers <- w
		}()
	}
	for range 3 {
		ask("greedy")
		<-come
	}
	ask("greedy")
	if w := <-answers; w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" {
		t.Errorf("the fourth of four places: %d %v", w.Code, w.Header())
	}
	ask("other")
	<-come
	for i := range 4 {
		leave <- i%2 == 0
		<-answers
	}
	if places.Held() != 0 {
		t.Errorf("%d places are taken", places.Held())
	}
}
