package chat

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// tokenizerFiles are the files of a model that tokens.go reads, as patterns of
// huggingface_hub. The last two only show that the engine will not render with a
// Jinja template.
var tokenizerFiles = []string{"config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
	"chat_template.jinja", "chat_template.json", "chat_templates/*.jinja", "processor_config.json",
	"preprocessor_config.json", "tekken.json", "tokenizer.model.v*"}

// Resolve returns the folder that holds a model's tokenizer files. name is a folder
// or a hub id. The files of a hub id come from the local Hugging Face cache,
// otherwise huggingface_hub in python downloads them; it honours HF_TOKEN,
// HF_ENDPOINT and HF_HUB_OFFLINE. ctx limits the total time.
func Resolve(ctx context.Context, name, python string) (dir string, err error) {
	if info, err := os.Stat(name); err == nil && info.IsDir() {
		return name, nil
	}
	if strings.Count(name, "/") > 1 || filepath.IsAbs(name) || strings.HasPrefix(name, ".") {
		return "", fmt.Errorf("model %q: no such folder", name)
	}
	if dir := Cached(name); dir != "" {
		return dir, nil
	}
	if offline() {
		return "", fmt.Errorf("model %q is not in the Hugging Face cache %s, and HF_HUB_OFFLINE is set: unset it, or give --model a folder", name,
			hubCache())
	}
	return fetchSnapshot(ctx, name, python)
}

// hubCache is the folder where huggingface_hub keeps repositories.
func hubCache() string {
	if dir := os.Getenv("HF_HUB_CACHE"); dir != "" {
		return dir
	}
	if dir := os.Getenv("HUGGINGFACE_HUB_CACHE"); dir != "" {
		return dir
	}
	if dir := os.Getenv("HF_HOME"); dir != "" {
		return filepath.Join(dir, "hub")
	}
	cache := os.Getenv("XDG_CACHE_HOME")
	if cache == "" {
		home, _ := os.UserHomeDir()
		cache = filepath.Join(home, ".cache")
	}
	return filepath.Join(cache, "huggingface", "hub")
}

func offline() bool {
	return slices.Contains([]string{"1", "ON", "YES", "TRUE"}, strings.ToUpper(os.Getenv("HF_HUB_OFFLINE")))
}

// Cached returns the folder of the revision "main" of a hub repository in the local
// Hugging Face cache, or an empty name if it has no tokenizer.
func Cached(id string) string {
	repo := filepath.Join(hubCache(), "models--"+strings.ReplaceAll(id, "/", "--"))
	commit, err := ReadFile(filepath.Join(repo, "refs", "main"), maxReference)
	revision := strings.TrimSpace(string(commit))
	if err != nil || !filepath.IsLocal(revision) {
		return ""
	}
	dir := filepath.Join(repo, "snapshots", revision)
	for _, file := range []string{"tokenizer.json", "tokenizer_config.json", "config.json"} {
		if _, err := os.Stat(filepath.Join(dir, file)); err != nil {
			return ""
		}
	}
	return dir
}

// fetchProgram downloads the patterns in argv[2:] of the repository argv[1] and
// prints the folder; any error becomes one line.
const fetchProgram = `import sys
try:
    from huggingface_hub import snapshot_download
    print(snapshot_download(sys.argv[1], allow_patterns=sys.argv[2:]))
except Exception as e:
    text = str(e).strip().splitlines() or [""]
    print(type(e).__name__ + ": " + text[0], file=sys.stderr)
    sys.exit(1)
`

func fetchSnapshot(ctx context.Context, id, python string) (string, error) {
	command := exec.CommandContext(ctx, python, append([]string{"-c", fetchProgram, id}, tokenizerFiles...)...)
	command.Env = append(os.Environ(), "HF_HUB_DISABLE_PROGRESS_BARS=1")
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	if err := command.Run(); err != nil {
		if ctx.Err() != nil {
			return "", fmt.Errorf("model %q: fetching its tokenizer from the Hugging Face hub: %w", id, ctx.Err())
		}
		reason := err.Error()
		if lines := strings.Split(strings.TrimSpace(stderr.String()), "\n"); lines[len(lines)-1] != "" {
			reason = lines[len(lines)-1]
		}
		return "", fmt.Errorf("model %q: cannot fetch its tokenizer from the Hugging Face hub with %s (%s): give --model a folder, or check "+
			"the network and HF_TOKEN", id, python, reason)
	}
	lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
	return lines[len(lines)-1], nil
}

// Files is the content of the files beside tokenizer.json.
type Files struct {
	Templates     map[string]string // the tokenizer's: by name, "default" unless named
	processor     string            // a processor's own template; vLLM prefers it without tools
	Special       []jsonbody.Field  // bos_token and the like, as the template sees them
	MaxModelLen   int               // 0 if unknown
	cannotRender  string            // why the engine will not use a Jinja template, or empty
	refused       string            // why a template was not read, or empty
	Harmony       bool              // gpt-oss: chats are rendered by a library of its own
	CleanUpSpaces bool              // decoding tidies spaces (tokenizers that are not BPE)
}

// specialNames are the special tokens that transformers hands to templates.
var specialNames = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}

// ownRenderer names the architectures whose chats vLLM renders in Python code
// and not with their template.
var ownRenderer = []string{"MoonshotKimiaForCausalLM", "KimiK3ForConditionalGeneration", "DeepseekV32ForCausalLM",
	"DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM",
	"InklingForCausalLM", "InklingForConditionalGeneration"}

// ReadFiles reads the configuration and the templates in dir. A missing file counts
// as empty. Without the templates that exceed limits, or are no regular files, chats are
// ErrNotRenderable.
func ReadFiles(dir string, limits Limits) (*Files, error) {
	f := &Files{Templates: map[string]string{}}
	config, err := readJSON(dir, "tokenizer_config.json")
	if err != nil {
		return nil, err
	}
	if err := f.readTemplates(dir, config.Get("chat_template"), limits); err != nil {
		f.refused = err.Error()
	}
	names := config
	if !config.Get("added_tokens_decoder").Exists() { // an older layout
		if legacy, err := readJSON(dir, "special_tokens_map.json"); err != nil {
			return nil, err
		} else if legacy.IsObject() {
			f.addSpecial(config)
			names = legacy
		}
	}
	f.addSpecial(names)
	f.CleanUpSpaces = config.Get("clean_up_tokenization_spaces").Bool()

	model, err := readJSON(dir, "config.json")
	if err != nil {
		return nil, err
	}
	for _, path := range []string{"max_position_embeddings", "text_config.max_position_embeddings", "n_positions", "max_seq_len",
		"seq_length"} {
		if n := model.Get(path).Int(); n > 0 {
			f.MaxModelLen = int(n)
			break
		}
	}
	f.Harmony = model.Get("model_type").Str == "gpt_oss"
	for _, architecture := range model.Get("architectures").Array() {
		if slices.Contains(ownRenderer, architecture.Str) {
			f.cannotRender = "the engine renders " + architecture.Str + " with its own code"
		}
	}
	for _, pattern := range []string{"tekken.json", "tokenizer.model.v*"} {
		if found, _ := filepath.Glob(filepath.Join(dir, pattern)); len(found) > 0 {
			f.cannotRender = "the engine may use Mistral's own tokenizer (" + filepath.Base(found[0]) + ")"
		}
	}
	return f, nil
}

// readTemplates collects the templates: files win over tokenizer_config.json.
func (f *Files) readTemplates(dir string, configured gjson.Result, limits Limits) error {
	text, there, err := readTemplate(filepath.Join(dir, "chat_template.jinja"), limits)
	if err != nil {
		return err
	}
	if there {
		f.Templates["default"] = text
	}
	named, err := namedTemplates(dir)
	if err != nil {
		return err
	}
	for _, path := range named {
		text, _, err := readTemplate(path, limits)
		if err != nil {
			return err
		}
		f.Templates[strings.TrimSuffix(filepath.Base(path), ".jinja")] = text
	}
	if len(f.Templates) == 0 {
		switch {
		case configured.Type == gjson.String:
			f.Templates["default"] = configured.Str
		case configured.IsArray():
			for _, t := range configured.Array() {
				f.Templates[t.Get("name").Str] = t.Get("template").Str
			}
		case configured.IsObject():
			configured.ForEach(func(name, text gjson.Result) bool {
				f.Templates[name.Str] = text.Str
				return true
			})
		}
	}
	for _, file := range []string{"processor_config.json", "preprocessor_config.json"} {
		if _, err := os.Stat(filepath.Join(dir, file)); err != nil {
			continue
		}
		if _, ok := f.Templates["default"]; ok && FileExists(dir, "chat_template.jinja") {
			break
		}
		own, err := readJSON(dir, "chat_template.json")
		if err != nil {
			return err
		}
		f.processor = own.Get("chat_template").Str
	}
	for _, text := range append(slices.Collect(maps.Values(f.Templates)), f.processor) {
		if int64(len(text)) > limits.MaxTemplateBytes {
			return fmt.Errorf("a chat template has %d bytes; the maximum is %d (--max-template-bytes)", len(text), limits.MaxTemplateBytes)
		}
	}
	return nil
}

func (f *Files) addSpecial(from gjson.Result) {
	for _, name := range specialNames {
		v := from.Get(name)
		if v.IsObject() {
			v = v.Get("content")
		}
		if v.Type == gjson.String {
			f.Special = jsonbody.MergeFields(f.Special, []jsonbody.Field{{Key: name, Raw: string(jsonbody.AppendString(nil, v.Str))}})
		}
	}
}

// template returns the text that vLLM renders a chat with; empty if the model has
// none.
func (f *Files) template(withTools bool) string {
	if !withTools && f.processor != "" {
		return f.processor
	}
	if text := f.Templates["tool_use"]; withTools && text != "" {
		return text
	}
	return f.Templates["default"]
}

// FileExists reports whether the folder contains a file of that name.
func FileExists(dir, name string) bool {
	_, err := os.Stat(filepath.Join(dir, name))
	return err == nil
}

// readJSON reads a JSON file; one that is not there is an empty result.
func readJSON(dir, name string) (gjson.Result, error) {
	data, err := ReadJSON(filepath.Join(dir, name), maxConfig)
	if errors.Is(err, os.ErrNotExist) {
		return gjson.Result{}, nil
	}
	if err != nil {
		return gjson.Result{}, fmt.Errorf("reading the model's files: %w", err)
	}
	return gjson.ParseBytes(data), nil
}
