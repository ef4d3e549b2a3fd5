package jsonbody

import (
	"bytes"

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
		fields := make([]Field, len(out.Top))
		for i, m := range out.Top {
			fields[i] = Field{m.Key, m.Value.Raw}
		}
		out.Raw = AppendObject(out.Raw, fields)
		return out
	}
	inside := bytes.IndexByte(b.Raw, '{') + 1
	out.Raw = append(AppendString(append(out.Raw, b.Raw[:inside]...), key), ':')
	out.Raw = append(out.Raw, value...)
	if len(b.Top) > 0 {
		out.Raw = append(out.Raw, ',')
	}
	out.Raw = append(out.Raw, b.Raw[inside:]...)
	return out
}
