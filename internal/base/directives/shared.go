package directives

import (
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// FindShared returns the top member of a body that names an entry of vLLM's cache of media by a
// uuid; empty: there is none. Whoever knows the uuid of another's image is answered from it, or
// puts another image in its place.
func FindShared(body *jsonbody.Body) (member string) {
	if anyPart(body.Get("content_parts")) {
		return "content_parts"
	}
	for _, m := range body.Messages() {
		found := anyPart(jsonbody.FieldOf(m.Fields, "content"))
		if m.Value.IsArray() { // a conversation of a batch
			jsonbody.EachElement(m.Value.Raw, func(one gjson.Result) bool {
				found = anyPart(jsonbody.FieldOf(jsonbody.Members(one), "content"))
				return !found
			})
		}
		if found {
			return "messages"
		}
	}
	return ""
}

// anyPart reports whether a list has a part with a uuid.
func anyPart(parts gjson.Result) (found bool) {
	if parts.IsArray() {
		jsonbody.EachElement(parts.Raw, func(part gjson.Result) bool {
			found = jsonbody.FieldOf(jsonbody.Members(part), "uuid").Type != gjson.Null
			return !found
		})
	}
	return found
}
