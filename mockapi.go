package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/tidwall/gjson"
	"github.com/zeebo/xxh3"
)

const (
	// mockBodyLimit bounds a request's body, bytes.
	mockBodyLimit = 64 << 20
	// completionMaxTokens is vLLM's max_tokens of a completion that names none.
	completionMaxTokens = 16
	// mockVersion is the vLLM whose answers the mock workers imitate.
	mockVersion = "0.32.0+mock"
	// mockFingerprint is the system_fingerprint that ends every answer.
	mockFingerprint = "vllm-" + mockVersion
)

// mockAnswer is one request's answer. Its engine request belongs to the
// engine's goroutine.
type mockAnswer struct {
	request *SimRequest
	chat    bool
	id      string
	model   string
	created int64
	prompt  int      // tokens
	blocks  int      // tokens in the prompt's full blocks
	output  int      // tokens
	tokens  []uint32 // of the prompt and of the whole answer
	texts   []string // by token of the answer
	finish  string   // finish_reason
	salt    string
	options mockOptions

	cached    atomic.Int64 // prompt tokens found in the cache; valid with the first generated one
	generated atomic.Int64
	more      chan struct{} // holds a token when generated has grown
}

// mockOptions are the parts of a request that shape its answer.
type mockOptions struct {
	stream, usage, continuousUsage, tokenIDs bool
}

// advance tells the answer's handler of the tokens so far.
func (a *mockAnswer) advance(r *SimRequest) {
	a.cached.Store(int64(r.Cached))
	a.generated.Store(int64(r.Generated))
	signalOnce(a.more)
}

func (w *MockWorker) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /version", func(out http.ResponseWriter, _ *http.Request) {
		answerJSON(out, http.StatusOK, map[string]any{"version": mockVersion})
	})
	mux.HandleFunc("GET /v1/models", w.models)
	mux.HandleFunc("GET /load", w.serverLoad)
	mux.HandleFunc("GET /metrics", w.metrics)
	mux.HandleFunc("GET /kv_event_sources", w.eventSources)
	mux.HandleFunc("POST /reset_prefix_cache", w.reset)
	mux.HandleFunc("POST /tokenize", w.tokenizer(w.model.Tokenize))
	mux.HandleFunc("POST /detokenize", w.tokenizer(w.model.Detokenize))
	mux.HandleFunc("POST /v1/chat/completions", func(out http.ResponseWriter, in *http.Request) { w.infer(out, in, true) })
	mux.HandleFunc("POST /v1/completions", func(out http.ResponseWriter, in *http.Request) { w.infer(out, in, false) })
	mux.HandleFunc("POST /v1/chat/completions/render", func(out http.ResponseWriter, in *http.Request) { w.render(out, in, true) })
	mux.HandleFunc("POST /v1/completions/render", func(out http.ResponseWriter, in *http.Request) { w.render(out, in, false) })
	return http.HandlerFunc(func(out http.ResponseWriter, in *http.Request) {
		if !w.handlers.enter() {
			panic(http.ErrAbortHandler)
		}
		defer w.handlers.leave()
		if w.hung.Load() {
			_, _ = io.Copy(io.Discard, io.LimitReader(in.Body, mockBodyLimit)) // only then is a client that leaves noticed
			select {
			case <-in.Context().Done():
			case <-w.ctx.Done():
			}
			panic(http.ErrAbortHandler)
		}
		mux.ServeHTTP(out, in)
	})
}

// infer serves a chat or a completion.
func (w *MockWorker) infer(out http.ResponseWriter, in *http.Request, chat bool) {
	body, ok := w.body(out, in)
	if !ok {
		return
	}
	if w.chance(w.cfg.MockErrorRate) {
		mockError(out, http.StatusInternalServerError, "error asked for by --mock-error-rate")
		return
	}
	answer, problem, status := w.prepare(body, chat)
	if problem != "" {
		mockError(out, status, problem)
		return
	}
	answer.id = mockRequestID(in, chat)
	refused := make(chan error, 1)
	w.do(func(e *SimEngine) {
		if err := e.Submit(answer.request); err != nil {
			refused <- err
			return
		}
		w.counts.promptTokens.Add(int64(answer.prompt))
		w.counts.prefixQueries.Add(int64(answer.prompt))
	})
	finished := false
	defer func() {
		w.counts.prefixHits.Add(answer.cached.Load())
		if !finished {
			w.counts.aborted.Add(1)
			w.do(func(e *SimEngine) { e.Abort(answer.request) })
		} else if answer.finish == "stop" {
			w.counts.finishedStop.Add(1)
		} else {
			w.counts.finishedLength.Add(1)
		}
	}()
	flush := http.NewResponseController(out)
	var chunk []byte
	for sent := 0; sent < answer.output; {
		select {
		case <-answer.more:
		case err := <-refused:
			mockError(out, http.StatusBadRequest, err.Error())
			return
		case <-in.Context().Done():
			return
		case <-w.ctx.Done():
			panic(http.ErrAbortHandler) // the connection breaks off
		}
		if !answer.options.stream {
			sent = int(answer.generated.Load())
			continue
		}
		if sent == 0 {
			out.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		}
		chunk = chunk[:0]
		chunk, sent = answer.appendChunks(chunk, sent)
		if _, err := out.Write(chunk); err != nil {
			return
		}
		_ = flush.Flush()
	}
	finished = true
	if !answer.options.stream {
		out.Header().Set("Content-Type", "application/json")
		_, _ = out.Write(answer.whole())
	}
}

// prepare reads a request and makes up its answer; problem says why it is
// refused.
func (w *MockWorker) prepare(body []byte, chat bool) (answer *mockAnswer, problem string, status int) {
	field := func(name string) gjson.Result { return gjson.GetBytes(body, name) }
	if n := field("n"); n.Type == gjson.Number && n.Int() != 1 {
		return nil, "the mocker answers with one choice: n must be 1", http.StatusBadRequest
	}
	if model := field("model").String(); model != "" && model != w.cfg.ServedModelName {
		return nil, fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.", model, w.cfg.ServedModelName), http.StatusNotFound
	}
	prompt, problem := w.promptTokens(body, chat)
	if problem != "" {
		return nil, problem, http.StatusBadRequest
	}
	room := w.maxModelLen - len(prompt)
	if room < 1 {
		return nil, fmt.Sprintf("This model's maximum context length is %d tokens. However, your request has %d input tokens. Please reduce the length of the input messages.", w.maxModelLen, len(prompt)), http.StatusBadRequest
	}
	limit := room
	if !chat {
		limit = min(limit, completionMaxTokens)
	}
	for _, name := range []string{"max_completion_tokens", "max_tokens"} {
		v := field(name)
		if v.Type != gjson.Number || !chat && name != "max_tokens" {
			continue
		}
		if v.Int() < 1 {
			return nil, name + " must be at least 1, got " + v.Raw + ".", http.StatusBadRequest
		}
		if v.Int() > int64(room) {
			return nil, fmt.Sprintf("%s=%d cannot be greater than max_model_len=%d less the %d tokens of the prompt. Please request fewer output tokens.", name, v.Int(), w.maxModelLen, len(prompt)), http.StatusBadRequest
		}
		limit = int(v.Int())
		break
	}
	answer = &mockAnswer{
		chat: chat, model: w.cfg.ServedModelName, created: time.Now().Unix(), prompt: len(prompt), blocks: len(prompt) / w.cfg.BlockSize * w.cfg.BlockSize, salt: field("cache_salt").Str,
		more: make(chan struct{}, 1),
		options: mockOptions{
			stream: field("stream").Bool(), usage: field("stream_options.include_usage").Bool(),
			continuousUsage: field("stream_options.continuous_usage_stats").Bool(), tokenIDs: field("return_token_ids").Bool(),
		},
	}
	answer.output, answer.finish = limit, "length"
	if natural := max(w.cfg.MockOutputTokens, int(field("min_tokens").Int())); natural < limit && !field("ignore_eos").Bool() {
		answer.output, answer.finish = natural, "stop"
	}
	var tokens []uint32
	tokens, answer.texts = w.words.answer(xxh3.Hash(tokenBytes(prompt)), answer.output)
	answer.tokens = append(append(make([]uint32, 0, len(prompt)+len(tokens)), prompt...), tokens...)
	local := HashBlocks(nil, answer.tokens, w.cfg.BlockSize, "", answer.salt)
	blocks := make([]StoredBlock, len(local))
	for i, engine := range SequenceHashes(nil, local) {
		blocks[i] = StoredBlock{Engine: engine, Local: local[i]}
	}
	answer.request = &SimRequest{Blocks: blocks, Prompt: len(prompt), Output: answer.output, Tag: answer}
	return answer, "", 0
}

func (w *MockWorker) promptTokens(body []byte, chat bool) (tokens []uint32, problem string) {
	if chat {
		tokens, err := w.model.ChatTokens(body)
		if err != nil {
			return nil, err.Error()
		}
		return tokens, ""
	}
	prompts, err := w.model.CompletionTokens(body)
	switch {
	case err != nil:
		return nil, err.Error()
	case len(prompts) != 1:
		return nil, "the mocker answers one prompt a request"
	case len(prompts[0]) == 0:
		return nil, "the prompt has no tokens"
	}
	return prompts[0], ""
}

// appendChunks appends the server-sent events for the tokens that have come
// since the first sent ones, and returns how many tokens that makes. As in vLLM
// the tokens of several steps make one chunk where the client is behind.
func (a *mockAnswer) appendChunks(out []byte, sent int) ([]byte, int) {
	now := int(a.generated.Load())
	if now == sent {
		return out, sent
	}
	if a.chat && sent == 0 {
		out = a.head(out)
		out = append(out, `"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
		out = a.stepUsage(out, 0)
		out = append(out, `,"prompt_token_ids":`...)
		if a.options.tokenIDs {
			out = appendTokens(out, a.tokens[:a.prompt])
		} else {
			out = append(out, "null"...)
		}
		out = append(out, `,"prompt_text":null`...)
		out = append(out, "}\n\n"...)
	}
	out = a.head(out)
	out = append(out, `"choices":[{"index":0,`...)
	text := a.text(sent, now)
	if a.chat {
		out = appendString(append(out, `"delta":{"content":`...), text)
		out = append(out, '}')
	} else {
		out = appendString(append(out, `"text":`...), text)
	}
	out = append(out, `,"logprobs":null,"finish_reason":`...)
	last := now == a.output
	if last {
		out = appendString(out, a.finish)
	} else {
		out = append(out, "null"...)
	}
	if last || !a.chat {
		out = append(out, `,"stop_reason":null`...)
	}
	if !a.chat {
		out = append(out, `,"prompt_token_ids":`...)
		if a.options.tokenIDs && sent == 0 {
			out = appendTokens(out, a.tokens[:a.prompt])
		} else {
			out = append(out, "null"...)
		}
	}
	out = append(out, `,"token_ids":`...)
	if a.options.tokenIDs {
		out = appendTokens(out, a.tokens[a.prompt+sent:a.prompt+now])
	} else {
		out = append(out, "null"...)
	}
	out = append(out, "}]"...)
	out = a.stepUsage(out, now)
	if last && !a.options.usage {
		out = append(out, `,"system_fingerprint":"`+mockFingerprint+`"`...)
	}
	out = append(out, "}\n\n"...)
	if !last {
		return out, now
	}
	if a.options.usage {
		out = a.head(out)
		out = append(out, `"choices":[],"usage":`...)
		out = a.appendUsage(out, now, false)
		out = append(out, `,"system_fingerprint":"`+mockFingerprint+"\"}\n\n"...)
	}
	return append(out, "data: [DONE]\n\n"...), now
}

// head opens an event with the fields that all have.
func (a *mockAnswer) head(out []byte) []byte {
	kind := "chat.completion.chunk"
	if !a.chat {
		kind = "text_completion"
	}
	return fmt.Appendf(out, `data: {"id":%s,"object":%q,"created":%d,"model":%s,`, appendString(nil, a.id), kind, a.created, appendString(nil, a.model))
}

// stepUsage appends the usage so far where each chunk is to have it.
func (a *mockAnswer) stepUsage(out []byte, generated int) []byte {
	if !a.options.usage || !a.options.continuousUsage {
		return out
	}
	out = fmt.Appendf(out, `,"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d`, a.prompt, a.prompt+generated, generated)
	if a.chat {
		out = append(out, `,"completion_tokens_details":null`...)
	}
	return append(out, '}')
}

// appendUsage appends the usage of the whole; null fields belong to answers
// that are not streamed.
func (a *mockAnswer) appendUsage(out []byte, generated int, nulls bool) []byte {
	cached := int(a.cached.Load())
	out = fmt.Appendf(out, `{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d`,
		a.prompt, a.prompt+generated, generated, cached)
	if a.chat { // a completion does not tell it
		out = fmt.Appendf(out, `,"created_cache_tokens":%d`, max(0, a.blocks-cached))
	} else if nulls {
		out = append(out, `,"created_cache_tokens":null`...)
	}
	if nulls {
		return append(out, `,"multimodal_tokens":null},"completion_tokens_details":null}`...)
	}
	return append(out, "}}"...)
}

func (a *mockAnswer) text(from, to int) string {
	size := 0
	for _, t := range a.texts[from:to] {
		size += len(t)
	}
	text := make([]byte, 0, size)
	for _, t := range a.texts[from:to] {
		text = append(text, t...)
	}
	return string(text)
}

// whole returns the answer that is not streamed.
func (a *mockAnswer) whole() []byte {
	kind := "chat.completion"
	if !a.chat {
		kind = "text_completion"
	}
	out := fmt.Appendf(nil, `{"id":%s,"object":%q,"created":%d,"model":%s,"choices":[{"index":0,`, appendString(nil, a.id), kind, a.created, appendString(nil, a.model))
	text := a.text(0, a.output)
	if a.chat {
		out = appendString(append(out, `"message":{"role":"assistant","content":`...), text)
		out = append(out, `,"refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null}`...)
	} else {
		out = appendString(append(out, `"text":`...), text)
	}
	out = fmt.Appendf(out, `,"logprobs":null,"finish_reason":%q,"stop_reason":null,"token_ids":`, a.finish)
	prompt := []byte("null")
	if a.options.tokenIDs {
		out = appendTokens(out, a.tokens[a.prompt:])
		prompt = appendTokens(nil, a.tokens[:a.prompt])
	} else {
		out = append(out, "null"...)
	}
	if !a.chat {
		out = append(append(out, `,"prompt_logprobs":null,"prompt_token_ids":`...), prompt...)
	}
	out = append(out, `,"routed_experts":null}],"service_tier":null,"system_fingerprint":"`+mockFingerprint+`","usage":`...)
	out = a.appendUsage(out, a.output, true)
	if a.chat {
		out = append(append(out, `,"prompt_logprobs":null,"prompt_token_ids":`...), prompt...)
		out = append(out, `,"prompt_text":null`...)
	}
	return append(out, `,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}`...)
}

// render answers with the tokens of a request's prompt.
func (w *MockWorker) render(out http.ResponseWriter, in *http.Request, chat bool) {
	body, ok := w.body(out, in)
	if !ok {
		return
	}
	tokens, problem := w.promptTokens(body, chat)
	if problem != "" {
		mockError(out, http.StatusBadRequest, problem)
		return
	}
	rendered := map[string]any{"request_id": mockRequestID(in, chat), "token_ids": tokens, "features": nil, "model": w.cfg.ServedModelName, "stream": gjson.GetBytes(body, "stream").Bool()}
	if chat {
		answerJSON(out, http.StatusOK, rendered)
		return
	}
	answerJSON(out, http.StatusOK, []any{rendered})
}

// tokenizer serves /tokenize or /detokenize.
func (w *MockWorker) tokenizer(serve func([]byte) ([]byte, error)) http.HandlerFunc {
	return func(out http.ResponseWriter, in *http.Request) {
		body, ok := w.body(out, in)
		if !ok {
			return
		}
		answer, err := serve(body)
		if err != nil {
			mockError(out, http.StatusBadRequest, err.Error())
			return
		}
		out.Header().Set("Content-Type", "application/json")
		_, _ = out.Write(answer)
	}
}

func (w *MockWorker) models(out http.ResponseWriter, _ *http.Request) {
	card := map[string]any{
		"id": w.cfg.ServedModelName, "object": "model", "created": w.started.Unix(), "owned_by": "vllm",
		"root": w.cfg.ServedModelName, "parent": nil, "max_model_len": w.maxModelLen, "permission": []any{},
	}
	answerJSON(out, http.StatusOK, map[string]any{"object": "list", "data": []any{card}})
}

func (w *MockWorker) eventSources(out http.ResponseWriter, _ *http.Request) {
	answerJSON(out, http.StatusOK, map[string]any{"0": map[string]any{
		"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": w.events.pub.Endpoint(), "replay_endpoint": w.events.router.Endpoint(),
		"buffer_steps": replayBatches, "hwm": zmqQueue, "max_queue_size": mockEventQueue, "topic": kvEventsTopic,
	}})
}

func (w *MockWorker) reset(out http.ResponseWriter, in *http.Request) {
	success := false
	if w.ask(in.Context(), func(e *SimEngine) { success = w.resetPrefixCache(e) }) {
		answerJSON(out, http.StatusOK, map[string]any{"success": success})
	}
}

// currentLoad is the worker's load after its last step.
func (w *MockWorker) currentLoad() mockLoad {
	if load := w.load.Load(); load != nil {
		return *load
	}
	return mockLoad{}
}

func (w *MockWorker) serverLoad(out http.ResponseWriter, _ *http.Request) {
	load := w.currentLoad()
	answerJSON(out, http.StatusOK, map[string]any{"server_load": load.Running + load.Waiting})
}

// metrics serves the part of vLLM's Prometheus page that others read.
func (w *MockWorker) metrics(out http.ResponseWriter, _ *http.Request) {
	load := w.currentLoad()
	labels := fmt.Sprintf(`engine="0",model_name=%q`, w.cfg.ServedModelName)
	var page []byte
	add := func(kind, name, more string, value float64) {
		if more == "" || more == `,finished_reason="stop"` {
			page = fmt.Appendf(page, "# TYPE vllm:%s %s\n", name, kind)
		}
		page = fmt.Appendf(page, "vllm:%s{%s%s} %s\n", name, labels, more, strconv.FormatFloat(value, 'g', -1, 64))
	}
	add("gauge", "num_requests_running", "", float64(load.Running))
	add("gauge", "num_requests_waiting", "", float64(load.Waiting))
	add("gauge", "kv_cache_usage_perc", "", load.Usage)
	add("counter", "prefix_cache_queries_total", "", float64(w.counts.prefixQueries.Load()))
	add("counter", "prefix_cache_hits_total", "", float64(w.counts.prefixHits.Load()))
	add("counter", "prompt_tokens_total", "", float64(w.counts.promptTokens.Load()))
	add("counter", "generation_tokens_total", "", float64(w.counts.generationTokens.Load()))
	add("counter", "request_success_total", `,finished_reason="stop"`, float64(w.counts.finishedStop.Load()))
	add("counter", "request_success_total", `,finished_reason="length"`, float64(w.counts.finishedLength.Load()))
	add("counter", "request_success_total", `,finished_reason="abort"`, float64(w.counts.aborted.Load()))
	page = fmt.Appendf(page, "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"%d\",engine=\"0\",num_gpu_blocks=\"%d\"} 1\n", w.cfg.BlockSize, w.cfg.MockNumGPUBlocks)
	out.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = out.Write(page)
}

// body reads a request's body, a JSON object; not ok: it has been answered.
func (w *MockWorker) body(out http.ResponseWriter, in *http.Request) (body []byte, ok bool) {
	body, err := io.ReadAll(http.MaxBytesReader(out, in.Body, mockBodyLimit))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		mockError(out, http.StatusRequestEntityTooLarge, "the request body is too large")
	case err != nil || !gjson.ValidBytes(body) || !gjson.ParseBytes(body).IsObject():
		mockError(out, http.StatusBadRequest, "the request body is not a JSON object")
	default:
		return body, true
	}
	return nil, false
}

// mockRequestID is the id of a request's answer: it holds the client's own where
// it sent one.
func mockRequestID(in *http.Request, chat bool) string {
	prefix := "cmpl-"
	if chat {
		prefix = "chatcmpl-"
	}
	if id := in.Header.Get(headerRequest); id != "" {
		return prefix + id
	}
	return prefix + strconv.FormatInt(time.Now().UnixNano(), 36)
}

// mockError answers with an error in vLLM's shape.
func mockError(out http.ResponseWriter, status int, message string) {
	kind := map[int]string{http.StatusBadRequest: "BadRequestError", http.StatusNotFound: "NotFoundError"}[status]
	if kind == "" {
		kind = "InternalServerError"
	}
	var body struct {
		Error struct {
			Message string  `json:"message"`
			Type    string  `json:"type"`
			Param   *string `json:"param"`
			Code    int     `json:"code"`
		} `json:"error"`
	}
	body.Error.Message, body.Error.Type, body.Error.Code = message, kind, status
	answerJSON(out, status, body)
}

func answerJSON(out http.ResponseWriter, status int, value any) {
	out.Header().Set("Content-Type", "application/json")
	out.WriteHeader(status)
	_, _ = out.Write(mustJSON(value))
}

// mustJSON encodes a value that has nothing that JSON cannot say.
func mustJSON(value any) []byte {
	text, err := json.Marshal(value)
	if err != nil {
		panic(fmt.Sprintf("mock worker: %v", err))
	}
	return text
}
