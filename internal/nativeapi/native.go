// Package nativeapi answers SGLang's own short routes, for the SGLang workers that are
// up.
package nativeapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/jsonbody"
	"kvrouter/internal/kv"
	"kvrouter/internal/models"
	"kvrouter/internal/proxy"
)

const (
	// askedInTurn is how many workers are asked, one after the other, for what any of
	// them can tell, and askTimeout how long one may take for it.
	askedInTurn = 3
	askTimeout  = 5 * time.Second
	// healthTimeout bounds the question whether a worker generates: SGLang itself
	// gives up after 20 s.
	healthTimeout = 25 * time.Second
	// answerLimit bounds a worker's answer, bodyLimit a client's request to abort,
	// bytes.
	answerLimit, bodyLimit = 1 << 20, 64 << 10
	// leastRID is the shortest name by which a client may abort its requests, bytes:
	// SGLang ends all whose names begin with it, and its own are random.
	leastRID = 8
)

// ErrNone refuses a request for SGLang where only other workers are up.
var ErrNone = errors.New("this route is SGLang's, and no worker here runs SGLang: send /v1/chat/completions or /v1/completions")

// Routes are SGLang's short routes. All fields must be set.
type Routes struct {
	Models *models.Set
	Proxy  *proxy.Proxy
	Admin  bool // what changes or stops the work of others is allowed
	// Question is a client's request as it goes to workers.
	Question func(c *gin.Context, body []byte) proxy.Question
	// Fail answers with an error.
	Fail func(c *gin.Context, status int, message string)
}

// Serve adds the routes to those of clients. own guards those that pages of other
// sites may not ask; admin sends a request to every worker, if that is allowed.
func (n Routes) Serve(clients gin.IRoutes, own, admin gin.HandlerFunc) {
	for _, path := range []string{"/get_model_info", "/model_info"} {
		clients.GET(path, func(c *gin.Context) { n.first(c, path, func(answer []byte) []byte { return answer }) })
	}
	for _, path := range infoRoutes {
		clients.Any(path, own, func(c *gin.Context) {
			if len(n.workers()) == 0 || c.Request.Method != http.MethodGet {
				admin(c)
				return
			}
			n.first(c, path, shownInfo)
		})
	}
	clients.GET("/v1/loads", n.loads)
	clients.GET("/health_generate", n.healthGenerate)
	clients.POST("/abort_request", own, n.abort)
	clients.Any(flushRoute, own, func(c *gin.Context) {
		if !n.Admin || len(n.some(c)) > 0 {
			admin(c)
		}
	})
}

// flushRoute empties the caches of SGLang workers. They publish that, so the index
// follows.
const flushRoute = "/flush_cache"

// infoRoutes tell of a server. SGLang's answer has its keys, so as administration
// routes they are those of other workers only.
var infoRoutes = []string{"/get_server_info", "/server_info"}

// Having returns those workers that have an administration route.
func Having(path string, targets []kv.Target) []kv.Target {
	flushes := path == flushRoute
	if !flushes && !slices.Contains(infoRoutes, path) {
		return targets
	}
	return slices.DeleteFunc(slices.Clone(targets), func(t kv.Target) bool { return t.RunsSGLang() != flushes })
}

// Lacks tells that workers are up, and none runs SGLang.
func (n Routes) Lacks() bool {
	return n.Models.Count() > 0 && !n.Models.Has((*kv.Target).RunsSGLang)
}

// workers returns one target of each SGLang worker that is up; those that only
// compute prompts come last.
func (n Routes) workers() []kv.Target {
	targets := slices.DeleteFunc(n.Models.Targets(), func(t kv.Target) bool { return !t.RunsSGLang() })
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

// some returns workers; none: the request has been answered.
func (n Routes) some(c *gin.Context) []kv.Target {
	targets := n.workers()
	switch {
	case len(targets) > 0:
	case n.Lacks():
		n.Fail(c, http.StatusNotFound, ErrNone.Error())
	default:
		c.Header("Retry-After", "5")
		n.Fail(c, http.StatusServiceUnavailable, "no worker is ready: try again in a few seconds")
	}
	return targets
}

// first answers with what show makes of the answer of the first worker that gives
// one.
func (n Routes) first(c *gin.Context, path string, show func(answer []byte) []byte) {
	targets := n.some(c)
	if len(targets) == 0 {
		return
	}
	q := n.Question(c, nil)
	for _, t := range targets[:min(len(targets), askedInTurn)] {
		ctx, cancel := context.WithTimeout(c.Request.Context(), askTimeout)
		status, answer, err := n.Proxy.Ask(ctx, t, http.MethodGet, path, q.Header.Clone(), nil)
		cancel()
		if err == nil && status == http.StatusOK && len(answer) <= answerLimit && gjson.ValidBytes(answer) {
			c.Data(http.StatusOK, "application/json", show(answer))
			return
		}
	}
	n.Fail(c, http.StatusBadGateway, "no SGLang worker answered "+path)
}

// infoShown are the members of /server_info that clients may know, and stateShown
// those of each rank's internal state. All others stay here: among them are the
// server's keys and paths. What tells of ranks and roles is left out, since it is
// one worker's and would mislead a router in front of this one.
var (
	infoShown = []string{
		"served_model_name", "version", "status", "model_impl", "dtype", "quantization", "kv_cache_dtype", "device", "context_length", "is_embedding",
		"tp_size", "pp_size", "ep_size", "page_size", "max_total_num_tokens", "max_req_input_len", "max_running_requests", "max_total_tokens",
		"max_prefill_tokens", "chunked_prefill_size", "mem_fraction_static", "schedule_policy", "attention_backend", "sampling_backend", "grammar_backend",
		"disable_radix_cache", "radix_eviction_policy", "enable_cache_report", "stream_interval", "reasoning_parser", "tool_call_parser", "speculative_algorithm", "cuda_graph_config",
	}
	stateShown = []string{"last_gen_throughput", "avg_spec_accept_length", "effective_max_running_requests_per_dp", "memory_usage", "step_time_dict"}
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
func (n Routes) loads(c *gin.Context) {
	if format := c.Query("format"); format != "" && format != "json" {
		n.Fail(c, http.StatusBadRequest, "format: only json is here; /metrics has the loads for Prometheus")
		return
	}
	targets := n.some(c)
	if len(targets) == 0 {
		return
	}
	byWorker := map[uint64][]byte{}
	ctx, cancel := context.WithTimeout(c.Request.Context(), askTimeout)
	defer cancel()
	q := n.Question(c, nil)
	q.Limit = answerLimit
	n.Proxy.AskAll(ctx, targets, q, func(a proxy.Answer) bool {
		if a.Err == nil && a.Status == http.StatusOK && gjson.ValidBytes(a.Body) {
			byWorker[a.Target.Key.Worker] = a.Body
		}
		return true
	})
	if len(byWorker) == 0 {
		n.Fail(c, http.StatusBadGateway, "no SGLang worker answered /v1/loads")
		return
	}
	loads := []json.RawMessage{}
	version := ""
	for _, t := range targets {
		answer := gjson.ParseBytes(byWorker[t.Key.Worker])
		if told := answer.Get("version").Str; version == "" {
			version = told
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

// healthGenerate tells whether a worker generates: the first that does answers.
func (n Routes) healthGenerate(c *gin.Context) {
	targets := n.some(c)
	if len(targets) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), healthTimeout)
	defer cancel()
	well := false
	n.Proxy.AskAll(ctx, targets[:min(len(targets), askedInTurn)], n.Question(c, nil), func(a proxy.Answer) bool {
		well = a.Err == nil && a.Status == http.StatusOK && a.Target.Role != kv.RolePrefill
		return !well
	})
	if !well {
		n.Fail(c, http.StatusServiceUnavailable, "no SGLang worker that was asked generates")
		return
	}
	c.Status(http.StatusOK)
}

// abort ends requests on every worker: those of a name that the client gave, or all.
func (n Routes) abort(c *gin.Context) {
	text, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, bodyLimit))
	body, ok := jsonbody.Parse(text)
	if err != nil || !ok {
		n.Fail(c, http.StatusBadRequest, `the body must be a JSON object with "rid", or with "abort_all": true`)
		return
	}
	rid := body.Get("rid")
	sent := fmt.Appendf(nil, `{"rid":%s}`, proxy.Quoted(rid.Str))
	switch {
	case body.Get("abort_all").Bool() && !n.Admin:
		n.Fail(c, http.StatusForbidden, "abort_all ends the requests of all clients: start the router with --allow-engine-admin to let it through")
		return
	case body.Get("abort_all").Bool():
		sent = []byte(`{"abort_all":true}`)
	case rid.Type != gjson.String || len(rid.Str) < leastRID && !n.Admin:
		n.Fail(c, http.StatusBadRequest, fmt.Sprintf("rid: give the name of one request, of at least %d bytes: SGLang ends all requests whose names begin with it", leastRID))
		return
	}
	targets := n.some(c)
	if len(targets) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), askTimeout)
	defer cancel()
	q := n.Question(c, sent)
	q.Header.Set("Content-Type", "application/json")
	worst := http.StatusOK
	n.Proxy.AskAll(ctx, targets, q, func(a proxy.Answer) bool {
		if a.Err != nil {
			a.Status = http.StatusBadGateway
		}
		worst = max(worst, a.Status)
		return true
	})
	if worst >= http.StatusBadRequest {
		n.Fail(c, http.StatusBadGateway, fmt.Sprintf("not every SGLang worker took the abort: the worst answered %d", worst))
		return
	}
	c.Status(http.StatusOK)
}
