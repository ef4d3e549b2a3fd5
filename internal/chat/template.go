package chat

/*
#cgo CFLAGS: -I${SRCDIR}/../../native/lib
#cgo LDFLAGS: -L${SRCDIR}/../../native/lib -ltokenizers -ldl -lm -lpthread -lstdc++
#if !__has_include("kvrouter_native.h")
#error "native/lib has no library: run `make setup`, which builds it"
#endif
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
	"time"
	"unsafe"

	"kvrouter/internal/guard"
	"kvrouter/internal/jsonbody"
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

	handle   unsafe.Pointer
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
	bytes C.chat_bytes
}

// Free releases the memory.
func (r Rendered) Free() { C.chat_bytes_free(r.bytes) }

// compileTemplate compiles the text of a chat template with the settings that
// transformers gives to jinja2.
func compileTemplate(text string) (*jinja, error) {
	text = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(text) // as jinja2 does
	var failure C.chat_bytes
	handle := C.chat_template_new(bytePointer(text), C.size_t(len(text)), &failure)
	if handle == nil {
		return nil, errors.New(takeBytes(failure))
	}
	return &jinja{
		WantsParts: C.chat_template_wants_parts(handle) == 1,
		Text:       text,
		handle:     handle,
	}, nil
}

// Close frees the template.
func (t *jinja) Close() {
	C.chat_template_free(t.handle)
	t.handle = nil
}

// ErrLimit marks a chat for which its template took too much time or memory, or took it
// for one of at most its size a moment ago. It is an ErrNotRenderable.
var ErrLimit = fmt.Errorf("%w: the chat template reached a limit", ErrNotRenderable)

// Render returns the text of a chat; its error may be an ErrLimit. context is a JSON object with the
// template's variables; the order of its keys is the order that the template
// sees.
func (t *jinja) Render(context []byte) (Rendered, error) {
	var out C.chat_bytes
	if t.limits.On(len(context)) {
		return Rendered{}, fmt.Errorf("%w a moment ago", ErrLimit)
	}
	started := time.Now()
	switch C.chat_render(t.handle, bytePointer(jsonbody.View(context)), C.size_t(len(context)), &out) {
	case 1:
		return Rendered{Text: jsonbody.View(libraryBytes(out)), bytes: out}, nil
	case 2:
		t.limits.Hit(time.Since(started), len(context))
		return Rendered{}, fmt.Errorf("%w: %s", ErrLimit, takeBytes(out))
	}
	return Rendered{}, errors.New(takeBytes(out))
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

func bytePointer(s string) *C.uint8_t {
	return (*C.uint8_t)(unsafe.Pointer(unsafe.StringData(s)))
}

// takeBytes copies the library's answer and frees it.
func takeBytes(b C.chat_bytes) string {
	defer C.chat_bytes_free(b)
	return string(libraryBytes(b))
}

func libraryBytes(b C.chat_bytes) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(b.data)), int(b.len))
}
