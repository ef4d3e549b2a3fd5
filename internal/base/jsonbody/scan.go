// Package jsonbody validates and parses a request's JSON body in one pass, without copying
// its strings.
package jsonbody

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
	"unsafe"

	"github.com/tidwall/gjson"
)

// maxDepth bounds how deep a request's JSON may be nested, as encoding/json
// does: a body of brackets must not use up the stack.
const maxDepth = 10_000

const (
	// maxMembers bounds the members of all objects of a body together: each takes
	// about a hundred bytes here, and as little as six in the body.
	maxMembers = 1 << 18
	// MaxMessages is the maximum number of messages that Body.Messages parses.
	MaxMessages = 1 << 16
)

// Body is a request's JSON object, validated and parsed once. The strings in it are
// views of Raw, which must not change. One goroutine uses a Body.
type Body struct {
	Raw []byte
	// LoneSurrogate: a string escapes half of a surrogate pair, which Python
	// keeps and UTF-8 cannot.
	LoneSurrogate bool
	Top           []Member
	repeats       bool          // a name of Top is in Raw more than once
	views         []MessageView // of messages, once requested
}

// MessageView is one element of messages with its members.
type MessageView struct {
	Value  gjson.Result
	Fields []Member
}

// Parse validates and parses a request's body; ok is false if the body is not one
// JSON object, nested at most 10,000 deep and with at most 262,144 members in all.
// Whether strings are UTF-8 is not checked. Body.Raw is raw without a byte order mark.
func Parse(raw []byte) (b *Body, ok bool) {
	raw = bytes.TrimPrefix(raw, []byte("\xef\xbb\xbf")) // with which tools on Windows begin files; engines accept it
	scan := checker{text: raw}
	if !scan.whole() {
		return nil, false
	}
	text := strings.TrimLeft(View(raw), " \t\r\n")
	if text[0] != '{' {
		return nil, false
	}
	top, repeats := members(text)
	return &Body{Raw: raw, LoneSurrogate: scan.lone, Top: top, repeats: repeats}, true
}

// Refusal says why Parse refuses a body, for an error.
func Refusal(raw []byte) string {
	if at := bytes.IndexByte(raw[:min(len(raw), 4)], 0); at >= 0 || bytes.HasPrefix(raw, []byte("\xff\xfe")) ||
		bytes.HasPrefix(raw, []byte("\xfe\xff")) {
		return "the request body must be UTF-8: it begins as UTF-16 or UTF-32 do"
	}
	return "the request body must be a JSON object of at most 262,144 members and 10,000 levels"
}

// Each calls yield with the members of the body in order until it returns false: of several of
// one name, with all of them.
func (b *Body) Each(yield func(Member) bool) {
	if !b.repeats {
		for _, m := range b.Top {
			if !yield(m) {
				return
			}
		}
		return
	}
	eachMember(strings.TrimLeft(View(b.Raw), " \t\r\n"), func(key string, value gjson.Result) bool { return yield(Member{key, value}) })
}

// Get returns the member of that name; of several, as in Python, the last.
func (b *Body) Get(key string) gjson.Result { return FieldOf(b.Top, key) }

// Messages returns the elements of messages: none if it is not a list, MaxMessages
// + 1 of a longer list.
func (b *Body) Messages() []MessageView {
	if list := b.Get("messages"); b.views == nil && list.IsArray() {
		b.views = []MessageView{}
		EachElement(list.Raw, func(v gjson.Result) bool {
			m := MessageView{Value: v}
			if v.IsObject() {
				m.Fields = Members(v)
			}
			b.views = append(b.views, m)
			return len(b.views) <= MaxMessages
		})
	}
	return b.views
}

// Place returns the offset in Raw of a value of the body that is not empty.
func (b *Body) Place(v gjson.Result) int {
	return int(uintptr(unsafe.Pointer(unsafe.StringData(v.Raw))) - uintptr(unsafe.Pointer(unsafe.SliceData(b.Raw))))
}

// FieldOf returns a member's value; without such a member, a value that does not
// exist.
func FieldOf(list []Member, key string) gjson.Result {
	for i := range list {
		if list[i].Key == key {
			return list[i].Value
		}
	}
	return gjson.Result{}
}

// View returns bytes as a string without a copy; they must not change.
func View(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// checker checks a text against JSON's grammar in one pass.
type checker struct {
	text    []byte
	lone    bool // a string escapes half of a surrogate pair
	members int  // of all objects so far
}

// whole reports whether the text is one value.
func (c *checker) whole() bool {
	at := c.value(c.space(0), 0)
	return at >= 0 && c.space(at) == len(c.text)
}

func (c *checker) space(i int) int {
	for i < len(c.text) && (c.text[i] == ' ' || c.text[i] == '\n' || c.text[i] == '\t' || c.text[i] == '\r') {
		i++
	}
	return i
}

// value returns where the value at i ends, -1 if there is none.
func (c *checker) value(i, depth int) int {
	if i >= len(c.text) || depth > maxDepth {
		return -1
	}
	switch c.text[i] {
	case '"':
		return c.str(i + 1)
	case '{':
		return c.items(i+1, '}', depth, true)
	case '[':
		return c.items(i+1, ']', depth, false)
	case 't':
		return c.word(i, "true")
	case 'f':
		return c.word(i, "false")
	case 'n':
		return c.word(i, "null")
	}
	return c.number(i)
}

// items reads an object's or an array's inside up to and with its end.
func (c *checker) items(i int, end byte, depth int, keys bool) int {
	if i = c.space(i); i < len(c.text) && c.text[i] == end {
		return i + 1
	}
	for {
		if keys {
			c.members++
			if i = c.space(i); i >= len(c.text) || c.text[i] != '"' || c.members > maxMembers {
				return -1
			}
			if i = c.str(i + 1); i < 0 {
				return -1
			}
			if i = c.space(i); i >= len(c.text) || c.text[i] != ':' {
				return -1
			}
			i++
		}
		if i = c.value(c.space(i), depth+1); i < 0 {
			return -1
		}
		if i = c.space(i); i >= len(c.text) {
			return -1
		}
		switch c.text[i] {
		case ',':
			i++
		case end:
			return i + 1
		default:
			return -1
		}
	}
}

func (c *checker) word(i int, word string) int {
	if strings.HasPrefix(View(c.text[i:]), word) {
		return i + len(word)
	}
	return -1
}

func (c *checker) number(i int) int {
	digits := func() bool {
		start := i
		for i < len(c.text) && c.text[i] >= '0' && c.text[i] <= '9' {
			i++
		}
		return i > start
	}
	next := func(wanted string) bool {
		if i < len(c.text) && strings.IndexByte(wanted, c.text[i]) >= 0 {
			i++
			return true
		}
		return false
	}
	next("-")
	if !next("0") && !digits() {
		return -1
	}
	if next(".") && !digits() {
		return -1
	}
	if next("eE") {
		next("+-")
		if !digits() {
			return -1
		}
	}
	return i
}

// str returns the end of the string whose inside begins at i, -1 if it has none.
func (c *checker) str(i int) int {
	for {
		if i = plainEnd(c.text, i); i >= len(c.text) {
			return -1
		}
		switch c.text[i] {
		case '"':
			return i + 1
		case '\\':
			if i+1 >= len(c.text) {
				return -1
			}
			switch c.text[i+1] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
				i += 2
			case 'u':
				unit, ok := hexUnit(c.text, i+2)
				if !ok {
					return -1
				}
				i += 6
				if unit < 0xd800 || unit > 0xdfff {
					continue
				}
				low, ok := uint16(0), false
				if i+1 < len(c.text) && c.text[i] == '\\' && c.text[i+1] == 'u' {
					low, ok = hexUnit(c.text, i+2)
				}
				if ok && unit < 0xdc00 && low >= 0xdc00 && low <= 0xdfff {
					i += 6
				} else {
					c.lone = true
				}
			default:
				return -1
			}
		default: // a control character
			return -1
		}
	}
}

// hexUnit reads the four digits of a \u escape.
func hexUnit(text []byte, i int) (unit uint16, ok bool) {
	if i+4 > len(text) {
		return 0, false
	}
	for _, b := range text[i : i+4] {
		switch {
		case b >= '0' && b <= '9':
			b -= '0'
		case b >= 'a' && b <= 'f':
			b -= 'a' - 10
		case b >= 'A' && b <= 'F':
			b -= 'A' - 10
		default:
			return 0, false
		}
		unit = unit<<4 | uint16(b)
	}
	return unit, true
}

// plainEnd returns the place of the first quote, backslash or control character
// from i on, or the length. It looks at eight bytes at a time: in each of the
// terms the lowest marked byte is the first that fits.
func plainEnd(text []byte, i int) int {
	const ones, tops = 0x0101010101010101, 0x8080808080808080
	for ; i+8 <= len(text); i += 8 {
		word := binary.LittleEndian.Uint64(text[i:])
		quote, slash := word^ones*'"', word^ones*'\\'
		if hit := ((quote-ones)&^quote | (slash-ones)&^slash | (word-ones*' ')&^word) & tops; hit != 0 {
			return i + bits.TrailingZeros64(hit)/8
		}
	}
	for ; i < len(text); i++ {
		if b := text[i]; b == '"' || b == '\\' || b < ' ' {
			return i
		}
	}
	return len(text)
}

// eachMember calls yield with an object's members in order until it returns
// false. The text must have been checked; of any other the answer is arbitrary.
func eachMember(object string, yield func(key string, value gjson.Result) bool) {
	for i := 1; i < len(object); {
		if object[i] != '"' {
			i++ // space or a comma
			continue
		}
		key, end := valueAt(object, i)
		for end < len(object) && (object[end] <= ' ' || object[end] == ':') {
			end++
		}
		if end >= len(object) {
			return
		}
		var value gjson.Result
		value, i = valueAt(object, end)
		if !yield(key.Str, value) {
			return
		}
		for i < len(object) && object[i] <= ' ' {
			i++
		}
		if i < len(object) && object[i] == '}' {
			return
		}
	}
}

// EachName calls yield with the names of the members in a JSON text, however deep, in one pass
// until it returns false. rest is the text from the member's value on. In a text that is not JSON
// every string before a colon is a name, and rest may be empty.
func EachName(text string, yield func(name, rest string) bool) {
	space := func(i int) int {
		for i < len(text) && text[i] <= ' ' {
			i++
		}
		return i
	}
	for i := 0; ; {
		quote := strings.IndexByte(text[i:], '"')
		if quote < 0 {
			return
		}
		begin := i + quote + 1
		end, escaped := stringEnd(text, begin)
		if i = space(end); i < len(text) && text[i] == ':' {
			name := text[begin:max(begin, end-1)]
			if escaped {
				name = unescape(name)
			}
			if i = space(i + 1); !yield(name, text[i:]) {
				return
			}
		}
	}
}

// EachElement calls yield with an array's elements in order until it returns false.
// The text must be valid.
func EachElement(array string, yield func(value gjson.Result) bool) {
	for i := 1; i < len(array); {
		switch b := array[i]; {
		case b == ']':
			return
		case b <= ' ' || b == ',':
			i++
		default:
			var value gjson.Result
			value, i = valueAt(array, i)
			if !yield(value) {
				return
			}
		}
	}
}

// Elements returns an array's elements; none of any other value. Not ok: there are
// more than most, and none is parsed. The text must be valid.
func Elements(list gjson.Result, most int) (elements []gjson.Result, ok bool) {
	if !list.IsArray() {
		return nil, true
	}
	ok = true
	EachElement(list.Raw, func(v gjson.Result) bool {
		if ok = len(elements) < most; ok {
			elements = append(elements, v)
		}
		return ok
	})
	return elements, ok
}

// Leading returns the value with which a text begins, whatever follows it.
func Leading(text string) (v gjson.Result) {
	if text != "" {
		v, _ = valueAt(text, 0)
	}
	return v
}

// valueAt reads the value that begins at i and returns where it ends, always
// after i.
func valueAt(text string, i int) (v gjson.Result, end int) {
	switch text[i] {
	case '"':
		end, escaped := stringEnd(text, i+1)
		v = gjson.Result{Type: gjson.String, Raw: text[i:end], Str: text[i+1 : max(i+1, end-1)]}
		if escaped {
			v.Str = unescape(v.Str)
		}
		return v, end
	case '{', '[':
		end = containerEnd(text, i)
		return gjson.Result{Type: gjson.JSON, Raw: text[i:end]}, end
	}
	end = i + 1
	for end < len(text) && text[end] > ' ' && text[end] != ',' && text[end] != '}' && text[end] != ']' {
		end++
	}
	v.Raw = text[i:end]
	switch text[i] {
	case 't':
		v.Type = gjson.True
	case 'f':
		v.Type = gjson.False
	case 'n':
		v.Type = gjson.Null
	default:
		v.Type = gjson.Number
		v.Num, _ = strconv.ParseFloat(v.Raw, 64)
	}
	return v, end
}

// stringEnd returns the end of the string whose inside begins at i, and whether
// it has escapes. It needs not look for control characters, so it leaves the
// search to the library, which is several times faster than plainEnd.
func stringEnd(text string, i int) (end int, escaped bool) {
	for quote := -1; ; {
		if quote < i {
			next := strings.IndexByte(text[i:], '"')
			if next < 0 {
				return len(text), escaped
			}
			quote = i + next
		}
		slash := strings.IndexByte(text[i:quote], '\\')
		if slash < 0 {
			return quote + 1, escaped
		}
		escaped = true
		i = min(i+slash+2, len(text))
	}
}

// containerEnd returns where the object or array ends that begins at i.
func containerEnd(text string, i int) int {
	for depth := 0; i < len(text); {
		switch text[i] {
		case '"':
			i, _ = stringEnd(text, i+1)
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1
			}
		}
		i++
	}
	return len(text)
}

// unescape returns the inside of a JSON string without its escapes.
func unescape(s string) string {
	var out strings.Builder
	out.Grow(len(s))
	for {
		at := strings.IndexByte(s, '\\')
		if at < 0 || at+1 >= len(s) {
			out.WriteString(s)
			return out.String()
		}
		out.WriteString(s[:at])
		escape := s[at+1]
		s = s[at+2:]
		switch escape {
		case 'b':
			out.WriteByte('\b')
		case 'f':
			out.WriteByte('\f')
		case 'n':
			out.WriteByte('\n')
		case 'r':
			out.WriteByte('\r')
		case 't':
			out.WriteByte('\t')
		case 'u':
			unit, _ := hexUnit([]byte(s[:min(4, len(s))]), 0)
			s = s[min(4, len(s)):]
			r := rune(unit)
			if utf16.IsSurrogate(r) {
				r = utf8.RuneError
				if len(s) >= 6 && s[0] == '\\' && s[1] == 'u' {
					if low, ok := hexUnit([]byte(s[2:6]), 0); ok {
						if pair := utf16.DecodeRune(rune(unit), rune(low)); pair != utf8.RuneError {
							r, s = pair, s[6:]
						}
					}
				}
			}
			out.WriteRune(r)
		default:
			out.WriteByte(escape)
		}
	}
}
