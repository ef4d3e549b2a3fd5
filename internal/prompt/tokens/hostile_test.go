package tokens

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/prompt/encode"
	"kvrouter/internal/testkit"
)

// What one hostile model may take at most, in these tests: generous, as machines are busy.
const (
	hostileTime   = 5 * time.Second // of this process, in all its threads
	hostileMemory = 512 << 20       // bytes
)

// hostileTemplates are chat templates that take any time or memory, by what they attack.
var hostileTemplates = map[string]string{
	"empty loops":                    `{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}x`,
	"loops with output":              `{% for i in range(90000) %}{% for j in range(90000) %}aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}`,
	"one output repeated":            `{% set x = 'a' * 900000 %}{% for i in range(90000) %}{{ x }}{% endfor %}`,
	"a text times a number":          `{% set n = 1000000000 %}{{ 'a' * n * 50 }}`,
	"a constant times a number":      `{{ 'a' * 100000000 }}{{ 'b' * 100000000 }}{{ 'c' * 100000000 }}{{ 'd' * 100000000 }}`,
	"doubling by +":                  `{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(34) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x | length }}`,
	"doubling by ~":                  `{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(34) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x | length }}`,
	"doubling by a captured block":   `{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(34) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}{{ ns.x | length }}`,
	"replace":                        `{% set ns = namespace(x='a') %}{% for i in range(12) %}{% set ns.x = ns.x | replace('a', 'aaaaaaaaaa') %}{% endfor %}x`,
	"join":                           `{% set ns = namespace(x='a') %}{% for i in range(9) %}{% set ns.x = ([ns.x] * 100) | join(ns.x) %}{% endfor %}x`,
	"indent":                         `{{ (('a\n' * 100000) | indent(60000)) | length }}`,
	"center":                         `{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = ns.x + ['a'.center(10000) ~ i] %}{% endfor %}`,
	"format":                         `{{ '%99999999999d' | format(1) }}{{ '{:>9999999999}'.format(1) }}{{ ('%900000d' * 900) | format(*([1] * 900)) }}`,
	"tojson with indentation":        `{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson(indent=64) }}`,
	"macro that calls itself twice":  `{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}`,
	"list that doubles, compared":    `{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}{{ a.x == b.x }}`,
	"list that doubles, ordered":     `{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}{{ 0 < 1 < 2 and a.x <= b.x <= a.x }}`,
	"list that doubles, looked for":  `{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}{{ a.x in [b.x] }}`,
	"list that doubles, sorted":      `{% set a = namespace(x=[1]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% endfor %}{{ [a.x, a.x] | sort | length }}`,
	"list that doubles, selected":    `{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}{{ [a.x] | select('equalto', b.x) | list | length }}`,
	"list that doubles, as a key":    `{% set a = namespace(x=[1]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% endfor %}{{ {a.x: 1} | length }}{{ messages[a.x] }}`,
	"list that doubles, got":         `{% set a = namespace(x=[1]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% endfor %}{{ messages[0].get(a.x) }}{{ messages[a.x] }}`,
	"list that doubles, printed":     `{% set a = namespace(x=[]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% endfor %}{{ a.x }}`,
	"list that doubles, by +":        `{% set a = namespace(x=[1]) %}{% for i in range(60) %}{% set a.x = a.x + a.x %}{% endfor %}{{ 2 in a.x }}`,
	"list times a number":            `{% set n = 1000000000000000 %}{{ 1 in [0] * n }}`,
	"constant list times a number":   `{{ 1 in [0] * 1000000000000000 }}`,
	"slices of slices":               `{% set ns = namespace(x=range(90000)) %}{% for i in range(90000) %}{% set ns.x = ns.x[1:] %}{% endfor %}{% for i in ns.x %}{{ i }}{% endfor %}`,
	"list in a list in a list":       `{% set ns = namespace(x=[1]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}`,
	"namespace that holds itself":    `{% set ns = namespace(x='a' * 900000) %}{% set ns.y = [ns] %}{{ ns.y }}`,
	"long chain of operators":        "{{ 1" + strings.Repeat("+1", 200_000) + " }}",
	"long chain of filters":          "{{ 1" + strings.Repeat("|int", 100_000) + " }}",
	"long chain of attributes":       "{{ x" + strings.Repeat(".a", 200_000) + " }}",
	"parentheses":                    "{{ " + strings.Repeat("(", 20_000) + "1" + strings.Repeat(")", 20_000) + " }}",
	"nested ifs":                     strings.Repeat("{% if 1 %}", 20_000) + strings.Repeat("{% endif %}", 20_000),
	"many elifs":                     "{% if 0 %}" + strings.Repeat("{% elif messages %}{{ f( }}", 1) + strings.Repeat("{% elif x %}", 60_000) + "{% endif %}",
	"strip of many characters":       `{% set x = 'ab' * 400000 %}{% for i in range(9000) %}{% if x.strip(x) %}{% endif %}{% endfor %}`,
	"comparison of long texts":       `{% set x = 'a' * 900000 %}{% set y = x ~ 'b' %}{% set z = x ~ 'b' %}{% for i in range(90000) %}{% if y == z %}{% endif %}{% endfor %}`,
	"search in a long text":          `{% set x = 'a' * 900000 %}{% for i in range(90000) %}{% if 'ab' in x or x.find('b') > 0 or x.count('b') %}{% endif %}{% endfor %}`,
	"time with a very long format":   `{{ strftime_now('%' + 'Y' * 10000) }}{{ strftime_now('%9999999999d' * 90000) }}`,
	"template that includes itself":  `{% include 'chat' %}`,
	"loop that calls itself":         `{% for i in [messages] recursive %}{{ loop([messages, messages]) }}{% endfor %}`,
	"range with an infinite product": `{% for i in range(99999) %}{% for j in (range(99999) | list) + (range(99999) | list) %}{% endfor %}{% endfor %}`,
}

// hostileFolder writes a model's folder of words with other files in it; a value
// may be a function of the path.
func hostileFolder(t testing.TB, files map[string]any) string {
	t.Helper()
	dir := t.TempDir()
	testkit.WriteFiles(t, dir, map[string]string{"tokenizer.json": wordTokenizer, "chat_template.jinja": wordTemplate, "config.json": `{"max_position_embeddings":9999}`})
	for name, content := range files {
		path := filepath.Join(dir, name)
		_ = os.Remove(path)
		var err error
		switch content := content.(type) {
		case string:
			err = os.WriteFile(path, []byte(content), 0o600)
		case func(string) error:
			err = content(path)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// peakMemory starts to measure this process's memory; the returned function returns by
// how much its peak was above what it was then.
func peakMemory(t *testing.T) func() int64 {
	t.Helper()
	_ = os.WriteFile("/proc/self/clear_refs", []byte("5"), 0)
	read := func(field string) int64 {
		status, err := os.ReadFile("/proc/self/status")
		if err != nil {
			t.Skip("the system does not show the memory of a process")
		}
		_, after, _ := strings.Cut(string(status), field+":")
		kib, _ := strconv.ParseInt(strings.Fields(after)[0], 10, 64)
		return kib << 10
	}
	before := read("VmRSS")
	return func() int64 { return read("VmHWM") - before }
}

// beside runs another model's chats until the returned function is called, which returns
// how many there were. A chat that fails, fails the test.
func beside(t *testing.T) func() int64 {
	m := wordModel(t, chat.Options{})
	var chats atomic.Int64
	stop := make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
			if _, err := m.ChatTokens([]byte(`{"messages":[{"role":"user","content":"hi there"}]}`)); err != nil {
				t.Errorf("another model's chat: %v", err)
				return
			}
			chats.Add(1)
		}
	})
	return func() int64 {
		close(stop)
		group.Wait()
		return chats.Load()
	}
}

// bounded runs work and checks the processor time and the memory that it took.
func bounded(t *testing.T, name string, work func()) {
	t.Helper()
	peak, cpu := peakMemory(t), testkit.CPUTime()
	work()
	took, grown := testkit.CPUTime()-cpu, peak()
	t.Logf("%s: %v, %d MB", name, took.Round(time.Millisecond), grown>>20)
	if took > hostileTime {
		t.Errorf("%s: it took %v", name, took)
	}
	if grown > hostileMemory {
		t.Errorf("%s: it took %d MB", name, grown>>20)
	}
}

// TestAHostileTemplateEndsWithAnError: at the trial when it is opened, or in a chat that
// the trial does not foresee.
func TestAHostileTemplateEndsWithAnError(t *testing.T) {
	stop := beside(t)
	body := []byte(`{"messages":[{"role":"user","content":"` + strings.Repeat("hello ", 300) + `"}]}`)
	for name, template := range hostileTemplates {
		for when, template := range map[string]string{"always": template, "in a chat": `{% if messages[-1].content != 'u' %}` + template + `{% endif %}`} {
			name := name + ", " + when
			bounded(t, name, func() {
				m, err := openModel(hostileFolder(t, map[string]any{"chat_template.jinja": template}), chat.Options{}, chat.DefaultLimits)
				if err != nil {
					t.Errorf("%s: the model does not open: %v", name, err)
					return
				}
				defer m.Close()
				for range 4 {
					tokens, err := m.ChatTokens(body)
					if err == nil && len(tokens) > len(body) || err != nil && !errors.Is(err, chat.ErrNotRenderable) {
						t.Errorf("%s: %d tokens, %v", name, len(tokens), err)
					}
				}
				if tokens := m.Encode("hi there", false); len(tokens) != 2 {
					t.Errorf("%s: its tokenizer does not work", name)
				}
			})
		}
	}
	if stop() == 0 {
		t.Error("no chat of another model was rendered meanwhile")
	}
}

// wordsWith is wordTokenizer with another value of a section.
func wordsWith(t testing.TB, section string, value any) string {
	t.Helper()
	var all map[string]any
	if err := json.Unmarshal([]byte(wordTokenizer), &all); err != nil {
		t.Fatal(err)
	}
	all[section] = value
	text, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

type object = map[string]any

// repeated is a Sequence of a step.
func repeated(kind string, n int, step object) object {
	list := make([]object, n)
	for i := range list {
		list[i] = step
	}
	return object{"type": "Sequence", kind: list}
}

func splitBy(expression string) object {
	return object{"type": "Split", "pattern": object{"Regex": expression}, "behavior": "Isolated", "invert": false}
}

// hostileTokenizers are contents of tokenizer.json that take any time or memory, by what
// they attack.
func hostileTokenizers(t testing.TB) map[string]string {
	grow := object{"type": "Replace", "pattern": object{"String": "e"}, "content": strings.Repeat("e", 50)}
	vocabulary, added := object{"[UNK]": 0}, []object{}
	for i := range 1 << 16 {
		added = append(added, object{"id": i + 100, "content": fmt.Sprintf("<%d>", i), "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
	}
	for i := range 700 {
		vocabulary[strings.Repeat("a", i+1)] = i + 1
	}
	var pieces [][2]any
	for i := range 1200 {
		pieces = append(pieces, [2]any{strings.Repeat("a", i+1), -1})
	}
	around := []object{{"Sequence": object{"id": "A", "type_id": 0}}}
	for range 5000 {
		around = append(around, object{"SpecialToken": object{"id": "<s>", "type_id": 0}})
	}
	return map[string]string{
		"nested lists":                   strings.Repeat("[", 5_000_000),
		"nested objects":                 strings.Repeat(`{"a":`, 100_000) + "1" + strings.Repeat("}", 100_000),
		"not JSON":                       `{"model":`,
		"no model":                       `{}`,
		"growing normalizers":            wordsWith(t, "normalizer", repeated("normalizers", 5, grow)),
		"growing by bytes":               wordsWith(t, "pre_tokenizer", repeated("pretokenizers", 60, object{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false})),
		"growing text in front":          wordsWith(t, "normalizer", repeated("normalizers", 60, object{"type": "Prepend", "prepend": strings.Repeat("x ", 50_000)})),
		"many steps":                     wordsWith(t, "normalizer", repeated("normalizers", 500, object{"type": "Lowercase"})),
		"exponential expression":         wordsWith(t, "pre_tokenizer", splitBy(`(a|a|l)*(h|e|l|o| )*?(?<x>(.+)+)+$z`)),
		"nested repetition":              wordsWith(t, "pre_tokenizer", splitBy(`^(([a-z ])+.)+[A-Z]([a-z])+$`)),
		"polynomial expression":          wordsWith(t, "pre_tokenizer", splitBy(`.*.*.*.*z`)),
		"choices one after another":      wordsWith(t, "pre_tokenizer", splitBy(strings.Repeat("(a|a)", 30)+"z")),
		"optional ones":                  wordsWith(t, "pre_tokenizer", splitBy(strings.Repeat("a?", 30)+strings.Repeat("a", 30))),
		"back reference":                 wordsWith(t, "pre_tokenizer", splitBy(`(.)\1`)),
		"large repetition":               wordsWith(t, "pre_tokenizer", splitBy(`((a{1000}){1000}){1000}`)),
		"expression of a normalizer":     wordsWith(t, "normalizer", object{"type": "Replace", "pattern": object{"Regex": `(a+)+$`}, "content": "b"}),
		"expression of a decoder":        wordsWith(t, "decoder", object{"type": "Replace", "pattern": object{"Regex": `(a+)+$`}, "content": "b"}),
		"many added tokens":              wordsWith(t, "added_tokens", added),
		"long words":                     wordsWith(t, "model", object{"type": "WordPiece", "vocab": vocabulary, "unk_token": "[UNK]", "continuing_subword_prefix": "", "max_input_chars_per_word": 1_000_000_000}),
		"long pieces":                    wordsWith(t, "model", object{"type": "Unigram", "vocab": pieces, "unk_id": 0, "byte_fallback": false}),
		"many tokens around a text":      wordsWith(t, "post_processor", object{"type": "TemplateProcessing", "single": around, "pair": around, "special_tokens": object{"<s>": object{"id": "<s>", "ids": []int{1}, "tokens": []string{"<s>"}}}}),
		"a table that is none":           wordsWith(t, "normalizer", object{"type": "Precompiled", "precompiled_charsmap": "/////wAAAAAAAAAA"}),
		"an expression that is cut off":  wordsWith(t, "pre_tokenizer", splitBy(`(a`)),
		"growing where a character is":   wordsWith(t, "normalizer", repeated("normalizers", 8, object{"type": "Replace", "pattern": object{"String": "ꙮ"}, "content": strings.Repeat("ꙮ", 50)})),
		"square of the length":           wordsWith(t, "pre_tokenizer", splitBy(`a*b|.`)),
		"decoder that grows":             wordsWith(t, "decoder", repeated("decoders", 8, object{"type": "Replace", "pattern": object{"String": "i"}, "content": strings.Repeat("i", 50)})),
		"word without an unknown token":  wordsWith(t, "model", object{"type": "WordLevel", "vocab": object{"a": 0}, "unk_token": "none"}),
		"merges of what is not there":    wordsWith(t, "model", object{"type": "BPE", "vocab": object{"a": 0}, "merges": [][2]string{{"x", "y"}}}),
		"huge ids":                       wordsWith(t, "model", object{"type": "WordLevel", "vocab": object{"a": 4294967295, "[UNK]": 0}, "unk_token": "[UNK]"}),
		"an empty pattern that inserts":  wordsWith(t, "normalizer", repeated("normalizers", 20, object{"type": "Replace", "pattern": object{"String": ""}, "content": "xyz"})),
		"a repetition of nothing":        wordsWith(t, "pre_tokenizer", splitBy(`(?:)*x`)),
		"expression in a look-around":    wordsWith(t, "pre_tokenizer", splitBy(`a(?=(?:a+)+b)`)),
		"an expression of 100,000 bytes": wordsWith(t, "pre_tokenizer", splitBy(strings.Repeat("a", 100_000))),
	}
}

// TestAHostileTokenizerIsRefusedOrBounded opens it and encodes texts, some of which have
// what it waits for.
func TestAHostileTokenizerIsRefusedOrBounded(t *testing.T) {
	stop := beside(t)
	texts := []string{strings.Repeat("hello ", 300), "x ꙮꙮ y", strings.Repeat("a", 20_000), strings.Repeat("a", 200_000), strings.Repeat(" ", 20_000) + "x", "hi there"}
	for name, content := range hostileTokenizers(t) {
		bounded(t, name, func() {
			m, err := openModel(hostileFolder(t, map[string]any{"tokenizer.json": content}), chat.Options{}, chat.DefaultLimits)
			if err != nil {
				if !strings.Contains(err.Error(), "tokenizer.json") || len(err.Error()) > 1000 {
					t.Errorf("%s: the error does not name the file: %v", name, err)
				}
				return
			}
			defer m.Close()
			for _, text := range texts {
				tokens, err := m.encode(m.bounds(t.Context(), time.Minute), text, true)
				if len(tokens) > tokensPerByte*len(text)+tokensAround || err != nil && !errors.Is(err, chat.ErrNotRenderable) {
					t.Errorf("%s: %d tokens, %v", name, len(tokens), err)
				}
			}
			m.Decode([]uint32{2, 3, 4, 5, 2, 3})
		})
	}
	if stop() == 0 {
		t.Error("no chat of another model was rendered meanwhile")
	}
}

// TestTheAttackIsNamedWhereItIsFound: the tests above would also pass if nothing were
// found because the files were wrong.
func TestTheAttackIsNamedWhereItIsFound(t *testing.T) {
	tokenizers := hostileTokenizers(t)
	for name, want := range map[string]string{
		"nested lists": "levels deep", "growing normalizers": "memory", "many steps": "503 normalizers", "nested repetition": "several ways",
		"polynomial expression": "all combinations", "choices one after another": "ways", "optional ones": "ways", "large repetition": "repetition",
		"expression of a normalizer": "normalizer", "many added tokens": "added tokens", "long words": "max_input_chars_per_word", "long pieces": "512 characters",
		"growing text in front": "memory", "many tokens around a text": "post_processor has",
	} {
		if _, err := openModel(hostileFolder(t, map[string]any{"tokenizer.json": tokenizers[name]}), chat.Options{}, chat.DefaultLimits); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, want := range map[string]string{
		"empty loops": "fuel", "doubling by +": "memory", "replace": "memory", "list that doubles, compared": "work", "list times a number": "work",
		"namespace that holds itself": "cannot hold a namespace", "long chain of operators": "tokens", "constant list times a number": "multiplies a constant list",
		"one output repeated": "memory", "comparison of long texts": "work", "list in a list in a list": "nesting", "macro that calls itself twice": "recursion",
	} {
		m, err := openModel(hostileFolder(t, map[string]any{"chat_template.jinja": `{% if messages[-1].content != 'u' %}` + hostileTemplates[name] + `{% endif %}`}), chat.Options{}, chat.DefaultLimits)
		if err != nil {
			t.Fatal(err)
		}
		_, err = m.ChatTokens([]byte(`{"messages":[{"role":"user","content":"hi"}]}`))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
		m.Close()
	}
}

// TestFilesThatAreNoneDoNotBlock: pipes, devices, folders and files that are too large.
func TestFilesThatAreNoneDoNotBlock(t *testing.T) {
	pipe := func(path string) error { return syscall.Mkfifo(path, 0o600) }
	zeros := func(path string) error { return os.Symlink("/dev/zero", path) }
	folder := func(path string) error { return os.Mkdir(path, 0o700) }
	large := func(path string) error { // takes no space
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			return err
		}
		return os.Truncate(path, 2<<30)
	}
	for kind, content := range map[string]func(string) error{"a pipe": pipe, "an endless device": zeros, "a folder": folder, "too large": large} {
		for _, name := range []string{"tokenizer.json", "tokenizer_config.json", "config.json", "special_tokens_map.json"} {
			bounded(t, name+" is "+kind, func() {
				m, err := openModel(hostileFolder(t, map[string]any{name: content}), chat.Options{}, chat.DefaultLimits)
				if err == nil {
					m.Close()
					t.Errorf("%s is %s: it is opened", name, kind)
				} else if !strings.Contains(err.Error(), name) {
					t.Errorf("%s is %s: %v", name, kind, err)
				}
			})
		}
		bounded(t, "the template is "+kind, func() {
			m, err := openModel(hostileFolder(t, map[string]any{"chat_template.jinja": content}), chat.Options{}, chat.DefaultLimits)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			if m.Problem() == "" || !strings.Contains(m.Problem(), "chat_template.jinja") {
				t.Errorf("the template is %s: %q", kind, m.Problem())
			}
			if _, err := m.ChatTokens([]byte(`{"messages":[{"role":"user","content":"hi"}]}`)); !errors.Is(err, chat.ErrNotRenderable) {
				t.Errorf("the template is %s: %v", kind, err)
			}
			if len(m.Encode("hi there", false)) != 2 {
				t.Error("the tokenizer does not work")
			}
		})
	}
}

// TestFilesBehindLinksAreRead, as those of the Hugging Face cache are links.
func TestFilesBehindLinksAreRead(t *testing.T) {
	blobs, dir := hostileFolder(t, nil), t.TempDir()
	for _, name := range []string{"tokenizer.json", "chat_template.jinja", "config.json"} {
		if err := os.Symlink(filepath.Join(blobs, name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	m, err := openModel(dir, chat.Options{}, chat.DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if tokens, err := m.ChatTokens([]byte(`{"messages":[{"role":"user","content":"hi there"}]}`)); err != nil || len(tokens) != 4 {
		t.Errorf("%v, %v", tokens, err)
	}
}

func TestTheSizeOfFilesIsASetting(t *testing.T) {
	dir := hostileFolder(t, nil)
	for _, limits := range []chat.Limits{{MaxTokenizerBytes: 100, MaxTemplateBytes: 1 << 20}, {MaxTokenizerBytes: 1 << 20, MaxTemplateBytes: 100}} {
		m, err := Open(t.Context(), Opening{Name: dir, Limits: limits}, quiet())
		if limits.MaxTokenizerBytes == 100 {
			if err == nil || !strings.Contains(err.Error(), "the maximum is 100") {
				t.Errorf("tokenizer: %v", err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(m.Problem(), "the maximum is 100") {
			t.Errorf("template: %q", m.Problem())
		}
		m.Close()
	}
}

// TestATokenizerThatTakesTheSquareOfTheLength encodes no long text: 200,000 characters
// would take it a minute.
func TestATokenizerThatTakesTheSquareOfTheLength(t *testing.T) {
	m, err := openModel(hostileFolder(t, map[string]any{"tokenizer.json": hostileTokenizers(t)["square of the length"]}), chat.Options{}, chat.DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if _, err := m.encode(bounds{}, strings.Repeat("a", encode.SquareText), false); err != nil {
		t.Error(err)
	}
	if _, err := m.encode(bounds{}, strings.Repeat("a", encode.SquareText+1), false); !errors.Is(err, errSquare) {
		t.Error(err)
	}
}

// TestAfterALimitLargerChatsGoToWorkersForAWhile, and smaller ones do not.
func TestAfterALimitLargerChatsGoToWorkersForAWhile(t *testing.T) {
	m, err := openModel(hostileFolder(t, map[string]any{"chat_template.jinja": `{% if messages[-1].content == 'now' %}` + hostileTemplates["doubling by +"] + `{% endif %}` + wordTemplate}), chat.Options{}, chat.DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	w := &askedWorker{renders: true}
	source := NewSource(m, w.ask, time.Second, quiet())
	good, bad := []byte(`{"messages":[{"role":"user","content":"hi there"}]}`), []byte(`{"messages":[{"role":"user","content":"now"}]}`)
	if _, err := m.ChatTokens(good); err != nil {
		t.Fatal(err)
	}
	if p := source.Chat(t.Context(), bad); len(w.asked) != 1 || source.Stats().Reasons[reasonLimit] != 1 {
		t.Fatalf("tokens from %q, the worker was asked %d times, %v", p.Source, len(w.asked), source.Stats().Reasons)
	}
	if _, err := m.ChatTokens(good); !errors.Is(err, chat.ErrLimit) {
		t.Errorf("at once: %v", err)
	}
	if _, err := m.ChatTokens([]byte(`{"messages":[{"role":"user","content":"a"}]}`)); err != nil {
		t.Errorf("a smaller one: %v", err)
	}
	testkit.Eventually(t, 20*time.Second, "it is rendered here again", func() bool {
		_, err := m.ChatTokens(good)
		return err == nil
	})
}

// FuzzModelFiles opens models whose tokenizer and template are anything. Whatever it is,
// opening it and a chat end.
func FuzzModelFiles(f *testing.F) {
	f.Add(wordTokenizer, wordTemplate)
	for _, template := range hostileTemplates {
		if len(template) < 1000 {
			f.Add(wordTokenizer, template)
		}
	}
	for _, tokenizer := range hostileTokenizers(f) {
		if len(tokenizer) < 10_000 {
			f.Add(tokenizer, wordTemplate)
		}
	}
	f.Fuzz(func(t *testing.T, tokenizer, template string) {
		files := &chat.Files{MaxModelLen: 1000, Templates: map[string]string{"default": template}}
		m, err := NewModel("fuzzed", func() ([]byte, error) { return []byte(tokenizer), nil }, files, chat.Options{})
		if err != nil {
			return
		}
		defer m.Close()
		_, _ = m.ChatTokens([]byte(`{"messages":[{"role":"user","content":"hi there ꙮ"}]}`))
		_, _ = m.encode(bounds{}, "hi there ꙮ", true)
		m.Decode([]uint32{1, 2, 3})
	})
}
