package web

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/gin-gonic/gin"
)

func TestCORS(t *testing.T) {
	const page, other = "https://chat.example.com", "https://evil.example.com"
	preflight := map[string]string{"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
	for name, c := range map[string]struct {
		origins []string
		method  string
		origin  string
		header  map[string]string
		status  int
		allowed string
	}{
		"off":                       {nil, "POST", page, nil, 401, ""},
		"off, preflight":            {nil, "OPTIONS", page, preflight, 401, ""},
		"a request":                 {[]string{page}, "POST", page, nil, 401, page},
		"an error is readable":      {[]string{page}, "GET", page, nil, 401, page},
		"a preflight":               {[]string{page}, "OPTIONS", page, preflight, 204, page},
		"any origin":                {[]string{"*"}, "OPTIONS", other, preflight, 204, "*"},
		"another origin":            {[]string{page}, "POST", other, nil, 401, ""},
		"another origin, preflight": {[]string{page}, "OPTIONS", other, preflight, 401, ""},
		"no page":                   {[]string{page}, "POST", "", nil, 401, ""},
		"options without preflight": {[]string{page}, "OPTIONS", page, nil, 401, page},
	} {
		engine := gin.New()
		engine.Use(CORS(c.origins), func(c *gin.Context) { c.AbortWithStatus(http.StatusUnauthorized) })
		engine.Any("/v1/models", func(*gin.Context) {})
		r := httptest.NewRequest(c.method, "/v1/models", nil)
		if c.origin != "" {
			r.Header.Set("Origin", c.origin)
		}
		for key, value := range c.header {
			r.Header.Set(key, value)
		}
		w := httptest.NewRecorder()
		engine.ServeHTTP(w, r)
		if got := w.Header().Get("Access-Control-Allow-Origin"); w.Code != c.status || got != c.allowed || w.Header().Get("Access-Control-Allow-Credentials") != "" {
			t.Errorf("%s: %d, allowed %q", name, w.Code, got)
		}
		if asked := w.Header().Get("Access-Control-Allow-Headers"); (w.Code == 204) != (asked == preflight["Access-Control-Request-Headers"]) {
			t.Errorf("%s: headers allowed: %q", name, asked)
		}
	}
	for origin, ok := range map[string]bool{"*": true, page: true, "http://localhost:3000": true, "chat.example.com": false, page + "/": false, "ftp://x": false, "": false, "https://": false} {
		if err := CheckOrigins("--cors-origins", []string{origin}); (err == nil) != ok {
			t.Errorf("%q: %v", origin, err)
		}
	}
}
