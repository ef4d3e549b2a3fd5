package openai

import (
	"cmp"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/serve/telemetry"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

const completionsPath = "/v1/completions"

// testAPI is a router's OpenAI port over fake workers.
type testAPI struct {
	*httptest.Server
	api       *API
	router    *router.Router
	telemetry *telemetry.Metrics
	failed    chan uint64
	proxy     *proxy.Proxy
	bodies    *web.Bodies
}

// setup says what a test's port and its proxy are made with.
type setup struct {
	CollectUsage, AllowEngineAdmin bool
	RequestTimeout                 time.Duration
	APIKey, RouterAPIKey           []string
	CORSOrigins                    []string
	Places                         int
	Keys                           keys.Settings
	MaxBodyBytes                   int64
	Bodies                         web.BodySettings
	Proxy                          proxy.Settings
	SessionHeader, SessionCookie   string
	PageURL                        string
	transport                      http.RoundTripper
	Cell                           http.Handler
}

// newTestAPI serves the given workers round robin: worker 0 gets the first request.
func newTestAPI(t *testing.T, config setup, workers ...string) *testAPI {
	t.Helper()
	return newTestAPIOf(t, config, nil, targetsAt(workers...)...)
}

// targetsAt are workers at those addresses.
func targetsAt(urls ...string) (targets []kv.Target) {
	for i, url := range urls {
		targets = append(targets, kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: url, Models: []string{"m"}})
	}
	return targets
}

// newTestAPIOf is newTestAPI for given targets and a given model. Without a model
// (nil) the workers give the prompt tokens.
func newTestAPIOf(t testing.TB, config setup, model *tokens.Model, targets ...kv.Target) *testAPI {
	t.Helper()
	return newTestAPIWith(t, routertest.New(t, "round-robin", 0), config, model, targets...)
}

// newTestAPIWith is newTestAPIOf for a given router.
func newTestAPIWith(t testing.TB, rt *router.Router, config setup, model *tokens.Model, targets ...kv.Target) *testAPI {
	t.Helper()
	config.MaxBodyBytes = cmp.Or(config.MaxBodyBytes, 1<<20)
	config.Proxy.Retries = cmp.Or(config.Proxy.Retries, 1)
	config.Proxy.RequestTimeout = config.RequestTimeout
	config.Proxy.RetryBudget = 100 // no request of a test finds it used up
	log := slog.New(slog.DiscardHandler)
	h := &testAPI{router: rt, failed: make(chan uint64, 100)}
	var known []uint64
	for _, target := range targets {
		h.router.Up(target)
		known = append(known, target.Key.Worker)
	}
	h.telemetry = telemetry.New(telemetry.Deps{Thompson: rt, Fleet: func() []uint64 { return known }})
	h.proxy = proxy.New(config.Proxy, proxy.Deps{Observer: h.telemetry, Failed: func(w uint64) { h.failed <- w }, Transport: config.transport, Log: log})
	set := models.New(models.Settings{ServedModelName: "m", TokenTimeout: time.Second}, models.Deps{Router: h.router, Index: routertest.Index(h.router), Tokenizer: model, Ask: h.proxy.Ask, Log: log})
	for _, target := range targets {
		set.Default().Tokens.Met(target.Engine == kv.EngineSGLang)
	}
	ring := keys.New(config.Keys, config.APIKey)
	useKeys, err := ring.Read()
	if err != nil {
		t.Fatal(err)
	}
	useKeys()
	h.bodies = web.NewBodies(config.MaxBodyBytes, config.Bodies.Memory(config.MaxBodyBytes))
	h.api = New(Settings{
		Host: "127.0.0.1", RouterKeys: web.NewKeys(config.RouterAPIKey), ServedModelName: "m", AllowEngineAdmin: config.AllowEngineAdmin, CollectUsage: config.CollectUsage, PageURL: config.PageURL, CORSOrigins: config.CORSOrigins, Places: config.Places,
		RequestTimeout: config.RequestTimeout, SessionHeader: config.SessionHeader, SessionCookie: config.SessionCookie,
		MinUncachedTokens: config.Proxy.DisaggMinUncachedTokens, EnforceDisagg: config.Proxy.EnforceDisagg, Retries: config.Proxy.Retries,
	}, Deps{Cell: config.Cell, Keys: ring, Bodies: h.bodies, Models: set, Proxy: h.proxy, Metrics: h.telemetry.Handler(), Observers: []Observer{Traced(nil), h.telemetry}, Log: log})
	h.Server = httptest.NewServer(h.api)
	t.Cleanup(func() {
		h.Close()
		h.proxy.Close()
		for _, target := range h.router.Targets() {
			if n := h.router.Load(target.Key).InFlight; n != 0 {
				t.Errorf("worker %d still has %d requests booked", target.Key.Worker, n)
			}
		}
	})
	return h
}

// post sends a body and returns the whole answer.
func (h *testAPI) post(t testing.TB, path, body string, headers ...string) (*http.Response, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	response, err := h.Client().Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, string(answer)
}

// hangUp ends the connection without an answer.
func hangUp(w http.ResponseWriter, _ *http.Request) {
	connection, _, err := http.NewResponseController(w).Hijack()
	if err == nil {
		connection.Close()
	}
}

// deadURL is an address where nothing listens.
func deadURL(t *testing.T) string { return "http://" + testkit.DeadAddress(t) }

func (h *testAPI) metrics(t *testing.T) string {
	t.Helper()
	response, err := h.Client().Get(h.URL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	page, _ := io.ReadAll(response.Body)
	return string(page)
}
