package chat

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestLongChatsAreWithinTheLimits: limits stop no chat that an engine takes, with any of
// the templates of the parity test.
func TestLongChatsAreWithinTheLimits(t *testing.T) {
	folders, _ := filepath.Glob("testdata/parity/*/tokenizer_config.json")
	if len(folders) == 0 {
		t.Fatal("no templates")
	}
	messages := func(n int, text string) string {
		list := make([]string, n)
		for i := range list {
			list[i] = fmt.Sprintf(`{"role":"%s","content":"%s"}`, []string{"user", "assistant"}[i%2], text)
		}
		return strings.Join(append(list, `{"role":"user","content":"and now?"}`), ",")
	}
	calls := func(n int) string {
		var list []string
		for i := range n {
			list = append(list, `{"role":"user","content":"what is the weather?"}`,
				fmt.Sprintf(`{"role":"assistant","content":"","tool_calls":[{"id":"call%05d","type":"function","function":{"name":"weather","arguments":"{\"city\":\"Paris\",\"days\":[1,2,3]}"}}]}`, i),
				fmt.Sprintf(`{"role":"tool","tool_call_id":"call%05d","content":"{\"degrees\": 21}"}`, i), `{"role":"assistant","content":"21 degrees"}`)
		}
		return strings.Join(append(list, `{"role":"user","content":"and now?"}`), ",")
	}
	tools := `,"tools":[` + strings.Repeat(`{"type":"function","function":{"name":"weather","description":"the weather of a city","parameters":{"type":"object","properties":{"city":{"type":"string","enum":["Paris","Rome"]},"days":{"type":"array","items":{"type":"integer"}}},"required":["city"]}}},`, 63) +
		`{"type":"function","function":{"name":"time","description":"the time","parameters":{"type":"object","properties":{}}}}]`
	bodies := map[string]string{
		"100,000 tokens in 1,000 turns":       `{"messages":[` + messages(1000, strings.Repeat("so much to say ", 27)) + `]}`,
		"one short message":                   `{"messages":[{"role":"user","content":"hi"}]}`,
		"100 turns of a word":                 `{"messages":[` + messages(100, "ok") + `]}`,
		"4,000 turns of a word":               `{"messages":[` + messages(4000, "ok") + `]}`,
		"64 tools":                            `{"messages":[{"role":"user","content":"hi"}]` + tools + `}`,
		"250 calls of tools, 1,000 turns":     `{"messages":[` + calls(250) + `]` + tools + `}`,
		"a message of 4 MB":                   `{"messages":[{"role":"user","content":"` + strings.Repeat("so much to say ", 270_000) + `"}]}`,
		"16,000 parts of a message":           `{"messages":[{"role":"user","content":[` + strings.Repeat(`{"type":"text","text":"so much"},`, 15_999) + `{"type":"text","text":"x"}]}]}`,
		"a tool with 2,000 nested properties": `{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{` + strings.TrimSuffix(strings.Repeat(`"a":{"type":"object","properties":{"b":{"type":"string","description":"d"}}},`, 2000), ",") + `}}}}]}`,
	}
	for _, path := range folders {
		files, err := ReadFiles(filepath.Dir(path), DefaultLimits)
		if err != nil {
			t.Fatal(err)
		}
		r := NewRenderer(files, Options{})
		if r.Problem() != "" {
			t.Errorf("%s: %s", path, r.Problem())
		}
		for name, body := range bodies {
			req, err := parseText(body, Completion, Options{})
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			chat, err := r.Render(req)
			if err != nil && strings.Contains(err.Error(), "limit") {
				t.Errorf("%s, %s: %v", path, name, err)
			}
			chat.Free()
		}
		r.Close()
	}
}

// TestSlicesAreThoseOfPython compares slices with what Python 3 prints.
func TestSlicesAreThoseOfPython(t *testing.T) {
	for expression, want := range map[string]string{
		"'abcde'[1:3]": "bc", "'abcde'[:-1]": "abcd", "'abcde'[-2:]": "de", "'abcde'[::-1]": "edcba", "'abcde'[::2]": "ace", "'abcde'[4:1:-2]": "ec", "'abcde'[10:]": "", "'abcde'[-10:2]": "ab", "'abcde'[3:1]": "", "'añb'[1:2]": "ñ",
		"[1,2,3,4][1:]": "[2, 3, 4]", "[1,2,3,4][::-1]": "[4, 3, 2, 1]", "[1,2,3,4][-1:]": "[4]", "[1,2,3,4][:-5:-1]": "[4, 3, 2, 1]", "[1,2,3,4][2:0:-1]": "[3, 2]", "[][1:]": "[]", "[1,2,3,4][-3:-1]": "[2, 3]", "[1,2,3][5::-1]": "[3, 2, 1]",
		"[1] + [2, 3]": "[1, 2, 3]", "2 * [1]": "[1, 1]", "[0] * -1": "[]", "'ab' * 2": "abab", "3 * 'x'": "xxx", "2 * 3": "6", "2 * 1.5": "3.0", "1 + 2": "3", "1 + 0.5": "1.5", "true + 1": "2", "'a' + 'b'": "ab", "1 ~ none ~ true ~ 1.0": "1NoneTrue1.0", "[1, 'a'] ~ ''": "[1, 'a']",
		"2 in [1, 2]": "True", "'b' in 'abc'": "True", "'k' in {'k': 1}": "True", "3 not in [1, 2]": "True", "1 < 2 < 3": "True", "1 < 3 < 2": "False", "[1, 2] == [1, 2]": "True", "{'a': 1} == {'a': 2}": "False", "[1, 2] < [1, 3]": "True", "{'a': [1]}['a'][0]": "1", "[1, 2, 2].count(2)": "2", "[3, 1, 2] | sort": "[1, 2, 3]", "[3, 1] | min": "1", "{'b': 1, 'a': 2} | dictsort": "[('a', 2), ('b', 1)]",
	} {
		// A variable keeps the compiler from computing the whole.
		for _, template := range []string{"{{ " + expression + " }}", "{% set none_ = none %}{{ (" + expression + ") if not none_ else 0 }}"} {
			compiled, err := compileTemplate(template)
			if err != nil {
				if !strings.Contains(err.Error(), "not supported") {
					t.Errorf("%s: %v", expression, err)
				}
				continue
			}
			got, err := takeText(compiled.Render([]byte("{}")))
			if want = strings.NewReplacer("('a', 2)", "['a', 2]", "('b', 1)", "['b', 1]").Replace(want); err != nil || got != want {
				t.Errorf("%s: %q, %v; want %q", expression, got, err, want)
			}
			compiled.Close()
		}
	}
}

// TestErrorsOfPythonStayErrors: where Python raises, a text would be another prompt.
func TestErrorsOfPythonStayErrors(t *testing.T) {
	for _, expression := range []string{"x + 1", "'a' + 1", "[1] + 'a'", "1 in 2", "1 in '' ~ d", "none[1:]", "{[1]: 2}", "d[[1]]", "'a' * 'b'", "[1] * [2]", "d.get([1])", "[1][::0]"} {
		compiled, err := compileTemplate("{% set d = {'a': 1} %}{{ " + expression + " }}")
		if err != nil {
			continue
		}
		if got, err := takeText(compiled.Render([]byte("{}"))); err == nil {
			t.Errorf("%s: %q", expression, got)
		}
		compiled.Close()
	}
}

func TestTheNestingOfFilesIsCounted(t *testing.T) {
	for text, want := range map[string]int{`{}`: 1, `1`: 0, `[[],[[]]]`: 3, `{"[[[":"]\"[["}`: 1, `["\\",[`: 2, `"[`: 0, `]]]`: 0} {
		if got := nesting([]byte(text)); got != want {
			t.Errorf("%s: %d, want %d", text, got, want)
		}
	}
}

func TestLimitsOfFiles(t *testing.T) {
	if err := DefaultLimits.Validate(); err != nil {
		t.Error(err)
	}
	for _, limits := range []Limits{{}, {MaxTokenizerBytes: 1}, {MaxTemplateBytes: 1}, {MaxTokenizerBytes: 2 << 30, MaxTemplateBytes: 1}, {MaxTokenizerBytes: 1, MaxTemplateBytes: 1 << 30}, {MaxTokenizerBytes: -1, MaxTemplateBytes: 1}} {
		if err := limits.Validate(); err == nil {
			t.Errorf("%+v is taken", limits)
		}
	}
}

// TestAReferenceOfTheCacheStaysInIt: it is a file that names a folder.
func TestAReferenceOfTheCacheStaysInIt(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("HF_HUB_CACHE", cache)
	write := func(path, text string) {
		t.Helper()
		path = filepath.Join(cache, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	names := []string{"tokenizer.json", "tokenizer_config.json", "config.json"}
	for _, name := range names {
		write("models--o--m/snapshots/abc/"+name, "{}")
		write("outside/"+name, "{}")
	}
	for reference, found := range map[string]bool{"abc\n": true, "../../outside": false, filepath.Join(cache, "outside"): false, strings.Repeat("a", 1000): false} {
		write("models--o--m/refs/main", reference)
		if got := Cached("o/m"); (got != "") != found || found && got != filepath.Join(cache, "models--o--m/snapshots/abc") {
			t.Errorf("%.40q: %q", reference, got)
		}
	}
}
