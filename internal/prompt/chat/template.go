package chat

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/native"
	_ "kvrouter/internal/prompt/native/link" // the library, if it is built
)

// jinja is a compiled Jinja chat template. It may be rendered by many
// goroutines at once; none may be rendering when it is closed.
type jinja struct {
	// WantsParts means that the template loops over a message's content, so
	// that vLLM hands it content as a list of parts ("openai") and not as one
	// string.
	WantsParts bool
	// Text is the template's source.
	Text string

	compiled native.Template
	contexts sync.Pool // of *[]byte: memory for the JSON of a template's variables
	limits   guard.Pause
}

// pooledContext bounds what contexts keeps, bytes each: enough for a prompt of
// some hundred thousand tokens.
const pooledContext = 2 << 20

// Rendered is the text of a chat, in the library's memory: no part of Text may be used
// after Free. The zero value needs no Free.
type Rendered struct {
	Text  string
	bytes []byte
	from  native.Template // nil: nothing is to be freed
}

// Free releases the memory.
func (r Rendered) Free() {
	if r.from != nil {
		r.from.Free(r.bytes)
	}
}

// compileTemplate compiles the text of a chat template with the settings that
// transformers gives to jinja2.
func compileTemplate(text string) (*jinja, error) {
	library, err := native.Open()
	if err != nil {
		return nil, err
	}
	text = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(text) // as jinja2 does
	compiled, err := library.NewTemplate(text)
	if err != nil {
		return nil, err
	}
	return &jinja{WantsParts: compiled.WantsParts(), Text: text, compiled: compiled}, nil
}

// Close frees the template.
func (t *jinja) Close() { t.compiled.Close() }

// ErrLimit marks a chat for which its template took too much time or memory, or took it
// for one of at most its size a moment ago. It is an ErrNotRenderable.
var ErrLimit = fmt.Errorf("%w: the chat template reached a limit", ErrNotRenderable)

// Render returns the text of a chat; its error may be an ErrLimit. context is a JSON object with the
// template's variables; the order of its keys is the order that the template
// sees.
func (t *jinja) Render(context []byte) (Rendered, error) {
	if t.limits.On(len(context)) {
		return Rendered{}, fmt.Errorf("%w a moment ago", ErrLimit)
	}
	started := time.Now()
	out, result := t.compiled.Render(context)
	if result == native.Done {
		return Rendered{Text: jsonbody.View(out), bytes: out, from: t.compiled}, nil
	}
	defer t.compiled.Free(out)
	if result == native.Limited {
		t.limits.Hit(time.Since(started), len(context))
		return Rendered{}, fmt.Errorf("%w: %s", ErrLimit, out)
	}
	return Rendered{}, errors.New(string(out))
}

// renderBy is Render for a context that write appends to memory that is used again.
func (t *jinja) renderBy(write func(out []byte) ([]byte, error)) (Rendered, error) {
	buffer, _ := t.contexts.Get().(*[]byte)
	if buffer == nil {
		buffer = new([]byte)
	}
	defer t.contexts.Put(buffer)
	context, err := write((*buffer)[:0])
	if err != nil {
		return Rendered{}, err
	}
	if cap(context) <= pooledContext {
		*buffer = context
	}
	chat, err := t.Render(context)
	if errors.Is(err, ErrLimit) {
		return Rendered{}, err
	}
	if err != nil {
		return Rendered{}, fmt.Errorf("%w: chat template: %w", ErrNotRenderable, err)
	}
	return chat, nil
}

// SupportsDeveloper reports whether the template supports the role "developer", by
// vLLM's rule: the quoted name is in its text.
func (t *jinja) SupportsDeveloper() bool {
	return strings.Contains(t.Text, `"developer"`) || strings.Contains(t.Text, `'developer'`)
}
