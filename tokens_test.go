package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/encode"
	"kvrouter/internal/jsonbody"
	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
	"kvrouter/internal/router"
	"kvrouter/internal/settings"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/tokens"
)

// testModelFolder is the folder of the model that the workers of the end-to-end
// tests serve.
func testModelFolder() string {
	return filepath.Join(settings.CacheDir(os.Getenv), "smollm2-135m-instruct")
}

// testModel opens that model.
func testModel(t testing.TB) *tokens.Model {
	t.Helper()
	m, err := tokens.OpenModel(testModelFolder())
	if err != nil && testing.Short() {
		t.Skip("the test model is not set up: ", err)
	}
	if err != nil {
		t.Fatal("run make setup: ", err)
	}
	t.Cleanup(m.Close)
	return m
}

// workerAsker asks the worker at a URL.
func workerAsker(url string) tokens.Asker {
	return func(ctx context.Context, path string, body []byte) ([]byte, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+path, bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		answer, err := io.ReadAll(resp.Body)
		if err == nil && resp.StatusCode/100 != 2 {
			err = &tokens.AskError{Status: resp.StatusCode, Answer: answer}
		}
		return answer, err
	}
}

// compareWithWorker holds every way to prompt tokens against a real worker that
// serves testModel.
func compareWithWorker(t *testing.T, m *tokens.Model, url string) {
	ctx, ask := context.Background(), workerAsker(url)
	equal := 0
	for _, body := range parityChats() {
		want, err := ask(ctx, "/tokenize", body)
		if err != nil {
			t.Logf("the worker refuses %.80s: %v", body, err)
			continue
		}
		got, err := m.Tokenize(body)
		if err != nil {
			t.Errorf("refused here: %v: %s", err, body)
		} else if !sameJSON(got, want) {
			t.Errorf("/tokenize differs for %s\n got %s\nwant %s", body, got, want)
		} else {
			equal++
		}
	}
	t.Logf("/tokenize: %d of %d chats equal", equal, len(parityChats()))
	if equal < 40 {
		t.Errorf("only %d chats were compared equal, at least 40 are wanted", equal)
	}

	equal = 0
	for _, body := range parityChats() {
		answer, err := ask(ctx, "/v1/chat/completions/render", body)
		if err != nil {
			t.Logf("the worker refuses to render %.80s: %v", body, err)
			continue
		}
		want, err := tokens.ReadTokens(gjson.GetBytes(answer, "token_ids"))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := m.ChatTokens(body); err != nil || !slices.Equal(got, want) {
			t.Errorf("the prompt differs (%v) for %s\n got %q\nwant %q", err, body, m.Decode(got), m.Decode(want))
			continue
		}
		equal++
	}
	t.Logf("/v1/chat/completions/render: %d of %d chats equal", equal, len(parityChats()))

	for path, bodies := range map[string][]string{
		"/tokenize":   {`{"prompt":"naïve\n\n 日本語 🙂  x","return_token_strs":true}`, `{"prompt":"<|im_start|>a<|im_end|>","add_special_tokens":false}`, `{"prompt":""}`},
		"/detokenize": {`{"tokens":[1,2,3,28120,905,0]}`, `{"tokens":[]}`, `{"tokens":[10,245,200,13]}`},
	} {
		for _, body := range bodies {
			want, err := ask(ctx, path, []byte(body))
			if err != nil {
				t.Fatal(err)
			}
			answer := m.Tokenize
			if path == "/detokenize" {
				answer = m.Detokenize
			}
			if got, err := answer([]byte(body)); err != nil || !sameJSON(got, want) {
				t.Errorf("%s %s: %v\n got %s\nwant %s", path, body, err, got, want)
			}
		}
	}
	for _, body := range []string{`{"prompt":"Once upon"}`, `{"prompt":["a b","c"]}`, `{"prompt":[5,6,7]}`, `{"prompt":[[5,6],[7]]}`} {
		answer, err := ask(ctx, "/v1/completions/render", []byte(body))
		if err != nil {
			t.Fatal(err)
		}
		got, err := m.CompletionTokens([]byte(body))
		for i, item := range gjson.ParseBytes(answer).Array() {
			want, _ := tokens.ReadTokens(item.Get("token_ids"))
			if err != nil || !slices.Equal(got[i], want) {
				t.Errorf("prompt %d of %s: %v, %v, want %v", i, body, err, got, want)
			}
		}
	}

	ids := tokens.NewSource(m, ask, 10*time.Second, slog.New(slog.DiscardHandler))
	if err := ids.Probe(ctx); err != nil {
		t.Error(err)
	}
	if off := ids.Stats().Disabled; len(off) > 0 {
		t.Errorf("probes differ: %v", off)
	}
	asked := tokens.NewSource(nil, ask, 10*time.Second, slog.New(slog.DiscardHandler))
	tokenized := tokens.NewSource(nil, withoutRender(ask), 10*time.Second, slog.New(slog.DiscardHandler))
	for _, body := range parityChats() {
		want := ids.Chat(ctx, body)
		if _, err := ask(ctx, "/v1/chat/completions/render", body); err != nil {
			continue
		}
		for name, other := range map[string]*tokens.Source{"render": asked, "tokenize": tokenized} {
			if got := other.Chat(ctx, body); want.Source != tokens.SourceLocal || got.Source != tokens.SourceWorker || !slices.Equal(got.Tokens, want.Tokens) {
				t.Errorf("by the worker's %s: source %s, %q here %q", name, got.Source, m.Decode(got.Tokens), m.Decode(want.Tokens))
			}
		}
	}
	for path, body := range map[string]string{
		"/v1/responses": `{"input":"What is the capital of France?"}`,
		"/v1/messages":  `{"model":"` + servedModel(t, url) + `","max_tokens":5,"messages":[{"role":"user","content":"What is the capital of France?"}]}`,
	} {
		if p := asked.Other(ctx, path, []byte(body)); p.Source != tokens.SourceWorker || len(p.Tokens) != 37 {
			t.Errorf("%s: %+v", path, p)
		}
	}
	t.Logf("%+v", ids.Stats())
}

func servedModel(t *testing.T, url string) string {
	resp, err := http.Get(url + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, _ := io.ReadAll(resp.Body)
	return gjson.GetBytes(answer, "data.0.id").Str
}

// withoutRender makes a worker look as if it were started without its render
// routes.
func withoutRender(ask tokens.Asker) tokens.Asker {
	return func(ctx context.Context, path string, body []byte) ([]byte, error) {
		if path != "/tokenize" && path != "/detokenize" {
			return nil, &tokens.AskError{Status: 404, Answer: []byte(`{"detail":"Not Found"}`)}
		}
		return ask(ctx, path, body)
	}
}

func sameJSON(a, b []byte) bool {
	x, y := gjson.ParseBytes(a), gjson.ParseBytes(b)
	keys := map[string]bool{}
	for _, m := range append(jsonbody.Members(x), jsonbody.Members(y)...) {
		keys[m.Key] = true
	}
	for k := range keys {
		if x.Get(k).String() != y.Get(k).String() {
			return false
		}
	}
	return true
}

// parityChats are bodies for /tokenize: a router and a worker must answer each
// with the same tokens.
func parityChats() [][]byte {
	var out [][]byte
	for _, c := range testkit.ChatsForParity() {
		out = append(out, []byte(c.Body))
	}
	paragraph := strings.Repeat("The quick brown fox jumps over the lazy dog, 12345 times. Größe! ", 60)
	return append(out, []byte(`{"messages":[{"role":"system","content":"`+paragraph+`"},{"role":"user","content":"`+paragraph+`"}]}`))
}

// englishWords are the tokenizer's own words, which are common English ones, by
// falling frequency.
func englishWords(m *tokens.Model) []string {
	var words []string
	for _, name := range m.Vocabulary() {
		word, starts := strings.CutPrefix(name, "Ġ")
		if starts && len(word) > 1 && strings.Trim(word, "abcdefghijklmnopqrstuvwxyz") == "" {
			words = append(words, word)
		}
	}
	return words
}

// proseOf returns n words as prose has them: few are frequent, one in 25 is
// made up, and there are sentences and paragraphs.
func proseOf(r *rand.Rand, words []string, n int) string {
	var b strings.Builder
	for i := range n {
		switch {
		case i%90 == 89:
			b.WriteString(".\n\n")
		case i%12 == 11:
			b.WriteString(", ")
		case i > 0:
			b.WriteByte(' ')
		}
		x := r.Float64()
		word := words[int(x*x*x*float64(len(words)))]
		if r.IntN(25) == 0 {
			word = words[r.IntN(len(words))] + words[r.IntN(len(words))]
		}
		b.WriteString(word)
	}
	return b.String()
}

// chatBody is a streamed chat request with the given contents in turn.
func chatBody(contents ...string) []byte {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	messages := []message{{"system", "You are a helpful assistant."}}
	for i, c := range contents {
		messages = append(messages, message{[]string{"user", "assistant"}[i%2], c})
	}
	body, _ := json.Marshal(map[string]any{"model": "m", "messages": messages, "stream": true, "max_tokens": 32})
	return body
}

// BenchmarkDecision measures a whole routing decision over 8 workers: render,
// encode, hash, look up, schedule. Hot prompts have come before and their blocks
// are in the index; cold ones are new in every word order.
func BenchmarkDecision(b *testing.B) {
	m := testModel(b)
	m.SetMaxModelLen(1 << 17) // the test model's own limit is 8,192
	words := englishWords(m)
	r := rand.New(rand.NewPCG(5, 5))
	var turns []string
	for range 41 {
		turns = append(turns, proseOf(r, words, 2050))
	}
	for _, c := range []struct {
		name   string
		hot    bool
		bodies int
		body   func() []byte
	}{
		{"hot/1500-words", true, 64, func() []byte { return chatBody(proseOf(r, words, 1500)) }},
		{"cold/1500-words", false, 2000, func() []byte { return chatBody(proseOf(r, words, 1500)) }},
		{"hot/100k-tokens-one-message", true, 4, func() []byte { return chatBody(proseOf(r, words, 84_000)) }},
		{"hot/100k-tokens-41-turns", true, 1, func() []byte { return chatBody(turns...) }},
		{"hot/100k-tokens-41-turns-new-question", false, 64, func() []byte {
			return chatBody(append(turns[:40:40], proseOf(r, words, 60))...)
		}},
		{"cold/100k-tokens-one-message", false, 40, func() []byte { return chatBody(proseOf(r, words, 84_000)) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			index := radix.NewTree()
			rt := router.New(testkit.Defaults[router.Settings](), router.Deps{Index: index, Policy: policytest.MustPolicy(b, "standalone"), BlockSize: 64, Seed: 1})
			for w := range uint64(8) {
				rt.Up(kv.Target{Key: kv.WorkerKey{Worker: w}, URL: "http://w"})
			}
			ids := tokens.NewSource(m, nil, time.Second, slog.New(slog.DiscardHandler))
			m.CacheTokens(encode.DefaultCache)
			var bodies [][]byte
			for i := range c.bodies {
				body := c.body()
				bodies = append(bodies, body)
				if c.hot || i == 0 {
					p := ids.Chat(context.Background(), body)
					local := kv.HashBlocks(nil, p.Tokens, 64, "", "")
					if err := index.Store(kv.WorkerKey{Worker: uint64(i % 8)}, 0, false, testkit.Chain(local)); err != nil {
						b.Fatal(err)
					}
				}
			}
			if c.name == "cold/1500-words" || c.name == "cold/100k-tokens-one-message" {
				m.CacheTokens(0)
			}
			var total, overlap int
			i := 0
			cpu := testkit.CPUTime()
			b.ReportAllocs()
			for b.Loop() {
				p := ids.Chat(context.Background(), bodies[i%len(bodies)])
				d, err := rt.Route(context.Background(), router.Request{Tokens: p.Tokens[:p.Exact], NumTokens: len(p.Tokens)})
				if err != nil {
					b.Fatal(err)
				}
				d.Booking.End()
				total += d.Tokens
				overlap += d.OverlapTokens
				i++
			}
			b.ReportMetric(float64(testkit.CPUTime()-cpu)/float64(i), "cpu-ns/op")
			b.ReportMetric(float64(total)/float64(i), "tokens/op")
			b.ReportMetric(100*float64(overlap)/float64(total), "%overlap")
		})
	}
}
