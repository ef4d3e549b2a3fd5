package web

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// Dialect is the form of the errors that the clients of a route read.
type Dialect int

// Values of Dialect.
const (
	DialectOpenAI    Dialect = iota // {"error": {...}}; in a stream as data without a name
	DialectAnthropic                // {"type": "error", "error": {...}}; in a stream an event "error"
	DialectResponses                // OpenAI's; in a stream an event "error" with a number
)

// dialects are the routes with another dialect than OpenAI's, with all routes below them.
var dialects = map[string]Dialect{
	"/v1/messages":  DialectAnthropic,
	"/v1/responses": DialectResponses,
}

// DialectOf returns the dialect of a route.
func DialectOf(path string) Dialect {
	for route, d := range dialects {
		if rest, ok := strings.CutPrefix(path, route); ok && (rest == "" || rest[0] == '/') {
			return d
		}
	}
	return DialectOpenAI
}

// Fault is an error for a client.
type Fault struct {
	Status  int
	Param   string // member of the request that is wrong; empty: none
	Message string
	Request string // id of the request; empty: it has none
}

// object is the inner object of an error in OpenAI's form.
func (f Fault) object() map[string]any {
	object := map[string]any{"message": f.Message, "type": errorType(f.Status), "param": nil, "code": f.Status}
	if f.Param != "" {
		object["param"] = f.Param
	}
	return object
}

// JSON renders an error as the body of an answer.
func (d Dialect) JSON(f Fault) []byte {
	if d != DialectAnthropic {
		return jsonOf(map[string]any{"error": f.object()})
	}
	object := map[string]any{"type": anthropicType(f.Status), "message": f.Message}
	answer := map[string]any{"type": "error", "error": object}
	if f.Param != "" {
		object["param"] = f.Param
	}
	if f.Request != "" {
		answer["request_id"] = f.Request
	}
	return jsonOf(answer)
}

// Event renders an error as the last event of a stream. sequence is its number in a stream of
// the responses API, of which OpenAI's SDKs raise an event with a member "error".
func (d Dialect) Event(f Fault, sequence int64) []byte {
	switch d {
	case DialectAnthropic:
		return fmt.Appendf(nil, "event: error\ndata: %s\n\n", d.JSON(f))
	case DialectResponses:
		object := f.object()
		object["code"] = cmp.Or(map[int]string{http.StatusTooManyRequests: "rate_limit_exceeded"}[f.Status], "server_error")
		return fmt.Appendf(nil, "event: error\ndata: %s\n\n", jsonOf(map[string]any{
			"type": "error", "sequence_number": sequence, "code": object["code"], "message": f.Message, "param": object["param"], "error": object,
		}))
	}
	return fmt.Appendf(nil, "data: %s\n\n", d.JSON(f))
}

// jsonOf renders values that always can be.
func jsonOf(v any) []byte {
	text, _ := json.Marshal(v)
	return text
}

// anthropicType returns Anthropic's error type for an HTTP status.
func anthropicType(status int) string {
	switch status {
	case http.StatusUnauthorized:
		return "authentication_error"
	case http.StatusForbidden:
		return "permission_error"
	case http.StatusNotFound:
		return "not_found_error"
	case http.StatusRequestEntityTooLarge:
		return "request_too_large"
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	case http.StatusServiceUnavailable, StatusOverloaded:
		return "overloaded_error"
	}
	if status < http.StatusInternalServerError {
		return "invalid_request_error"
	}
	return "api_error"
}

// AnthropicStatus returns the HTTP status of an error type of Anthropic's; 0: it is none.
func AnthropicStatus(kind string) int {
	for _, status := range []int{http.StatusBadRequest, http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound,
		http.StatusRequestEntityTooLarge, http.StatusTooManyRequests, StatusOverloaded, http.StatusInternalServerError} {
		if anthropicType(status) == kind {
			return status
		}
	}
	return 0
}
