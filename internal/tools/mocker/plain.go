package mocker

import (
	"bytes"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"kvrouter/internal/prompt/native"
)

// Plain is the library of the built-in model in Go, for a program that was built without the native one. Any other
// model is native.ErrMissing.
type Plain struct{}

// NewFast implements native.Library: there is none.
func (Plain) NewFast([]byte) (native.Fast, string) { return nil, native.ErrMissing.Error() }

// NewExact implements native.Library.
func (Plain) NewExact(tokenizerJSON []byte) (native.Exact, error) {
	if builtin, err := BuiltinTokenizer(); err != nil || !bytes.Equal(tokenizerJSON, builtin) {
		return nil, native.ErrMissing
	}
	return plainBytes{}, nil
}

// NewTemplate implements native.Library.
func (Plain) NewTemplate(source string) (native.Template, error) {
	if source != BuiltinTemplate {
		return nil, native.ErrMissing
	}
	return plainChat{}, nil
}

// CheckRegex implements native.Library.
func (Plain) CheckRegex(string) (square bool, err error) { return false, native.ErrMissing }

// ReadInPages implements native.Library.
func (Plain) ReadInPages() (done func()) { return func() {} }

// BoundArenas implements native.Library.
func (Plain) BoundArenas() {}

// ReleaseStartup implements native.Library.
func (Plain) ReleaseStartup() {}

// plainBytes has a token for each byte, and the special ones.
type plainBytes struct{}

func (plainBytes) Encode(text string, _ bool) ([]uint32, native.Result) {
	ids := make([]uint32, 0, len(text))
next:
	for len(text) > 0 {
		for i, special := range builtinSpecial {
			if rest, is := strings.CutPrefix(text, special); is {
				ids, text = append(ids, uint32(256+i)), rest
				continue next
			}
		}
		ids, text = append(ids, uint32(text[0])), text[1:]
	}
	return ids, native.Done
}

func (plainBytes) Decode(ids []uint32) (string, error) {
	var text []byte
	for _, id := range ids {
		switch {
		case id < 256:
			text = append(text, byte(id))
		case id-256 < uint32(len(builtinSpecial)):
			text = append(text, builtinSpecial[id-256]...)
		}
	}
	return readable(text), nil
}

func (plainBytes) Close() {}

// readable returns bytes as text: each begin of a character without its end, and each other byte that is in none, is
// one replacement character, as in the Unicode Standard, section 3.9, "U+FFFD Substitution of Maximal Subparts".
func readable(text []byte) string {
	if utf8.Valid(text) {
		return string(text)
	}
	var out strings.Builder
	for len(text) > 0 {
		r, n := utf8.DecodeRune(text)
		for r == utf8.RuneError && n < len(text) && !utf8.FullRune(text[:n]) && !utf8.FullRune(text[:n+1]) {
			n++
		}
		out.WriteRune(r)
		text = text[n:]
	}
	return out.String()
}

// plainChat is BuiltinTemplate.
type plainChat struct{}

func (plainChat) WantsParts() bool { return false }

func (plainChat) Render(context []byte) ([]byte, native.Result) {
	var out bytes.Buffer
	of := gjson.ParseBytes(context)
	if tools := of.Get("tools"); holds(tools) {
		out.WriteString("<|im_start|>system\n")
		writeJSON(&out, tools)
		out.WriteString("<|im_end|>\n")
	}
	for _, message := range of.Get("messages").Array() {
		out.WriteString("<|im_start|>" + shown(message.Get("role")) + "\n" + shown(message.Get("content")))
		if calls := message.Get("tool_calls"); holds(calls) {
			writeJSON(&out, calls)
		}
		out.WriteString("<|im_end|>\n")
	}
	if of.Get("add_generation_prompt").Bool() {
		out.WriteString("<|im_start|>assistant\n")
	}
	return out.Bytes(), native.Done
}

func (plainChat) Free([]byte) {}
func (plainChat) Close()      {}

// holds reports whether a template takes a list or an object for true.
func holds(v gjson.Result) bool {
	return v.IsArray() && len(v.Array()) > 0 || v.IsObject() && len(v.Map()) > 0
}

// shown is how a template writes a value.
func shown(v gjson.Result) string {
	switch {
	case !v.Exists():
		return ""
	case v.Type == gjson.Null:
		return "None"
	}
	return v.String()
}

// plainEscapes are those of json.dumps for text that is not limited to ASCII.
var plainEscapes = func() *strings.Replacer {
	pairs := []string{`"`, `\"`, `\`, `\\`, "\n", `\n`, "\r", `\r`, "\t", `\t`, "\b", `\b`, "\f", `\f`}
	for c := range ' ' {
		if !strings.ContainsRune("\n\r\t\b\f", c) {
			pairs = append(pairs, string(c), fmt.Sprintf(`\u%04x`, c))
		}
	}
	return strings.NewReplacer(pairs...)
}()

// writeJSON writes a value as Python's json.dumps does, with spaces.
func writeJSON(out *bytes.Buffer, v gjson.Result) {
	if !v.IsArray() && !v.IsObject() {
		if v.Type != gjson.String {
			out.WriteString(v.Raw)
			return
		}
		out.WriteString(`"` + plainEscapes.Replace(v.Str) + `"`)
		return
	}
	begin, end := "[", "]"
	if v.IsObject() {
		begin, end = "{", "}"
	}
	out.WriteString(begin)
	first := true
	v.ForEach(func(key, value gjson.Result) bool {
		if !first {
			out.WriteString(", ")
		}
		if first = false; v.IsObject() {
			writeJSON(out, key)
			out.WriteString(": ")
		}
		writeJSON(out, value)
		return true
	})
	out.WriteString(end)
}
