package test

import (
	"bytes"
	"context"
	"fmt"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// sessionCounts are how many requests of sessions began one, stayed with its worker and
// left it.
type sessionCounts struct{ New, Kept, Moved int }

// sessionCounts returns those of the metrics page.
func (r *Router) sessionCounts() sessionCounts {
	lines := r.Metrics()
	count := func(result string) int {
		return int(lines[fmt.Sprintf("kvrouter_session_requests_total{result=%q}", result)])
	}
	return sessionCounts{New: count("new"), Kept: count("kept"), Moved: count("moved")}
}

func TestConversationsStayWithTheirWorker(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 3, "--policy=round-robin", "--session-header=x-session-id", "--session-cookie=sid")
	first := map[string]string{}
	for range 4 {
		for _, session := range []string{"a", "b"} {
			for _, headers := range [][]string{{"x-session-id", session}, {"Cookie", "x=1; sid=" + session}} {
				worker := s.chatOf("", headers...)
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
	if one, other := s.chatOf(""), s.chatOf(""); one == other {
		t.Errorf("requests without a session both went to %s", one)
	}
	want := sessionCounts{New: 2, Kept: 14}
	if got := s.sessionCounts(); got != want {
		t.Errorf("counts %+v, want %+v", got, want)
	}

	asked := s.chatOf(`,"nvext":{"annotations":["query_instance_id:"]}`, "x-session-id", "a")
	unknown := s.chatOf(`,"nvext":{"annotations":["query_instance_id:"]}`, "x-session-id", "c")
	if asked != first["a"] || unknown == "" || s.sessionCounts() != want {
		t.Errorf("dry runs told %s and %s: %+v", asked, unknown, s.sessionCounts())
	}
}

func TestWhatMovesAConversation(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(t *testing.T, flags ...string) (*Router, func(worker uint64)){
		"its worker fails": func(t *testing.T, flags ...string) (*Router, func(worker uint64)) {
			s := StartMocks(t, 3, flags...)
			return s.Router, func(worker uint64) {
				s.Mocker.Worker(int(worker)).Failing.Store(500)
				for range 3 {
					s.pinned(kv.WorkerKey{Worker: worker}, map[string]any{"messages": Say("fail")})
				}
			}
		},
		"its worker drains": func(t *testing.T, flags ...string) (*Router, func(worker uint64)) {
			s := StartMocks(t, 3, flags...)
			return s.Router, func(worker uint64) {
				(&viewer{t: s.T, base: s.Port}).send("POST", fmt.Sprintf("/ui/workers/%d/drain", worker), "")
			}
		},
		"its worker has too much to do": func(t *testing.T, flags ...string) (*Router, func(worker uint64)) {
			s := StartMocks(t, 3, append(flags, "--speedup-ratio=0.05")...)
			return s.Router, func(worker uint64) {
				ctx, leave := context.WithCancel(t.Context())
				var computed sync.WaitGroup
				computed.Go(func() {
					body := mocker.MustJSON(map[string]any{"messages": Say(strings.Repeat("much ", 4000)), "nvext": map[string]any{"backend_instance_id": worker}})
					request, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.OpenAI+testkit.ChatPath, bytes.NewReader(body))
					request.Header.Set("Content-Type", "application/json")
					if response, err := http.DefaultClient.Do(request); err == nil {
						response.Body.Close()
					}
				})
				t.Cleanup(func() {
					leave()
					computed.Wait()
				})
				testkit.Eventually(t, 10*time.Second, "it computes a long prompt", func() bool {
					w, _ := s.Record(worker)
					return w.PrefillTokens > 10_000
				})
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, breaks := start(t, "--session-header=x-session-id")
			first := s.chatOf("", "x-session-id", "a")
			var worker uint64
			fmt.Sscan(first, &worker)
			breaks(worker)
			second := s.chatOf("", "x-session-id", "a")
			if second == first {
				t.Errorf("it stayed on %s", first)
			}
			for range 3 {
				if third := s.chatOf("", "x-session-id", "a"); third != second {
					t.Errorf("it moved on from %s to %s", second, third)
				}
			}
			if got, want := s.sessionCounts(), (sessionCounts{New: 1, Kept: 3, Moved: 1}); got != want {
				t.Errorf("counts %+v, want %+v", got, want)
			}
		})
	}
}

// TestDecisionsTellOfSessionsAndNotTheirNames: who may see decisions need not learn whose
// they are.
func TestDecisionsTellOfSessionsAndNotTheirNames(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--session-header=x-session-id", "--log-level=debug")
	testkit.HTTPGet(t, s.Port+"/decisions")
	for range 2 {
		s.chatOf("", "x-session-id", "very-secret-name")
	}
	_, text := testkit.HTTPGet(t, s.Port+"/decisions")
	if got := gjson.GetBytes(text, "decisions.#.session").Raw; got != `["kept","new"]` {
		t.Errorf("sessions of decisions: %s", got)
	}
	if strings.Contains(string(text)+s.Router.Log.String(), "very-secret-name") {
		t.Error("the session's name is shown")
	}
}

// chatOf sends a short chat with these headers and returns the worker that served it,
// or, of a dry run, would.
func (r *Router) chatOf(more string, headers ...string) (worker string) {
	r.T.Helper()
	e := r.send(testkit.ChatPath, `{"max_tokens":2,"messages":[{"role":"user","content":"Hi"}]`+more+`}`, headers...)
	if e.StatusCode != http.StatusOK {
		r.T.Fatalf("%s %s", e.Status, e.Text)
	}
	return e.Worker
}
