package mocker

import (
	"encoding/json"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/engine"
	"kvrouter/internal/kv"
	"kvrouter/internal/process"
	"kvrouter/internal/tokens"
)

// SGLangVersion is the SGLang version that mock workers imitate with --mock-api
// sglang.
const SGLangVersion = "0.5.23"

const (
	flushed = "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n"
	// reservedInput is how much shorter than the context SGLang's longest prompt is,
	// tokens.
	reservedInput = 6
)

func (w *Worker) addSGLangRoutes(mux *http.ServeMux) {
	for _, path := range []string{"/health", "/health_generate", "/ping", "/ready"} {
		mux.HandleFunc("GET "+path, func(http.ResponseWriter, *http.Request) {})
	}
	for _, path := range []string{"/server_info", "/get_server_info"} {
		mux.HandleFunc("GET "+path, w.serverInfo)
	}
	for _, path := range []string{"/model_info", "/get_model_info"} {
		mux.HandleFunc("GET "+path, w.modelInfo)
	}
	mux.HandleFunc("GET /v1/models", w.sglangModels)
	mux.HandleFunc("GET /v1/loads", w.loadsPage)
	mux.HandleFunc("GET /metrics", w.sglangMetrics)
	for _, method := range []string{"GET ", "POST "} {
		mux.HandleFunc(method+"/flush_cache", w.flushCache)
	}
	post := func(path string, serve http.HandlerFunc) { mux.HandleFunc("POST "+path, jsonOnly(w, serve)) }
	infer := func(of kind) http.HandlerFunc {
		return func(out http.ResponseWriter, in *http.Request) { w.infer(out, in, of) }
	}
	post("/abort_request", w.abortRequest)
	post("/generate", infer(generateKind))
	mux.HandleFunc("PUT /generate", jsonOnly(w, infer(generateKind)))
	post("/v1/chat/completions", infer(chatKind))
	post("/v1/completions", infer(completionKind))
	for _, prefix := range []string{"", "/v1"} {
		post(prefix+"/tokenize", w.sglangTokenize)
		post(prefix+"/detokenize", w.sglangDetokenize)
	}
	mux.HandleFunc("/", func(out http.ResponseWriter, _ *http.Request) {
		answerJSON(out, http.StatusNotFound, map[string]any{"detail": "Not Found"})
	})
}

// jsonOnly refuses a body that does not say that it is JSON.
func jsonOnly(w *Worker, serve http.HandlerFunc) http.HandlerFunc {
	return func(out http.ResponseWriter, in *http.Request) {
		if media, _, _ := mime.ParseMediaType(in.Header.Get("Content-Type")); media != "application/json" {
			w.writeError(out, in, &refusal{http.StatusBadRequest, badBody, "Unsupported Media Type: Only 'application/json' is allowed", ""})
			return
		}
		serve(out, in)
	}
}

// role is the worker's part in SGLang's words.
func (w *Worker) role() string {
	if w.part.Kind != kv.KindSGLang {
		return "null"
	}
	return w.part.Role.String()
}

// serverInfo returns the server's start arguments and the data needed to follow it.
func (w *Worker) serverInfo(out http.ResponseWriter, _ *http.Request) {
	name, ports := w.cfg.ServedModelName, w.cfg.Ports
	first := w.number * ports.Ranks
	bootstrap := w.part.Bootstrap.Port
	if bootstrap == 0 {
		bootstrap = kv.SGLangPort
	}
	args := map[string]any{
		"model_path": name, "tokenizer_path": name, "served_model_name": name, "host": w.cfg.host(), "port": ports.HTTP + w.number,
		"page_size": w.cfg.BlockSize, "dp_size": ports.Ranks, "tp_size": 1, "pp_size": 1, "nnodes": 1, "node_rank": 0, "context_length": nil,
		"disaggregation_mode": w.role(), "disaggregation_bootstrap_port": bootstrap, "dist_init_addr": nil, "disaggregation_transfer_backend": "mooncake",
		"disaggregation_decode_enable_radix_cache": false, "disable_radix_cache": false, "enable_cache_report": true, "enable_metrics": true,
		"schedule_policy": "fcfs", "radix_eviction_policy": "lru", "load_balance_method": "round_robin", "weight_version": "default",
		"max_running_requests": w.cfg.MockMaxNumSeqs, "max_total_tokens": w.capacity(), "max_prefill_tokens": w.cfg.MockMaxNumBatchedTokens,
		"chunked_prefill_size": w.cfg.MockMaxNumBatchedTokens, "api_key": nil, "kv_events_config": nil,
	}
	var follow map[string]any
	if w.cfg.KVEvents {
		follow = map[string]any{
			"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": ports.KVEvents + first, "topic": process.KVEventsTopic,
			"block_size": w.cfg.BlockSize, "dp_size": ports.Ranks, "replay_endpoint_port_base": ports.KVReplay + first,
			"load_endpoint_port_base": ports.Load + first, "load_topic": loadTopic,
		}
		args["kv_events_config"] = string(MustJSON(map[string]any{
			"publisher": "zmq", "topic": process.KVEventsTopic, "endpoint": fmt.Sprintf("tcp://*:%d", ports.KVEvents+first),
			"replay_endpoint": fmt.Sprintf("tcp://*:%d", ports.KVReplay+first), "enable_kv_cache_events": true, "buffer_steps": w.cfg.MockBufferSteps,
		}))
	}
	states := make([]any, 0, len(w.Ranks))
	for range w.Ranks {
		state := map[string]any{
			"effective_max_running_requests_per_dp": w.cfg.MockMaxNumSeqs, "last_gen_throughput": 0.0, "world_size": 1,
			"memory_usage": map[string]any{"weight": 0.0, "kvcache": 0.0, "token_capacity": w.capacity(), "token_capacity_swa": nil},
		}
		for key, value := range args {
			state[key] = value
		}
		states = append(states, state)
	}
	info := map[string]any{
		"launch_command": "--model-path " + name, "status": "ready", "max_total_num_tokens": w.capacity(),
		"max_req_input_len": max(0, w.maxModelLen-reservedInput), "kv_events": follow,
		"internal_states": states, "version": SGLangVersion, "frontend": "python",
	}
	for key, value := range args {
		info[key] = value
	}
	answerJSON(out, http.StatusOK, info)
}

func (w *Worker) modelInfo(out http.ResponseWriter, _ *http.Request) {
	name := w.cfg.ServedModelName
	answerJSON(out, http.StatusOK, map[string]any{
		"model_path": name, "served_model_name": name, "tokenizer_path": name, "is_generation": true, "preferred_sampling_params": nil,
		"weight_version": "default", "load_format": "auto", "reasoning_parser": nil, "tool_call_parser": nil, "disaggregation_mode": w.role(),
		"has_image_understanding": false, "has_audio_understanding": false, "model_type": "llama", "architectures": []string{"LlamaForCausalLM"},
	})
}

func (w *Worker) sglangModels(out http.ResponseWriter, _ *http.Request) {
	created := w.started.Unix()
	card := func(name string, parent, longest any) map[string]any {
		return map[string]any{
			"id": name, "object": "model", "created": created, "owned_by": "sglang", "root": name, "parent": parent, "max_model_len": longest,
		}
	}
	cards := []any{card(w.cfg.ServedModelName, nil, w.maxModelLen)}
	for _, adapter := range w.loaded() {
		cards = append(cards, card(adapter.Name, w.cfg.ServedModelName, nil))
	}
	answerJSON(out, http.StatusOK, map[string]any{"object": "list", "data": cards})
}

// loadsPage serves /v1/loads.
func (w *Worker) loadsPage(out http.ResponseWriter, in *http.Request) {
	query := in.URL.Query()
	wants := func(section string) bool {
		include := query.Get("include")
		return include == "" || strings.Contains(","+include+",", ","+section+",") || strings.Contains(","+include+",", ",all,")
	}
	ranks := w.Ranks
	if asked := query.Get("dp_rank"); asked != "" {
		number, err := strconv.Atoi(asked)
		if err != nil || number < 0 || number >= len(ranks) {
			w.writeError(out, in, &refusal{http.StatusBadRequest, "400", fmt.Sprintf("dp_rank=%s out of range [0, %d)", asked, len(ranks)), ""})
			return
		}
		ranks = ranks[number : number+1]
	}
	now := time.Now()
	var loads []any
	for _, r := range ranks {
		load := r.CurrentLoad()
		share := float64(load.Used) / float64(w.capacity())
		entry := map[string]any{
			"timestamp": float64(now.UnixNano()) / 1e9, "dp_rank": r.number, "num_running_reqs": load.Running, "num_waiting_reqs": load.Waiting,
			"num_waiting_uncached_tokens": load.Uncached, "num_used_tokens": load.Used, "num_total_tokens": load.Used + load.Queued,
			"num_active_tokens": load.Used, "num_prealloc_ready_tokens": 0, "max_total_num_tokens": w.capacity(), "max_running_requests": w.cfg.MockMaxNumSeqs,
			"token_usage": share, "gen_throughput": 0.0, "cache_hit_rate": r.hitRate(), "utilization": 0.0,
			"total_prefill_uncached_tokens": r.Counts.prefilled.Load(), "total_prefill_busy_us": r.Counts.prefillMicros.Load(),
		}
		if wants("memory") {
			entry["memory"] = map[string]any{"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0, "token_capacity": w.capacity()}
		}
		if wants("disagg") {
			entry["disaggregation"] = map[string]any{
				"mode": w.role(), "prefill_bootstrap_queue_reqs": 0, "prefill_inflight_queue_reqs": 0, "decode_prealloc_queue_reqs": 0,
				"decode_transfer_queue_reqs": 0, "decode_retracted_queue_reqs": 0, "kv_transfer_speed_gb_s": 0.0, "kv_transfer_latency_ms": 0.0,
			}
		}
		if wants("queues") {
			entry["queues"] = map[string]any{"waiting": load.Waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0}
		}
		loads = append(loads, entry)
	}
	answerJSON(out, http.StatusOK, map[string]any{
		"timestamp": now.UTC().Format("2006-01-02T15:04:05.000000-07:00"), "version": SGLangVersion, "accelerator": nil, "num_accelerators": 1, "loads": loads,
	})
}

// hitRate is the share of the prompts' tokens that were in the cache, 0 to 1.
func (r *Rank) hitRate() float64 {
	return float64(r.Counts.prefixHits.Load()) / float64(max(1, r.Counts.prefixQueries.Load()))
}

// sglangMetrics serves the part of SGLang's Prometheus page that others read.
func (w *Worker) sglangMetrics(out http.ResponseWriter, _ *http.Request) {
	kindOfEngine := "unified"
	if w.part.Role != kv.RoleBoth {
		kindOfEngine = w.part.Role.String()
	}
	var page []byte
	sample := func(name, more string, r *Rank, value float64) {
		labels := fmt.Sprintf(`engine_type=%q,model_name=%q,moe_ep_rank="0",pp_rank="0",tp_rank="0"`, kindOfEngine, w.cfg.ServedModelName)
		if len(w.Ranks) > 1 {
			labels = fmt.Sprintf(`dp_rank="%d",%s`, r.number, labels)
		}
		page = fmt.Appendf(page, "sglang:%s{%s%s} %s\n", name, labels, more, strconv.FormatFloat(value, 'f', -1, 64))
	}
	gauge := func(name string, value func(*Rank, Load) float64) {
		page = fmt.Appendf(page, "# TYPE sglang:%s gauge\n", name)
		for _, r := range w.Ranks {
			sample(name, "", r, value(r, r.CurrentLoad()))
		}
	}
	counter := func(name string, value func(*counts) *atomic.Int64) {
		page = fmt.Appendf(page, "# TYPE sglang:%s counter\n", name)
		for _, r := range w.Ranks {
			sample(name, "", r, float64(value(&r.Counts).Load()))
		}
	}
	capacity, blockSize := float64(w.capacity()), float64(w.cfg.BlockSize)
	available := func(r *Rank) float64 { return float64(r.free.Load()) * blockSize }
	gauge("num_running_reqs", func(_ *Rank, l Load) float64 { return float64(l.Running) })
	gauge("num_queue_reqs", func(_ *Rank, l Load) float64 { return float64(l.Waiting) })
	gauge("token_usage", func(_ *Rank, l Load) float64 { return float64(l.Used) / capacity })
	gauge("num_used_tokens", func(_ *Rank, l Load) float64 { return float64(l.Used) })
	gauge("kv_available_tokens", func(r *Rank, _ Load) float64 { return available(r) })
	gauge("kv_evictable_tokens", func(r *Rank, l Load) float64 { return max(0, capacity-available(r)-float64(l.Used)) })
	gauge("kv_used_tokens", func(_ *Rank, l Load) float64 { return float64(l.Used) })
	gauge("max_total_num_tokens", func(*Rank, Load) float64 { return capacity })
	gauge("page_size", func(*Rank, Load) float64 { return blockSize })
	gauge("num_pages", func(*Rank, Load) float64 { return capacity / blockSize })
	gauge("cache_hit_rate", func(r *Rank, _ Load) float64 { return r.hitRate() })
	gauge("gen_throughput", func(*Rank, Load) float64 { return 0 })
	for _, name := range []string{"prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer"} {
		gauge("num_"+name+"_queue_reqs", func(*Rank, Load) float64 { return 0 })
	}
	counter("prompt_tokens_total", func(c *counts) *atomic.Int64 { return &c.PromptTokens })
	counter("generation_tokens_total", func(c *counts) *atomic.Int64 { return &c.GenerationTokens })
	counter("evicted_tokens_total", func(c *counts) *atomic.Int64 { return &c.evicted })
	counter("num_aborted_requests_total", func(c *counts) *atomic.Int64 { return &c.Aborted })
	page = append(page, "# TYPE sglang:num_requests_total counter\n"...)
	for _, r := range w.Ranks {
		c := &r.Counts
		sample("num_requests_total", "", r, float64(c.finishedLength.Load()+c.finishedStop.Load()+c.Aborted.Load()))
	}
	page = append(page, "# TYPE sglang:prefill_effective_tokens_total counter\n"...)
	for _, r := range w.Ranks {
		sample("prefill_effective_tokens_total", `,mode="input"`, r, float64(r.Counts.prefilled.Load()))
		sample("prefill_effective_tokens_total", `,mode="device_hit"`, r, float64(r.Counts.prefixHits.Load()))
	}
	out.Header().Set("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
	_, _ = out.Write(page)
}

func (w *Worker) flushCache(out http.ResponseWriter, in *http.Request) {
	idle := true
	for _, rank := range w.Ranks {
		if !rank.Ask(in.Context(), func(e *engine.Engine) { idle = rank.ResetPrefixCache(e) && idle }) {
			return
		}
	}
	if !idle {
		http.Error(out, "Flush cache failed.", http.StatusBadRequest)
		return
	}
	fmt.Fprint(out, flushed)
}

// sglangTokenize serves /tokenize: a text, a list of texts, or a chat.
func (w *Worker) sglangTokenize(out http.ResponseWriter, in *http.Request) {
	body, ok := w.body(out, in)
	if !ok {
		return
	}
	prompt := body.Get("prompt")
	answer := map[string]any{"max_model_len": w.maxModelLen}
	switch {
	case IsNull(prompt) == IsNull(body.Get("messages")):
		w.writeError(out, in, &refusal{http.StatusBadRequest, badBody, "Exactly one of 'prompt' or 'messages' must be provided.", ""})
		return
	case prompt.IsArray():
		plain := body.Get("add_special_tokens").Type == gjson.False
		lists, counts := [][]uint32{}, []int{}
		for _, text := range prompt.Array() {
			if text.Type != gjson.String {
				w.writeError(out, in, badField("prompt", "string", text))
				return
			}
			list := w.model.Encode(text.Str, !plain)
			lists, counts = append(lists, list), append(counts, len(list))
		}
		answer["tokens"], answer["count"] = lists, counts
	case IsNull(prompt) && IsNull(body.Get("add_generation_prompt")): // as for a chat completion
		list, err := w.model.SGLangChatTokens(body)
		if err != nil {
			w.writeError(out, in, invalid("%v", err))
			return
		}
		answer["tokens"], answer["count"] = list, len(list)
	default:
		text, err := w.model.Tokenize(body.Raw)
		if err != nil {
			w.writeError(out, in, invalid("%v", err))
			return
		}
		answer["tokens"], answer["count"] = json.RawMessage(gjson.GetBytes(text, "tokens").Raw), gjson.GetBytes(text, "count").Int()
	}
	answerJSON(out, http.StatusOK, answer)
}

// sglangDetokenize serves /detokenize: a list of tokens, or several.
func (w *Worker) sglangDetokenize(out http.ResponseWriter, in *http.Request) {
	body, ok := w.body(out, in)
	if !ok {
		return
	}
	given := body.Get("tokens")
	decode := func(list gjson.Result) (string, bool) {
		ids, err := tokens.ReadTokens(list)
		return w.model.Decode(ids), err == nil && list.IsArray()
	}
	if !given.Get("0").IsArray() {
		text, ok := decode(given)
		if !ok {
			w.writeError(out, in, badField("tokens", "list of integers", given))
			return
		}
		answerJSON(out, http.StatusOK, map[string]any{"text": text})
		return
	}
	texts := []string{}
	for _, list := range given.Array() {
		text, ok := decode(list)
		if !ok {
			w.writeError(out, in, badField("tokens", "list of integers", list))
			return
		}
		texts = append(texts, text)
	}
	answerJSON(out, http.StatusOK, map[string]any{"text": texts})
}
