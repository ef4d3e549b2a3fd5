package tokens

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/testkit"
)

func TestPromptTokens(t *testing.T) {
	m := wordModel(t, chat.Options{})
	for _, test := range []struct {
		name, body string
		want       []uint32
	}{
		{"chat", `{"messages":[{"role":"user","content":"hi there"}]}`, []uint32{4, 2, 3, 5}},
		{"chat with special tokens", `{"messages":[{"role":"user","content":"hi"}],"add_special_tokens":true}`, []uint32{1, 4, 2, 5}},
		{"a long chat is not truncated", `{"messages":[{"role":"user","content":"a b a b a b a b a b"}]}`, []uint32{4, 7, 8, 7, 8, 7, 8, 7, 8, 7, 8, 5}},
		{"a character of a C string's end", `{"messages":[{"role":"user","content":"hi\u0000 there"}]}`, []uint32{4, 0, 3, 5}},
		{"truncation that does not cut", `{"messages":[{"role":"user","content":"hi"}],"truncate_prompt_tokens":3}`, []uint32{4, 2, 5}},
	} {
		if got, err := m.ChatTokens([]byte(test.body)); err != nil || !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, %v, want %v", test.name, got, err, test.want)
		}
	}
	for _, body := range []string{
		`{"messages":[{"role":"user","content":"hi there"}],"truncate_prompt_tokens":2}`,
		`{"messages":[{"role":"user","content":"hi there"}],"truncate_prompt_tokens":-1}`,
	} {
		if got, err := m.ChatTokens([]byte(body)); !errors.Is(err, chat.ErrNotRenderable) {
			t.Errorf("%s: %v, %v", body, got, err)
		}
	}
}

func TestCompletionTokens(t *testing.T) {
	m := wordModel(t, chat.Options{})
	for body, want := range map[string][][]uint32{
		`{"prompt":"hi there"}`:                               {{1, 2, 3}},
		`{"prompt":"hi there","add_special_tokens":false}`:    {{2, 3}},
		`{"prompt":["hi","there"]}`:                           {{1, 2}, {1, 3}},
		`{"prompt":[5,6,7]}`:                                  {{5, 6, 7}},
		`{"prompt":[[5],[6,7]]}`:                              {{5}, {6, 7}},
		`{"prompt":"hi","suffix":null,"prompt_embeds":null}`:  {{1, 2}},
		`{"prompt":"hi","truncate_prompt_tokens":2}`:          {{1, 2}},
		`{"prompt":"a a a a a a a","max_tokens":1,"stop":[]}`: {{1, 7, 7, 7, 7, 7, 7, 7}},
	} {
		got, err := m.CompletionTokens([]byte(body))
		if err != nil || !slices.EqualFunc(got, want, slices.Equal[[]uint32]) {
			t.Errorf("%s: %v, %v, want %v", body, got, err, want)
		}
	}
	for _, body := range []string{`{`, `{}`, `{"prompt":[]}`, `{"prompt":3}`, `{"prompt":[-1]}`, `{"prompt":[1.5]}`, `{"prompt":[4294967296]}`,
		`{"prompt":"a","suffix":"b"}`, `{"prompt":"a","prompt_embeds":"x"}`, `{"prompt":"hi there","truncate_prompt_tokens":1}`} {
		if got, err := m.CompletionTokens([]byte(body)); !errors.Is(err, chat.ErrNotRenderable) {
			t.Errorf("%s: %v, %v", body, got, err)
		}
	}
}

func TestTokenizeAnswers(t *testing.T) {
	m := wordModel(t, chat.Options{})
	for body, want := range map[string]string{
		`{"prompt":"hi there"}`: `{"count":3,"max_model_len":99,"tokens":[1,2,3],"token_strs":null}`,
		`{"prompt":"hi","add_special_tokens":false,"return_token_strs":true}`: `{"count":1,"max_model_len":99,"tokens":[2],"token_strs":["hi"]}`,
		`{"prompt":""}`: `{"count":1,"max_model_len":99,"tokens":[1],"token_strs":null}`,
		`{"messages":[{"role":"user","content":"hi"}],"return_token_strs":true}`:      `{"count":3,"max_model_len":99,"tokens":[4,2,5],"token_strs":["user","hi","assistant"]}`,
		`{"messages":[{"role":"user","content":"hi"}],"tools":[]}`:                    `{"count":3,"max_model_len":99,"tokens":[4,2,5],"token_strs":null}`,
		`{"messages":[{"role":"user","content":"hi"}],"truncate_prompt_tokens":1}`:    `{"count":3,"max_model_len":99,"tokens":[4,2,5],"token_strs":null}`,
		`{"messages":[{"role":"user","content":"hi"}],"add_generation_prompt":false}`: `{"count":2,"max_model_len":99,"tokens":[4,2],"token_strs":null}`,
	} {
		if got, err := m.Tokenize([]byte(body)); err != nil || string(got) != want {
			t.Errorf("%s\n got %s, %v\nwant %s", body, got, err, want)
		}
	}
	var bad *BadRequest
	for _, body := range []string{`{`, `[]`, `{}`, `{"prompt":3}`, `{"messages":"x"}`, `{"prompt":"x","return_token_strs":"y"}`} {
		if got, err := m.Tokenize([]byte(body)); !errors.As(err, &bad) {
			t.Errorf("%s: %s, %v", body, got, err)
		}
	}
	if got, err := m.Detokenize([]byte(`{"tokens":[1,2,3]}`)); err != nil || string(got) != `{"prompt":"<s> hi there"}` {
		t.Errorf("%s, %v", got, err)
	}
	for _, body := range []string{`{`, `{}`, `{"tokens":"x"}`, `{"tokens":[-1]}`, `{"tokens":["a"]}`, `{"tokens":[1e99]}`} {
		if got, err := m.Detokenize([]byte(body)); !errors.As(err, &bad) {
			t.Errorf("%s: %s, %v", body, got, err)
		}
	}
}

func TestModelWithoutTemplate(t *testing.T) {
	dir := t.TempDir()
	testkit.WriteFiles(t, dir, map[string]string{"tokenizer.json": wordTokenizer})
	m, err := openModel(dir, chat.Options{}, chat.DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if _, err := m.ChatTokens([]byte(`{"messages":[{"role":"user","content":"hi"}]}`)); !errors.Is(err, chat.ErrNotRenderable) || !strings.Contains(err.Error(), "no chat template") {
		t.Error(err)
	}
	if got := m.Encode("hi", true); !slices.Equal(got, []uint32{1, 2}) {
		t.Error(got)
	}
}

func TestModelThatCannotOpen(t *testing.T) {
	for name, files := range map[string]map[string]string{
		"no tokenizer":     {},
		"broken tokenizer": {"tokenizer.json": "{}"},
		"broken config":    {"tokenizer.json": wordTokenizer, "tokenizer_config.json": "{"},
	} {
		dir := t.TempDir()
		testkit.WriteFiles(t, dir, files)
		if m, err := openModel(dir, chat.Options{}, chat.DefaultLimits); err == nil || m != nil {
			t.Errorf("%s: %v, %v", name, m, err)
		}
	}
}

// The library is called without a lock: answers must not depend on company.
func TestModelInManyGoroutines(t *testing.T) {
	m := wordModel(t, chat.Options{})
	var group sync.WaitGroup
	for g := range 8 {
		group.Go(func() {
			words := strings.Repeat("a b ", g+1)
			body := fmt.Sprintf(`{"messages":[{"role":"user","content":%q}]}`, words)
			for range 200 {
				tokens, err := m.ChatTokens([]byte(body))
				if err != nil || len(tokens) != 2*(g+1)+2 {
					t.Errorf("%v, %v", tokens, err)
					return
				}
				if m.tokenString(7) != "a" || m.Decode(tokens[1:3]) != "a b" {
					t.Error("names of tokens differ")
				}
			}
		})
	}
	group.Wait()
}
