package mocker

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/tokenstest"
	"kvrouter/internal/tools/engine"
)

func TestMockWordsSurviveTheTokenizer(t *testing.T) {
	models := map[string]*tokens.Model{}
	builtin, err := OpenBuiltinModel()
	if err != nil {
		t.Fatal(err)
	}
	defer builtin.Close()
	models["built-in"] = builtin
	dir := filepath.Join(settings.CacheDir(os.Getenv), "smollm2-135m-instruct")
	if real, err := tokenstest.Open(t.Context(), dir); err == nil {
		defer real.Close()
		models["SmolLM2"] = real
	}
	for name, model := range models {
		words, err := newVocabulary(model)
		if err != nil {
			t.Fatal(name, err)
		}
		tokens, texts := words.answer(7, 300)
		text := strings.Join(texts, "")
		if len(tokens) != 300 || model.Decode(tokens) != text {
			t.Errorf("%s: %d tokens are %q, the text is %q", name, len(tokens), model.Decode(tokens), text)
		}
		if again := model.Encode(text, false); !slices.Equal(again[:290], tokens[:290]) {
			t.Errorf("%s: the text has other tokens", name)
		}
	}
}

func TestBuiltinModelTakesAnyText(t *testing.T) {
	model, err := OpenBuiltinModel()
	if err != nil {
		t.Fatal(err)
	}
	defer model.Close()
	for _, text := range []string{"", "plain", "  two  spaces \t\n", "naïve 日本語 🙂", "<|im_start|>"} {
		tokens := model.Encode(text, true)
		if text != "<|im_start|>" && len(tokens) != len(text) {
			t.Errorf("%q has %d tokens, it has %d bytes", text, len(tokens), len(text))
		}
		if back := model.Decode(tokens); back != text {
			t.Errorf("%q came back as %q", text, back)
		}
	}
	tokens, err := tokenstest.Chat(model, []byte(`{"messages":[{"role":"user","content":"Hi"}]}`))
	if want := "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"; err != nil || model.Decode(tokens) != want {
		t.Errorf("%q, %v", model.Decode(tokens), err)
	}
}

func TestSimEngineStoresOutputBlocksWhenTheyAreFull(t *testing.T) {
	// 6 prompt tokens fill one block; the pass that computes the 8th token fills
	// the second, that of the 12th the third; the 16th is never computed. SGLang has
	// the answer's at the end.
	for caching, want := range map[engine.Caching][][]int{
		engine.CacheFilled:   {{0}, {0}, {0, 1}, {0, 1}, {0, 1}, {0, 1}, {0, 1, 2}, {0, 1, 2}, {0, 1, 2}, {0, 1, 2}},
		engine.CacheComputed: {{}, {0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}},
	} {
		storesOutputBlocks(t, caching, want)
	}
}

func storesOutputBlocks(t *testing.T, caching engine.Caching, want [][]int) {
	config := testkit.Engine()
	config.Blocks, config.BlockSize, config.Caching = 20, 4, caching
	var stored []int
	e := engine.New(config, func(event engine.Event) {
		if event.Stored {
			for i := range event.Blocks {
				stored = append(stored, event.First+i)
			}
			if event.HasParent != (event.First > 0) || event.HasParent && event.Parent != event.Request.Blocks[event.First-1].Engine {
				t.Errorf("parent of %+v", event)
			}
		}
	})
	blocks := []kv.StoredBlock{{Engine: 1, Local: 1}, {Engine: 2, Local: 2}, {Engine: 3, Local: 3}, {Engine: 4, Local: 4}}
	r := &engine.Request{Blocks: blocks, Prompt: 6, Output: 10}
	if err := e.Submit(r); err != nil {
		t.Fatal(err)
	}
	var seen [][]int
	for {
		_, busy := e.Begin()
		if !busy {
			break
		}
		seen = append(seen, slices.Clone(stored))
		e.End()
	}
	if fmt.Sprint(seen) != fmt.Sprint(want) {
		t.Errorf("stored by pass: %v, want %v", seen, want)
	}
	next := &engine.Request{Blocks: blocks, Prompt: 15, Output: 1}
	_ = e.Submit(next)
	e.Begin()
	if e.End(); next.Cached != 12 {
		t.Errorf("the next turn found %d tokens", next.Cached)
	}
}
