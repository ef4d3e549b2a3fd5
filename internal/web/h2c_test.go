package web

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestHTTP2WithoutTLSHasTheLimitsOfThePort: idle connections make room, those with requests do
// not, and neither headers nor requests are without bound.
func TestHTTP2WithoutTLSHasTheLimitsOfThePort(t *testing.T) {
	release := make(chan struct{})
	p := serveListened(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			w.WriteHeader(http.StatusOK)
			http.NewResponseController(w).Flush()
			<-release
		}
		io.WriteString(w, r.Proto)
	}, nil, 2, Stall)
	get := func(client *http.Client, path string) (string, error) {
		response, err := client.Get(p.URL() + path)
		if err != nil {
			return "", err
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		return string(text), err
	}
	for range 4 {
		if got, err := get(onlyH2(t), "/"); got != "HTTP/2.0" {
			t.Fatalf("%q, %v", got, err)
		}
	}
	request, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, p.URL(), nil)
	request.Header.Set("X-Long", strings.Repeat("x", 2*headerLimit))
	if response, err := onlyH2(t).Do(request); err == nil && response.StatusCode < 400 {
		t.Errorf("long headers: %s", response.Status)
	}
	var slow []*http.Response
	for range 2 {
		response, err := onlyH2(t).Get(p.URL() + "/slow")
		if err != nil {
			t.Fatal(err)
		}
		slow = append(slow, response)
	}
	late := onlyH2(t)
	late.Timeout = 100 * time.Millisecond
	if got, err := get(late, "/"); err == nil {
		t.Errorf("a third connection was served: %q", got)
	}
	close(release)
	for _, response := range slow {
		response.Body.Close()
	}
}
