package chat

import (
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// Features names the features of a chat that shape its prompt: "chat", and then
// "tools", "tool_calls", "parts" and "continue" where present.
func Features(body *jsonbody.Body) []string {
	var calls, parts bool
	for _, m := range body.Messages() {
		for _, f := range m.Fields {
			switch f.Key {
			case "role":
				calls = calls || f.Value.Str == "tool"
			case "tool_calls":
				calls = calls || f.Value.IsArray()
			case "content":
				parts = parts || f.Value.IsArray()
			}
		}
	}
	out := []string{"chat"}
	for _, f := range []struct {
		name string
		on   bool
	}{
		{"tools", body.Get("tools").Type != gjson.Null}, {"tool_calls", calls}, {"parts", parts},
		{"continue", body.Get("continue_final_message").Bool()},
	} {
		if f.on {
			out = append(out, f.name)
		}
	}
	return out
}

// SGLangFeatures returns Features and two more of SGLang: "answer last", for a final
// assistant message that is not to be continued, and "reasoning".
func SGLangFeatures(body *jsonbody.Body) []string {
	features := Features(body)
	if list := body.Messages(); len(list) > 0 && !body.Get("continue_final_message").Bool() &&
		jsonbody.FieldOf(list[len(list)-1].Fields, "role").Str == "assistant" {
		features = append(features, "answer last")
	}
	for _, key := range []string{"reasoning", "reasoning_effort", "chat_template_kwargs"} {
		if body.Get(key).Type != gjson.Null {
			return append(features, "reasoning")
		}
	}
	return features
}
