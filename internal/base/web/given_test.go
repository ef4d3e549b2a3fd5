package web

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

// TestKeysAreReadAsClientsSendThem: and none of them stays in what is forwarded.
func TestKeysAreReadAsClientsSendThem(t *testing.T) {
	for _, test := range []struct {
		name, path string
		header     http.Header
		want       []string
		rest       string // of the WebSocket's protocols
	}{
		{"none", "/", http.Header{}, nil, ""},
		{"OpenAI", "/", http.Header{"Authorization": {"Bearer k"}}, []string{"k"}, ""},
		{"another case and more spaces", "/", http.Header{"Authorization": {"bEARER   k"}}, []string{"k"}, ""},
		{"without a scheme", "/", http.Header{"Authorization": {"k"}}, []string{"k"}, ""},
		{"an empty key", "/", http.Header{"Authorization": {"Bearer "}, "X-Api-Key": {""}}, nil, ""},
		{"Anthropic", "/", http.Header{"X-Api-Key": {"k"}}, []string{"k"}, ""},
		{"Azure", "/", http.Header{"Api-Key": {"k"}}, []string{"k"}, ""},
		{"a scheme where none belongs", "/", http.Header{"X-Api-Key": {"Bearer k"}}, []string{"k"}, ""},
		{"the same in two headers", "/", http.Header{"Authorization": {"Bearer k"}, "X-Api-Key": {"k"}}, []string{"k"}, ""},
		{"different ones", "/", http.Header{"Authorization": {"Bearer a", "Bearer z"}, "X-Api-Key": {"b"}, "Api-Key": {"c"}}, []string{"a", "b", "c"}, ""},
		{"OpenAI in a browser", "/v1/realtime", http.Header{"Upgrade": {"websocket"}, HeaderProtocol: {"realtime, openai-insecure-api-key.k, openai-beta.realtime-v1"}}, []string{"k"}, "realtime, openai-beta.realtime-v1"},
		{"in lines, and another case", "/v1/realtime", http.Header{"Upgrade": {"WebSocket"}, HeaderProtocol: {"realtime", "OpenAI-Insecure-API-Key.Kk"}}, []string{"Kk"}, "realtime"},
		{"nothing but a key", "/v1/realtime", http.Header{"Upgrade": {"websocket"}, HeaderProtocol: {"openai-insecure-api-key.k"}}, []string{"k"}, ""},
		{"no WebSocket", "/", http.Header{HeaderProtocol: {"realtime,openai-insecure-api-key.k"}}, nil, "realtime"},
		{"Azure in a browser", "/v1/realtime?model=m&api-key=k%2B", http.Header{"Upgrade": {"websocket"}}, []string{"k+"}, ""},
		{"a query of no WebSocket", "/?api-key=k", http.Header{}, nil, ""},
	} {
		r := httptest.NewRequest(http.MethodGet, test.path, nil)
		r.Header = test.header
		if got := KeysOf(r); !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
		DropKeys(test.header)
		if len(KeysOf(&http.Request{Header: test.header, URL: r.URL})) > 0 && r.URL.RawQuery == "" || strings.Join(test.header[HeaderProtocol], "|") != test.rest {
			t.Errorf("%s: left are %v", test.name, test.header)
		}
	}
}

func TestQueriesLoseTheirKeys(t *testing.T) {
	for query, want := range map[string]string{
		"": "", "model=a&b": "model=a&b", "api-key=k": "", "model=a&api-key=k&b=%20": "model=a&b=%20", "API%2Dkey=k&x=1": "x=1", "Authorization=Bearer+k&x": "x", "api-key": "", "x=api-key": "x=api-key", "%zz=1": "%zz=1",
	} {
		if got := WithoutKeys(query); got != want {
			t.Errorf("%q: %q, want %q", query, got, want)
		}
	}
}

// TestAPortAcceptsAKeyInEveryForm: others beside it do not matter, and each one counts as a try.
func TestAPortAcceptsAKeyInEveryForm(t *testing.T) {
	for _, test := range []struct {
		name   string
		header http.Header
		want   int
	}{
		{"bearer", http.Header{"Authorization": {"bearer right"}}, 200},
		{"x-api-key", http.Header{"X-Api-Key": {"right"}}, 200},
		{"api-key", http.Header{"Api-Key": {"right"}}, 200},
		{"beside a wrong one", http.Header{"Authorization": {"Basic eDp5"}, "X-Api-Key": {"right"}}, 200},
		{"wrong", http.Header{"X-Api-Key": {"wrong"}}, 401},
		{"none", http.Header{}, 401},
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header = test.header
		w := answer(NewKeys([]string{"right"}), r, "10.0.0.1:1")
		if asks := w.Header().Get("WWW-Authenticate"); w.Code != test.want || (asks != "") != (test.want == 401) || asks != "" && !strings.HasPrefix(asks, "Bearer ") {
			t.Errorf("%s: %d, %v", test.name, w.Code, w.Header())
		}
	}
	k, tries := NewKeys([]string{"right"}), 0
	for {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header = http.Header{"Authorization": {"Bearer a"}, "X-Api-Key": {"b"}, "Api-Key": {"c"}}
		if answerTo(k, r, "10.0.0.1:1") != http.StatusUnauthorized {
			break
		}
		tries += 3
	}
	if tries > triesAtOnce {
		t.Errorf("%d keys could be tried", tries)
	}
}
