// Package encode turns text into a model's tokens and caches the tokens of repeated pieces of text.
package encode

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"
	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/prompt/native"
	_ "kvrouter/internal/prompt/native/link" // the library, if it is built
)

// Encoder converts between text and tokens; it is safe for concurrent use. It encodes
// with crate fastokens if that library gives the same tokens as crate tokenizers for
// all probes. Crate tokenizers is then loaded only to decode tokens and to encode texts
// that fastokens rejects.
type Encoder struct {
	library native.Library
	fast    native.Fast // nil: crate tokenizers encodes
	why     string      // fast is nil

	read  func() ([]byte, error) // tokenizer.json
	sum   uint64                 // of what it was when the model was opened
	mu    sync.Mutex             // guards exact; held while it is loaded
	exact native.Exact           // nil: not in memory

	limits guard.Pause // after texts for which it took too much memory or time
}

// New returns an encoder for the content of a tokenizer.json, which Check has accepted.
// read returns the same content again when it is needed later.
func New(library native.Library, tokenizerJSON []byte, read func() ([]byte, error)) (*Encoder, error) {
	// fastokens first: what is freed again should be last in memory.
	fast, why := library.NewFast(tokenizerJSON)
	exact, err := library.NewExact(tokenizerJSON)
	if err != nil {
		if fast != nil {
			fast.Close()
		}
		return nil, err
	}
	e := &Encoder{library: library, fast: fast, why: why, read: read, sum: xxh3.Hash(tokenizerJSON), exact: exact}
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
		e.fast.Close()
		e.fast, e.why = nil, fmt.Sprintf("its tokens differ for %.40q", text)
		return e, nil
	}
	e.exact.Close()
	e.exact = nil
	return e, nil
}

// Close frees the encoder; no other call may be under way.
func (e *Encoder) Close() {
	if e.fast != nil {
		e.fast.Close()
	}
	if e.exact != nil {
		e.exact.Close()
	}
}

// loadExact returns the tokenizer of crate tokenizers and loads it if it is not in
// memory. The error means that the file cannot be read or has changed.
func (e *Encoder) loadExact() (native.Exact, error) {
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
	e.exact, err = e.library.NewExact(tokenizerJSON)
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
	return exact.Decode(tokens)
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
	return tokens, e.fast.Encode(tokens, text, pieces, addSpecial) ||
		e.encodeExact(tokens, pieces, addSpecial, func(i int) bool { return tokens[i] == nil })
}

// encodeExact fills in the tokens of the pieces that are requested, by crate tokenizers.
func (e *Encoder) encodeExact(tokens [][]uint32, pieces []string, addSpecial bool, asked func(i int) bool) (ok bool) {
	exact, err := e.loadExact()
	if err != nil {
		return false
	}
	for i, piece := range pieces {
		if !asked(i) {
			continue
		}
		started := time.Now()
		ids, result := exact.Encode(piece, addSpecial)
		if result == native.Limited {
			e.limits.Hit(time.Since(started), len(piece))
		}
		if result != native.Done {
			return false
		}
		tokens[i] = ids
	}
	return true
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
	"func main() {\n\tfor i := 0; i < n; i++ {\n\t\tfmt.Println(\"x\\n\", i)\n\t}\n}\n",
	"<div class=\"a\">&amp;</div>\r\n\r\n    x = {'a': [1, 2.5e-3, None]}  # end",
	"敏捷的棕色狐狸跳过了懒狗。東京の天気は、晴れです！한국어 문장도 있습니다.", "Привет, мир! Ελληνικά, עברית, العربية ١٢٣, हिन्दी में, ภาษาไทย, ქართული",
	"😀👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇩🇪 ☕️", "Å A\u030a ﬁ ① ½ Ⅷ ǅ İstanbul ẞ \u0301 e\u0301\u0302 q\u0323\u0307",
	"\u00a0\u2003\u200b\u2028\u3000\ufeff\u180e\ufffd\u00ad",
	"\x00\x01\x04\x1b[0m\x7f\u0085", "\U00010348\U000e0001\U0001d54f\U0003134a",
	"<s> </s> [INST] <|im_start|>user\n<|im_end|>\n<｜User｜>▁a<pad><0x0A>", "     \n\n\n  \t\t\r\n \n", "1234567890 3.14159 0xDEADBEEF １２３",
}

// probeTexts returns the texts that both encoders are compared on: long runs, all
// pieces, and random sequences of them with added tokens in between.
func probeTexts(tokenizerJSON []byte) []string {
	texts := []string{"", strings.Repeat("a", 64<<10), strings.Repeat(" ", 3000), strings.Repeat("\n", 1000), strings.Repeat("é", 500),
		strings.Repeat("中", 1000), strings.Repeat("=-", 1000)}
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
