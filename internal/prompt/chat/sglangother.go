package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// SystemRule is how SGLang treats late system messages, those after the first message,
// in the APIs that it converts to chats.
type SystemRule int

// The rules.
const (
	SystemUnknown SystemRule = iota // there is no local template
	systemInline                    // they stay in place
	systemInFront                   // they are joined to the first
)

// errUnlike marks a request that cannot be converted to a chat.
var errUnlike = errors.New("the request cannot be converted to a chat")

// FromOther converts a /v1/messages or /v1/responses request to the chat that SGLang
// makes of it. Requests with content other than text, and requests of other paths,
// are errors.
func FromOther(path string, body *jsonbody.Body, system SystemRule) (*jsonbody.Body, error) {
	switch path {
	case "/v1/messages":
		return sglangMessages(body, system)
	case "/v1/responses":
		return sglangResponses(body, system)
	}
	return nil, errUnlike
}

// turn is a message of a chat that is made of another API's request.
type turn struct {
	role   string
	filled bool     // it has content
	list   bool     // which is a list of parts
	text   string   // of content that is no list
	parts  []string // texts
	calls  []string // tool calls, JSON
	answer string   // of role tool: JSON of the id of the call that it answers
}

// unlike is an errUnlike that says why.
func unlike(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errUnlike, fmt.Sprintf(format, args...))
}

// setParts gives the turn its content: one text as it is, several as a list.
func (t *turn) setParts(parts []string) {
	t.filled, t.parts = true, parts
	if t.list = len(parts) != 1; !t.list {
		t.text, t.parts = parts[0], nil
	}
}

func (t *turn) appendTo(out []byte) []byte {
	out = append(out, `{"role":`...)
	out = jsonbody.AppendString(out, t.role)
	switch {
	case t.filled && t.list:
		out = append(out, `,"content":[`...)
		for i, text := range t.parts {
			if i > 0 {
				out = append(out, ',')
			}
			out = append(out, `{"type":"text","text":`...)
			out = append(jsonbody.AppendString(out, text), '}')
		}
		out = append(out, ']')
	case t.filled:
		out = append(out, `,"content":`...)
		out = jsonbody.AppendString(out, t.text)
	}
	if t.answer != "" {
		out = append(append(out, `,"tool_call_id":`...), t.answer...)
	}
	if len(t.calls) > 0 {
		out = append(out, `,"tool_calls":[`...)
		out = append(append(out, strings.Join(t.calls, ",")...), ']')
	}
	return append(out, '}')
}

// chatOf writes the chat request that the turns make, with further members.
func chatOf(turns []turn, more []jsonbody.Field) (*jsonbody.Body, error) {
	out := []byte(`[`)
	for i := range turns {
		if i > 0 {
			out = append(out, ',')
		}
		out = turns[i].appendTo(out)
	}
	fields := append([]jsonbody.Field{{Key: "messages", Raw: string(append(out, ']'))}}, more...)
	body, ok := jsonbody.Parse(jsonbody.AppendObject(nil, fields))
	if !ok {
		return nil, unlike("a chat of too many parts")
	}
	return body, nil
}

// toolCall writes a call of an assistant; arguments is a JSON object.
func toolCall(id, name gjson.Result, arguments string) string {
	function := jsonbody.AppendObject(nil, []jsonbody.Field{{Key: "name", Raw: jsonbody.RawOrNull(name)}, {Key: "arguments", Raw: arguments}})
	return string(jsonbody.AppendObject(nil, []jsonbody.Field{{Key: "id", Raw: jsonbody.RawOrNull(id)}, {Key: "type", Raw: `"function"`},
		{Key: "function", Raw: string(function)}}))
}

// sglangMessages turns a /v1/messages request into the chat that SGLang makes of it,
// as far as it is text. The error is an errUnlike.
func sglangMessages(body *jsonbody.Body, system SystemRule) (*jsonbody.Body, error) {
	for _, key := range []string{"thinking", "output_config"} {
		if body.Get(key).Type != gjson.Null {
			return nil, unlike("the request carries %q", key)
		}
	}
	list, few := jsonbody.Elements(body.Get("messages"), maxMessages)
	if !few || body.LoneSurrogate {
		return nil, unlike("%d messages or more, or an unpaired surrogate", maxMessages)
	}
	front, err := anthropicSystem(body.Get("system"))
	if err != nil {
		return nil, err
	}
	var turns []turn
	for _, m := range list {
		fields := jsonbody.Members(m)
		role, content := jsonbody.FieldOf(fields, "role").Str, jsonbody.FieldOf(fields, "content")
		switch {
		case role == "system" && system == SystemUnknown:
			return nil, unlike("a system message among the others")
		case role == "system" && system == systemInFront:
			text, err := anthropicLateSystem(content)
			if err != nil {
				return nil, err
			}
			if text != "" {
				front = append(front, text)
			}
			continue
		case role != "user" && role != "assistant" && role != "system":
			return nil, unlike("the role %.40q", role)
		}
		if turns, err = anthropicTurns(turns, role, content); err != nil {
			return nil, err
		}
	}
	if len(front) > 0 {
		turns = slices.Insert(turns, 0, turn{role: "system", filled: true, text: strings.Join(front, "\n")})
	}
	more, err := anthropicTools(body)
	if err != nil {
		return nil, err
	}
	return chatOf(turns, append(more, ModelField(body)...))
}

// ModelField returns the member "model" of a request; none if it is not a string.
func ModelField(body *jsonbody.Body) []jsonbody.Field {
	if model := body.Get("model"); model.Type == gjson.String {
		return []jsonbody.Field{{Key: "model", Raw: model.Raw}}
	}
	return nil
}

// textBlocks returns the texts of a list of blocks, which must all be texts of one of
// these types.
func textBlocks(list gjson.Result, types ...string) (texts []string, err error) {
	if !list.IsArray() {
		return nil, unlike("%.40s is neither text nor a list", list.Raw)
	}
	jsonbody.EachElement(list.Raw, func(block gjson.Result) bool {
		fields := jsonbody.Members(block)
		kind, text := jsonbody.FieldOf(fields, "type").Str, jsonbody.FieldOf(fields, "text")
		if !slices.Contains(types, kind) || text.Type != gjson.String {
			err = unlike("a block of type %.40q", kind)
			return false
		}
		texts = append(texts, text.Str)
		return true
	})
	return texts, err
}

func anthropicSystem(system gjson.Result) ([]string, error) {
	switch {
	case system.Type == gjson.Null:
		return nil, nil
	case system.Type == gjson.String:
		if strings.TrimFunc(system.Str, jsonbody.IsPythonSpace) == "" {
			return nil, nil
		}
		return []string{system.Str}, nil
	}
	texts, err := textBlocks(system, "text")
	return slices.DeleteFunc(texts, func(text string) bool { return text == "" }), err
}

func anthropicLateSystem(content gjson.Result) (string, error) {
	texts := []string{content.Str}
	var err error
	if content.Type != gjson.String {
		texts, err = textBlocks(content, "text")
	}
	for i := range texts {
		texts[i] = strings.TrimFunc(texts[i], jsonbody.IsPythonSpace)
	}
	return strings.Join(slices.DeleteFunc(texts, func(text string) bool { return text == "" }), "\n"), err
}

// anthropicTurns appends the turns that one message makes: a tool's result is one of
// its own.
func anthropicTurns(turns []turn, role string, content gjson.Result) ([]turn, error) {
	if content.Type == gjson.String {
		return append(turns, turn{role: role, filled: true, text: content.Str}), nil
	}
	blocks, few := jsonbody.Elements(content, maxListed)
	if !content.IsArray() || !few {
		return nil, unlike("content is neither text nor a list of at most %d", maxListed)
	}
	message := turn{role: role}
	var parts []string
	for _, block := range blocks {
		fields := jsonbody.Members(block)
		field := func(key string) gjson.Result { return jsonbody.FieldOf(fields, key) }
		switch kind := field("type").Str; {
		case kind == "text" && field("text").Type == gjson.String:
			parts = append(parts, field("text").Str)
		case kind == "tool_use" && role == "assistant" && field("id").Type == gjson.String && field("id").Str != "" &&
			field("name").Type == gjson.String:
			input := "{}"
			if v := field("input"); v.IsObject() {
				input = v.Raw
			} else if v.Exists() {
				return nil, unlike("a tool's input is not an object")
			}
			message.calls = append(message.calls, toolCall(field("id"), field("name"), input))
		case kind == "tool_result" && role == "user" && field("tool_use_id").Type == gjson.String && field("tool_use_id").Str != "":
			if len(parts) > 0 {
				before := turn{role: role}
				before.setParts(parts)
				turns, parts = append(turns, before), nil
			}
			result, err := anthropicResult(field("content"))
			if err != nil {
				return nil, err
			}
			result.answer = field("tool_use_id").Raw
			turns = append(turns, result)
		default:
			return nil, unlike("a block of type %.40q of role %s", kind, role)
		}
	}
	switch {
	case len(parts) > 0:
		message.setParts(parts)
	case len(message.calls) > 0:
	case role == "user":
		return turns, nil
	default:
		message.filled = true
	}
	return append(turns, message), nil
}

func anthropicResult(content gjson.Result) (turn, error) {
	result := turn{role: "tool", filled: true}
	if isText(content) {
		result.text = content.Str
		return result, nil
	}
	texts, err := textBlocks(content, "text")
	if texts = slices.DeleteFunc(texts, func(text string) bool { return text == "" }); len(texts) > 0 {
		result.setParts(texts)
	}
	return result, err
}

// anthropicTools returns the members tools and tool_choice of the chat.
func anthropicTools(body *jsonbody.Body) ([]jsonbody.Field, error) {
	list, ok := toolList(body.Get("tools"))
	if !ok {
		return nil, unlike(badTools, maxListed, MaxText)
	}
	var tools []string
	for _, tool := range list {
		fields := jsonbody.Members(tool)
		field := func(key string) gjson.Result { return jsonbody.FieldOf(fields, key) }
		kind, description, schema, strict := field("type"), field("description"), field("input_schema"), field("strict")
		if kind.Type != gjson.Null && kind.Str != "custom" || field("name").Type != gjson.String || !isText(description) || !schema.IsObject() ||
			strict.Exists() && (strict.Type == gjson.Null || !isBool(strict)) || !isBool(field("defer_loading")) {
			return nil, unlike("a tool of type %.40s", kind.Raw)
		}
		parameters := fieldsOf(schema)
		if !schema.Get("type").Exists() {
			parameters = append(parameters, jsonbody.Field{Key: "type", Raw: `"object"`})
		}
		function := []jsonbody.Field{{Key: "name", Raw: field("name").Raw},
			{Key: "description", Raw: string(jsonbody.AppendString(nil, description.Str))},
			{Key: "parameters", Raw: string(jsonbody.AppendObject(nil, parameters))}, {Key: "strict", Raw: fmt.Sprint(strict.Bool())}}
		tools = append(tools, functionTool(function, field("defer_loading")))
	}
	choice := body.Get("tool_choice")
	chosen := `"auto"`
	switch kind := choice.Get("type").Str; {
	case choice.Type == gjson.Null || kind == "auto":
	case kind == "none":
		chosen = `"none"`
	case kind == "any" && len(tools) > 0:
	case kind == "tool" && len(tools) > 0 && choice.Get("name").Type == gjson.String:
		chosen = `{"type":"function","function":{"name":` + choice.Get("name").Raw + `}}`
	default:
		return nil, unlike("tool_choice %.40s", choice.Raw)
	}
	return toolFields(tools, chosen), nil
}

// fieldsOf returns an object's members as they are.
func fieldsOf(object gjson.Result) (fields []jsonbody.Field) {
	for _, f := range jsonbody.Members(object) {
		fields = append(fields, jsonbody.Field{Key: f.Key, Raw: f.Value.Raw})
	}
	return fields
}

func functionTool(function []jsonbody.Field, deferred gjson.Result) string {
	tool := []jsonbody.Field{{Key: "type", Raw: `"function"`}, {Key: "function", Raw: string(jsonbody.AppendObject(nil, function))}}
	if deferred.Type != gjson.Null {
		tool = append(tool, jsonbody.Field{Key: "defer_loading", Raw: deferred.Raw})
	}
	return string(jsonbody.AppendObject(nil, tool))
}

func toolFields(tools []string, choice string) []jsonbody.Field {
	if len(tools) == 0 {
		return nil
	}
	return []jsonbody.Field{{Key: "tools", Raw: "[" + strings.Join(tools, ",") + "]"}, {Key: "tool_choice", Raw: choice}}
}

// sglangResponses turns a /v1/responses request into the chat that SGLang makes of
// it, as far as it is text and stands in the request. The error is an errUnlike.
func sglangResponses(body *jsonbody.Body, system SystemRule) (*jsonbody.Body, error) {
	instructions, input := body.Get("instructions"), body.Get("input")
	switch {
	case body.Get("previous_response_id").Type != gjson.Null:
		return nil, unlike("the request continues an earlier response")
	case body.LoneSurrogate, !isText(instructions):
		return nil, unlike("an unpaired surrogate, or instructions that are not text")
	}
	var turns []turn
	if instructions.Str != "" {
		turns = append(turns, turn{role: "system", filled: true, text: instructions.Str})
	}
	items, few := jsonbody.Elements(input, maxMessages)
	switch {
	case input.Type == gjson.String:
		turns = append(turns, turn{role: "user", filled: true, text: input.Str})
	case !input.IsArray() || !few:
		return nil, unlike("input is neither text nor a list of at most %d", maxMessages)
	}
	for _, item := range items {
		next, err := responseItem(item)
		if err != nil {
			return nil, err
		}
		turns = append(turns, next)
	}
	turns, err := responseSystem(joinTurns(turns), system)
	if err != nil {
		return nil, err
	}
	more, err := responseTools(body)
	if err != nil {
		return nil, err
	}
	if r := body.Get("reasoning"); r.Type != gjson.Null {
		effort := r.Get("effort")
		if effort.Type != gjson.String {
			return nil, unlike("reasoning %.40s", r.Raw)
		}
		more = append(more, jsonbody.Field{Key: "reasoning_effort", Raw: effort.Raw})
	}
	if kwargs := body.Get("chat_template_kwargs"); kwargs.Type != gjson.Null {
		more = append(more, jsonbody.Field{Key: "chat_template_kwargs", Raw: kwargs.Raw})
	}
	return chatOf(turns, append(more, ModelField(body)...))
}

// responseItem reads one item of a response's input.
func responseItem(item gjson.Result) (t turn, err error) {
	fields := jsonbody.Members(item)
	field := func(key string) gjson.Result { return jsonbody.FieldOf(fields, key) }
	known := []string{"type", "id", "status", "role", "content"}
	kind := field("type")
	switch kind.Str {
	case "function_call":
		known = []string{"type", "id", "status", "call_id", "name", "arguments"}
	case "function_call_output":
		known = []string{"type", "id", "status", "call_id", "output"}
	}
	for _, f := range fields {
		if !slices.Contains(known, f.Key) {
			return t, unlike("an input item with %.40q", f.Key)
		}
	}
	switch content, role := field("content"), field("role").Str; {
	case !item.IsObject():
		return t, unlike("an input item that is not an object")
	case kind.Str == "function_call":
		id := field("call_id")
		if id.Str == "" {
			id = field("id")
		}
		if id.Type != gjson.String || field("name").Type != gjson.String {
			return t, unlike("a call without an id or a name")
		}
		arguments := field("arguments")
		raw := "{}"
		if arguments.IsObject() {
			raw = arguments.Raw
		} else if text := arguments.Str; json.Valid([]byte(text)) && gjson.Parse(text).IsObject() {
			if jsonbody.HasLoneSurrogate([]byte(text)) {
				return t, unlike("an unpaired surrogate")
			}
			raw = gjson.Parse(text).Raw
		}
		return turn{role: "assistant", calls: []string{toolCall(id, field("name"), raw)}}, nil
	case kind.Str == "function_call_output":
		output := field("output")
		if field("call_id").Type != gjson.String {
			return t, unlike("the output of an unnamed call")
		}
		texts := []string{output.Str}
		if output.Type != gjson.String {
			texts, err = textBlocks(output, "input_text", "output_text", "text")
		}
		return turn{role: "tool", filled: true, text: strings.Join(texts, ""), answer: field("call_id").Raw}, err
	case kind.Exists() && kind.Str != "message":
		return t, unlike("an input item of type %.40s", kind.Raw)
	case role != "user" && role != "assistant" && role != "system":
		return t, unlike("the role %.40q", role)
	case content.Type == gjson.String:
		return turn{role: role, filled: true, text: content.Str}, nil
	case content.Type == gjson.Null && role == "assistant":
		return turn{role: role}, nil
	default:
		texts, err := textBlocks(content, "input_text", "output_text", "text")
		return turn{role: role, filled: true, list: true, parts: texts}, err
	}
}

// joinTurns makes an assistant's own turns, one after the other, one.
func joinTurns(turns []turn) (out []turn) {
	for len(turns) > 0 {
		n := 1
		for turns[0].role == "assistant" && n < len(turns) && turns[n].role == "assistant" {
			n++
		}
		if n == 1 {
			out = append(out, turns[0])
		} else {
			out = append(out, joinRun(turns[:n]))
		}
		turns = turns[n:]
	}
	return out
}

// joinRun makes one turn of several of an assistant: texts become one, and parts once
// there is a list among them.
func joinRun(run []turn) turn {
	joined := turn{role: run[0].role, filled: run[0].filled}
	var texts []string
	for _, t := range run {
		joined.calls = append(joined.calls, t.calls...)
		if !t.filled || !t.list && t.text == "" {
			continue
		}
		joined.filled = true
		if t.list && !joined.list && len(texts) > 0 {
			joined.parts = []string{strings.Join(texts, "\n\n")}
		}
		joined.list = joined.list || t.list
		switch {
		case t.list:
			joined.parts = append(joined.parts, t.parts...)
		case joined.list:
			joined.parts = append(joined.parts, t.text)
		default:
			texts = append(texts, t.text)
		}
	}
	if !joined.list {
		joined.text = strings.Join(texts, "\n\n")
	}
	return joined
}

// responseSystem brings system messages to the front where SGLang does.
func responseSystem(turns []turn, rule SystemRule) ([]turn, error) {
	late := -1
	for i := range turns {
		if turns[i].role == "system" {
			late = i
		}
	}
	switch {
	case late < 0 || rule == systemInline || late == 0 && !turns[0].list:
		return turns, nil
	case rule == SystemUnknown:
		return nil, unlike("a system message among the others")
	}
	var front []string
	var others []turn
	for _, t := range turns {
		switch {
		case t.role != "system":
			others = append(others, t)
		case t.list:
			front = append(front, t.parts...)
		default:
			front = append(front, t.text)
		}
	}
	if len(front) == 0 {
		return others, nil
	}
	return append([]turn{{role: "system", filled: true, text: strings.Join(front, "\n\n")}}, others...), nil
}

// responseTools returns the members tools and tool_choice of the chat.
func responseTools(body *jsonbody.Body) ([]jsonbody.Field, error) {
	list, ok := toolList(body.Get("tools"))
	if !ok {
		return nil, unlike(badTools, maxListed, MaxText)
	}
	var tools []string
	for _, tool := range list {
		fields := jsonbody.Members(tool)
		field := func(key string) gjson.Result { return jsonbody.FieldOf(fields, key) }
		parameters, strict := field("parameters"), field("strict")
		// SGLang leaves such types as they are here, and changes them in chats.
		if field("type").Str != "function" || field("name").Str == "" || !isText(field("description")) || !standardTypes(parameters, 0) ||
			parameters.Type != gjson.Null && !parameters.IsObject() || strict.Exists() && (strict.Type == gjson.Null || !isBool(strict)) {
			return nil, unlike("a tool of type %.40s", field("type").Raw)
		}
		tools = append(tools, functionTool([]jsonbody.Field{{Key: "name", Raw: field("name").Raw},
			{Key: "description", Raw: jsonbody.RawOrNull(field("description"))},
			{Key: "parameters", Raw: jsonbody.RawOrNull(parameters)}, {Key: "strict", Raw: fmt.Sprint(strict.Bool())}}, gjson.Result{}))
	}
	choice := body.Get("tool_choice")
	switch {
	case !choice.Exists(), choice.Str == "auto", choice.Str == "required":
		return toolFields(tools, `"auto"`), nil
	case choice.Str == "none":
		return toolFields(tools, `"none"`), nil
	case choice.Get("type").Str == "function" && choice.Get("name").Str != "":
		return toolFields(tools, `{"type":"function","function":{"name":`+choice.Get("name").Raw+`}}`), nil
	}
	return nil, unlike("tool_choice %.40s", choice.Raw)
}
