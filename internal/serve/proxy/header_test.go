package proxy

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

func TestWorkersGetTheirOwnKeyAndTheRoutersName(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte(`{}`)) })
	proxy := New(Settings{}, Deps{Observer: testkit.SilentObserver{}, Hop: web.NewHop()})
	defer proxy.Close()
	for _, test := range []struct {
		name   string
		bearer kv.Secret
		client []string // Authorization
		want   []string
	}{
		{"a key replaces the client's", "sesame", []string{"Bearer client"}, []string{"Bearer sesame"}},
		{"a key where the client has none", "sesame", nil, []string{"Bearer sesame"}},
		{"no key: the client's goes through", "", []string{"Bearer client"}, []string{"Bearer client"}},
		{"no key at all", "", nil, nil},
		{"a key replaces the client's in other forms", "sesame", []string{"x-api-key"}, []string{"Bearer sesame"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			header := http.Header{web.HeaderRequest: {"id"}, "Via": {"1.1 nginx"}}
			switch {
			case test.client == nil:
			case test.client[0] == "x-api-key":
				header["X-Api-Key"], header["Api-Key"] = []string{"client"}, []string{"client"}
			default:
				header["Authorization"] = test.client
			}
			before := header.Clone()
			target := kv.Target{URL: worker.URL, Bearer: test.bearer}
			check := func(how string) {
				t.Helper()
				worker.Mu.Lock()
				got := worker.Header
				worker.Mu.Unlock()
				if via := got["Via"]; len(via) != 2 || via[0] != "1.1 nginx" || via[1] != string(proxy.hop) {
					t.Errorf("%s: Via %q", how, via)
				}
				if keys := got["Authorization"]; len(keys) != len(test.want) || len(keys) == 1 && keys[0] != test.want[0] {
					t.Errorf("%s: Authorization %q, want %q", how, keys, test.want)
				}
				if test.bearer != "" && got.Get("X-Api-Key")+got.Get("Api-Key") != "" {
					t.Errorf("%s: the client's key went on", how)
				}
				for name := range before {
					if len(header[name]) != len(before[name]) || header.Get(name) != before.Get(name) {
						t.Errorf("%s: the client's %s became %q", how, name, header[name])
					}
				}
			}
			rt, _ := routertest.NewClocked(t, 0)
			rt.Up(target)
			u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Header: header, Body: parsed(t, `{}`), Route: testkit.ChatPath}
			if err := proxy.Forward(t.Context(), httptest.NewRecorder(), u, &Exchange{}, chooseOne(func(exclude []uint64) (router.Decision, error) {
				return rt.Route(t.Context(), router.Request{Exclude: exclude})
			})); err != nil {
				t.Fatal(err)
			}
			check("forwarded")
			if _, _, err := proxy.Ask(t.Context(), target, http.MethodGet, "/x", header, nil); err != nil {
				t.Fatal(err)
			}
			check("asked")
		})
	}
}
