package web_test

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/web"
)

// behind returns the status that a router gives to a request with these Via
// headers.
func behind(hop web.Hop, via []string) int {
	engine := web.NewEngine(slog.New(slog.DiscardHandler))
	engine.Use(hop.Refuse)
	engine.GET("/", func(c *gin.Context) { c.Status(http.StatusOK) })
	request := httptest.NewRequest(http.MethodGet, "/", nil)
	request.Header["Via"] = via
	answer := httptest.NewRecorder()
	engine.ServeHTTP(answer, request)
	return answer.Code
}

func TestRequestsThatComeBackAreRefused(t *testing.T) {
	me, other := web.NewHop(), web.NewHop()
	if me == other {
		t.Fatal("two routers have the same name")
	}
	for _, test := range []struct {
		name string
		via  []string
		want int
	}{
		{"from a client", nil, 200},
		{"through other proxies", []string{"1.1 nginx, 1.1 varnish (Varnish/7.0)", "HTTP/2.0 envoy"}, 200},
		{"through another router", []string{string(other)}, 200},
		{"through two", []string{string(other) + ", " + string(web.NewHop())}, 200},
		{"through three", []string{string(other) + "," + string(web.NewHop()), "1.1 nginx", string(web.NewHop())}, 508},
		{"from me", []string{string(me)}, 508},
		{"from me, through others", []string{"1.0 fred", string(me) + " (comment), 1.1 nginx", string(other)}, 508},
		{"no name", []string{"1.1", "", ",,,", " kvrouter-"}, 200},
	} {
		if got := behind(me, test.via); got != test.want {
			t.Errorf("%s: %d, want %d", test.name, got, test.want)
		}
	}
	if got := behind("", []string{string(other) + "," + string(other) + "," + string(other)}); got != 200 {
		t.Errorf("a router without a name: %d", got)
	}
}

func TestSigningAddsToTheHeaderAndLeavesTheClients(t *testing.T) {
	hop := web.NewHop()
	clients := http.Header{"Via": append(make([]string, 0, 4), "1.1 nginx")}
	for range 2 { // two attempts at the same request
		sent := clients.Clone()
		sent["Via"] = clients["Via"]
		hop.Sign(sent)
		if got := strings.Join(sent["Via"], ","); got != "1.1 nginx,"+string(hop) {
			t.Errorf("Via %q", got)
		}
	}
	if got := len(clients["Via"]); got != 1 {
		t.Errorf("the client's header has %d entries now", got)
	}
	web.Hop("").Sign(clients)
	if got := len(clients["Via"]); got != 1 {
		t.Errorf("signed by nobody: %d entries", got)
	}
}

func FuzzVia(f *testing.F) {
	me := web.NewHop()
	for _, seed := range []string{"", "1.1 nginx", string(me), "1.1 kvrouter-a,1.1 kvrouter-b,1.1 kvrouter-c", "1.1\tkvrouter-a (x)", ",,,  ,"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, via string) {
		if got := behind(me, []string{via, string(me)}); got != http.StatusLoopDetected {
			t.Errorf("%q hides what follows: %d", via, got)
		}
		if got := behind(me, []string{via}); got != http.StatusOK && got != http.StatusLoopDetected {
			t.Errorf("%q: %d", via, got)
		}
	})
}
