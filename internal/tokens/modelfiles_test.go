package tokens

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvrouter/internal/jsonbody"
)

// writeFiles puts files into a folder.
func writeFiles(t testing.TB, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// wordTokenizer is a tokenizer.json that makes each word a token and puts <s>
// before a text. It carries truncation and padding, which engines do not use.
const wordTokenizer = `{"version":"1.0","truncation":{"direction":"Right","max_length":3,"strategy":"LongestFirst","stride":0},
"padding":{"strategy":{"Fixed":8},"direction":"Right","pad_to_multiple_of":null,"pad_id":0,"pad_type_id":0,"pad_token":"[UNK]"},
"added_tokens":[{"id":1,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
"normalizer":null,"pre_tokenizer":{"type":"WhitespaceSplit"},
"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"B","type_id":1}}],"special_tokens":{"<s>":{"id":"<s>","ids":[1],"tokens":["<s>"]}}},
"decoder":null,"model":{"type":"WordLevel","vocab":{"[UNK]":0,"<s>":1,"hi":2,"there":3,"user":4,"assistant":5,"tool":6,"a":7,"b":8},"unk_token":"[UNK]"}}`

// wordTemplate writes a chat as words.
const wordTemplate = `{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if tools %}tool {% endif %}{% if add_generation_prompt %}assistant{% endif %}`

// wordModel opens a model of words.
func wordModel(t testing.TB, options ChatOptions) *Model {
	t.Helper()
	dir := t.TempDir()
	writeFiles(t, dir, map[string]string{"tokenizer.json": wordTokenizer, "chat_template.jinja": wordTemplate, "config.json": `{"max_position_embeddings":99}`})
	m, err := OpenModelWith(dir, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

func TestResolveModelLocally(t *testing.T) {
	hub := t.TempDir()
	t.Setenv("HF_HUB_CACHE", hub)
	t.Setenv("HF_HUB_OFFLINE", "1")
	repo := filepath.Join(hub, "models--org--name")
	writeFiles(t, repo, map[string]string{"refs/main": "abc123", "snapshots/abc123/tokenizer.json": "{}",
		"snapshots/abc123/tokenizer_config.json": "{}", "snapshots/abc123/config.json": "{}"})
	ctx := context.Background()
	for name, want := range map[string]string{hub: hub, "org/name": filepath.Join(repo, "snapshots", "abc123")} {
		if got, err := ResolveModel(ctx, name, "no-python"); err != nil || got != want {
			t.Errorf("%s: %s, %v", name, got, err)
		}
	}
	for _, name := range []string{"org/missing", "/no/such/folder", "./neither"} {
		_, err := ResolveModel(ctx, name, "no-python")
		if err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: the error should be one line, got %v", name, err)
		}
	}
}

func TestResolveModelFetches(t *testing.T) {
	t.Setenv("HF_HUB_CACHE", t.TempDir())
	t.Setenv("HF_HUB_OFFLINE", "")
	dir := t.TempDir()
	python := filepath.Join(dir, "python")
	writeFiles(t, dir, map[string]string{"python": "#!/bin/sh\necho \"progress\"; echo \"/fetched/$3\"\n"})
	if err := os.Chmod(python, 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := ResolveModel(context.Background(), "org/name", python); err != nil || got != "/fetched/org/name" {
		t.Errorf("%q, %v", got, err)
	}
	writeFiles(t, dir, map[string]string{"python": "#!/bin/sh\necho 'Traceback' >&2; echo 'ConnectionError: no route' >&2; exit 1\n"})
	if _, err := ResolveModel(context.Background(), "org/name", python); err == nil || !strings.Contains(err.Error(), "no route") || strings.Contains(err.Error(), "\n") {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := ResolveModel(ctx, "org/name", python); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestTemplateChoice(t *testing.T) {
	for _, test := range []struct {
		name         string
		files        map[string]string
		plain, tools string
	}{
		{"in the configuration", map[string]string{"tokenizer_config.json": `{"chat_template":"config"}`}, "config", "config"},
		{"a file wins", map[string]string{"tokenizer_config.json": `{"chat_template":"config"}`, "chat_template.jinja": "file"}, "file", "file"},
		{"named in the configuration", map[string]string{"tokenizer_config.json": `{"chat_template":[{"name":"default","template":"d"},{"name":"tool_use","template":"t"},{"name":"rag","template":"r"}]}`}, "d", "t"},
		{"named files", map[string]string{"chat_template.jinja": "d", "chat_templates/tool_use.jinja": "t"}, "d", "t"},
		{"a processor's, without tools", map[string]string{"tokenizer_config.json": `{"chat_template":"config"}`, "processor_config.json": "{}", "chat_template.json": `{"chat_template":"p"}`}, "p", "config"},
		{"no processor", map[string]string{"tokenizer_config.json": `{"chat_template":"config"}`, "chat_template.json": `{"chat_template":"p"}`}, "config", "config"},
		{"none", nil, "", ""},
	} {
		dir := t.TempDir()
		writeFiles(t, dir, test.files)
		f, err := readModelFiles(dir)
		if err != nil {
			t.Fatal(err)
		}
		if plain, tools := f.template(false), f.template(true); plain != test.plain || tools != test.tools {
			t.Errorf("%s: %q and %q with tools", test.name, plain, tools)
		}
	}
}

func TestEnginesOwnRenderers(t *testing.T) {
	for name, files := range map[string]map[string]string{
		"architecture": {"config.json": `{"architectures":["DeepseekV32ForCausalLM"]}`},
		"tekken":       {"tekken.json": "{}"},
	} {
		dir := t.TempDir()
		writeFiles(t, dir, files)
		f, err := readModelFiles(dir)
		if err != nil || f.cannotRender == "" {
			t.Errorf("%s: %+v, %v", name, f, err)
		}
	}
}

func TestEngineChatOptions(t *testing.T) {
	dir := t.TempDir()
	writeFiles(t, dir, map[string]string{"own.jinja": "own {{ x }}"})
	o, err := EngineChatOptions([]string{"--max-model-len", "8", "--chat-template", filepath.Join(dir, "own.jinja"), "--chat-template-content-format=openai",
		"--default-chat-template-kwargs", `{"enable_thinking": false}`, "--exclude-tools-when-tool-choice-none"})
	if err != nil || o.ChatTemplate != "own {{ x }}" || o.ContentFormat != "openai" || !o.ExcludeToolsWhenNone || o.CannotRender != "" ||
		len(o.DefaultKwargs) != 1 || o.DefaultKwargs[0] != (jsonbody.Field{Key: "enable_thinking", Raw: "false"}) {
		t.Errorf("%+v, %v", o, err)
	}
	for _, args := range [][]string{{"--tokenizer-mode", "mistral"}, {"--tokenizer", "other"}, {"--chat-template", "missing.jinja"}} {
		if o, err := EngineChatOptions(args); err != nil || o.CannotRender == "" {
			t.Errorf("%v: %+v, %v", args, o, err)
		}
	}
	for _, args := range [][]string{{"--chat-template"}, {"--default-chat-template-kwargs", "no"}} {
		if _, err := EngineChatOptions(args); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
}
