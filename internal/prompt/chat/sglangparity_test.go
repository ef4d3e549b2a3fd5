package chat

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/testkit"
)

// TestSGLangParity renders every request with the templates of real models by
// SGLang's rules and compares the text with SGLang's own: live with the Python that
// KVROUTER_SGLANG_PYTHON names, which must be able to import it, else with the
// committed texts.
func TestSGLangParity(t *testing.T) {
	folders, err := filepath.Glob("testdata/parity/*/tokenizer_config.json")
	if err != nil || len(folders) < 9 {
		t.Fatalf("templates of at least 9 families are needed, found %d: %v", len(folders), err)
	}
	families := map[string]string{}
	for _, path := range folders {
		families[filepath.Base(filepath.Dir(path))] = filepath.Dir(path)
	}
	named := testkit.SGLangChats()
	chats := append(named, testkit.MutatedSGLangChats(rand.New(rand.NewPCG(7, 0)), 400)...)
	reference := liveSGLang(t, families, chats)
	for _, family := range sortedKeys(families) {
		t.Run(family, func(t *testing.T) {
			path := filepath.Join(families[family], "sglang.json")
			want := reference[family]
			if want == nil {
				want = readGoldenFile(t, path)
			} else if *updateGolden {
				writeGoldenFile(t, path, want[:len(named)])
			}
			compareSGLang(t, families[family], chats, want)
		})
	}
}

func compareSGLang(t *testing.T, folder string, chats []testkit.ParityChat, want []golden) {
	files, err := ReadFiles(folder, DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	r := NewRenderer(files, Options{})
	defer r.Close()
	if r.plain == nil {
		t.Fatal(r.noTemplate)
	}
	equal, refused, named := 0, 0, len(testkit.SGLangChats())
	for i, reference := range want {
		c := chats[i]
		if reference.Name != c.Name {
			t.Fatalf("reference text %d is of %q, not %q: run with -update-golden", i, reference.Name, c.Name)
		}
		got, err := renderSGLangParity(r, c)
		switch {
		case reference.Error != "":
		case err != nil:
			refused++
			if i < named && !testkit.LeftToSGLang(c.Name) {
				t.Errorf("%s: refused here: %v", c.Name, err)
			}
		case got != datesOf(reference.Text, time.Now()):
			t.Errorf("%s: silently different for %s\n got %q\nwant %q", c.Name, c.Body, got, reference.Text)
		default:
			equal++
		}
	}
	t.Logf("%d texts equal, %d left to the engine, of %d", equal, refused, len(want))
}

// renderSGLangParity returns the text of a request, and behind a \x02 what is encoded
// apart.
func renderSGLangParity(r *Renderer, c testkit.ParityChat) (string, error) {
	body, ok := jsonbody.Parse([]byte(c.Body))
	if !ok {
		return "", errUnlike
	}
	if c.Kind == "messages" || c.Kind == "responses" {
		var err error
		if body, err = FromOther("/v1/"+c.Kind, body, r.SystemRule()); err != nil {
			return "", err
		}
	}
	chat, err := r.ParseSGLang(body)
	if err != nil {
		return "", err
	}
	rendered, prefill, err := r.RenderSGLang(chat)
	text, err := takeText(rendered, err)
	if prefill != "" {
		text += "\x02" + prefill
	}
	return text, err
}

// liveSGLang asks SGLang's own code for all texts; nil without a Python for it.
func liveSGLang(t *testing.T, families map[string]string, chats []testkit.ParityChat) map[string][]golden {
	python := os.Getenv("KVROUTER_SGLANG_PYTHON")
	if python == "" || testing.Short() {
		return nil
	}
	return askReference(t, python, "sglang", families, chats)
}
