package textfile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/goccy/go-yaml"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/leaks"
)

func TestMain(m *testing.M) { leaks.Main(m) }

func TestOnlyRegularFilesAreRead(t *testing.T) {
	dir := t.TempDir()
	pipe, file, link, broken := filepath.Join(dir, "pipe"), filepath.Join(dir, "file"), filepath.Join(dir, "link"), filepath.Join(dir, "broken")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	testkit.WriteFile(t, file, "12345")
	for at, to := range map[string]string{link: file, broken: filepath.Join(dir, "none")} {
		if err := os.Symlink(to, at); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		path  string
		most  int64
		want  string
		check string // for CheckRegular
	}{
		{file, 5, "", ""},
		{link, 5, "", ""},
		{file, 4, "it exceeds 4 bytes", ""},
		{pipe, 5, "it is not a regular file", "it is not a regular file"},
		{dir, 5, "it is not a regular file", "it is not a regular file"},
		{"/dev/zero", 5, "it is not a regular file", "it is not a regular file"},
		{broken, 5, "cannot read it: no such file", "cannot read it: no such file"},
	} {
		text, err := Read(test.path, test.most)
		if err == nil != (test.want == "") || err == nil && string(text) != "12345" || err != nil && !strings.HasPrefix(err.Error(), test.want) {
			t.Errorf("%s: %q, %v; want %q", test.path, text, err, test.want)
		}
		if err := CheckRegular(test.path); err == nil != (test.check == "") || err != nil && !strings.HasPrefix(err.Error(), test.check) {
			t.Errorf("%s: %v, want %q", test.path, err, test.check)
		}
	}
}

func TestOnlyRegularFilesAreWritten(t *testing.T) {
	dir := t.TempDir()
	pipe, file, link, dangling := filepath.Join(dir, "pipe"), filepath.Join(dir, "file"), filepath.Join(dir, "link"), filepath.Join(dir, "dangling")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	testkit.WriteFile(t, file, "12345")
	for at, to := range map[string]string{link: file, dangling: filepath.Join(dir, "none")} {
		if err := os.Symlink(to, at); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{link: "symbolic link", dangling: "symbolic link", pipe: "", dir: ""} {
		if err := Write(path, []byte("x"), 0o600); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "12345" {
		t.Errorf("%q, %v", text, err)
	}
	for _, path := range []string{file, filepath.Join(dir, "new")} {
		if err := Write(path, []byte("x"), 0o600); err != nil {
			t.Error(err)
		}
		if text, err := os.ReadFile(path); err != nil || string(text) != "x" {
			t.Errorf("%q, %v", text, err)
		}
	}
}

// TestTextThatCostsTheDecoderTooMuchIsRefused: each of these took gigabytes or minutes.
func TestTextThatCostsTheDecoderTooMuchIsRefused(t *testing.T) {
	many := func(text string) string { return strings.Repeat(text, (1<<18)/len(text)) }
	const nesting = "nested more than 100 deep"
	for text, want := range map[string]string{
		many("["):                                "line 1: lists and mappings are " + nesting,
		strings.Repeat("[", 10_000):              nesting,
		many("{a: "):                             nesting,
		"workers: [" + many("[\n"):               nesting,
		many("- "):                               nesting,
		many("? "):                               nesting,
		many(`["" "]" `):                         nesting,
		many("] ") + many("["):                   nesting,
		"a: |\n" + many("\n"):                    "line 102: more than 100 consecutive empty lines",
		"a: >-\n" + many(" \r\n"):                "line 102: more than 100 consecutive empty lines",
		strings.Repeat("- a\n", 10_001):          "line 10001: too many entries",
		"[" + strings.Repeat("a,", 10_001) + "]": "line 1: too many entries",
		strings.Repeat("- a: b\n", 5_001):        "line 5001: too many entries",
		many("!!a "):                             "too many entries",
		many("a: 1\n---\n"):                      "line 202: more than 100 documents",
		"a: &a [x, x]\nb: &b [*a, *a]\n":         "line 2: aliases are not supported",
		"workers:\n- <<: *a\n":                   "line 2: aliases are not supported",
	} {
		if err := BoundYAML([]byte(text), 10_000); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80q: %v; want %q", text, err, want)
		}
	}
}

func TestTextOfOperatorsIsDecoded(t *testing.T) {
	for name, text := range map[string]string{
		"a list of the maximum":     strings.Repeat("- a\n", 10_000),
		"brackets within text":      "workers:\n- url: http://h:1 # [[{ &a\n- {url: \"http://[::1]:8\", name: 'it''s [*a'}\n- http://[::1]:8\n",
		"lines of other systems":    "workers:\r\n- http://[::1]:8\r\n- {url: 'http://h:2'}\r\n",
		"a document with a header":  "# of us\n---\nworkers:\n\n- url: http://h:1\n  name: a - b, & c\n",
		"a block scalar":            "a: |\n  one\n\n  two\nb: >-\n  three\n",
		"an anchor and a tag":       "a: &a !!str 5\n",
		"many empty lines":          "a: b" + strings.Repeat("\n", 10_000) + "c: d\n",
		"text over lines":           "a: 'x\n\n  y'\n",
		"nesting of many mappings":  nested(90) + "x",
		"a list within dashes":      "- - a\n  - b\n",
		"brackets over some lines":  "a: [\n  {b: c},\n  [d]\n]\n",
		"a value with a colon":      "a: \"b: c\"\n",
		"a key that is a long text": "? " + strings.Repeat("a", 200) + "\n: b\n",
	} {
		var v any
		if err := errors.Join(BoundYAML([]byte(text), 10_000), yaml.Unmarshal([]byte(text), &v)); err != nil || v == nil {
			t.Errorf("%s: %v, %v", name, v, err)
		}
	}
}

// nested returns that many nested mappings, by indentation.
func nested(deep int) (text string) {
	for i := range deep {
		text += strings.Repeat(" ", i) + "a:\n"
	}
	return text + strings.Repeat(" ", deep)
}

// FuzzBoundYAML: accepted text is decoded in bounded time, and errors do not show the text.
func FuzzBoundYAML(f *testing.F) {
	for _, seed := range []string{"a: [http://h:1]", "- &x\n- *x", "- - -", "[[[[{a: {a: ", "a:\n b:\n  - - c", "a: |\n\n", "a: '[' # ["} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 4096 {
			return
		}
		if err := BoundYAML(data, 1000); err != nil {
			if strings.Contains(err.Error(), "\n") || len(err.Error()) > 150 {
				t.Errorf("%q: %v", data, err)
			}
			return
		}
		defer func() { _ = recover() }() // the decoder's own faults
		var list any
		_ = yaml.Unmarshal(data, &list)
	})
}
