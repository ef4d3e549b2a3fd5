package web

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"
)

// TestErrorsHaveTheFormOfTheirRoute reads errors as the SDKs of each API do.
func TestErrorsHaveTheFormOfTheirRoute(t *testing.T) {
	for path, anthropic := range map[string]bool{
		"/v1/messages": true, "/v1/messages/count_tokens": true, "/v1/messages/batches": true,
		"/v1/messagesx": false, "/v1/chat/completions": false, "/v1/responses": false, "/": false, "": false,
	} {
		for status, kind := range map[int]string{
			400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 405: "invalid_request_error", 413: "request_too_large",
			429: "rate_limit_error", 500: "api_error", 502: "api_error", 503: "overloaded_error", 504: "api_error", 529: "overloaded_error",
		} {
			recorder := httptest.NewRecorder()
			c, _ := gin.CreateTestContext(recorder)
			c.Request = httptest.NewRequest(http.MethodPost, "http://x/", nil)
			c.Request.URL.Path = path
			FailParam(c, status, "model", "no")
			var answer struct {
				Type    string
				Request string `json:"request_id"`
				Error   struct {
					Type, Message string
					Param         string
					Code          int
				}
			}
			if err := json.Unmarshal(recorder.Body.Bytes(), &answer); err != nil || recorder.Code != status || answer.Error.Message != "no" {
				t.Fatalf("%s %d: %d %s", path, status, recorder.Code, recorder.Body)
			}
			switch {
			case anthropic && (answer.Type != "error" || answer.Error.Type != kind || answer.Request != recorder.Header().Get(HeaderRequest) || answer.Request == ""),
				!anthropic && (answer.Type != "" || answer.Error.Code != status || answer.Error.Param != "model"):
				t.Errorf("%s %d: %s", path, status, recorder.Body)
			}
		}
	}
}

// TestErrorsInStreamsHaveTheFormOfTheirRoute pins the events that the SDKs raise on: Anthropic's
// on those that are called "error", OpenAI's on data with a member "error".
func TestErrorsInStreamsHaveTheFormOfTheirRoute(t *testing.T) {
	fault := Fault{Status: 502, Message: "broken"}
	for path, want := range map[string]string{
		"/v1/chat/completions": `data: {"error":{"code":502,"message":"broken","param":null,"type":"server_error"}}`,
		"/v1/messages":         "event: error\n" + `data: {"error":{"message":"broken","type":"api_error"},"type":"error"}`,
		"/v1/responses": "event: error\n" + `data: {"code":"server_error","error":{"code":"server_error","message":"broken","param":null,"type":"server_error"},` +
			`"message":"broken","param":null,"sequence_number":7,"type":"error"}`,
	} {
		if got := string(DialectOf(path).Event(fault, 7)); got != want+"\n\n" {
			t.Errorf("%s: %s", path, got)
		}
	}
	if got := string(DialectResponses.Event(Fault{Status: 429}, 1)); !strings.Contains(got, `"code":"rate_limit_exceeded"`) {
		t.Error(got)
	}
}

func TestAnthropicsTypesHaveAStatus(t *testing.T) {
	for kind, want := range map[string]int{"overloaded_error": 529, "api_error": 500, "not_found_error": 404, "": 0, "internal_error": 0} {
		if got := AnthropicStatus(kind); got != want {
			t.Errorf("%q: %d, want %d", kind, got, want)
		}
	}
}
