package mocker

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/prompt/tokens"
)

// SGLangVersion is the SGLang version that mock workers imitate with --mock
// api=sglang.
const SGLangVersion = "0.5.23"

const (
	flushed = "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will " +
		"not be performed.)\n"
	// reservedInput is how much shorter than the context SGLang's longest prompt is,
	// tokens.
	reservedInput = 6
)

func (w *Worker) addSGLangRoutes(mux *http.ServeMux) {
	for _, path := range []string{"/health", "/health_generate", "/ping"} {
		mux.HandleFunc("GET "+path, func(http.ResponseWriter, *http.Request) {})
	}
	mux.HandleFunc("GET /ready", func(out http.ResponseWriter, _ *http.Request) {
		if w.held.Load() {
			out.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	for _, path := range []string{"/server_info", "/get_server_info"} {
		mux.HandleFunc("GET "+path, w.serverInfo)
	}
	for _, path := range []string{"/model_info", "/get_model_info"} {
		mux.HandleFunc("GET "+path, w.modelInfo)
	}
	mux.HandleFunc("GET /v1/models", w.models)
	mux.HandleFunc("GET /v1/loads", w.loadsPage)
	mux.HandleFunc("GET /metrics", w.sglangMetrics)
	for _, method := range []string{"GET ", "POST "} {
		mux.HandleFunc(method+"/flush_cache", w.flushCache)
	}
	post := func(path string, serve http.HandlerFunc) { mux.HandleFunc("POST "+path, jsonOnly(w, serve)) }
	post("/abort_request", w.abortRequest)
	w.addSGLangTraining(post)
	post("/generate", w.infers(generateKind))
	mux.HandleFunc("PUT /generate", jsonOnly(w, w.infers(generateKind)))
	post("/v1/chat/completions", w.infers(chatKind))
	post("/v1/completions", w.infers(completionKind))
	w.addForms(mux, post)
	for _, prefix := range []string{"", "/v1"} {
		post(prefix+"/tokenize", w.serve(w.sglangTokenize))
		post(prefix+"/detokenize", w.serve(w.sglangDetokenize))
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
	args := map[string]any{
		"model_path": name, "tokenizer_path": name, "served_model_name": name, "host": w.cfg.host(), "port": ports.HTTP + w.number,
		"page_size": w.cfg.BlockSize, "dp_size": ports.Ranks, "tp_size": 1, "pp_size": 1, "nnodes": 1, "node_rank": 0, "context_length": nil,
		"disaggregation_mode": w.role(), "disaggregation_bootstrap_port": cmp.Or(w.part.Bootstrap.Port, kv.SGLangPort), "dist_init_addr": nil,
		"disaggregation_transfer_backend":          "mooncake",
		"disaggregation_decode_enable_radix_cache": false, "disable_radix_cache": false, "enable_cache_report": true, "enable_metrics": true,
		"schedule_policy": "fcfs", "radix_eviction_policy": "lru", "load_balance_method": "round_robin", "weight_version": w.weights(),
		"max_running_requests": w.cfg.MaxNumSeqs, "max_total_tokens": w.capacity(), "max_prefill_tokens": w.cfg.MaxNumBatchedTokens,
		"chunked_prefill_size": w.cfg.MaxNumBatchedTokens, "api_key": nil, "kv_events_config": nil,
	}
	if len(w.cfg.Tiers()) > 0 {
		args["enable_hierarchical_cache"] = true
	}
	if w.cfg.DiskBlocks > 0 {
		args["hicache_storage_backend"] = "file"
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
			"replay_endpoint": fmt.Sprintf("tcp://*:%d", ports.KVReplay+first), "enable_kv_cache_events": true, "buffer_steps": w.cfg.BufferSteps,
		}))
	}
	states := make([]any, 0, len(w.Ranks))
	for range w.Ranks {
		state := map[string]any{
			"effective_max_running_requests_per_dp": w.cfg.MaxNumSeqs, "last_gen_throughput": 0.0, "world_size": 1,
			"memory_usage": map[string]any{"weight": 0.0, "kvcache": 0.0, "token_capacity": w.capacity(), "token_capacity_swa": nil},
		}
		maps.Copy(state, args)
		states = append(states, state)
	}
	info := map[string]any{
		"launch_command": "--model-path " + name, "status": "ready", "max_total_num_tokens": w.capacity(),
		"max_req_input_len": max(0, w.maxModelLen-reservedInput), "kv_events": follow,
		"internal_states": states, "version": SGLangVersion, "frontend": "python",
	}
	maps.Copy(info, args)
	answerJSON(out, http.StatusOK, info)
}

func (w *Worker) modelInfo(out http.ResponseWriter, _ *http.Request) {
	name := w.cfg.ServedModelName
	answerJSON(out, http.StatusOK, map[string]any{
		"model_path": name, "served_model_name": name, "tokenizer_path": name, "is_generation": true, "preferred_sampling_params": nil,
		"weight_version": w.weights(), "load_format": "auto", "reasoning_parser": nil, "tool_call_parser": nil, "disaggregation_mode": w.role(),
		"has_image_understanding": false, "has_audio_understanding": false, "model_type": "llama", "architectures": []string{"LlamaForCausalLM"},
	})
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
			"num_active_tokens": load.Used, "num_prealloc_ready_tokens": 0, "max_total_num_tokens": w.capacity(), "max_running_requests": w.cfg.MaxNumSeqs,
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
		"timestamp": now.UTC().Format("2006-01-02T15:04:05.000000-07:00"), "version": SGLangVersion, "accelerator": nil, "num_accelerators": 1,
		"loads": loads,
	})
}

func (w *Worker) flushCache(out http.ResponseWriter, in *http.Request) {
	switch idle, ended := w.resetCaches(in.Context(), true); {
	case ended:
	case idle:
		fmt.Fprint(out, flushed)
	default:
		http.Error(out, "Flush cache failed.", http.StatusBadRequest)
	}
}

// sglangTokenize returns the tokens of a text, a list of texts, or a chat.
func (w *Worker) sglangTokenize(_ *http.Request, body *jsonbody.Body) (any, *refusal) {
	prompt := body.Get("prompt")
	answer := map[string]any{"max_model_len": w.maxModelLen}
	switch {
	case IsNull(prompt) == IsNull(body.Get("messages")):
		return nil, &refusal{http.StatusBadRequest, badBody, "Exactly one of 'prompt' or 'messages' must be provided.", ""}
	case prompt.IsArray():
		plain := body.Get("add_special_tokens").Type == gjson.False
		lists, counts := [][]uint32{}, []int{}
		for _, text := range prompt.Array() {
			if text.Type != gjson.String {
				return nil, badField("prompt", "string", text)
			}
			list := w.model.Encode(text.Str, !plain)
			lists, counts = append(lists, list), append(counts, len(list))
		}
		answer["tokens"], answer["count"] = lists, counts
	case IsNull(prompt) && IsNull(body.Get("add_generation_prompt")): // as for a chat completion
		list, err := w.model.SGLangChatTokens(body)
		if err != nil {
			return nil, invalid("%v", err)
		}
		answer["tokens"], answer["count"] = list, len(list)
	default:
		text, err := w.model.Tokenize(body.Raw)
		if err != nil {
			return nil, invalid("%v", err)
		}
		answer["tokens"], answer["count"] = json.RawMessage(gjson.GetBytes(text, "tokens").Raw), gjson.GetBytes(text, "count").Int()
	}
	return answer, nil
}

// sglangDetokenize returns the text of a list of tokens, or of several.
func (w *Worker) sglangDetokenize(_ *http.Request, body *jsonbody.Body) (any, *refusal) {
	given := body.Get("tokens")
	lists := []gjson.Result{given}
	several := given.Get("0").IsArray()
	if several {
		lists = given.Array()
	}
	var texts []string
	for _, list := range lists {
		ids, err := tokens.ReadTokens(list)
		if err != nil {
			return nil, badField("tokens", "list of integers", list)
		}
		texts = append(texts, w.model.Decode(ids))
	}
	if several {
		return map[string]any{"text": texts}, nil
	}
	return map[string]any{"text": texts[0]}, nil
}
