package chat

import (
	"slices"
	"strconv"
	"strings"

	"kvrouter/internal/base/jsonbody"
)

// fitTemplate applies what depends on the template: the role developer becomes
// system where the template does not know it, and then all system messages
// become one at the front.
func (r *Request) fitTemplate(t *jinja) error {
	isDeveloper := func(m message) bool { return m.role == "developer" }
	if !slices.ContainsFunc(r.messages, isDeveloper) {
		return nil
	}
	if t.SupportsDeveloper() {
		for i := range r.messages {
			if !isDeveloper(r.messages[i]) {
				continue
			}
			if r.messages[i].tools != nil {
				return NotRenderable("a developer message with tools")
			}
			r.messages[i].rest = append(r.messages[i].rest, jsonbody.Field{Key: "tools", Raw: "null"})
		}
		return nil
	}
	var systems []string
	var others []message
	merge := false
	for i := range r.messages {
		if isDeveloper(r.messages[i]) {
			r.messages[i].role = "system"
		}
		m := r.messages[i]
		if m.role != "system" {
			others = append(others, m)
			continue
		}
		merge = merge || i > 0
		if text := m.joined(t.WantsParts); text != "" {
			systems = append(systems, text)
		}
	}
	if merge {
		system := message{role: "system", plain: true, parts: []contentPart{{text: strings.Join(systems, "\n\n")}}}
		r.messages = append([]message{system}, others...)
	}
	return nil
}

// joined is the content as one string. With parts, empty texts count as lines;
// without, vLLM drops them before it joins.
func (m message) joined(parts bool) string {
	var texts []string
	for _, p := range m.parts {
		if parts && p.reference || !parts && p.text == "" {
			continue
		}
		texts = append(texts, p.text)
	}
	return strings.Join(texts, "\n")
}

// continueTag marks, as in transformers, where the final message ends that the
// model is to continue.
const continueTag = "CONTINUE_FINAL_MESSAGE_TAG "

// appendContext appends the template's variables as a JSON object, and returns
// the text of the final message if the model is to continue it.
func (r *Request) appendContext(out []byte, t *jinja, special []jsonbody.Field) (context []byte, final string, err error) {
	size := 256
	for _, m := range r.messages {
		for _, p := range m.parts {
			size += len(p.text) + 64
		}
	}
	out = slices.Grow(out, size+size/8)
	out = append(out, `{"messages":[`...)
	for i, m := range r.messages {
		if i > 0 {
			out = append(out, ',')
		}
		tagged := r.continueFinal && i == len(r.messages)-1
		var text string
		if out, text, err = m.appendTo(out, t.WantsParts, tagged); err != nil {
			return nil, "", err
		}
		if tagged {
			final = text
		}
	}
	return appendContextEnd(out, r.tools, jsonbody.MergeFields(special, r.vars), r.addGeneration), final, nil
}

// appendContextEnd appends what follows the messages in a template's variables: the
// tools as JSON, none if empty, and the others.
func appendContextEnd[T ~string | ~[]byte](out []byte, tools T, vars []jsonbody.Field, addGeneration bool) []byte {
	out = append(out, `],"tools":`...)
	if len(tools) == 0 {
		out = append(out, "null"...)
	}
	out = append(out, tools...)
	hasDocuments := false
	for _, f := range vars {
		hasDocuments = hasDocuments || f.Key == "documents"
		out = append(out, ',')
		out = jsonbody.AppendString(out, f.Key)
		out = append(out, ':')
		out = append(out, f.Raw...)
	}
	if !hasDocuments {
		out = append(out, `,"documents":null`...)
	}
	out = append(out, `,"add_generation_prompt":`...)
	out = strconv.AppendBool(out, addGeneration)
	return append(out, '}')
}

// appendTo writes the message in the template's content format. With tagged its
// last text carries continueTag, and the answer holds that text without it.
func (m message) appendTo(out []byte, wantsParts, tagged bool) ([]byte, string, error) {
	out = append(out, `{"role":`...)
	out = jsonbody.AppendString(out, m.role)
	out = append(out, `,"content":`...)
	final := ""
	hasReference := slices.ContainsFunc(m.parts, func(p contentPart) bool { return p.reference })
	switch {
	case len(m.parts) == 1 && !tagged && m.parts[0].raw != "" && !hasReference && (!wantsParts || m.plain || m.role == "tool"):
		out = append(out, m.parts[0].raw...)
	case !wantsParts, m.plain, m.role == "tool" && !hasReference:
		final = m.joined(wantsParts)
		text := final
		if tagged {
			text += continueTag
		}
		out = jsonbody.AppendString(out, text)
	default:
		last := -1
		for i, p := range m.parts {
			if !p.reference {
				last = i
			}
		}
		if tagged && last < 0 {
			return nil, "", NotRenderable("the final message has no text to continue")
		}
		out = append(out, '[')
		for i, p := range m.parts {
			if i > 0 {
				out = append(out, ',')
			}
			text := p.text
			if i == last && tagged {
				final = text
				text += continueTag
			}
			raw := p.raw
			if raw == "" || i == last && tagged {
				raw = string(jsonbody.AppendString(nil, text))
			}
			fields := []jsonbody.Field{{Key: "type", Raw: `"text"`}, {Key: "text", Raw: raw}}
			if p.reference {
				fields = []jsonbody.Field{{Key: "type", Raw: `"tool_reference"`}, {Key: "name", Raw: raw}}
			}
			out = jsonbody.AppendObject(out, append(fields, p.extra...))
		}
		out = append(out, ']')
	}
	for _, f := range m.rest {
		out = append(out, ',')
		out = jsonbody.AppendString(out, f.Key)
		out = append(out, ':')
		out = append(out, f.Raw...)
	}
	return append(out, '}'), final, nil
}

// cutContinued ends a rendered chat where its final message ends.
func cutContinued(rendered, final string) (string, error) {
	tag := strings.TrimSpace(continueTag)
	at := strings.LastIndex(rendered, tag)
	if at < 0 || !strings.Contains(rendered, strings.TrimFunc(final, jsonbody.IsPythonSpace)) {
		return "", NotRenderable("the rendered text does not contain the final message")
	}
	if strings.HasPrefix(rendered[at:], continueTag) {
		return rendered[:at], nil
	}
	return strings.TrimRightFunc(rendered[:at], jsonbody.IsPythonSpace), nil
}
