package chat

import (
	"fmt"
	"iter"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// SGLangRequest holds the fields of a chat request that determine its prompt, as
// SGLang 0.5.23 reads them (ChatCompletionRequest).
type SGLangRequest struct {
	messages []sglangMessage
	tools    string           // JSON list that the template sees; empty: none
	vars     []jsonbody.Field // further variables of the template
	prefill  bool             // continue_final_message
	// IDs is input_ids: tokens that replace the rendered prompt.
	IDs gjson.Result
}

// sglangMessage is one message after the request's own checks.
type sglangMessage struct {
	role  string
	text  string // of content that is one string
	raw   string // the same as JSON; empty: not in this form
	list  bool   // the content is a list of parts
	parts []sglangPart
	rest  []jsonbody.Field // fields after role and content, in SGLang's order
}

// sglangPart is one part of a content list that SGLang hands on.
type sglangPart struct {
	text string
	raw  string // the whole part as the template sees it, JSON
	tool bool   // a tool_reference, not a text
}

var (
	sglangRoles   = []string{"system", "assistant", "tool", "function", "developer", "latest_reminder", "root"}
	sglangEfforts = []string{"none", "minimal", "medium", "high", "xhigh", "ultra", "max"}
	// sglangCalls are names in chat_template_kwargs that steer or break the call
	// that renders the template.
	sglangCalls = append([]string{"tools", "add_generation_prompt", "continue_final_message"}, reservedKwargs...)
)

// parseSGLang reads a chat request as SGLang does. defaults are the members of
// the server's --default-chat-template-kwargs.
func parseSGLang(body *jsonbody.Body, defaults []jsonbody.Field) (*SGLangRequest, error) {
	if !utf8.Valid(body.Raw) {
		return nil, NotRenderable("the body is not UTF-8")
	}
	if body.LoneSurrogate {
		return nil, NotRenderable("the body has an unpaired surrogate")
	}
	for _, key := range []string{"thinking", "task", "chat_template"} {
		if body.Get(key).Type != gjson.Null {
			return nil, NotRenderable("the request carries %q", key)
		}
	}
	chat := &SGLangRequest{IDs: body.Get("input_ids")}
	if v := body.Get("continue_final_message"); v.Exists() {
		if err := ReadBool(v, "continue_final_message", &chat.prefill); err != nil {
			return nil, err
		}
	}
	if !body.Get("messages").IsArray() {
		return nil, NotRenderable("messages is not a list")
	}
	list := body.Messages()
	if len(list) == 0 || len(list) > maxMessages {
		return nil, NotRenderable("%d messages", len(list))
	}
	chat.messages = make([]sglangMessage, 0, len(list))
	for i, m := range list {
		message, err := parseSGLangMessage(m)
		if err != nil {
			return nil, fmt.Errorf("message %d: %w", i, err)
		}
		chat.messages = append(chat.messages, message)
	}
	var err error
	if chat.tools, err = sglangTools(body.Get("tools"), body.Get("tool_choice")); err != nil {
		return nil, err
	}
	return chat, chat.setVars(body, defaults)
}

func parseSGLangMessage(m jsonbody.MessageView) (msg sglangMessage, err error) {
	if !m.Value.IsObject() {
		return msg, NotRenderable("not an object")
	}
	field := func(key string) gjson.Result { return jsonbody.FieldOf(m.Fields, key) }
	role, content := field("role"), field("content")
	msg.role = role.Str
	if msg.role != "user" {
		msg.role = strings.ToLower(msg.role)
	}
	if role.Type != gjson.String || msg.role != "user" && !slices.Contains(sglangRoles, msg.role) {
		return msg, NotRenderable("the role %.40s is unknown", role.Raw)
	}
	switch {
	case content.Type == gjson.String:
		msg.text, msg.raw = content.Str, content.Raw
	case content.IsArray():
		msg.list = true
		jsonbody.EachElement(content.Raw, func(p gjson.Result) bool {
			err = msg.addPart(p)
			return err == nil
		})
		if err != nil {
			return msg, err
		}
	case content.Type != gjson.Null || msg.role == "user":
		return msg, NotRenderable("the content is neither text nor a list")
	}
	if msg.role == "user" {
		return msg, nil // its other fields are dropped
	}
	for _, key := range []string{"tool_call_id", "name", "phase", "reasoning_content"} {
		switch v := field(key); {
		case v.Type == gjson.String:
			msg.rest = append(msg.rest, jsonbody.Field{Key: key, Raw: v.Raw})
		case v.Type != gjson.Null:
			return msg, NotRenderable("%s is not a string", key)
		}
	}
	for _, key := range []string{"tools", "prefix"} {
		if field(key).Type != gjson.Null {
			return msg, NotRenderable("a message carries %q", key)
		}
	}
	if calls := field("tool_calls"); calls.Type != gjson.Null {
		dumped, err := sglangCallsOf(calls, msg.role == "assistant")
		if err != nil {
			return msg, err
		}
		msg.rest = append(msg.rest, jsonbody.Field{Key: "tool_calls", Raw: dumped})
	}
	return msg, nil
}

// addPart reads one part of a content list. Thoughts are checked and left out, as
// there.
func (m *sglangMessage) addPart(p gjson.Result) error {
	fields := jsonbody.Members(p)
	kind, text, thinking, name := jsonbody.FieldOf(fields, "type").Str, jsonbody.FieldOf(fields, "text"), jsonbody.FieldOf(fields, "thinking"),
		jsonbody.FieldOf(fields, "name")
	switch {
	case !p.IsObject():
	case kind == "text" && text.Type == gjson.String:
		m.parts = append(m.parts, sglangPart{text: text.Str, raw: `{"type":"text","text":` + text.Raw + `}`})
		return nil
	case (kind == "thinking" || kind == "reasoning") && m.role == "assistant":
		if (text.Type == gjson.String) != (thinking.Type == gjson.String) && (text.Type == gjson.Null || thinking.Type == gjson.Null) {
			return nil
		}
	case kind == "tool_reference" && name.Type == gjson.String:
		m.parts = append(m.parts, sglangPart{raw: `{"type":"tool_reference","name":` + name.Raw + `}`, tool: true})
		return nil
	}
	return NotRenderable("a content part of type %.40q for role %q", kind, m.role)
}

// setVars collects the template's further variables: the request's own reasoning
// fields, and over them its chat_template_kwargs, which the server's defaults
// complete.
func (c *SGLangRequest) setVars(body *jsonbody.Body, defaults []jsonbody.Field) error {
	kwargs := body.Get("chat_template_kwargs")
	if kwargs.Type != gjson.Null && !kwargs.IsObject() {
		return NotRenderable("chat_template_kwargs is not an object")
	}
	given := jsonbody.Members(kwargs)
	if len(given) > maxKwargs {
		return NotRenderable("%d chat_template_kwargs", len(given))
	}
	var vars []jsonbody.Field
	add := func(key, raw string) {
		if !slices.ContainsFunc(vars, func(f jsonbody.Field) bool { return f.Key == key }) {
			vars = append(vars, jsonbody.Field{Key: key, Raw: raw})
		}
	}
	for _, f := range given {
		add(f.Key, f.Value.Raw)
	}
	effort, thinks, err := sglangEffort(body)
	if err != nil {
		return err
	}
	if effort != "" || thinks {
		thinking := strconv.FormatBool(effort != `"none"`)
		add("thinking", thinking)
		add("enable_thinking", thinking)
	}
	for _, f := range defaults {
		add(f.Key, f.Raw)
	}
	for i, f := range vars {
		switch {
		case slices.Contains(sglangCalls, f.Key), slices.Contains(jinjaGlobals, f.Key):
			return NotRenderable("chat_template_kwargs carries %q", f.Key)
		case f.Key == "documents" && !areObjects(gjson.Parse(f.Raw)):
			return NotRenderable("documents is not a list of objects")
		case f.Key == "reasoning_effort":
			v := gjson.Parse(f.Raw)
			if v.Type == gjson.Null {
				return NotRenderable("reasoning_effort is null in chat_template_kwargs")
			}
			if v.Type != gjson.String || !slices.Contains(sglangEfforts, v.Str) {
				return NotRenderable("reasoning_effort %.40s", f.Raw)
			}
			effort = vars[i].Raw
		}
	}
	if effort != "" {
		add("reasoning_effort", effort)
	}
	c.vars = vars
	return nil
}

// sglangEffort reads reasoning_effort and the object reasoning, which OpenRouter's
// clients send. The effort "low" and numbers are left to the engine: what they do
// depends on the model.
func sglangEffort(body *jsonbody.Body) (effort string, thinks bool, err error) {
	v := body.Get("reasoning_effort")
	if r := body.Get("reasoning"); r.IsObject() {
		for _, f := range jsonbody.Members(r) {
			switch {
			case f.Key == "effort" && f.Value.Type == gjson.String:
				v = f.Value
			case (f.Key == "enabled" || f.Key == "enable") && f.Value.Type == gjson.True:
				thinks = true
			case (f.Key == "enabled" || f.Key == "enable") && f.Value.Type == gjson.False, f.Key == "summary":
			default:
				return "", false, NotRenderable("reasoning carries %.40q", f.Key)
			}
		}
	}
	if v.Type == gjson.Null {
		return "", thinks, nil
	}
	if v.Type != gjson.String || !slices.Contains(sglangEfforts, v.Str) {
		return "", false, NotRenderable("reasoning_effort %.40s", v.Raw)
	}
	return string(jsonbody.AppendString(nil, v.Str)), thinks, nil
}

// Texts yields the texts that every rendered prompt contains. Templates may drop
// earlier assistant messages, so those are excluded.
func (c *SGLangRequest) Texts() iter.Seq[string] {
	return func(yield func(string) bool) {
		for i := range c.messages {
			m := &c.messages[i]
			if m.role == "assistant" {
				continue
			}
			if !yield(m.text) {
				return
			}
			for j := range m.parts {
				if !yield(m.parts[j].text) {
					return
				}
			}
		}
	}
}

// settle brings the messages into the form that the template sees, and returns the
// text of the final one if the model is to continue it. A final answer that it is
// not to continue becomes the user's.
func (c *SGLangRequest) settle(wantsParts bool) (prefill string) {
	for i := range c.messages {
		c.messages[i].flatten(wantsParts)
	}
	at := len(c.messages) - 1
	last := &c.messages[at]
	switch {
	case last.role != "assistant" || last.list:
	case c.prefill:
		prefill, c.messages = last.text, c.messages[:at]
	default:
		last.role, last.rest = "user", nil
	}
	return prefill
}

// flatten joins a list of texts where the template or the role wants one string.
func (m *sglangMessage) flatten(wantsParts bool) {
	isTool := func(p sglangPart) bool { return p.tool }
	if !m.list || wantsParts && (m.role != "tool" || slices.ContainsFunc(m.parts, isTool)) {
		return
	}
	var texts []string
	for _, p := range m.parts {
		if !p.tool {
			texts = append(texts, p.text)
		}
	}
	m.list, m.text, m.raw = false, strings.Join(texts, " "), ""
}

// appendContext appends the template's variables as a JSON object.
func (c *SGLangRequest) appendContext(out []byte, special []jsonbody.Field) []byte {
	size := 256
	for text := range c.Texts() {
		size += len(text) + 64
	}
	out = slices.Grow(out, size+size/8)
	out = append(out, `{"messages":[`...)
	for i := range c.messages {
		if i > 0 {
			out = append(out, ',')
		}
		out = c.messages[i].appendTo(out)
	}
	return appendContextEnd(out, c.tools, jsonbody.MergeFields(special, c.vars), true)
}

func (m *sglangMessage) appendTo(out []byte) []byte {
	out = append(out, `{"role":`...)
	out = jsonbody.AppendString(out, m.role)
	if !m.list {
		out = append(out, `,"content":`...)
		if m.raw != "" {
			out = append(out, m.raw...)
		} else {
			out = jsonbody.AppendString(out, m.text)
		}
	}
	for _, f := range m.rest {
		out = append(out, ',')
		out = jsonbody.AppendString(out, f.Key)
		out = append(out, ':')
		out = append(out, f.Raw...)
	}
	if m.list { // which comes last there
		out = append(out, `,"content":[`...)
		for i, p := range m.parts {
			if i > 0 {
				out = append(out, ',')
			}
			out = append(out, p.raw...)
		}
		out = append(out, ']')
	}
	return append(out, '}')
}

// partsLoop finds a loop over a message's content by the names under which SGLang
// looks for it.
var partsLoop = regexp.MustCompile(`\{%[-+]?\s*for\s+[\w,\s()]+\s+in\s+(?:message|msg|m)(?:\.content\b|\[\s*['"]content['"]\s*\])\s*(?:%\}|-%\}|\+%\}|\||\[|if\b|is\b|recursive\b)`)

// sglangWantsParts reports whether SGLang hands the template content as a list of
// parts.
func sglangWantsParts(template string) bool {
	for _, word := range []string{"image", "audio", "video", "vision"} {
		if strings.Contains(template, word) {
			return true
		}
	}
	return partsLoop.MatchString(template)
}
