package chat

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// schemaTypes are the types that JSON Schema has.
var schemaTypes = []string{"null", "boolean", "object", "array", "number", "string", "integer"}

// sglangCallsOf writes tool calls as SGLang's models leave them; those of an
// assistant have their arguments parsed.
func sglangCallsOf(calls gjson.Result, parse bool) (string, error) {
	list, ok := jsonbody.Elements(calls, maxListed)
	if !calls.IsArray() || !ok {
		return "", NotRenderable("tool_calls is not a list of at most %d", maxListed)
	}
	out := []byte{'['}
	for i, call := range list {
		if i > 0 {
			out = append(out, ',')
		}
		members := jsonbody.Members(call)
		id, index, kind, fn := jsonbody.FieldOf(members, "id"), jsonbody.FieldOf(members, "index"), jsonbody.FieldOf(members, "type"),
			jsonbody.FieldOf(members, "function")
		inside := jsonbody.Members(fn)
		name, arguments := jsonbody.FieldOf(inside, "name"), jsonbody.FieldOf(inside, "arguments")
		switch {
		case !call.IsObject(), !fn.IsObject(), kind.Exists() && kind.Str != "function", !isText(id), !isText(name),
			index.Type != gjson.Null && (index.Type != gjson.Number || strings.ContainsAny(index.Raw, ".eE")),
			!isText(arguments) && !arguments.IsObject():
			return "", NotRenderable("a tool call with fields of a wrong type")
		}
		raw := jsonbody.RawOrNull(arguments)
		if arguments.Type == gjson.String && parse {
			if !json.Valid([]byte(arguments.Str)) || jsonbody.HasLoneSurrogate([]byte(arguments.Str)) || !gjson.Parse(arguments.Str).IsObject() {
				return "", NotRenderable("tool call arguments that are not a JSON object")
			}
			raw = gjson.Parse(arguments.Str).Raw
		}
		function := jsonbody.AppendObject(nil, []jsonbody.Field{{Key: "name", Raw: jsonbody.RawOrNull(name)}, {Key: "arguments", Raw: raw}})
		out = jsonbody.AppendObject(out, []jsonbody.Field{
			{Key: "id", Raw: jsonbody.RawOrNull(id)}, {Key: "index", Raw: jsonbody.RawOrNull(index)},
			{Key: "type", Raw: `"function"`}, {Key: "function", Raw: string(function)},
		})
	}
	return string(append(out, ']')), nil
}

// isText reports whether v is a string or nothing.
func isText(v gjson.Result) bool { return v.Type == gjson.String || v.Type == gjson.Null }

// sglangTools writes the tools that the template sees: none with tool_choice none,
// that one which it names, else all.
func sglangTools(tools, choice gjson.Result) (string, error) {
	named := ""
	switch {
	case choice.Type == gjson.Null || choice.Str == "auto" || choice.Str == "required" || choice.Str == "none":
	case choice.IsObject() && choice.Get("function.name").Type == gjson.String:
		named = choice.Get("function.name").Str
	default:
		return "", NotRenderable("tool_choice %.40s is unknown", choice.Raw)
	}
	list, ok := toolList(tools)
	if !ok {
		return "", NotRenderable(badTools, maxListed, MaxText)
	}
	out := []byte{'['}
	for _, tool := range list {
		fields := jsonbody.Members(tool)
		fn, kind, deferred := jsonbody.FieldOf(fields, "function"), jsonbody.FieldOf(fields, "type"), jsonbody.FieldOf(fields, "defer_loading")
		if !tool.IsObject() || !fn.IsObject() || kind.Exists() && kind.Type != gjson.String || !isBool(deferred) {
			return "", NotRenderable("a tool without a function")
		}
		function, err := sglangFunction(fn, deferred)
		if err != nil {
			return "", err
		}
		if named != "" && fn.Get("name").Str != named {
			continue
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		kindRaw := `"function"`
		if kind.Exists() {
			kindRaw = kind.Raw
		}
		out = jsonbody.AppendObject(out, []jsonbody.Field{{Key: "type", Raw: kindRaw}, {Key: "function", Raw: function},
			{Key: "defer_loading", Raw: jsonbody.RawOrNull(deferred)}})
	}
	if choice.Str == "none" || len(out) == 1 {
		return "", nil
	}
	return string(append(out, ']')), nil
}

// badTools says what toolList does not take.
const badTools = "tools is not a list of at most %d and of %d bytes"

// toolList returns a request's tools; none without. What is too long to be looked
// through, level by level, is no prompt that the router encodes either.
func toolList(tools gjson.Result) (list []gjson.Result, ok bool) {
	if tools.Type != gjson.Null && !tools.IsArray() || len(tools.Raw) > MaxText {
		return nil, false
	}
	return jsonbody.Elements(tools, maxListed)
}

// isBool reports whether v is a boolean or nothing.
func isBool(v gjson.Result) bool {
	return v.Type == gjson.True || v.Type == gjson.False || v.Type == gjson.Null
}

// sglangFunction writes a function with its fields in the order of the request,
// then those that are missing. Types that are not those of JSON Schema are changed
// by SGLang: such a function is left to it.
func sglangFunction(fn, deferred gjson.Result) (string, error) {
	fields := jsonbody.Members(fn)
	values := map[string]string{"description": "null", "parameters": "null"}
	order := []string{}
	for _, f := range fields {
		switch f.Key {
		case "name", "description", "parameters", "strict", "defer_loading":
			values[f.Key] = f.Value.Raw
			order = append(order, f.Key)
		}
	}
	get := func(key string) gjson.Result { return jsonbody.FieldOf(fields, key) }
	if get("name").Type != gjson.String || !isText(get("description")) || !isBool(get("strict")) || !isBool(get("defer_loading")) {
		return "", NotRenderable("a tool's function with fields of a wrong type")
	}
	if p := get("parameters"); p.Type != gjson.Null && (!p.IsObject() || !standardTypes(p, 0)) {
		return "", NotRenderable("a tool's parameters use types other than those of JSON Schema")
	}
	if get("defer_loading").Type == gjson.Null && deferred.Type != gjson.Null {
		values["defer_loading"] = deferred.Raw
	}
	for _, key := range []string{"description", "name", "parameters", "strict", "defer_loading"} {
		if !slices.Contains(order, key) {
			order = append(order, key)
		}
	}
	var out []jsonbody.Field
	for _, key := range order {
		raw, given := values[key]
		if !given || raw == "null" && (key == "strict" || key == "defer_loading") {
			continue
		}
		out = append(out, jsonbody.Field{Key: key, Raw: raw})
	}
	return string(jsonbody.AppendObject(nil, out)), nil
}

// standardTypes reports whether every "type" in a schema is one of JSON Schema's, as
// far down as it looks.
func standardTypes(schema gjson.Result, depth int) bool {
	if depth > 64 {
		return false
	}
	if schema.IsArray() {
		ok := true
		jsonbody.EachElement(schema.Raw, func(v gjson.Result) bool {
			ok = standardTypes(v, depth+1)
			return ok
		})
		return ok
	}
	if !schema.IsObject() {
		return true
	}
	for _, f := range jsonbody.Members(schema) {
		ok := true
		if f.Key == "type" && f.Value.Type == gjson.String {
			ok = slices.Contains(schemaTypes, f.Value.Str)
		} else if f.Key == "type" && f.Value.IsArray() {
			seen := map[string]bool{}
			jsonbody.EachElement(f.Value.Raw, func(v gjson.Result) bool {
				ok = v.Type != gjson.String || slices.Contains(schemaTypes, v.Str) && !seen[v.Str]
				seen[v.Str] = true
				return ok
			})
		}
		if !ok || !standardTypes(f.Value, depth+1) {
			return false
		}
	}
	return true
}
