package tokens

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/chat"
)

// sglangPrompts returns the prompts in one member of a request to SGLang: a text,
// token ids, or a list of either. The shape stands for its features too.
func (t *Source) sglangPrompts(ctx context.Context, body *jsonbody.Body, key, shape string) []Prompt {
	prompt := body.Get(key)
	if body.LoneSurrogate || body.Get("suffix").Type != gjson.Null {
		t.countReason(reasonNotRenderable)
		return t.unknownPrompts(prompt, shape)
	}
	lists, ok, ask := t.here(ctx, []string{"completion"}, func(b bounds) ([][]uint32, error) { return t.model.sglangPromptTokens(b, prompt) })
	switch {
	case ok:
		return prompts(lists, SourceLocal, shape)
	case !ask:
		return t.unknownPrompts(prompt, shape)
	}
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	// Of the request only the model and the prompt are handed on: SGLang has no
	// setting of a completion that changes its tokens.
	fields := append(chat.ModelField(body), jsonbody.Field{Key: "prompt", Raw: jsonbody.RawOrNull(prompt)})
	if lists, ok := t.tokenizePrompts(ctx, gjson.ParseBytes(jsonbody.AppendObject(nil, fields))); ok {
		t.tokenized.Add(1)
		return prompts(lists, SourceWorker, shape)
	}
	return t.unknownPrompts(prompt, shape)
}

// unknownFields are members of a /generate request with which its text or token ids
// are not the whole prompt, or nothing of it is taken from the cache.
var unknownFields = []string{"input_embeds", "image_data", "video_data", "audio_data", "mm_hashes", "mm_content_hashes", "session_params",
	"positional_embed_overrides"}

// GenerateBody returns the prompts of a request to SGLang's own route /generate, at
// least one: a text or a list of texts, which get the tokens that the tokenizer puts around
// every text, or token ids or lists of them.
func (t *Source) GenerateBody(ctx context.Context, body *jsonbody.Body) []Prompt {
	const shape = "generate"
	key := "text"
	if body.Get(key).Type == gjson.Null {
		key = "input_ids"
	}
	if isEmptyList(body.Get(key)) {
		return []Prompt{{Source: SourceLocal, Shape: shape}}
	}
	unknown := body.Get("text").Type != gjson.Null && body.Get("input_ids").Type != gjson.Null || wrongKind(key, body.Get(key))
	for _, field := range unknownFields {
		v := body.Get(field)
		unknown = unknown || v.Type != gjson.Null && !isEmptyList(v)
	}
	if unknown {
		t.countReason(reasonNotRenderable)
		return t.unknownPrompts(body.Get(key), shape)
	}
	out := t.sglangPrompts(ctx, body, key, shape)
	if body.Get("return_logprob").Bool() || body.Get("return_logprob").IsArray() {
		computeFrom(out, logprobStart(body.Get("logprob_start_len")))
	}
	return out
}

// wrongKind reports whether a text is none, or token ids are texts.
func wrongKind(key string, v gjson.Result) bool {
	first := v
	if v.IsArray() {
		first = firstOf(v)
	}
	if key == "text" {
		return first.Type != gjson.String
	}
	return first.Type != gjson.Number && !first.IsArray() || !v.IsArray()
}

func isEmptyList(v gjson.Result) bool { return v.IsArray() && !firstOf(v).Exists() }

// logprobStart is the first of a prompt's tokens that the engine computes, for
// the tokens' own probabilities; negative: none is requested. Of several
// the first one counts for all.
func logprobStart(v gjson.Result) int {
	start := -1
	take := func(n gjson.Result) {
		if n.Type == gjson.Number && n.Num >= 0 && (start < 0 || n.Num < float64(start)) {
			start = int(min(n.Num, maxModelLen))
		}
	}
	take(v)
	if v.IsArray() {
		jsonbody.EachElement(v.Raw, func(n gjson.Result) bool {
			take(n)
			return true
		})
	}
	return start
}

// computeFrom notes that the engine computes the tokens from start on again; negative:
// it does not.
func computeFrom(list []Prompt, start int) {
	for i := range list {
		if start >= 0 {
			list[i].Exact = min(list[i].Exact, start)
		}
	}
}

// sglangOther returns the prompt of a request of another API, as the chat that SGLang
// makes of it. A prompt not known to be such a chat is unknown.
func (t *Source) sglangOther(ctx context.Context, path string, body []byte) Prompt {
	rule := chat.SystemUnknown
	if t.whyNot([]string{"chat"}) == "" {
		rule = t.model.chats.SystemRule()
	}
	parsed, err := chat.ParseBody(body)
	if err == nil {
		parsed, err = chat.FromOther(path, parsed, rule)
	}
	if err != nil || t.model != nil && t.model.files.Harmony {
		t.countReason(reasonOtherAPI)
		t.log.Debug("cannot convert the request to a chat", "route", path, "why", err)
		return t.unknown(path)
	}
	p := t.ChatBody(ctx, parsed)
	p.Shape = path + "+" + p.Shape
	return p
}

// KeepApart returns the body for the workers. SGLang isolates prompts with an
// extra_key in its cache, but reports their blocks as those of plain prompts. Such
// a request therefore gets a cache_salt derived from its salt and extra_key, which
// isolates it in the same way and is part of the reported blocks. vLLM has no
// extra_key.
func (t *Source) KeepApart(route string, body *jsonbody.Body) *jsonbody.Body {
	if t == nil || !t.someSGLang.Load() || route == anthropicRoute {
		return body
	}
	extra := body.Get("extra_key")
	if body.Top == nil || extra.Type == gjson.Null || extra.Raw == `""` {
		return body
	}
	parts := []string{"kvrouter extra_key", body.Get("cache_salt").String(), extra.String()}
	if extra.IsArray() { // one a prompt: which has which is to count too
		parts = append(parts, body.Get("prompt").Raw, body.Get("text").Raw, body.Get("input_ids").Raw)
	}
	sum := sha256.New()
	for _, part := range parts {
		fmt.Fprintf(sum, "%d:%s", len(part), part)
	}
	return body.With("cache_salt", `"`+base64.RawURLEncoding.EncodeToString(sum.Sum(nil))+`"`)
}

// anthropicRoute is the one route of SGLang's that reads neither cache_salt nor
// extra_key.
const anthropicRoute = "/v1/messages"

// GenerateRoute is SGLang's own route, which no other engine has.
const GenerateRoute = "/generate"

// Adapter returns the LoRA adapter that a worker will use for the request. known is
// the request's model, if a worker reports it as an adapter; listed means that a
// worker lists a model of that name. SGLang accepts adapters as base:adapter,
// unless that is the name of a model, or as lora_path; it treats an adapter's name
// alone as the base model.
func (t *Source) Adapter(route string, body *jsonbody.Body, known string, listed bool) string {
	if route != GenerateRoute && !t.SGLang() {
		return known
	}
	_, adapter, _ := strings.Cut(body.Get("model").String(), ":")
	if adapter == "" || listed || route == GenerateRoute {
		return body.Get("lora_path").String()
	}
	return adapter
}

// sglangChatTokens returns the prompt tokens of a chat request by SGLang's rules,
// within bounds; its error may be errTooLong or errNoTurn.
func (m *Model) sglangChatTokens(b bounds, body *jsonbody.Body) ([]uint32, error) {
	chat, err := m.chats.ParseSGLang(body)
	if err != nil {
		return nil, err
	}
	if chat.IDs.Type != gjson.Null {
		return readTokens(chat.IDs, b.tokens)
	}
	if !b.fitsTexts(chat.Texts()) {
		return nil, errTooLong
	}
	text, prefill, err := m.chats.RenderSGLang(chat)
	if err != nil {
		return nil, err
	}
	defer text.Free()
	tokens, err := m.encode(b, text.Text, false)
	if err != nil || prefill == "" {
		return tokens, err
	}
	more, err := m.encode(b, prefill, true)
	if err != nil {
		return nil, err
	}
	if bos := m.special("bos_token"); len(bos) == 1 && more[0] == bos[0] {
		more = more[1:]
	}
	return append(slices.Clip(tokens), more...), nil
}

// special returns the tokens of a special token; none if the model has no such one.
func (m *Model) special(name string) []uint32 {
	for _, f := range m.files.Special {
		if f.Key == name {
			return m.Encode(gjson.Parse(f.Raw).Str, false)
		}
	}
	return nil
}

// sglangPromptTokens returns the tokens of each prompt in a list or value of texts
// or token ids, by SGLang's rules: a text gets the tokens that the tokenizer puts around every
// text.
func (m *Model) sglangPromptTokens(b bounds, prompt gjson.Result) ([][]uint32, error) {
	return m.severalTokens(b, prompt, func(b bounds, p gjson.Result) ([]uint32, error) {
		return m.promptTokens(b, p, gjson.Result{}, true)
	})
}

// sglangTokenize turns a chat request into one that SGLang's /tokenize answers with
// the same prompt: a chat completion has no such fields as are left out.
func sglangTokenize(body []byte) (request []byte, ok bool) {
	parsed, ok := jsonbody.Parse(body)
	if !ok {
		return nil, false
	}
	var fields []jsonbody.Field
	for _, f := range parsed.Top {
		switch f.Key {
		case "prompt", "add_generation_prompt", "add_special_tokens", "stream", "stream_options":
			continue
		}
		fields = append(fields, jsonbody.Field{Key: f.Key, Raw: f.Value.Raw})
	}
	return jsonbody.AppendObject(nil, fields), true
}
