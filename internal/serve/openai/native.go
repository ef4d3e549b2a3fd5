package openai

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/proxy"
)

const (
	// askedInTurn is the number of workers to which a question that any of them can answer
	// is sent in turn, and askTimeout the time for each.
	askedInTurn = 3
	askTimeout  = 5 * time.Second
	// healthTimeout bounds the question whether a worker generates: SGLang itself
	// gives up after 20 s.
	healthTimeout = 25 * time.Second
	// answerLimit bounds a worker's answer, bodyLimit a client's request to abort,
	// bytes.
	answerLimit, bodyLimit = 1 << 20, 64 << 10
	// leastRID is the shortest name of an engine by which a client may abort a request, bytes:
	// SGLang ends all whose names begin with it, and its own are random.
	leastRID = 8
)

// errNoSGLang refuses a request for SGLang where only other workers are up.
var errNoSGLang = errors.New("this route needs an SGLang worker, and none is up: use /v1/chat/completions or /v1/completions")

// serveNative adds SGLang's own short routes to those of clients. own guards those that
// pages of other sites may not call.
func (a *API) serveNative(clients gin.IRoutes, own gin.HandlerFunc) {
	for _, path := range []string{"/get_model_info", "/model_info"} {
		clients.GET(path, func(c *gin.Context) { a.askFirst(c, path, func(answer []byte) []byte { return answer }) })
	}
	for _, path := range infoRoutes {
		clients.Any(path, own, func(c *gin.Context) {
			if len(a.sglangWorkers()) == 0 || c.Request.Method != http.MethodGet {
				a.admin(c)
				return
			}
			a.askFirst(c, path, shownInfo)
		})
	}
	clients.GET("/v1/loads", a.loads)
	clients.GET("/health_generate", a.healthGenerate)
	clients.POST("/abort_request", own, a.abortRequest)
	clients.Any(flushRoute, own, func(c *gin.Context) {
		if !a.settings.AllowEngineAdmin || len(a.someSGLang(c)) > 0 {
			a.admin(c)
		}
	})
}

// flushRoute empties the caches of SGLang workers. They publish that, so the index
// follows.
const flushRoute = "/flush_cache"

// infoRoutes describe a server. SGLang's answer has its keys, so as administration
// routes they are those of other workers only.
var infoRoutes = []string{"/get_server_info", "/server_info"}

// having returns those workers that have an administration route.
func having(path string, targets []kv.Target) []kv.Target {
	flushes := path == flushRoute
	if !flushes && !slices.Contains(infoRoutes, path) {
		return targets
	}
	return slices.DeleteFunc(slices.Clone(targets), func(t kv.Target) bool { return t.RunsSGLang() != flushes })
}

// lacksSGLang reports that workers are up, and none runs SGLang.
func (a *API) lacksSGLang() bool {
	return a.models.Count() > 0 && !a.models.Has((*kv.Target).RunsSGLang)
}

// sglangWorkers returns one target of each SGLang worker that is up; those that only
// compute prompts come last.
func (a *API) sglangWorkers() []kv.Target {
	targets := slices.DeleteFunc(a.models.Targets(), func(t kv.Target) bool { return !t.RunsSGLang() })
	targets = kv.OnePerWorker(targets)
	rank := func(t kv.Target) int {
		if t.Role == kv.RolePrefill {
			return 1
		}
		return 0
	}
	slices.SortStableFunc(targets, func(a, b kv.Target) int { return rank(a) - rank(b) })
	return targets
}

// someSGLang returns SGLang workers; none: the request has been answered.
func (a *API) someSGLang(c *gin.Context) []kv.Target {
	targets := a.sglangWorkers()
	a.refuseWithout(c, targets, errNoSGLang)
	return targets
}

// refuseWithout refuses a request for which there are no targets: with that error if other workers
// are up.
func (a *API) refuseWithout(c *gin.Context, targets []kv.Target, others error) {
	switch {
	case len(targets) > 0:
	case a.models.Count() > 0:
		a.fail(c, http.StatusNotFound, "", others.Error())
	default:
		c.Header("Retry-After", "5")
		a.fail(c, http.StatusServiceUnavailable, "", "no worker is ready: try again in a few seconds")
	}
}

// askFirst answers with what show makes of the answer of the first worker that gives
// one.
func (a *API) askFirst(c *gin.Context, path string, show func(answer []byte) []byte) {
	targets := a.someSGLang(c)
	if len(targets) == 0 {
		return
	}
	q := a.question(c, nil)
	for _, t := range targets[:min(len(targets), askedInTurn)] {
		ctx, cancel := context.WithTimeout(c.Request.Context(), askTimeout)
		status, answer, err := a.proxy.Ask(ctx, t, http.MethodGet, path, q.Header.Clone(), nil)
		cancel()
		if err == nil && status == http.StatusOK && len(answer) <= answerLimit && gjson.ValidBytes(answer) {
			c.Data(http.StatusOK, "application/json", show(answer))
			return
		}
	}
	a.fail(c, http.StatusBadGateway, "", "no SGLang worker answered "+path)
}

// infoShown are the members of /server_info that clients may know, and stateShown
// those of each rank's internal state. All others stay here: among them are the
// server's keys and paths. Ranks and roles are left out, since they are
// one worker's and would mislead a router in front of this one.
var (
	infoShown = []string{
		"served_model_name", "version", "status", "model_impl", "dtype", "quantization", "kv_cache_dtype", "device", "context_length",
		"is_embedding",
		"tp_size", "pp_size", "ep_size", "page_size", "max_total_num_tokens", "max_req_input_len", "max_running_requests", "max_total_tokens",
		"max_prefill_tokens", "chunked_prefill_size", "mem_fraction_static", "schedule_policy", "attention_backend", "sampling_backend",
		"grammar_backend",
		"disable_radix_cache", "radix_eviction_policy", "enable_cache_report", "stream_interval", "reasoning_parser", "tool_call_parser",
		"speculative_algorithm", "cuda_graph_config",
	}
	stateShown = []string{"last_gen_throughput", "avg_spec_accept_length", "effective_max_running_requests_per_dp", "memory_usage",
		"step_time_dict"}
)

// shownInfo returns what of /server_info clients may know.
func shownInfo(answer []byte) []byte {
	info := gjson.ParseBytes(answer)
	fields := chosen(info, infoShown)
	states := []json.RawMessage{}
	info.Get("internal_states").ForEach(func(_, state gjson.Result) bool {
		states = append(states, jsonbody.AppendObject(nil, chosen(state, stateShown)))
		return len(states) < kv.MaxRanks
	})
	text, _ := json.Marshal(states) // of objects that were made here
	return jsonbody.AppendObject(nil, append(fields, jsonbody.Field{Key: "internal_states", Raw: string(text)}))
}

// chosen returns those members of an object that are among names.
func chosen(object gjson.Result, names []string) (fields []jsonbody.Field) {
	for _, m := range jsonbody.Members(object) {
		if slices.Contains(names, m.Key) {
			fields = append(fields, jsonbody.Field{Key: m.Key, Raw: m.Value.Raw})
		}
	}
	return fields
}

// loads lists the loads of every rank of every worker, each with its worker's id. A
// worker that does not answer is left out.
func (a *API) loads(c *gin.Context) {
	if format := c.Query("format"); format != "" && format != "json" {
		a.fail(c, http.StatusBadRequest, "", "format must be json; for Prometheus use /metrics")
		return
	}
	targets := a.someSGLang(c)
	if len(targets) == 0 {
		return
	}
	byWorker := map[uint64][]byte{}
	ctx, cancel := context.WithTimeout(c.Request.Context(), askTimeout)
	defer cancel()
	q := a.question(c, nil)
	q.Limit = answerLimit
	a.proxy.AskAll(ctx, targets, q, func(answer proxy.Answer) bool {
		if answer.Err == nil && answer.Status == http.StatusOK && gjson.ValidBytes(answer.Body) {
			byWorker[answer.Target.Key.Worker] = answer.Body
		}
		return true
	})
	if len(byWorker) == 0 {
		a.fail(c, http.StatusBadGateway, "", "no SGLang worker answered /v1/loads")
		return
	}
	loads := []json.RawMessage{}
	version := ""
	for _, t := range targets {
		answer := gjson.ParseBytes(byWorker[t.Key.Worker])
		if reported := answer.Get("version").Str; version == "" {
			version = reported
		}
		id := jsonbody.Field{Key: "worker_id", Raw: strconv.FormatUint(t.Key.Worker, 10)}
		ranks := 0
		answer.Get("loads").ForEach(func(_, load gjson.Result) bool {
			if load.IsObject() {
				loads = append(loads, jsonbody.AppendObject(nil, append([]jsonbody.Field{id}, chosenBut(load, "worker_id")...)))
				ranks++
			}
			return ranks < kv.MaxRanks
		})
	}
	c.JSON(http.StatusOK, gin.H{"timestamp": time.Now().UTC().Format("2006-01-02T15:04:05.000000+00:00"), "version": version, "loads": loads})
}

// chosenBut returns the members of an object but for one.
func chosenBut(object gjson.Result, but string) (fields []jsonbody.Field) {
	for _, m := range jsonbody.Members(object) {
		if m.Key != but {
			fields = append(fields, jsonbody.Field{Key: m.Key, Raw: m.Value.Raw})
		}
	}
	return fields
}

// healthGenerate reports whether a worker generates: the first that does answers.
func (a *API) healthGenerate(c *gin.Context) {
	targets := a.someSGLang(c)
	if len(targets) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), healthTimeout)
	defer cancel()
	well := false
	a.proxy.AskAll(ctx, targets[:min(len(targets), askedInTurn)], a.question(c, nil), func(answer proxy.Answer) bool {
		well = answer.Err == nil && answer.Status == http.StatusOK && answer.Target.Role != kv.RolePrefill
		return !well
	})
	if !well {
		a.fail(c, http.StatusServiceUnavailable, "", "no SGLang worker can generate")
		return
	}
	c.Status(http.StatusOK)
}

// abortRequest ends requests on every worker: those of a name that the client gave, or all.
func (a *API) abortRequest(c *gin.Context) {
	text, ok := a.smallBody(c, bodyLimit)
	if !ok {
		return
	}
	body, ok := jsonbody.Parse(text)
	if !ok {
		a.fail(c, http.StatusBadRequest, "", `the body must be a JSON object with "rid", or with "abort_all": true`)
		return
	}
	rid, all := body.Get(ridKey), body.Get("abort_all").Bool()
	switch {
	case all && !a.administers(c, "abort_all"):
		return
	case !all && (rid.Type != gjson.String || rid.Str == ""):
		a.fail(c, http.StatusBadRequest, "", "rid: give the name of one request")
		return
	}
	targets := a.someSGLang(c)
	if len(targets) == 0 {
		return
	}
	if all {
		a.abort(c, targets, `{"abort_all":true}`)
		return
	}
	own := a.keys.Of(c).Owner().Scoped(rid.Str)
	asked := []string{fmt.Sprintf(`{"rid":%s}`, proxy.Quoted(own))}
	if !a.keys.Several() && own != rid.Str && len(rid.Str) >= leastRID { // an engine has named it
		asked = append(asked, fmt.Sprintf(`{"rid":%s}`, proxy.Quoted(rid.Str)))
	}
	a.abort(c, targets, asked...)
}

// abort sends bodies of an abort to all targets.
func (a *API) abort(c *gin.Context, targets []kv.Target, bodies ...string) {
	ctx, cancel := context.WithTimeout(c.Request.Context(), askTimeout)
	defer cancel()
	worst := http.StatusOK
	for _, body := range bodies {
		q := a.question(c, []byte(body))
		q.Header.Set("Content-Type", "application/json")
		a.proxy.AskAll(ctx, targets, q, func(answer proxy.Answer) bool {
			if answer.Err != nil {
				answer.Status = http.StatusBadGateway
			}
			worst = max(worst, answer.Status)
			return true
		})
	}
	if worst >= http.StatusBadRequest {
		a.fail(c, http.StatusBadGateway, "", fmt.Sprintf("not every worker accepted the abort: the worst status was %d", worst))
		return
	}
	c.Status(http.StatusOK)
}
