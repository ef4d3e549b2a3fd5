package proxy

import (
	"bytes"
	"cmp"
	"fmt"
	"strconv"

	"github.com/tidwall/gjson"

	"kvrouter/internal/jsonbody"
)

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

func (*sglangGenerate) limit(body *jsonbody.Body) (most int, limited bool) {
	most = newTokens(body.Get("sampling_params"))
	return most, most > 0
}

func (g *sglangGenerate) rest(s *Migration, e *edits) {
	body := e.client
	var fields, less []jsonbody.Field
	for _, m := range jsonbody.Members(body.Get("sampling_params")) {
		fields = append(fields, jsonbody.Field{Key: m.Key, Raw: m.Value.Raw})
		if m.Key == "min_new_tokens" && given(m.Value) {
			less = append(less, jsonbody.Field{Key: m.Key, Raw: strconv.Itoa(max(0, number(m.Value)-s.sent))})
		}
	}
	if most, limited := g.limit(body); limited {
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
	edits := []edit{{text.Index, len(text.Raw), `"` + g.base + text.Raw[1:]}, {at - 1 - from, 1 + length, tokenList(ids)}}
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
	change("meta_info.cached_tokens_details", as(cmp.Or(g.details, "null")))
	change("meta_info.finish_reason.length", more)
	change("meta_info.weight_versions.0.end", more)
	change("prompt_token_ids", func(gjson.Result) string { return tokenList(s.prompt) })
	return append([]byte("data:"), applied(event[from:], edits)...)
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
