package proxy

import (
	"slices"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"kvrouter/internal/jsonbody"
)

// AskForUsage returns the body, its beginning apart, with a request for usage
// added where it is a stream's and does not say itself what it wants. The rest of
// the bytes stays as it is, and where the client has no stream_options, where it
// is.
func AskForUsage(parsed *jsonbody.Body) (head, body []byte, hide bool) {
	body = parsed.Raw
	if !parsed.Get("stream").Bool() {
		return nil, body, false
	}
	options := parsed.Get("stream_options")
	switch {
	case options.Get("include_usage").Bool() || options.Get("continuous_usage_stats").Bool():
		return nil, body, false
	case options.IsObject():
		asked, err := sjson.SetBytes(body, "stream_options.include_usage", true)
		return nil, asked, err == nil
	case !options.Exists():
		inside := slices.Index(body, '{') + 1
		return []byte(`{"stream_options":{"include_usage":true},`), body[inside:], true
	case options.Type == gjson.Null:
		asked, err := sjson.SetRawBytes(body, "stream_options", []byte(`{"include_usage":true}`))
		return nil, asked, err == nil
	}
	return nil, body, false // the engine will say what is wrong with it
}
