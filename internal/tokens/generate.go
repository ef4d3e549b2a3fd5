package tokens

import (
	"context"

	"github.com/tidwall/gjson"

	"kvrouter/internal/jsonbody"
)

// GenerateBody returns the prompts of a request to SGLang's /generate, at least
// one: its text or its input_ids, each one or a list. Of one with media or
// embeddings nothing is known.
func (t *Source) GenerateBody(ctx context.Context, body *jsonbody.Body) []Prompt {
	const shape = "generate"
	given := body.Get("text")
	if given.Type == gjson.Null {
		given = body.Get("input_ids")
	}
	as := &jsonbody.Body{Raw: jsonbody.AppendObject(nil, []jsonbody.Field{{Key: "prompt", Raw: jsonbody.RawOrNull(given)}}), Top: []jsonbody.Member{{Key: "prompt", Value: given}}, LoneSurrogate: body.LoneSurrogate}
	for _, media := range []string{"image_data", "video_data", "audio_data"} {
		if body.Get(media).Type != gjson.Null {
			return t.unknownPrompts(as, shape)
		}
	}
	reason := t.whyNot([]string{"completion"})
	if reason == "" {
		lists, err := t.model.boundedCompletionTokens(t.model.bounds(ctx, t.timeout), as)
		if err == nil {
			t.local.Add(1)
			return prompts(lists, SourceLocal, shape)
		}
		var ask bool
		if reason, ask = fallback(err); !ask {
			t.countReason(reason)
			return t.unknownPrompts(as, shape)
		}
	}
	t.countReason(reason)
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	if lists, ok := t.tokenizePrompts(ctx, gjson.ParseBytes(as.Raw)); ok {
		t.tokenized.Add(1)
		return prompts(lists, SourceWorker, shape)
	}
	return t.unknownPrompts(as, shape)
}
