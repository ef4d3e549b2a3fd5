package tokens

import (
	"context"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/chat"
)

// ChatTokens is ChatBodyTokens of a body as it came.
func (m *Model) ChatTokens(body []byte) ([]uint32, error) {
	parsed, err := chat.ParseBody(body)
	if err != nil {
		return nil, err
	}
	return m.ChatBodyTokens(parsed)
}

// CompletionTokens is CompletionBodyTokens of a body as it came.
func (m *Model) CompletionTokens(body []byte) ([][]uint32, error) {
	parsed, err := chat.ParseBody(body)
	if err != nil {
		return nil, err
	}
	return m.CompletionBodyTokens(parsed)
}

// Chat is ChatBody of a body as it came.
func (t *Source) Chat(ctx context.Context, body []byte) Prompt {
	parsed, ok := jsonbody.Parse(body)
	if !ok {
		parsed = &jsonbody.Body{Raw: body}
	}
	return t.ChatBody(ctx, parsed)
}
