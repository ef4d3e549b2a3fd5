package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/testkit"
)

// dumpTemplate shows all that a template can see of a chat.
const dumpTemplate = `{{ messages|tojson }} {{ tools|tojson }} {{ documents|tojson }} {{ add_generation_prompt }}`

// dumpParts is dumpTemplate for content in parts.
const dumpParts = `{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}` + dumpTemplate

func renderBody(t *testing.T, template, body string, kind Kind, options Options) (string, error) {
	t.Helper()
	compiled, err := compileTemplate(template)
	if err != nil {
		t.Fatal(err)
	}
	defer compiled.Close()
	req, err := parseText(body, kind, options)
	if err != nil {
		return "", err
	}
	return takeText(renderWith(compiled, req, nil))
}

// parseText parses a body and reads it as a chat request.
func parseText(body string, kind Kind, options Options) (*Request, error) {
	parsed, err := ParseBody([]byte(body))
	if err != nil {
		return nil, err
	}
	return Parse(parsed, kind, options)
}

// takeText copies a rendered chat's text and frees it.
func takeText(chat Rendered, err error) (string, error) {
	defer chat.Free()
	return strings.Clone(chat.Text), err
}

func TestChatNormalisation(t *testing.T) {
	const hi = `{"role":"user","content":"hi"}`
	for _, test := range []struct {
		name, template, body, want string
		kind                       Kind
	}{
		{"text stays text", dumpTemplate, `{"messages":[` + hi + `]}`, `[{"role": "user", "content": "hi"}] null null True`, 0},
		{"text becomes a part", dumpParts, `{"messages":[` + hi + `]}`, `[{"role": "user", "content": [{"type": "text", "text": "hi"}]}] null null True`, 0},
		{"parts are joined by lines, empty ones dropped", dumpTemplate, `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":""},{"type":"text","text":"b","cache_control":{}}]}]}`, `[{"role": "user", "content": "a\nb"}] null null True`, 0},
		{"unknown fields of parts reach the template", dumpParts, `{"messages":[{"role":"user","content":[{"cache_control":{"z":1},"text":"b","type":"text"}]}]}`, `[{"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"z": 1}}]}] null null True`, 0},
		{"null content of an assistant is empty", dumpTemplate, `{"messages":[` + hi + `,{"role":"assistant","content":null}]}`, `[{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}] null null True`, 0},
		{"null content of an assistant is no part", dumpParts, `{"messages":[{"role":"assistant","content":null}]}`, `[{"role": "assistant", "content": []}] null null True`, 0},
		{"tool calls in the order of the models, arguments parsed", dumpTemplate,
			`{"messages":[{"role":"assistant","tool_calls":[{"x":1,"type":"function","function":{"name":"f","y":2,"arguments":"{\"b\":1.0,\"a\":[]}"},"id":"i"}]}]}`,
			`[{"role": "assistant", "content": "", "tool_calls": [{"id": "i", "function": {"arguments": {"b": 1.0, "a": []}, "name": "f", "y": 2}, "type": "function", "x": 1}]}] null null True`, 0},
		{"arguments that are no object become one", dumpTemplate,
			`{"messages":[{"role":"assistant","tool_calls":[{"id":"i","type":"function","function":{"name":"f","arguments":"[1]"}},{"id":"j","type":"function","function":{"name":"g","arguments":"{oops"}}]}]}`,
			`[{"role": "assistant", "content": "", "tool_calls": [{"id": "i", "function": {"arguments": {}, "name": "f"}, "type": "function"}, {"id": "j", "function": {"arguments": {}, "name": "g"}, "type": "function"}]}] null null True`, 0},
		{"empty tool calls vanish", dumpTemplate, `{"messages":[{"role":"assistant","content":"x","tool_calls":[]}]}`, `[{"role": "assistant", "content": "x"}] null null True`, 0},
		{"a tool's parts are joined for every template", dumpParts, `{"messages":[{"role":"tool","tool_call_id":"i","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}`, `[{"role": "tool", "content": "a\nb", "tool_call_id": "i"}] null null True`, 0},
		{"reasoning_content is reasoning", dumpTemplate, `{"messages":[{"role":"assistant","content":"x","reasoning_content":"r"}]}`, `[{"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "r"}] null null True`, 0},
		{"reasoning_content is unknown to /tokenize", dumpTemplate, `{"messages":[{"role":"assistant","content":"x","reasoning_content":"r"}]}`, `[{"role": "assistant", "content": "x"}] null null True`, Tokenize},
		{"developer becomes system", dumpTemplate, `{"messages":[{"role":"developer","content":"d"},` + hi + `]}`, `[{"role": "system", "content": "d"}, {"role": "user", "content": "hi"}] null null True`, 0},
		{"developer after system joins it", dumpTemplate, `{"messages":[{"role":"system","content":"s"},` + hi + `,{"role":"developer","content":"d"}]}`, `[{"role": "system", "content": "s\n\nd"}, {"role": "user", "content": "hi"}] null null True`, 0},
		{"developer stays where the template knows it", dumpTemplate + `{# 'developer' #}`, `{"messages":[{"role":"developer","content":"d"}]}`, `[{"role": "developer", "content": "d", "tools": null}] null null True`, 0},
		{"a billing header goes", dumpTemplate, `{"messages":[{"role":"system","content":"x-anthropic-billing-header: 1\nkeep"}]}`, `[{"role": "system", "content": "keep"}] null null True`, 0},
		{"tools are dumped with their known fields", dumpTemplate, `{"messages":[` + hi + `],"tools":[{"zz":1,"function":{"parameters":{"b":1,"a":2},"name":"n","q":1,"strict":false},"type":"function"}]}`,
			`[{"role": "user", "content": "hi"}] [{"type": "function", "function": {"name": "n", "description": null, "parameters": {"b": 1, "a": 2}, "strict": false}}] null True`, 0},
		{"documents", dumpTemplate, `{"messages":[` + hi + `],"documents":[{"t":"x"}],"add_generation_prompt":false}`, `[{"role": "user", "content": "hi"}] null [{"t": "x"}] False`, 0},
		{"the last of two equal keys counts", dumpTemplate, `{"messages":[],"messages":[{"role":"user","role":"system","content":"a","content":"b"}]}`, `[{"role": "system", "content": "b"}] null null True`, 0},
		{"kwargs reach the template, null and auto do not", `{{ a }}{{ b is defined }}{{ c is defined }}`, `{"messages":[` + hi + `],"chat_template_kwargs":{"a":"x","b":null,"c":"auto"}}`, `xFalseFalse`, 0},
		{"effort switches thinking on", `{{ reasoning_effort }} {{ enable_thinking }}`, `{"messages":[` + hi + `],"reasoning_effort":"low"}`, `low True`, 0},
		{"thinking that was chosen stays", `{{ enable_thinking }}`, `{"messages":[` + hi + `],"reasoning_effort":"low","chat_template_kwargs":{"enable_thinking":false}}`, `False`, 0},
		{"a continued message is open-ended", `{% for m in messages %}<{{ m.content }}>{% endfor %}`, `{"messages":[` + hi + `,{"role":"assistant","content":"so "}],"add_generation_prompt":false,"continue_final_message":true}`, `<hi><so `, 0},
		{"a continued message that the template trims", `{% for m in messages %}<{{ m.content|trim }}>{% endfor %}`, `{"messages":[` + hi + `,{"role":"assistant","content":"so "}],"add_generation_prompt":false,"continue_final_message":true}`, `<hi><so`, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := renderBody(t, test.template, test.body, test.kind, Options{})
			if err != nil || got != test.want {
				t.Errorf("%v\n got %s\nwant %s", err, got, test.want)
			}
		})
	}
}

func TestToolsHiddenWhenChoiceIsNone(t *testing.T) {
	const body = `{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"n"}}],"tool_choice":"none"}`
	shown, err := renderBody(t, `{{ tools|length }}`, body, Completion, Options{})
	if err != nil || shown != "1" {
		t.Errorf("tools are shown by default: %q, %v", shown, err)
	}
	hidden, err := renderBody(t, `{{ tools is none }}`, body, Completion, Options{ExcludeToolsWhenNone: true})
	if err != nil || hidden != "True" {
		t.Errorf("the engine's flag hides them: %q, %v", hidden, err)
	}
}

func TestDefaultKwargsGiveWayToTheRequests(t *testing.T) {
	options := Options{DefaultKwargs: []jsonbody.Field{{Key: "a", Raw: `"default"`}, {Key: "b", Raw: `"kept"`}}}
	got, err := renderBody(t, `{{ a }} {{ b }}`, `{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"a":"own","b":null}}`, Completion, options)
	if err != nil || got != "own kept" {
		t.Errorf("%q, %v", got, err)
	}
}

// What vLLM refuses, or treats in ways unknown here, is the engine's to decide.
func TestNotRenderable(t *testing.T) {
	user := func(content string) string { return `{"messages":[{"role":"user","content":` + content + `}]}` }
	with := func(more string) string { return `{"messages":[{"role":"user","content":"hi"}],` + more + `}` }
	for name, body := range map[string]string{
		"not JSON":             `{"messages":`,
		"not an object":        `[]`,
		"no messages":          `{}`,
		"empty messages":       `{"messages":[]}`,
		"not UTF-8":            "{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}",
		"half a surrogate":     user(`"\ud800"`),
		"image":                user(`[{"type":"image_url","image_url":{"url":"http://x/y.png"}}]`),
		"audio":                user(`[{"type":"input_audio","input_audio":{"data":"","format":"wav"}}]`),
		"video":                user(`[{"type":"video_url","video_url":{"url":"x"}}]`),
		"file":                 user(`[{"type":"file","file":{"file_id":"x"}}]`),
		"prompt embeds":        user(`[{"type":"prompt_embeds","data":"x"}]`),
		"unknown part":         user(`[{"type":"hologram","text":"x"}]`),
		"text with a uuid":     user(`[{"type":"text","text":"x","uuid":"1"}]`),
		"part without a type":  user(`[{"text":"x"}]`),
		"plain string as part": user(`["x"]`),
		"null from a user":     user(`null`),
		"number as content":    user(`3`),
		"role missing":         `{"messages":[{"content":"x"}]}`,
		"call without id":      `{"messages":[{"role":"assistant","tool_calls":[{"type":"function","function":{"name":"f","arguments":"{}"}}]}]}`,
		"arguments as object":  `{"messages":[{"role":"assistant","tool_calls":[{"id":"i","type":"function","function":{"name":"f","arguments":{}}}]}]}`,
		"custom call":          `{"messages":[{"role":"assistant","tool_calls":[{"id":"i","type":"custom","custom":{"name":"f","input":""}}]}]}`,
		"NaN in arguments":     `{"messages":[{"role":"assistant","tool_calls":[{"id":"i","type":"function","function":{"name":"f","arguments":"{\"a\": NaN}"}}]}]}`,
		"own template":         with(`"chat_template":"x"`),
		"own template below":   with(`"chat_template_kwargs":{"chat_template":"x"}`),
		"tokenize below":       with(`"chat_template_kwargs":{"tokenize":true}`),
		"no tools":             with(`"tools":[]`),
		"tool without name":    with(`"tools":[{"type":"function","function":{}}]`),
		"continue and prompt":  with(`"continue_final_message":true`),
		"own tokens":           with(`"kv_transfer_params":{"prompt_token_ids":[1]}`),
		"flag of another kind": with(`"add_generation_prompt":"yes"`),
		"unknown effort":       with(`"reasoning_effort":"huge"`),
		"number too large":     with(`"chat_template_kwargs":{"a":123456789012345678901234567890}`),
	} {
		t.Run(name, func(t *testing.T) {
			got, err := renderBody(t, dumpTemplate, body, Completion, Options{})
			if !errors.Is(err, ErrNotRenderable) {
				t.Errorf("rendered as %q, %v", got, err)
			}
		})
	}
}

func TestContentFormatDetection(t *testing.T) {
	for _, test := range []struct {
		template string
		parts    bool
	}{
		{`{% for m in messages %}{{ m.content }}{% endfor %}`, false},
		{`{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}`, true},
		{`{% for m in messages %}{% for c in m['content'] %}{{ c }}{% endfor %}{% endfor %}`, true},
		{`{% for m in messages[1:] %}{% for c in m.content|list %}{% endfor %}{% endfor %}`, true},
		{`{% set rest = messages[1:] %}{% for m in rest %}{% for c in m.content %}{% endfor %}{% endfor %}`, true},
		{`{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}`, true},
		{`{% for m in messages %}{% set text = m.content %}{% for c in text %}{% endfor %}{% endfor %}`, false},
		{`{% macro show(x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}`, true},
		{`{% macro show(a, x) %}{% for c in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(1, x=m.content) }}{% endfor %}`, true},
		{`{% macro show(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ show(tools) }}`, false},
		{`{% set ns.x = messages %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}`, false},
		{`{% for i, m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}`, false},
	} {
		compiled, err := compileTemplate(test.template)
		if err != nil {
			t.Fatal(test.template, err)
		}
		if compiled.WantsParts != test.parts {
			t.Errorf("%s: parts %v, want %v", test.template, compiled.WantsParts, test.parts)
		}
		compiled.Close()
	}
}

func TestTemplateErrorsAreText(t *testing.T) {
	if _, err := compileTemplate(`{% if %}`); err == nil || !strings.Contains(err.Error(), "syntax error") {
		t.Errorf("compiling: %v", err)
	}
	if _, err := renderSnippet(`{{ raise_exception('No ' ~ 1) }}`, []byte(`{}`)); err == nil || !strings.Contains(err.Error(), "No 1") {
		t.Errorf("rendering: %v", err)
	}
	if _, err := renderSnippet(`x`, []byte(`{`)); err == nil {
		t.Error("a broken context was rendered")
	}
	deep := strings.Repeat(`{"a":`, 500) + `1` + strings.Repeat(`}`, 500)
	if _, err := renderSnippet(`x`, []byte(deep)); err == nil {
		t.Error("a context of 500 levels was rendered")
	}
}

// Parsing must not take longer than the size of the body warrants: what is
// quadratic takes 64 times as long for 8 times the keys. The time is that of the
// process on the CPU, the least of some runs, so that other load does not count.
func TestManyKeysTakeTimeInProportion(t *testing.T) {
	cost := func(keys int) time.Duration {
		var many strings.Builder
		for i := range keys {
			fmt.Fprintf(&many, `"k%d":1,`, i)
		}
		object := `{` + many.String() + `"k5":2}`
		bodies := []string{
			`{` + many.String() + `"messages":[{"role":"user","content":"hi"}]}`,
			`{"messages":[{` + many.String() + `"role":"user","content":"hi"}]}`,
			`{"messages":[{"role":"user","content":[{` + many.String() + `"type":"text","text":"hi"}]}]}`,
			`{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":` + object + `}`,
			`{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"n","parameters":` + object + `}}]}`,
		}
		least := time.Duration(math.MaxInt64)
		for range 3 {
			runtime.GC()
			start := testkit.CPUTime()
			for _, body := range bodies {
				renderBody(t, dumpTemplate, body, Completion, Options{})
				Features(parsed(t, body))
			}
			least = min(least, testkit.CPUTime()-start)
		}
		return least
	}
	const keys, factor = 4000, 8
	few, many := cost(keys), cost(factor*keys)
	if ratio := float64(many) / float64(few); ratio > 3*factor {
		t.Errorf("%d keys cost %v, %d keys %v: %.0f times as much", keys, few, factor*keys, many, ratio)
	}
}

func TestLastOfEqualKeysCounts(t *testing.T) {
	for _, keys := range []int{6, 100} { // few are searched, many are indexed
		var object strings.Builder
		for i := range keys {
			fmt.Fprintf(&object, `"k%d":1,`, i)
		}
		list := jsonbody.Members(gjson.Parse(`{` + object.String() + `"k5":2}`))
		if len(list) != keys || list[5].Key != "k5" || list[5].Value.Int() != 2 {
			t.Errorf("%d keys: %+v", keys, list)
		}
	}
}

func FuzzChatBody(f *testing.F) {
	for _, c := range testkit.ChatsForParity() {
		f.Add([]byte(c.Body))
	}
	f.Add([]byte(`{"messages":[{"role":"user","content":"\ud83d\ude00\\ud800"}]}`))
	var templates []*jinja
	for _, text := range []string{dumpTemplate, dumpParts} {
		compiled, err := compileTemplate(text)
		if err != nil {
			f.Fatal(err)
		}
		f.Cleanup(compiled.Close)
		templates = append(templates, compiled)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for kind, template := range templates {
			if b, ok := jsonbody.Parse(body); ok {
				Features(b)
			}
			req, err := parseText(string(body), Kind(kind), Options{})
			if err != nil {
				if !errors.Is(err, ErrNotRenderable) {
					t.Fatalf("an error of another kind: %v", err)
				}
				continue
			}
			if err := req.fitTemplate(template); err != nil {
				continue
			}
			context, _, err := req.appendContext(nil, template, nil)
			if err != nil {
				continue
			}
			if !json.Valid(context) {
				t.Fatalf("the context is not JSON: %s", context)
			}
			if len(context) > 8*len(body)+1000 {
				t.Fatalf("%d bytes became a context of %d", len(body), len(context))
			}
			if text, err := takeText(template.Render(context)); err == nil && len(text) > 64*len(body)+1000 {
				t.Fatalf("%d bytes became a text of %d", len(body), len(text))
			}
		}
	})
}
