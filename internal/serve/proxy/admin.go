package proxy

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
)

// AdminRoutes are the engines' administration and development paths. A request goes
// to every worker.
var AdminRoutes = []string{
	"/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/sleep", "/wake_up", "/is_sleeping",
	"/collective_rpc", "/start_profile", "/stop_profile", "/pause", "/resume", "/is_paused",
	"/scale_elastic_ep", "/is_scaling_elastic_ep", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
	"/update_weights", "/abort_requests", "/release_kv_cache_memory",
}

// AdminAnswer is one worker's answer to an administration request.
type AdminAnswer struct {
	Worker uint64          `json:"worker_id"`
	Status int             `json:"status"`
	Answer json.RawMessage `json:"answer,omitempty"` // if it is JSON
}

// Administer sends the request to all targets and returns their answers by worker,
// and the worst status; 502 stands for no answer.
func (p *Proxy) Administer(ctx context.Context, targets []kv.Target, q Question) (worst int, answers []AdminAnswer) {
	worst, answers = http.StatusOK, []AdminAnswer{}
	p.AskAll(ctx, targets, q, func(answer Answer) bool {
		if answer.Err != nil {
			answer.Status, answer.Body = http.StatusBadGateway, web.DialectOpenAI.JSON(web.Fault{Status: http.StatusBadGateway, Message: "the worker did not answer"})
		}
		worst = max(worst, answer.Status)
		entry := AdminAnswer{Worker: answer.Target.Key.Worker, Status: answer.Status}
		if gjson.ValidBytes(answer.Body) && len(answer.Body) > 0 {
			entry.Answer = answer.Body
		}
		answers = append(answers, entry)
		return true
	})
	slices.SortFunc(answers, func(a, b AdminAnswer) int {
		return kv.WorkerKey{Worker: a.Worker}.Compare(kv.WorkerKey{Worker: b.Worker})
	})
	return worst, answers
}
