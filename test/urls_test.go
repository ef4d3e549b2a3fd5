package test

import (
	"cmp"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

// TestURLsAreTheWholeCommand: workers given by URL alone are followed like those of --worker, and
// no other is started beside.
func TestURLsAreTheWholeCommand(t *testing.T) {
	w := StartWorkers(t, 3)
	r := Start(t, "--worker-urls", w.URL(0), w.URL(1), w.URL(2))
	r.WaitReady(3, 30*time.Second)
	for i, record := range r.Workers() {
		if record.Endpoint == nil || *record.Endpoint != w.URL(i) || record.Engine.String() != "vllm" {
			t.Errorf("worker %d is %+v", i, record)
		}
	}
	first := r.send(testkit.ChatPath, `{"messages":[{"role":"user","content":"`+strings.Repeat("the same words ", 200)+`"}],"max_tokens":4}`)
	if first.StatusCode != http.StatusOK {
		t.Error(first.Status, first.Text)
	}
}

// TestServersOfFewRoutes: a server that lacks what the router asks of vLLM, and answers chats, is
// one of the workers; an address that answers no chat is not. The turns of a conversation go to one
// worker, although the router does not know their tokens.
func TestServersOfFewRoutes(t *testing.T) {
	const answer = `{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],` +
		`"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6}}`
	var checks atomic.Int64
	serve := func(routes map[string]string) string {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/v1/models" {
				checks.Add(1)
			}
			reply, has := routes[r.Method+" "+r.URL.Path]
			body, _ := io.ReadAll(r.Body)
			switch {
			case !has:
				http.NotFound(w, r)
			case r.Method == http.MethodPost && !strings.Contains(string(body), "messages"):
				http.Error(w, `{"error":{"message":"messages is missing"}}`, http.StatusBadRequest)
			default:
				w.Header().Set("Content-Type", "application/json")
				io.WriteString(w, reply)
			}
		}))
		t.Cleanup(server.Close)
		return server.URL
	}
	chats := map[string]string{"POST /v1/chat/completions": answer}
	listed := map[string]string{"POST /v1/chat/completions": answer, "GET /v1/models": `{"object":"list","data":[{"id":"m","object":"model","owned_by":"library"}]}`}
	r := Start(t, serve(listed), serve(chats), serve(map[string]string{"GET /": "not an engine"}))
	r.WaitReady(2, 30*time.Second)
	workers := map[string]int{}
	for i := range 20 {
		e := r.send(testkit.ChatPath, fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"question %d"}]}`, i))
		if e.StatusCode != http.StatusOK || !strings.Contains(e.Text, `"content":"hi"`) {
			t.Fatal(e.Status, e.Text)
		}
		workers[e.Worker]++
	}
	if workers["0"] == 0 || workers["1"] == 0 || workers["2"] > 0 {
		t.Errorf("requests by worker: %v", workers)
	}
	turns, home := "", ""
	for turn := range 8 {
		turns += fmt.Sprintf(`{"role":"user","content":"%s %d"},`, strings.Repeat("a long question ", 100), turn)
		e := r.send(testkit.ChatPath, `{"model":"m","messages":[`+strings.TrimSuffix(turns, ",")+`]}`)
		if home = cmp.Or(home, e.Worker); e.Worker != home {
			t.Errorf("turn %d goes to worker %s, the first went to %s", turn, e.Worker, home)
		}
		turns += `{"role":"assistant","content":"hi"},`
	}
	seen := checks.Load()
	testkit.Eventually(t, 30*time.Second, "some health checks", func() bool { return checks.Load() >= seen+4 })
	r.WaitReady(2, time.Second)
	if log := r.Log.String(); strings.Contains(log, ": down: ") {
		t.Error("a worker counts as down")
	} else if !strings.Contains(log, "neither /health nor /v1/models") {
		t.Error("the log does not say what the address lacks")
	}
}
