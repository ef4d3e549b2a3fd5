package tokens

/*
#include <stddef.h>
#include <stdint.h>

typedef struct { uint8_t *data; size_t len; } chat_bytes;

void *chat_template_new(const uint8_t *source, size_t len, chat_bytes *error);
int32_t chat_template_wants_parts(const void *tmpl);
int32_t chat_render(const void *tmpl, const uint8_t *context, size_t len, chat_bytes *out);
void chat_bytes_free(chat_bytes bytes);
void chat_template_free(void *tmpl);
*/
import "C"

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"unsafe"

	"kvrouter/internal/jsonbody"
)

// chatTemplate is a compiled Jinja chat template. It may be rendered by many
// goroutines at once; none may be rendering when it is closed.
type chatTemplate struct {
	// WantsParts tells that the template loops over a message's content, so
	// that vLLM hands it content as a list of parts ("openai") and not as one
	// string.
	WantsParts bool
	// Text is the template's source.
	Text string

	handle   unsafe.Pointer
	contexts sync.Pool // of *[]byte: memory for the JSON of a template's variables
}

// pooledContext bounds what contexts keeps, bytes each: enough for a prompt of
// some hundred thousand tokens.
const pooledContext = 2 << 20

// renderedChat is the text of a chat, in the library's memory: after Free nobody may
// use any part of Text. The zero value needs no Free.
type renderedChat struct {
	Text  string
	bytes C.chat_bytes
}

// Free gives the memory back.
func (r renderedChat) Free() { C.chat_bytes_free(r.bytes) }

// compileTemplate compiles the text of a chat template with the settings that
// transformers gives to jinja2.
func compileTemplate(text string) (*chatTemplate, error) {
	text = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(text) // as jinja2 does
	var failure C.chat_bytes
	handle := C.chat_template_new(bytePointer(text), C.size_t(len(text)), &failure)
	if handle == nil {
		return nil, errors.New(takeBytes(failure))
	}
	return &chatTemplate{
		WantsParts: C.chat_template_wants_parts(handle) == 1,
		Text:       text,
		handle:     handle,
	}, nil
}

// Close frees the template.
func (t *chatTemplate) Close() {
	C.chat_template_free(t.handle)
	t.handle = nil
}

// Render returns the text of a chat. context is a JSON object with the
// template's variables; the order of its keys is the order that the template
// sees.
func (t *chatTemplate) Render(context []byte) (renderedChat, error) {
	var out C.chat_bytes
	if C.chat_render(t.handle, bytePointer(jsonbody.View(context)), C.size_t(len(context)), &out) != 1 {
		return renderedChat{}, errors.New(takeBytes(out))
	}
	return renderedChat{Text: jsonbody.View(libraryBytes(out)), bytes: out}, nil
}

// renderBy is Render for a context that write appends to memory that is used again.
func (t *chatTemplate) renderBy(write func(out []byte) ([]byte, error)) (renderedChat, error) {
	buffer, _ := t.contexts.Get().(*[]byte)
	if buffer == nil {
		buffer = new([]byte)
	}
	defer t.contexts.Put(buffer)
	context, err := write((*buffer)[:0])
	if err != nil {
		return renderedChat{}, err
	}
	if cap(context) <= pooledContext {
		*buffer = context
	}
	chat, err := t.Render(context)
	if err != nil {
		return renderedChat{}, fmt.Errorf("%w: the chat template: %w", errNotRenderable, err)
	}
	return chat, nil
}

// SupportsDeveloper tells whether the template knows the role "developer", by
// the rule of vLLM: its name stands in the text in quotes.
func (t *chatTemplate) SupportsDeveloper() bool {
	return strings.Contains(t.Text, `"developer"`) || strings.Contains(t.Text, `'developer'`)
}

func bytePointer(s string) *C.uint8_t {
	return (*C.uint8_t)(unsafe.Pointer(unsafe.StringData(s)))
}

// takeBytes copies what the library answered and frees it.
func takeBytes(b C.chat_bytes) string {
	defer C.chat_bytes_free(b)
	return string(libraryBytes(b))
}

func libraryBytes(b C.chat_bytes) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(b.data)), int(b.len))
}
