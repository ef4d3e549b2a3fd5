package proxy

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
)

// meaning is what a client reads of a stream: its events as values, whatever their form, with
// what differs between any two answers replaced.
func meaning(t *testing.T, stream string) (events []any) {
	t.Helper()
	id := ""
	for _, data := range testkit.Events(stream) {
		var event any
		if strings.TrimSpace(data) == "[DONE]" {
			events = append(events, "[DONE]")
			continue
		}
		if err := json.Unmarshal([]byte(data), &event); err != nil {
			t.Fatalf("%v: %q", err, data)
		}
		object, ok := event.(map[string]any)
		if meta, is := object["meta_info"].(map[string]any); is {
			object = meta
		}
		if mine, has := object["id"].(string); ok && has {
			if id == "" {
				id = mine
			}
			if object["id"] = "one"; mine != id {
				object["id"] = "other"
			}
			delete(object, "created")
		}
		events = append(events, event)
	}
	return events
}

// TestAStreamMeansTheSameInEveryForm has workers write their events in other forms of equal JSON,
// cut anywhere, and break off: the client reads what it reads of compact ones.
func TestAStreamMeansTheSameInEveryForm(t *testing.T) {
	const usage = `,"stream_options":{"include_usage":true}`
	const ids = `,"return_token_ids":true`
	dies := func(after ...int) func(int) int {
		return func(request int) int {
			if request <= len(after) {
				return after[request-1]
			}
			return -1
		}
	}
	for _, c := range []struct {
		path, options string
		sglang        bool
	}{
		{testkit.ChatPath, "", false}, {testkit.ChatPath, usage, false}, {testkit.ChatPath, usage + ids, false}, {testkit.ChatPath, `,"tools":[{}]`, false},
		{completionRoute, "", false}, {completionRoute, usage + ids, false}, {completionRoute, usage, true}, {completionRoute, ids, true}, {generateRoute, "", true},
	} {
		for _, after := range [][]int{nil, {1}, {9}, {3, 4}, {20}} {
			for seed := range uint64(4) {
				name := fmt.Sprintf("%s%s, SGLang %v, broken after %v, form %d", c.path, c.options, c.sglang, after, seed)
				answer := func(seed uint64) (events, result string) {
					v := &writer{dies: dies(after...), halves: seed%2 == 0 && (len(after) == 0 || after[0] > 3)}
					if c.sglang {
						v = onSGLang(dies(after...), script{pieces: pieces, burst: 1 + 2*int(seed%2)})
					}
					v.form = seed / 2
					return answerOf(t, c.path, c.options, v)
				}
				compact, want := answer(seed % 2)
				got, result := answer(seed + 2)
				if result != want {
					t.Errorf("%s: result %q, want %q", name, result, want)
				}
				if got, want := meaning(t, got), meaning(t, compact); !reflect.DeepEqual(got, want) {
					t.Fatalf("%s: the client has\n%v\nof compact JSON it has\n%v", name, got, want)
				}
			}
		}
	}
}

// facts are what the router reads of a stream.
type facts struct {
	events            int
	usage             Usage
	ending            policy.Ending
	finish, id        string
	status, sequence  int
	done, begun, open bool
	shown             string // the data of the events that the client gets
}

// factsOf reads a stream in pieces.
func factsOf(route, stream string, hide bool, size func() int) (f facts) {
	s := eventScanner{HideUsage: hide, Generate: route == generateRoute, Numbered: route == ResponsesRoute}
	var shown strings.Builder
	for rest := stream; rest != ""; {
		n := min(len(rest), size())
		shown.Write(s.Scan([]byte(rest[:n])))
		f.events += s.Count
		rest = rest[n:]
	}
	f.open = s.open()
	shown.Write(s.End())
	f.events += s.Count
	f.usage, f.ending, f.finish, f.id, f.status, f.sequence, f.done, f.begun = s.usage(), s.ending(http.StatusOK, true), s.finish, s.storedID, s.status, int(s.sequence()), s.done, s.begun
	for _, data := range testkit.Events(shown.String()) {
		var v any
		if name, text, named := strings.Cut(data, " "); json.Unmarshal([]byte(data), &v) != nil && named && json.Unmarshal([]byte(text), &v) == nil {
			v = []any{name, v}
		}
		f.shown += fmt.Sprintf("%v\n", v)
	}
	return f
}

// TestAStreamIsReadTheSameInEveryForm holds that what the router reads of a stream of any route,
// and what the client gets of it, does not depend on how the worker writes it.
func TestAStreamIsReadTheSameInEveryForm(t *testing.T) {
	for name, c := range map[string]struct{ route, stream string }{
		"a chat": {chatRoute, `data: {"id":"a","choices":[{"index":0,"delta":{"content":" \"usage\": {} \u0041 _reason\": \"x\""},"finish_reason":null}]}` + "\n\n" +
			`data: {"id":"a","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n" +
			`data: {"id":"a","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}` + "\n\ndata: [DONE]\n\n"},
		"usage with the last choice": {completionRoute, `data: {"choices":[{"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":9,"completion_tokens":1}}` + "\n\ndata: [DONE]\n\n"},
		"a chat that fails":          {chatRoute, `data: {"error":{"message":"EngineCore","type":"InternalServerError","code":500}}` + "\n\n"},
		"a chat that is refused":     {chatRoute, `data: {"object":"error","error":{"message":"too long","code":400}}` + "\n\n"},
		"messages":                   {"/v1/messages", testkit.MessagesStream},
		"messages that fail":         {"/v1/messages", "event: message_start\ndata: {\"type\":\"message_start\"}\n\nevent: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"internal_error\",\"message\":\"x\"}}\n\n"},
		"messages without names":     {"/v1/messages", "data: {\"type\":\"content_block_delta\"}\n\ndata: {\"type\":\"message_stop\"}\n\n"},
		"responses":                  {ResponsesRoute, testkit.ResponsesStream},
		"responses that fail": {ResponsesRoute, "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"id\":\"resp_1\"}}\n\n" +
			"event: response.failed\ndata: {\"type\":\"response.failed\",\"sequence_number\":1,\"response\":{\"id\":\"resp_1\",\"error\":{\"code\":\"server_error\",\"message\":\"x\"}}}\n\n"},
		"generate": {generateRoute, `data: {"text":"a, \"output_ids\":[ b","output_ids":[7],"meta_info":{"id":"x","finish_reason":null,"prompt_tokens":3,"completion_tokens":1,"cached_tokens":2},"index":0}` + "\n\n" +
			`data: {"text":"c","output_ids":[8],"meta_info":{"id":"y","finish_reason":{"type":"stop"},"prompt_tokens":3,"completion_tokens":5,"cached_tokens":1},"index":1}` + "\n\ndata: [DONE]\n\n"},
	} {
		for _, hide := range []bool{true, false} {
			want := factsOf(c.route, c.stream, hide, func() int { return len(c.stream) })
			for seed := range uint64(100) {
				form, random, stream := testkit.NewReformer(seed), rand.New(rand.NewPCG(seed, 2)), ""
				for event := range strings.SplitSeq(strings.TrimSuffix(c.stream, "\n\n"), "\n\n") {
					stream += form.Event(event + "\n\n")
				}
				if seed%3 == 0 {
					stream = "\ufeff" + stream
				}
				if got := factsOf(c.route, stream, hide, func() int { return 1 + random.IntN(60) }); got != want {
					t.Fatalf("%s, hide %v, form %d: %+v\nof compact JSON: %+v\n%q", name, hide, seed, got, want, stream)
				}
			}
		}
	}
}

// TestAWholeAnswerIsReadTheSameInEveryForm reads usage and finish reason of answers that are no
// streams.
func TestAWholeAnswerIsReadTheSameInEveryForm(t *testing.T) {
	for route, answer := range map[string]string{
		chatRoute:      `{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}`,
		ResponsesRoute: `{"id":"resp_1","usage":{"input_tokens":9,"output_tokens":2,"input_tokens_details":{"cached_tokens":4}}}`,
		"/v1/messages": `{"id":"msg_1","usage":{"input_tokens":5,"cache_read_input_tokens":4,"output_tokens":3}}`,
		generateRoute:  `[{"text":"a","meta_info":{"finish_reason":{"type":"stop"},"prompt_tokens":3,"completion_tokens":1,"cached_tokens":2}},{"text":"b","meta_info":{"prompt_tokens":4,"completion_tokens":5,"cached_tokens":1}}]`,
	} {
		usage, finish := outcome(route, []byte(answer))
		if !usage.Known {
			t.Errorf("%s: no usage", route)
		}
		for seed := range uint64(100) {
			text := testkit.NewReformer(seed).JSON(answer)
			if seed%3 == 0 {
				text = "\ufeff" + text
			}
			if got, ended := outcome(route, []byte(text)); got != usage || ended != finish {
				t.Fatalf("%s: %+v %q, of compact JSON %+v %q: %s", route, got, ended, usage, finish, text)
			}
		}
	}
}

// TestAnEngineReadsTheSameRequestInEveryForm adds to requests in many forms what the router adds.
func TestAnEngineReadsTheSameRequestInEveryForm(t *testing.T) {
	read := func(text []byte) (v any) {
		if err := json.Unmarshal(text, &v); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		return v
	}
	for _, request := range []string{
		`{"stream":true,"model":"m","messages":[{"role":"user","content":"a \"stream_options\": b"}]}`,
		`{"stream":true,"stream_options":{"include_usage":false},"messages":[]}`,
		`{"stream":true,"stream_options":null,"return_token_ids":true,"max_tokens":5,"prompt":[1,2]}`,
	} {
		sent := func(text string) any {
			body, ok := jsonbody.Parse([]byte(text))
			if !ok {
				t.Fatalf("no JSON: %s", text)
			}
			u := Upstream{Route: chatRoute, Body: body}
			u.AskUsage = true
			e := editsOf(&u)
			e.add(jsonbody.Field{Key: "x", Raw: "1"})
			rest := editsOf(&u)
			rest.set("prompt", "[7]")
			rest.set("max_tokens", "4")
			return []any{e.usage, read([]byte(bodyOf(&e))), read([]byte(bodyOf(&rest)))}
		}
		want := sent(request)
		for seed := range uint64(50) {
			if text := testkit.NewReformer(seed).JSON(request); !reflect.DeepEqual(sent(text), want) {
				t.Fatalf("%s becomes\n%v, not\n%v", text, sent(text), want)
			}
		}
	}
}

// TestListsOfTokensAreReadInEveryForm reads token ids with spaces and other forms of numbers, and
// nothing that is none.
func TestListsOfTokensAreReadInEveryForm(t *testing.T) {
	for text, want := range map[string]string{
		"1,2]}": "[1 2] 4 true", "]": "[] 1 true", " ]x": "[] 2 true", "1, 2 ,\n3]": "[1 2 3] 9 true", "1e3,20E-1,4.0]": "[1000 2 4] 14 true", "4294967295]": "[4294967295] 11 true",
		"4294967296]": "false", "-1]": "false", "1.5]": "false", "null]": "false", `"1"]`: "false", "[1]]": "false", "1,2": "false", "": "false",
	} {
		ids, length, ok := readTokens([]byte(text), nil)
		got := fmt.Sprint(ok)
		if ok {
			got = fmt.Sprint(ids, length, ok)
		}
		if got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

// TestTheFormsOfServerSentEvents pins where events end, and what they say.
func TestTheFormsOfServerSentEvents(t *testing.T) {
	for stream, want := range map[string]string{
		"data: a\n\nx": "9", "data: a\r\n\r\nx": "11", "data: a\r\rx": "9", "data: a\n\r\nx": "10", "data: a\r\n\nx": "10", "data: a\r\r": "9",
		"data: a\n": "-1", "data: a\r\n\r": "-1", "data: a\r": "-1", "data: a\n\r": "-1", "": "-1", "\n\n": "2",
	} {
		if got := fmt.Sprint(eventEnd([]byte(stream), 0)); got != want {
			t.Errorf("%q ends at %s, want %s", stream, got, want)
		}
	}
	for event, want := range map[string]string{
		"data: a\n\n": " a true", "data:a\n\n": " a true", "data:  a \r\n\r\n": " a true", "data: a\ndata:b\n\n": " a\nb false", ": c\nevent: x\ndata: a\n\n": "x a false",
		"data: a\nevent:x\n\n": "x a false", "\ufeffdata: a\n\n": " a false", "event: x\n\n": "x  false", ": c\n\n": "  false", "data: a\rdata: b\r\r": " a\nb false", "\ndata: a\n\n": " a false", "data\n\n": "  false",
	} {
		m := readMessage([]byte(event))
		if got := fmt.Sprintf("%s %s %v", m.name, m.data, m.plain); got != want {
			t.Errorf("%q says %q, want %q", event, got, want)
		}
	}
}
