package jsonbody

import (
	"bytes"
	"strings"
)

// IsCompact reports whether a JSON text has no space outside of its strings, and no escape in
// the name of a member. Of any other text the answer is arbitrary.
func IsCompact(text []byte) bool {
	view := View(text)
	for i := 0; i < len(view); {
		switch b := view[i]; {
		case b == '"':
			end, escaped := stringEnd(view, i+1)
			if escaped && end < len(view) && view[end] == ':' {
				return false
			}
			i = end
		case b <= ' ':
			return false
		default:
			i++
		}
	}
	return true
}

// Compact appends a JSON text without the spaces outside of its strings, and without the escapes
// in the names of members that they do not need. Not ok: the text is no JSON object, and nothing is appended.
func Compact(out, text []byte) (_ []byte, ok bool) {
	text = bytes.TrimSpace(text)
	if len(text) < len("{}") || text[0] != '{' || text[len(text)-1] != '}' {
		return out, false
	}
	view, length := View(text), len(out)
	for i := 0; i < len(view); {
		switch b := view[i]; {
		case b == '"':
			end, escaped := stringEnd(view, i+1)
			if end >= len(view) {
				return out[:length], false
			}
			if escaped && strings.HasPrefix(strings.TrimLeft(view[end:], " \t\r\n"), ":") {
				out = AppendString(out, unescape(view[i+1:end-1]))
			} else {
				out = append(out, view[i:end]...)
			}
			i = end
		case b <= ' ':
			if from := i; from > 0 {
				for i < len(view) && view[i] <= ' ' {
					i++
				}
				if !punctuation(view[from-1]) && !punctuation(view[i]) { // two values in a row
					return out[:length], false
				}
			}
		default:
			out = append(out, b)
			i++
		}
	}
	return out, true
}

// punctuation reports whether a byte separates the parts of a JSON text, or begins or ends one
// of them.
func punctuation(b byte) bool { return strings.IndexByte(`{}[]:,"`, b) >= 0 }

// EscapesNames reports whether a JSON text may have an escape in the name of a member that is
// made of ASCII letters, digits and punctuation: that takes one of a code from U+0020 to U+007F.
func EscapesNames(text []byte) bool {
	for {
		at := bytes.IndexByte(text, '\\')
		if at < 0 || at+4 >= len(text) {
			return false
		}
		if text[at+1] == 'u' && text[at+2] == '0' && text[at+3] == '0' && text[at+4] >= '2' && text[at+4] <= '7' {
			return true
		}
		text = text[at+2:]
	}
}

// Unescaped returns a JSON text without its escapes, which need not be JSON then.
func Unescaped(text []byte) []byte { return []byte(unescape(View(text))) }
