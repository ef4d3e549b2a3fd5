package vllm

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/tokenstest"
	"kvrouter/test"
)

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
// serves the test model.
func compareWithWorker(t *testing.T, m *tokens.Model, url string) {
	ctx, ask := context.Background(), workerAsker(url)
	equal := 0
	for _, body := range test.ParityChats() {
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
	t.Logf("/tokenize: %d of %d chats equal", equal, len(test.ParityChats()))
	if equal < 40 {
		t.Errorf("only %d chats were compared equal, at least 40 are wanted", equal)
	}

	equal = 0
	for _, body := range test.ParityChats() {
		answer, err := ask(ctx, "/v1/chat/completions/render", body)
		if err != nil {
			t.Logf("the worker refuses to render %.80s: %v", body, err)
			continue
		}
		want, err := tokens.ReadTokens(gjson.GetBytes(answer, "token_ids"))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := tokenstest.Chat(m, body); err != nil || !slices.Equal(got, want) {
			t.Errorf("the prompt differs (%v) for %s\n got %q\nwant %q", err, body, m.Decode(got), m.Decode(want))
			continue
		}
		equal++
	}
	t.Logf("/v1/chat/completions/render: %d of %d chats equal", equal, len(test.ParityChats()))

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
		got, err := m.CompletionBodyTokens(tokenstest.Body([]byte(body)))
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
	for _, body := range test.ParityChats() {
		want := ids.ChatBody(ctx, tokenstest.Body(body))
		if _, err := ask(ctx, "/v1/chat/completions/render", body); err != nil {
			continue
		}
		for name, other := range map[string]*tokens.Source{"render": asked, "tokenize": tokenized} {
			if got := other.ChatBody(ctx, tokenstest.Body(body)); want.Source != tokens.SourceLocal || got.Source != tokens.SourceWorker || !slices.Equal(got.Tokens, want.Tokens) {
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

// compareWithMock holds a mock worker's answers against those of a real worker
// of the test model, whose context is longest: the same refusals, and answers of the
// same fields.
func compareWithMock(t *testing.T, worker string) {
	mock := test.StartWorkers(t, 1, "--model="+test.ModelFolder(), fmt.Sprintf("--mock=num-gpu-blocks=%d", longest/64), "--speedup-ratio=1")
	for _, url := range []string{worker, mock.URL(0)} {
		testkit.CheckRefusals(t, url, filepath.Base(test.ModelFolder()), longest)
	}
	const six = `"max_tokens":6,"min_tokens":6,"temperature":1`
	const streamed = `,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`
	for _, options := range []string{"", streamed, `,"n":2`, `,"n":2` + streamed, `,"return_token_ids":true`, `,"return_token_ids":true,"stream":true`, `,"ignore_eos":true`} {
		for path, prompt := range map[string]string{testkit.ChatPath: `"messages":[{"role":"user","content":"Hi"}]`, "/v1/completions": `"prompt":["Once upon","The dog"]`} {
			body := `{` + prompt + `,` + six + options + `}`
			status, real := test.Post(t, worker+path, body)
			_, own := test.Post(t, mock.URL(0)+path, body)
			if got, want := answerShapes(own), answerShapes(real); status != 200 || !slices.Equal(got, want) {
				t.Errorf("%s %s: %d\nmock: %s\nvLLM: %s", path, body, status, strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		}
	}
	for _, path := range []string{"/v1/models", "/kv_event_sources", "/load", "/version"} {
		_, real := testkit.HTTPGet(t, worker+path)
		_, own := testkit.HTTPGet(t, mock.URL(0)+path)
		if got, want := fieldNames(own), fieldNames(real); got != want {
			t.Errorf("%s\nmock: %s\nvLLM: %s", path, got, want)
		}
	}
}

// answerShapes returns the different shapes of an answer's events, or that of
// the whole, sorted.
func answerShapes(answer []byte) []string {
	shapes := map[string]bool{}
	for event := range strings.SplitSeq(strings.TrimSpace(string(answer)), "\n\n") {
		if data := strings.TrimPrefix(event, "data: "); data != "[DONE]" {
			shapes[shapeOf(gjson.Parse(data))] = true
		}
	}
	return slices.Sorted(maps.Keys(shapes))
}

// shapeOf returns a JSON value's fields in their order, with types for values.
func shapeOf(v gjson.Result) string {
	var parts []string
	switch {
	case v.IsObject():
		v.ForEach(func(key, value gjson.Result) bool {
			parts = append(parts, key.Str+" "+shapeOf(value))
			return true
		})
		return "{" + strings.Join(parts, ", ") + "}"
	case v.IsArray():
		for _, element := range v.Array() {
			parts = append(parts, shapeOf(element))
		}
		return "[" + strings.Join(slices.Compact(parts), ", ") + "]"
	}
	return v.Type.String()
}

// fieldNames returns the names of a JSON object's fields, and of those in it,
// sorted.
func fieldNames(text []byte) string {
	names := map[string]bool{}
	var visit func(v gjson.Result)
	visit = func(v gjson.Result) {
		v.ForEach(func(key, value gjson.Result) bool {
			if v.IsObject() {
				names[key.Str] = true
			}
			if value.IsObject() || value.IsArray() {
				visit(value)
			}
			return true
		})
	}
	visit(gjson.ParseBytes(text))
	return strings.Join(slices.Sorted(maps.Keys(names)), " ")
}
