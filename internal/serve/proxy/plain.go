package proxy

import (
	"bytes"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// plainEvent returns an event as the marks in this package look for it: one line of data without
// spaces and escaped names. Lines that are no data come before it, in out. An event that has that
// form already, no data or no JSON is returned as it is; changed is false then.
func plainEvent(out, event []byte, generate bool) (_, plain []byte, changed bool) {
	m := readMessage(event)
	if len(m.data) == 0 || isDone(m.data) || m.plain && !generate && jsonbody.IsCompact(m.data) {
		return out, event, false
	}
	data, ok := jsonbody.Compact(make([]byte, 0, len(m.data)), m.data)
	if !ok {
		return out, event, false
	}
	if generate {
		data = ownForm(data)
	}
	for line := range lines(bytes.TrimPrefix(event, byteOrderMark)) {
		if len(line) > 0 && !hasData(line) {
			out = append(append(out, line...), '\n')
		}
	}
	plain = append(make([]byte, 0, len(data)+len("data: \n\n")), "data: "...)
	return out, append(append(plain, data...), "\n\n"...), true
}

// Parts of an event of generateRoute, as SGLang writes it.
var (
	generatedText = []byte(`{"text":"`)
	generatedIDs  = []byte(`,"output_ids":[`)
	generatedMeta = []byte(`,"meta_info":`)
)

// ownMeta returns where the description of the answer begins in the data of an event of
// generateRoute that have SGLang's own form: the text first, the tokens next, and what describes
// them last. 0: they have another form. Neither text nor tokens are taken apart, since they grow
// with each event.
func ownMeta(data []byte) int {
	rest, ok := bytes.CutPrefix(data, generatedText)
	if !ok {
		return 0
	}
	for {
		quote := bytes.IndexByte(rest, '"')
		if quote < 0 {
			return 0
		}
		slashes := quote - len(bytes.TrimRight(rest[:quote], `\`))
		if rest = rest[quote+1:]; slashes%2 == 0 {
			break
		}
	}
	if bytes.HasPrefix(rest, generatedIDs) {
		rest = rest[bytes.IndexByte(rest, ']')+1:]
	}
	if rest, ok = bytes.CutPrefix(rest, generatedMeta); !ok || !jsonbody.IsCompact(rest) {
		return 0
	}
	return len(data) - len(rest)
}

// ownForm returns the data of an event of generateRoute, which are compact, in SGLang's own order.
func ownForm(data []byte) []byte {
	var fields, others []jsonbody.Field
	members := jsonbody.Members(gjson.ParseBytes(data))
	for _, key := range []string{"text", "output_ids", "meta_info"} {
		if v := jsonbody.FieldOf(members, key); v.Exists() {
			fields = append(fields, jsonbody.Field{Key: key, Raw: v.Raw})
		}
	}
	for _, m := range members {
		switch m.Key {
		case "text", "output_ids", "meta_info":
		default:
			others = append(others, jsonbody.Field{Key: m.Key, Raw: m.Value.Raw})
		}
	}
	return jsonbody.AppendObject(nil, append(fields, others...))
}
