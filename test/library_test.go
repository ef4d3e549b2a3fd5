package test

import (
	"strings"
	"testing"

	"github.com/daulet/tokenizers"

	"kvrouter/internal/tools/mocker"
)

// TestTheLibraryBehindTheGoModule calls the functions that the router does not use: they
// work, or say that they do not.
func TestTheLibraryBehindTheGoModule(t *testing.T) {
	plain, err := mocker.BuiltinTokenizer()
	if err != nil {
		t.Fatal(err)
	}
	all, err := tokenizers.FromBytes(plain, tokenizers.WithEncodeSpecialTokens())
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	if n := all.VocabSize(); n != 258 {
		t.Errorf("%d tokens", n)
	}
	if text := all.Decode([]uint32{'a', 256, 'b'}, true); text != "ab" {
		t.Errorf("decoded: %q", text)
	}
	if ids, names := all.Encode("ab", false); ids != nil || names != nil {
		t.Errorf("encoded without a limit: %v, %v", ids, names)
	}
	for name, open := range map[string]func() (*tokenizers.Tokenizer, error){
		"control character": func() (*tokenizers.Tokenizer, error) { return tokenizers.FromBytes([]byte("{\"\x00")) },
		"use FromBytes":     func() (*tokenizers.Tokenizer, error) { return tokenizers.FromFile("/") },
		"not truncate": func() (*tokenizers.Tokenizer, error) {
			return tokenizers.FromBytesWithTruncation(plain, 1, tokenizers.TruncationDirectionLeft)
		},
		"support tiktoken": func() (*tokenizers.Tokenizer, error) { return tokenizers.FromTiktoken("/", "/", "a") },
	} {
		if made, err := open(); made != nil || err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v, %v", name, made, err)
		}
	}
}
