package openai

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"kvrouter/internal/keys"
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
