package mocker

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
	"strings"
	"sync"
	"time"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/tools/engine"
)

const (
	// bodyLimit bounds a request's body, bytes.
	bodyLimit = 64 << 20
	// Version is the vLLM version whose answers the mock workers imitate by
	// default.
	Version = "0.32.0+mock"
	// fingerprint is the system_fingerprint that ends every answer.
	fingerprint = "vllm-" + Version
)

func (w *Worker) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+transferPath, w.joinRoom)
	mux.HandleFunc("POST "+peerPath, w.servePeer)
	if w.sglang() {
		w.addSGLangRoutes(mux)
	} else {
		w.addVLLMRoutes(mux)
	}
	return http.HandlerFunc(func(out http.ResponseWriter, in *http.Request) {
		if !w.handlers.enter() {
			panic(http.ErrAbortHandler)
		}
		defer w.handlers.leave()
		if in.Method == http.MethodPost {
			w.Posts.Add(1)
			w.LastPost.Store(time.Now().UnixNano())
		}
		if w.Hung.Load() {
			_, _ = io.Copy(io.Discard, io.LimitReader(in.Body, bodyLimit)) // only then is a client that leaves noticed
			select {
			case <-in.Context().Done():
			case <-w.ctx.Done():
			}
			panic(http.ErrAbortHandler)
		}
		mux.ServeHTTP(out, in)
	})
}

func (w *Worker) addVLLMRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /version", func(out http.ResponseWriter, _ *http.Request) {
		answerJSON(out, http.StatusOK, map[string]any{"version": Version})
	})
	mux.HandleFunc("GET /v1/models", w.models)
	mux.HandleFunc("GET /load", w.serverLoad)
	mux.HandleFunc("GET /metrics", w.metrics)
	mux.HandleFunc("GET /kv_event_sources", w.eventSources)
	mux.HandleFunc("POST /reset_prefix_cache", w.reset)
	w.addVLLMTraining(mux)
	mux.HandleFunc("POST /v1/load_lora_adapter", w.loadAdapter)
	mux.HandleFunc("POST /v1/unload_lora_adapter", w.unloadAdapter)
	mux.HandleFunc("GET /server_info", w.pairInfo)
	mux.HandleFunc("POST /abort_request", w.abortRequest)
	mux.HandleFunc("POST /tokenize", w.tokenizer(w.model.Tokenize))
	mux.HandleFunc("POST /detokenize", w.tokenizer(w.model.Detokenize))
	mux.HandleFunc("POST /v1/chat/completions", w.infers(chatKind))
	mux.HandleFunc("POST /v1/completions", w.infers(completionKind))
	mux.HandleFunc("POST "+formRoutes[tokensForm], w.infers(completionKind))
	mux.HandleFunc("POST /v1/chat/completions/render", w.serve(
		func(in *http.Request, body *jsonbody.Body) (any, *refusal) { return w.render(in, body, true) }))
	mux.HandleFunc("POST /v1/completions/render", w.serve(
		func(in *http.Request, body *jsonbody.Body) (any, *refusal) { return w.render(in, body, false) }))
	post := func(path string, serve http.HandlerFunc) { mux.HandleFunc("POST "+path, serve) }
	w.addForms(mux, post)
	for _, f := range []form{messagesForm, responsesForm} {
		post(formRoutes[f]+"/render", w.serve(func(in *http.Request, body *jsonbody.Body) (any, *refusal) { return w.render(in, body, true) }))
	}
}

// accept reads and checks a request for tokens, prepares its answer and finds
// the rank that computes it; not ok: the request has been answered.
func (w *Worker) accept(out http.ResponseWriter, in *http.Request, of kind) (body *jsonbody.Body, answer *Answer, rank *Rank, ok bool) {
	if body, ok = w.body(out, in); !ok {
		return nil, nil, nil, false
	}
	body, problem := w.asChat(in.URL.Path, body)
	if problem != nil {
		w.writeError(out, in, problem)
		return nil, nil, nil, false
	}
	if status := int(w.Failing.Load()); status != 0 {
		problem = &refusal{status, "InternalServerError", "simulated error of a test", ""}
	} else if w.chance(w.cfg.ErrorRate) {
		problem = &refusal{http.StatusInternalServerError, "InternalServerError", "simulated error (--mock error-rate)", ""}
	} else if w.sglang() {
		if answer, problem = w.prepareSGLang(body, of); problem == nil {
			rank, problem = w.sglangRank(in, body, of)
		}
	} else if answer, problem = w.prepare(body, of); problem == nil {
		rank, problem = w.rankFor(in.Header.Get(web.HeaderRank))
	}
	if problem != nil {
		if of == generateKind && problem.status == http.StatusBadRequest && problem.kind != badBody && body.Get("stream").Bool() {
			writeStreamError(out, problem.sglangBody(of, true))
		} else {
			w.writeError(out, in, problem)
		}
		return nil, nil, nil, false
	}
	if w.sglang() {
		answer.identify(body, rank)
	} else {
		answer.id = requestID(in, of == chatKind)
	}
	answer.version = w.weights()
	switch answer.form = formOf(in.URL.Path); answer.form {
	case tokensForm:
		answer.id = "generate-tokens-" + cmp.Or(in.Header.Get(web.HeaderRequest), body.Get("request_id").Str, answer.id)
		answer.logprobs = body.Get("token_logprobs").Bool()
	case responsesForm:
		answer.id = cmp.Or(body.Get("request_id").Str, "resp_"+strings.TrimPrefix(answer.id, "chatcmpl-"))
	}
	return body, answer, rank, true
}

// infers serves the requests of a route for tokens.
func (w *Worker) infers(of kind) http.HandlerFunc {
	return func(out http.ResponseWriter, in *http.Request) { w.infer(out, in, of) }
}

// infer serves a request for tokens.
func (w *Worker) infer(out http.ResponseWriter, in *http.Request, of kind) {
	body, answer, rank, ok := w.accept(out, in, of)
	if !ok {
		return
	}
	ctx, cancel := context.WithCancel(in.Context())
	var fetching sync.WaitGroup
	defer fetching.Wait()
	defer cancel()
	pairing, unpair := context.WithCancel(ctx) // what waits for the other leg ends with it
	defer unpair()
	if w.sglang() {
		defer w.named(answer.abortable(unpair)...)()
	} else if rid := body.Get("rid").Str; rid != "" {
		defer w.named(&inference{rid, cancel})()
	} else {
		defer w.named(answer.abortable(unpair)...)()
	}
	if w.sglang() && w.part.Role == kv.RoleDecode && answer.samples > 1 { // as the real one: it never answers
		select {
		case <-ctx.Done():
			return
		case <-w.ctx.Done():
			panic(http.ErrAbortHandler)
		}
	}
	legs := w.transfers(body, answer)
	defer legs.close(rank)
	if problem := legs.ready(pairing); problem != nil && !answer.stopped() {
		answer.refuse(out, problem)
		return
	}
	if !w.warm(ctx, rank, answer) {
		return
	}
	w.findSource(ctx, body, answer)
	refused := rank.submit(answer)
	defer rank.leave(answer)
	failed := make(chan *refusal, len(legs))
	for _, t := range legs {
		if t.source != "" {
			fetching.Go(func() { t.fetch(ctx, rank, failed) })
		}
	}
	flush := http.NewResponseController(out)
	var chunk []byte
	for left := len(answer.choices); left > 0; {
		select {
		case <-answer.More:
		case err := <-refused:
			answer.refuse(out, badRequest("", "%v", err))
			return
		case problem := <-failed:
			answer.fail(out, problem)
			return
		case <-ctx.Done():
			if in.Context().Err() == nil {
				answer.refuse(out, &refusal{http.StatusInternalServerError, "InternalServerError", "the request was aborted", ""})
			}
			return
		case <-w.ctx.Done():
			panic(http.ErrAbortHandler) // the connection breaks off
		}
		var ended int
		chunk, ended = answer.take(chunk[:0])
		if left -= ended; left == 0 && !answer.stopped() {
			if problem := legs.computed(pairing, rank); problem != nil && !answer.stopped() {
				answer.refuse(out, problem)
				return
			}
		}
		if !answer.stream || len(chunk) == 0 && left > 0 {
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
func (w *Worker) rankFor(header string) (*Rank, *refusal) {
	if number, err := strconv.Atoi(header); err == nil {
		if number < 0 || number >= len(w.Ranks) {
			return nil, badRequest("", "data_parallel_rank %d is out of range [0, %d).", number, len(w.Ranks))
		}
		return w.Ranks[number], nil
	}
	return slices.MinFunc(w.Ranks, func(a, b *Rank) int { return cmp.Compare(a.inFlight.Load(), b.inFlight.Load()) }), nil
}

// serve answers requests with what find makes of a body: a value for JSON.
func (w *Worker) serve(find func(in *http.Request, body *jsonbody.Body) (any, *refusal)) http.HandlerFunc {
	return func(out http.ResponseWriter, in *http.Request) {
		body, ok := w.body(out, in)
		if !ok {
			return
		}
		answer, problem := find(in, body)
		if problem != nil {
			w.writeError(out, in, problem)
			return
		}
		answerJSON(out, http.StatusOK, answer)
	}
}

// render returns the tokens of a request's prompts.
func (w *Worker) render(in *http.Request, body *jsonbody.Body, chat bool) (any, *refusal) {
	if _, problem := w.served(body.Get("model").String()); problem != nil {
		return nil, problem
	}
	body, problem := w.asChat(in.URL.Path, body)
	if problem != nil {
		return nil, problem
	}
	prompts, problem := w.prompts(body, chat)
	if problem != nil {
		return nil, problem
	}
	var list []any
	id := requestID(in, chat)
	for i, tokens := range prompts {
		rendered := map[string]any{"request_id": id, "token_ids": tokens, "features": nil, "model": nil, "stream": body.Get("stream").Bool()}
		if chat {
			return rendered, nil
		}
		rendered["request_id"] = fmt.Sprint(id, "-", i)
		list = append(list, rendered)
	}
	return list, nil
}

// tokenizer serves /tokenize or /detokenize.
func (w *Worker) tokenizer(answer func([]byte) ([]byte, error)) http.HandlerFunc {
	return w.serve(func(_ *http.Request, body *jsonbody.Body) (any, *refusal) {
		if _, problem := w.served(body.Get("model").String()); problem != nil {
			return nil, problem
		}
		text, err := answer(body.Raw)
		if err != nil {
			return nil, badRequest("", "%v", err)
		}
		return json.RawMessage(text), nil
	})
}

func (w *Worker) models(out http.ResponseWriter, _ *http.Request) {
	card := func(name string, parent, longest any) map[string]any {
		card := map[string]any{
			"id": name, "object": "model", "created": w.started.Unix(), "owned_by": w.cfg.Engine().String(),
			"root": name, "parent": parent, "max_model_len": longest,
		}
		if !w.sglang() {
			card["permission"] = []any{map[string]any{
				"id": "modelperm-" + name, "object": "model_permission", "created": card["created"], "organization": "*", "group": nil,
				"is_blocking":         false,
				"allow_create_engine": false, "allow_sampling": true, "allow_logprobs": false, "allow_search_indices": false, "allow_view": true,
				"allow_fine_tuning": false,
			}}
		}
		return card
	}
	cards := []any{card(w.cfg.ServedModelName, nil, w.maxModelLen)}
	for _, adapter := range w.loaded() {
		cards = append(cards, card(adapter.Name, w.cfg.ServedModelName, nil))
	}
	answerJSON(out, http.StatusOK, map[string]any{"object": "list", "data": cards})
}

func (w *Worker) eventSources(out http.ResponseWriter, _ *http.Request) {
	sources := map[int]any{}
	for _, rank := range w.Ranks {
		if rank.Events == nil {
			continue
		}
		sources[rank.number] = map[string]any{
			"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": rank.Events.Pub.Endpoint(),
			"replay_endpoint": rank.Events.router.Endpoint(),
			"buffer_steps":    rank.Events.Keep, "hwm": zmq.QueueLimit, "max_queue_size": eventQueue, "topic": process.KVEventsTopic,
		}
	}
	answerJSON(out, http.StatusOK, sources)
}

func (w *Worker) reset(out http.ResponseWriter, in *http.Request) {
	lower := in.URL.Query().Get("reset_external") == "true"
	if success, ended := w.resetCaches(in.Context(), lower); !ended {
		answerJSON(out, http.StatusOK, map[string]any{"success": success})
	}
}

// resetCaches empties the caches of all ranks, with lower also the tiers below; not all: one is in use. ended means that
// the client has left, or the worker has ended.
func (w *Worker) resetCaches(ctx context.Context, lower bool) (all, ended bool) {
	all = true
	for _, rank := range w.Ranks {
		if !rank.Ask(ctx, func(e *engine.Engine) { all = rank.ResetPrefixCache(e, lower) && all }) {
			return false, true
		}
	}
	return all, false
}

func (w *Worker) serverLoad(out http.ResponseWriter, _ *http.Request) {
	load := 0
	for _, rank := range w.Ranks {
		now := rank.CurrentLoad()
		load += now.Running + now.Waiting
	}
	answerJSON(out, http.StatusOK, map[string]any{"server_load": load})
}

// body reads a request's body, a JSON object; not ok: it has been answered.
func (w *Worker) body(out http.ResponseWriter, in *http.Request) (body *jsonbody.Body, ok bool) {
	raw, err := io.ReadAll(http.MaxBytesReader(out, in.Body, bodyLimit))
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		w.writeError(out, in, &refusal{http.StatusRequestEntityTooLarge, "InternalServerError", "the request body is too large", ""})
		return nil, false
	}
	if body, ok = jsonbody.Parse(raw); err != nil || !ok {
		w.writeError(out, in, &refusal{http.StatusBadRequest, badBody, "1 validation error: the body is not a JSON object", "body"})
		return nil, false
	}
	return body, true
}

// requestID is the id of a request's answer: it holds the client's own where
// it sent one.
func requestID(in *http.Request, chat bool) string {
	prefix := "cmpl-"
	if chat {
		prefix = "chatcmpl-"
	}
	if id := in.Header.Get(web.HeaderRequest); id != "" {
		return prefix + id
	}
	return prefix + strconv.FormatInt(time.Now().UnixNano(), 36)
}

// writeError answers with an error in the shape of the route.
func (w *Worker) writeError(out http.ResponseWriter, in *http.Request, problem *refusal) {
	answerJSON(out, problem.status, json.RawMessage(problem.bodyOf(w.sglang(), sglangKind(in.URL.Path), formOf(in.URL.Path), false)))
}

// refuse answers with an error before anything else of the answer.
func (a *Answer) refuse(out http.ResponseWriter, problem *refusal) {
	answerJSON(out, problem.status, json.RawMessage(problem.bodyOf(a.sglang, a.kind, a.form, false)))
}

// bodyOf is the problem in Anthropic's shape, in SGLang's, see sglangBody, or in vLLM's.
func (problem *refusal) bodyOf(sglang bool, of kind, form form, streamed bool) []byte {
	if form == messagesForm {
		return MustJSON(map[string]any{"type": "error", "error": map[string]any{"type": problem.kind, "message": problem.message}})
	}
	if sglang {
		return problem.sglangBody(of, streamed)
	}
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
	return MustJSON(body)
}

// answerJSON answers with a value as JSON; json.RawMessage is that already.
func answerJSON(out http.ResponseWriter, status int, value any) {
	text, encoded := value.(json.RawMessage)
	if !encoded {
		text = MustJSON(value)
	}
	out.Header().Set("Content-Type", "application/json")
	out.WriteHeader(status)
	_, _ = out.Write(text)
}

// MustJSON encodes a value that JSON can represent.
func MustJSON(value any) []byte {
	text, err := json.Marshal(value)
	if err != nil {
		panic(fmt.Sprintf("mock worker: %v", err))
	}
	return text
}
