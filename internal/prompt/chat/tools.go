package chat

import (
	"bytes"
	"encoding/json"
	"strings"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// dumpToolCalls writes an assistant's tool calls as vLLM's models leave them:
// known fields in their order, then the unknown ones, arguments parsed.
// The answer is empty for an empty list.
func dumpToolCalls(calls gjson.Result) (string, error) {
	if !calls.IsArray() {
		return "", NotRenderable("tool_calls is not a list")
	}
	list, ok := jsonbody.Elements(calls, maxListed)
	switch {
	case !ok:
		return "", NotRenderable("more than %d tool calls", maxListed)
	case len(list) == 0:
		return "", nil
	}
	var out bytes.Buffer
	for i, call := range list {
		if i > 0 {
			out.WriteByte(',')
		}
		fn := call.Get("function")
		if !call.IsObject() || !fn.IsObject() {
			return "", NotRenderable("a tool call without a function")
		}
		var id, kind, name, arguments gjson.Result
		var callExtra, fnExtra []jsonbody.Field
		for _, f := range jsonbody.Members(call) {
			switch f.Key {
			case "id":
				id = f.Value
			case "type":
				kind = f.Value
			case "function":
				fn = f.Value
			default:
				callExtra = append(callExtra, jsonbody.Field{Key: f.Key, Raw: f.Value.Raw})
			}
		}
		for _, f := range jsonbody.Members(fn) {
			switch f.Key {
			case "name":
				name = f.Value
			case "arguments":
				arguments = f.Value
			default:
				fnExtra = append(fnExtra, jsonbody.Field{Key: f.Key, Raw: f.Value.Raw})
			}
		}
		if id.Type != gjson.String || kind.Str != "function" || name.Type != gjson.String || arguments.Type != gjson.String {
			return "", NotRenderable("a tool call without id, type function, name or arguments in text")
		}
		parsed, err := parseArguments(arguments.Str)
		if err != nil {
			return "", err
		}
		function := append([]jsonbody.Field{{Key: "arguments", Raw: parsed}, {Key: "name", Raw: name.Raw}}, fnExtra...)
		whole := append([]jsonbody.Field{{Key: "id", Raw: id.Raw}, {Key: "function", Raw: string(jsonbody.AppendObject(nil, function))},
			{Key: "type", Raw: kind.Raw}}, callExtra...)
		out.Write(jsonbody.AppendObject(nil, whole))
	}
	return "[" + out.String() + "]", nil
}

// parseArguments returns the JSON object in a tool call's arguments; {} where
// there is none, as vLLM does to keep a conversation going.
func parseArguments(text string) (string, error) {
	if !json.Valid([]byte(text)) {
		// Python's parser knows three numbers that JSON does not.
		if strings.Contains(text, "NaN") || strings.Contains(text, "Infinity") {
			return "", NotRenderable("tool call arguments with NaN or Infinity")
		}
		return "{}", nil
	}
	if jsonbody.HasLoneSurrogate([]byte(text)) {
		return "", NotRenderable("tool call arguments with an unpaired surrogate")
	}
	if parsed := gjson.Parse(text); parsed.IsObject() {
		return parsed.Raw, nil
	}
	return "{}", nil
}

// dumpTools writes the tools as pydantic's model_dump does: type, then the
// function's name, description, parameters (null where absent), strict and
// defer_loading where given; unknown fields are dropped.
func dumpTools(tools gjson.Result, kind Kind) (json.RawMessage, error) {
	if !tools.IsArray() {
		return nil, NotRenderable("tools is not a list")
	}
	list, ok := jsonbody.Elements(tools, maxListed)
	switch {
	case !ok:
		return nil, NotRenderable("more than %d tools", maxListed)
	case len(list) == 0 && kind == Completion:
		return nil, NotRenderable("tools is an empty list")
	}
	out := []byte{'['}
	for i, tool := range list {
		if i > 0 {
			out = append(out, ',')
		}
		if !tool.IsObject() {
			return nil, NotRenderable("a tool is not an object")
		}
		var fn, deferred gjson.Result
		for _, f := range jsonbody.Members(tool) {
			switch f.Key {
			case "type":
				if f.Value.Str != "function" {
					return nil, NotRenderable("a tool of type %s", f.Value.Raw)
				}
			case "function":
				fn = f.Value
			case "defer_loading":
				deferred = f.Value
			}
		}
		if !fn.IsObject() {
			return nil, NotRenderable("a tool without a function")
		}
		whole := []jsonbody.Field{{Key: "type", Raw: `"function"`}}
		function, err := dumpFunction(fn, deferred)
		if err != nil {
			return nil, err
		}
		whole = append(whole, jsonbody.Field{Key: "function", Raw: function})
		if deferred.Exists() && deferred.Type != gjson.Null {
			whole = append(whole, jsonbody.Field{Key: "defer_loading", Raw: deferred.Raw})
		}
		out = jsonbody.AppendObject(out, whole)
	}
	return append(out, ']'), nil
}

func dumpFunction(fn, deferred gjson.Result) (string, error) {
	values := map[string]gjson.Result{}
	for _, f := range jsonbody.Members(fn) {
		values[f.Key] = f.Value
	}
	if deferred.Exists() && deferred.Type != gjson.Null && values["defer_loading"].Type == gjson.Null {
		values["defer_loading"] = deferred
	}
	description, parameters := values["description"], values["parameters"]
	switch {
	case values["name"].Type != gjson.String,
		description.Type != gjson.String && description.Type != gjson.Null,
		!parameters.IsObject() && parameters.Type != gjson.Null,
		!isBool(values["strict"]), !isBool(values["defer_loading"]):
		return "", NotRenderable("a tool's function with fields of a wrong type")
	}
	out := []jsonbody.Field{{Key: "name", Raw: values["name"].Raw}, {Key: "description", Raw: jsonbody.RawOrNull(description)},
		{Key: "parameters", Raw: jsonbody.RawOrNull(parameters)}}
	for _, key := range []string{"strict", "defer_loading"} {
		if v := values[key]; v.Type != gjson.Null {
			out = append(out, jsonbody.Field{Key: key, Raw: v.Raw})
		}
	}
	return string(jsonbody.AppendObject(nil, out)), nil
}
