package proxy

import (
	"io"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"
	"net/http"
	"net/http/httptest"
	"testing"
)

// newFakeWorker starts a worker that answers inference requests with serve.
func newFakeWorker(t *testing.T, serve http.HandlerFunc) *testkit.FakeWorker {
	t.Helper()
	f := &testkit.FakeWorker{}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			io.WriteString(w, `{"object":"list","data":[{"id":"m","object":"model","max_model_len":8192}]}`)
			return
		}
		if r.Header.Get(web.HeaderRequest) == "" { // the router's own question for tokens
			http.NotFound(w, r)
			return
		}
		body, _ := io.ReadAll(r.Body)
		f.Mu.Lock()
		f.Bodies = append(f.Bodies, string(body))
		f.Header = r.Header.Clone()
		f.Mu.Unlock()
		serve(w, r)
	}))
	t.Cleanup(f.Close)
	return f
}
