package main

import (
	"fmt"
	"kvrouter/internal/telemetry"
	"kvrouter/internal/testkit"
	"math"
	"net/http/httptest"
	"testing"
	"time"
)

func scrape(t *telemetry.Metrics) testkit.MetricsLines {
	w := httptest.NewRecorder()
	t.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	return testkit.ReadMetricsPage(w.Body.String())
}

func TestThompsonMetricsTellOfRequestsAndDecisions(t *testing.T) {
	s := startMockSite(t, 2, "--policy=thompson")
	const requests = 6
	for range requests {
		status, answer := post(t, s.openAI+testkit.ChatPath, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":5,"ignore_eos":true,"nvext":{"agent_hints":{"prefix_id":"p","total_requests":6}}}`)
		if status != 200 {
			t.Fatalf("%s", answer)
		}
	}
	post(t, s.openAI+testkit.ChatPath, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":-5}`) // the engine's 400
	post(t, s.openAI+testkit.ChatPath, `{"messages":`)                                                  // refused here: not a request to it
	testkit.Eventually(t, 5*time.Second, "the requests are over", func() bool { return s.inFlight() == 0 })
	got := scrape(s.rooms.telemetry)
	if n := scrape(s.rooms.telemetry)["thompson_processor_active_requests"]; n != 0 {
		t.Errorf("%v active requests", n)
	}
	for name, want := range map[string]float64{
		"thompson_processor_requests_total":                requests + 1,
		"thompson_processor_request_latency_seconds_count": requests + 1,
		"thompson_processor_tokens_out_total":              5 * requests,
		"thompson_processor_router_errors_total":           0,
		"thompson_processor_engine_errors_total":           0,
		"thompson_router_pending_decisions":                0,
		"thompson_router_timeout_penalties_total":          0,
		"thompson_router_prefix_state_size":                0,
		`thompson_router_reuse_budget_bucket{le="0"}`:      2, // the last one, and the one without hints
		`thompson_router_reuse_budget_bucket{le="5"}`:      requests + 1,
		"thompson_router_tokens_per_request_count":         requests + 1,
	} {
		if value, found := got[name]; !found || value != want {
			t.Errorf("%s is %v (%t), want %v", name, value, found, want)
		}
	}
	if in, every := got["thompson_processor_tokens_in_total"], float64(requests+1); in < every || math.Mod(in, every) != 0 {
		t.Errorf("%v prompt tokens of %v equal requests", in, every)
	}
	moves := got["thompson_router_sticky_decisions_total"] + got["thompson_router_switch_decisions_total"]
	if moves != requests-1 {
		t.Errorf("%v decisions for a series that had a worker, want %d", moves, requests-1)
	}
	var routed, decided, learned, evidence float64
	for worker := range 2 {
		rank := fmt.Sprintf(`{dp_rank="0",worker_id="%d"}`, worker)
		routed += got[fmt.Sprintf(`thompson_processor_routing_decisions_total{worker_id="%d"}`, worker)]
		decided += got["thompson_router_decisions_total"+rank]
		learned += got["thompson_router_feedback_latency_seconds_count"+rank]
		evidence += got["thompson_router_beta_alpha"+rank] + got["thompson_router_beta_beta"+rank]
		for _, name := range []string{"kv_overlap", "reward"} {
			if value, found := got["thompson_router_"+name+rank]; !found || value < 0 || value > 1 {
				t.Errorf("%s%s is %v (%t)", name, rank, value, found)
			}
		}
	}
	if routed != requests+1 || decided != requests+1 || learned != requests || evidence <= 4 {
		t.Errorf("%v routed, %v decided, %v learned from, evidence %v", routed, decided, learned, evidence)
	}
}
