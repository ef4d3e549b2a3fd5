package tokens

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/chat"
)

// askedWorker answers as a vLLM worker would.
type askedWorker struct {
	renders bool // it was started with --enable-scale-out
	answer  map[string]string
	fail    error
	hang    bool

	mu    sync.Mutex // guards asked
	asked []string   // "path body"
}

func (w *askedWorker) ask(ctx context.Context, path string, body []byte) ([]byte, error) {
	w.mu.Lock()
	w.asked = append(w.asked, path+" "+string(body))
	w.mu.Unlock()
	switch {
	case w.hang:
		<-ctx.Done()
		return nil, ctx.Err()
	case w.fail != nil:
		return nil, w.fail
	case strings.HasSuffix(path, "/render") && !w.renders: // as vLLM 0.32; older ones answer 404
		return nil, &AskError{403, []byte(`{"error":{"message":"Scale-out endpoints are disabled.","type":"PermissionDeniedError","code":403}}`)}
	}
	answer, ok := w.answer[path]
	if !ok {
		return nil, &AskError{400, []byte(`{"error":{"message":"no"}}`)}
	}
	return []byte(answer), nil
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

const (
	textChat  = `{"messages":[{"role":"user","content":"hi"}]}`
	imageChat = `{"model":"m","stream":true,"messages":[{"role":"user","content":[{"type":"text","text":"hi"},{"type":"image_url","image_url":{"url":"u"}}]}],"max_tokens":3}`
)

func TestChatComesFromHereFirst(t *testing.T) {
	w := &askedWorker{renders: true}
	tokens := NewSource(wordModel(t, chat.Options{}), w.ask, time.Second, quiet())
	p := tokens.Chat(context.Background(), []byte(textChat))
	if p.Source != SourceLocal || !slices.Equal(p.Tokens, []uint32{4, 2, 5}) || p.Exact != 3 || p.Shape != "chat" || len(w.asked) != 0 {
		t.Errorf("%+v, asked %v", p, w.asked)
	}
	if s := tokens.Stats(); s.Local != 1 || s.WorkerRender+s.WorkerTokenize+s.None != 0 || len(s.Reasons) != 0 {
		t.Errorf("%+v", s)
	}
}

func TestChatWithMediaIsRenderedByAWorker(t *testing.T) {
	w := &askedWorker{renders: true, answer: map[string]string{"/v1/chat/completions/render": `{"token_ids":[4,2,9,9,5],"features":{"mm_placeholders":{"image":[{"offset":2,"length":2}]}}}`}}
	tokens := NewSource(wordModel(t, chat.Options{}), w.ask, time.Second, quiet())
	p := tokens.Chat(context.Background(), []byte(imageChat))
	if p.Source != SourceWorker || !slices.Equal(p.Tokens, []uint32{4, 2, 9, 9, 5}) || p.Exact != 2 || p.Shape != "chat+parts" {
		t.Errorf("%+v", p)
	}
	if want := `/v1/chat/completions/render {"mm_payload":"none",` + imageChat[1:]; w.asked[0] != want {
		t.Errorf("the worker must get the same bytes and be asked for no tensors, got %s", w.asked[0])
	}
	if s := tokens.Stats(); s.WorkerRender != 1 || s.Reasons[reasonNotRenderable] != 1 {
		t.Errorf("%+v", s)
	}
}

func TestChatFallsBackToTokenize(t *testing.T) {
	w := &askedWorker{answer: map[string]string{"/tokenize": `{"count":2,"max_model_len":777,"tokens":[4,5]}`}}
	tokens := NewSource(nil, w.ask, time.Second, quiet())
	body := `{"model":"m","messages":[{"role":"user","content":"q"},{"role":"assistant","content":"x","reasoning_content":"r"}],"temperature":0,"tools":[{"a":1}],"documents":[{"t":"x"}],"reasoning_effort":"low","chat_template_kwargs":{"k":1}}`
	for range 2 {
		if p := tokens.Chat(context.Background(), []byte(body)); p.Source != SourceWorker || !slices.Equal(p.Tokens, []uint32{4, 5}) {
			t.Errorf("%+v", p)
		}
	}
	want := `/tokenize {"model":"m","messages":[{"role":"user","content":"q"},{"role":"assistant","content":"x","reasoning":"r"}],"tools":[{"a":1}],"chat_template_kwargs":{"k":1,"documents":[{"t":"x"}],"reasoning_effort":"low","enable_thinking":true}}`
	if len(w.asked) != 3 || w.asked[1] != want || w.asked[2] != want {
		t.Errorf("the missing render route should be remembered, and the request converted:\n got %s\nwant %s", strings.Join(w.asked, "\n"), want)
	}
	if p := tokens.Chat(context.Background(), []byte(`{"messages":[],"truncate_prompt_tokens":3}`)); p.Source != SourceNone {
		t.Errorf("/tokenize does not truncate: %+v", p)
	}
}

func TestChatWithoutAnyAnswer(t *testing.T) {
	for name, w := range map[string]*askedWorker{
		"refused":   {renders: true},
		"unrefused": {fail: errors.New("no worker")},
		"nonsense":  {renders: true, answer: map[string]string{"/v1/chat/completions/render": `{"token_ids":"x"}`}},
	} {
		tokens := NewSource(nil, w.ask, time.Second, quiet())
		if p := tokens.Chat(context.Background(), []byte(textChat)); p.Source != SourceNone || p.Tokens != nil {
			t.Errorf("%s: %+v", name, p)
		}
		if s := tokens.Stats(); s.None != 1 || s.Reasons[reasonNoFiles] != 1 {
			t.Errorf("%s: %+v", name, s)
		}
	}
}

func TestAskingEndsWithTheLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &askedWorker{hang: true}
		tokens := NewSource(nil, w.ask, 2*time.Second, quiet())
		start := time.Now()
		tokens.Chat(context.Background(), []byte(textChat))
		tokens.Completion(context.Background(), []byte(`{"prompt":"x"}`))
		tokens.Other(context.Background(), "/v1/responses", []byte(`{}`))
		if took := time.Since(start); took != 6*time.Second {
			t.Errorf("three prompts took %v, not 2 s each", took)
		}
	})
}

func TestCompletionPrompts(t *testing.T) {
	w := &askedWorker{renders: true, answer: map[string]string{"/v1/completions/render": `[{"token_ids":[1,2]},{"token_ids":[3]}]`}}
	local := NewSource(wordModel(t, chat.Options{}), w.ask, time.Second, quiet())
	if p := local.Completion(context.Background(), []byte(`{"prompt":["hi",[5,6]]}`)); len(p) != 2 || p[0].Source != SourceLocal || !slices.Equal(p[1].Tokens, []uint32{5, 6}) {
		t.Errorf("%+v", p)
	}
	if p := local.Completion(context.Background(), []byte(`{"prompt":"hi","suffix":"x"}`)); len(p) != 2 || p[1].Source != SourceWorker || p[1].Exact != 1 {
		t.Errorf("%+v", p)
	}
	plain := &askedWorker{answer: map[string]string{"/tokenize": `{"tokens":[7]}`}}
	asked := NewSource(nil, plain.ask, time.Second, quiet())
	if p := asked.Completion(context.Background(), []byte(`{"model":"m","prompt":["hi",[5,6]]}`)); len(p) != 2 || p[0].Tokens[0] != 7 || p[1].Tokens[1] != 6 {
		t.Errorf("%+v", p)
	}
	if p := asked.Completion(context.Background(), []byte(`{"prompt":3}`)); len(p) != 1 || p[0].Source != SourceNone {
		t.Errorf("%+v", p)
	}
}

// probeWorker renders with a model of its own, as a worker would.
func probeWorker(m *Model, changed func(path string, body []byte, tokens []uint32) []uint32) Asker {
	return func(_ context.Context, path string, body []byte) ([]byte, error) {
		switch path {
		case "/v1/chat/completions/render":
			tokens, err := m.ChatTokens(body)
			if err != nil {
				return nil, &AskError{400, []byte(err.Error())}
			}
			return fmt.Appendf(nil, `{"token_ids":%s}`, AppendTokens(nil, changed(path, body, tokens))), nil
		case "/v1/completions/render":
			lists, err := m.CompletionTokens(body)
			if err != nil {
				return nil, &AskError{400, []byte(err.Error())}
			}
			return fmt.Appendf(nil, `[{"token_ids":%s}]`, AppendTokens(nil, changed(path, body, lists[0]))), nil
		}
		return nil, &AskError{404, []byte(`{"detail":"Not Found"}`)}
	}
}

func TestProbe(t *testing.T) {
	const toolsChat = `{"messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"n"}}]}`
	for _, test := range []struct {
		name     string
		differs  func(path string, body []byte) bool
		disabled []string
		chat     string // where a plain chat's tokens come from
		tools    string
	}{
		{"all equal", func(string, []byte) bool { return false }, nil, SourceLocal, SourceLocal},
		{"tools differ", func(_ string, b []byte) bool { return gjson.GetBytes(b, "tools").Exists() }, []string{"tools"}, SourceLocal, SourceWorker},
		{"everything differs", func(string, []byte) bool { return true }, []string{"chat", "completion", "continue", "parts", "tool_calls", "tools"}, SourceWorker, SourceWorker},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := wordModel(t, chat.Options{})
			ask := probeWorker(m, func(path string, body []byte, tokens []uint32) []uint32 {
				if test.differs(path, body) {
					return append(slices.Clone(tokens), 8)
				}
				return tokens
			})
			var logged bytes.Buffer
			tokens := NewSource(m, ask, time.Second, slog.New(slog.NewTextHandler(&logged, nil)))
			for range 2 {
				if err := tokens.Probe(context.Background()); err != nil {
					t.Fatal(err)
				}
			}
			if got := tokens.Stats().Disabled; !slices.Equal(got, test.disabled) {
				t.Errorf("disabled %v, want %v", got, test.disabled)
			}
			if n := strings.Count(logged.String(), "\n"); n != len(test.disabled) {
				t.Errorf("%d log lines, want one a feature:\n%s", n, &logged)
			}
			if p := tokens.Chat(context.Background(), []byte(textChat)); p.Source != test.chat {
				t.Errorf("a chat comes from %s", p.Source)
			}
			if p := tokens.Chat(context.Background(), []byte(toolsChat)); p.Source != test.tools {
				t.Errorf("a chat with tools comes from %s", p.Source)
			}
		})
	}
}

func TestProbeWithoutWorker(t *testing.T) {
	w := &askedWorker{fail: errors.New("connection refused")}
	if err := NewSource(wordModel(t, chat.Options{}), w.ask, time.Second, quiet()).Probe(context.Background()); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Error(err)
	}
	w = &askedWorker{renders: true} // it refuses every probe
	if err := NewSource(wordModel(t, chat.Options{}), w.ask, time.Second, quiet()).Probe(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestProbesAreEightChatsOfValidJSON(t *testing.T) {
	if len(probes) != 8 {
		t.Errorf("%d probes", len(probes))
	}
	for _, p := range probes {
		if !json.Valid([]byte(p.body)) {
			t.Errorf("not JSON: %s", p.body)
		}
		if p.path != "/v1/completions" && p.features != nil && !slices.Contains(chat.Features(parsed(t, p.body)), p.features[0]) {
			t.Errorf("%s is not of shape %v", p.body, p.features)
		}
	}
}

func TestTokenizeThroughWorker(t *testing.T) {
	w := &askedWorker{answer: map[string]string{"/tokenize": `{"count":9}`, "/detokenize": `{"prompt":"x"}`}}
	ctx := context.Background()
	local := NewSource(wordModel(t, chat.Options{}), w.ask, time.Second, quiet())
	if got, err := local.Tokenize(ctx, []byte(textChat)); err != nil || gjson.GetBytes(got, "count").Int() != 3 {
		t.Errorf("%s, %v", got, err)
	}
	if got, err := local.Tokenize(ctx, []byte(imageChat)); err != nil || string(got) != `{"count":9}` {
		t.Errorf("an image must be left to the worker: %s, %v", got, err)
	}
	none := NewSource(nil, w.ask, time.Second, quiet())
	if got, err := none.Detokenize(ctx, []byte(`{"tokens":[1]}`)); err != nil || string(got) != `{"prompt":"x"}` {
		t.Errorf("%s, %v", got, err)
	}
	var bad *BadRequest
	if _, err := none.Tokenize(ctx, []byte(`{`)); !errors.As(err, &bad) {
		t.Error(err)
	}
	if _, err := local.Tokenize(ctx, []byte(`{}`)); !errors.As(err, &bad) {
		t.Error(err)
	}
	var refusal *AskError
	if _, err := NewSource(nil, (&askedWorker{}).ask, time.Second, quiet()).Tokenize(ctx, []byte(textChat)); !errors.As(err, &refusal) || refusal.Status != 400 {
		t.Error(err)
	}
}

func TestMismatchIsLoggedOnceAShape(t *testing.T) {
	var logged bytes.Buffer
	tokens := NewSource(nil, (&askedWorker{}).ask, time.Second, slog.New(slog.NewTextHandler(&logged, nil)))
	for range 3 {
		tokens.PromptMismatch("chat", 10, 11)
		tokens.PromptMismatch("chat+tools", 10, 12)
	}
	if n := strings.Count(logged.String(), "\n"); n != 2 || tokens.Stats().Mismatches["chat"] != 3 {
		t.Errorf("%d lines, %+v", n, tokens.Stats())
	}
}

// Completion returns the prompts of a /v1/completions request, at least one.
func (t *Source) Completion(ctx context.Context, body []byte) []Prompt {
	parsed, ok := jsonbody.Parse(body)
	if !ok {
		parsed = &jsonbody.Body{Raw: body}
	}
	return t.CompletionBody(ctx, parsed)
}
