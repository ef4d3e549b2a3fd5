package testkit

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"
)

// ParityChat is a request whose prompt is compared with vLLM's.
type ParityChat struct {
	Name string `json:"name"`
	Kind string `json:"kind"` // "chat" or "tokenize": the API whose rules it follows
	Body string `json:"body"`
}

// tools2 are two tools whose schemas cover frequent errors of serializers: nesting,
// key order, quotes, HTML characters, unicode, floats, booleans and null.
const tools2 = `[{"type":"function","function":{"name":"get_weather","description":"Weather for a \"place\" & <time>, it's live","parameters":{"type":"object","required":["place"],"properties":{"place":{"type":"string","description":"Ort, z. B. München 🌦"},"unit":{"enum":["c","f"],"type":"string","default":"c"},"days":{"type":"integer","minimum":1,"maximum":14},"precision":{"type":"number","default":0.5}}}}},` +

	`{"function":{"parameters":{"properties":{"filter":{"type":"object","properties":{"tags":{"type":"array","items":{"type":"string"}},"strict":{"type":"boolean","default":false},"limit":{"type":["integer","null"],"default":null}}},"a":{"type":"number","default":1e-7}},"type":"object"},"name":"search","strict":true,"unknown":1},"type":"function"}]`

// weatherCall is an assistant's call and its result.
const weatherCall = `{"role":"user","content":"Weather in München?"},{"role":"assistant","content":null,"tool_calls":[{"id":"call00001","type":"function","function":{"name":"get_weather","arguments":"{\"place\": \"München\", \"days\": 2, \"b\": [1.0, true, null, {\"z\": 1, \"a\": \"it's\"}]}"}}]},{"role":"tool","tool_call_id":"call00001","name":"get_weather","content":"{\"temp\": 21.5}"}`

// ChatsForParity returns the conversations of the parity tests.
func ChatsForParity() []ParityChat {
	const user = `{"role":"user","content":"What is the capital of France?"}`
	turns := func(n int) string {
		var list []string
		for i := range n {
			list = append(list, fmt.Sprintf(`{"role":"user","content":"Question %d"},{"role":"assistant","content":"Answer %d."}`, i, i))
		}
		return strings.Join(list, ",")
	}
	chat := func(name, messages, more string) ParityChat {
		return ParityChat{name, "chat", `{"messages":[` + messages + `]` + more + `}`}
	}
	return []ParityChat{
		chat("user", user, ``),
		chat("system and user", `{"role":"system","content":"You are terse."},`+user, ``),
		chat("multi-turn", turns(2)+`,`+user, ``),
		chat("no generation prompt", user, `,"add_generation_prompt":false`),
		chat("tools", `{"role":"system","content":"Use tools."},`+user, `,"tools":`+tools2+`,"tool_choice":"none"`),
		chat("tools without system", user, `,"tools":`+tools2+`,"tool_choice":"none"`),
		chat("tool call and result", weatherCall, `,"tools":`+tools2+`,"tool_choice":"none"`),
		chat("tool call, no tools", weatherCall+`,{"role":"assistant","content":"21.5 C."},{"role":"user","content":"Thanks"}`, ``),
		chat("parallel calls",
			`{"role":"user","content":"Both?"},{"role":"assistant","content":"Let me see.","tool_calls":[{"index":0,"id":"abcdefgh1","type":"function","function":{"name":"get_weather","arguments":"{}"}},{"type":"function","function":{"name":"search","arguments":"{\"q\":\"<é>\"}","extra":true},"id":"abcdefgh2"}]},{"role":"tool","tool_call_id":"abcdefgh1","content":"sun"},{"role":"tool","tool_call_id":"abcdefgh2","content":"none"},{"role":"assistant","content":"Done."},{"role":"user","content":"Ok"}`, `,"tools":`+tools2+`,"tool_choice":"none"`),
		chat("arguments no object",
			`{"role":"user","content":"Go"},{"role":"assistant","content":"","tool_calls":[{"id":"abcdefgh1","type":"function","function":{"name":"f","arguments":"not json"}}]},{"role":"tool","tool_call_id":"abcdefgh1","content":"x"},{"role":"user","content":"?"}`, ``),
		chat("empty tool calls",
			`{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello","tool_calls":[]},{"role":"user","content":"Bye"}`, ``),
		chat("content parts",
			`{"role":"system","content":[{"type":"text","text":"Be kind."}]},{"role":"user","content":[{"type":"text","text":"First."},{"type":"text","text":""},{"type":"text","text":"Second.","cache_control":{"type":"ephemeral"}}]}`, ``),
		chat("assistant parts",
			`{"role":"user","content":"Hi"},{"role":"assistant","content":[{"type":"text","text":"One"},{"type":"refusal","refusal":"No"}]},{"role":"user","content":"Why?"}`, ``),
		chat("tool result parts", strings.Replace(weatherCall, `"{\"temp\": 21.5}"`,
			`[{"type":"text","text":"21.5"},{"type":"text","text":"sunny"}]`, 1), ``),
		chat("unicode",
			`{"role":"user","content":"naïve café 日本語 👩‍👩‍👧 עברית \u200b\u00a0e\u0301 \ud83d\ude00"},{"role":"assistant","content":"Ünïcödé «ok»"},{"role":"user","content":"שלום"}`, ``),
		chat("control characters", `{"role":"user","content":"tab\there\r\nbell\u0007 quote\" slash\\ <b>&amp;</b> {{ x }} {% if %}"}`, ``),
		chat("empty string", `{"role":"user","content":""}`, ``),
		chat("empty list", `{"role":"user","content":[]}`, ``),
		chat("null content", `{"role":"user","content":"Hi"},{"role":"assistant","content":null},{"role":"user","content":"Still there?"}`, ``),
		chat("missing content", `{"role":"user","content":"Hi"},{"role":"assistant"},{"role":"user"}`, ``),
		chat("whitespace",
			`{"role":"system","content":"  padded  \n"},{"role":"user","content":"\n\n  leading and trailing \t\n"},{"role":"assistant","content":"  x\u001f \n"},{"role":"user","content":" "}`, ``),
		chat("think in history",
			`{"role":"user","content":"2+2?"},{"role":"assistant","content":"<think>\nlet me see\n</think>\n\n4"},{"role":"user","content":"3+3?"}`,
			``),
		chat("reasoning",
			`{"role":"user","content":"2+2?"},{"role":"assistant","content":"4","reasoning":"two and two"},{"role":"user","content":"3+3?"},{"role":"assistant","content":"6","reasoning":""}`, ``),
		chat("reasoning_content with call",
			`{"role":"user","content":"Weather?"},{"role":"assistant","content":"","reasoning_content":"I must look.\n","tool_calls":[{"id":"abcdefgh1","type":"function","function":{"name":"get_weather","arguments":"{\"place\":\"Rome\"}"}}]},{"role":"tool","tool_call_id":"abcdefgh1","content":"hot"}`, `,"tools":`+tools2+`,"tool_choice":"none"`),
		chat("thinking off", user, `,"chat_template_kwargs":{"enable_thinking":false}`),
		chat("thinking on", `{"role":"system","content":"Think."},`+user, `,"chat_template_kwargs":{"enable_thinking":true,"thinking":true}`),
		chat("reasoning effort", user, `,"reasoning_effort":"high"`),
		chat("reasoning effort none", user, `,"reasoning_effort":"none"`),
		chat("system only", `{"role":"system","content":"Just this."}`, ``),
		chat("two users", user+`,{"role":"user","content":"And of Spain?"}`, ``),
		chat("fourteen turns", turns(7), ``),
		chat("late system",
			user+`,{"role":"assistant","content":"Paris"},{"role":"system","content":"Now be rude."},{"role":"user","content":"Sure?"}`, ``),
		chat("developer", `{"role":"developer","content":"You are terse."},`+user, ``),
		chat("developer and system",
			`{"role":"system","content":"S."},{"role":"developer","content":[{"type":"text","text":"D1"},{"type":"text","text":"D2"}]},`+user, ``),
		chat("named",
			`{"role":"user","name":"ann","content":"Hi"},{"role":"assistant","name":"bot","content":"Hello"},{"role":"user","name":"bob","content":"Hi too"}`, ``),
		chat("continue final message", user+`,{"role":"assistant","content":"The capital of"}`,
			`,"continue_final_message":true,"add_generation_prompt":false`),
		chat("continue trimmed", user+`,{"role":"assistant","content":"The capital of  \n"}`,
			`,"continue_final_message":true,"add_generation_prompt":false`),
		chat("continue parts", user+`,{"role":"assistant","content":[{"type":"text","text":"It is"},{"type":"text","text":"well known that"}]}`,
			`,"continue_final_message":true,"add_generation_prompt":false`),
		chat("documents", user, `,"documents":[{"title":"Paris","text":"Paris is the capital."},{"title":"Lyon","text":"Lyon is not."}]`),
		chat("kwargs", user,
			`,"chat_template_kwargs":{"date_string":"01 Jan 2020","custom_instructions":"x","bos_token":"<B>","preamble":null,"documents":[{"title":"t","text":"x"}],"add_generation_prompt":false,"range":3}`),
		chat("add special tokens", user, `,"add_special_tokens":true`),
		chat("billing header", `{"role":"system","content":"x-anthropic-billing-header: cch=123\nYou are Claude."},`+user, ``),
		chat("minimal tool", user, `,"tools":[{"type":"function","function":{"name":"ping"}}],"tool_choice":"none"`),
		chat("code", `{"role":"user","content":"Fix:\n`+"```"+`python\ndef f(x):\n    return {\"a\": x, 'b': [1,2]}\n`+"```"+`"}`, ``),
		chat("special tokens in text", `{"role":"user","content":"<|im_start|>system\nhi<|im_end|> <s>[INST] <|eot_id|> </s><bos>"}`, ``),
		{"tokenize form", "tokenize", `{"messages":[` + weatherCall +
			`,{"role":"assistant","content":"x","reasoning_content":"dropped"}],"tools":` + tools2 + `}`},
		{"tokenize empty tools", "tokenize", `{"messages":[` + user + `],"tools":[],"documents":[{"a":"b"}],"return_token_strs":true}`},
	}
}

// MutatedChats returns n chats whose JSON was changed at random: members dropped,
// added, or given values of another kind.
func MutatedChats(r *rand.Rand, n int) []ParityChat { return mutated(ChatsForParity(), r, n, true) }

// mutated returns n mutated chats; with tokenize, some get that kind.
func mutated(base []ParityChat, r *rand.Rand, n int, tokenize bool) []ParityChat {
	values := []string{`null`, `""`, `"x"`, `[]`, `{}`, `0`, `1.0`, `true`, `false`, `"auto"`, `"none"`, `"assistant"`, `"system"`,
		`"developer"`, `"tool"`, `"user"`, `"text"`, `"refusal"`, `[{"type":"text","text":"p","zz":1}]`, `"{\"a\":1}"`, `"[1]"`,
		`{"type":"text","text":"q"}`, `[{"role":"user"}]`, `" \u00e9 "`, `"\ud800"`, `["a"]`, `[1]`,
		`{"a":{"b":[1.5,1e15,1e-9,true,null]}}`, `"x-anthropic-billing-header\nrest"`}
	keys := []string{"foo", "name", "content", "role", "reasoning", "reasoning_content", "tool_calls", "tools", "tool_choice",
		"documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "text", "type", "strict",
		"defer_loading", "description", "parameters", "task", "tool_call_id", "uuid", "image_url", "refusal", "chat_template",
		"reasoning_effort", "enable_thinking", "index", "id", "function", "arguments", "messages", "bos_token", "thinking"}
	var out []ParityChat
	for len(out) < n {
		c := base[r.IntN(len(base))]
		for range 1 + r.IntN(3) {
			paths := jsonPaths(gjson.Parse(c.Body), "", nil)
			if len(paths) == 0 {
				break
			}
			path, value := paths[r.IntN(len(paths))], values[r.IntN(len(values))]
			var body string
			var err error
			switch r.IntN(4) {
			case 0:
				body, err = sjson.Delete(c.Body, path)
			case 1:
				body, err = sjson.SetRaw(c.Body, path, value)
			default:
				parent, _, nested := parentPath(path)
				path = keys[r.IntN(len(keys))]
				if nested && r.IntN(5) > 0 {
					path = parent + "." + path
				}
				body, err = sjson.SetRaw(c.Body, path, value)
			}
			if err == nil && json.Valid([]byte(body)) {
				c.Body = body
			}
		}
		if tokenize && r.IntN(4) == 0 {
			c.Kind = "tokenize"
		}
		c.Name = "mutated " + strconv.Itoa(len(out))
		out = append(out, c)
	}
	return out
}

// jsonPaths appends the paths of all values below v.
func jsonPaths(v gjson.Result, at string, out []string) []string {
	i := -1
	v.ForEach(func(key, child gjson.Result) bool {
		i++
		path := strings.ReplaceAll(key.Str, ".", `\.`)
		if v.IsArray() {
			path = strconv.Itoa(i)
		}
		if at != "" {
			path = at + "." + path
		}
		out = append(out, path)
		if child.IsObject() || child.IsArray() {
			out = jsonPaths(child, path, out)
		}
		return true
	})
	return out
}

func parentPath(path string) (parent, last string, ok bool) {
	i := strings.LastIndex(path, ".")
	if i < 0 {
		return "", path, false
	}
	return path[:i], path[i+1:], true
}
