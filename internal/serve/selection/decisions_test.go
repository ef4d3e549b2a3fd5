package selection

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// decisions asks for the last decisions; query begins with ?, or is empty.
func decisions(t *testing.T, s *Service, query string) (int, gjson.Result) {
	t.Helper()
	w := httptest.NewRecorder()
	s.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/decisions"+query, nil))
	return w.Code, gjson.Parse(w.Body.String())
}

func TestDecisionsAreExplainedFromTheFirstQuestionOn(t *testing.T) {
	router := routertest.New(t, "kv", 2)
	routertest.Hold(router, 1, testkit.Tokens(5000, 40))
	s, ask := newFinder(t, router)
	body := `{"tokens":` + strings.ReplaceAll(fmt.Sprint(testkit.Tokens(5000, 40)), " ", ",") + `}`
	ask("/find_worker", body)
	status, answer := decisions(t, s, "")
	if status != 200 || answer.Get("explained").Bool() || answer.Get("decisions").Raw != "[]" {
		t.Fatalf("before anybody asked: %d %s", status, answer)
	}
	for range 3 {
		ask("/find_worker", body)
	}
	status, answer = decisions(t, s, "?last=2")
	newest := answer.Get("decisions.0")
	if status != 200 || !answer.Get("explained").Bool() || answer.Get("decisions.#").Int() != 2 || newest.Get("at").Str < answer.Get("decisions.1.at").Str {
		t.Fatalf("%d %s", status, answer)
	}
	for field, want := range map[string]string{
		"policy": `"kv"`, "how": `"highest"`, "worker_id": "1", "tokens": "40", "leg": `"aggregated"`, "candidates.#": "2",
		"candidates.1.overlap_blocks": "10", "candidates.1.terms.#.name": `["prefill","decode","requests"]`, "candidates.0.total": "-20", "candidates.1.total": "-10", "margin": "10",
	} {
		if got := newest.Get(field).Raw; got != want {
			t.Errorf("%s is %s, want %s", field, got, want)
		}
	}
	if regexp.MustCompile(`\b5001\b`).MatchString(answer.Raw) { // not as digits of a time
		t.Errorf("the answer has tokens of the prompt: %s", answer)
	}
}

func TestBadNumbersOfDecisionsAreRefused(t *testing.T) {
	s, _ := newFinder(t, routertest.New(t, "kv", 1))
	for _, query := range []string{"?last=0", "?last=-1", "?last=x", "?last=", "?last=1001", "?last=99999999999999999999"} {
		if status, answer := decisions(t, s, query); status != 400 || !strings.Contains(answer.Get("error").Str, "from 1 to 1000") {
			t.Errorf("%s: %d %s", query, status, answer)
		}
	}
}
