package chat

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"kvrouter/internal/base/jsonbody"
)

// Renderer renders chats with the templates of one model. All methods but Close are
// safe for concurrent use.
type Renderer struct {
	files      *Files
	options    Options
	plain      *jinja // for requests without tools; nil if there is none
	withTools  *jinja // for requests with tools; may be the same
	noTemplate string // why plain or withTools is nil
	problem    string // the same, unless the model just has no template
	lateSystem func() SystemRule
}

// NewRenderer compiles the templates of a model, or the template of the options
// that replaces them. Without a usable template every chat is an ErrNotRenderable.
func NewRenderer(files *Files, options Options) *Renderer {
	r := &Renderer{files: files, options: options}
	r.plain, r.noTemplate = r.compile(false)
	r.withTools = r.plain
	if files.template(true) != files.template(false) && options.ChatTemplate == "" {
		r.withTools, r.noTemplate = r.compile(true)
	}
	r.lateSystem = sync.OnceValue(r.systemRule)
	return r
}

// trialContext is a chat that every template is tried with. Most templates render it;
// what others say of it does not matter.
const trialContext = `{"messages":[{"role":"system","content":"s"},{"role":"user","content":"u"},{"role":"assistant","content":"a"},{"role":"user","content":"u"}],"add_generation_prompt":true,"bos_token":"<s>","eos_token":"</s>"}`

// Problem returns why the templates are not used; empty: they are, or there are none.
func (r *Renderer) Problem() string { return r.problem }

// compile compiles the template for requests with or without tools.
func (r *Renderer) compile(tools bool) (template *jinja, problem string) {
	text := r.options.ChatTemplate
	if text == "" && r.files.refused != "" {
		r.problem = r.files.refused
		return nil, r.problem
	}
	if text == "" {
		text = r.files.template(tools)
	}
	if text == "" {
		return nil, "the model has no chat template"
	}
	template, err := compileTemplate(text)
	if err != nil {
		r.problem = "the chat template cannot be compiled: " + err.Error()
		return nil, r.problem
	}
	trial, err := template.Render([]byte(trialContext))
	trial.Free()
	if errors.Is(err, ErrLimit) {
		template.Close()
		r.problem = fmt.Sprintf("the chat template takes too much time or memory for a short chat: %v", err)
		return nil, r.problem
	}
	switch r.options.ContentFormat {
	case "string", "openai":
		template.WantsParts = r.options.ContentFormat == "openai"
	}
	return template, ""
}

// Close frees the templates; no other call may be running.
func (r *Renderer) Close() {
	if r.withTools != nil && r.withTools != r.plain {
		r.withTools.Close()
	}
	if r.plain != nil {
		r.plain.Close()
	}
}

// refusal returns an ErrNotRenderable if the engine does not use the template.
func (r *Renderer) refusal() error {
	for _, why := range []string{r.files.cannotRender, r.options.CannotRender} {
		if why != "" {
			return NotRenderable("%s", why)
		}
	}
	return nil
}

// Parse reads a chat request by the rules of vLLM.
func (r *Renderer) Parse(body *jsonbody.Body, kind Kind) (*Request, error) {
	return Parse(body, kind, r.options)
}

// Render returns the prompt text of a chat by the rules of vLLM.
func (r *Renderer) Render(req *Request) (Rendered, error) {
	if err := r.refusal(); err != nil {
		return Rendered{}, err
	}
	template := r.plain
	if req.tools != nil {
		template = r.withTools
	}
	if template == nil {
		return Rendered{}, NotRenderable("%s", r.noTemplate)
	}
	return renderWith(template, req, r.files.Special)
}

func renderWith(template *jinja, req *Request, special []jsonbody.Field) (chat Rendered, err error) {
	if err := req.fitTemplate(template); err != nil {
		return chat, err
	}
	if req.continueFinal && !strings.Contains(template.Text, "content") {
		return chat, NotRenderable("the template does not use content, so no final message can be continued")
	}
	final := ""
	chat, err = template.renderBy(func(out []byte) (context []byte, err error) {
		context, final, err = req.appendContext(out, template, special)
		return context, err
	})
	if err != nil {
		return chat, err
	}
	if req.continueFinal {
		if chat.Text, err = cutContinued(chat.Text, final); err != nil {
			chat.Free()
			return Rendered{}, err
		}
	}
	return chat, nil
}

// ParseSGLang reads a chat request by the rules of SGLang.
func (r *Renderer) ParseSGLang(body *jsonbody.Body) (*SGLangRequest, error) {
	return parseSGLang(body, r.options.DefaultKwargs)
}

// RenderSGLang returns the prompt text of a chat by the rules of SGLang, and the text
// that SGLang encodes separately and appends.
func (r *Renderer) RenderSGLang(chat *SGLangRequest) (text Rendered, prefill string, err error) {
	if err := r.refusal(); err != nil {
		return text, "", err
	}
	if r.files.Harmony {
		return text, "", NotRenderable("the engine renders gpt_oss with its own code")
	}
	if r.plain == nil {
		return text, "", NotRenderable("%s", r.noTemplate)
	}
	prefill = chat.settle(sglangWantsParts(r.plain.Text))
	text, err = r.plain.renderBy(func(out []byte) ([]byte, error) { return chat.appendContext(out, r.files.Special), nil })
	return text, prefill, err
}

// SystemRule returns how SGLang treats late system messages with this template.
func (r *Renderer) SystemRule() SystemRule { return r.lateSystem() }

// systemRule renders a late system message and checks whether the text contains it.
func (r *Renderer) systemRule() SystemRule {
	const sentinel = "late system"
	if r.plain == nil {
		return SystemUnknown
	}
	text, err := r.plain.Render([]byte(`{"messages":[{"role":"system","content":"t"},{"role":"user","content":"t"},{"role":"system","content":"` + sentinel + `"},{"role":"user","content":"t"}],"add_generation_prompt":false}`))
	if err != nil {
		return systemInFront
	}
	defer text.Free()
	if strings.Contains(text.Text, sentinel) {
		return systemInline
	}
	return systemInFront
}
