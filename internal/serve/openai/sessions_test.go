package openai

import (
	"io"
	"net/http"
	"testing"

	"kvrouter/internal/testkit"
)

// TestTheSessionsHeaderReachesTheWorkerAsItCame: the router reads it, and no more.
func TestTheSessionsHeaderReachesTheWorkerAsItCame(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{}`) })
	config := setup{}
	config.SessionHeader, config.SessionCookie = "X-Session-Id", "sid"
	h := newTestAPI(t, config, worker.URL)
	response, _ := h.post(t, testkit.ChatPath, `{"model":"m","messages":[]}`, "X-Session-Id", "mine", "Cookie", "sid=yours")
	worker.Mu.Lock()
	defer worker.Mu.Unlock()
	if got := worker.Header; got.Get("X-Session-Id") != "mine" || got.Get("Cookie") != "sid=yours" || response.Header.Get("Set-Cookie") != "" {
		t.Errorf("the worker got %v, the client %v", got, response.Header)
	}
}
