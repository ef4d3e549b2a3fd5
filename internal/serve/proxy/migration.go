package proxy

import (
	"bytes"
	"cmp"
	"math"
	"slices"
	"strconv"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
)

// maxMigratedAnswer is the maximum number of tokens of an answer that can be continued.
const maxMigratedAnswer = maxReportedOutput

// maxMigratedPrompt is the maximum number of tokens of its prompt, which come back in one event
// of at most maxEvent bytes.
const maxMigratedPrompt = maxEvent / 8

// firstTokens is the number of tokens of an answer for which there is memory from the beginning.
const firstTokens = 64

// maxHeld bounds the events that are held back because their tokens have no text yet, bytes.
const maxHeld = 64 << 10

// Why a stream cannot be continued on another worker; the client reads it in the error
// event.
const (
	whyNoTokens  = "the worker returned no token ids"
	whyLong      = "an event or the answer is too long"
	whyTools     = "the request has tools"
	whyReasoning = "its reasoning had not ended"
	whyGuided    = "the output is constrained"
	whySeveral   = "the request asks for several answers"
	whyPrompt    = "the tokens of the prompt are not known exactly"
	whyPenalty   = "a penalty counts the tokens of the answer"
	whyStop      = "the engine holds back text for its stop strings"
	whyLogprobs  = "the request asks for logprobs of its prompt, or with offsets"
	whyNotTaken  = "the next worker does not take token ids"
	whyLimit     = "--migration-limit is reached"
	whyBudget    = "the retry budget is used up"
	whyNoWorker  = "no other worker is ready"
	whyChat      = "SGLang streams no token ids of chats"
	whyRegex     = "the request has a stop_regex"
	whyExtras    = "the request asks SGLang for more than text and tokens"
	whyDeltas    = "the worker streams output_ids in parts"
	whyText      = "the text of its last tokens is not known"
	whyDiffers   = "the next worker's answer differs at the interruption"
)

// Migration is a streamed answer as far as the client has it, with what is needed to continue
// it on another worker. One goroutine uses a Migration.
type Migration struct {
	continuable
	answer
	dialect dialect // of the worker that answers; nil: its answer is not continued
	why     string  // it cannot be continued; empty: it can
	torn    bool    // the answer cannot be joined to what the client has

	added    bool   // the router has requested the token ids
	begun    bool   // the client has the headers
	sent     int    // tokens that were sent with the prompt to the worker that continues
	moves    int    // continuations
	drained  int    // of them, those from a worker that was drained
	verified bool   // the worker that continues has confirmed the tokens sent
	cached   int    // prompt tokens that the first worker had cached, as predicted or reported
	unlike   uint64 // events that had to be brought into the form of the marks
}

// continuable is a request whose answer may be continued.
type continuable struct {
	route  string
	prompt []uint32
	asked  bool                               // the client gets the token ids, too
	usage  bool                               // the client requests the usage
	decode func(ids []uint32) (string, error) // returns the text of tokens; nil: there is none
	never  string                             // why the request alone does not allow to continue it; empty: it does
}

// answer is what has come of a streamed answer.
type answer struct {
	tokens    []uint32
	whole     int    // of them, those of which the client has the text
	held      []byte // events of the others, for the client
	reasoning bool   // the last text was of the reasoning
	finished  bool   // a finish reason has come
	counted   bool   // the usage has come
	id        string // JSON, of the first event
	created   string // JSON, of the first event
	model     string // JSON, of the first event
	text      int    // offset of the text's member in events; 0: unknown
}

// NewMigration returns what continues the answer to a request. exact means that the tokens of
// the prompt are the engine's; several, that the request has several prompts or answers.
// decode returns the text of tokens; nil: there is none. An answer that may not be continued
// ends with the reason in the error event. nil: the answer is no stream of a chat, a completion
// or SGLang's own route.
func NewMigration(route string, body *jsonbody.Body, prompt []uint32, exact, several bool,
	decode func([]uint32) (string, error)) *Migration {
	generate := route == generateRoute
	if !generate && route != chatRoute && route != completionRoute || !body.Get("stream").Bool() {
		return nil
	}
	c := continuable{
		route: route, prompt: prompt, asked: generate || body.Get("return_token_ids").Bool(),
		usage: body.Get("stream_options").Get("include_usage").Bool(), decode: decode,
	}
	switch {
	case several:
		c.never = whySeveral
	case !exact || len(prompt) == 0:
		c.never = whyPrompt
	case len(prompt) > maxMigratedPrompt:
		c.never = whyLong
	case !generate:
		c.never = whyNotContinued(body)
	}
	return c.begin()
}

// begin returns an answer of which there is nothing yet.
func (c continuable) begin() *Migration {
	return &Migration{continuable: c, answer: answer{tokens: make([]uint32, 0, firstTokens)}, why: c.never}
}

// whyNotContinued returns why an answer to the request cannot be continued; empty: it can.
func whyNotContinued(body *jsonbody.Body) string {
	logprobs := body.Get("logprobs").Type
	sets := func(key string) bool {
		v := body.Get(key)
		return v.Type == gjson.Number && v.Num != 0 || v.Type == gjson.String
	}
	switch format := body.Get("response_format"); {
	case asks(body, "tools") && body.Get("tool_choice").Str != "none", asks(body, "functions"):
		return whyTools
	case format.IsObject() && format.Get("type").Str != "text", asks(body, "structured_outputs"), asks(body, "guided_json"),
		asks(body, "guided_regex"), asks(body, "guided_choice"), asks(body, "guided_grammar"):
		return whyGuided
	case sets("presence_penalty"), sets("frequency_penalty"):
		return whyPenalty
	case asks(body, "prompt_logprobs"), asks(body, "echo"), logprobs == gjson.Number || logprobs == gjson.String, asks(body, "suffix"):
		return whyLogprobs
	case asks(body, "use_beam_search"):
		return whySeveral
	}
	return ""
}

// ask returns the request for token ids that a worker needs beside body to stream them.
func (s *Migration) ask(t *kv.Target, body *jsonbody.Body) []jsonbody.Field {
	s.added, s.dialect = false, nil
	if s.why == "" {
		s.dialect, s.why = dialectOf(s.route, t, body)
	}
	if own := body.Get("return_token_ids"); own.Exists() && own.Type != gjson.Null && !s.asked {
		s.why = cmp.Or(s.why, whyNoTokens) // the client refuses them
	}
	if s.added = s.why == "" && !s.asked; s.added {
		return []jsonbody.Field{{Key: "return_token_ids", Raw: "true"}}
	}
	return nil
}

// restart forgets an answer of which the client has nothing.
func (s *Migration) restart() {
	if s != nil && !s.begun {
		s.answer = answer{tokens: s.tokens[:0], held: s.held[:0]}
	}
}

// continues reports whether the client has a part of the answer that may be continued.
func (s *Migration) continues() bool { return s.open() && s.why == "" }

// mayMove reports whether the answer may leave a worker that works.
func (s *Migration) mayMove() bool { return s.continues() && !s.reasoning && !s.finished }

// open reports whether the answer's headers are out, so that it must be continued or end.
func (s *Migration) open() bool { return s != nil && s.begun }

// rewind forgets the tokens of an interrupted answer of which the client has no text yet: they
// may be a part of a character, which only the worker that made all of it can show.
func (s *Migration) rewind() {
	if s.why == "" {
		s.dialect.rewind(s)
	}
}

// rest edits a request to be one for the rest of the answer.
func (s *Migration) rest(e *edits) {
	s.moves, s.sent, s.verified = s.moves+1, len(s.tokens), false
	s.dialect.rest(s, e)
}

// complete reports whether the answer has all its tokens.
func (s *Migration) complete(body *jsonbody.Body) bool {
	most := TokenLimit(s.route, body)
	return s.finished || most > 0 && len(s.tokens) >= most
}

// appendTokens appends token ids, separated by commas.
func appendTokens(out []byte, ids []uint32) []byte {
	for _, id := range ids {
		if out[len(out)-1] != '[' {
			out = append(out, ',')
		}
		out = strconv.AppendUint(out, uint64(id), 10)
	}
	return out
}

// rewrite appends an event to out as the client gets it, and remembers it. Events that only
// the router has asked for are left out, and so is the failure of an engine whose answer
// may be continued.
func (s *Migration) rewrite(out, event []byte, e eventFacts) []byte {
	switch {
	case e.failed && s.continues() || s.torn:
		return out
	case s.dialect == nil || s.why != "" && s.moves == 0:
		return s.pass(out, event)
	}
	return s.dialect.rewrite(s, out, event, e)
}

// eventFacts are what is known of an event.
type eventFacts struct {
	failed   bool // it is the engine's failure
	finished bool // a finish reason has come
	own      bool // it is one of generateRoute, in SGLang's own form
}

// pass appends an event of an answer that is not continued to out.
func (s *Migration) pass(out, event []byte) []byte {
	out, s.held = append(out, s.held...), s.held[:0]
	if s.added {
		out, event = s.plain(out, event, false)
		event = s.hide(event)
	}
	return append(out, event...)
}

// plain is plainEvent, counted.
func (s *Migration) plain(out, event []byte, generate bool) (_, plain []byte) {
	out, event, changed := plainEvent(out, event, generate)
	if changed {
		s.unlike++
	}
	return out, event
}

// trim takes the token ids of the prompt out of an answer's first event, in place: there are as
// many as the prompt is long, and all that reads the event afterwards would search them.
func (s *Migration) trim(event []byte) []byte {
	if s == nil || !s.added || s.moves > 0 || s.id != "" {
		return event
	}
	at := bytes.Index(event, markPromptIDs)
	if at < 0 {
		return event
	}
	from := at + len(markPromptIDs) - 1
	length := bytes.IndexByte(event[from:], ']') + 1
	if length == 0 {
		return event
	}
	begin, end, by := s.dialect.hidden(event, at, from, from+length)
	return slices.Replace(event, begin, end, []byte(by)...)
}

// hide takes the lists of token ids out of an event, as the engine answers without the request
// for them. Of a worker that continues, the client never gets those of the prompt: it has them,
// and these have the answer, too.
func (s *Migration) hide(event []byte) []byte {
	marks := [][]byte{markPromptIDs, markIDs}
	switch {
	case s.asked && s.moves == 0:
		return event
	case s.asked:
		marks = marks[:1]
	}
	for _, mark := range marks {
		at := bytes.Index(event, mark)
		if at < 0 {
			continue
		}
		from := at + len(mark) - 1
		list := jsonbody.Leading(jsonbody.View(event[from:]))
		begin, end, by := s.dialect.hidden(event, at, from, from+len(list.Raw))
		event = splice(event, begin, end-begin, by)
	}
	return event
}

// tear ends an answer that cannot be joined to what the client has.
func (s *Migration) tear(why string) { s.why, s.torn = why, true }

// tooLong notes that an event is longer than maxEvent. It reports whether that ends the answer:
// the rest of one of generateRoute needs changes in each event.
func (s *Migration) tooLong() bool {
	s.why = whyLong
	if _, cumulative := s.dialect.(*sglangGenerate); cumulative && s.moves > 0 {
		s.torn = true
	}
	return s.torn
}

// readTokens appends the ids of a list that begins after its bracket, and returns the
// length of the list.
func readTokens(text []byte, ids []uint32) (all []uint32, length int, ok bool) {
	id, digits, had := uint64(0), 0, len(ids)
	for i, b := range text {
		switch {
		case b >= '0' && b <= '9' && digits < 10:
			id, digits = 10*id+uint64(b-'0'), digits+1
		case (b == ',' || b == ']') && digits > 0 && id <= 1<<32-1:
			ids = append(ids, uint32(id))
			if id, digits = 0, 0; b == ']' {
				return ids, i + 1, true
			}
		case b == ']' && digits == 0:
			return ids, i + 1, true
		default:
			return readNumbers(text, ids[:had])
		}
	}
	return ids, 0, false
}

// readNumbers is readTokens for a list with spaces, or with numbers in another form than the usual
// one.
func readNumbers(text []byte, ids []uint32) (all []uint32, length int, ok bool) {
	list := jsonbody.Leading("[" + string(text))
	if !gjson.Valid(list.Raw) {
		return ids, 0, false
	}
	ok = true
	jsonbody.EachElement(list.Raw, func(v gjson.Result) bool {
		id := uint32(max(0, min(v.Num, math.MaxUint32)))
		ok = v.Type == gjson.Number && float64(id) == v.Num
		ids = append(ids, id)
		return ok
	})
	return ids, len(list.Raw) - 1, ok
}

// splice returns b with n bytes at that place replaced.
func splice(b []byte, at, n int, by string) []byte {
	return slices.Concat(b[:at], []byte(by), b[at+n:])
}

// merge makes u, the usage that the last worker reported, that of the whole answer.
func (s *Migration) merge(u *Usage) {
	if !u.Known {
		return
	}
	u.PromptTokens, u.OutputTokens = len(s.prompt), len(s.tokens)
	u.CachedTokens = min(u.CachedTokens, u.PromptTokens)
}
