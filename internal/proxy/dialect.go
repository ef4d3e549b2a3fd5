package proxy

import (
	"slices"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"kvrouter/internal/jsonbody"
	"kvrouter/internal/kv"
)

// dialect is how engines of one kind stream the answers of one route, and how they are asked for
// the rest of one. It has the state that only such answers need.
type dialect interface {
	// continues reports whether that worker can continue the answer.
	continues(t *kv.Target) bool
	// limit returns how many tokens the client allows.
	limit(body *jsonbody.Body) (most int, limited bool)
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
// and why says so.
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

func (vllmCompletion) rest(s *Migration, e *edits) {
	e.set("prompt", tokenList(s.prompt, s.tokens))
	limitRest(s, e)
}
