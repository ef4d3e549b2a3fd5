package web

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"
)

// guarded answers 200 to what passes the guards.
func guarded(guards ...gin.HandlerFunc) http.Handler {
	gin.SetMode(gin.ReleaseMode)
	engine := gin.New()
	engine.Use(guards...)
	engine.Any("/", func(c *gin.Context) { c.Status(http.StatusOK) })
	return engine
}

func ask(handler http.Handler, method, body string, headers ...string) int {
	r := httptest.NewRequest(method, "/", strings.NewReader(body))
	r.Host = "localhost:7000"
	for i := 0; i+1 < len(headers); i += 2 {
		if headers[i] == "Host" {
			r.Host = headers[i+1]
			continue
		}
		r.Header.Add(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	return w.Code
}

func TestLoopback(t *testing.T) {
	for host, want := range map[string]bool{
		"127.0.0.1": true, "127.9.9.9": true, "::1": true, "localhost": true, "LocalHost": true,
		"": false, "0.0.0.0": false, "::": false, "10.0.0.1": false, "localhost.evil.example": false, "gpu-1": false,
	} {
		if Loopback(host) != want {
			t.Errorf("%q: %v", host, !want)
		}
	}
}

func TestPagesOfOtherSitesAreRefused(t *testing.T) {
	for _, test := range []struct {
		name, listens string
		keyed         bool
		headers       []string
		want          int
	}{
		{"a program", "127.0.0.1", false, nil, 200},
		{"by address", "127.0.0.1", false, []string{"Host", "127.0.0.1:7000"}, 200},
		{"by an address of version 6", "::1", false, []string{"Host", "[::1]:7000"}, 200},
		{"without a port", "127.0.0.1", false, []string{"Host", "localhost"}, 200},
		{"HTTP/1.0 names no host", "127.0.0.1", false, []string{"Host", ""}, 200},
		{"a name that leads here", "127.0.0.1", false, []string{"Host", "rebind.evil.example"}, 403},
		{"such a name and its own origin", "127.0.0.1", false, []string{"Host", "rebind.evil.example:7000", "Origin", "http://rebind.evil.example:7000"}, 403},
		{"such a name where a key is asked for", "127.0.0.1", true, []string{"Host", "router.example"}, 200},
		{"a name of ours on a port for all", "0.0.0.0", false, []string{"Host", "gpu-1:7000"}, 200},
		{"a page of another site", "127.0.0.1", false, []string{"Origin", "http://evil.example"}, 403},
		{"the same with a key", "127.0.0.1", true, []string{"Origin", "http://evil.example"}, 403},
		{"a page of another port", "127.0.0.1", false, []string{"Origin", "http://localhost:3000"}, 403},
		{"a page without an origin of its own", "127.0.0.1", false, []string{"Origin", "null"}, 403},
		{"two origins", "127.0.0.1", false, []string{"Origin", "http://localhost:7000", "Origin", "http://evil.example"}, 403},
		{"a page of our own", "127.0.0.1", false, []string{"Origin", "http://localhost:7000"}, 200},
	} {
		handler := guarded(OwnPages(test.listens, test.keyed, Fail))
		if got := ask(handler, http.MethodPost, "{}", test.headers...); got != test.want {
			t.Errorf("%s: %d, want %d", test.name, got, test.want)
		}
	}
}

func TestBodiesMustBeJSON(t *testing.T) {
	handler := guarded(WantJSON(Fail))
	for _, test := range []struct {
		body, kind string
		want       int
	}{
		{"", "", 200},
		{"", "text/plain", 200},
		{"{}", "application/json", 200},
		{"{}", "Application/JSON; charset=utf-8", 200},
		{"{}", "application/merge-patch+json", 200},
		{"{}", "", 415},
		{"{}", "text/plain", 415},
		{"{}", "application/x-www-form-urlencoded", 415},
		{"{}", "text/plain; a=application/json", 415},
		{"{}", ";", 415},
	} {
		var headers []string
		if test.kind != "" {
			headers = []string{"Content-Type", test.kind}
		}
		if got := ask(handler, http.MethodPost, test.body, headers...); got != test.want {
			t.Errorf("%q of %q: %d, want %d", test.body, test.kind, got, test.want)
		}
	}
}

func TestRequireKey(t *testing.T) {
	handler := guarded(RequireKey(NewKeys([]string{"one", "other"}), "the key", Fail))
	for given, want := range map[string]int{
		"": 401, "Bearer": 401, "Bearer ": 401, "Bearer on": 401, "Bearer one,other": 401, "Basic one": 401, "Bearer one": 200, "bearer one": 200, "BEARER  one": 200, "bearer": 401, "bearer two": 401, "Bearer other": 200,
	} {
		if got := ask(handler, http.MethodGet, "", "Authorization", given); got != want {
			t.Errorf("%q: %d, want %d", given, got, want)
		}
	}
	if got := ask(guarded(RequireKey(nil, "", Fail)), http.MethodGet, ""); got != 200 {
		t.Errorf("without keys: %d", got)
	}
}

func TestOpenPortsNeedAKey(t *testing.T) {
	for _, test := range []struct {
		host            string
		keyed, insecure bool
		ok              bool
	}{
		{"127.0.0.1", false, false, true},
		{"0.0.0.0", true, false, true},
		{"0.0.0.0", false, true, true},
		{"0.0.0.0", false, false, false},
		{"", false, false, false},
		{"gpu-1", false, false, false},
	} {
		err := Settings{Insecure: test.insecure}.Validate(Exposure{Flag: "--host", Host: test.host, Name: "OpenAI port", Keyed: test.keyed, Keys: "--api-key"})
		if (err == nil) != test.ok || err != nil && !strings.HasPrefix(err.Error(), "--host "+test.host) {
			t.Errorf("%+v: %v", test, err)
		}
	}
}
