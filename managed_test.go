package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
)

// managedServer is a worker that clients of sglang-router add by its URL.
func managedServer(t *testing.T) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/health":
		case "/v1/models":
			io.WriteString(w, `{"data":[{"id":"m"}]}`)
		case "/v1/completions":
			fmt.Fprintf(w, `{"choices":[{"text":"x","finish_reason":"stop"}],"key":%q}`, r.Header.Get("Authorization"))
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(s.Close)
	return s
}

// call sends a request without a body, as sglang-router's clients do.
func (s *selectionSite) call(method, path string, headers ...string) (int, string) {
	s.t.Helper()
	request, err := http.NewRequestWithContext(s.t.Context(), method, s.selection+path, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

func (s *selectionSite) calls(method, path string, status int, want string) {
	s.t.Helper()
	if got, text := s.call(method, path); got != status || text != want {
		s.t.Errorf("%s %s: %d %s, want %d %s", method, path, got, text, status, want)
	}
}

// TestSGLangRoutersClientsManageWorkers: the calls and answers are sglang-router's.
func TestSGLangRoutersClientsManageWorkers(t *testing.T) {
	s := startSelection(t)
	worker := managedServer(t)
	s.calls("GET", "/liveness", 200, "OK")
	s.calls("GET", "/readiness", 503, `{"reason":"insufficient healthy workers","status":"not ready"}`)
	s.calls("GET", "/list_workers", 200, `{"urls":[]}`)
	s.calls("POST", "/add_worker?url="+worker.URL+"/&api_key=sesame", 200, "Successfully added worker: "+worker.URL)
	s.calls("POST", "/add_worker?url="+worker.URL, 400, "Worker "+worker.URL+" already exists")
	s.calls("GET", "/list_workers", 200, fmt.Sprintf(`{"urls":[%q]}`, worker.URL))
	s.calls("GET", "/readiness", 200, `{"healthy_workers":1,"status":"ready","total_workers":1}`)
	s.want("GET", "/workers", nil, 200, "# 1", `0.lifecycle "schedulable"`, `0.model_name "m"`, "0.api_key -")
	if status, answer := post(t, s.openAI+"/v1/completions", `{"prompt":"a"}`); status != 200 || gjson.GetBytes(answer, "key").Str != "Bearer sesame" {
		t.Errorf("%d %s", status, answer)
	}
	s.calls("POST", "/remove_worker?url="+worker.URL, 200, "Successfully removed worker: "+worker.URL)
	s.calls("POST", "/remove_worker?url="+worker.URL, 200, "Successfully removed worker: "+worker.URL)
	s.calls("GET", "/list_workers", 200, `{"urls":[]}`)
	s.want("GET", "/workers", nil, 200, "# 0")
}

func TestRegisteredWorkersAreRemovedByTheirURL(t *testing.T) {
	s := startSelection(t, "--worker=url=http://127.0.0.1:9,id=3")
	s.register(1)
	s.calls("POST", "/remove_worker?url=http://127.0.0.1:1/", 200, "Successfully removed worker: http://127.0.0.1:1")
	s.want("GET", "/workers", nil, 200, "# 1", "0.worker_id 3")
	s.calls("POST", "/remove_worker?url=http://127.0.0.1:9", 400, "Worker http://127.0.0.1:9 was started by the router, or attached by --worker: it cannot be removed")
}

func TestWhatCannotBeAdded(t *testing.T) {
	s := startSelection(t, "--startup-timeout=300ms")
	dead := deadURL(t)
	for _, test := range []struct {
		query  string
		status int
		part   string
	}{
		{"", 400, "Worker URL required. Provide 'url' query parameter"},
		{"?url=h:1", 400, "is not a URL such as"},
		{"?url=http://user:sesame@h:1", 400, "must not contain a user or password"},
		{"?url=" + s.openAI, 400, "address of this router itself"},
		{"?url=" + s.selection, 400, "address of this router itself"},
		{"?url=http://h:1&api_key=a%0Ab", 400, "without control characters"},
		{"?url=" + dead, 400, "waiting for worker " + dead + " to become healthy. Please set --startup-timeout"},
	} {
		began := time.Now()
		status, answer := s.call("POST", "/add_worker"+test.query)
		if status != test.status || !strings.Contains(answer, test.part) || strings.Contains(answer, "sesame") || time.Since(began) > 20*time.Second {
			t.Errorf("%s: %d %s", test.query, status, answer)
		}
	}
	s.calls("GET", "/list_workers", 200, `{"urls":[]}`)
}

// TestManagingWorkersIsGuarded as registering them is.
func TestManagingWorkersIsGuarded(t *testing.T) {
	s := startSelection(t, "--router-api-key=open")
	worker := managedServer(t)
	for _, path := range []string{"/add_worker?url=" + worker.URL, "/remove_worker?url=" + worker.URL} {
		if status, answer := s.call("POST", path); status != 401 {
			t.Errorf("%s without a key: %d %s", path, status, answer)
		}
		if status, answer := s.call("POST", path, "Authorization", "Bearer open", "Origin", "http://elsewhere"); status != 403 {
			t.Errorf("%s of another site's page: %d %s", path, status, answer)
		}
		if status, answer := s.call("POST", path, "Authorization", "Bearer open"); status != 200 {
			t.Errorf("%s: %d %s", path, status, answer)
		}
	}
	if status, _ := s.call("GET", "/list_workers"); status != 401 {
		t.Errorf("/list_workers: %d", status)
	}
	if status, _ := s.call("GET", "/liveness"); status != 200 {
		t.Errorf("/liveness: %d", status)
	}
}

// TestClientThatLeavesAddsNoWorker while it waits.
func TestClientThatLeavesAddsNoWorker(t *testing.T) {
	s := startSelection(t)
	request, err := http.NewRequestWithContext(t.Context(), "POST", s.selection+"/add_worker?url="+deadURL(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Timeout: 200 * time.Millisecond}
	if response, err := client.Do(request); err == nil {
		response.Body.Close()
		t.Errorf("answered %s", response.Status)
	}
	testkit.Eventually(t, 10*time.Second, "it is gone", func() bool { return len(s.app.fleet.Workers()) == 0 })
}
