// Package tokenstest opens models and computes the tokens of requests, for tests.
package tokenstest

import (
	"context"
	"log/slog"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/prompt/encode"
	"kvrouter/internal/prompt/tokens"
)

// Open opens the model in a folder, for vLLM without arguments.
func Open(ctx context.Context, folder string) (*tokens.Model, error) {
	return tokens.Open(ctx, tokens.Opening{Name: folder, CacheTokens: encode.DefaultCache}, slog.New(slog.DiscardHandler))
}

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
