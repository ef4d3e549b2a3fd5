package doctor

import (
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/tools/mocker"
)

// server answers these routes, method and path, and 404 for others; the answer to a POST has the
// status 400.
func server(t *testing.T, routes map[string]string) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer, has := routes[r.Method+" "+r.URL.Path]
		switch {
		case !has:
			w.WriteHeader(http.StatusNotFound)
		case r.Method == http.MethodPost:
			w.WriteHeader(http.StatusBadRequest)
		}
		_, _ = io.WriteString(w, answer)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// TestOtherEnginesAreNamed: a server of another engine is well, whatever routes of vLLM it lacks.
func TestOtherEnginesAreNamed(t *testing.T) {
	list := func(owner string) string { return `{"object":"list","data":[{"id":"m","owned_by":"` + owner + `"}]}` }
	for name, test := range map[string]struct {
		routes map[string]string
		want   string
	}{
		"llama.cpp":               {map[string]string{"GET /health": `{"status":"ok"}`, "GET /v1/models": list("llamacpp"), "GET /props": `{"default_generation_settings":{"n_ctx":8},"build_info":"b9222"}`}, "llama.cpp b9222 serves m"},
		"llama.cpp with an alias": {map[string]string{"GET /health": "", "GET /v1/models": list("me"), "GET /props": `{"default_generation_settings":{}}`}, "llama.cpp serves m"},
		"Ollama":                  {map[string]string{"GET /": "Ollama is running", "GET /v1/models": list("library"), "GET /api/version": `{"version":"0.40.12"}`}, "Ollama 0.40.12 serves m"},
		"Ollama, a user's model":  {map[string]string{"GET /v1/models": list("someone"), "GET /api/version": `{"version":"0.40.12"}`}, "Ollama 0.40.12 serves m"},
		"TGI":                     {map[string]string{"GET /health": "", "GET /v1/models": list("Qwen/Qwen3"), "GET /info": `{"model_id":"Qwen/Qwen3","router":"text-generation-router","version":"3.3.6"}`}, "TGI 3.3.6 serves m"},
		"TensorRT-LLM":            {map[string]string{"GET /health": "", "GET /v1/models": list("tensorrt_llm"), "GET /version": `{"version":"1.2.0"}`, "GET /metrics": "[]"}, "TensorRT-LLM 1.2.0 serves m"},
		"LMDeploy":                {map[string]string{"GET /health": "", "GET /v1/models": list("lmdeploy")}, "LMDeploy serves m"},
		"any":                     {map[string]string{"GET /v1/models": list("acme")}, "an OpenAI server serves m"},
		"pages for all paths":     {map[string]string{"GET /v1/models": list("acme"), "GET /props": "<html>", "GET /api/version": "<html>", "GET /info": "[]", "GET /server_info": "<html>"}, "an OpenAI server serves m"},
		"only chats":              {map[string]string{"POST /v1/chat/completions": ""}, "an OpenAI server serves models that it does not list"},
	} {
		all, failed := visit(t, Command{Wait: wait}, Setup{Workers: []probe.Server{{URL: server(t, test.routes)}}, BlockSize: blockSize, KVEvents: true})
		if len(failed) > 0 || !slices.ContainsFunc(all, func(f Finding) bool { return f.Level == OK && f.Text == test.want }) ||
			!slices.ContainsFunc(all, func(f Finding) bool { return f.Level == Note && strings.HasPrefix(f.Text, "is routed approximately") }) {
			t.Errorf("%s: %+v", name, all)
		}
	}
}

// TestMissingArgumentsCanBeCopied: the line has all that a command line lacks and nothing else, and
// workers on one host get ports of their own.
func TestMissingArgumentsCanBeCopied(t *testing.T) {
	silent := func(c *mocker.Settings) { c.KVEvents = false }
	for name, test := range map[string]struct {
		tweak  func(*mocker.Settings)
		change func(path string, response *http.Response, body string) string
		want   string // of worker 1
	}{
		"a stock vLLM": {silent, func(path string, response *http.Response, body string) string {
			if strings.HasSuffix(path, "/render") {
				response.StatusCode = http.StatusNotFound
			}
			return strings.Replace(body, `"prompt_tokens_details":{`, `"unknown":{`, 1)
		}, `add to its command line: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","topic":"kv-events",` +
			`"endpoint":"tcp://*:5558","replay_endpoint":"tcp://*:5758"}' --enable-prompt-tokens-details --enable-scale-out`},
		"a stock SGLang": {func(c *mocker.Settings) { c.API = "sglang"; silent(c) }, func(_ string, _ *http.Response, body string) string {
			return strings.Replace(body, `"enable_cache_report":true`, `"enable_cache_report":false`, 1)
		}, `add to its command line: --kv-events-config '{"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:5558","replay_endpoint":"tcp://*:5758"}' ` +
			`--load-publish-endpoint tcp://*:5658 --enable-cache-report`},
		"vLLM with two ranks and events off": {func(c *mocker.Settings) { silent(c); c.DataParallelSize = 2 }, func(path string, response *http.Response, body string) string {
			if strings.HasSuffix(path, "/render") {
				response.StatusCode = http.StatusNotFound
			}
			return body
		}, `add to its command line: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","topic":"kv-events",` +
			`"endpoint":"tcp://*:5559","replay_endpoint":"tcp://*:5759"}' --enable-scale-out`},
		"only the answers": {nil, func(_ string, _ *http.Response, body string) string {
			return strings.Replace(body, `"prompt_tokens_details":{`, `"unknown":{`, 1)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWard(t, 2, test.tweak)
			front(t, &w.attached[1], test.change)
			all, failed := visit(t, Command{Wait: wait}, setup(w))
			advice := ""
			for _, f := range all {
				if strings.HasPrefix(f.About, "worker 1") && strings.HasPrefix(f.Remedy, "add to its") {
					advice = f.Remedy
				}
			}
			if advice != test.want || len(failed) > 0 {
				t.Errorf("%s, failed %v, all %+v", advice, failed, all)
			}
		})
	}
}
