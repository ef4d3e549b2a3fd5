package mocker

import (
	"cmp"
	"fmt"
	"net/http"
	"strings"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// form is the API in whose form a chat is requested and answered.
type form uint8

const (
	chatForm      form = iota // that of the route's kind
	messagesForm              // Anthropic's
	responsesForm             // OpenAI's responses
	tokensForm                // vLLM's tokens in, tokens out: that of a completion
)

// formRoutes are the routes of the forms.
var formRoutes = [...]string{messagesForm: "/v1/messages", responsesForm: "/v1/responses", tokensForm: "/inference/v1/generate"}

// formOf returns the form of a route.
func formOf(path string) form {
	for _, f := range []form{messagesForm, responsesForm, tokensForm} {
		if strings.HasPrefix(path, formRoutes[f]) {
			return f
		}
	}
	return chatForm
}

// kept are the members of a request in another form that its chat has too, each by its name there.
var kept = [][2]string{
	{"max_tokens", "max_tokens"}, {"max_output_tokens", "max_tokens"}, {"stop_sequences", "stop"}, {"stop", "stop"},
	{"ignore_eos", "ignore_eos"}, {"stream", "stream"}, {"temperature", "temperature"}, {"top_p", "top_p"}, {"cache_salt", "cache_salt"},
	{"kv_transfer_params", "kv_transfer_params"}, {"request_id", "request_id"}, {"rid", "rid"}, {"routed_dp_rank", "routed_dp_rank"},
	{"bootstrap_host", "bootstrap_host"}, {"bootstrap_port", "bootstrap_port"}, {"bootstrap_room", "bootstrap_room"},
}

// asChat returns the chat that a request of a route is.
func (w *Worker) asChat(path string, body *jsonbody.Body) (*jsonbody.Body, *refusal) {
	of := formOf(path)
	switch previous := body.Get("previous_response_id"); {
	case of == chatForm:
		return body, nil
	case of == tokensForm:
		return completionOf(body), nil
	case of == responsesForm && previous.Type != gjson.Null:
		return nil, noResponse(previous.String())
	case of == responsesForm && body.Get("background").Bool():
		return nil, badRequest("background", "background: true is not supported by simulated workers; leave it out")
	}
	chat, err := w.model.ChatOf(formRoutes[of], body.Without("thinking").Without("output_config"))
	if err != nil {
		return nil, badRequest("", "%v", err)
	}
	for _, names := range kept {
		if v := body.Get(names[0]); v.Type != gjson.Null {
			chat = chat.With(names[1], v.Raw)
		}
	}
	return chat, nil
}

// noResponse is the problem of a response that is not stored; none is.
func noResponse(id string) *refusal {
	return &refusal{http.StatusNotFound, "invalid_request_error", fmt.Sprintf("Response with id '%s' not found.", id), "response_id"}
}

// addForms adds the routes of the other forms. post registers a handler.
func (w *Worker) addForms(mux *http.ServeMux, post func(path string, serve http.HandlerFunc)) {
	for _, f := range []form{messagesForm, responsesForm} {
		post(formRoutes[f], w.infers(chatKind))
	}
	post(formRoutes[messagesForm]+"/count_tokens", w.serve(func(in *http.Request, body *jsonbody.Body) (any, *refusal) {
		prompt, problem := w.chatPrompt(in, body)
		if problem != nil {
			return nil, problem
		}
		return map[string]any{"input_tokens": len(prompt), "context_management": map[string]any{"original_input_tokens": len(prompt)}}, nil
	}))
	for _, route := range []string{"GET /v1/responses/{id}", "POST /v1/responses/{id}/cancel"} {
		mux.HandleFunc(route, func(out http.ResponseWriter, in *http.Request) { w.writeError(out, in, noResponse(in.PathValue("id"))) })
	}
}

// chatPrompt returns the tokens of the prompt of a chat in any form.
func (w *Worker) chatPrompt(in *http.Request, body *jsonbody.Body) ([]uint32, *refusal) {
	body, problem := w.asChat(in.URL.Path, body)
	if problem != nil {
		return nil, problem
	}
	var prompts [][]uint32
	if w.sglang() {
		prompts, problem = w.sglangPrompts(body, chatKind)
	} else {
		prompts, problem = w.prompts(body, true)
	}
	if problem != nil {
		return nil, problem
	}
	return prompts[0], nil
}

// event appends an event of a stream, whose members follow after its type.
func (a *Answer) event(out []byte, name, format string, args ...any) []byte {
	out = fmt.Appendf(out, "event: %s\ndata: {\"type\":%[1]q", name)
	if a.form == responsesForm {
		out = fmt.Appendf(out, `,"sequence_number":%d`, a.events)
		a.events++
	}
	return append(fmt.Appendf(out, format, args...), "}\n\n"...)
}

// appendFormChunk is appendChunk for the other forms.
func (a *Answer) appendFormChunk(out []byte, c *Choice, now int) []byte {
	if a.form == tokensForm {
		return a.appendTokensChunk(out, c, now)
	}
	if !a.begun {
		a.begun = true
		if a.form == messagesForm {
			usage := fmt.Sprintf(`{"input_tokens":%d,"output_tokens":0}`, c.prompt)
			out = a.event(out, "message_start", `,"message":%s`, a.message(c, "[]", "null", "null", usage))
		} else {
			for _, name := range []string{"response.created", "response.in_progress"} {
				out = a.event(out, name, `,"response":%s`, a.response("[]", "in_progress", "null"))
			}
		}
	}
	text := c.Part(now)
	if text == "" {
		return out
	}
	opens := c.known(c.Sent) == 0
	if a.form == messagesForm {
		if opens {
			out = a.event(out, "content_block_start", `,"index":0,"content_block":{"type":"text","text":""}`)
		}
		return a.event(out, "content_block_delta", `,"index":0,"delta":{"type":"text_delta","text":%s}`, quote(text))
	}
	if opens {
		out = a.event(out, "response.output_item.added", `,"output_index":0,"item":%s`, a.item("in_progress", ""))
		out = a.event(out, "response.content_part.added", `,%s,"part":%s`, a.place(), textPart(""))
	}
	return a.event(out, "response.output_text.delta", `,%s,"delta":%s,"logprobs":[]`, a.place(), quote(text))
}

// appendFormEnd is appendEnd for the other forms.
func (a *Answer) appendFormEnd(out []byte) []byte {
	if a.form == tokensForm {
		return a.appendTokensEnd(out)
	}
	c := a.choices[0]
	if a.form == messagesForm {
		if c.Text != "" {
			out = a.event(out, "content_block_stop", `,"index":0`)
		}
		reason, sequence := c.stopReason()
		out = a.event(out, "message_delta", `,"delta":{"stop_reason":%s,"stop_sequence":%s},"usage":%s`, reason, sequence, a.messagesUsage(c))
		return a.event(out, "message_stop", "")
	}
	if c.Text != "" {
		out = a.event(out, "response.output_text.done", `,%s,"text":%s,"logprobs":[]`, a.place(), quote(c.Text))
		out = a.event(out, "response.content_part.done", `,%s,"part":%s`, a.place(), textPart(c.Text))
		out = a.event(out, "response.output_item.done", `,"output_index":0,"item":%s`, a.item("completed", textPart(c.Text)))
	}
	return a.event(out, "response.completed", `,"response":%s`, a.wholeForm())
}

// wholeForm is whole for the other forms.
func (a *Answer) wholeForm() []byte {
	if a.form == tokensForm {
		return a.wholeTokens()
	}
	c := a.choices[0]
	if a.form == messagesForm {
		reason, sequence := c.stopReason()
		return a.message(c, fmt.Sprintf(`[{"type":"text","text":%s}]`, quote(c.Text)), reason, sequence, a.messagesUsage(c))
	}
	status, output := "completed", "[]"
	if c.Finish == "length" {
		status = "incomplete"
	}
	if c.Text != "" {
		output = "[" + a.item("completed", textPart(c.Text)) + "]"
	}
	cached := int(c.cached.Load())
	usage := fmt.Sprintf(`{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d,"cache_write_tokens":%d,"input_tokens_per_turn":[],`+
		`"cached_tokens_per_turn":[]},"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":0,"tool_output_tokens":0,`+
		`"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]},"total_tokens":%d}`,
		c.prompt, cached, a.written(c), c.Output, c.prompt+c.Output)
	return a.response(output, status, usage)
}

// written is how many tokens of a prompt are in new blocks of the cache.
func (a *Answer) written(c *Choice) int {
	return max(0, c.prompt/a.blockSize*a.blockSize-int(c.cached.Load()))
}

// message is a message of Anthropic's API; the arguments but for c are JSON.
func (a *Answer) message(c *Choice, content, reason, sequence, usage string) []byte {
	out := fmt.Appendf(nil, `{"id":%s,"type":"message","role":"assistant","content":%s,"model":%s,"stop_reason":%s,"stop_sequence":%s,`+
		`"usage":%s`, quote(a.id), content, quote(a.model), reason, sequence, usage)
	if a.transfer != "" {
		out = fmt.Appendf(out, `,"kv_transfer_params":%s`, a.transfer)
	}
	return append(out, '}')
}

// stopReason is why a message ended, and by which of its stop_sequences; JSON.
func (c *Choice) stopReason() (reason, sequence string) {
	switch {
	case c.Finish == "length":
		return `"max_tokens"`, "null"
	case c.Finish != "stop":
		return "null", "null"
	case strings.HasPrefix(c.Reason, `"`):
		return `"stop_sequence"`, c.Reason
	}
	return `"end_turn"`, "null"
}

func (a *Answer) messagesUsage(c *Choice) string {
	cached, written := int(c.cached.Load()), a.written(c)
	return fmt.Sprintf(`{"input_tokens":%d,"output_tokens":%d,"cache_creation_input_tokens":%d,"cache_read_input_tokens":%d}`,
		max(0, c.prompt-cached-written), c.Output, written, cached)
}

// response is an object of the responses API; output and usage are JSON.
func (a *Answer) response(output, status, usage string) []byte {
	details := "null"
	if status == "incomplete" {
		details = `{"reason":"max_output_tokens"}`
	}
	return fmt.Appendf(nil, `{"id":%s,"created_at":%d,"incomplete_details":%s,"instructions":null,"metadata":null,"model":%s,`+
		`"object":"response","output":%s,"parallel_tool_calls":true,"temperature":1.0,"tool_choice":"auto","tools":[],"top_p":1.0,`+
		`"background":false,"max_output_tokens":%d,"max_tool_calls":null,"previous_response_id":null,"prompt":null,`+
		`"reasoning":null,"service_tier":"auto","status":%q,"text":null,"top_logprobs":null,"truncation":"disabled",`+
		`"usage":%s,"user":null,"kv_transfer_params":%s}`,
		quote(a.id), a.created, details, quote(a.model), output, a.choices[0].Output, status, usage, cmp.Or(a.transfer, "null"))
}

func (a *Answer) itemID() []byte { return quote("msg_" + a.id) }

// place is where the one text of a response is, as members of an event.
func (a *Answer) place() []byte {
	return fmt.Appendf(nil, `"output_index":0,"content_index":0,"item_id":%s`, a.itemID())
}

// item is the one item of a response, with a part or none.
func (a *Answer) item(status, part string) string {
	return fmt.Sprintf(`{"id":%s,"content":[%s],"role":"assistant","status":%q,"type":"message"}`, a.itemID(), part, status)
}

func textPart(text string) string {
	return fmt.Sprintf(`{"annotations":[],"text":%s,"type":"output_text","logprobs":null}`, quote(text))
}
