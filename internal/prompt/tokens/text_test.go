package tokens

import (
	"runtime"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/base/jsonbody"
)

func TestTextOfTheNextTurnBeginsWithThatOfTheLast(t *testing.T) {
	long := strings.Repeat("a long question ", 80)
	for name, turns := range map[string][2]string{
		"chat": {`{"model":"m","messages":[{"role":"user","content":"` + long + `"}]}`,
			`{"max_tokens":4,"messages":[{"role":"user","content":"` + long + `"},{"role":"assistant","content":"yes"},{"role":"user","content":"why"}]}`},
		"completion":         {`{"prompt":"` + long + `"}`, `{"prompt":"` + long + `and more"}`},
		"Anthropic messages": {`{"messages":[{"role":"user","content":"` + long + `"}],"system":"s"}`, `{"system":"s","messages":[{"role":"user","content":"` + long + `"},{"role":"user","content":"why"}]}`},
		"tools":              {`{"messages":[{"role":"user","content":"` + long + `"}],"tools":[{"type":"function"}]}`, `{"tools":[{"type":"function"}],"messages":[{"role":"user","content":"` + long + `"},{}]}`},
	} {
		words := func(text string) []uint32 {
			body, ok := jsonbody.Parse([]byte(text))
			if !ok {
				t.Fatalf("%s: no JSON object", text)
			}
			return Text(body)
		}
		first, second := words(turns[0]), words(turns[1])
		if len(first) < len(long)/4 || len(second) <= len(first) || !slices.Equal(first, second[:len(first)]) {
			t.Errorf("%s: %d words, then %d that begin otherwise", name, len(first), len(second))
		}
		for _, w := range first {
			if w < 1<<21 {
				t.Errorf("%s: word %d can be a token", name, w)
			}
		}
	}
}

func TestTextIsBounded(t *testing.T) {
	for text, want := range map[string]int{
		`{"prompt":"` + strings.Repeat("a", 3*maxText) + `"}`: maxText / 4,
		`{"input":"x","previous_response_id":"resp_1"}`:       0,
		`{"prompt":"short"}`:                                  0,
		`{}`:                                                  0,
	} {
		body, ok := jsonbody.Parse([]byte(text))
		if !ok {
			t.Fatalf("%.40s: no JSON object", text)
		}
		if got := len(Text(body)); got != want {
			t.Errorf("%.40s: %d words, want %d", text, got, want)
		}
	}
}

// TestTextOfALongBodyTakesLittleMemory: no more than a few times the text that is taken, however long
// the body is, and in however many members.
func TestTextOfALongBodyTakesLittleMemory(t *testing.T) {
	long := `"` + strings.Repeat("a", 4*maxText) + `"`
	few := `"` + strings.Repeat("a", maxText/8) + `"`
	for name, text := range map[string]string{
		"one member": `{"prompt":` + long + `}`,
		"all":        `{"tools":` + few + `,"system":` + few + `,"messages":` + few + `,"prompt":` + few + `,"text":` + few + `,"input":` + long + `}`,
	} {
		body, ok := jsonbody.Parse([]byte(text))
		if !ok {
			t.Fatalf("%s: no JSON object", name)
		}
		Text(body) // reads all members
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		words := Text(body)
		runtime.ReadMemStats(&after)
		if taken := after.TotalAlloc - before.TotalAlloc; len(words) != maxText/4 || taken > 2*maxText+1<<20 {
			t.Errorf("%s: %d words, %d bytes were allocated", name, len(words), taken)
		}
	}
}
