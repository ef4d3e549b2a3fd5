package chat

import (
	"runtime"
	"strings"
	"testing"

	"kvrouter/internal/base/jsonbody"
)

func parsed(t testing.TB, body string) *jsonbody.Body {
	t.Helper()
	b, ok := jsonbody.Parse([]byte(body))
	if !ok {
		t.Fatal("not an object: ", body)
	}
	return b
}

// A response's input may be very many turns of the assistant, which become one: that
// is not to copy what has been joined again with each.
func TestManyAnswersAreJoinedAtOnce(t *testing.T) {
	for name, content := range map[string]string{"texts": `"b"`, "parts": `[{"type":"output_text","text":"b"}]`} {
		const items = 20_000
		first := strings.Repeat("a", 1<<20)
		raw := `{"input":[{"role":"assistant","content":"` + first + `"}` + strings.Repeat(`,{"role":"assistant","content":`+content+`}`, items) + `]}`
		body := parsed(t, raw)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		chat, err := sglangResponses(body, systemInFront)
		runtime.ReadMemStats(&after)
		if err != nil {
			t.Fatal(err)
		}
		if took, most := after.TotalAlloc-before.TotalAlloc, uint64(60*len(raw)); took > most {
			t.Errorf("%s: %d bytes of memory were taken for a body of %d", name, took, len(raw))
		}
		messages := chat.Messages()
		if len(messages) != 1 {
			t.Fatalf("%s: %d messages", name, len(messages))
		}
		got := jsonbody.FieldOf(messages[0].Fields, "content")
		if text := strings.Repeat("\n\nb", items); name == "texts" && got.Str != first+text {
			t.Errorf("%s: %d bytes", name, len(got.Str))
		} else if name == "parts" && len(got.Array()) != items+1 {
			t.Errorf("%s: %d parts", name, len(got.Array()))
		}
	}
}

func TestSGLangWantsParts(t *testing.T) {
	for template, want := range map[string]bool{
		`{% for m in messages %}{{ m.content }}{% endfor %}`:                             false,
		`{% for m in messages %}{%- for part in m.content %}{{ part.text }}{% endfor %}`: true,
		`{%- for part in message['content'] -%}`:                                         true,
		`{% for part in msg["content"] | selectattr('type','equalto','text') %}`:         true,
		`{% for part in entry.content %}`:                                                false,
		`{% for a, b in message.content_items %}`:                                        false,
		`{{ '<image>' }}`: true,
		`{% for part in message.content if part.type == 'text' %}`: true,
		`{% for line in message.content.split('x') %}`:             false,
	} {
		if got := sglangWantsParts(template); got != want {
			t.Errorf("%s: %v", template, got)
		}
	}
}
