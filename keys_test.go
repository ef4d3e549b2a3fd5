package main

import (
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/keys"
	"kvrouter/internal/mocker"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"
)

// keysFile writes a file of keys and returns the flag that names it.
func keysFile(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "keys.yaml")
	testkit.WriteFile(t, name, text)
	return "--api-keys-file=" + name
}

// as sends a body with a key.
func (s *mockSite) as(t *testing.T, key string, body map[string]any) (*http.Response, gjson.Result) {
	t.Helper()
	request, _ := http.NewRequest(http.MethodPost, s.openAI+testkit.ChatPath, strings.NewReader(string(mocker.MustJSON(body))))
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+key)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, gjson.ParseBytes(text)
}

// TestWorkerGetsOneSalt: the engine reads the router's and no other.
func TestWorkerGetsOneSalt(t *testing.T) {
	worker := testkit.NewFakeWorker(t, testkit.StreamOf(testkit.TokenEvent, "[DONE]"))
	flag := strings.TrimPrefix(keysFile(t, "- {name: a, key: key-a, salt: true}"), "--api-keys-file=")
	h := newTestAPI(t, Config{Keys: keys.Settings{APIKeysFile: flag}, CollectUsage: true}, worker.URL)
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
		config  Config
		obeyed  bool
		headers bool
	}{
		{"one key", Config{APIKey: []string{"k"}}, true, true},
		{"several keys", Config{APIKey: []string{"k", "l"}}, false, false},
		{"several that are trusted", Config{APIKey: []string{"k", "l"}, Keys: keys.Settings{TrustHints: &yes}}, true, false},
		{"several that are told", Config{APIKey: []string{"k", "l"}, Keys: keys.Settings{DecisionHeaders: &yes}}, false, true},
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

func TestBusyThresholdsAreNotForEveryKey(t *testing.T) {
	for _, test := range []struct {
		name   string
		config Config
		key    string
		want   int
	}{
		{"no keys", Config{}, "", 200},
		{"the only key", Config{APIKey: []string{"k"}}, "k", 200},
		{"no key", Config{APIKey: []string{"k"}}, "", 401},
		{"one of several keys", Config{APIKey: []string{"k", "l"}}, "k", 403},
		{"a client's key", Config{APIKey: []string{"k"}, RouterAPIKey: []string{"r"}}, "k", 401},
		{"the router port's key", Config{APIKey: []string{"k"}, RouterAPIKey: []string{"r"}}, "r", 200},
		{"the router port's key without any other", Config{RouterAPIKey: []string{"r"}}, "", 401},
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

// TestPagesOfOtherSitesRegisterNoWorker is what a browser can be made to send to a
// router on the same machine.
func TestPagesOfOtherSitesRegisterNoWorker(t *testing.T) {
	h := newTestAPI(t, Config{Web: web.Settings{RouterHost: "127.0.0.1"}})
	body := `{"worker_id":66,"model_name":"m","endpoint":"http://127.0.0.1:9","block_size":64,"kv_events_endpoint":"tcp://127.0.0.1:9"}`
	for _, test := range []struct {
		name, kind, origin, host string
		want                     int
	}{
		{"a form", "text/plain", "", "", 415},
		{"a page", "application/json", "http://evil.example", "", 403},
		{"a page whose name leads here", "application/json", "http://evil.example", "evil.example", 403},
		{"a program", "application/json", "", "", 201},
	} {
		request, _ := http.NewRequest(http.MethodPost, h.selection.URL+"/workers", strings.NewReader(body))
		request.Header.Set("Content-Type", test.kind)
		if test.origin != "" {
			request.Header.Set("Origin", test.origin)
		}
		request.Host = test.host
		response, err := h.Client().Do(request)
		if err != nil {
			t.Fatal(err)
		}
		answer, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != test.want {
			t.Errorf("%s: %d %s, want %d", test.name, response.StatusCode, answer, test.want)
		}
	}
	for _, target := range h.router.Targets() {
		h.router.Down(target.Key)
	}
}
