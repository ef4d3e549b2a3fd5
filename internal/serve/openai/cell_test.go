package openai

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

// aRouterBelow is a target that is a router.
func aRouterBelow(url string) kv.Target {
	return kv.Target{Key: kv.WorkerKey{Worker: 0}, URL: url, Models: []string{"m"}, Disagg: kv.Disagg{Kind: kv.KindRouter}}
}

// TestARouterBelowGetsTheRequestsTerms: its tenant, class, objective and session, in place of
// those that the client claims.
func TestARouterBelowGetsTheRequestsTerms(t *testing.T) {
	got := make(chan http.Header, 1)
	below := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != testkit.ChatPath {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		got <- r.Header.Clone()
		w.Header().Set(web.HeaderWorker, "7")
		w.Header().Set(web.HeaderOverlap, "64")
		w.Header().Set("X-Kvrouter-Prefill-Worker-Id", "8")
		testkit.StreamOf(testkit.TokenEvent, "[DONE]")(w, r)
	}))
	t.Cleanup(below.Close)
	h := newTestAPIOf(t, setup{SessionHeader: "X-Session"}, nil, aRouterBelow(below.URL))
	response, _ := h.post(t, testkit.ChatPath, `{"model":"m","stream":true,"messages":[]}`, hints.HeaderFairness, "team", hints.HeaderClass, "batch", hints.HeaderTTFT, "60000", "X-Session", "s")
	header := <-got
	for name, want := range map[string]string{hints.HeaderFairness: "team", hints.HeaderClass: "batch", hints.HeaderRouted: "1"} {
		if header.Get(name) != want {
			t.Errorf("%s: %q, want %q", name, header.Get(name), want)
		}
	}
	if left, err := time.ParseDuration(header.Get(hints.HeaderTTFT) + "ms"); err != nil || left > time.Minute || left < 30*time.Second {
		t.Errorf("%v of the objective is left (%v)", left, err)
	}
	if header.Get("X-Session") == "" {
		t.Error("the session is not told")
	}
	for name, want := range map[string]string{web.HeaderWorker: "0", web.HeaderCellWorker: "7", web.HeaderCellOverlap: "64", "X-Kvrouter-Prefill-Worker-Id": ""} {
		if response.Header.Get(name) != want {
			t.Errorf("answer: %s: %q, want %q", name, response.Header.Get(name), want)
		}
	}
}

// TestHeadersOfOneRouterStayThere holds that what a worker says of its own limits, workers and
// pages does not reach clients, in any form of answer, and that what a client says to this router
// does not reach workers.
func TestHeadersOfOneRouterStayThere(t *testing.T) {
	own := http.Header{"X-Kvrouter-Worker-Id": {"of another"}, "X-Kvrouter-Secret": {"1"}, "X-Ratelimit-Limit-Requests": {"7"}, "X-Ratelimit-Remaining-Tokens": {"7"}, "Access-Control-Allow-Origin": {"*"}}
	control := http.Header{"X-Kvrouter-Page": {"1"}, hints.HeaderRouted: {"1"}, hints.HeaderClass: {"batch"}}
	untrusted := http.Header{hints.HeaderPinnedWorker: {"0"}, hints.HeaderFairness: {"team"}, hints.HeaderGatewayFairness: {"team"}, hints.HeaderTTFT: {"1"}}
	keysOf := strings.TrimPrefix(keysFile(t, "- {name: a, key: key-a, limits: {requests-per-second: 100}}"), "--api-keys-file=")
	for _, kind := range []kv.Kind{kv.KindNone, kv.KindRouter} {
		got := make(chan http.Header, 10)
		worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/render") {
				w.WriteHeader(http.StatusNotFound)
				return
			}
			got <- r.Header.Clone()
			for name, values := range own {
				w.Header()[name] = values
			}
			switch {
			case r.Header.Get("Upgrade") != "":
				w.Header().Set("Upgrade", "websocket")
				w.Header().Set("Connection", "Upgrade")
				w.WriteHeader(http.StatusSwitchingProtocols)
			case r.URL.Path == completionsPath:
				w.WriteHeader(http.StatusTooManyRequests)
			case r.URL.Path == testkit.ChatPath:
				testkit.StreamOf(testkit.TokenEvent, "[DONE]")(w, r)
			default:
				w.Header().Set("Content-Type", "application/json")
				io.WriteString(w, `{"id":"resp_1"}`)
			}
		}))
		t.Cleanup(worker.Close)
		h := newTestAPIOf(t, setup{Keys: keys.Settings{APIKeysFile: keysOf}}, nil, kv.Target{URL: worker.URL, Models: []string{"m"}, Disagg: kv.Disagg{Kind: kind}})
		for _, c := range []struct{ method, path, body string }{
			{http.MethodPost, testkit.ChatPath, `{"model":"m","stream":true}`}, {http.MethodPost, completionsPath, `{"model":"m","prompt":"x"}`}, {http.MethodPost, "/v1/embeddings", `{"model":"m"}`},
			{http.MethodPost, proxy.ResponsesRoute, `{"model":"m","input":"hi"}`}, {http.MethodGet, proxy.ResponsesRoute + "/resp_1", ""}, {http.MethodGet, "/v1/models", ""}, {http.MethodGet, realtimeRoute + "?model=m", ""},
		} {
			request, _ := http.NewRequestWithContext(t.Context(), c.method, h.URL+c.path, strings.NewReader(c.body))
			for _, from := range []http.Header{control, untrusted, {"Authorization": {"Bearer key-a"}, "Content-Type": {"application/json"}}} {
				for name, values := range from {
					request.Header[name] = values
				}
			}
			if strings.HasPrefix(c.path, realtimeRoute) {
				request.Header["Connection"], request.Header["Upgrade"] = []string{"Upgrade"}, []string{"websocket"}
			}
			response, err := h.Client().Do(request)
			if err != nil {
				t.Fatal(err)
			}
			response.Body.Close()
			for name := range own {
				if value := response.Header.Get(name); value != "" && (!strings.HasPrefix(name, "X-Ratelimit-Limit") || value != "100") {
					t.Errorf("%s: the client gets %s: %s", c.path, name, value)
				}
			}
			header := <-got
			for _, from := range []http.Header{control, untrusted} {
				for name := range from {
					if header.Get(name) != "" && (kind != kv.KindRouter || name != hints.HeaderRouted && name != hints.HeaderClass && name != hints.HeaderFairness || header.Get(hints.HeaderFairness) == "team") {
						t.Errorf("%s: a worker gets %s: %s", c.path, name, header.Get(name))
					}
				}
			}
		}
		testkit.Eventually(t, 5*time.Second, "the connection has ended", func() bool { return h.router.Load(kv.WorkerKey{}).InFlight == 0 })
	}
}

func TestAWorkerGetsTheClientsHeaders(t *testing.T) {
	got := make(chan http.Header, 1)
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != testkit.ChatPath {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		got <- r.Header.Clone()
		testkit.StreamOf(testkit.TokenEvent, "[DONE]")(w, r)
	}))
	t.Cleanup(worker.Close)
	h := newTestAPI(t, setup{}, worker.URL)
	h.post(t, testkit.ChatPath, `{"model":"m","stream":true,"messages":[]}`)
	if header := <-got; header.Get(hints.HeaderRouted) != "" || header.Get(hints.HeaderClass) != "" {
		t.Errorf("%v", header)
	}
}

// TestATrustedRouterAboveIsToldOfTheDecision: it learns from it. Other keys are not.
func TestATrustedRouterAboveIsToldOfTheDecision(t *testing.T) {
	worker := httptest.NewServer(testkit.StreamOf(testkit.TokenEvent, "[DONE]"))
	t.Cleanup(worker.Close)
	for _, trusted := range []bool{false, true} {
		h := newTestAPI(t, setup{APIKey: []string{"above", "client"}, Keys: keys.Settings{TrustHints: &trusted}}, worker.URL)
		for _, above := range []string{"", "1"} {
			response, _ := h.post(t, testkit.ChatPath, `{"model":"m","stream":true,"messages":[]}`, "Authorization", "Bearer above", hints.HeaderRouted, above)
			if told := response.Header.Get(web.HeaderWorker) != ""; response.StatusCode != http.StatusOK || told != (trusted && above != "") {
				t.Errorf("trusted %t, header %q: status %d, told %t", trusted, above, response.StatusCode, told)
			}
		}
	}
}

func TestWhoMayFollowARouter(t *testing.T) {
	stream := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "stream") })
	for name, c := range map[string]struct {
		setup setup
		key   string
		want  int
	}{
		"no key is asked":                {setup{}, "", 200},
		"a key of the router port":       {setup{APIKey: []string{"client"}, RouterAPIKey: []string{"operator"}}, "operator", 200},
		"a trusted client":               {setup{APIKey: []string{"client"}, RouterAPIKey: []string{"operator"}}, "client", 200},
		"nobody":                         {setup{APIKey: []string{"client"}, RouterAPIKey: []string{"operator"}}, "x", 401},
		"no key of a router port":        {setup{RouterAPIKey: []string{"operator"}}, "x", 401},
		"nothing for a port with a key":  {setup{RouterAPIKey: []string{"operator"}}, "", 401},
		"a router port's key, alone":     {setup{RouterAPIKey: []string{"operator"}}, "operator", 200},
		"no key where clients have some": {setup{APIKey: []string{"client"}}, "", 401},
	} {
		t.Run(name, func(t *testing.T) {
			c.setup.Cell = stream
			h := newTestAPI(t, c.setup)
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, h.URL+"/cell", nil)
			if err != nil {
				t.Fatal(err)
			}
			if c.key != "" {
				request.Header.Set("Authorization", "Bearer "+c.key)
			}
			response, err := h.Client().Do(request)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			if response.StatusCode != c.want {
				t.Errorf("status %d, want %d", response.StatusCode, c.want)
			}
		})
	}
}
