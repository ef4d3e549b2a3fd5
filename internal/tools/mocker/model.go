package mocker

import (
	"encoding/json"
	"strconv"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/prompt/tokens"
)

// BuiltinTemplate is the chat template of the built-in model, in the ChatML form
// that many models have.
const BuiltinTemplate = `{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}`

// builtinSpecial are the built-in model's special tokens, numbered after the
// bytes.
var builtinSpecial = [2]string{"<|im_start|>", "<|im_end|>"}

// builtinMaxModelLen is the longest context of the built-in model, tokens.
const builtinMaxModelLen = 131_072

// OpenBuiltinModel returns a model without files for simulated workers: each byte
// of a text is one token, as are <|im_start|> and <|im_end|>.
func OpenBuiltinModel() (*tokens.Model, error) {
	files := &chat.Files{
		Templates:   map[string]string{"default": BuiltinTemplate},
		Special:     []jsonbody.Field{{Key: "eos_token", Raw: strconv.Quote(builtinSpecial[1])}},
		MaxModelLen: builtinMaxModelLen,
	}
	return tokens.NewModel("the built-in tokenizer", BuiltinTokenizer, files, chat.Options{})
}

// BuiltinTokenizer returns the built-in model's tokenizer.json.
func BuiltinTokenizer() ([]byte, error) {
	vocabulary := map[string]int{}
	for i, r := range byteAlphabet() {
		vocabulary[string(r)] = i
	}
	var added []map[string]any
	for i, text := range builtinSpecial {
		added = append(added, map[string]any{"id": 256 + i, "content": text, "special": true, "normalized": false, "single_word": false,
			"lstrip": false, "rstrip": false})
	}
	byteLevel := map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}
	return json.Marshal(map[string]any{
		"version": "1.0", "added_tokens": added, "normalizer": nil, "pre_tokenizer": byteLevel, "post_processor": nil, "decoder": byteLevel,
		"model": map[string]any{"type": "BPE", "dropout": nil, "unk_token": nil, "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary,
			"merges": []string{}},
	})
}

// byteAlphabet returns the characters by which byte-level tokenizers write the
// bytes 0 to 255: printable ones as themselves, the others, in their order, as
// the characters from 256 on.
func byteAlphabet() []rune {
	alphabet := make([]rune, 256)
	next := rune(256)
	for b := range alphabet {
		r := rune(b)
		if r >= '!' && r <= '~' || r >= '¡' && r <= '¬' || r >= '®' && r <= 'ÿ' {
			alphabet[b] = r
		} else {
			alphabet[b] = next
			next++
		}
	}
	return alphabet
}

// ModelName is the name of the built-in model.
const ModelName = "mock"
