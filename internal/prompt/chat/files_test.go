package chat

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/testkit"
)

func TestResolveModelLocally(t *testing.T) {
	hub := t.TempDir()
	t.Setenv("HF_HUB_CACHE", hub)
	t.Setenv("HF_HUB_OFFLINE", "1")
	repo := filepath.Join(hub, "models--org--name")
	testkit.WriteFiles(t, repo, map[string]string{"refs/main": "abc123", "snapshots/abc123/tokenizer.json": "{}",
		"snapshots/abc123/tokenizer_config.json": "{}", "snapshots/abc123/config.json": "{}"})
	ctx := context.Background()
	for name, want := range map[string]string{hub: hub, "org/name": filepath.Join(repo, "snapshots", "abc123")} {
		if got, err := Resolve(ctx, name, "no-python"); err != nil || got != want {
			t.Errorf("%s: %s, %v", name, got, err)
		}
	}
	for _, name := range []string{"org/missing", "/no/such/folder", "./neither"} {
		_, err := Resolve(ctx, name, "no-python")
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
	testkit.WriteFiles(t, dir, map[string]string{"python": "#!/bin/sh\necho \"progress\"; echo \"/fetched/$3\"\n"})
	if err := os.Chmod(python, 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := Resolve(context.Background(), "org/name", python); err != nil || got != "/fetched/org/name" {
		t.Errorf("%q, %v", got, err)
	}
	testkit.WriteFiles(t, dir, map[string]string{"python": "#!/bin/sh\necho 'Traceback' >&2; echo 'ConnectionError: no route' >&2; exit 1\n"})
	if _, err := Resolve(context.Background(), "org/name", python); err == nil || !strings.Contains(err.Error(), "no route") || strings.Contains(err.Error(), "\n") {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Resolve(ctx, "org/name", python); !errors.Is(err, context.Canceled) {
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
		testkit.WriteFiles(t, dir, test.files)
		f, err := ReadFiles(dir, DefaultLimits)
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
		testkit.WriteFiles(t, dir, files)
		f, err := ReadFiles(dir, DefaultLimits)
		if err != nil || f.cannotRender == "" {
			t.Errorf("%s: %+v, %v", name, f, err)
		}
	}
}

func TestVLLMOptions(t *testing.T) {
	dir := t.TempDir()
	testkit.WriteFiles(t, dir, map[string]string{"own.jinja": "own {{ x }}"})
	o, err := VLLMOptions([]string{"--max-model-len", "8", "--chat-template", filepath.Join(dir, "own.jinja"), "--chat-template-content-format=openai",
		"--default-chat-template-kwargs", `{"enable_thinking": false}`, "--exclude-tools-when-tool-choice-none"})
	if err != nil || o.ChatTemplate != "own {{ x }}" || o.ContentFormat != "openai" || !o.ExcludeToolsWhenNone || o.CannotRender != "" ||
		len(o.DefaultKwargs) != 1 || o.DefaultKwargs[0] != (jsonbody.Field{Key: "enable_thinking", Raw: "false"}) {
		t.Errorf("%+v, %v", o, err)
	}
	for _, args := range [][]string{{"--tokenizer-mode", "mistral"}, {"--tokenizer", "other"}, {"--chat-template", "missing.jinja"}} {
		if o, err := VLLMOptions(args); err != nil || o.CannotRender == "" {
			t.Errorf("%v: %+v, %v", args, o, err)
		}
	}
	for _, args := range [][]string{{"--chat-template"}, {"--default-chat-template-kwargs", "no"}} {
		if _, err := VLLMOptions(args); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
}

func TestSGLangOptions(t *testing.T) {
	file := filepath.Join(t.TempDir(), "t.jinja")
	if err := os.WriteFile(file, []byte("\na\\nb\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	o, err := SGLangOptions([]string{"--tp", "2", "--chat-template", file, `--default-chat-template-kwargs={"enable_thinking":false}`, "--reasoning-parser", "qwen3"})
	if err != nil || o.ChatTemplate != "a\nb" || len(o.DefaultKwargs) != 1 || o.DefaultKwargs[0].Raw != "false" || o.CannotRender != "" {
		t.Errorf("%+v, %v", o, err)
	}
	for _, args := range [][]string{{"--chat-template", "chatml"}, {"--tokenizer-path", "x"}, {"--completion-template=x"}, {"--tokenizer-mode", "slow"}, {"--hf-chat-template-name", "x"}} {
		if o, err := SGLangOptions(args); err != nil || o.CannotRender == "" || o.ChatTemplate != "" {
			t.Errorf("%v: %+v, %v", args, o, err)
		}
	}
	for _, args := range [][]string{{"--chat-template"}, {"--default-chat-template-kwargs", "[1]"}} {
		if _, err := SGLangOptions(args); err == nil {
			t.Errorf("%v is taken", args)
		}
	}
}
