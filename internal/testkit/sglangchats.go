package testkit

import (
	"math/rand/v2"
	"strings"
)

// SGLangChats returns the requests of the parity tests with SGLang: those shared with
// vLLM, and those that SGLang interprets differently. Kinds "messages" and "responses"
// are requests of the APIs that SGLang converts to chats.
func SGLangChats() []ParityChat {
	var list []ParityChat
	for _, c := range ChatsForParity() {
		if c.Kind == "chat" {
			list = append(list, c)
		}
	}
	const hi = `{"role":"user","content":"Hi"}`
	add := func(kind, name, body string) { list = append(list, ParityChat{kind + ": " + name, kind, body}) }
	chat := func(name, messages, more string) { add("chat", name, `{"messages":[`+messages+`]`+more+`}`) }
	chat("answer last", hi+`,{"role":"assistant","content":"Hello, I"}`, ``)
	chat("answer last, continued", hi+`,{"role":"assistant","content":" Hello, I "}`, `,"continue_final_message":true`)
	chat("answer last, empty, continued", hi+`,{"role":"assistant","content":""}`, `,"continue_final_message":true`)
	chat("user last, continued", hi, `,"continue_final_message":true`)
	chat("answer last in parts", hi+`,{"role":"assistant","content":[{"type":"text","text":"One"},{"type":"text","text":"two"}]}`, ``)
	chat("answer last in parts, continued", hi+`,{"role":"assistant","content":[{"type":"text","text":"One"},{"type":"text","text":"two"}]}`,
		`,"continue_final_message":true`)
	chat("call last", weatherCall[:strings.Index(weatherCall, `,{"role":"tool"`)], `,"tools":`+tools2)
	chat("tools shown", hi, `,"tools":`+tools2)
	chat("tools required", hi, `,"tools":`+tools2+`,"tool_choice":"required"`)
	chat("tool named", hi, `,"tools":`+tools2+`,"tool_choice":{"type":"function","function":{"name":"search"}}`)
	chat("no tools", hi, `,"tools":[]`)
	chat("deferred tool", hi, `,"tools":[{"type":"function","defer_loading":true,"function":{"name":"f","strict":null,"description":null}}]`)
	chat("types of a database", hi,
		`,"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"varchar(20)"}}}}}]`)
	chat("a property called type", hi,
		`,"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"type":{"type":"string"}}}}}]`)
	chat("calls with tools", weatherCall+`,{"role":"assistant","content":"21.5 C."},{"role":"user","content":"Thanks"}`, `,"tools":`+tools2)
	chat("arguments as an object",
		`{"role":"user","content":"Go"},{"role":"assistant","tool_calls":[{"id":"abcdefgh1","function":{"arguments":{"b":1,"a":[1.50,2e3]},"name":"f"}}]},{"role":"tool","tool_call_id":"abcdefgh1","content":"x"},`+hi, ``)
	chat("empty arguments",
		`{"role":"user","content":"Go"},{"role":"assistant","tool_calls":[{"id":"abcdefgh1","function":{"arguments":"","name":"f"}}]},`+hi, ``)
	chat("thoughts in parts",
		hi+`,{"role":"assistant","content":[{"type":"thinking","thinking":"hm"},{"type":"text","text":"One"},{"type":"reasoning","text":"so"},{"type":"text","text":"two"}]},`+hi, ``)
	chat("roles in capitals", `{"role":"System","content":"S"},`+hi+`,{"role":"ASSISTANT","content":"A"},`+hi, ``)
	chat("user in capitals", `{"role":"USER","content":"S"}`, ``)
	chat("reference", weatherCall[:strings.LastIndex(weatherCall, `"{\"temp`)]+
		`[{"type":"tool_reference","name":"get_weather"},{"type":"text","text":"x"}]},`+hi, `,"tools":`+tools2)
	chat("reasoning object", hi, `,"reasoning":{"effort":"medium"}`)
	chat("reasoning enabled", hi, `,"reasoning":{"enabled":true}`)
	chat("reasoning effort over kwargs", hi,
		`,"reasoning_effort":"none","chat_template_kwargs":{"enable_thinking":true,"reasoning_effort":"max"}`)
	chat("low effort", hi, `,"reasoning_effort":"low"`)
	chat("effort in numbers", hi, `,"reasoning_effort":0.5`)
	chat("null in kwargs", hi, `,"chat_template_kwargs":{"enable_thinking":null,"bos_token":null}`)
	chat("phase and prefix", hi+`,{"role":"assistant","content":"a","phase":"final_answer","prefix":true}`, ``)
	chat("phase", hi+`,{"role":"assistant","content":"a","phase":"commentary"},`+hi, ``)
	chat("own template", hi, `,"chat_template_kwargs":{"chat_template":"x"}`)

	messages := func(name, system, list, more string) {
		add("messages", name, `{"model":"m","max_tokens":4,`+system+`"messages":[`+list+`]`+more+`}`)
	}
	const claudeTools = `,"tools":[{"name":"get_weather","description":"It's <live>","input_schema":{"properties":{"place":{"type":"string"}}}},{"type":"custom","name":"g","input_schema":{"type":"object"},"strict":true,"cache_control":{"type":"ephemeral"}}]`
	const claudeCall = `{"role":"user","content":[{"type":"text","text":"Weather?","cache_control":{"type":"ephemeral"}}]},{"role":"assistant","content":[{"type":"text","text":"Let me see."},{"type":"tool_use","id":"toolu_001","name":"get_weather","input":{"place":"Rome","n":1.0}}]}`
	const claudeResult = `{"role":"user","content":[{"type":"tool_result","tool_use_id":"toolu_001","content":"hot"},{"type":"text","text":"And?"}]}`
	messages("text", ``, hi, ``)
	messages("system", `"system":" Be kind. ",`, hi, ``)
	messages("blank system", `"system":" ",`, hi, ``)
	messages("system in parts",
		`"system":[{"type":"text","text":"A","cache_control":{"type":"ephemeral"}},{"type":"text","text":""},{"type":"text","text":"B"}],`, hi,
		``)
	messages("late system", `"system":"A",`, hi+`,{"role":"assistant","content":"Yes"},{"role":"system","content":" late "},`+hi, ``)
	messages("late system in parts", ``, hi+`,{"role":"system","content":[{"type":"text","text":" a "},{"type":"text","text":"b"}]},`+hi, ``)
	messages("prefill", ``, hi+`,{"role":"assistant","content":"Hello, I"}`, ``)
	messages("tools", ``, hi, claudeTools)
	messages("tool chosen", ``, hi, claudeTools+`,"tool_choice":{"type":"tool","name":"g"}`)
	messages("any tool", ``, hi, claudeTools+`,"tool_choice":{"type":"any"}`)
	messages("no tool", ``, hi, claudeTools+`,"tool_choice":{"type":"none"}`)
	messages("call and result", `"system":"S",`, claudeCall+`,`+claudeResult, claudeTools)
	messages("result in parts", ``, claudeCall+`,`+strings.Replace(claudeResult, `"hot"`,
		`[{"type":"text","text":"very"},{"type":"text","text":""},{"type":"text","text":"hot"}]`, 1), claudeTools)
	messages("result without content", ``, claudeCall+`,`+strings.Replace(claudeResult, `,"content":"hot"`, ``, 1), ``)
	messages("text around a result", ``,
		claudeCall+`,{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"},{"type":"tool_result","tool_use_id":"toolu_001","content":""},{"type":"text","text":"c"}]}`, claudeTools)
	messages("several parts", ``,
		`{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":""},{"type":"text","text":"c"}]},{"role":"assistant","content":[{"type":"text","text":"d"},{"type":"text","text":"e"}]},`+hi, ``)
	messages("empty answer", ``, hi+`,{"role":"assistant","content":[]},`+hi, ``)
	messages("thinking", ``, hi, `,"thinking":{"type":"enabled","budget_tokens":2000}`)
	messages("image", ``, `{"role":"user","content":[{"type":"image","source":{"type":"url","url":"http://x/y.png"}}]}`, ``)

	responses := func(name, input, more string) { add("responses", name, `{"model":"m","input":`+input+more+`}`) }
	const replyTools = `,"tools":[{"type":"function","name":"get_weather","description":"It's <live>","parameters":{"type":"object","properties":{"place":{"type":"string"}}},"strict":true},{"type":"function","name":"g"}]`
	const replyCall = `{"type":"message","role":"assistant","id":"msg_1","status":"completed","content":[{"type":"output_text","text":"Let me see.","annotations":[]}]},{"type":"function_call","id":"fc_1","call_id":"call_0001","name":"get_weather","arguments":"{\"place\": \"Rome\"}","status":"completed"},{"type":"function_call_output","call_id":"call_0001","output":"hot"}`
	responses("text", `"Hi"`, ``)
	responses("instructions", `"Hi"`, `,"instructions":"Be kind."`)
	responses("items",
		`[`+hi+`,{"role":"assistant","content":"Yes"},{"role":"user","content":[{"type":"input_text","text":"a"},{"type":"input_text","text":"b"}]}]`, `,"instructions":"S"`)
	responses("late system", `[`+hi+`,{"role":"assistant","content":"Yes"},{"role":"system","content":"late"},`+hi+`]`, `,"instructions":"S"`)
	responses("system in parts", `[{"role":"system","content":[{"type":"input_text","text":"a"},{"type":"input_text","text":"b"}]},`+hi+`]`,
		``)
	responses("calls", `[`+hi+`,`+replyCall+`]`, replyTools)
	responses("bad arguments", `[`+hi+`,`+strings.Replace(replyCall, `"{\"place\": \"Rome\"}"`, `"{\"pla"`, 1)+`]`, replyTools)
	responses("output in parts", `[`+hi+`,`+strings.Replace(replyCall, `"hot"`,
		`[{"type":"input_text","text":"very "},{"type":"input_text","text":"hot"}]`, 1)+`]`, ``)
	responses("two answers", `[`+hi+`,{"role":"assistant","content":"One"},{"role":"assistant","content":"two"},`+hi+`]`, ``)
	responses("two answers, one in parts",
		`[`+hi+`,{"role":"assistant","content":"One"},{"role":"assistant","content":[{"type":"output_text","text":"two"}]},`+hi+`]`, ``)
	responses("answer last", `[`+hi+`,{"role":"assistant","content":"One"}]`, ``)
	responses("tool chosen", `"Hi"`, replyTools+`,"tool_choice":{"type":"function","name":"g"}`)
	responses("no tool", `"Hi"`, replyTools+`,"tool_choice":"none"`)
	responses("effort", `"Hi"`, `,"reasoning":{"effort":"high"}`)
	responses("no effort", `"Hi"`, `,"reasoning":{"effort":"none","summary":"auto"}`)
	responses("goes on", `"Hi"`, `,"previous_response_id":"resp_1"`)
	responses("developer", `[{"role":"developer","content":"D"},`+hi+`]`, ``)
	return list
}

// MutatedSGLangChats is MutatedChats of SGLangChats.
func MutatedSGLangChats(r *rand.Rand, n int) []ParityChat { return mutated(SGLangChats(), r, n, false) }

// LeftToSGLang reports whether only the engine renders the named one of SGLangChats.
func LeftToSGLang(name string) bool {
	switch name {
	case "chat: types of a database", "chat: low effort", "chat: effort in numbers", "chat: phase and prefix", "responses: developer":
		return true
	}
	return false
}
