package main

import (
	"bufio"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/page"
)

// pageKey is the router port's key in these tests.
const pageKey = "sesame"

// viewer is somebody who looks at the page.
type viewer struct {
	t      *testing.T
	base   string
	lines  *bufio.Reader
	latest page.State
}

// look opens the page's stream, which ends with the test.
func look(t *testing.T, base string) *viewer {
	t.Helper()
	request, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, base+"/ui/stream", nil)
	request.Header.Set("Authorization", "Bearer "+pageKey)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { response.Body.Close() })
	if response.StatusCode != http.StatusOK {
		t.Fatalf("the stream: %s", response.Status)
	}
	return &viewer{t: t, base: base, lines: bufio.NewReader(response.Body)}
}

// until reads states until one is as wanted.
func (v *viewer) until(what string, is func(*page.State) bool) {
	v.t.Helper()
	event := ""
	for limit := time.Now().Add(20 * time.Second); time.Now().Before(limit); {
		line, err := v.lines.ReadString('\n')
		if err != nil {
			v.t.Fatalf("%s: the stream ended: %v", what, err)
		}
		if name, named := strings.CutPrefix(line, "event: "); named {
			event = strings.TrimSpace(name)
		}
		data, told := strings.CutPrefix(line, "data: ")
		if !told || event != "state" {
			continue
		}
		var state page.State
		if err := json.Unmarshal([]byte(data), &state); err != nil {
			v.t.Fatal(err)
		}
		if v.latest = state; is(&state) {
			return
		}
	}
	v.t.Fatalf("%s: never shown; last %+v", what, v.latest)
}

// send sends what the page's script would.
func (v *viewer) send(method, path, body string) (*http.Response, string) {
	v.t.Helper()
	request, _ := http.NewRequestWithContext(v.t.Context(), method, v.base+path, strings.NewReader(body))
	request.Header.Set("Authorization", "Bearer "+pageKey)
	request.Header.Set("X-Kvrouter-Page", "1")
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		v.t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		v.t.Fatal(err)
	}
	return response, string(answer)
}
