// Package tokenstest computes the tokens of requests as they come, for tests.
package tokenstest

import (
	"kvrouter/internal/chat"
	"kvrouter/internal/jsonbody"
	"kvrouter/internal/tokens"
)

// Chat returns the prompt tokens of the body of a chat.
func Chat(m *tokens.Model, body []byte) ([]uint32, error) {
	parsed, err := chat.ParseBody(body)
	if err != nil {
		return nil, err
	}
	return m.ChatBodyTokens(parsed)
}

// Body parses a body that must be JSON.
func Body(body []byte) *jsonbody.Body {
	parsed, ok := jsonbody.Parse(body)
	if !ok {
		panic("not a JSON object: " + string(body))
	}
	return parsed
}
