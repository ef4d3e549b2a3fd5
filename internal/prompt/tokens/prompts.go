// Package tokens computes the prompt tokens of requests with the model's tokenizer and
// chat template, or requests them from a worker.
package tokens

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/prompt/chat"
)

// Sources of a prompt's tokens.
const (
	SourceLocal  = "local"  // computed here
	SourceWorker = "worker" // returned by a worker
	SourceText   = "text"   // unknown: its text stands for them, for workers whose caches are known approximately
	SourceNone   = "none"   // unknown: the request is routed by load alone
)

// Prompt is one prompt's tokens.
type Prompt struct {
	Tokens []uint32
	Source string // SourceLocal, SourceWorker or SourceNone
	// Exact is the number of leading tokens that fully determine their part of the
	// prompt and may be matched against a worker's cache. The tokens after them are
	// placeholders of media that are not in Media, or must be recomputed by the
	// engine. It is len(Tokens) for plain text.
	Exact int
	// Media are the items among the first Exact tokens, in their order.
	Media []kv.Media
	// Shape names the features of the request that shape its prompt, such as
	// "chat+tools"; PromptMismatch counts by it.
	Shape string
}

// Asker posts a request to a healthy worker and returns its answer. An answer other than
// 2xx is an *AskError.
type Asker func(ctx context.Context, path string, body []byte) (answer []byte, err error)

// AskError is a worker's answer with another status than 2xx.
type AskError struct {
	Status int
	Answer []byte
}

// Error names the status and at most 200 bytes of the answer.
func (e *AskError) Error() string {
	answer := e.Answer
	if len(answer) > 200 {
		answer = answer[:200]
	}
	return fmt.Sprintf("the worker answered %d: %s", e.Status, answer)
}

// Reasons why a prompt's tokens were not computed here.
const (
	reasonNoFiles       = "no model files"
	reasonNotRenderable = "not renderable"
	reasonLimit         = "template limit"
	reasonParity        = "parity"
	reasonOtherAPI      = "other api"
	reasonTooLong       = "too long"     // for the model: workers are not asked
	reasonNoTurn        = "encoder busy" // for longer than a worker may be asked
)

// askedTexts bounds the texts of one request that a worker tokenizes, one after
// the other.
const askedTexts = 64

// renderRetry is the time that a worker's lack of the render routes is remembered.
const renderRetry = time.Minute

// Source returns the prompt tokens of requests: computed locally if possible, else
// requested from a worker within a time limit. It is safe for concurrent use.
type Source struct {
	model   *Model
	ask     Asker
	timeout time.Duration
	log     *slog.Logger
	now     func() time.Time

	local, rendered, tokenized, none atomic.Uint64
	noRenderUntil                    atomic.Int64 // unix nanoseconds
	sglang, someSGLang               atomic.Bool  // most, or some, workers run SGLang
	counted                          atomic.Bool  // the workers were counted for that

	mu         sync.Mutex // guards the maps below
	reasons    map[string]uint64
	disabled   map[string]bool // features whose prompts differ from most workers'
	mismatches map[string]uint64
	verdicts   map[uint64]verdict // of the comparison with each worker
}

// Stats counts prompts by the source of their tokens.
type Stats struct {
	Local          uint64            // computed here
	WorkerRender   uint64            // from a worker's render routes
	WorkerTokenize uint64            // from a worker's /tokenize
	None           uint64            // not found
	Reasons        map[string]uint64 // prompts not computed here, by reason
	Disabled       []string          // features that always go to a worker
	Mismatches     map[string]uint64 // prompts whose length differs from the engine's report, by shape
}

// NewSource returns a Source. With model nil every prompt comes from a worker. timeout
// limits the time to ask a worker, and the wait for the local encoder.
func NewSource(model *Model, ask Asker, timeout time.Duration, log *slog.Logger) *Source {
	return &Source{
		model: model, ask: ask, timeout: timeout, log: log, now: time.Now,
		reasons: map[string]uint64{}, disabled: map[string]bool{}, mismatches: map[string]uint64{}, verdicts: map[uint64]verdict{},
	}
}

// Local reports whether prompts can be computed locally.
func (t *Source) Local() bool { return t != nil && t.model != nil }

// here computes the prompts of a request with these features here. Not ok: they are not
// known, and ask is whether a worker may be asked for them.
func (t *Source) here(ctx context.Context, features []string, compute func(bounds) ([][]uint32, error)) (lists [][]uint32, ok, ask bool) {
	reason, ask := t.whyNot(features), true
	if reason == "" {
		lists, err := compute(t.model.bounds(ctx, t.timeout))
		if err == nil {
			t.local.Add(1)
			return lists, true, false
		}
		reason, ask = fallback(err)
		t.log.Debug("cannot render a prompt locally", "why", err)
	}
	t.countReason(reason)
	return nil, false, ask
}

// ChatBody returns the prompt of the body of a /v1/chat/completions request.
func (t *Source) ChatBody(ctx context.Context, parsed *jsonbody.Body) Prompt {
	body, sglang := parsed.Raw, t.SGLang()
	features := chat.Features(parsed)
	if sglang {
		features = chat.SGLangFeatures(parsed)
	}
	shape := strings.Join(features, "+")
	lists, ok, ask := t.here(ctx, features, func(b bounds) ([][]uint32, error) {
		tokens, err := t.model.engineChatTokens(sglang, b, parsed)
		return [][]uint32{tokens}, err
	})
	switch {
	case ok:
		return prompts(lists, SourceLocal, shape)[0]
	case !ask:
		return t.unknown(shape)
	}
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	answer, err := t.askRender(ctx, sglang, "/v1/chat/completions/render", body)
	if err == nil {
		if p, ok := readRendered(gjson.ParseBytes(answer), shape); ok {
			t.rendered.Add(1)
			return p
		}
	}
	if errors.Is(err, errNoRender) {
		if request, ok := t.asTokenize(sglang, body); ok {
			if tokens, err := t.askTokenize(ctx, t.ask, request); err == nil {
				t.tokenized.Add(1)
				exact := len(tokens)
				if carriesMedia(body) { // /tokenize does not report their places
					exact = 0
				}
				return Prompt{Tokens: tokens, Source: SourceWorker, Exact: exact, Shape: shape}
			}
		}
	}
	return t.unknown(shape)
}

// CompletionBody returns the prompts of a /v1/completions request, at least one.
func (t *Source) CompletionBody(ctx context.Context, parsed *jsonbody.Body) []Prompt {
	body := parsed.Raw
	const shape = "completion"
	if t.SGLang() {
		out := t.sglangPrompts(ctx, parsed, "prompt", shape)
		if parsed.Get("echo").Bool() && parsed.Get("logprobs").Num != 0 {
			computeFrom(out, 0)
		}
		return out
	}
	lists, ok, ask := t.here(ctx, []string{shape}, func(b bounds) ([][]uint32, error) { return t.model.boundedCompletionTokens(b, parsed) })
	switch {
	case ok:
		return prompts(lists, SourceLocal, shape)
	case !ask:
		return t.unknownPrompts(parsed.Get("prompt"), shape)
	}
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	answer, err := t.askRender(ctx, false, "/v1/completions/render", body)
	if err == nil {
		if out := readRenderedList(answer, shape); len(out) > 0 {
			t.rendered.Add(1)
			return out
		}
	}
	if errors.Is(err, errNoRender) {
		if lists, ok := t.tokenizePrompts(ctx, gjson.ParseBytes(body)); ok {
			t.tokenized.Add(1)
			return prompts(lists, SourceWorker, shape)
		}
	}
	return t.unknownPrompts(parsed.Get("prompt"), shape)
}

// Longest returns the longest of a request's prompts: the worker that serves one
// serves them all.
func Longest(prompts []Prompt) (p Prompt) {
	for _, candidate := range prompts {
		if len(candidate.Tokens) > len(p.Tokens) || p.Source == "" {
			p = candidate
		}
	}
	return p
}

// Total returns the tokens of all prompts together, and whether some are not known or
// there are none.
func Total(prompts []Prompt) (tokens int, unknown bool) {
	unknown = len(prompts) == 0
	for _, p := range prompts {
		tokens, unknown = tokens+len(p.Tokens), unknown || p.Source == SourceNone
	}
	return tokens, unknown
}

// HasEmpty reports whether one of the prompts is known to have no token.
func HasEmpty(prompts []Prompt) bool {
	return slices.ContainsFunc(prompts, func(p Prompt) bool { return p.Source != SourceNone && len(p.Tokens) == 0 })
}

// unknownPrompts returns the prompts of a request of which nothing is known but
// whether there are several: two stand for them then.
func (t *Source) unknownPrompts(prompt gjson.Result, shape string) []Prompt {
	unknown := []Prompt{t.unknown(shape)}
	if severalPrompts(prompt) {
		if _, one := jsonbody.Elements(prompt, 1); !one {
			return append(unknown, unknown...)
		}
	}
	return unknown
}

// Other returns the prompt of a request of another API, such as /v1/responses or
// /v1/messages. vLLM renders it by its render routes only; SGLang converts both to
// chats, and so does this package if they are text.
func (t *Source) Other(ctx context.Context, path string, body []byte) Prompt {
	if t.SGLang() {
		return t.sglangOther(ctx, path, body)
	}
	t.countReason(reasonOtherAPI)
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	answer, err := t.askRender(ctx, false, path+"/render", body)
	if err == nil {
		if p, ok := readRendered(gjson.ParseBytes(answer), path); ok {
			t.rendered.Add(1)
			return p
		}
	}
	return t.unknown(path)
}

// Tokenize answers /tokenize in vLLM's format, or through a worker if the prompt
// cannot be rendered here or has another format. The error is a *BadRequest, an
// *AskError with the worker's refusal, or means that no worker answered.
func (t *Source) Tokenize(ctx context.Context, body []byte) ([]byte, error) {
	features := []string{"completion"}
	if gjson.GetBytes(body, "messages").Exists() {
		parsed, err := chat.ParseBody(body)
		if err != nil {
			parsed = &jsonbody.Body{Raw: body}
		}
		features = chat.Features(parsed)
	}
	if !t.SGLang() && t.whyNot(features) == "" {
		answer, err := t.model.boundedTokenize(t.model.bounds(ctx, t.timeout), body)
		if !errors.Is(err, chat.ErrNotRenderable) {
			return answer, err
		}
	}
	return t.forward(ctx, "/tokenize", body)
}

// Detokenize answers /detokenize as Tokenize does /tokenize.
func (t *Source) Detokenize(ctx context.Context, body []byte) ([]byte, error) {
	if t.model != nil && !t.SGLang() {
		answer, err := t.model.Detokenize(body)
		if !errors.Is(err, chat.ErrNotRenderable) {
			return answer, err
		}
	}
	return t.forward(ctx, "/detokenize", body)
}

// TextOf returns the text of tokens, including special ones: by the tokenizer's file, or without
// it by a worker.
func (t *Source) TextOf(ctx context.Context, ids []uint32) (string, error) {
	if t.model != nil {
		return t.model.decode(ids)
	}
	body := append(AppendTokens([]byte(`{"skip_special_tokens":false,"tokens":`), ids), '}')
	answer, err := t.forward(ctx, "/detokenize", body)
	if err != nil {
		return "", err
	}
	text := gjson.GetBytes(answer, "text") // SGLang's name for it
	if !text.Exists() {
		text = gjson.GetBytes(answer, "prompt") // vLLM's
	}
	if text.Type != gjson.String {
		return "", errors.New("the worker's answer has no text")
	}
	return text.Str, nil
}

func (t *Source) forward(ctx context.Context, path string, body []byte) ([]byte, error) {
	if !json.Valid(body) {
		return nil, &BadRequest{"the body is not valid JSON"}
	}
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	return t.ask(ctx, path, body)
}

// PromptMismatch records that an engine reported another number of prompt tokens
// than Prompt had; the first of each shape is logged.
func (t *Source) PromptMismatch(shape string, own, reported int) {
	t.mu.Lock()
	t.mismatches[shape]++
	first := t.mismatches[shape] == 1
	t.mu.Unlock()
	if first {
		t.log.Warn("the engine reported a different number of prompt tokens; prefix matches of such requests may be missed",
			"shape", shape, "router", own, "engine", reported)
	}
}

// Stats returns the counters so far.
func (t *Source) Stats() Stats {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Stats{
		Local: t.local.Load(), WorkerRender: t.rendered.Load(), WorkerTokenize: t.tokenized.Load(), None: t.none.Load(),
		Reasons: maps.Clone(t.reasons), Disabled: slices.Sorted(maps.Keys(t.disabled)), Mismatches: maps.Clone(t.mismatches),
	}
}

// whyNot returns the reason why a request with these features is not rendered locally;
// empty if it is.
func (t *Source) whyNot(features []string) string {
	if t.model == nil {
		return reasonNoFiles
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range features {
		if t.disabled[f] {
			return reasonParity
		}
	}
	return ""
}

func (t *Source) countReason(reason string) {
	t.mu.Lock()
	t.reasons[reason]++
	first := t.reasons[reason] == 1
	t.mu.Unlock()
	if first && reason == reasonLimit {
		t.log.Warn("the chat template took too much time or memory for a chat: workers render such chats, and for ten times as long those " +
			"that are as large")
	}
}

func (t *Source) unknown(shape string) Prompt {
	t.none.Add(1)
	return Prompt{Source: SourceNone, Shape: shape}
}

// errNoRender means that the workers have no render routes.
var errNoRender = errors.New("the workers have no render routes (--enable-scale-out is not set)")

// askRender posts to a render route. A missing route is remembered for a while;
// SGLang has none.
func (t *Source) askRender(ctx context.Context, sglang bool, path string, body []byte) ([]byte, error) {
	if sglang || t.now().UnixNano() < t.noRenderUntil.Load() {
		return nil, errNoRender
	}
	answer, err := render(ctx, t.ask, path, withoutTensors(body))
	if errors.Is(err, errNoRender) {
		t.noRenderUntil.Store(t.now().Add(renderRetry).UnixNano())
	}
	return answer, err
}

// render posts to a render route; errNoRender means that the worker has none.
func render(ctx context.Context, ask Asker, path string, body []byte) ([]byte, error) {
	answer, err := ask(ctx, path, body)
	var refusal *AskError
	// An unknown model is a 404 too, but with an error object. vLLM 0.32 has the route and forbids it without --enable-scale-out.
	if errors.As(err, &refusal) && (refusal.Status == 403 || refusal.Status == 404 && !gjson.GetBytes(refusal.Answer, "error").Exists()) {
		return nil, errNoRender
	}
	return answer, err
}

func (t *Source) askTokenize(ctx context.Context, ask Asker, request []byte) ([]uint32, error) {
	answer, err := ask(ctx, "/tokenize", request)
	if err != nil {
		return nil, err
	}
	return readTokens(gjson.GetBytes(answer, "tokens"), maxAnswered)
}

// tokenizePrompts asks /tokenize for each text among a completion's prompts.
func (t *Source) tokenizePrompts(ctx context.Context, request gjson.Result) ([][]uint32, bool) {
	for _, key := range []string{"suffix", "prompt_embeds", "truncate_prompt_tokens"} {
		if request.Get(key).Type != gjson.Null {
			return nil, false
		}
	}
	prompt := request.Get("prompt")
	list := []gjson.Result{prompt}
	if severalPrompts(prompt) {
		var few bool
		if list, few = jsonbody.Elements(prompt, askedTexts); !few {
			return nil, false
		}
	}
	var out [][]uint32
	for _, p := range list {
		if p.IsArray() {
			tokens, err := readTokens(p, unknownModelLen)
			if err != nil {
				return nil, false
			}
			out = append(out, tokens)
			continue
		}
		fields := []jsonbody.Field{{Key: "prompt", Raw: p.Raw}}
		for _, key := range []string{"model", "add_special_tokens"} {
			if v := request.Get(key); v.Exists() {
				fields = append(fields, jsonbody.Field{Key: key, Raw: v.Raw})
			}
		}
		tokens, err := t.askTokenize(ctx, t.ask, jsonbody.AppendObject(nil, fields))
		if p.Type != gjson.String || err != nil {
			return nil, false
		}
		out = append(out, tokens)
	}
	return out, len(out) > 0
}

// asTokenize turns a chat request into one for /tokenize that gives the same
// prompt; ok is false where that route cannot.
func (t *Source) asTokenize(sglang bool, body []byte) (request []byte, ok bool) {
	if sglang {
		return sglangTokenize(body)
	}
	if !json.Valid(body) || t.model != nil && t.model.files.Harmony {
		return nil, false
	}
	top := gjson.ParseBytes(body)
	kwargs := map[string]gjson.Result{}
	for _, f := range jsonbody.Members(top.Get("chat_template_kwargs")) {
		kwargs[f.Key] = f.Value
	}
	var fields, extra []jsonbody.Field
	for _, f := range jsonbody.Members(top) {
		switch f.Key {
		case "model", "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template",
			"media_io_kwargs", "mm_processor_kwargs", "tools":
			fields = append(fields, jsonbody.Field{Key: f.Key, Raw: f.Value.Raw})
		case "messages":
			fields = append(fields, jsonbody.Field{Key: f.Key, Raw: renameReasoning(f.Value)})
		case "documents", "reasoning_effort":
			if f.Value.Type == gjson.Null {
				continue
			}
			extra = append(extra, jsonbody.Field{Key: f.Key, Raw: f.Value.Raw})
			if f.Key == "reasoning_effort" && !kwargs["enable_thinking"].Exists() {
				extra = append(extra, jsonbody.Field{Key: "enable_thinking", Raw: strconv.FormatBool(f.Value.Str != "none")})
			}
		case "truncate_prompt_tokens":
			if f.Value.Type != gjson.Null {
				return nil, false
			}
		case "kv_transfer_params":
			if f.Value.Get("prompt_token_ids").Exists() {
				return nil, false
			}
		}
	}
	var base []jsonbody.Field
	for _, f := range jsonbody.Members(top.Get("chat_template_kwargs")) {
		base = append(base, jsonbody.Field{Key: f.Key, Raw: f.Value.Raw})
	}
	if merged := jsonbody.MergeFields(base, extra); len(merged) > 0 {
		fields = append(fields, jsonbody.Field{Key: "chat_template_kwargs", Raw: string(jsonbody.AppendObject(nil, merged))})
	}
	return jsonbody.AppendObject(nil, fields), true
}

// renameReasoning gives the old field reasoning_content its new name, which
// /tokenize, unlike /v1/chat/completions, does not do by itself.
func renameReasoning(messages gjson.Result) string {
	if !strings.Contains(messages.Raw, "reasoning_content") {
		return messages.Raw
	}
	var out bytes.Buffer
	messages.ForEach(func(_, m gjson.Result) bool {
		if out.Len() > 0 {
			out.WriteByte(',')
		}
		old := m.Get("reasoning_content")
		if !m.IsObject() || old.Type == gjson.Null || m.Get("reasoning").Type != gjson.Null {
			out.WriteString(m.Raw)
			return true
		}
		var fields []jsonbody.Field
		for _, f := range jsonbody.Members(m) {
			if f.Key != "reasoning" && f.Key != "reasoning_content" {
				fields = append(fields, jsonbody.Field{Key: f.Key, Raw: f.Value.Raw})
			}
		}
		out.Write(jsonbody.AppendObject(nil, append(fields, jsonbody.Field{Key: "reasoning", Raw: old.Raw})))
		return true
	})
	return "[" + out.String() + "]"
}

// maxAnswered bounds the tokens that a worker may return for a prompt.
const maxAnswered = 1 << 21

// readRendered reads a render route's answer.
func readRendered(answer gjson.Result, shape string) (Prompt, bool) {
	tokens, err := readTokens(answer.Get("token_ids"), maxAnswered)
	if err != nil || len(tokens) == 0 {
		return Prompt{}, false
	}
	media, exact := readFeatures(answer.Get("features"), len(tokens))
	return Prompt{Tokens: tokens, Source: SourceWorker, Exact: exact, Media: media, Shape: shape}, true
}

// readRenderedList reads a render route's answer about several prompts, at most
// maxAnswered tokens of all together.
func readRenderedList(answer []byte, shape string) (out []Prompt) {
	total := 0
	gjson.ParseBytes(answer).ForEach(func(_, item gjson.Result) bool {
		if p, ok := readRendered(item, shape); ok {
			out = append(out, p)
			total += len(p.Tokens)
		}
		return total <= maxAnswered
	})
	return out
}

func prompts(lists [][]uint32, source, shape string) []Prompt {
	out := make([]Prompt, len(lists))
	for i, tokens := range lists {
		out[i] = Prompt{Tokens: tokens, Source: source, Exact: len(tokens), Shape: shape}
	}
	return out
}
