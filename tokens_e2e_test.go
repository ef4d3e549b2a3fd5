package main

import (
	"bytes"
	"context"
	"io"
	"kvrouter/internal/jsonbody"
	"kvrouter/internal/settings"
	"kvrouter/internal/tokens"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// testModel opens the model that the workers of the end-to-end tests serve.
func testModel(t testing.TB) *tokens.Model {
	t.Helper()
	m, err := tokens.OpenModel(filepath.Join(settings.CacheDir(os.Getenv), "smollm2-135m-instruct"))
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
