package proxy

import (
	"bytes"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// generateRoute is SGLang's own inference route. Its answer is an object, or a list
// of them for several prompts or answers; each event of its stream is one, with the
// whole text so far.
const generateRoute = "/generate"

// tokensRoute is vLLM's route for prompts in tokens.
const tokensRoute = "/inference/v1/generate"

// samples reports whether the sampling parameters of a route's requests are in a member of their own.
func samples(route string) bool { return route == generateRoute || route == tokensRoute }

// maxGenerated bounds the answers of one request to generateRoute with tokens
// counted.
const maxGenerated = 4096

// rankKey names the data-parallel rank in a body of generateRoute.
const rankKey = "routed_dp_rank"

// SeveralAnswers reports whether a request has more than one answer per
// prompt.
func SeveralAnswers(path string, body *jsonbody.Body) bool {
	if !samples(path) {
		return number(body.Get("n")) > 1 || number(body.Get("best_of")) > 1 || asks(body, "use_beam_search")
	}
	several := func(p gjson.Result) bool { return number(p.Get("n")) > 1 || number(p.Get("beam_width")) > 1 }
	params := body.Get("sampling_params")
	if !params.IsArray() {
		return several(params)
	}
	found := false
	jsonbody.EachElement(params.Raw, func(p gjson.Result) bool {
		found = several(p)
		return !found
	})
	return found
}

// number returns a number of a request as its engine reads it; 0: it has none.
func number(v gjson.Result) int {
	n, _ := jsonbody.Int(v)
	return n
}

// given reports whether a request has a number there.
func given(v gjson.Result) bool {
	_, is := jsonbody.Int(v)
	return is
}

// mostAnswers bounds the answers to a prompt that a request can ask for.
const mostAnswers = 1 << 16

// Answers returns how many answers to each of its prompts a request wants, 1 to 65,536. An
// engine runs each as a sequence of its own, which has the whole prompt.
func Answers(path string, body *jsonbody.Body) int {
	most := 1
	take := func(v gjson.Result) { most = max(most, min(number(v), mostAnswers)) }
	switch path {
	case chatRoute, completionRoute:
		take(body.Get("n"))
		take(body.Get("best_of"))
	case generateRoute, tokensRoute:
		of := func(p gjson.Result) bool {
			take(p.Get("n"))
			take(p.Get("beam_width"))
			return true
		}
		if params := body.Get("sampling_params"); params.IsArray() {
			jsonbody.EachElement(params.Raw, of)
		} else {
			of(params)
		}
	}
	return most
}

// ComputesAnew reports whether an engine recomputes cached parts of the prompt, for
// the log probabilities of the prompt's own tokens.
func ComputesAnew(body *jsonbody.Body) bool {
	start := body.Get("logprob_start_len")
	return given(body.Get("prompt_logprobs")) || given(body.Get("sampling_params").Get("prompt_logprobs")) || body.Get("echo").Bool() && given(body.Get("logprobs")) ||
		body.Get("return_logprob").Bool() && given(start) && number(start) >= 0
}

// vocabulary is the number of log probabilities that -1 asks for, for each token, of common models.
const vocabulary = 128 << 10

// Logprobs returns the number of log probabilities in the answer, as vLLM understands the request,
// to a prompt and with an answer of so many tokens.
func Logprobs(body *jsonbody.Body, prompt, output int) int {
	each := func(key string) int {
		n, _ := jsonbody.Int(body.Get(key))
		if n < 0 {
			return vocabulary
		}
		return min(n, vocabulary)
	}
	return each("prompt_logprobs")*prompt + max(each("logprobs"), each("top_logprobs"))*output
}

// asks reports whether a member is present and neither null nor false.
func asks(body *jsonbody.Body, key string) bool {
	v := body.Get(key)
	return v.Exists() && v.Type != gjson.Null && v.Type != gjson.False
}

// defaultNewTokens is the number of tokens that an answer of generateRoute may have where its
// request does not say.
const defaultNewTokens = 128

// TokenLimit returns the number of tokens that the longest answer may have; 0: the request does
// not say.
func TokenLimit(path string, body *jsonbody.Body) (most int) {
	if path == tokensRoute {
		return min(number(body.Get("sampling_params").Get("max_tokens")), maxReportedOutput)
	}
	if path != generateRoute {
		for _, key := range []string{"max_completion_tokens", "max_tokens", "max_output_tokens"} {
			if most = min(number(body.Get(key)), maxReportedOutput); most > 0 {
				return most
			}
		}
		return 0
	}
	params := body.Get("sampling_params")
	if !params.IsArray() {
		return newTokens(params)
	}
	jsonbody.EachElement(params.Raw, func(p gjson.Result) bool {
		one := newTokens(p)
		if most = max(most, one); one == 0 {
			most = 0
		}
		return one > 0
	})
	return most
}

// newTokens is the number of tokens that an answer may have by its sampling_params; 0: any
// number.
func newTokens(params gjson.Result) int {
	if limit := params.Get("max_new_tokens"); limit.Exists() {
		return max(0, min(number(limit), maxReportedOutput))
	}
	return defaultNewTokens
}

// generated sums up the meta_info of the answers to one request to generateRoute.
type generated struct {
	answers []Usage // by index
	more    bool    // there are more than maxGenerated
	finish  string  // why the first that says so has ended
}

// take notes an answer's meta_info, in place of the one before.
func (g *generated) take(index int, meta gjson.Result) {
	g.more = g.more || index >= maxGenerated
	if index < 0 || index >= maxGenerated || !meta.Get("prompt_tokens").Exists() {
		return
	}
	for len(g.answers) <= index {
		g.answers = append(g.answers, Usage{})
	}
	cached := meta.Get("cached_tokens")
	g.answers[index] = Usage{
		Known: true, PromptTokens: reported(meta.Get("prompt_tokens"), maxReportedPrompt), OutputTokens: reported(meta.Get("completion_tokens"), maxReportedOutput),
		CachedKnown: cached.Type == gjson.Number, CachedTokens: reported(cached, maxReportedPrompt),
		CachedByTier: readTiers(meta.Get("cached_tokens_details")),
	}
	if why := meta.Get("finish_reason.type").Str; why != "" && g.finish == "" {
		g.finish = why
	}
}

// usage returns the sum.
func (g *generated) usage() (sum Usage) {
	for _, one := range g.answers {
		sum.Known, sum.CachedKnown = sum.Known || one.Known, sum.CachedKnown || one.CachedKnown
		sum.PromptTokens = min(maxReportedPrompt, sum.PromptTokens+one.PromptTokens)
		sum.OutputTokens = min(maxReportedOutput, sum.OutputTokens+one.OutputTokens)
		sum.CachedTokens = min(maxReportedPrompt, sum.CachedTokens+one.CachedTokens)
		sum.CachedByTier = sum.CachedByTier.Plus(one.CachedByTier)
	}
	sum.Partial = g.more || sum.PromptTokens == maxReportedPrompt
	return sum
}

// takeEvent reads the data of an event. No string of it can hold the keys as they
// are looked for, since its quotes are escaped, so the text, which grows with each
// event, is not taken apart if the event has SGLang's own form, with its description at own.
func (g *generated) takeEvent(data []byte, own int) {
	if own == 0 {
		answer := gjson.ParseBytes(data)
		g.take(int(answer.Get("index").Int()), answer.Get("meta_info"))
		return
	}
	rest, index := data[own:], 0
	if key := []byte(`"index":`); bytes.Contains(rest, key) {
		index = int(gjson.ParseBytes(rest[bytes.LastIndex(rest, key)+len(key):]).Int())
	}
	g.take(index, gjson.ParseBytes(rest))
}

// outcome returns what an answer that came whole says of its tokens, and why the
// first of its texts ended.
func outcome(route string, body []byte) (usage Usage, finish string) {
	if route != generateRoute {
		return ReadUsage(body), gjson.GetBytes(body, "choices.0.finish_reason").Str
	}
	var g generated
	switch answer := gjson.ParseBytes(bytes.TrimPrefix(body, byteOrderMark)); {
	case answer.IsObject():
		g.take(0, answer.Get("meta_info"))
	case answer.IsArray():
		n := 0
		answer.ForEach(func(_, one gjson.Result) bool {
			g.take(n, one.Get("meta_info"))
			n++
			return n <= maxGenerated
		})
	}
	return g.usage(), g.finish
}
