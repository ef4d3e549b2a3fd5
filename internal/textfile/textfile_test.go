package textfile

import (
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

// TestTextThatCostsTheDecoderTooMuchIsRefused: some of these took gigabytes or minutes.
func TestTextThatCostsTheDecoderTooMuchIsRefused(t *testing.T) {
	many := func(text string) string { return strings.Repeat(text, (1<<20)/len(text)-16) }
	for text, want := range map[string]string{
		many("["):                                "line 1: lists and mappings are nested more than 16 deep",
		many("{a: "):                             "nested more than 16 deep",
		"workers: [" + many("[\n"):               "nested more than 16 deep",
		"workers: [\"" + many("[") + "\"]":       "nested more than 16 deep",
		many("- "):                               "nested more than 16 deep",
		"workers: [" + many("- "):                "a list with dashes begins within",
		"a: - - -":                               "a list with dashes begins within",
		"workers: " + many(`["" "]" `):           "nested more than 16 deep",
		"workers: " + many(`[[] "]" `):           "nested more than 16 deep",
		many("? "):                               `"?" starts unsupported`,
		many("!!a "):                             `"!" starts unsupported`,
		"workers: |\n" + many("\n"):              `"|" starts unsupported`,
		strings.Repeat("- a\n", 10_001):          "line 10001: more than 10000 entries",
		strings.Repeat("- a\n", 10_000):          "",
		"[" + strings.Repeat("a,", 10_001) + "]": "line 1: more than 10000 entries",
		strings.Repeat("- a: b\n", 5_001):        "line 5001: more than 10000 entries",
		"a: b: c":                                "two values for one field",
		"a: x\n" + many("\n"):                    "line 102: more than 100 consecutive lines",
		"a: 'x\n'":                               "line 1: a quote does not end",
		"a: &a [x, x]\nb: &b [*a, *a]\n":         `line 1: "&" starts unsupported`,
		"workers:\n- url: *a\n":                  `line 2: "*" starts unsupported`,
		"workers: [http://h:1, *a]":              `"*" starts unsupported`,
		nested(maxNesting+1) + "x":               "nested more than 16 deep",
		"workers:\n- url: http://h:1 # [[{ &a\n": "",
		"workers: [{url: \"http://[::1]:8\", name: 'it''s [&a'}, \"http://h:1\"]": "",
		"workers:\r\n- http://[::1]:8\r\n- {url: 'http://h:2'}\r\n":               "",
		"# of us\n---\nworkers:\n\n- url: http://h:1\n  name: a - b, & c\n":       "",
	} {
		err := BoundYAML([]byte(text), 10_000)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%.80q: %v; want %q", text, err, want)
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
