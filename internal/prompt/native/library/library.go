//go:build cgo

// Package library is the library in native/, linked.
package library

/*
#cgo CFLAGS: -I${SRCDIR}/../../../../native/lib
#cgo LDFLAGS: -L${SRCDIR}/../../../../native/lib -ltokenizers -ldl -lm -lpthread -lstdc++
#if !__has_include("kvrouter_native.h")
#error "native/lib has no library: run `make setup`, which builds it"
#endif
#include <stddef.h>
#include <stdint.h>

typedef struct { uint8_t *data; size_t len; } chat_bytes;
typedef struct { uint32_t *data; size_t len; } token_ids;
typedef struct { size_t start, end; uint32_t tokens; } text_piece;

void *chat_template_new(const uint8_t *source, size_t len, chat_bytes *error);
int32_t chat_template_wants_parts(const void *tmpl);
int32_t chat_render(const void *tmpl, const uint8_t *context, size_t len, chat_bytes *out);
void chat_template_free(void *tmpl);
void chat_bytes_free(chat_bytes bytes);

int32_t text_encode(const void *tokenizer, const uint8_t *text, size_t len, int32_t add_special, token_ids *out);
void *fast_encoder_new(const uint8_t *json, size_t len, chat_bytes *error);
token_ids fast_encode(const void *encoder, const uint8_t *text, size_t len, text_piece *pieces, size_t count, int32_t add_special);
void fast_encoder_free(void *encoder);
void token_ids_free(token_ids ids);
int32_t regex_check(const uint8_t *expression, size_t len, chat_bytes *out);
*/
import "C"

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"unsafe"

	"github.com/daulet/tokenizers"

	"kvrouter/internal/prompt/native"
)

// Library implements native.Library.
type Library struct{}

type template struct{ handle unsafe.Pointer }

// NewTemplate implements native.Library.
func (Library) NewTemplate(source string) (native.Template, error) {
	var failure C.chat_bytes
	handle := C.chat_template_new(bytePointer(source), C.size_t(len(source)), &failure)
	if handle == nil {
		return nil, errors.New(taken(failure))
	}
	return &template{handle}, nil
}

func (t *template) WantsParts() bool { return C.chat_template_wants_parts(t.handle) == 1 }

func (t *template) Render(context []byte) (text []byte, result native.Result) {
	var out C.chat_bytes
	result = native.Result(C.chat_render(t.handle, (*C.uint8_t)(unsafe.SliceData(context)), C.size_t(len(context)), &out))
	return unsafe.Slice((*byte)(out.data), int(out.len)), result
}

func (t *template) Free(text []byte) {
	C.chat_bytes_free(C.chat_bytes{data: (*C.uint8_t)(unsafe.SliceData(text)), len: C.size_t(len(text))})
}

func (t *template) Close() {
	C.chat_template_free(t.handle)
	t.handle = nil
}

type fast struct{ handle unsafe.Pointer }

// NewFast implements native.Library.
func (Library) NewFast(tokenizerJSON []byte) (encoder native.Fast, why string) {
	var problem C.chat_bytes
	handle := C.fast_encoder_new((*C.uint8_t)(unsafe.SliceData(tokenizerJSON)), C.size_t(len(tokenizerJSON)), &problem)
	if handle == nil {
		return nil, taken(problem)
	}
	return &fast{handle}, ""
}

// failedPiece stands for the number of tokens of a piece that could not be encoded.
const failedPiece = math.MaxUint32

func (f *fast) Encode(tokens [][]uint32, text string, pieces []string, addSpecial bool) (all bool) {
	var few [16]C.text_piece
	spans := few[:0]
	for _, piece := range pieces {
		start := C.size_t(uintptr(unsafe.Pointer(unsafe.StringData(piece))) - uintptr(unsafe.Pointer(unsafe.StringData(text))))
		if piece == "" {
			start = 0
		}
		spans = append(spans, C.text_piece{start: start, end: start + C.size_t(len(piece))})
	}
	ids := C.fast_encode(f.handle, bytePointer(text), C.size_t(len(text)), unsafe.SliceData(spans), C.size_t(len(spans)), flag(addSpecial))
	defer C.token_ids_free(ids)
	rest := unsafe.Slice((*uint32)(ids.data), int(ids.len))
	all = true
	for i, span := range spans {
		if span.tokens == failedPiece {
			all = false
			continue
		}
		n := int(span.tokens)
		tokens[i], rest = copied(rest[:n]), rest[n:]
	}
	return all
}

func (f *fast) Close() { C.fast_encoder_free(f.handle) }

// exact is a tokenizer with the library's own pointer to it: daulet's type is nothing but that
// pointer. Its pinned version says so, and a nil here would fail every test.
type exact struct {
	*tokenizers.Tokenizer
	handle unsafe.Pointer
}

// NewExact implements native.Library.
func (Library) NewExact(tokenizerJSON []byte) (native.Exact, error) {
	t, err := tokenizers.FromBytes(tokenizerJSON)
	if err != nil {
		return nil, err
	}
	return &exact{t, *(*unsafe.Pointer)(unsafe.Pointer(t))}, nil
}

func (e *exact) Encode(text string, addSpecial bool) ([]uint32, native.Result) {
	var out C.token_ids
	result := native.Result(C.text_encode(e.handle, bytePointer(text), C.size_t(len(text)), flag(addSpecial), &out))
	if result != native.Done {
		return nil, result
	}
	defer C.token_ids_free(out)
	return copied(unsafe.Slice((*uint32)(out.data), int(out.len))), result
}

func (e *exact) Decode(tokens []uint32) (string, error) {
	if uint64(len(tokens)) > math.MaxUint32 {
		return "", fmt.Errorf("%d tokens; the maximum is %d", len(tokens), uint32(math.MaxUint32))
	}
	// The library has no other way to return a reason. native/src/daulet.rs uses what no text in
	// UTF-8 contains: 0xff before a reason, and 0xc0 0x80 for a zero byte.
	text := e.Tokenizer.Decode(tokens, false)
	if reason, failed := strings.CutPrefix(text, "\xff"); failed {
		return "", errors.New(reason)
	}
	return strings.ReplaceAll(text, "\xc0\x80", "\x00"), nil
}

func (e *exact) Close() { _ = e.Tokenizer.Close() }

// CheckRegex implements native.Library.
func (Library) CheckRegex(expression string) (square bool, err error) {
	var problem C.chat_bytes
	switch native.Result(C.regex_check(bytePointer(expression), C.size_t(len(expression)), &problem)) {
	case native.Done:
		return false, nil
	case native.Limited:
		return true, nil
	}
	return false, errors.New(taken(problem))
}

// taken copies the library's text and frees it.
func taken(b C.chat_bytes) string {
	defer C.chat_bytes_free(b)
	return string(unsafe.Slice((*byte)(b.data), int(b.len)))
}

// copied returns a copy, which is not nil where there are no tokens: nil stands for a piece that is
// not encoded.
func copied(tokens []uint32) []uint32 {
	return append(make([]uint32, 0, len(tokens)), tokens...)
}

func flag(set bool) C.int32_t {
	if set {
		return 1
	}
	return 0
}

func bytePointer(s string) *C.uint8_t {
	return (*C.uint8_t)(unsafe.Pointer(unsafe.StringData(s)))
}
