package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
)

// script is how a fake SGLang answers: the token at place p of a sequence is 1000 + p, and its
// bytes are the piece of that place, the first one being that of the answer to a prompt of three
// tokens. It makes text of them as SGLang's detokenizer does, which shows the beginning of an
// incomplete text up to a space or a Chinese character.
type script struct {
	pieces []string
	burst  int    // tokens of an event
	deltas bool   // its events of generateRoute have the new part alone
	fault  string // of the second answer: "other tokens", "other prompt"
}

// pieces are twenty tokens, many of which end within a character.
var pieces = []string{"Hi", " \xf0\x9f", "\x8e", "\x89", " \xe2\x80", "\x9cYes", "\xe2\x80\x9d ", "\xe4", "\xbd", "\xa0\xe5", "\xa5\xbd", "好", "\xe6\x88", "\x91 ", "  ", "x", "\xc3", "\xa9", "é", "!"}

// decode returns the text of token ids.
func (c *script) decode(ids []uint32) (string, error) {
	var text []byte
	for _, id := range ids {
		if place := int(id) - 1003; place >= 0 && place < len(c.pieces) {
			text = append(text, c.pieces[place]...)
		} else {
			text = append(text, '?')
		}
	}
	return strings.ToValidUTF8(string(text), unknownRune), nil
}

// runes is the text of tokens in characters.
func (c *script) runes(ids []uint32) []rune {
	text, _ := c.decode(ids)
	return []rune(text)
}

// printable is the part of an incomplete text that SGLang shows.
func printable(text []rune) []rune {
	n := len(text)
	han := func(i int) bool { return n >= i && text[n-i] >= 0x4e00 && text[n-i] <= 0x9fff }
	switch {
	case han(1):
		return text
	case han(2):
		return text[:n-1]
	}
	for ; n > 0 && text[n-1] != ' '; n-- {
	}
	return text[:n]
}

// serve answers a completion or a request to generateRoute.
func (c *script) serve(v *writer, w http.ResponseWriter, r *http.Request, body *jsonbody.Body, dies int) {
	generate := r.URL.Path == generateRoute
	given, most := body.Get("prompt"), int(body.Get("max_tokens").Int())
	if generate {
		given, most = body.Get("input_ids"), newTokens(body.Get("sampling_params"))
	}
	ids := []uint32{1, 2, 3} // of the prompt "hi"
	fault := ""
	if v.requests.Load() > 1 {
		fault = c.fault
	}
	if given.IsArray() && fault != "other prompt" {
		ids = nil
		for _, id := range given.Array() {
			ids = append(ids, uint32(id.Int()))
		}
	}
	prompt := len(ids)
	w.Header().Set("Content-Type", "text/event-stream")
	id := fmt.Sprintf("answer-%p-%d", v, v.requests.Load())
	write := func(event string) {
		fmt.Fprintf(w, "data: %s\n\n", event)
		w.(http.Flusher).Flush()
	}
	head := fmt.Sprintf(`{"id":%q,"object":"text_completion","created":%d,"model":"m",`, id, 1000+v.requests.Load())
	cached := 2
	surr, read := max(0, prompt-5), prompt
	var done, shown []rune // text of all before read, and what has been sent
	sent := prompt
	for i := range most {
		if i == dies {
			if sent > prompt {
				<-v.seen // or the router tries another worker instead
			}
			v.die(w, r)
			return
		}
		token := uint32(1000 + prompt + i)
		if fault == "other tokens" && i == 0 {
			token = 7
		}
		ids = append(ids, token)
		finish, last := "null", i == most-1
		before, after := c.runes(ids[surr:read]), c.runes(ids[surr:])
		text := after[min(len(before), len(after)):]
		whole := append(slices.Clone(done), text...)
		if !last && (len(text) == 0 || text[len(text)-1] == utf8.RuneError) {
			whole = append(slices.Clone(done), printable(text)...)
		} else {
			done, surr, read = whole, read, len(ids)
		}
		if !last && c.burst > 1 && i%c.burst != c.burst-1 {
			continue
		}
		part := whole[len(shown):]
		if shown = whole; last {
			finish = `"length"`
		}
		if generate {
			if last {
				finish = fmt.Sprintf(`{"type":"length","length":%d}`, most)
			}
			text, list := string(whole), ids[prompt:]
			if c.deltas {
				text, list = string(part), ids[sent:]
			}
			write(fmt.Sprintf(`{"text":%s,"output_ids":%s,"meta_info":{"id":%q,"finish_reason":%s,"prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":%d,"cached_tokens_details":{"device":%d,"host":0},"dp_rank":null}}`,
				Quoted(text), tokenList(list), id, finish, prompt, i+1, cached, cached))
		} else {
			more := ""
			if body.Get("return_token_ids").Bool() {
				if more = `,"token_ids":` + tokenList(ids[sent:]); sent == prompt {
					more += `,"prompt_token_ids":` + tokenList(ids[:prompt])
				}
			}
			write(fmt.Sprintf(`%s"choices":[{"index":0,"text":%s,"logprobs":null,"finish_reason":%s,"matched_stop":null%s}],"usage":null}`, head, Quoted(string(part)), finish, more))
		}
		sent = len(ids)
	}
	if dies == most {
		<-v.seen
		v.die(w, r)
		return
	}
	if !generate && body.Get("stream_options").Get("include_usage").Bool() {
		write(fmt.Sprintf(`%s"choices":[],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d},"reasoning_tokens":0}}`, head, prompt, prompt+most, most, prompt-3))
	}
	if dies > most {
		<-v.seen
		v.die(w, r)
		return
	}
	fmt.Fprint(w, "data: [DONE]\n\n")
}

// onSGLang returns a fake SGLang that answers with these tokens.
func onSGLang(dies func(int) int, c script) *writer {
	return &writer{dies: dies, kind: kv.EngineSGLang, script: &c, decode: c.decode}
}

// sum adds up what a client has: text, token ids, reasons of the end, identities, usage.
func sum(t *testing.T, path, events string) string {
	t.Helper()
	var text, rest string
	var ids []string
	seen := map[string]bool{}
	for line := range strings.Lines(events) {
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if !ok {
			continue
		}
		if !gjson.Valid(data) && data != "[DONE]" {
			t.Fatalf("no JSON: %s", data)
		}
		event := gjson.Parse(data)
		if path == generateRoute && event.Get("text").Exists() {
			list := event.Get("output_ids").Array()
			if !strings.HasPrefix(event.Get("text").Str, text) || len(list) < len(ids) {
				t.Errorf("an event takes back what the client has: %s, had %q", data, text)
			}
			text, ids = event.Get("text").Str, nil
			for _, id := range list {
				ids = append(ids, id.Raw)
			}
			meta := event.Get("meta_info")
			if meta.Get("completion_tokens").Int() != int64(len(ids)) {
				t.Errorf("completion_tokens of %s", data)
			}
			seen[meta.Get("id").Str] = true
			for _, key := range []string{"prompt_tokens", "cached_tokens", "cached_tokens_details"} {
				seen[key+meta.Get(key).Raw] = true
			}
			if f := meta.Get("finish_reason"); f.Type != gjson.Null {
				rest += f.Raw
			}
			continue
		}
		choice := event.Get("choices.0")
		text += choice.Get("text").Str
		for _, id := range choice.Get("token_ids").Array() {
			ids = append(ids, id.Raw)
		}
		if event.Get("id").Exists() {
			seen[event.Get("id").Str+event.Get("created").Raw] = true
		}
		rest += choice.Get("finish_reason").Str + choice.Get("prompt_token_ids").Raw
		if usage := event.Get("usage"); usage.IsObject() {
			rest += usage.Raw
		}
		if data == "[DONE]" {
			rest += data
		}
	}
	return fmt.Sprintf("%q %v %d %s", text, ids, len(seen), rest)
}

// TestSGLangStreamsGoOnWhereverTheyBreak has a worker die before each token, the last of which
// may end within a character, and compares what the client has with an answer that was not
// interrupted.
func TestSGLangStreamsGoOnWhereverTheyBreak(t *testing.T) {
	const usage = `,"stream_options":{"include_usage":true}`
	never := func(int) int { return -1 }
	for _, c := range []struct{ name, path, options string }{
		{"completion", completionRoute, usage},
		{"completion with token ids", completionRoute, usage + `,"return_token_ids":true`},
		{"completion with stop strings", completionRoute, `,"stop":["END"]`},
		{"generate", generateRoute, ""},
	} {
		for _, burst := range []int{1, 3} {
			whole, _ := answerOf(t, c.path, c.options, onSGLang(never, script{pieces: pieces, burst: burst}))
			for after := range len(pieces) + 2 {
				for _, again := range []int{-1, 2} { // tokens until the next worker dies, too
					name := fmt.Sprintf("%s of %d tokens an event, after %d", c.name, burst, after)
					if again > 0 {
						name += fmt.Sprintf(", then after %d", again)
					}
					if again > 0 && (burst > 1 || after == 0 || after+again > len(pieces)) {
						continue
					}
					dies := func(n int) int { return append([]int{0, after, again}, slices.Repeat([]int{-1}, 20)...)[n] }
					v := onSGLang(dies, script{pieces: pieces, burst: burst})
					got, result := answerOf(t, c.path, c.options, v)
					if want := sum(t, c.path, whole); sum(t, c.path, got) != want {
						t.Errorf("%s: the client has\n%s\nof an uninterrupted answer it has\n%s\n%s", name, sum(t, c.path, got), want, got)
					}
					if begun := after >= burst && (after <= len(pieces) || c.path == completionRoute && strings.Contains(c.options, "usage")); begun && result != MigratedOK {
						t.Errorf("%s: result %q", name, result)
					}
				}
			}
		}
	}
}

// TestAnUninterruptedSGLangStreamIsAsItCame holds that a client gets the bytes of the worker, but
// for what it has not requested.
func TestAnUninterruptedSGLangStreamIsAsItCame(t *testing.T) {
	never := func(int) int { return -1 }
	for _, path := range []string{completionRoute, generateRoute} {
		v := onSGLang(never, script{pieces: pieces})
		got, _ := answerOf(t, path, "", v)
		if strings.Contains(got, "token_ids") || strings.Count(got, "data: ") != 21 && path == completionRoute {
			t.Errorf("%s: %s", path, got)
		}
		body := <-v.bodies
		if asked := strings.Contains(body, "return_token_ids"); asked != (path == completionRoute) {
			t.Errorf("%s: the worker got %s", path, body)
		}
	}
}

// TestSGLangStreamsThatCannotGoOnSayWhy has a worker die during an answer that no other one can
// continue.
func TestSGLangStreamsThatCannotGoOnSayWhy(t *testing.T) {
	plain := strings.Split(strings.Repeat("ab ", 20)[:20], "")
	for name, c := range map[string]struct {
		path, options string
		after         int
		change        func(*writer)
		result, why   string
	}{
		"several answers":        {generateRoute, `,"sampling_params":{"n":2}`, 4, nil, MigratedRefused, whySeveral},
		"a list of settings":     {generateRoute, `,"sampling_params":[{}]`, 4, nil, MigratedRefused, whySeveral},
		"several completions":    {completionRoute, `,"n":2`, 4, nil, MigratedRefused, whySeveral},
		"a schema":               {generateRoute, `,"sampling_params":{"json_schema":"{}"}`, 4, nil, MigratedRefused, whyGuided},
		"a schema of completion": {completionRoute, `,"json_schema":"{}"`, 4, nil, MigratedRefused, whyGuided},
		"a penalty":              {generateRoute, `,"sampling_params":{"repetition_penalty":1.1}`, 4, nil, MigratedRefused, whyPenalty},
		"a regex that stops":     {completionRoute, `,"stop_regex":"a+"`, 4, nil, MigratedRefused, whyRegex},
		"log probabilities":      {generateRoute, `,"return_logprob":true`, 4, nil, MigratedRefused, whyLogprobs},
		"logprobs":               {completionRoute, `,"logprobs":1`, 4, nil, MigratedRefused, whyLogprobs},
		"hidden states":          {generateRoute, `,"return_hidden_states":true`, 4, nil, MigratedRefused, whyExtras},
		"parts alone":            {generateRoute, "", 4, func(v *writer) { v.script.deltas = true }, MigratedRefused, whyDeltas},
		"tokens not taken":       {generateRoute, "", 4, func(v *writer) { v.script.fault = "other prompt" }, MigratedFailed, whyNotTaken},
		"prompt not taken":       {completionRoute, "", 4, func(v *writer) { v.script.fault = "other prompt" }, MigratedFailed, whyNotTaken},
		"text not known":         {generateRoute, "", 6, func(v *writer) { v.decode = nil }, MigratedRefused, whyText},
		"text not decoded":       {completionRoute, "", 6, func(v *writer) { v.decode = func([]uint32) (string, error) { return "", errors.New("gone") } }, MigratedRefused, whyText},
		"another character":      {generateRoute, "", 2, func(v *writer) { v.script.pieces, v.script.fault = pieces, "other tokens" }, MigratedFailed, whyDiffers},
		"another text":           {completionRoute, "", 2, func(v *writer) { v.script.pieces, v.script.fault = pieces, "other tokens" }, MigratedFailed, whyDiffers},
	} {
		t.Run(name, func(t *testing.T) {
			v := onSGLang(func(n int) int { return []int{0, c.after, -1}[min(n, 2)] }, script{pieces: plain})
			if c.change != nil {
				c.change(v)
			}
			got, result := answerOf(t, c.path, c.options, v)
			if result != c.result || strings.Count(got, `"error"`) != 1 || !strings.Contains(got, c.why) {
				t.Errorf("result %q, want %q with %q:\n%s", result, c.result, c.why, got)
			}
		})
	}
}

// TestSGLangStreamsLeaveDrainedAndFailedWorkers moves answers from workers that hang in a drain,
// and from one that fails again and again.
func TestSGLangStreamsLeaveDrainedAndFailedWorkers(t *testing.T) {
	for _, path := range []string{completionRoute, generateRoute} {
		v := onSGLang(func(n int) int { return []int{0, 5, -1}[min(n, 2)] }, script{pieces: pieces})
		v.drains = true
		if got, result := answerOf(t, path, "", v); result != MigratedOK {
			t.Errorf("%s, drained: %q: %s", path, result, got)
		}
		v = onSGLang(func(int) int { return 2 }, script{pieces: pieces})
		got, result := answerOf(t, path, "", v)
		if result != MigratedFailed || !strings.Contains(got, whyLimit) || strings.Count(got, `"error"`) != 1 {
			t.Errorf("%s, again and again: %q: %s", path, result, got)
		}
	}
}

// FuzzSGLangMigration holds that no stream of a worker, however it is cut, breaks a Migration.
func FuzzSGLangMigration(f *testing.F) {
	f.Add(`data: {"text":"a ","output_ids":[1,2],"meta_info":{"id":"x","finish_reason":null,"prompt_tokens":3,"completion_tokens":2}}`+"\n\n", `data: {"text":"b","output_ids":[3],"meta_info":{"id":"y","finish_reason":{"type":"length","length":1},"prompt_tokens":5,"completion_tokens":1}}`+"\n\n", true, uint8(9))
	f.Add(`data: {"id":"a","created":1,"choices":[{"text":"x ","token_ids":[1,2],"prompt_token_ids":[1]}]}`+"\n\n", `data: {"choices":[{"text":"y","token_ids":[9],"prompt_token_ids":[1,2,3,1,2]}]}`+"\n\n", false, uint8(3))
	f.Add(`data: {"text":"","output_ids":[],"meta_info":{}}`+"\n\n", `data: {"text":"\ud83c`+"\n\n", true, uint8(200))
	f.Fuzz(func(t *testing.T, first, second string, generate bool, cut uint8) {
		body, _ := jsonbody.Parse([]byte(`{"stream":true,"max_tokens":50,"sampling_params":{"max_new_tokens":50}}`))
		route := completionRoute
		if generate {
			route = generateRoute
		}
		s := NewMigration(route, body, []uint32{1, 2, 3}, true, false, func(ids []uint32) (string, error) {
			return strings.Repeat("a", len(ids)-1) + unknownRune, nil
		})
		s.ask(&kv.Target{Engine: kv.EngineSGLang}, body)
		s.begun = true
		for _, text := range []string{first, second, first} {
			events := eventScanner{Migration: s, Generate: generate}
			for text := []byte(text); len(text) > 0; {
				n := min(len(text), int(cut)+1)
				events.Scan(text[:n])
				text = text[n:]
			}
			if s.rewind(); s.why != "" {
				break
			}
			if len(s.tokens) > len(first)+len(second) {
				t.Errorf("%d tokens", len(s.tokens))
			}
			s.rest(&edits{client: body})
		}
		if s.dialect != nil {
			s.dialect.close(s, nil)
		}
	})
}

// BenchmarkGeneratedMigration reads one event of an answer of 500 tokens to generateRoute.
func BenchmarkGeneratedMigration(b *testing.B) {
	body, _ := jsonbody.Parse([]byte(`{"stream":true}`))
	ids := slices.Repeat([]uint32{12345}, 500)
	event := fmt.Appendf(nil, `data: {"text":%q,"output_ids":%s,"meta_info":{"id":"x","finish_reason":null,"prompt_tokens":3,"completion_tokens":500}}`+"\n\n", strings.Repeat(" word", 500), tokenList(ids))
	s := NewMigration(generateRoute, body, []uint32{1, 2, 3}, true, false, nil)
	s.ask(&kv.Target{Engine: kv.EngineSGLang}, body)
	s.begun = true
	events := eventScanner{Migration: s, Generate: true}
	longer := bytes.Replace(event, []byte(`","output`), []byte(` more","output`), 1)
	b.SetBytes(int64(len(event)))
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%2 == 0 {
			events.Scan(event)
		} else {
			events.Scan(longer)
		}
	}
}
