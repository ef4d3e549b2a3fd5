package telemetry

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

func TestMetricsHaveDynamosNames(t *testing.T) {
	metrics := New(Deps{})
	var stats events.Stats
	stats.Stored.Store(9)
	stats.UnknownParent.Store(2)
	stats.InvalidStored.Store(1)
	stats.Removed.Store(7)
	stats.RemovedIncomplete.Store(3)
	stats.Cleared.Store(4)
	samples := func() []workers.Sample {
		return []workers.Sample{{Worker: kv.WorkerKey{Worker: 1, Rank: 2}, Events: &stats}}
	}
	rt := routertest.New(t, "kv", 2)
	metrics.Register(workers.NewCollector(nil, testkit.Each(samples), nil), models.NewCollector(routertest.Models(rt), nil))
	d, err := rt.Route(t.Context(), router.Request{Tokens: testkit.PromptTokens(1, 3)})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Booking.End()
	d.HashTime, d.LookupTime, d.SequenceTime, d.ScheduleTime, d.QueueTime = 3*time.Microsecond, 20*time.Microsecond, 5*time.Microsecond, time.Millisecond, 2*time.Second
	metrics.Decided(&proxy.Exchange{Source: "local", Prepared: time.Second}, &router.Pair{Decode: d, Whole: router.WholeNoPair})
	for _, err := range []error{fmt.Errorf("wrapped: %w", router.ErrBusy), router.ErrNoWorker, router.ErrQueueFull, router.ErrQueueTimeout} {
		metrics.Finished(&proxy.Exchange{Route: testkit.ChatPath, Worker: noWorker, Served: "m", Refused: err}, time.Now())
	}
	recorder := httptest.NewRecorder()
	metrics.Handler().ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	page := regexp.MustCompile(`,?router_id="[0-9]+",?`).ReplaceAllString(recorder.Body.String(), "")
	for _, want := range []string{
		`dynamo_router_overhead_block_hashing_ms_bucket{le="0.002"} 0`, `dynamo_router_overhead_block_hashing_ms_bucket{le="0.004"} 1`,
		`dynamo_router_overhead_block_hashing_ms_bucket{le="16.384"} 1`, `dynamo_router_overhead_seq_hashing_ms_sum{} 0.005`,
		`dynamo_router_overhead_indexer_find_matches_ms_bucket{le="0.01"} 0`, `dynamo_router_overhead_indexer_find_matches_ms_bucket{le="0.03"} 1`,
		`dynamo_router_overhead_scheduling_ms_sum{} 1`, `dynamo_router_overhead_total_ms_sum{} 1.028`,
		fmt.Sprintf(`dynamo_frontend_worker_active_decode_blocks{dp_rank="0",worker_id="%d",worker_type="decode"} 3`, d.Target.Key.Worker),
		fmt.Sprintf(`dynamo_frontend_worker_active_prefill_tokens{dp_rank="0",worker_id="%d",worker_type="decode"} 12`, d.Target.Key.Worker),
		fmt.Sprintf(`dynamo_frontend_worker_active_prefill_tokens{dp_rank="0",worker_id="%d",worker_type="decode"} 0`, 1-d.Target.Key.Worker),
		`dynamo_frontend_model_rejection_total{endpoint="/v1/chat/completions",model="m"} 1`,
		`dynamo_component_kv_cache_events_applied{dp_rank="2",event_type="stored",status="ok",worker_id="1"} 9`,
		`dynamo_component_kv_cache_events_applied{dp_rank="2",event_type="stored",status="parent_block_not_found",worker_id="1"} 2`,
		`dynamo_component_kv_cache_events_applied{dp_rank="2",event_type="stored",status="invalid_block",worker_id="1"} 1`,
		`dynamo_component_kv_cache_events_applied{dp_rank="2",event_type="removed",status="ok",worker_id="1"} 4`,
		`dynamo_component_kv_cache_events_applied{dp_rank="2",event_type="removed",status="block_not_found",worker_id="1"} 3`,
		`dynamo_component_kv_cache_events_applied{dp_rank="2",event_type="cleared",status="ok",worker_id="1"} 4`,
		`kvrouter_decision_seconds_count{stage="schedule"} 1`, `kvrouter_queue_wait_seconds_sum 2`,
		`dynamo_frontend_router_queue_backpressure_total{reason="full"} 1`, `dynamo_frontend_router_queue_backpressure_total{reason="timeout"} 1`,
		`dynamo_frontend_router_queue_pending_requests 0`, `dynamo_frontend_router_queue_pending_isl_tokens 0`,
	} {
		if !strings.Contains(page, want+"\n") {
			t.Errorf("no %s", want)
		}
	}
	if t.Failed() {
		t.Log(page)
	}
}
