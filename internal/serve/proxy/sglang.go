package proxy

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
)

const (
	// tailTokens is the number of last tokens that are decoded to find out whether they end
	// within a character.
	tailTokens = 16
	// mostCut bounds the tokens that are made again. A character has at most four bytes, each
	// of which may be a token.
	mostCut = 8
	// unknownRune stands for bytes that are no character, or not yet.
	unknownRune = string(utf8.RuneError)
)

// whyNotOnSGLang returns why an answer to the request cannot be continued on SGLang; empty: it
// can. Its grammars begin with the answer, its penalties count the answer alone, and a match of
// stop_regex may have begun in text that the client has. It holds back every token that may
// begin a stop string, so that those are found after an interruption. params returns the
// parameters of sampling.
func whyNotOnSGLang(body *jsonbody.Body, params func(key string) gjson.Result) string {
	is := func(get func(string) gjson.Result, keys ...string) bool {
		return slices.ContainsFunc(keys, func(key string) bool {
			v := get(key)
			return v.Exists() && v.Type != gjson.Null && v.Type != gjson.False
		})
	}
	sets := func(key string, neutral float64) bool {
		v := params(key)
		return v.Type == gjson.Number && v.Num != neutral || v.Type == gjson.String
	}
	switch {
	case is(params, "json_schema", "regex", "ebnf", "structural_tag"):
		return whyGuided
	case sets("presence_penalty", 0), sets("frequency_penalty", 0), sets("repetition_penalty", 1):
		return whyPenalty
	case is(params, "stop_regex"):
		return whyRegex
	case is(body.Get, "return_logprob"):
		return whyLogprobs
	case is(params, "custom_params"),
		is(body.Get, "return_hidden_states", "return_routed_experts", "return_indexer_topk", "return_sampling_mask", "return_entropy",
			"return_cached_tokens_details", "return_spec_tokens_details", "session_params", "session_id", "custom_logit_processor",
			"watermark", "max_thinking_tokens"):
		return whyExtras
	}
	return ""
}

// sglang is what the dialects of SGLang have in common. Its detokenizer shows the text of tokens
// that end within a character up to a space or a Chinese character, so that the client may have a
// part of it: the worker that continues makes those tokens again.
type sglang struct {
	last   []byte  // the last event with text that the client has
	remake *remake // nil: nothing is made again
}

// remake is text and tokens that the client has, and that the worker that continues makes again.
type remake struct {
	text   string
	tokens []uint32 // of which the client has the ids
	made   string   // so far
}

func (*sglang) continues(t *kv.Target) bool {
	return t.RunsSGLang() && (t.Kind != kv.KindSGLang || t.Role == kv.RoleBoth) // a part of a pair answers no request alone
}

// hidden: without the request for them, there is no such member.
func (*sglang) hidden(event []byte, at, from, to int) (begin, end int, by string) {
	switch {
	case at > 0 && event[at-1] == ',':
		return at - 1, to, ""
	case at > 0 && to < len(event) && event[to] == ',':
		return at, to + 1, ""
	}
	return from, to, "null"
}

// remakes reports whether the worker that continues still makes what the client has.
func (g *sglang) remakes() bool { return g != nil && g.remake != nil }

// keep keeps an event with text of the answer, as it came.
func (g *sglang) keep(event []byte) {
	if g != nil {
		g.last = append(g.last[:0], event...)
	}
}

// rewound goes back to the last interruption if the client has no more than then.
func (g *sglang) rewound(s *Migration) bool {
	if g.remake == nil {
		return false
	}
	s.tokens, s.whole, s.held, g.remake.made = s.tokens[:s.sent], s.sent, s.held[:0], ""
	return true
}

// cut takes the last tokens away if they end within a character, which the worker that
// continues could not show. The text that the client has of it must be made again. The last event
// has its text at path. It returns that without what is made again, and whether there is any.
func (g *sglang) cut(s *Migration, path string) (shown string, again bool) {
	shown = gjson.GetBytes(g.last[min(len("data:"), len(g.last)):], path).String()
	if r, _ := utf8.DecodeLastRuneInString(shown); len(s.tokens) == 0 || shown == "" || r < utf8.RuneSelf && r != ' ' {
		return shown, false
	}
	var m remake
	n := len(s.tokens)
	from := max(0, n-tailTokens)
	text, ok := s.textOf(s.tokens[from:])
	for at := n - 1; ok && strings.HasSuffix(text, unknownRune); at-- {
		if at < max(from, n-mostCut) {
			ok = false
			break
		}
		var before string
		if before, ok = s.textOf(s.tokens[from:at]); !ok || strings.HasSuffix(before, unknownRune) {
			continue
		}
		rest, follows := strings.CutPrefix(text, before)
		rest = strings.TrimRight(rest, unknownRune)
		for follows && !endsAlike(before+rest, shown) && rest != "" {
			_, size := utf8.DecodeLastRuneInString(rest)
			rest = rest[:len(rest)-size]
		}
		if ok = follows && endsAlike(before+rest, shown); ok {
			if m.text = rest; s.asked { // else the client does not know them
				m.tokens = slices.Clone(s.tokens[at:])
			}
			s.tokens, s.whole = s.tokens[:at], at
		}
		break
	}
	if !ok {
		s.why = whyText
	}
	if m.text != "" || len(m.tokens) > 0 {
		g.remake = &m
	}
	return strings.TrimSuffix(shown, m.text), m.text != ""
}

// inside returns a JSON string without its quotes.
func inside(raw string) string { return strings.TrimSuffix(strings.TrimPrefix(raw, `"`), `"`) }

// endsAlike reports whether one text ends with the other.
func endsAlike(a, b string) bool { return strings.HasSuffix(a, b) || strings.HasSuffix(b, a) }

// textOf returns the text of tokens; ok is false if it is not known.
func (s *Migration) textOf(ids []uint32) (text string, ok bool) {
	if len(ids) == 0 {
		return "", true
	}
	if s.decode == nil {
		return "", false
	}
	text, err := s.decode(ids)
	return text, err == nil
}

// remade reports whether what the client has is a part by now of what the worker that continues
// has made. rest is the text beyond it, and ids the tokens. If it never will be, the answer is torn.
func (g *sglang) remade(s *Migration, ended bool) (rest string, ids []uint32, all bool) {
	m, made := g.remake, s.tokens[s.sent:]
	common, texts := min(len(made), len(m.tokens)), min(len(m.made), len(m.text))
	if !slices.Equal(made[:common], m.tokens[:common]) || m.made[:texts] != m.text[:texts] {
		s.tear(whyDiffers)
		return "", nil, false
	}
	if common < len(m.tokens) || texts < len(m.text) {
		if ended {
			s.tear(whyDiffers)
		}
		return "", nil, false
	}
	g.remake = nil
	return m.made[texts:], made[common:], true
}

// sglangCompletion is the dialect of SGLang's completions.
type sglangCompletion struct {
	*sglang
	choices
}

func newSGLangCompletion() *sglangCompletion {
	d := &sglangCompletion{sglang: new(sglang)}
	d.choices = choices{
		text: markText, object: "text_completion", final: `"text":""`, stop: "matched_stop", usage: `,"reasoning_tokens":0`, sglang: d.sglang,
	}
	return d
}

// rewind also cuts a character that is not whole.
func (d *sglangCompletion) rewind(s *Migration) {
	if d.rewound(s) {
		return
	}
	if d.choices.rewind(s); !s.finished {
		d.cut(s, "choices.0.text")
	}
}

// withoutAgain returns a completion's event without what the client has already; nil: that is
// all of it.
func (g *sglang) withoutAgain(s *Migration, event []byte, ended bool) []byte {
	from := len("data:")
	text := gjson.GetBytes(event[from:], "choices.0.text")
	g.remake.made += text.Str
	rest, ids, all := g.remade(s, ended)
	if !all || text.Index == 0 || rest == "" && len(ids) == 0 && !ended {
		return nil
	}
	patches := []patch{{from + text.Index, len(text.Raw), Quoted(rest)}}
	if at := bytes.Index(event, markIDs); at >= 0 {
		at += len(markIDs)
		if _, length, ok := readTokens(event[at:], nil); ok {
			patches = append(patches, patch{at - 1, 1 + length, tokenList(ids)})
		}
	}
	return applied(event, patches)
}

// patch replaces n bytes at a place.
type patch struct {
	at, n int
	by    string
}

// applied returns b with patches, which do not overlap.
func applied(b []byte, patches []patch) (out []byte) {
	slices.SortFunc(patches, func(a, b patch) int { return cmp.Compare(a.at, b.at) })
	from := 0
	for _, e := range patches {
		if e.at < from { // of a member that is there twice
			continue
		}
		out = append(append(out, b[from:e.at]...), e.by...)
		from = e.at + e.n
	}
	return append(out, b[from:]...)
}

// Marks in events of generateRoute, which cannot stand inside of a JSON string.
var (
	markOutputIDs = []byte(`,"output_ids":[`)
	markNoText    = []byte(`"text":""`)
)

// sglangGenerate is the dialect of SGLang's own route, whose events have the whole answer so far.
type sglangGenerate struct {
	sglang
	at         int    // of the token ids in the last event; 0: there was none
	base       string // text before the continued part, JSON without quotes
	details    string // cached_tokens_details of the first worker, JSON
	cumulative bool   // events have the whole answer so far, indeed
}

// whyNotGenerated returns why an answer to a request to generateRoute cannot be continued; empty:
// it can.
func whyNotGenerated(body *jsonbody.Body) string {
	params := body.Get("sampling_params")
	if params.IsArray() || body.Get("text").IsArray() || body.Get("input_ids").Get("0").IsArray() {
		return whySeveral
	}
	members := jsonbody.Members(params)
	return whyNotOnSGLang(body, func(key string) gjson.Result { return jsonbody.FieldOf(members, key) })
}

func (*sglangGenerate) rest(s *Migration, e *edits) {
	body := e.client
	var fields, less []jsonbody.Field
	for _, m := range jsonbody.Members(body.Get("sampling_params")) {
		fields = append(fields, jsonbody.Field{Key: m.Key, Raw: m.Value.Raw})
		if m.Key == "min_new_tokens" && given(m.Value) {
			less = append(less, jsonbody.Field{Key: m.Key, Raw: strconv.Itoa(max(0, number(m.Value)-s.sent))})
		}
	}
	if most := newTokens(body.Get("sampling_params")); most > 0 {
		less = append(less, jsonbody.Field{Key: "max_new_tokens", Raw: strconv.Itoa(most - s.sent)})
	}
	e.set("sampling_params", string(jsonbody.AppendObject(nil, jsonbody.MergeFields(fields, less))))
	if body.Get("text").Exists() {
		e.set("text", "null") // which has precedence
	}
	e.set("input_ids", tokenList(s.prompt, s.tokens))
}

// rewrite: events without new text, whose tokens may be a part of a character, wait for the next
// text.
func (g *sglangGenerate) rewrite(s *Migration, out, event []byte, e eventFacts) []byte {
	if !e.own {
		out, event = s.plain(out, event, true)
	}
	at := bytes.Index(event, markOutputIDs)
	if at >= 0 && s.moves == 0 && !g.cumulative {
		g.cumulative = g.accumulates(s, event, at)
	}
	if at < 0 || s.why != "" && s.moves == 0 {
		out, s.held = append(append(out, s.held...), event...), s.held[:0]
		return out
	}
	if s.moves > 0 {
		if event = g.join(s, event, at, e.finished); event == nil {
			return out
		}
		at = bytes.Index(event, markOutputIDs)
	}
	if !e.finished && (bytes.HasSuffix(event[:at], markNoText) || g.hasText(event, at)) {
		if len(s.held) > maxHeld {
			s.held = s.held[:0] // this one has all of theirs
		}
		s.held = append(s.held, event...)
		return out
	}
	out = append(append(out, s.held...), event...)
	g.at, s.held, s.finished = at, s.held[:0], s.finished || e.finished
	g.keep(event)
	return out
}

// rewind reads the answer from the last event, and cuts a character that is not whole.
func (g *sglangGenerate) rewind(s *Migration) {
	if g.rewound(s) {
		return
	}
	if g.load(s); s.finished || s.why != "" {
		return
	}
	if shown, again := g.cut(s, "text"); again {
		g.base = inside(Quoted(shown))
	}
}

// hasText reports whether the client has the text of an event of generateRoute, whose token ids
// begin at at. Most texts are longer than those before them in any form.
func (g *sglangGenerate) hasText(event []byte, at int) bool {
	if at == g.at {
		return true
	}
	given := func(event []byte) string { return gjson.GetBytes(event[len("data:"):], "text").Str }
	return len(g.last) > 0 && (escapesMore(event[:at]) || escapesMore(g.last)) && given(event) == given(g.last)
}

// escapesMore reports whether a JSON text has escapes that it needs not have.
func escapesMore(text []byte) bool {
	return bytes.IndexByte(text, '\\') >= 0 && (bytes.Contains(text, []byte(`\u`)) || bytes.Contains(text, []byte(`\/`)))
}

// accumulates reports whether events have all tokens so far, which one of two tokens or more
// shows: of a server with --incremental-streaming-output they have the new ones.
func (*sglangGenerate) accumulates(s *Migration, event []byte, at int) bool {
	ids, _, ok := readTokens(event[at+len(markOutputIDs):], nil)
	count := int(gjson.GetBytes(event[len("data:"):], "meta_info.completion_tokens").Int())
	if !ok || len(ids) != count {
		s.why = whyDeltas
	}
	return count > 1
}

// load reads the answer so far from the last event of generateRoute that the client has.
func (g *sglangGenerate) load(s *Migration) {
	s.held = s.held[:0]
	at := bytes.Index(g.last, markOutputIDs)
	if at < 0 {
		s.why = whyNoTokens
		return
	}
	ids, _, ok := readTokens(g.last[at+len(markOutputIDs):], s.tokens[:0])
	answer := gjson.ParseBytes(g.last[len("data:"):])
	meta := answer.Get("meta_info")
	switch s.tokens = ids; {
	case !ok || answer.Get("text").Type != gjson.String:
		s.tokens, s.why = s.tokens[:0], whyNoTokens
		return
	case len(ids) > maxMigratedAnswer:
		s.tokens, s.why = s.tokens[:0], whyLong
		return
	}
	s.whole, g.base = len(ids), inside(answer.Get("text").Raw)
	if s.moves == 0 {
		s.id, g.details = meta.Get("id").Raw, meta.Get("cached_tokens_details").Raw
		s.cached = reported(meta.Get("cached_tokens"), maxReportedPrompt)
	}
}

// join returns an event of the worker that continues as one of the whole answer; nil: the
// client gets none. Its token ids begin after at.
func (g *sglangGenerate) join(s *Migration, event []byte, at int, ended bool) []byte {
	from := len("data:")
	answer := gjson.ParseBytes(event[from:])
	text, meta := answer.Get("text"), answer.Get("meta_info")
	if s.verified = s.verified || int(meta.Get("prompt_tokens").Int()) == len(s.prompt)+s.sent; !s.verified {
		s.tear(whyNotTaken)
		return nil
	}
	at += len(markOutputIDs)
	ids, length, ok := readTokens(event[at:], s.tokens[:s.sent])
	s.tokens = ids
	switch {
	case !ok || len(ids) > maxMigratedAnswer:
		s.tear(whyLong)
		return nil
	case int(meta.Get("completion_tokens").Int()) != len(ids)-s.sent:
		s.tear(whyDeltas)
		return nil
	case text.Type != gjson.String:
		s.tear(whyNotTaken)
		return nil
	}
	if g.remakes() {
		g.remake.made = text.Str
		if _, _, all := g.remade(s, ended); !all {
			return nil
		}
	}
	patches := []patch{{text.Index, len(text.Raw), `"` + g.base + text.Raw[1:]}, {at - 1 - from, 1 + length, tokenList(ids)}}
	change := func(path string, to func(v gjson.Result) string) {
		if v := gjson.GetBytes(event[from:], path); v.Exists() && v.Index > 0 {
			patches = append(patches, patch{v.Index, len(v.Raw), to(v)})
		}
	}
	as := func(value string) func(gjson.Result) string { return func(gjson.Result) string { return value } }
	more := func(v gjson.Result) string { return strconv.FormatInt(v.Int()+int64(s.sent), 10) }
	change("meta_info.id", as(s.id))
	change("meta_info.prompt_tokens", as(strconv.Itoa(len(s.prompt))))
	change("meta_info.completion_tokens", more)
	change("meta_info.cached_tokens", as(strconv.Itoa(s.cached)))
	change("meta_info.cached_tokens_details", as(cmp.Or(g.details, "null")))
	change("meta_info.finish_reason.length", more)
	change("meta_info.weight_versions.0.end", more)
	change("prompt_token_ids", func(gjson.Result) string { return tokenList(s.prompt) })
	return append([]byte("data:"), applied(event[from:], patches)...)
}

// close: the last event also ends the answer if its limit of tokens is reached.
func (g *sglangGenerate) close(s *Migration, out []byte) []byte {
	if !s.finished {
		data, _ := bytes.CutPrefix(g.last, []byte("data:"))
		if v := gjson.GetBytes(data, "meta_info.finish_reason"); v.Index > 0 {
			length := fmt.Sprintf(`{"type":"length","length":%d}`, len(s.tokens))
			out = append(append(out, "data:"...), splice(data, v.Index, len(v.Raw), length)...)
		}
	}
	return append(out, "data: [DONE]\n\n"...)
}
