package main

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/kv"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"
)

// chatOf sends a short chat with these headers and returns the worker that served it,
// or, of a dry run, would.
func (s *mockSite) chatOf(t *testing.T, more string, headers ...string) (worker string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.openAI+testkit.ChatPath, strings.NewReader(`{"max_tokens":2,"messages":[{"role":"user","content":"Hi"}]`+more+`}`))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if text, err := io.ReadAll(response.Body); err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s %s, %v", response.Status, text, err)
	}
	return response.Header.Get(web.HeaderWorker)
}

// sessionCounts are those of the metrics page.
func (s *mockSite) sessionCounts(t *testing.T) router.SessionCounts {
	t.Helper()
	_, page := testkit.HTTPGet(t, s.openAI+"/metrics")
	lines := testkit.ReadMetricsPage(string(page))
	count := func(result string) uint64 {
		return uint64(lines[fmt.Sprintf("kvrouter_session_requests_total{result=%q}", result)])
	}
	return router.SessionCounts{New: count("new"), Kept: count("kept"), Moved: count("moved")}
}

func TestConversationsStayWithTheirWorker(t *testing.T) {
	s := startMockSite(t, 3, "--policy=round-robin", "--session-header=x-session-id", "--session-cookie=sid")
	first := map[string]string{}
	for range 4 {
		for _, session := range []string{"a", "b"} {
			for _, headers := range [][]string{{"x-session-id", session}, {"Cookie", "x=1; sid=" + session}} {
				worker := s.chatOf(t, "", headers...)
				if before, known := first[session]; known && before != worker {
					t.Errorf("session %s went from %s to %s", session, before, worker)
				}
				first[session] = worker
			}
		}
	}
	if first["a"] == first["b"] {
		t.Errorf("both sessions began on %s", first["a"])
	}
	if one, other := s.chatOf(t, ""), s.chatOf(t, ""); one == other {
		t.Errorf("requests without a session both went to %s", one)
	}
	want := router.SessionCounts{New: 2, Kept: 14}
	if got := s.sessionCounts(t); got != want {
		t.Errorf("counts %+v, want %+v", got, want)
	}

	asked := s.chatOf(t, `,"nvext":{"annotations":["query_instance_id:"]}`, "x-session-id", "a")
	unknown := s.chatOf(t, `,"nvext":{"annotations":["query_instance_id:"]}`, "x-session-id", "c")
	if asked != first["a"] || unknown == "" || s.sessionCounts(t) != want {
		t.Errorf("dry runs told %s and %s: %+v", asked, unknown, s.sessionCounts(t))
	}
}

func TestWhatMovesAConversation(t *testing.T) {
	for name, breaks := range map[string]func(t *testing.T, s *mockSite, worker uint64){
		"its worker fails": func(t *testing.T, s *mockSite, worker uint64) { fail(t, s, worker) },
		"its worker drains": func(_ *testing.T, s *mockSite, worker uint64) {
			s.app.router.Hold(worker, true)
			s.t.Cleanup(func() { s.app.router.Hold(worker, false) })
		},
		"its worker has too much to do": func(t *testing.T, s *mockSite, worker uint64) {
			b, err := s.app.router.Book(router.Request{NumTokens: 20_000}, kv.WorkerKey{Worker: worker})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(b.End)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := startMockSite(t, 3, "--session-header=x-session-id")
			first := s.chatOf(t, "", "x-session-id", "a")
			var worker uint64
			fmt.Sscan(first, &worker)
			breaks(t, s, worker)
			second := s.chatOf(t, "", "x-session-id", "a")
			if second == first {
				t.Errorf("it stayed on %s", first)
			}
			for range 3 {
				if third := s.chatOf(t, "", "x-session-id", "a"); third != second {
					t.Errorf("it moved on from %s to %s", second, third)
				}
			}
			if got, want := s.sessionCounts(t), (router.SessionCounts{New: 1, Kept: 3, Moved: 1}); got != want {
				t.Errorf("counts %+v, want %+v", got, want)
			}
		})
	}
}

// TestDecisionsTellOfSessionsAndNotTheirNames: who may see decisions need not learn whose
// they are.
func TestDecisionsTellOfSessionsAndNotTheirNames(t *testing.T) {
	s := startMockSite(t, 2, "--session-header=x-session-id", "--log-level=debug")
	testkit.HTTPGet(t, s.selection+"/decisions")
	for range 2 {
		s.chatOf(t, "", "x-session-id", "very-secret-name")
	}
	_, text := testkit.HTTPGet(t, s.selection+"/decisions")
	if got := gjson.GetBytes(text, "decisions.#.session").Raw; got != `["kept","new"]` {
		t.Errorf("sessions of decisions: %s", got)
	}
	if strings.Contains(string(text)+s.log.String(), "very-secret-name") {
		t.Error("the session's name is shown")
	}
}
