package test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

// storing is a server that keeps its responses, as vLLM and SGLang do. It does not answer for
// one by its id: a router that has not heard of the response finds no worker for it.
type storing struct {
	name string

	mu  sync.Mutex // guards has
	has map[string]bool
}

func (s *storing) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	switch {
	case r.URL.Path == "/v1/models":
		io.WriteString(w, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
	case r.URL.Path == "/health":
	case r.URL.Path != proxy.ResponsesRoute:
		http.NotFound(w, r)
	default:
		raw, _ := io.ReadAll(r.Body)
		if previous := gjson.GetBytes(raw, "previous_response_id").Str; previous != "" && !s.has[previous] {
			http.NotFound(w, r)
			return
		}
		id := fmt.Sprintf("resp_%s_%d", s.name, len(s.has))
		s.has[id] = true
		fmt.Fprintf(w, `{"id":%q,"object":"response","status":"completed","usage":{"input_tokens":9,"output_tokens":2}}`, id)
	}
}

// TestRoutersShareTheWorkersOfStoredResponses continues conversations at the other router.
func TestRoutersShareTheWorkersOfStoredResponses(t *testing.T) {
	workers := []string{"--engine=none", "--policy=round-robin", "--no-kv-events"}
	for i := range 3 {
		s := &storing{name: string(rune('a' + i)), has: map[string]bool{}}
		server := httptest.NewServer(s)
		t.Cleanup(server.Close)
		workers = append(workers, fmt.Sprintf("--worker=url=%s,id=%d", server.URL, i))
	}
	at := testkit.FreePorts(t, 6)
	var routers []*Router
	for i := range 2 {
		own := []string{"--cluster=test", fmt.Sprintf("--cluster-port=%d", at+3*i+2), fmt.Sprintf("--cluster-peers=127.0.0.1:%d", at+2), "--cluster-key=0123456789abcdef"}
		routers = append(routers, StartAt(t, Program, at+3*i, nil, append(own, workers...)...))
	}
	for _, r := range routers {
		r.WaitReady(3, 20*time.Second)
		testkit.Eventually(t, 20*time.Second, "the routers hear each other", func() bool { return r.Metrics()["kvrouter_cluster_peers"] == 1 })
	}
	respond := func(r *Router, options string) (id string) {
		t.Helper()
		_, answer := Post(t, r.OpenAI+proxy.ResponsesRoute, `{"model":"m","input":"hi"`+options+`}`)
		return gjson.GetBytes(answer, "id").Str
	}
	used := map[string]bool{}
	for range 6 {
		previous := respond(routers[0], "")
		if previous == "" {
			t.Fatal("no response")
		}
		used[previous[:6]] = true
		for turn := range 4 {
			id := ""
			testkit.Eventually(t, 20*time.Second, "the other router knows the worker", func() bool {
				id = respond(routers[1-turn%2], fmt.Sprintf(`,"previous_response_id":%q`, previous))
				return id != ""
			})
			if id[:6] != previous[:6] {
				t.Fatalf("%s continues %s", id, previous)
			}
			previous = id
		}
	}
	if len(used) != 3 {
		t.Errorf("workers used: %v", used)
	}
}

// TestResponsesSurviveARouterOfSeveral holds that a router that starts later learns whose responses
// are whose: its key continues one, and another key does not.
func TestResponsesSurviveARouterOfSeveral(t *testing.T) {
	server := httptest.NewServer(&storing{name: "a", has: map[string]bool{}})
	t.Cleanup(server.Close)
	at := testkit.FreePorts(t, 6)
	start := func(i int) *Router {
		r := StartAt(t, Program, at+3*i, nil, "--engine=none", "--no-kv-events", "--worker=url="+server.URL, "--api-key=key-a,key-b",
			"--cluster=test", fmt.Sprintf("--cluster-port=%d", at+3*i+2), fmt.Sprintf("--cluster-peers=127.0.0.1:%d", at+3*(1-i)+2))
		r.WaitReady(1, 20*time.Second)
		return r
	}
	respond := func(r *Router, key, options string) (status int, id string) {
		t.Helper()
		request, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, r.OpenAI+proxy.ResponsesRoute, strings.NewReader(`{"model":"m","input":"hi"`+options+`}`))
		request.Header = http.Header{"Content-Type": {"application/json"}, "Authorization": {"Bearer " + key}}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		answer, _ := io.ReadAll(response.Body)
		return response.StatusCode, gjson.GetBytes(answer, "id").Str
	}
	status, id := respond(start(0), "key-a", "")
	if id == "" {
		t.Fatalf("no response: %d", status)
	}
	late, previous := start(1), fmt.Sprintf(`,"previous_response_id":%q`, id)
	testkit.Eventually(t, 20*time.Second, "the late router knows the response", func() bool {
		status, _ := respond(late, "key-a", previous)
		return status == http.StatusOK
	})
	if status, _ := respond(late, "key-b", previous); status != http.StatusNotFound {
		t.Errorf("another key: %d", status)
	}
}
