package openai

import (
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

// finishing is an Observer of the priorities of requests.
type finishing struct {
	Observer
	priorities []uint32
	holders    []string // names of the keys
}

func (f *finishing) Finished(x *proxy.Exchange, now time.Time) {
	if x.Request != nil {
		f.priorities, f.holders = append(f.priorities, x.Request.StrictPriority), append(f.holders, x.Request.Tenant.Name)
	}
}

// TestAGatewaysClientIsAskedWhoItIs sends requests of an objective of high priority and
// of a session: the first counts for trusted keys, the second for the key that got it.
func TestAGatewaysClientIsAskedWhoItIs(t *testing.T) {
	flag := strings.TrimPrefix(keysFile(t, "- {name: a, key: key-a, trust-hints: true}\n- {name: b, key: key-b}"), "--api-keys-file=")
	yes := true
	h := newTestAPI(t, setup{Keys: keys.Settings{APIKeysFile: flag, DecisionHeaders: &yes}}, "http://10.0.0.1:8000", "http://10.0.0.2:8000")
	seen := &finishing{Observer: Traced(nil)}
	h.api.observers = append(h.api.observers, seen)
	tokens, err := proxy.NewSessionTokens("", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	send := func(key, model, token string) (address, next string) {
		t.Helper()
		r := httptest.NewRequest(http.MethodPost, testkit.ChatPath, strings.NewReader(`{"model":"`+model+`","messages":[]}`))
		r.Header.Set("Authorization", "Bearer "+key)
		w := httptest.NewRecorder()
		h.api.ServeGateway(w, r, &proxy.Gateway{Priority: 5, Token: token, Tokens: tokens, Send: func(routed proxy.Routed) (*http.Response, string, error) {
			address = routed.Target.Address()
			return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("{}"))}, "", nil
		}})
		if w.Code != http.StatusOK {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
		return address, w.Header().Get(proxy.HeaderSession)
	}
	first, token := send("key-a", "m", "")
	if token == "" {
		t.Fatal("there is no token")
	}
	for range 3 {
		if again, _ := send("key-a", "m", token); again != first {
			t.Errorf("the session went from %s to %s", first, again)
		}
	}
	one, _ := send("key-b", "m", token)
	if other, _ := send("key-b", "m", token); one == other {
		t.Errorf("the token holds for another key: twice %s", one)
	}
	if want := []uint32{5, 5, 5, 5, 0, 0}; !slices.Equal(seen.priorities, want) {
		t.Errorf("priorities %v, want %v", seen.priorities, want)
	}
}
