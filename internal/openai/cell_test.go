package openai

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"kvrouter/internal/hints"
	"kvrouter/internal/keys"
	"kvrouter/internal/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"
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
