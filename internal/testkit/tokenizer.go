package testkit

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// TokenizerFolder creates a model folder with a byte-level tokenizer, a chat template and
// the other required files. Each of merges, two texts of one byte, becomes one token.
func TokenizerFolder(t testing.TB, dir string, merges ...[2]string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	vocabulary, list := map[string]int{}, [][2]string{}
	spare := rune(256) // byte-level tokenizers write bytes that do not print as later characters
	for b := range rune(256) {
		r := b
		if b < '!' || b > '~' && b < 0xa1 || b == 0xad {
			r, spare = spare, spare+1
		}
		vocabulary[string(r)] = int(255 - b)
	}
	for i, merge := range merges {
		vocabulary[merge[0]+merge[1]] = 256 + i
		list = append(list, merge)
	}
	level := map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}
	for name, content := range map[string]any{
		"tokenizer.json": map[string]any{
			"version": "1.0", "added_tokens": []any{}, "normalizer": nil, "pre_tokenizer": level, "post_processor": nil, "decoder": level,
			"model": map[string]any{"type": "BPE", "dropout": nil, "unk_token": nil, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary,
				"merges": list},
		},
		"tokenizer_config.json": map[string]any{"chat_template": "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor " +
			"%}[answer]"},
		"config.json": map[string]any{"max_position_embeddings": 32768},
	} {
		text, err := json.Marshal(content)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
