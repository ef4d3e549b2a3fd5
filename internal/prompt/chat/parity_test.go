package chat

import (
	"bytes"
	"encoding/json"
	"flag"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

var updateGolden = flag.Bool("update-golden", false, "write testdata/parity/*/golden.json from the reference")

// golden is one text of the reference, or its refusal.
type golden struct {
	Name  string `json:"name"`
	Text  string `json:"text,omitempty"`
	Error string `json:"error,omitempty"`
}

// TestTemplateParity renders every chat with the templates of real models and
// compares the text with vLLM's own: live where a Python with vLLM is at hand,
// else with the committed texts.
func TestTemplateParity(t *testing.T) {
	folders, err := filepath.Glob("testdata/parity/*/tokenizer_config.json")
	if err != nil || len(folders) < 9 {
		t.Fatalf("templates of at least 9 families are needed, found %d: %v", len(folders), err)
	}
	families := map[string]string{}
	for _, path := range folders {
		families[filepath.Base(filepath.Dir(path))] = filepath.Dir(path)
	}
	// Mutated chats try what nobody thought of; the seed is fixed, so that a
	// failure comes back.
	chats := append(testkit.ChatsForParity(), testkit.MutatedChats(rand.New(rand.NewPCG(3, 0)), 150)...)
	reference := liveReference(t, families, chats)
	if *updateGolden {
		for family, folder := range families {
			writeGolden(t, folder, reference[family][:len(testkit.ChatsForParity())])
		}
	}
	for _, family := range sortedKeys(families) {
		t.Run(family, func(t *testing.T) {
			want := reference[family]
			if want == nil {
				want = readGolden(t, families[family])
			}
			compareFamily(t, families[family], chats, want)
		})
	}
}

// compareFamily renders the chats with one family's templates. Of chats without
// a name of their own only a different text is an error: refusing more or less than
// the reference costs nothing but the engine's answer.
func compareFamily(t *testing.T, folder string, chats []testkit.ParityChat, want []golden) {
	files, err := ReadFiles(folder, DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	r := NewRenderer(files, Options{})
	defer r.Close()
	if r.plain == nil || r.withTools == nil {
		t.Fatal(r.noTemplate)
	}
	if len(want) < len(testkit.ChatsForParity()) {
		t.Fatalf("%d reference texts for %d chats: run with -update-golden", len(want), len(chats))
	}
	var rendered, equal, mutated, refusedHere, refusedThere int
	for i, reference := range want {
		c, named := chats[i], i < len(testkit.ChatsForParity())
		if reference.Name != c.Name {
			t.Fatalf("reference text %d is of %q, not %q: run with -update-golden", i, reference.Name, c.Name)
		}
		got, err := renderParity(r, c)
		switch {
		case reference.Error != "" && err == nil:
			refusedThere++
		case reference.Error != "":
		case err != nil && named:
			rendered++
			t.Errorf("%s: refused here: %v", c.Name, err)
		case err != nil:
			refusedHere++
		case got != datesOf(reference.Text, time.Now()):
			rendered++
			t.Errorf("%s: silently different for %s\n got %q\nwant %q", c.Name, c.Body, got, reference.Text)
		case named:
			rendered++
			equal++
		default:
			mutated++
		}
	}
	t.Logf("equal %d of %d that the reference renders (%d chats); mutated chats: %d equal, %d left to the engine, %d that the engine refuses",
		equal, rendered, len(testkit.ChatsForParity()), mutated, refusedHere, refusedThere)
}

func renderParity(r *Renderer, c testkit.ParityChat) (string, error) {
	kind := Completion
	if c.Kind == "tokenize" {
		kind = Tokenize
	}
	req, err := parseText(c.Body, kind, Options{})
	if err != nil {
		return "", err
	}
	return takeText(r.Render(req))
}

// liveReference asks the reference for all texts; nil without a Python for it.
func liveReference(t *testing.T, families map[string]string, chats []testkit.ParityChat) map[string][]golden {
	python := os.Getenv("KVROUTER_PYTHON")
	if python == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return nil
		}
		found, _ := filepath.Glob(filepath.Join(cache, "kvrouter", "vllm-*", "bin", "python"))
		if len(found) == 0 {
			t.Log("no Python with vLLM: comparing with the committed texts")
			return nil
		}
		python = found[len(found)-1]
	}
	if testing.Short() {
		return nil
	}
	if exec.Command(python, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('vllm'))").Run() != nil {
		t.Logf("%s has no vLLM: comparing with the committed texts", python)
		return nil
	}
	return askReference(t, python, "render", families, chats)
}

// askReference has an engine's own code render all texts, by a command of
// scripts/parity.py.
func askReference(t *testing.T, python, engine string, families map[string]string, chats []testkit.ParityChat) map[string][]golden {
	request, err := json.Marshal(map[string]any{"families": families, "chats": chats})
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(python, "../../../scripts/parity.py", engine)
	command.Stdin = bytes.NewReader(request)
	var stderr bytes.Buffer
	command.Stderr = &stderr
	answer, err := command.Output()
	if err != nil {
		t.Fatalf("the reference failed: %v\n%s", err, stderr.String())
	}
	var out map[string][]golden
	if err := json.Unmarshal(answer, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

func writeGolden(t *testing.T, folder string, texts []golden) {
	writeGoldenFile(t, filepath.Join(folder, "golden.json"), texts)
}

func writeGoldenFile(t *testing.T, path string, texts []golden) {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", " ")
	if err := enc.Encode(texts); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, text.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

func readGolden(t *testing.T, folder string) []golden {
	return readGoldenFile(t, filepath.Join(folder, "golden.json"))
}

func readGoldenFile(t *testing.T, path string) []golden {
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var out []golden
	if err := json.Unmarshal(text, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// datesOf puts today's dates where the reference marked a strftime format.
func datesOf(text string, now time.Time) string {
	layout := strings.NewReplacer("%d", "02", "%b", "Jan", "%B", "January", "%Y", "2006", "%m", "01", "%A", "Monday", "%H", "15", "%M", "04")
	pieces := strings.Split(text, "\x01")
	for i := 1; i < len(pieces); i += 2 {
		pieces[i] = now.Format(layout.Replace(pieces[i]))
	}
	return strings.Join(pieces, "")
}

func sortedKeys(m map[string]string) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// knownDifferences are the snippets where the text differs from jinja2's, each
// with its reason. Beside them a template can only be refused here, which leaves its
// chats to the engine.
var knownDifferences = map[string]string{
	`{{ (1, 2) }} {{ (1,) }} {{ () }}`:      "a tuple is printed as a list",
	`{{ {'a': 1}.items()|list }}`:           "a tuple is printed as a list",
	`{{ {'a': 1}|items|list }}`:             "a tuple is printed as a list",
	`{{ 'a b'.partition(' ') }}`:            "a tuple is printed as a list",
	`{{ {1: 2, true: 3, none: 4}|tojson }}`: "true and 1 are two keys of a dict",
	`{{ self is defined }}`:                 "self, the template's blocks, is missing",
}

// TestTemplateSnippets compares single features of templates with what jinja2
// makes of them with Hugging Face's settings.
func TestTemplateSnippets(t *testing.T) {
	text, err := os.ReadFile("testdata/parity/snippets.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Context  json.RawMessage
		Snippets []struct{ Template, Text, Error string }
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	equal, refused := 0, 0
	for _, s := range file.Snippets {
		got, err := renderSnippet(s.Template, file.Context)
		switch {
		case s.Error != "" && err == nil:
			t.Logf("%s: rendered here as %q, refused by jinja2: %s", s.Template, got, s.Error)
		case s.Error != "":
			equal++
		case err != nil:
			refused++
			t.Logf("%s: refused here: %v", s.Template, err)
		case got == s.Text:
			equal++
		case knownDifferences[s.Template] != "":
			t.Logf("%s: differs as known (%s)", s.Template, knownDifferences[s.Template])
		default:
			t.Errorf("%s: silently different\n got %q\nwant %q", s.Template, got, s.Text)
		}
	}
	t.Logf("equal %d of %d, %d refused here only", equal, len(file.Snippets), refused)
	if refused > 15 {
		t.Errorf("%d snippets of jinja2 are refused here; 15 were known", refused)
	}
}

func renderSnippet(template string, context []byte) (string, error) {
	compiled, err := compileTemplate(template)
	if err != nil {
		return "", err
	}
	defer compiled.Close()
	return takeText(compiled.Render(context))
}
