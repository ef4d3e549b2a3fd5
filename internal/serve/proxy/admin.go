package proxy

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/fleet/control"
)

// AdminRoutes are the engines' administration and development paths on which one body is right
// for every worker. A request goes to all of them.
var AdminRoutes = []string{
	// of both
	"/start_profile", "/stop_profile", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/update_weight_version",
	// of vLLM
	"/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/sleep", "/wake_up", "/is_sleeping",
	"/collective_rpc", "/pause", "/resume", "/is_paused", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
	"/abort_requests", "/release_kv_cache_memory", "/get_world_size",
	"/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update",
	"/shutdown_weight_transfer_engine", "/weight_info", "/weight_checker",
	// of SGLang
	"/pause_generation", "/continue_generation", "/release_memory_occupation", "/resume_memory_occupation",
	"/begin_weight_update", "/update_weights_from_disk", "/end_weight_update", "/get_weights_by_name", "/weights_checker",
	"/load_lora_adapter", "/unload_lora_adapter", "/hicache/storage-backend/clear", "/slow_down", "/freeze_gc", "/set_trace_level",
	"/start_expert_distribution_record", "/stop_expert_distribution_record", "/dump_expert_distribution_record",
	"/add_external_corpus", "/remove_external_corpus", "/list_external_corpora",
}

// AdminAnswer is one worker's answer to an administration request.
type AdminAnswer struct {
	Worker uint64          `json:"worker_id"`
	Status int             `json:"status"`
	Answer json.RawMessage `json:"answer,omitempty"` // if it is JSON
}

// Administer sends the request to all targets and returns their answers by worker, and a status for all: theirs if all
// have the same, 207 if some have done it, else the worst; 502 stands for no answer.
func (p *Proxy) Administer(ctx context.Context, targets []kv.Target, q Question) (status int, answers []AdminAnswer) {
	status, answers = http.StatusOK, []AdminAnswer{}
	done := 0
	path, _, _ := strings.Cut(q.Path, "?")
	p.AskAll(ctx, targets, q, func(answer Answer) bool {
		if answer.Err != nil {
			answer.Status, answer.Body = http.StatusBadGateway, web.DialectOpenAI.JSON(web.Fault{Status: http.StatusBadGateway, Message: "the worker did not answer"})
		}
		result := controlFailed
		if control.Succeeded(answer.Status, answer.Body) {
			done, result = done+1, controlDone
		}
		p.controlCalls.WithLabelValues(path, result).Inc()
		status = max(status, answer.Status)
		entry := AdminAnswer{Worker: answer.Target.Key.Worker, Status: answer.Status}
		if gjson.ValidBytes(answer.Body) && len(answer.Body) > 0 {
			entry.Answer = answer.Body
		}
		answers = append(answers, entry)
		return true
	})
	if done > 0 && done < len(answers) {
		status = http.StatusMultiStatus
	}
	slices.SortFunc(answers, func(a, b AdminAnswer) int {
		return kv.WorkerKey{Worker: a.Worker}.Compare(kv.WorkerKey{Worker: b.Worker})
	})
	return status, answers
}
