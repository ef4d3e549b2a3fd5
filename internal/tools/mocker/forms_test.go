package mocker

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// namedEvents returns the data of a stream's events, each of which must be named by its type.
func namedEvents(t *testing.T, stream string) (events []gjson.Result) {
	t.Helper()
	for event := range strings.SplitSeq(strings.TrimSpace(stream), "\n\n") {
		name, data, _ := strings.Cut(event, "\n")
		e := gjson.Parse(strings.TrimPrefix(data, "data: "))
		if !gjson.Valid(e.Raw) || name != "event: "+e.Get("type").Str {
			t.Fatalf("an event is %s", event)
		}
		events = append(events, e)
	}
	return events
}

// TestMessagesAndResponsesAreChats asks both engines the same chat in three forms: text, tokens and
// cached tokens are equal, whole and streamed.
func TestMessagesAndResponsesAreChats(t *testing.T) {
	for _, api := range []string{"vllm", "sglang"} {
		w := testWorkers(t, 1, func(s *Settings) { s.API, s.SpeedupRatio, s.BlockSize, s.NumGPUBlocks = api, 20, 64, 16384 })[0]
		long := strings.Repeat("word ", 60)
		_, chat := w.ask(t, "/v1/chat/completions", fmt.Sprintf(`{"model":"mock","messages":[{"role":"system","content":"s"},{"role":"user","content":%q}],"max_tokens":6}`, long))
		text, prompt := gjson.Get(chat, "choices.0.message.content").Str, gjson.Get(chat, "usage.prompt_tokens").Int()
		messages := fmt.Sprintf(`{"model":"mock","system":"s","messages":[{"role":"user","content":%q}],"max_tokens":6}`, long)
		responses := fmt.Sprintf(`{"model":"mock","instructions":"s","input":%q,"max_output_tokens":6}`, long)
		stream := func(body string) string { return strings.Replace(body, "{", `{"stream":true,`, 1) }

		_, m := w.ask(t, "/v1/messages", messages)
		usage := gjson.Get(m, "usage")
		if gjson.Get(m, "content.0.text").Str != text || gjson.Get(m, "stop_reason").Str != "max_tokens" || usage.Get("cache_read_input_tokens").Int() != 320 ||
			usage.Get("input_tokens").Int()+usage.Get("cache_creation_input_tokens").Int()+320 != prompt || usage.Get("output_tokens").Int() != 6 {
			t.Errorf("%s: %s, not %q of %d tokens", api, m, text, prompt)
		}
		_, r := w.ask(t, "/v1/responses", responses)
		usage = gjson.Get(r, "usage")
		if gjson.Get(r, "output.0.content.0.text").Str != text || gjson.Get(r, "status").Str != "incomplete" || !strings.HasPrefix(gjson.Get(r, "id").Str, "resp_") ||
			usage.Get("input_tokens").Int() != prompt || usage.Get("input_tokens_details.cached_tokens").Int() != 320 || usage.Get("output_tokens").Int() != 6 {
			t.Errorf("%s: %s, not %q of %d tokens", api, r, text, prompt)
		}

		_, answer := w.ask(t, "/v1/messages", stream(messages))
		events, streamed, kinds := namedEvents(t, answer), "", []string{}
		for _, e := range events {
			streamed += e.Get("delta.text").Str
			kinds = append(kinds, e.Get("type").Str)
		}
		want := []string{"message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"}
		if last := events[len(events)-2]; streamed != text || !slices.Equal(slices.Compact(kinds), want) || last.Get("usage.cache_read_input_tokens").Int() != 320 || last.Get("delta.stop_reason").Str != "max_tokens" {
			t.Errorf("%s: %s", api, answer)
		}
		_, answer = w.ask(t, "/v1/responses", stream(strings.Replace(responses, "{", `{"request_id":"resp_mine",`, 1)))
		streamed = ""
		for i, e := range namedEvents(t, answer) {
			streamed += e.Get("delta").Str
			if e.Get("sequence_number").Int() != int64(i) {
				t.Errorf("%s: event %d is %s", api, i, e.Raw)
			}
			events = append(events, e)
		}
		last := events[len(events)-1].Get("response")
		if streamed != text || last.Get("output.0.content.0.text").Str != text || last.Get("id").Str != "resp_mine" || last.Get("usage.input_tokens").Int() != prompt {
			t.Errorf("%s: %s", api, answer)
		}

		if _, count := w.ask(t, "/v1/messages/count_tokens", messages); gjson.Get(count, "input_tokens").Int() != prompt {
			t.Errorf("%s: %s, want %d", api, count, prompt)
		}
		if api == "vllm" {
			for route, body := range map[string]string{"/v1/messages/render": messages, "/v1/responses/render": responses} {
				if _, rendered := w.ask(t, route, body); gjson.Get(rendered, "token_ids.#").Int() != prompt {
					t.Errorf("%s: %.200s, want %d tokens", route, rendered, prompt)
				}
			}
		}
	}
}

// TestMessagesEndAsAnthropicSays: by a stop sequence, or by themselves.
func TestMessagesEndAsAnthropicSays(t *testing.T) {
	w := vllmWorker(t, func(s *Settings) { s.OutputTokens = 20 })
	const body = `{"model":"mock","messages":[{"role":"user","content":"Hi"}],"max_tokens":100%s}`
	if _, m := w.ask(t, "/v1/messages", fmt.Sprintf(body, "")); gjson.Get(m, "stop_reason").Str != "end_turn" || gjson.Get(m, "stop_sequence").Raw != "null" {
		t.Error(m)
	}
	_, m := w.ask(t, "/v1/messages", fmt.Sprintf(body, `,"stop_sequences":[" "],"thinking":{"type":"adaptive"}`))
	if gjson.Get(m, "stop_reason").Str != "stop_sequence" || gjson.Get(m, "stop_sequence").Str != " " {
		t.Error(m)
	}
}

func TestRefusalsOfMessagesAndResponses(t *testing.T) {
	w := vllmWorker(t, nil)
	for _, c := range []struct {
		path, body string
		status     int
		kind       string // path of the error's type
	}{
		{"/v1/messages", `{"model":"nope","messages":[{"role":"user","content":"Hi"}]}`, 404, "error.type"},
		{"/v1/messages", `{"model":"mock","messages":[{"role":"user","content":[{"type":"image","source":{}}]}]}`, 400, "error.type"},
		{"/v1/messages", `[]`, 400, "error.type"},
		{"/v1/responses", `{"model":"mock","input":"Hi","previous_response_id":"resp_1"}`, 404, "error.param"},
		{"/v1/responses", `{"model":"mock","input":"Hi","background":true}`, 400, "error.param"},
		{"/v1/responses", `{"model":"mock"}`, 400, "error.type"},
		{"/v1/responses/resp_1", "", 404, "error.param"},
	} {
		status, answer := w.ask(t, c.path, c.body)
		if anthropic := c.path == "/v1/messages"; status != c.status || gjson.Get(answer, c.kind).Str == "" || (gjson.Get(answer, "type").Str == "error") != anthropic {
			t.Errorf("%s %s: %d %s", c.path, c.body, status, answer)
		}
	}
}

// TestPromptsWithAZeroCharacter holds that simulated workers take them.
func TestPromptsWithAZeroCharacter(t *testing.T) {
	w := vllmWorker(t, nil)
	if _, answer := w.ask(t, "/v1/completions", `{"prompt":"a\u0000b","max_tokens":1,"return_token_ids":true}`); gjson.Get(answer, "choices.0.prompt_token_ids").Raw != "[97,0,98]" {
		t.Error(answer)
	}
}
