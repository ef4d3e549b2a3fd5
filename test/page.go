package test

import (
	"fmt"
	"net/http"
	"strings"
)

// Act does what a button of the page does with a worker: drain, readmit or
// reset-cache.
func (r *Router) Act(worker uint64, action string) {
	r.T.Helper()
	request, err := http.NewRequestWithContext(r.T.Context(), http.MethodPost, fmt.Sprintf("%s/ui/workers/%d/%s", r.Port, worker, action),
		strings.NewReader("{}"))
	if err != nil {
		r.T.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("X-Kvrouter-Page", "1")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		r.T.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusNoContent {
		r.T.Fatalf("%s: %s", request.URL, response.Status)
	}
}
