package openai

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestWelcomeSaysWhereThePageIs(t *testing.T) {
	tests := []struct {
		name, page, host, accept string
		want, not                string
	}{
		{"curl", "http://127.0.0.1:7000/ui/", "localhost:8000", "*/*", "http://127.0.0.1:7000/ui/", "<"},
		{"a browser", "http://127.0.0.1:7000/ui/", "localhost:8000", "text/html,*/*", `<a href="http://127.0.0.1:7000/ui/">`, ""},
		{"on all addresses", "https://0.0.0.0:7000/ui/", "gpu-box:8000", "*/*", "https://gpu-box:7000/ui/", "0.0.0.0"},
		{"on all addresses of version 6", "http://[::]:7000/ui/", "[fd00::1]:8000", "*/*", "http://[fd00::1]:7000/ui/", "[::]"},
		{"a name that is none", "http://0.0.0.0:7000/ui/", `a"><script>`, "text/html", "kvrouter", "script>"},
		{"without a page", "", "localhost:8000", "text/html", "kvrouter", "/ui/"},
	}
	for _, test := range tests {
		h := newTestAPI(t, setup{PageURL: test.page})
		request := httptest.NewRequest(http.MethodGet, "/", nil)
		request.Host = test.host
		request.Header.Set("Accept", test.accept)
		w := httptest.NewRecorder()
		h.api.ServeHTTP(w, request)
		if body := w.Body.String(); w.Code != 200 || !strings.Contains(body, test.want) || test.not != "" && strings.Contains(body, test.not) {
			t.Errorf("%s: %d %s", test.name, w.Code, body)
		}
	}
}
