package jsonbody

import (
	"slices"
	"strconv"

	"github.com/tidwall/gjson"
)

// Field is one member of a JSON object, its value as raw JSON.
type Field struct {
	Key string
	Raw string
}

// Member is one member of a JSON object.
type Member struct {
	Key   string
	Value gjson.Result
}

// Members lists an object's members in order. As in Python, a duplicate key has its
// first place and its last value.
func Members(object gjson.Result) []Member {
	if !object.IsObject() {
		return nil
	}
	out, _ := members(object.Raw)
	return out
}

// members is Members of an object's text; repeats means that a key is in it more than once.
func members(object string) (out []Member, repeats bool) {
	const few = 16 // up to here a search is faster than an index
	var index map[string]int
	eachMember(object, func(key string, value gjson.Result) bool {
		at := -1
		if len(out) < few {
			at = slices.IndexFunc(out, func(m Member) bool { return m.Key == key })
		} else {
			if index == nil {
				index = make(map[string]int)
				for i, m := range out {
					index[m.Key] = i
				}
			}
			if i, ok := index[key]; ok {
				at = i
			} else {
				index[key] = len(out)
			}
		}
		if at >= 0 {
			out[at].Value, repeats = value, true
		} else {
			out = append(out, Member{key, value})
		}
		return true
	})
	return out, repeats
}

// Fields returns the members of an object as fields.
func Fields(object gjson.Result) (fields []Field) {
	for _, m := range Members(object) {
		fields = append(fields, Field{Key: m.Key, Raw: m.Value.Raw})
	}
	return fields
}

// Merge returns an object, replaced or extended by the fields of over.
func Merge(object gjson.Result, over ...Field) []byte {
	return AppendObject(nil, MergeFields(Fields(object), over))
}

// MergeFields returns the fields of base, replaced or extended by those of over.
func MergeFields(base, over []Field) []Field {
	out := slices.Clone(base)
next:
	for _, f := range over {
		for i := range out {
			if out[i].Key == f.Key {
				out[i].Raw = f.Raw
				continue next
			}
		}
		out = append(out, f)
	}
	return out
}

// RawOrNull returns a value's raw JSON, "null" if there is no value.
func RawOrNull(v gjson.Result) string {
	if v.Type == gjson.Null {
		return "null"
	}
	return v.Raw
}

// ObjectSize returns the length of a JSON object with these fields if none of its keys has an
// escape, bytes.
func ObjectSize(fields []Field) int {
	size := len("{}")
	for _, f := range fields {
		size += len(f.Key) + len(f.Raw) + len(`"":,`)
	}
	return size
}

// AppendObject appends fields as a JSON object.
func AppendObject(out []byte, fields []Field) []byte {
	out = append(slices.Grow(out, ObjectSize(fields)), '{')
	for i, f := range fields {
		if i > 0 {
			out = append(out, ',')
		}
		out = AppendString(out, f.Key)
		out = append(out, ':')
		out = append(out, f.Raw...)
	}
	return append(out, '}')
}

// AppendString appends s as a JSON string; only characters that JSON requires are
// escaped.
func AppendString(out []byte, s string) []byte {
	const hex = "0123456789abcdef"
	out = append(out, '"')
	start := 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		out = append(out, s[start:i]...)
		start = i + 1
		switch c {
		case '"', '\\':
			out = append(out, '\\', c)
		default:
			out = append(out, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
	}
	out = append(out, s[start:]...)
	return append(out, '"')
}

// HasLoneSurrogate reports whether JSON text escapes half of a surrogate pair,
// which Python keeps and UTF-8 cannot.
func HasLoneSurrogate(text []byte) bool {
	for i := 0; i+5 < len(text); i++ {
		if text[i] != '\\' {
			continue
		}
		if text[i+1] != 'u' {
			i++
			continue
		}
		unit, err := strconv.ParseUint(string(text[i+2:i+6]), 16, 16)
		switch {
		case err != nil || unit < 0xd800 || unit > 0xdfff:
		case unit >= 0xdc00:
			return true
		default:
			if i+11 >= len(text) || text[i+6] != '\\' || text[i+7] != 'u' {
				return true
			}
			low, err := strconv.ParseUint(string(text[i+8:i+12]), 16, 16)
			if err != nil || low < 0xdc00 || low > 0xdfff {
				return true
			}
			i += 6
		}
		i += 5
	}
	return false
}

// IsPythonSpace reports whether Python's str.isspace holds for r.
func IsPythonSpace(r rune) bool {
	switch {
	case r >= '\t' && r <= '\r', r >= 0x1c && r <= 0x20, r == 0x85, r == 0xa0, r == 0x1680,
		r >= 0x2000 && r <= 0x200a, r == 0x2028, r == 0x2029, r == 0x202f, r == 0x205f, r == 0x3000:
		return true
	}
	return false
}
