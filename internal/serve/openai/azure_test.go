package openai

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"kvrouter/internal/testkit"
)

func TestPathsOfAzuresClients(t *testing.T) {
	for given, want := range map[string]string{
		"/openai/v1/chat/completions":                              "/v1/chat/completions",
		"/openai/v1/responses/resp_1?stream=true":                  "/v1/responses/resp_1?stream=true",
		"/openai/responses?api-version=1":                          "/v1/responses?api-version=1",
		"/openai/deployments/m/chat/completions?api-version=1":     "/v1/chat/completions?api-version=1",
		"/openai/deployments/org/m/chat/completions?api-version=1": "/v1/chat/completions?api-version=1",
		"/openai/deployments/m%2Fn/completions":                    "/v1/completions",
		"/v1/deployments/m/embeddings?api-version=1":               "/v1/embeddings?api-version=1",
		"/openai/models": "/v1/models",
		"/openai/realtime?api-version=1&deployment=a%20b": "/v1/realtime?api-version=1&deployment=a%20b&model=a+b",
		"/openai/realtime?model=m&deployment=n":           "/v1/realtime?model=m&deployment=n",
		"/openai/deployments/m/flush_cache":               "/openai/deployments/m/flush_cache",
		"/openai/deployments/chat/completions":            "/v1/completions",
		"/openai":                                         "/openai",
		"/v1/chat/completions":                            "/v1/chat/completions",
		"/metrics":                                        "/metrics",
	} {
		r := httptest.NewRequest(http.MethodPost, given, nil)
		if got := azured(r).URL.RequestURI(); got != want || r.URL.RequestURI() != given {
			t.Errorf("%s: %s, want %s", given, got, want)
		}
	}
	worker := testkit.NewFakeWorker(t, testkit.StreamOf("[DONE]"))
	h := newTestAPI(t, setup{APIKey: []string{"secret"}}, worker.URL)
	response, answer := h.post(t, "/openai/deployments/m/chat/completions?api-version=1", `{"model":"m","messages":[]}`, "api-key", "secret")
	if response.StatusCode != http.StatusOK || len(worker.Received()) != 1 {
		t.Errorf("%d %s", response.StatusCode, answer)
	}
}
