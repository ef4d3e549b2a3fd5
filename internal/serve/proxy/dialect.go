package proxy

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
)

// dialect is how engines of one kind stream the answers of one route, and how they are asked for
// the rest of one. It has the state that only such answers need.
type dialect interface {
	// continues reports whether that worker can continue the answer.
	continues(t *kv.Target) bool
	// rest edits a request to be one for the rest of the answer, of which s has the tokens.
	rest(s *Migration, e *edits)
	// rewrite appends an event to out as the client gets it, and remembers it.
	rewrite(s *Migration, out, event []byte, e eventFacts) []byte
	// hidden returns the part of an event that hides a list of token ids, and what replaces it. The
	// member begins at at, its list goes from from to to.
	hidden(event []byte, at, from, to int) (begin, end int, by string)
	// rewind has s end where another worker can continue.
	rewind(s *Migration)
	// close appends what is missing of an answer whose last token has come.
	close(s *Migration, out []byte) []byte
}

// dialectOf returns the dialect of a worker's answer to a request. nil: it cannot be continued,
// and why says so, as with all chats of SGLang.
func dialectOf(route string, t *kv.Target, body *jsonbody.Body) (d dialect, why string) {
	switch sglang := t.RunsSGLang(); {
	case route == generateRoute && !sglang:
		return nil, whyNoTokens
	case route == generateRoute:
		d, why = new(sglangGenerate), whyNotGenerated(body)
	case sglang && route == chatRoute:
		return nil, whyChat
	case sglang:
		d, why = newSGLangCompletion(), whyNotOnSGLang(body, body.Get)
	case holdsBack(body):
		return nil, whyStop
	case route == chatRoute:
		return vllmChat{choices: vllmChats}, ""
	default:
		return vllmCompletion{choices: vllmCompletions}, ""
	}
	if why != "" {
		d = nil
	}
	return d, why
}

// vllm is what the dialects of vLLM have in common.
type vllm struct{}

func (vllm) continues(t *kv.Target) bool { return !t.RunsSGLang() }

// hidden: without the request for them, the member is null.
func (vllm) hidden(_ []byte, _, from, to int) (begin, end int, by string) { return from, to, "null" }

// holdsBack reports whether vLLM holds back text for the stop strings of a request.
func holdsBack(body *jsonbody.Body) bool {
	stops := append(body.Get("stop").Array(), body.Get("stop"))
	return !body.Get("include_stop_str_in_output").Bool() &&
		slices.ContainsFunc(stops, func(stop gjson.Result) bool { return utf8.RuneCountInString(stop.Str) > 1 })
}

// vllmChat is the dialect of vLLM's chats.
type vllmChat struct {
	vllm
	*choices
}

var vllmChats = &choices{text: markContent, object: "chat.completion.chunk", final: `"delta":{}`, stop: "stop_reason", opens: true}

func (vllmChat) rest(s *Migration, e *edits) {
	e.set("kv_transfer_params", withPromptTokens(e.client.Get("kv_transfer_params"), s.prompt, s.tokens))
	limitRest(s, e)
}

// vllmCompletion is the dialect of vLLM's completions.
type vllmCompletion struct {
	vllm
	*choices
}

var vllmCompletions = &choices{text: markText, object: "text_completion", final: `"text":""`, stop: "stop_reason"}

// Marks in events. None of them can stand inside of a JSON string, whose quotes are escaped.
var (
	markIDs       = []byte(`"token_ids":[`)
	markPromptIDs = []byte(`"prompt_token_ids":[`)
	markChoice    = []byte(`"choices":[{`)
	markRole      = []byte(`"role":`)
	markEmpty     = []byte(`"delta":{}`)
	markReasoning = []byte(`"reasoning`)
	markUsage     = []byte(`"usage":{`)
	markContent   = []byte(`"delta":{"content":"`)
	markText      = []byte(`"text":"`)
)

// choices is what the dialects of OpenAI's routes have in common: the choice of each event has a
// new part of the answer.
type choices struct {
	text   []byte // beginning of the member that has an event's text
	object string // that an event is
	final  string // member of an event without text
	stop   string // name of the member that has the reason of a stop
	usage  string // members of a usage beside the numbers of tokens
	opens  bool   // an event without tokens opens the answer

	sglang *sglang // what SGLang's answers need; nil: it is vLLM's
}

// rest requests the rest of a completion.
func (*choices) rest(s *Migration, e *edits) {
	e.set("prompt", tokenList(s.prompt, s.tokens))
	limitRest(s, e)
}

// limitRest limits the rest of an answer to what the client still allows, and requests its token ids.
func limitRest(s *Migration, e *edits) {
	for _, key := range []string{"max_tokens", "max_completion_tokens", "min_tokens"} {
		if v := e.client.Get(key); given(v) {
			e.set(key, strconv.Itoa(max(0, number(v)-s.sent)))
		}
	}
	e.set("return_token_ids", "true")
}

// rewind forgets the tokens without text.
func (*choices) rewind(s *Migration) {
	if !s.finished {
		s.tokens, s.held = s.tokens[:s.whole], s.held[:0]
	}
}

// rewrite appends an event to out as the client gets it, and remembers it.
func (c *choices) rewrite(s *Migration, out, event []byte, e eventFacts) []byte {
	if out, ok := c.quick(s, out, event, e.finished); ok {
		return out
	}
	out, event = s.plain(out, event, false)
	if c.withoutText(event, e.finished) {
		if s.held = c.show(s, s.held, event, e.finished); s.why != "" || len(s.held) > maxHeld {
			out, s.held, s.whole = append(out, s.held...), s.held[:0], len(s.tokens)
		}
		return out
	}
	if !c.sglang.remakes() {
		out, s.held, s.whole = append(out, s.held...), s.held[:0], len(s.tokens)
	}
	out = c.show(s, out, event, e.finished)
	if !c.sglang.remakes() && !s.torn {
		s.whole = len(s.tokens) // with those of this event
		c.sglang.keep(event)
	}
	return out
}

// withoutText reports whether an event has tokens of the answer, but no text, and is not the last.
func (c *choices) withoutText(event []byte, finished bool) bool {
	if finished || !bytes.Contains(event, markIDs) || !bytes.Contains(event, markChoice) {
		return false
	}
	if at := bytes.Index(event, c.text); at > 0 && event[at+len(c.text)] != '"' {
		return false
	}
	choice := gjson.GetBytes(event[len("data:"):], "choices.0")
	for _, path := range []string{"text", "delta.content", "delta.reasoning", "delta.reasoning_content"} {
		if choice.Get(path).Str != "" {
			return false
		}
	}
	return true
}

// show appends an event to out as the client gets it, and remembers it.
func (c *choices) show(s *Migration, out, event []byte, finished bool) []byte {
	data, ok := bytes.CutPrefix(event, []byte("data:"))
	if !ok || bytes.HasPrefix(bytes.TrimSpace(data), []byte("[DONE]")) {
		return append(out, event...)
	}
	if s.id == "" {
		s.id, s.created, s.model = gjson.GetBytes(data, "id").Raw, gjson.GetBytes(data, "created").Raw, gjson.GetBytes(data, "model").Raw
	}
	if !bytes.Contains(data, markChoice) {
		s.counted = s.counted || bytes.Contains(data, markUsage)
		return append(out, s.renumber(event)...)
	}
	if s.moves > 0 && !s.verified && !s.verify(data) {
		s.tear(whyNotTaken)
		return out
	}
	opening := c.opens && bytes.Contains(data, markRole) && !bytes.Contains(data, markIDs)
	if opening && s.moves > 0 {
		return out // the client has it
	}
	if s.why == "" && !opening && !s.remember(data) {
		s.why = whyNoTokens
	}
	if len(s.tokens) > maxMigratedAnswer {
		s.why = whyLong
	}
	if bytes.Contains(data, markReasoning) {
		delta := gjson.GetBytes(data, "choices.0.delta")
		s.reasoning = delta.Get("reasoning").Str != "" || delta.Get("reasoning_content").Str != ""
	} else if !opening && !bytes.Contains(data, markEmpty) {
		s.reasoning = false
	}
	s.finished, s.counted = s.finished || finished, s.counted || finished && bytes.Contains(data, markUsage)
	if s.text == 0 {
		s.text = max(0, bytes.Index(event, c.text))
	}
	if !s.asked && !reasonGiven(data) && bytes.Contains(data, markEmpty) && gjson.GetBytes(data, "choices.0.logprobs").Type == gjson.Null {
		return out // without token ids, the engine sends no event for tokens without text
	}
	shown := s.renumber(s.hide(event))
	if c.sglang.remakes() {
		shown = c.sglang.withoutAgain(s, shown, finished)
	}
	return append(out, shown...)
}

// quick is rewrite for an event of one answer's text that begins as those before it, or is the
// first one.
func (c *choices) quick(s *Migration, out, event []byte, finished bool) (_ []byte, ok bool) {
	if s.moves > 0 || len(s.held) > 0 || s.text == 0 && !c.learn(s, event) {
		return out, false
	}
	if len(event) < s.text || !bytes.HasPrefix(event[s.text:], c.text) {
		return out, false
	}
	at := lastIDs(event)
	if at < s.text || event[s.text+len(c.text)] == '"' { // there is no text
		return out, false
	}
	from, had, null := at+len(markIDs), len(s.tokens), "null"
	begin := from - 1
	if c.sglang != nil { // without the request for them, it has no such member
		if begin, null = at-1, ""; event[begin] != ',' {
			return out, false
		}
	}
	ids, length, ok := readTokens(event[from:], s.tokens)
	if !ok || len(ids) > maxMigratedAnswer {
		s.tokens = s.tokens[:had]
		return out, false
	}
	s.tokens, s.whole, s.reasoning, s.finished = ids, len(ids), false, s.finished || finished
	c.sglang.keep(event)
	if s.asked {
		return append(out, event...), true
	}
	return append(append(append(out, event[:begin]...), null...), event[from+length:]...), true
}

// learn finds out where the text is in events, from the first one that has it. It reports
// whether that one needs no other changes than the later ones.
func (c *choices) learn(s *Migration, event []byte) bool {
	at := bytes.Index(event, c.text)
	if at < 0 || !bytes.Contains(event[:at], markChoice) || bytes.Contains(event, markPromptIDs) {
		return false
	}
	if m := readMessage(event); !m.plain || !jsonbody.IsCompact(m.data) {
		return false
	}
	if s.id == "" {
		head := string(event[len("data:"):at])
		id, created, model := gjson.Get(head, "id"), gjson.Get(head, "created"), gjson.Get(head, "model")
		if id.Type != gjson.String || created.Type != gjson.Number || model.Type != gjson.String {
			return false // head may cut other values
		}
		s.id, s.created, s.model = id.Raw, created.Raw, model.Raw
	}
	s.text = at
	return true
}

// lastIDs returns the place of the last list of token ids in an event; -1: there is none. Mostly
// it is the last list.
func lastIDs(event []byte) int {
	if end := bytes.LastIndexByte(event, '[') + 1; bytes.HasSuffix(event[:end], markIDs) {
		return end - len(markIDs)
	}
	return bytes.LastIndex(event, markIDs)
}

// remember keeps the tokens of an event. It reports whether there were any.
func (s *Migration) remember(data []byte) bool {
	at := bytes.Index(data, markIDs)
	if at < 0 {
		return false
	}
	ids, _, ok := readTokens(data[at+len(markIDs):], s.tokens)
	s.tokens = ids
	return ok
}

// verify reports whether the worker that continues confirms the tokens of prompt and answer
// that it was sent.
func (s *Migration) verify(data []byte) bool {
	at := bytes.Index(data, markPromptIDs)
	if at < 0 {
		return false
	}
	ids, _, ok := readTokens(data[at+len(markPromptIDs):], nil)
	s.verified = ok && len(ids) == len(s.prompt)+s.sent && slices.Equal(ids[:len(s.prompt)], s.prompt) &&
		slices.Equal(ids[len(s.prompt):], s.tokens[:s.sent])
	return s.verified
}

// renumber gives an event of a worker that continues the identity of the first one, and its
// usage the tokens of the whole answer.
func (s *Migration) renumber(event []byte) []byte {
	if s.moves == 0 {
		return event
	}
	from := len("data:")
	var patches []patch
	change := func(path, value string) {
		if v := gjson.GetBytes(event[from:], path); v.Index > 0 && value != "" {
			patches = append(patches, patch{from + v.Index, len(v.Raw), value})
		}
	}
	change("id", s.id)
	change("created", s.created)
	if usage := gjson.GetBytes(event[from:], "usage"); usage.IsObject() {
		created := gjson.GetBytes(event[from:], "usage.prompt_tokens_details.created_cache_tokens").Int()
		for path, number := range map[string]int64{
			"usage.prompt_tokens":                       int64(len(s.prompt)),
			"usage.completion_tokens":                   gjson.GetBytes(event[from:], "usage.completion_tokens").Int() + int64(s.sent),
			"usage.prompt_tokens_details.cached_tokens": int64(s.cached),
			// the rest of them are blocks of the answer
			"usage.prompt_tokens_details.created_cache_tokens": min(created, int64(max(0, len(s.prompt)-s.cached))),
		} {
			if gjson.GetBytes(event[from:], path).Type == gjson.Number {
				change(path, strconv.FormatInt(number, 10))
			}
		}
	}
	return applied(event, patches)
}

// close appends what is missing of an answer whose last token has come: its finish reason if
// the limit of tokens is reached, its usage and its end.
func (c *choices) close(s *Migration, out []byte) []byte {
	head := fmt.Sprintf(`data: {"id":%s,"object":%q,"created":%s,"model":%s,`, s.id, c.object, s.created, s.model)
	if !s.finished {
		out = fmt.Appendf(out, `%s"choices":[{"index":0,%s,"logprobs":null,"finish_reason":"length",%q:null}]}`+"\n\n", head, c.final, c.stop)
	}
	if s.usage && !s.counted {
		prompt, tokens := len(s.prompt), len(s.tokens)
		out = fmt.Appendf(out, `%s"choices":[],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,`,
			head, prompt, prompt+tokens, tokens)
		out = fmt.Appendf(out, `"prompt_tokens_details":{"cached_tokens":%d}%s}}`+"\n\n", s.cached, c.usage)
	}
	return append(out, "data: [DONE]\n\n"...)
}
