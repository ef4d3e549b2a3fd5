package batch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

// sent sends a request to a handler.
func sent(t *testing.T, suffix, key string, handler http.HandlerFunc) (attempt, error) {
	t.Helper()
	server := httptest.NewServer(handler)
	defer server.Close()
	s, err := newSender(server.URL+suffix, key, 5*time.Second, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer s.client.CloseIdleConnections()
	return s.send(t.Context(), &request{id: "a", path: "/v1/completions", body: json.RawMessage(`{"prompt": "x"}`)})
}

func TestARequestSaysThatItIsOfABatch(t *testing.T) {
	for _, suffix := range []string{"", "/", "/v1", "/v1/"} {
		a, err := sent(t, suffix, "secret", func(w http.ResponseWriter, in *http.Request) {
			body, _ := io.ReadAll(in.Body)
			fmt.Fprintf(w, "%q", []string{in.Method, in.URL.Path, in.Header.Get("Authorization"), in.Header.Get("x-kvrouter-class"), in.Header.Get("Content-Type"), string(body)})
			// ["a" "b"] is not JSON: the answer is kept as a text.
		})
		want := `["POST" "/v1/completions" "Bearer secret" "batch" "application/json" "{\"prompt\": \"x\"}"]`
		var text string
		if _ = json.Unmarshal(a.response.Body, &text); err != nil || text != want {
			t.Errorf("%q: %s, %v", suffix, text, err)
		}
	}
}

func TestAnAnswerIsJudgedByItsStatus(t *testing.T) {
	says := func(status int, body string, header ...string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			for i := 0; i < len(header); i += 2 {
				w.Header().Set(header[i], header[i+1])
			}
			w.WriteHeader(status)
			io.WriteString(w, body)
		}
	}
	for name, test := range map[string]struct {
		handler http.HandlerFunc
		verdict verdict
		ok      bool
		code    string
		asked   time.Duration
		ends    string
	}{
		"an answer":               {says(200, "{}"), answered, true, "", 0, ""},
		"a bad request":           {says(400, "{}"), answered, false, "", 0, ""},
		"too large":               {says(413, "no JSON"), answered, false, "", 0, ""},
		"an answer without JSON":  {says(200, "data: {}"), answered, false, codeAnswer, 0, ""},
		"too long an answer":      {says(200, `"`+strings.Repeat("x", maxAnswer)+`"`), answered, false, codeAnswer, 0, ""},
		"too many requests":       {says(429, "{}", "Retry-After", "2"), refused, false, "", 2 * time.Second, ""},
		"overloaded":              {says(529, "{}"), refused, false, "", 0, ""},
		"no worker":               {says(503, "", "Retry-After", "1.5"), refused, false, "", 1500 * time.Millisecond, ""},
		"a failed worker":         {says(502, "{}"), broken, false, "", 0, ""},
		"a broken connection":     {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, broken, false, codeBroken, 0, ""},
		"a cut answer":            {says(200, "{", "Content-Length", "9"), broken, false, codeBroken, 0, ""},
		"no key":                  {says(401, "{}"), answered, false, "", 0, "--api-key"},
		"a redirect":              {says(308, "", "Location", "https://other/"), answered, false, "", 0, `redirects to "https://other/"`},
		"a text of control codes": {says(400, "\x1b[2J\xff"), answered, false, "", 0, ""},
	} {
		a, err := sent(t, "", "", test.handler)
		if test.ends != "" {
			if !errors.Is(err, errEnd) || !strings.Contains(err.Error(), test.ends) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		code := ""
		if a.failure != nil {
			code = a.failure.Code
		}
		if err != nil || a.verdict != test.verdict || a.ok() != test.ok || code != test.code || a.asked != test.asked {
			t.Errorf("%s: verdict %d, ok %t, code %q, asked %s, %v", name, a.verdict, a.ok(), code, a.asked, err)
		}
		if a.response != nil && !json.Valid(a.response.Body) {
			t.Errorf("%s: body %s", name, a.response.Body)
		}
	}
}

func TestAnEndpointThatIsNotThereRefuses(t *testing.T) {
	s, err := newSender("http://"+testkit.DeadAddress(t), "", time.Minute, 1)
	if err != nil {
		t.Fatal(err)
	}
	a, err := s.send(t.Context(), &request{path: "/v1/completions"})
	if err != nil || a.verdict != refused || a.failure.Code != codeUnreachable || strings.Contains(a.failure.Message, "/v1/") {
		t.Errorf("%+v %v", a, err)
	}
}

func TestASlowAnswerIsGivenUp(t *testing.T) {
	ended := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-ended }))
	defer server.Close()
	defer close(ended)
	s, err := newSender(server.URL, "", 50*time.Millisecond, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer s.client.CloseIdleConnections()
	if a, err := s.send(t.Context(), &request{path: "/v1/completions"}); err != nil || a.verdict != broken || a.failure.Code != codeTimeout {
		t.Errorf("%+v %v", a, err)
	}
}

func TestRetryAfterIsBounded(t *testing.T) {
	now := time.Date(2026, 11, 26, 5, 0, 0, 0, time.UTC)
	for text, want := range map[string]time.Duration{
		"": 0, "0": 0, "-5": 0, "7": 7 * time.Second, "0.5": time.Second / 2, "1e300": longestAsked, "NaN": 0, "+Inf": longestAsked, "soon": 0,
		now.Add(20 * time.Second).Format(http.TimeFormat): 20 * time.Second, now.Add(-time.Hour).Format(http.TimeFormat): 0,
	} {
		if got := retryAfter(text, now); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

func TestUsageOfEveryAPI(t *testing.T) {
	for body, want := range map[string]usage{
		`{"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}`: {9, 4, 3},
		`{"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}`:                                      {9, 0, 0},
		`{"usage":{"input_tokens":9,"output_tokens":3,"input_tokens_details":{"cached_tokens":4}}}`:       {9, 4, 3},
		`{"usage":{"input_tokens":9,"output_tokens":3,"cache_read_input_tokens":4}}`:                      {9, 4, 3},
		`{"usage":{"prompt_tokens":-9,"completion_tokens":1e99}}`:                                         {0, 0, maxTokens},
		`{"usage":null}`: {}, `[]`: {}, `{}`: {},
	} {
		if got := usageOf([]byte(body)); got != want {
			t.Errorf("%s: %+v, want %+v", body, got, want)
		}
	}
}
