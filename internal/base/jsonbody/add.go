package jsonbody

import (
	"bytes"
	"slices"

	"github.com/tidwall/gjson"
)

// With returns a copy of the body whose first member is key with value, which is
// JSON; other members of that key are removed. If b has no such member, the
// remaining bytes are unchanged. Otherwise members may lose their spaces, and
// duplicate keys their first value, which no reader uses. b does not change.
func (b *Body) With(key, value string) *Body {
	out := &Body{LoneSurrogate: b.LoneSurrogate, Top: make([]Member, 1, len(b.Top)+1), views: b.views}
	out.Top[0] = Member{key, gjson.Parse(value)}
	for _, m := range b.Top {
		if m.Key != key {
			out.Top = append(out.Top, m)
		}
	}
	out.Raw = make([]byte, 0, len(b.Raw)+len(key)+len(value)+8)
	if len(out.Top) <= len(b.Top) { // it has the member, in whatever spelling
		out.Raw = appendMembers(out.Raw, out.Top)
		return out
	}
	out.repeats = b.repeats
	inside := bytes.IndexByte(b.Raw, '{') + 1
	out.Raw = append(AppendString(append(out.Raw, b.Raw[:inside]...), key), ':')
	out.Raw = append(out.Raw, value...)
	if len(b.Top) > 0 {
		out.Raw = append(out.Raw, ',')
	}
	out.Raw = append(out.Raw, b.Raw[inside:]...)
	return out
}

// Without returns a copy of the body without the members of those names. Members may lose their
// spaces, and duplicate keys their first value. b does not change.
func (b *Body) Without(names ...string) *Body {
	out := &Body{LoneSurrogate: b.LoneSurrogate, Top: make([]Member, 0, len(b.Top)), views: b.views}
	for _, m := range b.Top {
		if !slices.Contains(names, m.Key) {
			out.Top = append(out.Top, m)
		}
	}
	out.Raw = appendMembers(make([]byte, 0, len(b.Raw)), out.Top)
	return out
}

// appendMembers appends members as a JSON object.
func appendMembers(out []byte, members []Member) []byte {
	fields := make([]Field, len(members))
	for i, m := range members {
		fields[i] = Field{m.Key, m.Value.Raw}
	}
	return AppendObject(out, fields)
}
