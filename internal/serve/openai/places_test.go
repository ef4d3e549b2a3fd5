package openai

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

// TestRequestsOfOneKeyLeavePlacesForOthers: on whatever route they are. A key that is not known
// takes none.
func TestRequestsOfOneKeyLeavePlacesForOthers(t *testing.T) {
	come, leave := make(chan bool), make(chan bool)
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "embeddings") {
			come <- true
			<-leave
		}
		io.WriteString(w, `{}`)
	})
	file := strings.TrimPrefix(keysFile(t, "- {name: a, key: key-a}\n- {name: b, key: key-b}"), "--api-keys-file=")
	h := newTestAPI(t, setup{Places: 4, Keys: keys.Settings{APIKeysFile: file}}, worker.URL)
	ask := func(key, path string) *http.Response {
		request, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, h.URL+path, strings.NewReader(`{"model":"m","input":"x","messages":[]}`))
		request.Header.Set("Authorization", "Bearer "+key)
		request.Header.Set("Content-Type", "application/json")
		response, err := h.Client().Do(request)
		if err != nil {
			t.Error(err)
			return nil
		}
		response.Body.Close()
		return response
	}
	ended := make(chan bool)
	for range 3 {
		go func() { // until leave
			ask("key-b", "/v1/embeddings")
			ended <- true
		}()
		<-come
	}
	for _, path := range []string{testkit.ChatPath, "/tokenize", "/v1/responses/a/cancel"} {
		if response := ask("key-b", path); response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") != "1" {
			t.Errorf("%s beyond the share: %s", path, response.Status)
		}
	}
	if response := ask("key-c", testkit.ChatPath); response.StatusCode != http.StatusUnauthorized {
		t.Errorf("an unknown key: %s", response.Status)
	}
	if response := ask("key-a", testkit.ChatPath); response.StatusCode != http.StatusOK {
		t.Errorf("another key: %s", response.Status)
	}
	for range 3 {
		leave <- true
		<-ended
	}
	if response := ask("key-b", testkit.ChatPath); response.StatusCode != http.StatusOK {
		t.Errorf("once its requests have ended: %s", response.Status)
	}
}

// TestUnknownRoutesOfGatewaysCountForTheirKey: its limit of concurrent requests holds there, too.
func TestUnknownRoutesOfGatewaysCountForTheirKey(t *testing.T) {
	file := strings.TrimPrefix(keysFile(t, "- {name: a, key: key-a, limits: {concurrent-requests: 1}}"), "--api-keys-file=")
	h := newTestAPI(t, setup{Keys: keys.Settings{APIKeysFile: file}}, "http://127.0.0.1:1")
	come, leave := make(chan bool), make(chan bool)
	ask := func(send func() (*http.Response, string, error)) int {
		r, w := httptest.NewRequest(http.MethodPost, "/any/route", strings.NewReader("{}")), httptest.NewRecorder()
		r.Header.Set("Authorization", "Bearer key-a")
		h.api.ServeGateway(w, r, &proxy.Gateway{Any: true, Send: func(proxy.Routed) (*http.Response, string, error) { return send() }})
		return w.Code
	}
	answer := func() (*http.Response, string, error) {
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: http.NoBody}, "", nil
	}
	first := make(chan int)
	go func() { // until leave
		first <- ask(func() (*http.Response, string, error) {
			come <- true
			<-leave
			return answer()
		})
	}()
	<-come
	if status := ask(answer); status != http.StatusTooManyRequests {
		t.Errorf("a second request: %d", status)
	}
	leave <- true
	if status := <-first; status != http.StatusOK {
		t.Errorf("the first request: %d", status)
	}
}
