package selection

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// TestPromptsThatCannotBeAreRefused: one of 2^62 tokens stopped the router, with its
// lock held.
func TestPromptsThatCannotBeAreRefused(t *testing.T) {
	rt := routertest.New(t, "work", 2)
	_, ask := newFinder(t, rt)
	const hashed = `"block_hashes":[],"sequence_hashes":[]`
	for _, c := range []struct {
		path, body string // %d is the number
		field      string
	}{
		{"/find_best_worker", `{"local_hashes":[],"num_tokens":%d}`, "num_tokens"},
		{"/select", `{` + hashed + `,"isl_tokens":%d}`, "isl_tokens"},
		{"/select_and_reserve", `{` + hashed + `,"isl_tokens":%d}`, "isl_tokens"},
		{"/potential_loads", `{` + hashed + `,"isl_tokens":%d}`, "isl_tokens"},
		{"/overlap_scores", `{"local_hashes":[],"num_tokens":%d}`, "num_tokens"},
		{"/reservations", `{"selection_id":"x","worker_id":0,` + hashed + `,"isl_tokens":%d}`, "isl_tokens"},
		{"/select", `{"token_ids":[1],"expected_output_tokens":%d}`, "expected_output_tokens"},
		{"/route", `{"method":"new","tokens":[1],"expected_output_tokens":%d}`, "expected_output_tokens"},
		{"/feedback", `{"decision_id":"d","latency_ms":1,"tokens_in":%d}`, "tokens_in"},
		{"/feedback", `{"decision_id":"d","latency_ms":1,"tokens_out":%d}`, "tokens_out"},
	} {
		for _, n := range []uint64{kv.MaxTokens + 1, math.MaxUint32, 1 << 53, 1 << 62, math.MaxInt64, math.MaxUint64} {
			status, answer := ask(c.path, fmt.Sprintf(c.body, n))
			refused := status == http.StatusBadRequest || status == http.StatusUnprocessableEntity || c.path == "/feedback" && status == http.StatusOK
			if !refused || !strings.Contains(answer.Get("error").Str, c.field) {
				t.Errorf("%s of %d %s: %d %s", c.path, n, c.field, status, answer)
			}
		}
		if status, answer := ask(c.path, fmt.Sprintf(c.body, kv.MaxTokens)); status >= 300 || strings.Contains(answer.Get("error").Str, c.field) {
			t.Errorf("%s of the most %s: %d %s", c.path, c.field, status, answer)
		}
	}
	if status, answer := ask("/find_worker", fmt.Sprintf(`{"tokens":[1],"prefix_id":"p","reuse_budget":%d}`, math.MaxInt64)); status != 200 {
		t.Errorf("%d %s", status, answer)
	}
}

// registrationOf is what the fleet would take of a worker with this spec.
func registrationOf(t testing.TB, text string) (ranks, sources int, err error) {
	t.Helper()
	var spec workerSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return 0, 0, err
	}
	model, group := "m", events.DefaultGroup
	spec.ModelName, spec.RoutingGroup = &model, &group
	r, _, err := registeredWorker{id: 1, spec: spec}.registration(Settings{BlockSize: testkit.BlockSize, KVEvents: true})
	return len(r.Ranks), len(r.Sources), err
}

func FuzzWorkerSpec(f *testing.F) {
	for _, text := range []string{
		`{"endpoint":"http://gpu:8000","kv_events_endpoint":"tcp://gpu:5557","replay_endpoint":"tcp://gpu:5757","block_size":4,"data_parallel_size":2}`,
		`{"endpoint":"http://gpu:8000","kv_events_endpoints":{"3":"tcp://gpu:1"},"data_parallel_start_rank":3,"total_kv_blocks":100}`,
		`{"data_parallel_size":4294967295,"data_parallel_start_rank":4294967295}`, `{"kv_events_endpoint":"ipc://x"}`, `{"kv_events_endpoint":"tcp://gpu:65535","data_parallel_size":2}`,
		`{"role":"prefill","kind":"mooncake","bootstrap_host":"h","bootstrap_port":1}`, `{"total_kv_blocks":4611686018427387904}`, `{}`, `[]`,
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if ranks, sources, err := registrationOf(t, text); err == nil && (ranks > kv.MaxRanks || sources > ranks) {
			t.Errorf("%d ranks with %d sources", ranks, sources)
		}
	})
}

// FuzzPromptQuery asks every route that takes a prompt. Each answers, no booking is
// left, and a request is still routed.
func FuzzPromptQuery(f *testing.F) {
	for _, text := range []string{
		`{"token_ids":[1,2,3,4,5],"selection_id":"s"}`, `{"local_hashes":["1",-2],"num_tokens":9}`, `{"block_hashes":[1,2],"sequence_hashes":[1,2],"isl_tokens":8,"selection_id":"s","worker_id":0,"effective_prefill_tokens":4}`,
		`{"local_hashes":[],"num_tokens":4611686018427387904}`, `{"block_hashes":[],"sequence_hashes":[],"isl_tokens":2147483648,"selection_id":"s","worker_id":1,"effective_prefill_tokens":2147483648}`,
		`{"token_ids":[1],"router_config_override":{"router_temperature":1e308,"overlap_score_weight":0},"priority_jump":-1e308,"strict_priority":4294967295,"pinned_worker":{"worker_id":1},"allowed_worker_ids":[1]}`,
		`{"method":"new","tokens":[1,2],"request_id":"r"}`, `{"method":"mark_free"}`, `{"tokens":[1],"prefix_id":"p","reuse_budget":-1,"expected_osl":"1e9","interarrival":"x"}`,
		`{"decision_id":"d","latency_ms":1e300,"tokens_in":-1}`, `{"decay_fraction":2}`, `{}`, `[`, `null`,
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		rt := routertest.New(t, "work", 2)
		s, ask := newFinder(t, rt)
		for _, path := range []string{
			"/find_best_worker", "/find_worker", "/feedback", "/overlap_scores", "/select", "/select_and_reserve", "/reservations", "/potential_loads", "/route",
			"/reservations/s/prefill_complete", "/reservations/s/output_block",
		} {
			if status, answer := ask(path, text); status >= 500 && status != http.StatusServiceUnavailable || !answer.Exists() {
				t.Errorf("%s: %d %s", path, status, answer)
			}
		}
		if err := rt.Check(); err != nil {
			t.Error(err)
		}
		if _, err := rt.Route(t.Context(), router.Request{Tokens: testkit.Tokens(1, 8), QueryOnly: true}); err != nil {
			t.Error(err)
		}
		for worker := range uint64(2) {
			s.reserved.releaseWorker(worker)
		}
		if n := routertest.InFlight(rt); n != 0 {
			t.Errorf("%d in flight in the end", n)
		}
	})
}

// TestWorkersAreListedWhateverTheyPublish: a gauge that is no number made the list
// an empty answer.
func TestWorkersAreListedWhateverTheyPublish(t *testing.T) {
	for _, usage := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -5, 0.5} {
		rt := routertest.New(t, "standalone", 1)
		rt.Publish(kv.WorkerKey{}, policy.Published{KVUsage: usage, At: time.Now()})
		var record WorkerRecord
		record.add(rt.Load(kv.WorkerKey{}))
		text, err := json.Marshal(record)
		if want := map[bool]float64{true: usage}[usage == 0.5]; err != nil || gjson.GetBytes(text, "kv_cache_usage").Num != want {
			t.Errorf("%v: %s, %v", usage, text, err)
		}
	}
}
