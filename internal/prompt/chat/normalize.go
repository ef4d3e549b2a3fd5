// Package chat renders chat requests to prompt text with a model's chat template, by the rules of vLLM or SGLang.
package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// ErrNotRenderable marks a request whose prompt only an engine can compute: it
// carries images or other media, or a form that the engine refuses or that this
// package does not implement. The wrapping error names the reason.
var ErrNotRenderable = errors.New("the router cannot render the prompt")

// NotRenderable returns an ErrNotRenderable with a reason.
func NotRenderable(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrNotRenderable, fmt.Sprintf(format, args...))
}

// Request holds the fields of a chat request that determine its prompt, as vLLM
// 0.32 reads them (ChatCompletionRequest and TokenizeChatRequest).
type Request struct {
	AddSpecial     bool         // add_special_tokens
	Truncate       gjson.Result // truncate_prompt_tokens
	WantsTokenStrs bool         // return_token_strs of /tokenize

	messages         []message
	tools            json.RawMessage  // as the template sees them; nil without tools
	vars             []jsonbody.Field // further variables of the template
	addGeneration    bool
	continueFinal    bool
	hasForeignTokens bool // the request itself carries its prompt tokens
}

// Texts yields the texts that every rendered prompt contains. Templates may drop
// earlier assistant messages, so those are excluded.
func (r *Request) Texts() iter.Seq[string] {
	return func(yield func(string) bool) {
		for i := range r.messages {
			m := &r.messages[i]
			if m.role == "assistant" {
				continue
			}
			for j := range m.parts {
				if !yield(m.parts[j].text) {
					return
				}
			}
		}
	}
}

// message is one message after the request's own checks and before the
// template's content format is applied.
type message struct {
	role  string
	parts []contentPart
	plain bool             // the content is one text for every template
	rest  []jsonbody.Field // fields after role and content, in vLLM's order
	tools json.RawMessage  // of a developer message; nil without
}

// contentPart is one part of a message's content; only texts and references to
// tools get this far.
type contentPart struct {
	text      string
	raw       string           // text as the request's JSON has it; empty: not in this form
	reference bool             // a tool_reference: text is the tool's name
	extra     []jsonbody.Field // fields that vLLM hands on to the template
}

// Kind is the API that defines the fields of a chat body.
type Kind int

// The kinds.
const (
	Completion Kind = iota // /v1/chat/completions
	Tokenize               // /tokenize
)

// MaxText is the longest text that is tokenized, in bytes: a million tokens take about
// 4 MB.
const MaxText = 6 << 20

// Limits that keep one request's parsing bounded; vLLM has none.
const (
	maxMessages = jsonbody.MaxMessages
	maxKwargs   = 1000
	maxListed   = 1 << 16 // tools, and the calls of a message
)

// mediaKeys are the fields that make a content part something else than text.
var mediaKeys = []string{"audio_embeds", "audio_url", "data", "file", "image_embeds", "image_pil", "image_url",
	"input_audio", "input_image", "prompt_embeds", "uuid", "video_embeds", "video_url"}

// partFields are the fields of content parts that vLLM knows; all others of a
// text part reach the template.
var partFields = append([]string{"closed", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type"}, mediaKeys...)

// reservedKwargs are parameters of the functions between a request's
// chat_template_kwargs and the template: they steer or break the call instead of
// reaching the template.
var reservedKwargs = []string{"chat_template", "conversation", "max_length", "messages", "model_config", "padding",
	"return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize", "tokenizer",
	"tokenizer_kwargs", "truncation"}

// jinjaGlobals are names that templates never take from the request.
var jinjaGlobals = []string{"cycler", "dict", "joiner", "lipsum", "namespace", "range"}

// ParseBody parses a JSON object. The error is an ErrNotRenderable.
func ParseBody(body []byte) (*jsonbody.Body, error) {
	parsed, ok := jsonbody.Parse(body)
	if !ok {
		return nil, NotRenderable("the body is not a JSON object")
	}
	return parsed, nil
}

// Parse reads a chat request as vLLM does. Anything that vLLM refuses or this
// package does not implement is an ErrNotRenderable. The function has one case for
// each field that affects the prompt.
func Parse(body *jsonbody.Body, kind Kind, options Options) (*Request, error) {
	if !utf8.Valid(body.Raw) {
		return nil, NotRenderable("the body is not UTF-8")
	}
	if body.LoneSurrogate {
		return nil, NotRenderable("the body has an unpaired surrogate")
	}
	req := &Request{addGeneration: true}
	var (
		tools, kwargs, documents, effort, choice gjson.Result
		generationGiven                          bool
	)
	for _, f := range body.Top {
		v := f.Value
		var err error
		switch f.Key {
		case "tools":
			tools = v
		case "tool_choice":
			choice = v
		case "chat_template_kwargs":
			kwargs = v
		case "chat_template":
			if v.Type != gjson.Null {
				err = NotRenderable("the request has its own chat_template")
			}
		case "add_generation_prompt":
			generationGiven = true
			err = ReadBool(v, f.Key, &req.addGeneration)
		case "continue_final_message":
			err = ReadBool(v, f.Key, &req.continueFinal)
		case "add_special_tokens":
			err = ReadBool(v, f.Key, &req.AddSpecial)
		case "return_token_strs":
			if v.Type != gjson.Null {
				err = ReadBool(v, f.Key, &req.WantsTokenStrs)
			}
		case "documents":
			documents = v
		case "reasoning_effort":
			effort = v
		case "truncate_prompt_tokens":
			req.Truncate = v
		case "kv_transfer_params":
			if v.Get("prompt_token_ids").Exists() && v.Get("prompt_token_ids").Type != gjson.Null {
				req.hasForeignTokens = true
			}
		}
		if err != nil {
			return nil, err
		}
	}
	if kind == Tokenize { // fields that this API does not have
		documents, effort, choice = gjson.Result{}, gjson.Result{}, gjson.Result{}
		req.Truncate, req.hasForeignTokens = gjson.Result{}, false
	}
	switch {
	case req.hasForeignTokens:
		return nil, NotRenderable("the request has its own prompt tokens")
	case req.continueFinal && (req.addGeneration || !generationGiven):
		return nil, NotRenderable("continue_final_message needs add_generation_prompt false")
	}

	var err error
	if req.messages, err = parseMessages(body, kind); err != nil {
		return nil, err
	}
	if tools.Exists() && tools.Type != gjson.Null {
		hidden := choice.Type == gjson.String && choice.Str == "none" && options.ExcludeToolsWhenNone
		dumped, err := dumpTools(tools, kind)
		if err != nil {
			return nil, err
		}
		if !hidden {
			req.tools = dumped
		}
	}
	if err := req.setVariables(kwargs, documents, effort, options); err != nil {
		return nil, err
	}
	return req, nil
}

// setVariables merges what reaches the template beside messages: the server's
// defaults, under the request's chat_template_kwargs, under its own fields.
// Values null and "auto" never override.
func (r *Request) setVariables(kwargs, documents, effort gjson.Result, options Options) error {
	r.vars = slices.Clone(options.DefaultKwargs)
	if kwargs.Exists() && kwargs.Type != gjson.Null {
		if !kwargs.IsObject() {
			return NotRenderable("chat_template_kwargs is not an object")
		}
		given := jsonbody.Members(kwargs)
		if len(given) > maxKwargs {
			return NotRenderable("%d chat_template_kwargs", len(given))
		}
		for _, f := range given {
			switch {
			case f.Value.Type == gjson.Null && f.Key != "messages":
				continue
			case f.Value.Type == gjson.String && f.Value.Str == "auto":
				continue
			case slices.Contains(reservedKwargs, f.Key):
				return NotRenderable("chat_template_kwargs carries %q", f.Key)
			case f.Key == "add_generation_prompt" || f.Key == "continue_final_message":
				continue // the request's own fields always win
			case f.Key == "tools":
				if !areObjects(f.Value) {
					return NotRenderable("chat_template_kwargs.tools is not a list of objects")
				}
				r.tools = json.RawMessage(f.Value.Raw)
			case slices.Contains(jinjaGlobals, f.Key):
				continue
			default:
				r.setVar(f.Key, f.Value.Raw)
			}
		}
	}
	if documents.Exists() && documents.Type != gjson.Null {
		if err := checkDocuments(documents); err != nil {
			return err
		}
		r.setVar("documents", documents.Raw)
	}
	for _, f := range r.vars {
		if f.Key == "documents" {
			if !areObjects(gjson.Parse(f.Raw)) {
				return NotRenderable("documents is not a list of objects")
			}
		}
	}
	if effort.Exists() && effort.Type != gjson.Null {
		levels := []string{"none", "minimal", "low", "medium", "high", "xhigh", "max"}
		if effort.Type != gjson.String || !slices.Contains(levels, effort.Str) {
			return NotRenderable("reasoning_effort %s is unknown", effort.Raw)
		}
		r.setVar("reasoning_effort", effort.Raw)
		if !kwargs.Get("enable_thinking").Exists() {
			r.setVar("enable_thinking", strconv.FormatBool(effort.Str != "none"))
		}
	}
	return nil
}

func (r *Request) setVar(key, raw string) {
	for i := range r.vars {
		if r.vars[i].Key == key {
			r.vars[i].Raw = raw
			return
		}
	}
	r.vars = append(r.vars, jsonbody.Field{Key: key, Raw: raw})
}

// checkDocuments checks the type of the request's documents: a list of
// objects whose values are strings.
func checkDocuments(documents gjson.Result) error {
	if !documents.IsArray() {
		return NotRenderable("documents is not a list")
	}
	var err error
	jsonbody.EachElement(documents.Raw, func(d gjson.Result) bool {
		if !d.IsObject() {
			err = NotRenderable("a document is not an object")
		}
		for _, f := range jsonbody.Members(d) {
			if f.Value.Type != gjson.String {
				err = NotRenderable("a document's %q is not a string", f.Key)
			}
		}
		return err == nil
	})
	return err
}

// areObjects reports whether a value is a list of objects.
func areObjects(list gjson.Result) bool {
	objects := list.IsArray()
	if objects {
		jsonbody.EachElement(list.Raw, func(v gjson.Result) bool {
			objects = v.IsObject()
			return objects
		})
	}
	return objects
}

// parseMessages reads the messages by the rules of vLLM's parse_chat_messages.
func parseMessages(body *jsonbody.Body, kind Kind) ([]message, error) {
	if !body.Get("messages").IsArray() {
		return nil, NotRenderable("messages is not a list")
	}
	list := body.Messages()
	if len(list) == 0 || len(list) > maxMessages {
		return nil, NotRenderable("%d messages", len(list))
	}
	out := make([]message, 0, len(list))
	for i, m := range list {
		parsed, err := parseMessage(m, kind)
		if err != nil {
			return nil, fmt.Errorf("message %d: %w", i, err)
		}
		out = append(out, parsed)
	}
	return out, nil
}

func parseMessage(m jsonbody.MessageView, kind Kind) (message, error) {
	var msg message
	if !m.Value.IsObject() {
		return msg, NotRenderable("not an object")
	}
	field := func(key string) gjson.Result { return jsonbody.FieldOf(m.Fields, key) }
	role := field("role")
	if role.Type != gjson.String {
		return msg, NotRenderable("the role is not a string")
	}
	msg.role = role.Str

	var err error
	if msg.parts, err = parseContent(msg.role, field("content")); err != nil {
		return msg, err
	}
	switch msg.role {
	case "assistant":
		if calls := field("tool_calls"); calls.Exists() && calls.Type != gjson.Null {
			dumped, err := dumpToolCalls(calls)
			if err != nil {
				return msg, err
			}
			if dumped != "" {
				msg.rest = append(msg.rest, jsonbody.Field{Key: "tool_calls", Raw: dumped})
			}
		}
		reasoning := field("reasoning")
		if old := field("reasoning_content"); kind == Completion && reasoning.Type == gjson.Null && old.Type != gjson.Null {
			reasoning = old
		}
		if reasoning.Type != gjson.Null {
			if reasoning.Type != gjson.String {
				return msg, NotRenderable("reasoning is not a string")
			}
			msg.rest = append(msg.rest, jsonbody.Field{Key: "reasoning", Raw: reasoning.Raw},
				jsonbody.Field{Key: "reasoning_content", Raw: reasoning.Raw})
		}
	case "tool":
		if id := field("tool_call_id"); id.Exists() {
			if id.Type != gjson.String && id.Type != gjson.Null {
				return msg, NotRenderable("tool_call_id is not a string")
			}
			msg.rest = append(msg.rest, jsonbody.Field{Key: "tool_call_id", Raw: id.Raw})
		}
	}
	for _, key := range []string{"name", "task"} {
		if v := field(key); v.Exists() {
			if v.Type != gjson.String {
				return msg, NotRenderable("%s is not a string", key)
			}
			msg.rest = append(msg.rest, jsonbody.Field{Key: key, Raw: v.Raw})
		}
	}
	if tools := field("tools"); msg.role == "developer" && tools.Exists() && tools.Type != gjson.Null {
		msg.tools = json.RawMessage(tools.Raw)
	}
	return msg, nil
}

// parseContent turns a message's content into parts, as vLLM does: a string is
// one text part, null or nothing no part.
func parseContent(role string, content gjson.Result) ([]contentPart, error) {
	var parts []contentPart
	switch {
	case !content.Exists():
		return nil, nil
	case content.Type == gjson.Null:
		if role != "assistant" && role != "function" {
			return nil, NotRenderable("the content of role %q is null", role)
		}
		return nil, nil
	case content.Type == gjson.String:
		parts = []contentPart{{text: content.Str, raw: content.Raw}}
	case content.IsArray():
		var err error
		jsonbody.EachElement(content.Raw, func(p gjson.Result) bool {
			var part contentPart
			var keep bool
			if part, keep, err = parsePart(role, p); keep {
				parts = append(parts, part)
			}
			return err == nil
		})
		if err != nil {
			return nil, err
		}
	default:
		return nil, NotRenderable("the content is neither text nor a list")
	}
	if role == "system" {
		parts = dropBillingHeader(parts)
	}
	return parts, nil
}

func parsePart(role string, p gjson.Result) (part contentPart, keep bool, err error) {
	if !p.IsObject() {
		return part, false, NotRenderable("a content part is not an object")
	}
	fields := jsonbody.Members(p)
	for _, f := range fields {
		if slices.Contains(mediaKeys, f.Key) {
			return part, false, NotRenderable("a content part carries %q", f.Key)
		}
	}
	kind := jsonbody.FieldOf(fields, "type").Str
	var text gjson.Result
	switch {
	case kind == "text":
		text = jsonbody.FieldOf(fields, "text")
		if text.Exists() && text.Type == gjson.Null {
			return part, false, nil // vLLM skips it with a warning
		}
	case kind == "refusal" && role == "assistant":
		text = jsonbody.FieldOf(fields, "refusal")
	case kind == "thinking" && role == "assistant":
		text = jsonbody.FieldOf(fields, "thinking")
	case kind == "tool_reference" && role == "tool":
		text = jsonbody.FieldOf(fields, "name")
		part.reference = true
	default:
		return part, false, NotRenderable("a content part of type %q for role %q", kind, role)
	}
	if text.Type != gjson.String {
		return part, false, NotRenderable("a content part without its %s", kind)
	}
	part.text, part.raw = text.Str, text.Raw
	for _, f := range fields {
		if !part.reference && !slices.Contains(partFields, f.Key) {
			part.extra = append(part.extra, jsonbody.Field{Key: f.Key, Raw: f.Value.Raw})
		}
	}
	return part, true, nil
}

// dropBillingHeader removes the attribution line that Claude Code puts before a
// system prompt: it changes with every request, so vLLM drops it.
func dropBillingHeader(parts []contentPart) []contentPart {
	var out []contentPart
	for _, p := range parts {
		if !p.reference && strings.HasPrefix(p.text, "x-anthropic-billing-header") {
			_, rest, _ := strings.Cut(p.text, "\n")
			if rest == "" {
				continue
			}
			p.text, p.raw = rest, ""
		}
		out = append(out, p)
	}
	return out
}

// ReadBool stores the value of the named field, which must be true or false; any
// other value is an ErrNotRenderable.
func ReadBool(v gjson.Result, name string, into *bool) error {
	if v.Type != gjson.True && v.Type != gjson.False {
		return NotRenderable("%s is not true or false", name)
	}
	*into = v.Type == gjson.True
	return nil
}
