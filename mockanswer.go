package main

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync/atomic"
)

// mockAnswer is the answer to one request: some choices to each of its prompts.
type mockAnswer struct {
	chat      bool
	id        string
	model     string
	adapter   mockAdapter
	salt      string
	created   int64 // unix seconds
	blockSize int
	prompts   [][]uint32
	choices   []*mockChoice
	more      chan struct{} // holds a token when some choice has grown

	stream, usage, continuousUsage, tokenIDs bool // what the request asks for

	begun    bool   // the first chunk has been made
	transfer string // kv_transfer_params, JSON; empty: null
}

// mockChoice is one of an answer's texts, made up beforehand; one request to
// the engine says when it comes. That belongs to the engine's goroutine.
type mockChoice struct {
	answer  *mockAnswer
	index   int
	request *SimRequest
	prompt  int      // tokens
	output  int      // tokens
	tokens  []uint32 // of the prompt and of the output
	text    string   // as told in the end
	ends    []int    // where each token's text ends, before any stop
	held    int      // bytes at the end that are not told before the end: they may begin a stop string
	finish  string   // finish_reason
	reason  string   // stop_reason, JSON; empty: null
	sent    int      // tokens that the handler has taken

	fetching chan struct{} // closed when the engine has blocks for a prompt computed elsewhere
	blocks   []uint32      // those of a prompt that is kept for another worker; valid with the last token

	cached    atomic.Int64 // prompt tokens that were not to be computed; valid with the first generated one
	hits      atomic.Int64 // those of them that were in the cache
	generated atomic.Int64
}

// advance tells the answer's handler of the tokens so far.
func (c *mockChoice) advance(r *SimRequest) {
	c.cached.Store(int64(r.Cached))
	c.hits.Store(int64(r.Cached - r.Missing))
	if r.Keep && r.Generated == r.Output {
		c.blocks = slices.Clone(r.held)
	}
	c.generated.Store(int64(r.Generated))
	signalOnce(c.answer.more)
}

// mockStop is what ends an answer before its length.
type mockStop struct {
	texts     []string
	tokens    []uint32
	after     int  // tokens that come in any case
	keep      bool // what stopped an answer is told with it
	ignoreEnd bool // it does not end by itself
}

// cut ends a choice of those tokens where vLLM, which looks after each of them,
// ends it. The text of a stop token that is not told is not looked at either.
func (s *mockStop) cut(c *mockChoice, tokens []uint32) {
	start := func(token int) int { // of its text
		if token == 0 {
			return 0
		}
		return c.ends[token-1]
	}
	told := len(c.text)
	if i := slices.IndexFunc(tokens[s.after:], func(t uint32) bool { return slices.Contains(s.tokens, t) }); i >= 0 {
		last := s.after + i
		c.output, c.finish, c.reason = last+1, "stop", strconv.FormatUint(uint64(tokens[last]), 10)
		if told = start(last); s.keep {
			told = c.ends[last]
		}
	}
	whole := c.text[:told]
	first := len(whole) + 1 // end of the stop string that ends first
	for _, text := range s.texts {
		from := max(0, start(s.after)-len(text)+1)
		i := strings.Index(whole[min(from, told):], text)
		if end := from + i + len(text); i >= 0 && end < first {
			first = end
			c.output, c.finish, c.reason = sort.SearchInts(c.ends, end)+1, "stop", string(appendString(nil, text))
			if told = end; !s.keep {
				told -= len(text)
			}
		}
		if !s.keep {
			c.held = max(c.held, len(text)-1)
		}
	}
	c.text = c.text[:told]
}

// part returns the text that the tokens from sent to below now make known.
func (c *mockChoice) part(now int) string {
	return c.text[c.known(c.sent):c.known(now)]
}

// known is how much of the text is told with so many tokens.
func (c *mockChoice) known(tokens int) int {
	if tokens == c.output {
		return len(c.text)
	}
	if tokens == 0 {
		return 0
	}
	return min(len(c.text), max(0, c.ends[tokens-1]-c.held))
}

// appendChunk appends the server-sent events for the tokens of a choice from
// those sent to below now. As in vLLM the tokens of several steps make one chunk
// where the client is behind.
func (a *mockAnswer) appendChunk(out []byte, c *mockChoice, now int) []byte {
	if a.chat && !a.begun {
		for i := range a.choices {
			out = a.head(out)
			out = fmt.Appendf(out, `"choices":[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`, i)
			out = a.stepUsage(out, c, 0)
			out = a.appendIDs(append(out, `,"prompt_token_ids":`...), c.tokens[:c.prompt])
			out = append(out, `,"prompt_text":null`+"}\n\n"...)
		}
	}
	a.begun = true
	out = a.head(out)
	out = fmt.Appendf(out, `"choices":[{"index":%d,`, c.index)
	if a.chat {
		out = append(appendString(append(out, `"delta":{"content":`...), c.part(now)), '}')
	} else {
		out = appendString(append(out, `"text":`...), c.part(now))
	}
	last := now == c.output
	out = append(out, `,"logprobs":null,"finish_reason":`...)
	if last {
		out = appendString(out, c.finish)
	} else {
		out = append(out, "null"...)
	}
	if last || !a.chat {
		out = append(out, `,"stop_reason":`...)
		if last {
			out = c.appendReason(out)
		} else {
			out = append(out, "null"...)
		}
	}
	if !a.chat {
		out = append(out, `,"prompt_token_ids":`...)
		if c.sent == 0 {
			out = a.appendIDs(out, c.tokens[:c.prompt])
		} else {
			out = append(out, "null"...)
		}
	}
	out = a.appendIDs(append(out, `,"token_ids":`...), c.tokens[c.prompt+c.sent:c.prompt+now])
	out = append(out, "}]"...)
	out = a.stepUsage(out, c, now)
	if last && !a.usage {
		out = append(out, `,"system_fingerprint":"`+mockFingerprint+`"`...)
	}
	return append(out, "}\n\n"...)
}

// appendEnd appends the events that follow after the last choice's last.
func (a *mockAnswer) appendEnd(out []byte) []byte {
	if a.usage {
		out = a.head(out)
		out = append(out, `"choices":[],"usage":`...)
		out = a.appendUsage(out, a.choices[0], false)
		out = append(out, `,"system_fingerprint":"`+mockFingerprint+"\"}\n\n"...)
	}
	return append(out, "data: [DONE]\n\n"...)
}

// head opens an event with the fields that all have.
func (a *mockAnswer) head(out []byte) []byte {
	kind := "chat.completion.chunk"
	if !a.chat {
		kind = "text_completion"
	}
	return fmt.Appendf(out, `data: {"id":%s,"object":%q,"created":%d,"model":%s,`, appendString(nil, a.id), kind, a.created, appendString(nil, a.model))
}

// appendIDs appends token ids if the request asks for them, else null.
func (a *mockAnswer) appendIDs(out []byte, tokens []uint32) []byte {
	if !a.tokenIDs {
		return append(out, "null"...)
	}
	return appendTokens(out, tokens)
}

func (c *mockChoice) appendReason(out []byte) []byte {
	if c.reason == "" {
		return append(out, "null"...)
	}
	return append(out, c.reason...)
}

// stepUsage appends a choice's usage so far where each chunk is to have it.
func (a *mockAnswer) stepUsage(out []byte, c *mockChoice, generated int) []byte {
	if !a.usage || !a.continuousUsage {
		return out
	}
	out = fmt.Appendf(out, `,"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d`, c.prompt, c.prompt+generated, generated)
	if a.chat {
		out = append(out, `,"completion_tokens_details":null`...)
	}
	return append(out, '}')
}

// appendUsage appends the usage of the whole. Like vLLM it counts each prompt
// once, whatever n is, and tells the cached tokens of one choice; null fields
// belong to answers that are not streamed.
func (a *mockAnswer) appendUsage(out []byte, of *mockChoice, nulls bool) []byte {
	prompt, generated := 0, 0
	for _, tokens := range a.prompts {
		prompt += len(tokens)
	}
	for _, c := range a.choices {
		generated += c.output
	}
	cached := int(of.cached.Load())
	out = fmt.Appendf(out, `{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d`,
		prompt, prompt+generated, generated, cached)
	if a.chat { // a completion does not tell it
		out = fmt.Appendf(out, `,"created_cache_tokens":%d`, max(0, of.prompt/a.blockSize*a.blockSize-cached))
	} else if nulls {
		out = append(out, `,"created_cache_tokens":null`...)
	}
	if nulls {
		return append(out, `,"multimodal_tokens":null},"completion_tokens_details":null}`...)
	}
	return append(out, "}}"...)
}

// whole returns the answer that is not streamed.
func (a *mockAnswer) whole() []byte {
	kind := "chat.completion"
	if !a.chat {
		kind = "text_completion"
	}
	out := fmt.Appendf(nil, `{"id":%s,"object":%q,"created":%d,"model":%s,"choices":[`, appendString(nil, a.id), kind, a.created, appendString(nil, a.model))
	for i, c := range a.choices {
		if i > 0 {
			out = append(out, ',')
		}
		out = fmt.Appendf(out, `{"index":%d,`, i)
		if a.chat {
			out = appendString(append(out, `"message":{"role":"assistant","content":`...), c.text)
			out = append(out, `,"refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null}`...)
		} else {
			out = appendString(append(out, `"text":`...), c.text)
		}
		out = c.appendReason(fmt.Appendf(out, `,"logprobs":null,"finish_reason":%q,"stop_reason":`, c.finish))
		out = a.appendIDs(append(out, `,"token_ids":`...), c.tokens[c.prompt:])
		if !a.chat {
			out = a.appendIDs(append(out, `,"prompt_logprobs":null,"prompt_token_ids":`...), c.tokens[:c.prompt])
		}
		out = append(out, `,"routed_experts":null}`...)
	}
	last := a.choices[len(a.choices)-1]
	out = append(out, `],"service_tier":null,"system_fingerprint":"`+mockFingerprint+`","usage":`...)
	out = a.appendUsage(out, last, true)
	if a.chat {
		out = a.appendIDs(append(out, `,"prompt_logprobs":null,"prompt_token_ids":`...), last.tokens[:last.prompt])
		out = append(out, `,"prompt_text":null`...)
	}
	out = append(append(out, `,"kv_transfer_params":`...), cmp.Or(a.transfer, "null")...)
	return append(out, `,"ec_transfer_params":null,"metrics":null}`...)
}

// fail answers with an error that comes once the request is with the engine: a
// stream has begun by then.
func (a *mockAnswer) fail(out http.ResponseWriter, problem *mockProblem) {
	if !a.stream {
		mockError(out, problem)
		return
	}
	out.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	_, _ = fmt.Fprintf(out, "data: %s\n\ndata: [DONE]\n\n", problem.body())
}
