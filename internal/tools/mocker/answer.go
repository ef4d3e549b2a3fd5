package mocker

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/tools/engine"
)

// Answer is the answer to one request: the choices for each of its prompts.
type Answer struct {
	sglang    bool // it is written as SGLang's
	kind      kind
	form      form // of a chat
	id        string
	model     string
	created   int64 // unix seconds
	blockSize int
	prompts   [][]uint32
	choices   []*Choice
	samples   int           // choices of each prompt
	More      chan struct{} // receives a token when a choice has grown

	stream, usage, continuousUsage, tokenIDs bool // options of the request

	logprobs bool   // it has those of its tokens, which mean nothing: SGLang's /generate, and tokensForm
	version  string // of the weights when it came

	begun    bool   // the first chunk has been made
	events   int    // made, of a stream whose events have numbers
	transfer string // kv_transfer_params, JSON; empty: null

	// What only SGLang's answers have.
	received time.Time
	rank     *int // data-parallel rank; nil: there is only one
	list     bool // several answers to /generate, though it may be one

	promptIDs bool // the prompt's tokens come with those
	details   bool // the request wants the sources of cached tokens
	storage   bool // files may be one of them
}

// kind is the route that an answer belongs to.
type kind uint8

const (
	chatKind       kind = iota // /v1/chat/completions
	completionKind             // /v1/completions
	generateKind               // SGLang's /generate
)

// owner is what keeps blocks of equal tokens apart.
type owner struct {
	adapter Adapter
	salt    string
	extra   string // SGLang's extra_key, absent from its events
}

// Choice is one of an answer's texts, generated in advance; one request to the
// engine determines its times. That request belongs to the engine's goroutine.
type Choice struct {
	Answer *Answer
	owner
	id        string // SGLang's rid
	index     int
	request   *engine.Request
	prompt    int       // tokens
	Output    int       // tokens
	tokens    []uint32  // of the prompt and of the output
	Text      string    // complete text
	Ends      []int     // end of each token's text, before any stop
	held      int       // bytes at the end withheld until the end: they may begin a stop string
	Finish    string    // finish_reason
	Reason    string    // stop_reason, JSON; empty: null
	Sent      int       // tokens that the handler has taken
	ended     bool      // it has taken all
	silent    bool      // its one token is not sent
	published []uint64  // the blocks' hashes in events, where they differ from their names in the engine
	first     time.Time // when the handler took the first token

	fetching chan struct{} // closed when the engine has blocks for a prompt computed elsewhere
	blocks   []uint32      // those of a prompt that is kept for another worker; valid with the last token

	cached    atomic.Int64 // prompt tokens that were not to be computed; valid with the first generated one
	hits      atomic.Int64 // those of them that were in the cache
	host      atomic.Int64 // those that were loaded from host memory
	disk      atomic.Int64 // those that were loaded from files
	peer      atomic.Int64 // those that were pulled from another worker
	generated atomic.Int64
	aborted   atomic.Bool // it ends with its tokens so far: SGLang's /abort_request
}

// advance reports the tokens so far to the answer's handler.
func (c *Choice) advance(r *engine.Request) {
	c.cached.Store(int64(r.Cached))
	size := c.Answer.blockSize
	c.hits.Store(int64(r.Cached - r.Missing - r.Lower.Total()*size))
	c.host.Store(int64(int(r.Lower.Host) * size))
	c.disk.Store(int64(int(r.Lower.Disk) * size))
	c.peer.Store(int64(int(r.Lower.External) * size))
	if r.Keep && r.Generated == r.Output {
		c.blocks = slices.Clone(r.Held)
	}
	c.generated.Store(int64(r.Generated))
	signalOnce(c.Answer.More)
}

// take takes the tokens that the choices have got since the last call. Of a stream
// it appends their chunks. It returns how many choices have ended with them.
func (a *Answer) take(chunks []byte) (_ []byte, ended int) {
	for _, c := range a.choices {
		if c.ended {
			continue
		}
		now := int(c.generated.Load())
		if c.aborted.Load() {
			c.cut(now)
		}
		if now == c.Sent && now < c.Output {
			continue
		}
		if c.first.IsZero() {
			c.first = time.Now()
		}
		if a.stream && a.form != chatForm {
			chunks = a.appendFormChunk(chunks, c, now)
		} else if a.stream && a.sglang {
			chunks = a.appendSGLangChunk(chunks, c, now)
		} else if a.stream {
			chunks = a.appendChunk(chunks, c, now)
		}
		if c.Sent = now; now == c.Output {
			c.ended = true
			ended++
		}
	}
	return chunks, ended
}

// cut ends a choice that is aborted, if it has not ended by itself.
func (c *Choice) cut(now int) {
	if now < c.Output {
		c.Text = c.Text[:c.known(now)]
		c.Output, c.Finish, c.Reason = now, finishAbort, ""
	}
}

// finishAbort is the finish_reason of a choice that was aborted.
const finishAbort = "abort"

func (a *Answer) isChat() bool { return a.kind == chatKind }

// Stop is the condition that ends an answer before its length.
type Stop struct {
	Texts     []string
	Tokens    []uint32
	After     int  // minimum number of tokens
	Keep      bool // keep the stop string in the answer
	ignoreEnd bool // it does not end by itself
}

// Cut ends a choice of those tokens where vLLM ends it, which checks after each
// token. The text of a stop token that is not sent is not examined.
func (s *Stop) Cut(c *Choice, tokens []uint32) {
	start := func(token int) int { // of its text
		if token == 0 {
			return 0
		}
		return c.Ends[token-1]
	}
	cut := len(c.Text)
	if i := slices.IndexFunc(tokens[s.After:], func(t uint32) bool { return slices.Contains(s.Tokens, t) }); i >= 0 {
		last := s.After + i
		c.Output, c.Finish, c.Reason = last+1, "stop", strconv.FormatUint(uint64(tokens[last]), 10)
		if cut = start(last); s.Keep {
			cut = c.Ends[last]
		}
	}
	whole := c.Text[:cut]
	first := len(whole) + 1 // end of the stop string that ends first
	for _, text := range s.Texts {
		from := max(0, start(s.After)-len(text)+1)
		i := strings.Index(whole[min(from, cut):], text)
		if end := from + i + len(text); i >= 0 && end < first {
			first = end
			c.Output, c.Finish, c.Reason = sort.SearchInts(c.Ends, end)+1, "stop", string(quote(text))
			if cut = end; !s.Keep {
				cut -= len(text)
			}
		}
		if !s.Keep {
			c.held = max(c.held, len(text)-1)
		}
	}
	c.Text = c.Text[:cut]
}

// Part returns the text of the tokens from sent up to now.
func (c *Choice) Part(now int) string {
	return c.Text[c.known(c.Sent):c.known(now)]
}

// known is how much of the text is sent with that many tokens.
func (c *Choice) known(tokens int) int {
	if tokens == c.Output {
		return len(c.Text)
	}
	if tokens == 0 {
		return 0
	}
	return min(len(c.Text), max(0, c.Ends[tokens-1]-c.held))
}

// appendChunk appends the server-sent events for the tokens of a choice from
// those sent to below now. As in vLLM the tokens of several steps make one chunk
// where the client is behind.
func (a *Answer) appendChunk(out []byte, c *Choice, now int) []byte {
	if a.isChat() && !a.begun {
		for i := range a.choices {
			out = a.head(out)
			out = fmt.Appendf(out, `"choices":[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`, i)
			out = a.stepUsage(out, c, 0)
			out = a.appendIDs(append(out, `,"prompt_token_ids":`...), c.tokens[:c.prompt])
			out = append(out, `,"prompt_text":null`+"}\n\n"...)
		}
	}
	a.begun = true
	last := now == c.Output
	finish, reason := c.ending(last)
	out = fmt.Appendf(a.head(out), `"choices":[{"index":%d,`, c.index)
	if a.isChat() {
		out = fmt.Appendf(out, `"delta":{"content":%s},"logprobs":null,"finish_reason":%s`, quote(c.Part(now)), finish)
		if last {
			out = fmt.Appendf(out, `,"stop_reason":%s`, reason)
		}
	} else {
		out = fmt.Appendf(out, `"text":%s,"logprobs":null,"finish_reason":%s,"stop_reason":%s,"prompt_token_ids":`, quote(c.Part(now)), finish,
			reason)
		if c.Sent == 0 {
			out = a.appendIDs(out, c.tokens[:c.prompt])
		} else {
			out = append(out, "null"...)
		}
	}
	out = a.appendIDs(append(out, `,"token_ids":`...), c.tokens[c.prompt+c.Sent:c.prompt+now])
	out = a.stepUsage(append(out, "}]"...), c, now)
	if last && !a.usage {
		out = append(out, `,"system_fingerprint":"`+fingerprint+`"`...)
	}
	return append(out, "}\n\n"...)
}

// appendEnd appends the events that follow after the last choice's last.
func (a *Answer) appendEnd(out []byte) []byte {
	if a.form != chatForm {
		return a.appendFormEnd(out)
	}
	if a.sglang {
		return a.appendSGLangEnd(out)
	}
	if a.usage {
		out = a.head(out)
		out = append(out, `"choices":[],"usage":`...)
		out = a.appendUsage(out, a.choices[0], false)
		out = append(out, `,"system_fingerprint":"`+fingerprint+"\"}\n\n"...)
	}
	return append(out, "data: [DONE]\n\n"...)
}

// head opens an event with the fields that all have.
func (a *Answer) head(out []byte) []byte {
	return a.open(append(out, "data: "...), "chat.completion.chunk")
}

// open opens an object with the common fields; chat is the object name of a chat's.
func (a *Answer) open(out []byte, chat string) []byte {
	if !a.isChat() {
		chat = "text_completion"
	}
	return fmt.Appendf(out, `{"id":%s,"object":%q,"created":%d,"model":%s,`, quote(a.id), chat, a.created, quote(a.model))
}

// quote is a text as JSON.
func quote(text string) []byte { return jsonbody.AppendString(nil, text) }

// appendIDs appends token ids if the request includes return_token_ids, otherwise null.
func (a *Answer) appendIDs(out []byte, ids []uint32) []byte {
	if !a.tokenIDs {
		return append(out, "null"...)
	}
	return tokens.AppendTokens(out, ids)
}

// ending is why a choice ended, and by which text or token, both as JSON.
func (c *Choice) ending(ended bool) (finish, reason string) {
	if !ended {
		return "null", "null"
	}
	return strconv.Quote(c.Finish), cmp.Or(c.Reason, "null")
}

// stepUsage appends a choice's usage so far where each chunk is to have it.
func (a *Answer) stepUsage(out []byte, c *Choice, generated int) []byte {
	if !a.usage || !a.continuousUsage {
		return out
	}
	out = fmt.Appendf(out, `,"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d`, c.prompt, c.prompt+generated, generated)
	if a.isChat() {
		out = append(out, `,"completion_tokens_details":null`...)
	}
	return append(out, '}')
}

// appendUsage appends the usage of the whole. Like vLLM it counts each prompt
// once, whatever n is, and reports the cached tokens of one choice; null fields
// belong to answers that are not streamed.
func (a *Answer) appendUsage(out []byte, of *Choice, nulls bool) []byte {
	prompt, generated := 0, 0
	for _, tokens := range a.prompts {
		prompt += len(tokens)
	}
	for _, c := range a.choices {
		generated += c.Output
	}
	cached := int(of.cached.Load())
	out = fmt.Appendf(out, `{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d`,
		prompt, prompt+generated, generated, cached)
	if a.isChat() { // a completion does not report it
		out = fmt.Appendf(out, `,"created_cache_tokens":%d`, a.written(of))
	} else if nulls {
		out = append(out, `,"created_cache_tokens":null`...)
	}
	if nulls {
		return append(out, `,"multimodal_tokens":null},"completion_tokens_details":null}`...)
	}
	return append(out, "}}"...)
}

// whole returns the answer that is not streamed.
func (a *Answer) whole() []byte {
	if a.form != chatForm {
		return a.wholeForm()
	}
	if a.sglang {
		return a.wholeSGLang()
	}
	out := append(a.open(nil, "chat.completion"), `"choices":[`...)
	for i, c := range a.choices {
		if i > 0 {
			out = append(out, ',')
		}
		form := `{"index":%d,"text":%s,"logprobs":null,"finish_reason":%s,"stop_reason":%s,"token_ids":`
		if a.isChat() {
			form = `{"index":%d,"message":{"role":"assistant","content":%s,"refusal":null,"annotations":null,` +
				`"audio":null,"function_call":null,"reasoning":null},` +
				`"logprobs":null,"finish_reason":%s,"stop_reason":%s,"token_ids":`
		}
		finish, reason := c.ending(true)
		out = a.appendIDs(fmt.Appendf(out, form, i, quote(c.Text), finish, reason), c.tokens[c.prompt:])
		if !a.isChat() {
			out = a.appendIDs(append(out, `,"prompt_logprobs":null,"prompt_token_ids":`...), c.tokens[:c.prompt])
		}
		out = append(out, `,"routed_experts":null}`...)
	}
	last := a.choices[len(a.choices)-1]
	out = append(out, `],"service_tier":null,"system_fingerprint":"`+fingerprint+`","usage":`...)
	out = a.appendUsage(out, last, true)
	if a.isChat() {
		out = a.appendIDs(append(out, `,"prompt_logprobs":null,"prompt_token_ids":`...), last.tokens[:last.prompt])
		out = append(out, `,"prompt_text":null`...)
	}
	return fmt.Appendf(out, `,"kv_transfer_params":%s,"ec_transfer_params":null,"metrics":null}`, cmp.Or(a.transfer, "null"))
}

// fail answers with an error that comes once the request is with the engine: a
// stream has begun by then.
func (a *Answer) fail(out http.ResponseWriter, problem *refusal) {
	body := problem.bodyOf(a.sglang, a.kind, a.form, a.stream)
	if a.stream {
		writeStreamError(out, body)
	} else {
		answerJSON(out, problem.status, json.RawMessage(body))
	}
}

// writeStreamError answers with a stream of but an error.
func writeStreamError(out http.ResponseWriter, body []byte) {
	out.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	_, _ = fmt.Fprintf(out, "data: %s\n\ndata: [DONE]\n\n", body)
}
