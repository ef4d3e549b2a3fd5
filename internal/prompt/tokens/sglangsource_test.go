package tokens

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/testkit"
)

// sglangSource is a Source whose only worker runs SGLang.
func sglangSource(model *Model, w *askedWorker) *Source {
	source := NewSource(model, w.ask, time.Second, quiet())
	source.chooseRules([]Peer{{ID: 1, SGLang: true}})
	return source
}

func parsed(t testing.TB, body string) *jsonbody.Body {
	t.Helper()
	b, ok := jsonbody.Parse([]byte(body))
	if !ok {
		t.Fatal("not an object: ", body)
	}
	return b
}

func TestSGLangIsAskedForTokensOnly(t *testing.T) {
	w := &askedWorker{renders: true, answer: map[string]string{"/tokenize": `{"tokens":[4,5],"count":2,"max_model_len":8192}`}}
	source := sglangSource(nil, w)
	for _, c := range []struct{ name, route, body, asked string }{
		{"a chat as it would complete it", "", `{"model":"m","stream":true,"messages":[{"role":"user","content":"q"}],"add_generation_prompt":false,"add_special_tokens":true,"reasoning_effort":"low"}`,
			`{"model":"m","messages":[{"role":"user","content":"q"}],"reasoning_effort":"low"}`},
		{"a text with special tokens", "completion", `{"model":"m","prompt":"x","add_special_tokens":false,"truncate_prompt_tokens":3}`, `{"prompt":"x","model":"m"}`},
		{"a text of its own route", "generate", `{"text":"x","sampling_params":{}}`, `{"prompt":"x"}`},
		{"Claude's messages as a chat", "/v1/messages", `{"model":"m","max_tokens":9,"system":"s","messages":[{"role":"user","content":[{"type":"text","text":"q"}]}]}`,
			`{"messages":[{"role":"system","content":"s"},{"role":"user","content":"q"}],"model":"m"}`},
		{"responses as a chat", "/v1/responses", `{"model":"m","input":"q"}`, `{"messages":[{"role":"user","content":"q"}],"model":"m"}`},
	} {
		w.asked = nil
		var p Prompt
		switch c.route {
		case "":
			p = source.ChatBody(t.Context(), parsed(t, c.body))
		case "completion":
			p = source.CompletionBody(t.Context(), parsed(t, c.body))[0]
		case "generate":
			p = source.GenerateBody(t.Context(), parsed(t, c.body))[0]
		default:
			p = source.Other(t.Context(), c.route, []byte(c.body))
		}
		if p.Source != SourceWorker || !slices.Equal(p.Tokens, []uint32{4, 5}) {
			t.Errorf("%s: %+v", c.name, p)
		}
		testkit.WantEqual(t, c.name, w.asked, []string{"/tokenize " + c.asked})
	}
}

func TestSGLangAnswersTokenizeItself(t *testing.T) {
	w := &askedWorker{answer: map[string]string{"/tokenize": `{"tokens":[[1],[2]]}`, "/detokenize": `{"text":"x"}`}}
	source := sglangSource(wordModel(t, chat.Options{}), w)
	body := []byte(`{"prompt":["a","b"]}`)
	for path, serve := range map[string]func(context.Context, []byte) ([]byte, error){"/tokenize": source.Tokenize, "/detokenize": source.Detokenize} {
		answer, err := serve(t.Context(), body)
		if err != nil || string(answer) != w.answer[path] || !slices.Contains(w.asked, path+` {"prompt":["a","b"]}`) {
			t.Errorf("%s: %s, %v, asked %v", path, answer, err, w.asked)
		}
	}
}

func TestSGLangChatsAreRenderedByItsRules(t *testing.T) {
	source := sglangSource(wordModel(t, chat.Options{}), &askedWorker{})
	for body, want := range map[string][]uint32{
		`{"messages":[{"role":"user","content":"hi"}],"add_generation_prompt":false}`:                                                         {4, 2, 5},
		`{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"there"}]}`:                                                {4, 2, 4, 3, 5},
		`{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"there"}],"continue_final_message":true}`:                  {4, 2, 5, 1, 3},
		`{"messages":[{"role":"user","content":[{"type":"text","text":"hi"},{"type":"text","text":"there"}]}]}`:                               {4, 2, 3, 5},
		`{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"a"}}]}`:                                 {4, 2, 6, 5},
		`{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"a"}}],"tool_choice":"none"}`:            {4, 2, 5},
		`{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":null},{"role":"user","content":"a"}],"input_ids":[7,8]}`:   {7, 8},
		`{"messages":[{"role":"user","content":"` + strings.Repeat("hi ", 2000) + `"}]}`:                                                      nil, // too long
		`{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"a","parameters":{"type":"varchar"}}}]}`: nil,
		`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]}`:                                             nil,
		`{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"tools":[]}}`:                                                   nil,
		`{"messages":[{"role":"user","content":"hi"}],"continue_final_message":1}`:                                                            nil,
		`{"messages":[{"role":"user","content":"hi"}],"thinking":{"type":"enabled"}}`:                                                         nil,
		`{"messages":[{"role":"user","content":"hi"}],"tools":{}}`:                                                                            nil,
		`{"messages":{}}`: nil,
		`{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"a","description":"` + strings.Repeat("x", chat.MaxText) + `"}}]}`: nil,
		`{"messages":[{"role":"user","content":"hi"},{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"[]"}}]}]}`:                                  nil,
	} {
		p := source.ChatBody(t.Context(), parsed(t, body))
		if !slices.Equal(p.Tokens, want) || (p.Source == SourceLocal) != (want != nil) {
			t.Errorf("%.150s: %v from %s, want %v", body, p.Tokens, p.Source, want)
		}
	}
}

func TestGeneratePrompts(t *testing.T) {
	source := sglangSource(wordModel(t, chat.Options{}), &askedWorker{})
	for body, want := range map[string][]Prompt{
		`{"text":"hi there"}`:                                                            {{Tokens: []uint32{1, 2, 3}, Exact: 3}},
		`{"text":["hi","a b"]}`:                                                          {{Tokens: []uint32{1, 2}, Exact: 2}, {Tokens: []uint32{1, 7, 8}, Exact: 3}},
		`{"text":null,"input_ids":[7,8,9]}`:                                              {{Tokens: []uint32{7, 8, 9}, Exact: 3}},
		`{"input_ids":[[7],[8,9]],"image_data":[]}`:                                      {{Tokens: []uint32{7}, Exact: 1}, {Tokens: []uint32{8, 9}, Exact: 2}},
		`{"text":"hi there","logprob_start_len":1}`:                                      {{Tokens: []uint32{1, 2, 3}, Exact: 3}},
		`{"text":"hi there","return_logprob":true}`:                                      {{Tokens: []uint32{1, 2, 3}, Exact: 3}},
		`{"text":"hi there","return_logprob":true,"logprob_start_len":1}`:                {{Tokens: []uint32{1, 2, 3}, Exact: 1}},
		`{"text":["hi","a b"],"return_logprob":[true,false],"logprob_start_len":[-1,2]}`: {{Tokens: []uint32{1, 2}, Exact: 2}, {Tokens: []uint32{1, 7, 8}, Exact: 2}},
		`{"text":"hi there","return_logprob":true,"logprob_start_len":1e300}`:            {{Tokens: []uint32{1, 2, 3}, Exact: 3}},
		`{"text":"hi","image_data":"u"}`:                                                 {{}},
		`{"text":"hi","session_params":{"id":"s"}}`:                                      {{}},
		`{"text":"hi","input_ids":[1]}`:                                                  {{}},
		`{"text":[7,8]}`:                                                                 {{}},
		`{"input_ids":"hi"}`:                                                             {{}},
		`{"input_ids":["hi"]}`:                                                           {{}},
		`{"input_ids":[-1]}`:                                                             {{}},
		`{"input_embeds":[[0.5]]}`:                                                       {{}},
		`{}`:                                                                             {{}},
		`{"text":["hi","a"],"image_data":["u","v"]}`:                                     {{}, {}},
	} {
		got := source.GenerateBody(t.Context(), parsed(t, body))
		for i := range want {
			want[i].Shape, want[i].Source = "generate", SourceLocal
			if want[i].Tokens == nil {
				want[i].Source = SourceNone
			}
		}
		testkit.WantEqual(t, body, got, want)
	}
}

// A prompt whose logprobs are asked for is computed anew from there on.
func TestSGLangEchoTakesNothingFromTheCache(t *testing.T) {
	source := sglangSource(wordModel(t, chat.Options{}), &askedWorker{})
	for body, exact := range map[string]int{
		`{"prompt":"hi there","echo":true,"logprobs":2}`: 0,
		`{"prompt":"hi there","echo":true,"logprobs":0}`: 3,
		`{"prompt":"hi there","echo":true}`:              3,
		`{"prompt":"hi there","logprobs":2}`:             3,
	} {
		if p := source.CompletionBody(t.Context(), parsed(t, body)); len(p) != 1 || len(p[0].Tokens) != 3 || p[0].Exact != exact {
			t.Errorf("%s: %+v", body, p)
		}
	}
}

func TestRulesAreThoseOfMostWorkers(t *testing.T) {
	source := NewSource(nil, nil, time.Second, quiet())
	some, most := 0, 0
	for step, c := range []struct{ vllm, sglang, some, most int }{
		{0, 1, 1, 1}, {1, 1, 1, 1}, {2, 1, 1, 0}, {1, 1, 1, 0}, {0, 1, 1, 1}, {1, 0, 0, 0},
	} {
		var peers []Peer
		for i := range c.vllm + c.sglang {
			peers = append(peers, Peer{ID: uint64(i), SGLang: i >= c.vllm})
		}
		source.compareWith(t.Context(), peers)
		some, most = 0, 0
		if source.someSGLang.Load() {
			some = 1
		}
		if source.SGLang() {
			most = 1
		}
		if some != c.some || most != c.most {
			t.Errorf("step %d, %+v: some %d, most %d", step, c, some, most)
		}
	}
	source.Met(true)
	if source.SGLang() {
		t.Error("a new worker decides although the workers were counted")
	}
	first := NewSource(nil, nil, time.Second, quiet())
	if first.Met(true); !first.SGLang() {
		t.Error("the first worker's rules do not hold")
	}
}

// A router whose workers tell it all tokens counts them too: one that has gone is not
// to leave its rules behind.
func TestRulesAreChosenWithoutAModel(t *testing.T) {
	source := NewSource(nil, nil, time.Second, quiet())
	source.Met(true)
	ctx, cancel := context.WithCancel(t.Context())
	source.KeepComparing(ctx, func() []Peer {
		cancel()
		return []Peer{{ID: 1}}
	})
	if source.SGLang() || source.someSGLang.Load() {
		t.Error("SGLang's rules hold where no worker runs it any more")
	}
}

// What the workers of the other engine say of their own prompts is not asked of
// those whose rules hold.
func TestOnlyWorkersOfTheRulesDisableFeatures(t *testing.T) {
	m := wordModel(t, chat.Options{})
	wrong := &askedWorker{answer: map[string]string{"/tokenize": `{"tokens":[8]}`}}
	source := NewSource(m, wrong.ask, time.Second, quiet())
	right := probeWorker(m, func(_ string, _ []byte, tokens []uint32) []uint32 { return tokens })
	peers := []Peer{{ID: 1, Generation: 1, Ask: right}, {ID: 2, Generation: 1, Ask: right}, {ID: 3, Generation: 1, SGLang: true, Ask: wrong.ask}}
	source.compareWith(t.Context(), peers)
	if s := source.Stats(); len(s.Disabled) != 0 {
		t.Errorf("an SGLang worker among vLLM's disables %v", s.Disabled)
	}
	if slices.ContainsFunc(wrong.asked, func(a string) bool { return strings.Contains(a, "/render") }) {
		t.Errorf("SGLang was asked to render: %v", wrong.asked)
	}
	source.compareWith(t.Context(), peers[2:])
	if s := source.Stats(); !slices.Contains(s.Disabled, "chat") || !slices.Contains(s.Disabled, "answer last") {
		t.Errorf("a lone SGLang worker that differs disables %v", s.Disabled)
	}
}

func TestExtraKeyBecomesASalt(t *testing.T) {
	source := sglangSource(nil, &askedWorker{})
	salts := map[string]string{}
	for _, body := range []string{`{"extra_key":"a"}`, `{"extra_key":"b"}`, `{"extra_key":"a","cache_salt":"s"}`, `{"extra_key":"s","cache_salt":"a"}`, `{"extra_key":["a"]}`, `{"extra_key":["a","b"],"text":["x","y"]}`, `{"extra_key":["a","b"],"text":["y","x"]}`, `{"cache_salt":"s"}`, `{"cache_salt":"a"}`, `{}`} {
		b := parsed(t, body)
		kept := source.KeepApart("/v1/completions", b)
		salt := kept.Get("cache_salt").String()
		if other, taken := salts[salt]; taken {
			t.Errorf("%s and %s have the salt %q", body, other, salt)
		}
		salts[salt] = body
		if again := source.KeepApart("/v1/completions", parsed(t, body)); string(again.Raw) != string(kept.Raw) {
			t.Errorf("%s: %s, then %s", body, kept.Raw, again.Raw)
		}
		if extra := b.Get("extra_key"); kept.Get("extra_key").Raw != extra.Raw || extra.Exists() == (kept == b) {
			t.Errorf("%s goes as %s", body, kept.Raw)
		}
	}
	vllm := NewSource(nil, nil, time.Second, quiet())
	for _, c := range []struct {
		source      *Source
		route, body string
	}{
		{vllm, "/v1/completions", `{"extra_key":"a","cache_salt":"s"}`},
		{vllm, "/v1/messages", `{"cache_salt":"s"}`},
		{source, "/v1/messages", `{"extra_key":"a","cache_salt":"s"}`},
		{source, "/v1/completions", `{"extra_key":""}`},
		{source, "/v1/completions", `{"extra_key":null,"cache_salt":"s"}`},
	} {
		kept := c.source.KeepApart(c.route, parsed(t, c.body))
		if string(kept.Raw) != c.body {
			t.Errorf("%s %s goes as %s", c.route, c.body, kept.Raw)
		}
	}
	if b := (&jsonbody.Body{Raw: []byte("x")}); source.KeepApart("/", b) != b {
		t.Error("a body that is not JSON was changed")
	}
}

func TestSGLangAdapters(t *testing.T) {
	sglang, vllm := sglangSource(nil, &askedWorker{}), NewSource(nil, nil, time.Second, quiet())
	const completions = "/v1/completions"
	for _, c := range []struct {
		source      *Source
		route, body string
		known       string
		listed      bool
		want        string
	}{
		{sglang, completions, `{"model":"base"}`, "", true, ""}, {sglang, completions, `{"model":"base:sql"}`, "", false, "sql"},
		{sglang, completions, `{"model":"base","lora_path":"sql"}`, "", true, "sql"}, {sglang, completions, `{"model":"base:sql","lora_path":"other"}`, "", false, "sql"},
		{sglang, completions, `{"model":"llama3:8b"}`, "", true, ""}, {sglang, completions, `{"model":"llama3:8b","lora_path":"sql"}`, "", true, "sql"},
		{sglang, completions, `{"model":"sql"}`, "sql", true, ""}, {sglang, GenerateRoute, `{"model":"a:b","lora_path":"sql"}`, "", false, "sql"},
		{vllm, completions, `{"model":"base:sql","lora_path":"x"}`, "", false, ""}, {vllm, GenerateRoute, `{"lora_path":"x"}`, "", true, "x"}, {vllm, completions, `{"model":"sql"}`, "sql", true, "sql"},
	} {
		if got := c.source.Adapter(c.route, parsed(t, c.body), c.known, c.listed); got != c.want {
			t.Errorf("%s: %q, want %q", c.body, got, c.want)
		}
	}
}

// FuzzSGLangBody reads bodies as requests of all routes, within bounds.
func FuzzSGLangBody(f *testing.F) {
	for _, c := range testkit.SGLangChats() {
		f.Add([]byte(c.Body))
	}
	for _, body := range []string{`{"text":["a",7]}`, `{"input_ids":[[1],"a"]}`, `{"prompt":[[]],"echo":true,"logprobs":1e400}`, `{"text":"a","return_logprob":[1],"logprob_start_len":[-1e300,[]]}`, `{"sampling_params":[{"n":[]}],"extra_key":{},"lora_path":[1]}`} {
		f.Add([]byte(body))
	}
	m, err := NewModel("words", func() ([]byte, error) { return []byte(wordTokenizer), nil }, &chat.Files{MaxModelLen: 20, Templates: map[string]string{"default": wordTemplate}}, chat.Options{})
	if err != nil {
		f.Fatal(err)
	}
	w := &askedWorker{}
	source := sglangSource(m, w)
	f.Fuzz(func(t *testing.T, raw []byte) {
		body, ok := jsonbody.Parse(raw)
		if !ok {
			return
		}
		w.asked = nil
		list := append(source.GenerateBody(t.Context(), body), source.CompletionBody(t.Context(), body)...)
		list = append(list, source.ChatBody(t.Context(), body), source.Other(t.Context(), "/v1/messages", raw), source.Other(t.Context(), "/v1/responses", raw))
		for _, p := range list {
			if p.Exact < 0 || p.Exact > len(p.Tokens) || (p.Source == SourceNone) != (p.Tokens == nil) && len(p.Tokens) > 0 {
				t.Fatalf("%+v", p)
			}
		}
		for _, asked := range w.asked {
			if _, request, _ := strings.Cut(asked, " "); !strings.HasPrefix(request, "{") {
				t.Fatalf("a worker was asked %s", asked)
			}
		}
		if kept := source.KeepApart("/generate", body); len(kept.Raw) > len(raw)+200 {
			t.Fatalf("%d bytes of %d", len(kept.Raw), len(raw))
		}
	})
}
