package openai

import (
	"net/http"
	"strings"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
)

// charge takes the prompt tokens that a worker is going to compute from the limit of the
// request's key. Not ok: the request has been answered.
func (r *inference) charge(c *gin.Context) (charge *keys.Charge, ok bool) {
	predicted, estimated := 0, false
	if r.caller.Metered() {
		if predicted = r.tokens; r.unknown && computes(r.exchange.Route) {
			predicted, estimated = estimate(r.exchange.Route, r.body), true
		}
		predicted *= proxy.Answers(r.exchange.Route, r.body)
	}
	charge, err := r.api.keys.Prompt(c, predicted, estimated)
	if err != nil {
		r.api.fail(c, http.StatusTooManyRequests, "", err.Error())
	}
	return charge, err == nil
}

// settleCharge makes the charge of a request that has ended what its worker computed; err is
// how it ended. A worker's report counts in full if it is higher than the prediction, and
// if it is lower only when the answer came whole: a client that leaves early has seen
// only a part of it.
func (r *inference) settleCharge(charge *keys.Charge, err error) {
	if charge == nil {
		return
	}
	x := r.exchange
	computed := x.Usage.PromptTokens
	if x.Route != tokens.GenerateRoute { // which reports the prompt with each answer
		computed *= proxy.Answers(x.Route, r.body)
	}
	switch {
	case !x.Reached:
		charge.Settle(0)
	case x.Usage.Known && (computed > charge.Tokens() || err == nil && computed > 0 && !x.Usage.Partial):
		charge.Settle(computed)
	case err == nil && x.Status >= http.StatusBadRequest && x.Status < http.StatusInternalServerError: // the worker has refused it
		charge.Settle(0)
	}
}

// computes reports whether a worker computes the prompts of a route's requests.
func computes(route string) bool {
	return route != "/v1/messages/count_tokens" && !strings.HasSuffix(route, "/render") && !strings.HasSuffix(route, "/derender")
}

// Members of a body that have text or token ids for the model: those of prompts, and those
// of pairs, of which the engine computes the one with each of the other.
var (
	promptMembers = []string{"messages", "system", "tools", "instructions", "documents", "prompt", "text", "texts", "input", "inputs",
		"input_ids", "token_ids"}
	pairedMembers = [][2]string{{"query", "documents"}, {"query", "items"}, {"queries", "documents"}, {"text_1", "text_2"},
		{"data_1", "data_2"}}
)

// estimate returns about how many tokens the prompts of a request have that the router's
// tokenizer does not know: a quarter of the bytes of its texts, and its token ids.
func estimate(route string, body *jsonbody.Body) (tokens int) {
	pairs := strings.HasSuffix(route, "/score") || strings.HasSuffix(route, "/rerank")
	for _, pair := range pairedMembers {
		one, other := body.Get(pair[0]), body.Get(pair[1])
		if !pairs || !one.Exists() || !other.Exists() {
			continue
		}
		times := 1
		if !one.IsArray() && other.IsArray() {
			times = 0
			jsonbody.EachElement(other.Raw, func(gjson.Result) bool {
				times++
				return true
			})
		}
		return countIn(one.Raw)*times + countIn(other.Raw)
	}
	for _, name := range promptMembers {
		tokens += countIn(body.Get(name).Raw)
	}
	return tokens
}

// bytesPerToken is the usual length of a token in English text, bytes.
const bytesPerToken = 4

// countIn counts the tokens of a JSON value: each number is one, and so is every
// bytesPerToken bytes of a text, but for media in it and names of members. It reads the
// value once, however deep it is.
func countIn(raw string) (tokens int) {
	for i := 0; i < len(raw); {
		switch b := raw[i]; {
		case b == '"':
			end := i + 1
			for end < len(raw) && raw[end] != '"' {
				if raw[end] == '\\' {
					end++
				}
				end++
			}
			text := raw[i+1 : min(end, len(raw))]
			i = end + 1
			if after := strings.TrimLeft(raw[min(i, len(raw)):min(i+maxGap, len(raw))], " \t\r\n"); strings.HasPrefix(after, ":") ||
				strings.HasPrefix(text, "data:") {
				continue
			}
			tokens += (len(text) + bytesPerToken - 1) / bytesPerToken
		case b == '-' || '0' <= b && b <= '9':
			for tokens++; i < len(raw) && strings.IndexByte("+-.eE0123456789", raw[i]) >= 0; {
				i++
			}
		default:
			i++
		}
	}
	return tokens
}

// maxGap is how far a name's colon is looked for, bytes.
const maxGap = 16
