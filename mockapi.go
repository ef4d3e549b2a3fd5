package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// mockBodyLimit bounds a request's body, bytes.
	mockBodyLimit = 64 << 20
	// mockVersion is the vLLM whose answers the mock workers imitate.
	mockVersion = "0.32.0+mock"
	// mockFingerprint is the system_fingerprint that ends every answer.
	mockFingerprint = "vllm-" + mockVersion
)

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
	mux.HandleFunc("POST /v1/load_lora_adapter", w.loadAdapter)
	mux.HandleFunc("POST /v1/unload_lora_adapter", w.unloadAdapter)
	mux.HandleFunc("GET "+mockTransferPath, w.joinRoom)
	mux.HandleFunc("GET /server_info", w.serverInfo)
	mux.HandleFunc("POST /abort_request", w.abortRequest)
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
		mockError(out, &mockProblem{http.StatusInternalServerError, "InternalServerError", "error asked for by --mock-error-rate", ""})
		return
	}
	answer, problem := w.prepare(body, chat)
	if problem != nil {
		mockError(out, problem)
		return
	}
	rank, problem := w.rankFor(in.Header.Get(headerRank))
	if problem != nil {
		mockError(out, problem)
		return
	}
	answer.id = mockRequestID(in, chat)
	ctx, cancel := context.WithCancel(in.Context())
	var fetching sync.WaitGroup
	defer fetching.Wait()
	defer cancel()
	if rid := body.Get("rid").Str; rid != "" {
		defer w.named(rid, cancel)()
	}
	transfer := w.transfer(body, answer)
	defer func() { transfer.close(rank) }()
	if problem := transfer.ready(ctx); problem != nil {
		mockError(out, problem)
		return
	}
	refused := rank.submit(answer)
	defer rank.leave(answer)
	failed := make(chan *mockProblem, 1)
	if transfer != nil && transfer.source != "" {
		fetching.Go(func() { transfer.fetch(ctx, rank, failed) })
	}
	flush := http.NewResponseController(out)
	var chunk []byte
	for left := len(answer.choices); left > 0; {
		select {
		case <-answer.more:
		case err := <-refused:
			mockError(out, badRequest("", "%v", err))
			return
		case problem := <-failed:
			answer.fail(out, problem)
			return
		case <-ctx.Done():
			if in.Context().Err() == nil {
				mockError(out, &mockProblem{http.StatusInternalServerError, "InternalServerError", "the request was aborted", ""})
			}
			return
		case <-w.ctx.Done():
			panic(http.ErrAbortHandler) // the connection breaks off
		}
		chunk = chunk[:0]
		for _, c := range answer.choices {
			now := int(c.generated.Load())
			if now == c.sent {
				continue
			}
			if answer.stream {
				chunk = answer.appendChunk(chunk, c, now)
			}
			if c.sent = now; now == c.output {
				left--
			}
		}
		if left == 0 {
			if problem := transfer.computed(ctx, rank); problem != nil {
				mockError(out, problem)
				return
			}
		}
		if !answer.stream || len(chunk) == 0 {
			continue
		}
		if left == 0 {
			chunk = answer.appendEnd(chunk)
		}
		out.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		if _, err := out.Write(chunk); err != nil {
			return
		}
		_ = flush.Flush()
	}
	if !answer.stream {
		out.Header().Set("Content-Type", "application/json")
		_, _ = out.Write(answer.whole())
	}
}

// rankFor returns the rank that a request's header names, or without one that
// which has the fewest choices to answer.
func (w *MockWorker) rankFor(header string) (*mockRank, *mockProblem) {
	if number, err := strconv.Atoi(header); err == nil {
		if number < 0 || number >= len(w.ranks) {
			return nil, badRequest("", "data_parallel_rank %d is out of range [0, %d).", number, len(w.ranks))
		}
		return w.ranks[number], nil
	}
	return slices.MinFunc(w.ranks, func(a, b *mockRank) int { return cmp.Compare(a.inFlight.Load(), b.inFlight.Load()) }), nil
}

// render answers with the tokens of a request's prompts.
func (w *MockWorker) render(out http.ResponseWriter, in *http.Request, chat bool) {
	body, ok := w.body(out, in)
	if !ok {
		return
	}
	_, problem := w.served(body.Get("model").String())
	var prompts [][]uint32
	if problem == nil {
		prompts, problem = w.prompts(body, chat)
	}
	if problem != nil {
		mockError(out, problem)
		return
	}
	var list []any
	id := mockRequestID(in, chat)
	for i, tokens := range prompts {
		rendered := map[string]any{"request_id": id, "token_ids": tokens, "features": nil, "model": nil, "stream": body.Get("stream").Bool()}
		if chat {
			answerJSON(out, http.StatusOK, rendered)
			return
		}
		rendered["request_id"] = fmt.Sprint(id, "-", i)
		list = append(list, rendered)
	}
	answerJSON(out, http.StatusOK, list)
}

// tokenizer serves /tokenize or /detokenize.
func (w *MockWorker) tokenizer(serve func([]byte) ([]byte, error)) http.HandlerFunc {
	return func(out http.ResponseWriter, in *http.Request) {
		body, ok := w.body(out, in)
		if !ok {
			return
		}
		if _, problem := w.served(body.Get("model").String()); problem != nil {
			mockError(out, problem)
			return
		}
		answer, err := serve(body.Raw)
		if err != nil {
			mockError(out, badRequest("", "%v", err))
			return
		}
		out.Header().Set("Content-Type", "application/json")
		_, _ = out.Write(answer)
	}
}

func (w *MockWorker) models(out http.ResponseWriter, _ *http.Request) {
	created := w.started.Unix()
	card := func(name string, parent, longest any) map[string]any {
		permission := map[string]any{
			"id": "modelperm-" + name, "object": "model_permission", "created": created, "organization": "*", "group": nil, "is_blocking": false,
			"allow_create_engine": false, "allow_sampling": true, "allow_logprobs": false, "allow_search_indices": false, "allow_view": true, "allow_fine_tuning": false,
		}
		return map[string]any{
			"id": name, "object": "model", "created": created, "owned_by": "vllm",
			"root": name, "parent": parent, "max_model_len": longest, "permission": []any{permission},
		}
	}
	cards := []any{card(w.cfg.ServedModelName, nil, w.maxModelLen)}
	for _, adapter := range w.loaded() {
		cards = append(cards, card(adapter.name, w.cfg.ServedModelName, nil))
	}
	answerJSON(out, http.StatusOK, map[string]any{"object": "list", "data": cards})
}

func (w *MockWorker) eventSources(out http.ResponseWriter, _ *http.Request) {
	sources := map[int]any{}
	for _, rank := range w.ranks {
		if rank.events == nil {
			continue
		}
		sources[rank.number] = map[string]any{
			"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": rank.events.pub.Endpoint(), "replay_endpoint": rank.events.router.Endpoint(),
			"buffer_steps": replayBatches, "hwm": zmqQueue, "max_queue_size": mockEventQueue, "topic": KVEventsTopic,
		}
	}
	answerJSON(out, http.StatusOK, sources)
}

func (w *MockWorker) reset(out http.ResponseWriter, in *http.Request) {
	success := true
	for _, rank := range w.ranks {
		if !rank.ask(in.Context(), func(e *SimEngine) { success = rank.resetPrefixCache(e) && success }) {
			return
		}
	}
	answerJSON(out, http.StatusOK, map[string]any{"success": success})
}

func (w *MockWorker) serverLoad(out http.ResponseWriter, _ *http.Request) {
	load := 0
	for _, rank := range w.ranks {
		now := rank.currentLoad()
		load += now.Running + now.Waiting
	}
	answerJSON(out, http.StatusOK, map[string]any{"server_load": load})
}

// metrics serves the part of vLLM's Prometheus page that others read.
func (w *MockWorker) metrics(out http.ResponseWriter, _ *http.Request) {
	var page []byte
	add := func(kind, name, more string, value func(*mockRank, mockLoad) float64) {
		if more == "" || more == `,finished_reason="stop"` {
			page = fmt.Appendf(page, "# TYPE vllm:%s %s\n", name, kind)
		}
		for _, rank := range w.ranks {
			page = fmt.Appendf(page, "vllm:%s{engine=\"%d\",model_name=%q%s} %s\n",
				name, rank.number, w.cfg.ServedModelName, more, strconv.FormatFloat(value(rank, rank.currentLoad()), 'g', -1, 64))
		}
	}
	count := func(name, more string, counter func(*mockCounts) *atomic.Int64) {
		add("counter", name, more, func(r *mockRank, _ mockLoad) float64 { return float64(counter(&r.counts).Load()) })
	}
	add("gauge", "num_requests_running", "", func(_ *mockRank, l mockLoad) float64 { return float64(l.Running) })
	add("gauge", "num_requests_waiting", "", func(_ *mockRank, l mockLoad) float64 { return float64(l.Waiting) })
	add("gauge", "kv_cache_usage_perc", "", func(_ *mockRank, l mockLoad) float64 { return l.Usage })
	count("prefix_cache_queries_total", "", func(c *mockCounts) *atomic.Int64 { return &c.prefixQueries })
	count("prefix_cache_hits_total", "", func(c *mockCounts) *atomic.Int64 { return &c.prefixHits })
	if w.part.Kind == KindNIXL {
		count("external_prefix_cache_hits_total", "", func(c *mockCounts) *atomic.Int64 { return &c.externalHits })
	}
	count("prompt_tokens_total", "", func(c *mockCounts) *atomic.Int64 { return &c.promptTokens })
	count("generation_tokens_total", "", func(c *mockCounts) *atomic.Int64 { return &c.generationTokens })
	count("request_success_total", `,finished_reason="stop"`, func(c *mockCounts) *atomic.Int64 { return &c.finishedStop })
	count("request_success_total", `,finished_reason="length"`, func(c *mockCounts) *atomic.Int64 { return &c.finishedLength })
	count("request_success_total", `,finished_reason="abort"`, func(c *mockCounts) *atomic.Int64 { return &c.aborted })
	page = append(page, "# TYPE vllm:cache_config_info gauge\n"...)
	for _, rank := range w.ranks {
		page = fmt.Appendf(page, "vllm:cache_config_info{block_size=\"%d\",engine=\"%d\",num_gpu_blocks=\"%d\"} 1\n", w.cfg.BlockSize, rank.number, w.cfg.MockNumGPUBlocks)
	}
	out.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = out.Write(page)
}

// body reads a request's body, a JSON object; not ok: it has been answered.
func (w *MockWorker) body(out http.ResponseWriter, in *http.Request) (body *Body, ok bool) {
	raw, err := io.ReadAll(http.MaxBytesReader(out, in.Body, mockBodyLimit))
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		mockError(out, &mockProblem{http.StatusRequestEntityTooLarge, "InternalServerError", "the request body is too large", ""})
		return nil, false
	}
	if body, ok = ParseBody(raw); err != nil || !ok {
		mockError(out, &mockProblem{http.StatusBadRequest, "Bad Request", "1 validation error: the body is not a JSON object", "body"})
		return nil, false
	}
	return body, true
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

// mockError answers with an error.
func mockError(out http.ResponseWriter, problem *mockProblem) {
	answerJSON(out, problem.status, json.RawMessage(problem.body()))
}

// body is the problem in vLLM's shape.
func (problem *mockProblem) body() []byte {
	var body struct {
		Error struct {
			Message string  `json:"message"`
			Type    string  `json:"type"`
			Param   *string `json:"param"`
			Code    int     `json:"code"`
		} `json:"error"`
	}
	e := &body.Error
	e.Message, e.Type, e.Code = problem.message, problem.kind, problem.status
	if problem.param != "" {
		e.Param = &problem.param
	}
	return mustJSON(body)
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
