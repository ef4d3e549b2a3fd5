// Package encode turns text into a model's tokens and caches the tokens of repeated pieces of text.
package encode

/*
#cgo CFLAGS: -I${SRCDIR}/../../native/lib
#cgo LDFLAGS: -L${SRCDIR}/../../native/lib -ltokenizers -ldl -lm -lpthread
#if !__has_include("kvrouter_native.h")
#error "native/lib has no library: run `make setup`, which builds it"
#endif
#include <stddef.h>
#include <stdint.h>

typedef struct { uint32_t *data; size_t len; } token_ids;
typedef struct { size_t start, end; uint32_t tokens; } text_piece;
typedef struct { uint8_t *data; size_t len; } chat_bytes;

int32_t text_encode(const void *tokenizer, const uint8_t *text, size_t len, int32_t add_special, token_ids *out);
void *fast_encoder_new(const uint8_t *json, size_t len, chat_bytes *error);
token_ids fast_encode(const void *Encoder, const uint8_t *text, size_t len, text_piece *pieces, size_t count, int32_t add_special);
void fast_encoder_free(void *Encoder);
void token_ids_free(token_ids ids);
void chat_bytes_free(chat_bytes bytes);
*/
import "C"

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/daulet/tokenizers"
	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"
	"github.com/zeebo/xxh3"

	"kvrouter/internal/guard"
)

// Encoder converts between text and tokens; it is safe for concurrent use. It encodes
// with crate fastokens if that library gives the same tokens as crate tokenizers for
// all probes. Crate tokenizers is then loaded only to decode tokens and to encode texts
// that fastokens rejects.
type Encoder struct {
	fast unsafe.Pointer // nil: crate tokenizers encodes
	why  string         // fast is nil

	read  func() ([]byte, error) // tokenizer.json
	sum   uint64                 // of what it was when the model was opened
	mu    sync.Mutex             // guards exact
	exact *tokenizers.Tokenizer  // nil: not in memory

	limits guard.Pause // after texts for which it took too much memory or time
}

// New returns an encoder for the content of a tokenizer.json, which Check has accepted.
// read returns the same content again when it is needed later.
func New(tokenizerJSON []byte, read func() ([]byte, error)) (*Encoder, error) {
	// fastokens first: what is freed again should be last in memory.
	fast, why := newFast(tokenizerJSON)
	exact, err := tokenizers.FromBytes(tokenizerJSON)
	if err != nil {
		C.fast_encoder_free(fast)
		return nil, err
	}
	e := &Encoder{fast: fast, why: why, read: read, sum: xxh3.Hash(tokenizerJSON), exact: exact}
	for _, text := range probePieces {
		e.encodeExact(make([][]uint32, 1), []string{text}, true, func(int) bool { return true })
		if e.limits.Hits() > 0 {
			e.Close()
			return nil, errors.New("it takes too much memory for short texts")
		}
	}
	if e.fast == nil {
		return e, nil
	}
	if text, differs := e.differs(probeTexts(tokenizerJSON)); differs {
		C.fast_encoder_free(e.fast)
		e.fast, e.why = nil, fmt.Sprintf("its tokens differ for %.40q", text)
		return e, nil
	}
	e.exact.Close()
	e.exact = nil
	return e, nil
}

// takeBytes copies the library's text and frees it.
func takeBytes(b C.chat_bytes) string {
	defer C.chat_bytes_free(b)
	return string(unsafe.Slice((*byte)(b.data), int(b.len)))
}

// newFast makes fastokens' encoder, or returns the reason why it cannot.
func newFast(tokenizerJSON []byte) (fast unsafe.Pointer, why string) {
	var problem C.chat_bytes
	fast = C.fast_encoder_new((*C.uint8_t)(unsafe.SliceData(tokenizerJSON)), C.size_t(len(tokenizerJSON)), &problem)
	if fast == nil {
		why = takeBytes(problem)
	}
	return fast, why
}

// Close frees the encoder; no other call may be under way.
func (e *Encoder) Close() {
	C.fast_encoder_free(e.fast)
	if e.exact != nil {
		e.exact.Close()
	}
}

// loadExact returns the tokenizer of crate tokenizers and loads it if it is not in
// memory. The error means that the file cannot be read or has changed.
func (e *Encoder) loadExact() (*tokenizers.Tokenizer, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.exact != nil {
		return e.exact, nil
	}
	tokenizerJSON, err := e.read()
	if err != nil {
		return nil, err
	}
	if xxh3.Hash(tokenizerJSON) != e.sum {
		return nil, errors.New("tokenizer.json has changed since startup: restart to use the new file")
	}
	e.exact, err = tokenizers.FromBytes(tokenizerJSON)
	return e.exact, err
}

// Library names the crate that encodes, and the reason if it is not fastokens.
func (e *Encoder) Library() (name, why string) {
	if e.fast != nil {
		return "fastokens", ""
	}
	return "tokenizers", e.why
}

// Decode returns the text of tokens, including special tokens. The error means that the
// tokenizer's file cannot be read or has changed, that there are too many tokens, or that
// the tokenizer failed or reached its limits.
func (e *Encoder) Decode(tokens []uint32) (string, error) {
	exact, err := e.loadExact()
	if err != nil {
		return "", err
	}
	if uint64(len(tokens)) > math.MaxUint32 {
		return "", fmt.Errorf("%d tokens; the maximum is %d", len(tokens), uint32(math.MaxUint32))
	}
	// The library has no other way to return a reason. native/src/daulet.rs uses what no
	// text in UTF-8 contains: 0xff before a reason, and 0xc0 0x80 for a zero byte.
	text := exact.Decode(tokens, false)
	if reason, failed := strings.CutPrefix(text, "\xff"); failed {
		return "", errors.New(reason)
	}
	return strings.ReplaceAll(text, "\xc0\x80", "\x00"), nil
}

// WithoutLimits returns a read function that removes the truncation and padding from
// the tokenizer.json that read returns: engines set them per call.
func WithoutLimits(read func() ([]byte, error)) func() ([]byte, error) {
	return func() ([]byte, error) {
		raw, err := read()
		for _, key := range []string{"truncation", "padding"} {
			if v := gjson.GetBytes(raw, key); err == nil && v.Exists() && v.Type != gjson.Null {
				raw, err = sjson.SetRawBytes(raw, key, []byte("null"))
			}
		}
		return raw, err
	}
}

// failedPiece stands for the number of tokens of a piece that could not be encoded.
const failedPiece = math.MaxUint32

// Encode returns the tokens of pieces of a text, each encoded as if it were a whole
// text. Not ok: the tokenizer failed, or reached its limits with a text of at most that
// length a moment ago.
func (e *Encoder) Encode(text string, pieces []string, addSpecial bool) (tokens [][]uint32, ok bool) {
	longest := 0
	for _, piece := range pieces {
		longest = max(longest, len(piece))
	}
	if e.limits.On(longest) {
		return nil, false
	}
	tokens = make([][]uint32, len(pieces))
	if e.fast == nil {
		return tokens, e.encodeExact(tokens, pieces, addSpecial, func(int) bool { return true })
	}
	var few [16]C.text_piece
	spans := few[:0]
	for _, piece := range pieces {
		start := C.size_t(uintptr(unsafe.Pointer(unsafe.StringData(piece))) - uintptr(unsafe.Pointer(unsafe.StringData(text))))
		if piece == "" {
			start = 0
		}
		spans = append(spans, C.text_piece{start: start, end: start + C.size_t(len(piece))})
	}
	ids := C.fast_encode(e.fast, bytePointer(text), C.size_t(len(text)), unsafe.SliceData(spans), C.size_t(len(spans)), special(addSpecial))
	defer C.token_ids_free(ids)
	all := unsafe.Slice((*uint32)(ids.data), int(ids.len))
	failed := false
	for i, span := range spans {
		if span.tokens == failedPiece {
			failed = true
			continue
		}
		n := int(span.tokens)
		tokens[i], all = copied(all[:n]), all[n:]
	}
	return tokens, !failed || e.encodeExact(tokens, pieces, addSpecial, func(i int) bool { return spans[i].tokens == failedPiece })
}

// copied returns a copy, which is not nil where there are no tokens: nil stands for a
// piece that is not encoded.
func copied(tokens []uint32) []uint32 {
	return append(make([]uint32, 0, len(tokens)), tokens...)
}

// encodeExact fills in the tokens of the pieces that are requested, by crate tokenizers.
func (e *Encoder) encodeExact(tokens [][]uint32, pieces []string, addSpecial bool, asked func(i int) bool) (ok bool) {
	exact, err := e.loadExact()
	if err != nil {
		return false
	}
	// The library's own type is nothing but this pointer; its pinned version says
	// so, and a nil here would fail every test.
	handle := *(*unsafe.Pointer)(unsafe.Pointer(exact))
	for i, piece := range pieces {
		if !asked(i) {
			continue
		}
		var out C.token_ids
		started := time.Now()
		if result := C.text_encode(handle, bytePointer(piece), C.size_t(len(piece)), special(addSpecial), &out); result != 1 {
			if result == 2 {
				e.limits.Hit(time.Since(started), len(piece))
			}
			return false
		}
		tokens[i] = copied(unsafe.Slice((*uint32)(out.data), int(out.len)))
		C.token_ids_free(out)
	}
	return true
}

func special(add bool) C.int32_t {
	if add {
		return 1
	}
	return 0
}

// differs reports whether fastokens has other tokens for a text than crate tokenizers,
// and for which. Texts that it cannot encode do not count: the other one encodes them.
func (e *Encoder) differs(texts []string) (text string, differs bool) {
	fast, exact := Pieces(e.Encode), make([][]uint32, 1)
	for i, text := range texts {
		// The long run, which takes most of the time, is the second: once is enough.
		for _, addSpecial := range []bool{false, true}[i%2:] {
			got, ok := fast.whole(text, addSpecial)
			if !e.encodeExact(exact, []string{text}, addSpecial, func(int) bool { return true }) || !ok || !slices.Equal(got, exact[0]) {
				return text, true
			}
		}
	}
	return "", false
}

// probePieces are what probes are made of beside borders and added tokens: code,
// scripts, numbers, marks that combine, control characters, template pieces.
var probePieces = []string{
	"The quick brown fox doesn't jump; it's 12,345.67 km (7%) away, they'll say.", "CamelCase snake_case kebab-case HTTPServer iOS",
	"func main() {\n\tfor i := 0; i < n; i++ {\n\t\tfmt.Println(\"x\\n\", i)\n\t}\n}\n", "<div class=\"a\">&amp;</div>\r\n\r\n    x = {'a': [1, 2.5e-3, None]}  # end",
	"敏捷的棕色狐狸跳过了懒狗。東京の天気は、晴れです！한국어 문장도 있습니다.", "Привет, мир! Ελληνικά, עברית, العربية ١٢٣, हिन्दी में, ภาษาไทย, ქართული",
	"😀👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇩🇪 ☕️", "Å A\u030a ﬁ ① ½ Ⅷ ǅ İstanbul ẞ \u0301 e\u0301\u0302 q\u0323\u0307", "\u00a0\u2003\u200b\u2028\u3000\ufeff\u180e\ufffd\u00ad",
	"\x00\x01\x04\x1b[0m\x7f\u0085", "\U00010348\U000e0001\U0001d54f\U0003134a", "<s> </s> [INST] <|im_start|>user\n<|im_end|>\n<｜User｜>▁a<pad><0x0A>", "     \n\n\n  \t\t\r\n \n", "1234567890 3.14159 0xDEADBEEF １２３",
}

// probeTexts returns the texts that both encoders are compared on: long runs, all
// pieces, and random sequences of them with added tokens in between.
func probeTexts(tokenizerJSON []byte) []string {
	texts := []string{"", strings.Repeat("a", 64<<10), strings.Repeat(" ", 3000), strings.Repeat("\n", 1000), strings.Repeat("é", 500), strings.Repeat("中", 1000), strings.Repeat("=-", 1000)}
	texts = append(texts, probePieces...)
	pieces := slices.Concat(probePieces, borders, borders)
	var added []string
	gjson.GetBytes(tokenizerJSON, "added_tokens").ForEach(func(_, token gjson.Result) bool {
		added = append(added, strings.Clone(token.Get("content").Str))
		return len(added) < 1000
	})
	random := rand.New(rand.NewPCG(2, 2)) // the same texts at every start
	for range 50 {
		var text strings.Builder
		for range 1 + random.IntN(8) {
			text.WriteString(pieces[random.IntN(len(pieces))])
			if len(added) > 0 && random.IntN(2) == 0 {
				text.WriteString(added[random.IntN(len(added))])
			}
		}
		texts = append(texts, text.String())
	}
	return texts
}

func bytePointer(s string) *C.uint8_t {
	return (*C.uint8_t)(unsafe.Pointer(unsafe.StringData(s)))
}
