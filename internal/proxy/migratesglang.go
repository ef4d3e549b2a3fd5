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

	"kvrouter/internal/jsonbody"
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

// Marks in events of generateRoute, which cannot stand inside of a JSON string.
var (
	markOutputIDs = []byte(`,"output_ids":[`)
	markNoText    = []byte(`"text":""`)
)

// whyNotOnSGLang returns why an answer to the request cannot be continued on SGLang; empty: it
// can. Its grammars begin with the answer, its penalties count the answer alone, and a match of
// stop_regex may have begun in text that the client has. It holds back every token that may
// begin a stop string, so that those are found after an interruption.
func (s *Migration) whyNotOnSGLang(body *jsonbody.Body) string {
	if s.chat {
		return whyChat
	}
	params := body.Get
	if s.generate {
		given := body.Get("sampling_params")
		if given.IsArray() || body.Get("text").IsArray() || body.Get("input_ids").Get("0").IsArray() {
			return whySeveral
		}
		members := jsonbody.Members(given)
		params = func(key string) gjson.Result { return jsonbody.FieldOf(members, key) }
	}
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
		is(body.Get, "return_hidden_states", "return_routed_experts", "return_indexer_topk", "return_sampling_mask", "return_entropy", "return_cached_tokens_details",
			"return_spec_tokens_details", "session_params", "session_id", "custom_logit_processor", "watermark", "max_thinking_tokens"):
		return whyExtras
	}
	return ""
}

// keep keeps an event with text of the answer, as it came.
func (s *Migration) keep(event []byte) {
	if s.sglang {
		s.last = append(s.last[:0], event...)
	}
}

// tear ends an answer that cannot be joined to what the client has.
func (s *Migration) tear(why string) { s.why, s.torn = why, true }

// tooLong notes that an event is longer than maxEvent. It reports whether that ends the answer:
// the rest of one of generateRoute needs changes in each event.
func (s *Migration) tooLong() bool {
	if s.why = whyLong; s.generate && s.moves > 0 {
		s.torn = true
	}
	return s.torn
}

// cut takes the last tokens away if they end within a character, which the worker that
// continues could not show. SGLang shows the text of such tokens up to a space or a Chinese
// character, so that the client may have a part of it: that must be made again.
func (s *Migration) cut() {
	s.again, s.dropped, s.made = "", s.dropped[:0], ""
	path := "choices.0.text"
	if s.generate {
		path = "text"
	}
	shown := gjson.GetBytes(s.last[min(len("data:"), len(s.last)):], path).String()
	if r, _ := utf8.DecodeLastRuneInString(shown); len(s.tokens) == 0 || shown == "" || r < utf8.RuneSelf && r != ' ' {
		return
	}
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
			s.again, s.dropped = rest, append(s.dropped, s.tokens[at:]...)
			s.tokens, s.whole = s.tokens[:at], at
			if !s.asked { // the client does not know them
				s.dropped = s.dropped[:0]
			}
		}
		break
	}
	if s.remakes = s.again != "" || len(s.dropped) > 0; !ok {
		s.why = whyText
	}
	if s.generate && s.again != "" {
		s.base = inside(Quoted(strings.TrimSuffix(shown, s.again)))
	}
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

// remade notes text that the worker that continues has made, and reports whether the client's
// own is a part of it by now. If it never will be, the answer is torn.
func (s *Migration) remade(ended bool) bool {
	ids := s.tokens[s.sent:]
	common, texts := min(len(ids), len(s.dropped)), min(len(s.made), len(s.again))
	if !slices.Equal(ids[:common], s.dropped[:common]) || s.made[:texts] != s.again[:texts] {
		s.tear(whyDiffers)
		return false
	}
	s.remakes = common < len(s.dropped) || texts < len(s.again)
	if s.remakes && ended {
		s.tear(whyDiffers)
	}
	return !s.remakes
}

// withoutAgain returns a completion's event without what the client has already; nil: that is
// all of it.
func (s *Migration) withoutAgain(event []byte, ended bool) []byte {
	from := len("data:")
	text := gjson.GetBytes(event[from:], "choices.0.text")
	s.made += text.Str
	if !s.remade(ended) || text.Index == 0 {
		return nil
	}
	rest, ids := s.made[len(s.again):], s.tokens[s.sent+len(s.dropped):]
	if rest == "" && len(ids) == 0 && !ended {
		return nil
	}
	edits := []edit{{from + text.Index, len(text.Raw), Quoted(rest)}}
	if at := bytes.Index(event, markIDs); at >= 0 {
		at += len(markIDs)
		if _, length, ok := readTokens(event[at:], nil); ok {
			edits = append(edits, edit{at - 1, 1 + length, tokenList(ids)})
		}
	}
	return applied(event, edits)
}

// generateRest returns the body of a request to generateRoute for the rest of its answer.
func (s *Migration) generateRest(body *jsonbody.Body) *jsonbody.Body {
	var fields, less []jsonbody.Field
	for _, m := range jsonbody.Members(body.Get("sampling_params")) {
		fields = append(fields, jsonbody.Field{Key: m.Key, Raw: m.Value.Raw})
		if m.Key == "min_new_tokens" && given(m.Value) {
			less = append(less, jsonbody.Field{Key: m.Key, Raw: strconv.Itoa(max(0, number(m.Value)-s.sent))})
		}
	}
	if left, limited := s.left(body); limited {
		less = append(less, jsonbody.Field{Key: "max_new_tokens", Raw: strconv.Itoa(left)})
	}
	body = body.With("sampling_params", string(jsonbody.AppendObject(nil, jsonbody.MergeFields(fields, less))))
	if body.Get("text").Exists() {
		body = body.With("text", "null") // which has precedence
	}
	return body.With("input_ids", tokenList(s.prompt, s.tokens))
}

// rewriteGenerated is rewrite for an event of generateRoute, which has the whole answer so far.
// Events without new text, whose tokens may be a part of a character, wait for the next text.
func (s *Migration) rewriteGenerated(out, event []byte, finished bool) []byte {
	if s.why == "" || s.moves > 0 {
		out, event = s.plain(out, event)
	}
	at := bytes.Index(event, markOutputIDs)
	if at >= 0 && s.why == "" && s.moves == 0 && !s.cumulative {
		s.cumulative = s.accumulates(event, at)
	}
	if at < 0 || s.why != "" && s.moves == 0 {
		out, s.held = append(append(out, s.held...), event...), s.held[:0]
		return out
	}
	if s.moves > 0 {
		if event = s.join(event, at, finished); event == nil {
			return out
		}
		at = bytes.Index(event, markOutputIDs)
	}
	if !finished && (bytes.HasSuffix(event[:at], markNoText) || s.hasText(event, at)) {
		if len(s.held) > maxHeld {
			s.held = s.held[:0] // this one has all of theirs
		}
		s.held = append(s.held, event...)
		return out
	}
	out = append(append(out, s.held...), event...)
	s.text, s.held, s.finished = at, s.held[:0], s.finished || finished
	s.keep(event)
	return out
}

// hasText reports whether the client has the text of an event of generateRoute, whose token ids
// begin at at. Most texts are longer than those before them in any form.
func (s *Migration) hasText(event []byte, at int) bool {
	if at == s.text {
		return true
	}
	given := func(event []byte) string { return gjson.GetBytes(event[len("data:"):], "text").Str }
	return len(s.last) > 0 && (escapesMore(event[:at]) || escapesMore(s.last)) && given(event) == given(s.last)
}

// escapesMore reports whether a JSON text has escapes that it needs not have.
func escapesMore(text []byte) bool {
	return bytes.IndexByte(text, '\\') >= 0 && (bytes.Contains(text, []byte(`\u`)) || bytes.Contains(text, []byte(`\/`)))
}

// accumulates reports whether events have all tokens so far, which one of two tokens or more
// shows: of a server with --incremental-streaming-output they have the new ones.
func (s *Migration) accumulates(event []byte, at int) bool {
	ids, _, ok := readTokens(event[at+len(markOutputIDs):], nil)
	count := int(gjson.GetBytes(event[len("data:"):], "meta_info.completion_tokens").Int())
	if !ok || len(ids) != count {
		s.why = whyDeltas
	}
	return count > 1
}

// load reads the answer so far from the last event of generateRoute that the client has.
func (s *Migration) load() {
	s.held = s.held[:0]
	at := bytes.Index(s.last, markOutputIDs)
	if at < 0 {
		s.why = whyNoTokens
		return
	}
	ids, _, ok := readTokens(s.last[at+len(markOutputIDs):], s.tokens[:0])
	answer := gjson.ParseBytes(s.last[len("data:"):])
	meta := answer.Get("meta_info")
	switch s.tokens = ids; {
	case !ok || answer.Get("text").Type != gjson.String:
		s.tokens, s.why = s.tokens[:0], whyNoTokens
		return
	case len(ids) > maxMigratedAnswer:
		s.tokens, s.why = s.tokens[:0], whyLong
		return
	}
	s.whole, s.base = len(ids), inside(answer.Get("text").Raw)
	if s.moves == 0 {
		s.id, s.details = meta.Get("id").Raw, meta.Get("cached_tokens_details").Raw
		s.cached = reported(meta.Get("cached_tokens"), maxReportedPrompt)
	}
}

// join returns an event of the worker that continues as one of the whole answer; nil: the
// client gets none. Its token ids begin after at.
func (s *Migration) join(event []byte, at int, ended bool) []byte {
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
	if s.remakes {
		if s.made = text.Str; !s.remade(ended) {
			return nil
		}
	}
	edits := []edit{{text.Index, len(text.Raw), `"` + s.base + text.Raw[1:]}, {at - 1 - from, 1 + length, tokenList(ids)}}
	change := func(path string, to func(v gjson.Result) string) {
		if v := gjson.GetBytes(event[from:], path); v.Exists() && v.Index > 0 {
			edits = append(edits, edit{v.Index, len(v.Raw), to(v)})
		}
	}
	as := func(value string) func(gjson.Result) string { return func(gjson.Result) string { return value } }
	more := func(v gjson.Result) string { return strconv.FormatInt(v.Int()+int64(s.sent), 10) }
	change("meta_info.id", as(s.id))
	change("meta_info.prompt_tokens", as(strconv.Itoa(len(s.prompt))))
	change("meta_info.completion_tokens", more)
	change("meta_info.cached_tokens", as(strconv.Itoa(s.cached)))
	change("meta_info.cached_tokens_details", as(cmp.Or(s.details, "null")))
	change("meta_info.finish_reason.length", more)
	change("meta_info.weight_versions.0.end", more)
	change("prompt_token_ids", func(gjson.Result) string { return tokenList(s.prompt) })
	return append([]byte("data:"), applied(event[from:], edits)...)
}

// edit replaces n bytes at a place.
type edit struct {
	at, n int
	by    string
}

// applied returns b with edits, which do not overlap.
func applied(b []byte, edits []edit) (out []byte) {
	slices.SortFunc(edits, func(a, b edit) int { return cmp.Compare(a.at, b.at) })
	from := 0
	for _, e := range edits {
		if e.at < from { // of a member that is there twice
			continue
		}
		out = append(append(out, b[from:e.at]...), e.by...)
		from = e.at + e.n
	}
	return append(out, b[from:]...)
}

// closeGenerated is close for an answer of generateRoute.
func (s *Migration) closeGenerated(out []byte) []byte {
	if !s.finished {
		data, _ := bytes.CutPrefix(s.last, []byte("data:"))
		if v := gjson.GetBytes(data, "meta_info.finish_reason"); v.Index > 0 {
			out = append(append(out, "data:"...), splice(data, v.Index, len(v.Raw), fmt.Sprintf(`{"type":"length","length":%d}`, len(s.tokens)))...)
		}
	}
	return append(out, "data: [DONE]\n\n"...)
}
