package proxy

import (
	"io"
	"net/http"
	"slices"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
)

// PromptTokens are the tokens of a request's prompt, for the workers that take them in place of
// its text. One goroutine uses a PromptTokens.
type PromptTokens struct {
	ids   []uint32
	takes func(*kv.Target) bool
	plain bool // a worker has refused a request with them
}

// NewPromptTokens returns the tokens of a request's prompt; nil: engines need its text. takes
// reports whether a worker takes them.
func NewPromptTokens(route string, body *jsonbody.Body, prompt []uint32, takes func(*kv.Target) bool) *PromptTokens {
	if len(prompt) == 0 || route != chatRoute && route != completionRoute || SeveralAnswers(route, body) {
		return nil
	}
	needed := []string{
		"echo", "suffix", // they show or frame the text
		"prompt_logprobs", "prompt_embeds", "return_token_offsets", // of the text
		"kv_transfer_params", "bootstrap_room", "input_ids", // the client's own
		"truncate_prompt_tokens", "truncation_side", // not applied to token ids
	}
	if slices.ContainsFunc(needed, func(key string) bool { return asks(body, key) }) {
		return nil
	}
	if prompt := body.Get("prompt"); route == completionRoute && prompt.Type != gjson.String {
		return nil // it has tokens already, or several texts
	}
	return &PromptTokens{ids: prompt, takes: takes}
}

// sendsTokens reports whether a worker gets the tokens of the prompt of u.
func (p *Proxy) sendsTokens(u *sending, t *kv.Target) bool {
	s := u.PromptTokens
	return s != nil && !s.plain && !u.Migration.open() && !p.tokenRefusers.has(t) && s.takes(t)
}

// addTokens adds the tokens of the prompt for a worker that takes them, and transfer parameters,
// JSON; empty: none.
func (p *Proxy) addTokens(u *sending, t *kv.Target, params string) {
	switch u.asTokens = p.sendsTokens(u, t); {
	case u.asTokens && u.Route == completionRoute:
		u.edits.set("prompt", tokenList(u.PromptTokens.ids))
	case u.asTokens && t.RunsSGLang():
		u.edits.add(jsonbody.Field{Key: "input_ids", Raw: tokenList(u.PromptTokens.ids)})
	case u.asTokens:
		params = withPromptTokens(gjson.Parse(params), u.PromptTokens.ids)
	}
	if params != "" && !u.edits.extend("kv_transfer_params", params) {
		u.edits.add(jsonbody.Field{Key: "kv_transfer_params", Raw: params})
	}
}

// forPrefill makes u the prefill leg of a vLLM worker, with these transfer parameters.
func (p *Proxy) forPrefill(u *sending, t *kv.Target, params string) {
	body := u.Body
	switch u.asTokens = p.sendsTokens(u, t); {
	case u.asTokens && u.Route == completionRoute:
		body = body.With("prompt", tokenList(u.PromptTokens.ids))
	case u.asTokens:
		params = withPromptTokens(gjson.Parse(params), u.PromptTokens.ids)
	}
	u.edits.whole = prefillBody(u.Route, body, params)
}

// withPromptTokens returns a chat's kv_transfer_params with the tokens of its prompt, by which
// vLLM replaces its messages.
func withPromptTokens(params gjson.Result, lists ...[]uint32) string {
	return jsonbody.View(jsonbody.Merge(params, jsonbody.Field{Key: "prompt_token_ids", Raw: tokenList(lists...)}))
}

// tokenList returns token ids as a JSON list.
func tokenList(lists ...[]uint32) string {
	most := 2
	for _, ids := range lists {
		most += 7 * len(ids)
	}
	out := append(make([]byte, 0, most), '[')
	for _, ids := range lists {
		out = appendTokens(out, ids)
	}
	return jsonbody.View(append(out, ']'))
}

// refusesTokens reports whether an answer with that status may refuse a request because of
// its prompt's tokens. It is sent again as the client wrote it, so that an answer that
// refuses the client's own request is the one to that. Without an error, nothing of the
// answer has been read.
func (p *Proxy) refusesTokens(u *sending, t *kv.Target, status int, answer io.Reader) error {
	if !u.asTokens || status != http.StatusBadRequest && status != http.StatusRequestEntityTooLarge && status != http.StatusUnprocessableEntity {
		return nil
	}
	body, err := io.ReadAll(io.LimitReader(answer, keptLimit))
	if err != nil {
		return err
	}
	if names(body, "prompt_token_ids") || names(body, "input_ids") {
		p.tokenRefusers.add(t)
	}
	u.PromptTokens.plain = true
	return errTokensRefused
}
