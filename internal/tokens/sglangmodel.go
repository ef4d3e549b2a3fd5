package tokens

import (
	"github.com/tidwall/gjson"

	"kvrouter/internal/jsonbody"
)

// SGLangChatTokens is ChatBodyTokens as SGLang 0.5.23 renders a chat.
func (m *Model) SGLangChatTokens(body *jsonbody.Body) ([]uint32, error) {
	return m.sglangChatTokens(bounds{}, body)
}

// SGLangPromptTokens returns the tokens of a text, of each in a list of them, or what
// a list of tokens, or of such lists, has itself: SGLang's prompt and input_ids.
func (m *Model) SGLangPromptTokens(prompt gjson.Result) ([][]uint32, error) {
	return m.sglangPromptTokens(bounds{}, prompt)
}
