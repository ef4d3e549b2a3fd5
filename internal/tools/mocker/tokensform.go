package mocker

import (
	"cmp"
	"fmt"
	"strconv"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/tokens"
)

// logprobOf makes up the log probability of a token.
func logprobOf(id uint32) float64 { return -float64(id%64+1) / 32 }

// completionOf returns the completion that a request of tokensForm is.
func completionOf(body *jsonbody.Body) *jsonbody.Body {
	out := body.Without("token_ids").Without("sampling_params").Without("features").With("prompt", cmp.Or(body.Get("token_ids").Raw, "[]"))
	params := body.Get("sampling_params")
	for _, name := range []string{"n", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "temperature", "top_p"} {
		if v := params.Get(name); v.Exists() {
			out = out.With(name, v.Raw)
		}
	}
	if !params.Get("max_tokens").Exists() { // the rest of the context, not a completion's 16
		out = out.With("max_tokens", strconv.Itoa(maxTokens))
	}
	return out.With("token_logprobs", strconv.FormatBool(!IsNull(params.Get("logprobs"))))
}

// appendTokensChoice appends a choice with the tokens from one place to another.
func (a *Answer) appendTokensChoice(out []byte, c *Choice, from, to int) []byte {
	ids := c.tokens[c.prompt+from : c.prompt+to]
	finish, reason := c.ending(to == c.Output)
	out = fmt.Appendf(out, `{"index":%d,"finish_reason":%s,"stop_reason":%s,"token_ids":`, c.index, finish, cmp.Or(reason, "null"))
	out = append(tokens.AppendTokens(out, ids), `,"routed_experts":null,"sampling_mask":null,"weight_versions":`...)
	if to == c.Output {
		out = fmt.Appendf(out, `[{"version":%s,"start":0,"end":%d}]`, quote(a.version), c.Output)
	} else {
		out = append(out, "null"...)
	}
	if !a.logprobs {
		return append(out, `,"logprobs":null}`...)
	}
	out = append(out, `,"logprobs":{"content":[`...)
	for i, id := range ids {
		if i > 0 {
			out = append(out, ',')
		}
		out = fmt.Appendf(out, `{"token_id":%d,"logprob":%g,"rank":1,"top_logprobs":[]}`, id, logprobOf(id))
	}
	return append(out, "]}}"...)
}

// headTokens opens an answer in tokens.
func (a *Answer) headTokens(out []byte) []byte {
	return fmt.Appendf(out, `{"request_id":%s,"created":%d,"model":%s,"choices":[`, quote(a.id), a.created, quote(a.model))
}

// appendTokensChunk is appendChunk for an answer in tokens.
func (a *Answer) appendTokensChunk(out []byte, c *Choice, now int) []byte {
	out = a.appendTokensChoice(a.headTokens(append(out, "data: "...)), c, c.Sent, now)
	return append(out, "],\"usage\":null}\n\n"...)
}

// appendTokensEnd is appendEnd for it.
func (a *Answer) appendTokensEnd(out []byte) []byte {
	if a.usage {
		out = append(a.headTokens(append(out, "data: "...)), `],"usage":`...)
		out = append(a.appendUsage(out, a.choices[0], false), "}\n\n"...)
	}
	return append(out, "data: [DONE]\n\n"...)
}

// wholeTokens is whole for it.
func (a *Answer) wholeTokens() []byte {
	out := a.headTokens(nil)
	for i, c := range a.choices {
		if i > 0 {
			out = append(out, ',')
		}
		out = a.appendTokensChoice(out, c, 0, c.Output)
	}
	out = a.appendUsage(append(out, `],"usage":`...), a.choices[len(a.choices)-1], false)
	return fmt.Appendf(out, `,"prompt_logprobs":null,"kv_transfer_params":%s}`, cmp.Or(a.transfer, "null"))
}
