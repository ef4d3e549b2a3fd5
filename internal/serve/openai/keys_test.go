package openai

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

// keysFile writes a file of keys and returns the flag that names it.
func keysFile(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "keys.yaml")
	testkit.WriteFile(t, name, text)
	return "--api-keys-file=" + name
}

// TestWorkerGetsOneSalt: the engine reads the router's and no other.
func TestWorkerGetsOneSalt(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf(testkit.TokenEvent, "[DONE]"))
	flag := strings.TrimPrefix(keysFile(t, "- {name: a, key: key-a, salt: true}"), "--api-keys-file=")
	h := newTestAPI(t, setup{Keys: keys.Settings{APIKeysFile: flag}, CollectUsage: true}, worker.URL)
	salts := map[string]string{}
	for i, body := range []string{
		`{"model":"m","messages":[]}`,
		`{"model":"m","messages":[],"stream":true}`,
		`{"model":"m","messages":[],"cache_salt":"x"}`,
		`{"cache_salt":"y","model":"m","cache_\u0073alt":"x","messages":[],"stream":true}`,
	} {
		response, answer := h.post(t, testkit.ChatPath, body, "Authorization", "Bearer key-a")
		if response.StatusCode != http.StatusOK {
			t.Fatalf("%d %s", response.StatusCode, answer)
		}
		got := worker.Received()[i]
		if strings.Count(got, "salt") != 1 || !gjson.Valid(got) || gjson.Get(got, "messages").Raw != "[]" {
			t.Errorf("%s became %s", body, got)
		}
		if strings.Contains(body, "stream") != gjson.Get(got, "stream_options.include_usage").Bool() {
			t.Errorf("usage of %s", got)
		}
		salts[gjson.Get(got, "cache_salt").Str] += strconv.Itoa(i)
	}
	if len(salts) != 2 || salts["x"]+salts["y"]+salts[""] != "" {
		t.Errorf("salts and the requests that have them: %v", salts)
	}
}

func TestUntrustedKeysDoNotChooseTheirWorker(t *testing.T) {
	a, b := testkit.NewFakeWorker(t, testkit.StreamOf("[DONE]")), testkit.NewFakeWorker(t, testkit.StreamOf("[DONE]"))
	yes := true
	for _, test := range []struct {
		name    string
		config  setup
		obeyed  bool
		headers bool
	}{
		{"one key", setup{APIKey: []string{"k"}}, true, true},
		{"several keys", setup{APIKey: []string{"k", "l"}}, false, false},
		{"several that are trusted", setup{APIKey: []string{"k", "l"}, Keys: keys.Settings{TrustHints: &yes}}, true, false},
		{"several that are told", setup{APIKey: []string{"k", "l"}, Keys: keys.Settings{DecisionHeaders: &yes}}, false, true},
	} {
		h := newTestAPI(t, test.config, a.URL, b.URL)
		before := len(b.Received())
		for i := range 4 {
			response, answer := h.post(t, testkit.ChatPath, `{"nvext":{"agent_hints":{"strict_priority":1}}}`, "Authorization", "Bearer k", "X-Worker-Instance-Id", "1")
			if response.StatusCode != 200 {
				t.Fatalf("%s: %d %s", test.name, response.StatusCode, answer)
			}
			for _, name := range []string{web.HeaderWorker, web.HeaderOverlap} {
				if (response.Header.Get(name) != "") != test.headers {
					t.Errorf("%s, request %d: %s is %q", test.name, i, name, response.Header.Get(name))
				}
			}
		}
		if got, want := len(b.Received())-before, map[bool]int{true: 4, false: 2}[test.obeyed]; got != want {
			t.Errorf("%s: %d of 4 went to the worker that they name, want %d", test.name, got, want)
		}
		response, answer := h.post(t, testkit.ChatPath, `{"nvext":{"annotations":["query_instance_id"]}}`, "Authorization", "Bearer k")
		if want := map[bool]int{true: 200, false: 403}[test.headers]; response.StatusCode != want {
			t.Errorf("%s: a dry run is answered with %d %s", test.name, response.StatusCode, answer)
		}
	}
}

// TestKeysStayAtTheRouter: in whatever form they come, also through a gateway.
func TestKeysStayAtTheRouter(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf("[DONE]"))
	flag := strings.TrimPrefix(keysFile(t, "- {name: a, key: secret-a}\n- {name: b, key: secret-b}"), "--api-keys-file=")
	h := newTestAPI(t, setup{Keys: keys.Settings{APIKeysFile: flag}}, worker.URL)
	seen := &finishing{Observer: Traced(nil)}
	h.api.observers = append(h.api.observers, seen)
	for _, test := range []struct {
		name, path string
		header     http.Header
		holder     string // empty: refused
	}{
		{"none", "", http.Header{}, ""},
		{"bearer", "", http.Header{"Authorization": {"bearer secret-a"}}, "a"},
		{"Anthropic", "", http.Header{"X-Api-Key": {"secret-b"}}, "b"},
		{"Azure", "", http.Header{"Api-Key": {"secret-a"}}, "a"},
		{"the same twice", "?api-key=secret-a", http.Header{"Api-Key": {"secret-a"}, "Authorization": {"Bearer secret-a"}}, "a"},
		{"an unknown one first", "", http.Header{"Authorization": {"Basic c2VjcmV0"}, "X-Api-Key": {"secret-b"}}, "b"},
		{"of two holders", "", http.Header{"Authorization": {"Bearer secret-a"}, "X-Api-Key": {"secret-b"}}, ""},
		{"wrong", "", http.Header{"X-Api-Key": {"secret"}}, ""},
		{"in the query of a POST", "?api-key=secret-a", http.Header{}, ""},
	} {
		post := func() *http.Request {
			r := httptest.NewRequest(http.MethodPost, testkit.ChatPath+test.path, strings.NewReader(`{"model":"m","messages":[]}`))
			r.Header = test.header.Clone()
			return r
		}
		check := func(how string, w *httptest.ResponseRecorder, sent http.Header) {
			t.Helper()
			if asks := w.Header().Get("WWW-Authenticate"); (w.Code == http.StatusOK) != (test.holder != "") || (w.Code == http.StatusUnauthorized) != (asks != "") || strings.Contains(w.Body.String(), "secret") {
				t.Errorf("%s%s: %d %s, %v", test.name, how, w.Code, w.Body, w.Header())
			}
			if text := fmt.Sprint(sent); strings.Contains(text, "secret") || strings.Contains(strings.ToLower(text), "api-key") {
				t.Errorf("%s%s: the worker gets %s", test.name, how, text)
			}
			if n := len(seen.holders); test.holder != "" && (n == 0 || seen.holders[n-1] != test.holder) {
				t.Errorf("%s%s: holders %q, want %q", test.name, how, seen.holders, test.holder)
			}
		}
		w := httptest.NewRecorder()
		h.api.ServeHTTP(w, post())
		worker.Mu.Lock()
		got := worker.Header
		worker.Mu.Unlock()
		check("", w, got)
		w, got = httptest.NewRecorder(), nil
		h.api.ServeGateway(w, post(), &proxy.Gateway{Send: func(routed proxy.Routed) (*http.Response, string, error) {
			got = routed.Request.Header
			return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("{}"))}, "", nil
		}})
		check(" through a gateway", w, got)
	}
}

func TestBusyThresholdsAreNotForEveryKey(t *testing.T) {
	for _, test := range []struct {
		name   string
		config setup
		key    string
		want   int
	}{
		{"no keys", setup{}, "", 200},
		{"the only key", setup{APIKey: []string{"k"}}, "k", 200},
		{"no key", setup{APIKey: []string{"k"}}, "", 401},
		{"one of several keys", setup{APIKey: []string{"k", "l"}}, "k", 403},
		{"a client's key", setup{APIKey: []string{"k"}, RouterAPIKey: []string{"r"}}, "k", 401},
		{"the router port's key", setup{APIKey: []string{"k"}, RouterAPIKey: []string{"r"}}, "r", 200},
		{"the router port's key without any other", setup{RouterAPIKey: []string{"r"}}, "", 401},
	} {
		h := newTestAPI(t, test.config, "http://127.0.0.1:1")
		response, answer := h.post(t, "/busy_threshold", `{"model":"m"}`, "Authorization", "Bearer "+test.key)
		if response.StatusCode != test.want || test.want == 401 && len(test.config.RouterAPIKey) > 0 && !strings.Contains(answer, "--router-api-key") {
			t.Errorf("%s: POST %d %s", test.name, response.StatusCode, answer)
		}
		request, _ := http.NewRequest(http.MethodGet, h.URL+"/busy_threshold", nil)
		request.Header.Set("Authorization", "Bearer "+test.key)
		get, err := h.Client().Do(request)
		if err != nil {
			t.Fatal(err)
		}
		get.Body.Close()
		if get.StatusCode != test.want {
			t.Errorf("%s: GET %d", test.name, get.StatusCode)
		}
	}
}
