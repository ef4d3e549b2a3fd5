package tokens

import (
	"testing"

	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/testkit"
)

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
func wordModel(t testing.TB, options chat.Options) *Model {
	t.Helper()
	dir := t.TempDir()
	testkit.WriteFiles(t, dir, map[string]string{"tokenizer.json": wordTokenizer, "chat_template.jinja": wordTemplate, "config.json": `{"max_position_embeddings":99}`})
	m, err := openModel(dir, options, chat.DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}
