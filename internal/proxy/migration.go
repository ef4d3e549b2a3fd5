package proxy

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"kvrouter/internal/jsonbody"
	"kvrouter/internal/kv"
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
	prompt   []uint32 // of the request
	chat     bool
	generate bool                               // it is an answer of generateRoute
	asked    bool                               // the client requests the token ids, too
	usage    bool                               // the client requests the usage
	stops    bool                               // vLLM holds back text for stop strings
	decode   func(ids []uint32) (string, error) // returns the text of tokens; nil: there is none

	never string // why the request alone does not allow to continue it; empty: it does
	why   string // it cannot be continued; empty: it can

	added     bool     // the router has requested the token ids
	begun     bool     // the client has the headers
	tokens    []uint32 // of the answer
	whole     int      // of them, those of which the client has the text
	held      []byte   // events of the others, for the client
	sent      int      // of them, those that were sent with the prompt to the worker that continues
	moves     int      // continuations
	drained   int      // of them, those from a worker that was drained
	verified  bool     // the worker that continues has confirmed the tokens sent
	reasoning bool     // the last text was of the reasoning
	finished  bool     // a finish reason has come
	counted   bool     // the usage has come
	id        string   // JSON, of the first event
	created   string   // JSON, of the first event
	model     string   // JSON, of the first event
	text      int      // offset of the text's member in events; 0: unknown
	cached    int      // prompt tokens that the first worker had cached, as predicted or reported

	// Of SGLang's answers alone.
	sglang     bool
	last       []byte   // the last event with text that the client has
	base       string   // text before the continued part of an answer of generateRoute, JSON without quotes
	details    string   // cached_tokens_details of the first worker, JSON
	again      string   // text that the client has and the worker that continues makes again
	dropped    []uint32 // tokens likewise; of them the client has the ids if it requests them
	made       string   // text of the worker that continues, until again is a part of it
	remakes    bool     // again and dropped have not been made yet
	cumulative bool     // events of generateRoute have the whole answer so far
	torn       bool     // the answer cannot be joined to what the client has

	own    bool   // the event of generateRoute has SGLang's own form
	unlike uint64 // events that had to be brought into the form of the marks
}

// NewMigration returns what continues the answer to a request. exact means that the tokens of
// the prompt are the engine's; several, that the request has several prompts or answers.
// decode returns the text of tokens; nil: there is none. An answer that may not be continued
// ends with the reason in the error event. nil: the answer is no stream of a chat, a completion
// or SGLang's own route.
func NewMigration(route string, body *jsonbody.Body, prompt []uint32, exact, several bool, decode func([]uint32) (string, error)) *Migration {
	chat, generate := route == chatRoute, route == generateRoute
	if !chat && !generate && route != completionRoute || !body.Get("stream").Bool() {
		return nil
	}
	options := body.Get("stream_options")
	s := &Migration{prompt: prompt, tokens: make([]uint32, 0, firstTokens), chat: chat, generate: generate, asked: generate || body.Get("return_token_ids").Bool(), usage: options.Get("include_usage").Bool(), decode: decode}
	switch {
	case several:
		s.why = whySeveral
	case !exact || len(prompt) == 0:
		s.why = whyPrompt
	case len(prompt) > maxMigratedPrompt:
		s.why = whyLong
	case !generate:
		s.why = whyNotContinued(body)
		s.stops = !body.Get("include_stop_str_in_output").Bool() && slices.ContainsFunc(append(body.Get("stop").Array(), body.Get("stop")), func(stop gjson.Result) bool { return utf8.RuneCountInString(stop.Str) > 1 })
	}
	s.never = s.why
	return s
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
	case format.IsObject() && format.Get("type").Str != "text",
		slices.ContainsFunc([]string{"structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}, func(key string) bool { return asks(body, key) }):
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
	s.added, s.sglang = false, t.RunsSGLang()
	switch {
	case s.sglang:
		s.why = cmp.Or(s.why, s.whyNotOnSGLang(body))
	case s.stops:
		s.why = cmp.Or(s.why, whyStop)
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
		s.whole, s.held, s.last, s.text, s.cumulative = 0, s.held[:0], s.last[:0], 0, false
		s.tokens, s.id, s.finished, s.counted, s.reasoning = s.tokens[:0], "", false, false, false
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
	switch {
	case s.why != "":
		return
	case s.remakes: // the client has no more than at the last interruption
		s.tokens, s.whole, s.held, s.made = s.tokens[:s.sent], s.sent, s.held[:0], ""
		return
	case s.generate:
		s.load()
	case !s.finished:
		s.tokens, s.held = s.tokens[:s.whole], s.held[:0]
	}
	if s.sglang && !s.finished && s.why == "" {
		s.cut()
	}
}

// rest returns u as a request for the rest of the answer.
func (s *Migration) rest(u Upstream) Upstream {
	s.moves, s.sent, s.verified = s.moves+1, len(s.tokens), false
	u.PromptTokens = nil // they are in it
	body := u.Parsed
	if s.generate {
		return u.withBody(s.generateRest(body))
	}
	if s.chat {
		body = body.With("kv_transfer_params", withPromptTokens(body.Get("kv_transfer_params"), s.prompt, s.tokens))
	} else {
		body = body.With("prompt", tokenList(s.prompt, s.tokens))
	}
	for _, key := range []string{"max_tokens", "max_completion_tokens", "min_tokens"} {
		if v := body.Get(key); given(v) {
			body = body.With(key, strconv.Itoa(max(0, number(v)-s.sent)))
		}
	}
	return u.withBody(body.With("return_token_ids", "true"))
}

// left returns how many tokens the client still allows; known is false without a limit.
func (s *Migration) left(body *jsonbody.Body) (tokens int, known bool) {
	if s.generate {
		most := newTokens(body.Get("sampling_params"))
		return most - len(s.tokens), most > 0
	}
	for _, key := range []string{"max_completion_tokens", "max_tokens"} {
		if v := body.Get(key); given(v) {
			return number(v) - len(s.tokens), true
		}
	}
	return 0, false
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

// rewrite appends an event to out as the client gets it, and remembers it. Events that only
// the router has asked for are left out, and so is the failure of an engine whose answer
// may be continued. finished means that a finish reason has come.
func (s *Migration) rewrite(out, event []byte, failed, finished bool) []byte {
	if failed && s.continues() || s.torn {
		return out
	}
	if s.generate {
		return s.rewriteGenerated(out, event, finished)
	}
	if out, ok := s.quick(out, event, finished); ok {
		return out
	}
	if s.added || s.why == "" || s.moves > 0 {
		out, event = s.plain(out, event)
	}
	if !s.withoutText(event, finished) {
		if !s.remakes {
			out, s.held = append(out, s.held...), s.held[:0]
			s.whole = len(s.tokens)
		}
		out = s.show(out, event, finished)
		if !s.remakes && !s.torn {
			s.whole = len(s.tokens) // with those of this event
			s.keep(event)
		}
		return out
	}
	if s.held = s.show(s.held, event, finished); s.why != "" || len(s.held) > maxHeld {
		out, s.held = append(out, s.held...), s.held[:0]
		s.whole = len(s.tokens)
	}
	return out
}

// plain is plainEvent, counted.
func (s *Migration) plain(out, event []byte) (_, plain []byte) {
	if s.own {
		return out, event
	}
	out, event, changed := plainEvent(out, event, s.generate)
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
	begin, end, by := s.hidden(event, at, from, from+length)
	return slices.Replace(event, begin, end, []byte(by)...)
}

// hidden returns the part of an event that hides a list of token ids, and what replaces it:
// without the request for them vLLM has null, SGLang no such member. The member begins at at, its
// list goes from from to to.
func (s *Migration) hidden(event []byte, at, from, to int) (begin, end int, by string) {
	switch {
	case !s.sglang || at == 0:
	case event[at-1] == ',':
		return at - 1, to, ""
	case to < len(event) && event[to] == ',':
		return at, to + 1, ""
	}
	return from, to, "null"
}

// withoutText reports whether an event has tokens of the answer, but no text, and is not the last.
func (s *Migration) withoutText(event []byte, finished bool) bool {
	if finished || !bytes.Contains(event, markIDs) || !bytes.Contains(event, markChoice) {
		return false
	}
	if at := bytes.Index(event, s.member()); at > 0 && event[at+len(s.member())] != '"' {
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
func (s *Migration) show(out, event []byte, finished bool) []byte {
	data, ok := bytes.CutPrefix(event, []byte("data:"))
	if !ok || bytes.HasPrefix(bytes.TrimSpace(data), []byte("[DONE]")) {
		return append(out, event...)
	}
	if s.why != "" && s.moves == 0 {
		return append(out, s.hide(event)...)
	}
	if s.id == "" {
		s.id, s.created, s.model = gjson.GetBytes(data, "id").Raw, gjson.GetBytes(data, "created").Raw, gjson.GetBytes(data, "model").Raw
	}
	if bytes.Contains(data, markUsage) && !bytes.Contains(data, markChoice) {
		s.counted = true
		return append(out, s.renumber(event)...)
	}
	if !bytes.Contains(data, markChoice) {
		return append(out, s.renumber(event)...)
	}
	if s.moves > 0 && !s.verified {
		if !s.verify(data) {
			s.tear(whyNotTaken)
			return out
		}
	}
	opening := s.chat && bytes.Contains(data, markRole) && !bytes.Contains(data, markIDs)
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
		if at := bytes.Index(event, s.member()); at > 0 {
			s.text = at
		}
	}
	if !s.asked && !reasonGiven(data) && bytes.Contains(data, markEmpty) && gjson.GetBytes(data, "choices.0.logprobs").Type == gjson.Null {
		return out // without token ids, the engine sends no event for tokens without text
	}
	shown := s.renumber(s.hide(event))
	if s.remakes {
		shown = s.withoutAgain(shown, finished)
	}
	return append(out, shown...)
}

// member returns the beginning of the member that has an event's text.
func (s *Migration) member() []byte {
	if s.chat {
		return markContent
	}
	return markText
}

// quick is rewrite for an event of one answer's text that begins as those before it, or is the
// first one.
func (s *Migration) quick(out, event []byte, finished bool) (_ []byte, ok bool) {
	if s.moves > 0 || s.why != "" || len(s.held) > 0 || s.text == 0 && !s.learn(event) || len(event) < s.text || !bytes.HasPrefix(event[s.text:], s.member()) {
		return out, false
	}
	at := lastIDs(event)
	if at < s.text || event[s.text+len(s.member())] == '"' { // there is no text
		return out, false
	}
	from, had, null := at+len(markIDs), len(s.tokens), "null"
	begin := from - 1
	if s.sglang { // without the request for them, it has no such member
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
	s.keep(event)
	if s.asked {
		return append(out, event...), true
	}
	return append(append(append(out, event[:begin]...), null...), event[from+length:]...), true
}

// learn finds out where the text is in events, from the first one that has it. It reports
// whether that one needs no other changes than the later ones.
func (s *Migration) learn(event []byte) bool {
	at := bytes.Index(event, s.member())
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

// verify reports whether the worker that continues confirms the tokens of prompt and answer
// that it was sent.
func (s *Migration) verify(data []byte) bool {
	at := bytes.Index(data, markPromptIDs)
	if at < 0 {
		return false
	}
	ids, _, ok := readTokens(data[at+len(markPromptIDs):], nil)
	s.verified = ok && len(ids) == len(s.prompt)+s.sent && slices.Equal(ids[:len(s.prompt)], s.prompt) && slices.Equal(ids[len(s.prompt):], s.tokens[:s.sent])
	return s.verified
}

// hide replaces the lists of token ids by null, or for SGLang takes them out, as the engine
// answers without the request for them. Of a worker that continues, the client never gets
// those of the prompt: it has them, and these have the answer, too.
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
		begin, end, by := s.hidden(event, at, from, from+len(list.Raw))
		event = splice(event, begin, end-begin, by)
	}
	return event
}

// renumber gives an event of a worker that continues the identity of the first one, and its
// usage the tokens of the whole answer.
func (s *Migration) renumber(event []byte) []byte {
	if s.moves == 0 {
		return event
	}
	from := len("data:")
	for _, f := range []struct{ path, value string }{{"id", s.id}, {"created", s.created}} {
		if v := gjson.GetBytes(event[from:], f.path); v.Exists() && v.Index > 0 && f.value != "" {
			event = splice(event, from+v.Index, len(v.Raw), f.value)
		}
	}
	if usage := gjson.GetBytes(event[from:], "usage"); usage.IsObject() {
		for path, change := range map[string]func(int64) int64{
			"usage.prompt_tokens":                       func(int64) int64 { return int64(len(s.prompt)) },
			"usage.completion_tokens":                   func(n int64) int64 { return n + int64(s.sent) },
			"usage.prompt_tokens_details.cached_tokens": func(int64) int64 { return int64(s.cached) },
		} {
			if v := gjson.GetBytes(event[from:], path); v.Type == gjson.Number && v.Index > 0 {
				event = splice(event, from+v.Index, len(v.Raw), strconv.FormatInt(change(v.Int()), 10))
			}
		}
	}
	return event
}

// splice returns b with n bytes at that place replaced.
func splice(b []byte, at, n int, by string) []byte {
	return slices.Concat(b[:at], []byte(by), b[at+n:])
}

// close appends what is missing of an answer whose last token has come: its finish reason if
// the limit of tokens is reached, its usage and its end.
func (s *Migration) close(out []byte) []byte {
	if s.generate {
		return s.closeGenerated(out)
	}
	kind, choice := "text_completion", `{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}`
	if s.chat {
		kind, choice = "chat.completion.chunk", `{"index":0,"delta":{},"logprobs":null,"finish_reason":"length","stop_reason":null}`
	}
	reasoned := ""
	if s.sglang {
		choice = `{"index":0,"text":"","logprobs":null,"finish_reason":"length","matched_stop":null}`
		reasoned = `,"reasoning_tokens":0`
	}
	head := fmt.Sprintf(`data: {"id":%s,"object":%q,"created":%s,"model":%s,`, s.id, kind, s.created, s.model)
	if !s.finished {
		out = fmt.Appendf(out, "%s\"choices\":[%s]}\n\n", head, choice)
	}
	if s.usage && !s.counted {
		out = fmt.Appendf(out, "%s\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d,\"prompt_tokens_details\":{\"cached_tokens\":%d}%s}}\n\n",
			head, len(s.prompt), len(s.prompt)+len(s.tokens), len(s.tokens), s.cached, reasoned)
	}
	return append(out, "data: [DONE]\n\n"...)
}

// merge makes u, the usage that the last worker reported, that of the whole answer.
func (s *Migration) merge(u *Usage) {
	if !u.Known {
		return
	}
	u.PromptTokens, u.OutputTokens = len(s.prompt), len(s.tokens)
	if s.moves > 0 {
		u.CachedTokens = min(u.CachedTokens, s.cached)
	}
}
