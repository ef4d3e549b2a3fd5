package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"kvrouter/internal/engine"
	"kvrouter/internal/kv"
	"kvrouter/internal/telemetry"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
	"kvrouter/internal/thompson"
)

// send sends that many different chats, a few at a time, and returns how many
// went to each worker, by id.
func (s *mockSite) send(from, requests, atATime int) []int {
	s.t.Helper()
	workers := make([]uint64, requests)
	var group errgroup.Group
	group.SetLimit(atATime)
	for i := range requests {
		group.Go(func() error {
			a, err := s.chat(s.t.Context(), say(fmt.Sprint(from+i, " is a number that no other chat has")), true, 8)
			if err == nil && !a.finished {
				err = fmt.Errorf("answer %+v", a)
			}
			workers[i] = a.worker
			return err
		})
	}
	if err := group.Wait(); err != nil {
		s.t.Fatal(err)
	}
	counts := make([]int, s.app.config.NumWorkers)
	for _, w := range workers {
		counts[w]++
	}
	return counts
}

// evidence is what policy thompson has learned of all its workers together: the
// rewards and what they lack of 1, without the two that it starts with.
func (s *mockSite) evidence() (rewards, losses float64) {
	for _, w := range routertest.ThompsonStats(s.t.(*testing.T), s.app.router).Workers {
		rewards += w.Alpha - 1
		losses += w.Beta - 1
	}
	return rewards, losses
}

// TestThompsonLearnsWhichWorkerIsSlow has a worker that takes three times as
// long as the two others, and becomes as fast as they are after 700 requests. One
// request is in flight at a time, so that load says nothing about the workers.
func TestThompsonLearnsWhichWorkerIsSlow(t *testing.T) {
	if testing.Short() {
		t.Skip("1,700 requests, one after the other")
	}
	start := func(fixes string) *mockSite {
		return startMockSite(t, 3, "--policy=thompson", "--thompson.fixes="+fixes, "--speedup-ratio=6", "--mock-slow-worker=0=3")
	}
	t.Run("mended", func(t *testing.T) {
		s := start("all")
		s.send(0, 500, 1)
		slow := s.send(500, 200, 1)[0]
		if slow >= 30 {
			t.Errorf("after 500 requests %d of 200 go to the slow worker, want less than 15 %%", slow)
		}
		s.rank(kv.WorkerKey{}).Do(func(e *engine.Engine) { e.Cfg.Timing.Speedup *= 3 })
		s.send(700, 300, 1)
		recovered := s.send(1000, 200, 1)[0]
		if recovered < 30 {
			t.Errorf("after 300 requests more, since when it is as fast as the others, %d of 200 go to the worker, want 15 %% at least", recovered)
		}
		t.Logf("of 200 requests each, %d while it is slow, %d when it is fast again", slow, recovered)
	})
	t.Run("as it was", func(t *testing.T) {
		s := start("none")
		slow := s.send(0, 500, 1)[0]
		t.Logf("of 500 requests, %d", slow)
		if slow < 100 {
			t.Errorf("%d of 500 requests went to the slow worker, want about a third: it is compared with itself", slow)
		}
		for _, w := range routertest.ThompsonStats(t, s.app.router).Workers {
			if mean := w.Alpha / (w.Alpha + w.Beta); mean < 0.44 || mean > 0.56 {
				t.Errorf("worker %d is believed to earn %.2f, want about 0.5 for all", w.Worker.Worker, mean)
			}
		}
	})
}

func TestThompsonLearnsNothingFromClientsThatLeave(t *testing.T) {
	s := startMockSite(t, 2, "--policy=thompson", "--speedup-ratio=1")
	for range 6 {
		ctx, leave := context.WithCancel(t.Context())
		request, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.openAI+testkit.ChatPath, strings.NewReader(`{"messages":[{"role":"user","content":"Hi"}],"max_tokens":5000,"ignore_eos":true,"stream":true}`))
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		io.ReadFull(response.Body, make([]byte, 100))
		leave()
		response.Body.Close()
	}
	testkit.Eventually(t, 20*time.Second, "all are off the books", func() bool {
		return s.inFlight() == 0 && routertest.ThompsonStats(t, s.app.router).Pending == 0
	})
	if rewards, losses := s.evidence(); rewards != 0 || losses != 0 {
		t.Errorf("rewards of %v and losses of %v were learned", rewards, losses)
	}
	s.send(0, 1, 1)
	testkit.Eventually(t, 5*time.Second, "a whole answer is learned from", func() bool {
		rewards, losses := s.evidence()
		return rewards == 0.5 && losses == 0.5
	})
}

func TestThompsonLearnsFromWorkersThatFail(t *testing.T) {
	s := startMockSite(t, 2, "--policy=thompson", "--mock-error-rate=1")
	if status, answer := post(t, s.openAI+testkit.ChatPath, `{"messages":[{"role":"user","content":"Hi"}]}`); status != 500 {
		t.Fatalf("%d %s", status, answer)
	}
	testkit.Eventually(t, 5*time.Second, "both attempts are off the books", func() bool { return routertest.ThompsonStats(t, s.app.router).Pending == 0 })
	rewards, losses := s.evidence()
	if rewards > 0 || losses < 1.9 || losses > 2 { // the first of them has faded a little
		t.Errorf("rewards of %v and losses of %v were learned, want those of two failures", rewards, losses)
	}
	page := scrape(s.app.telemetry)
	if n := page["thompson_processor_engine_errors_total"]; n != 2 {
		t.Errorf("%v engine errors", n)
	}
}

func TestWhatThompsonLearnedSurvivesARestart(t *testing.T) {
	args := []string{"--policy=thompson", "--thompson-state=" + filepath.Join(t.TempDir(), "state.json")}
	ofSeries := `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1,"nvext":{"agent_hints":{"prefix_id":"p","total_requests":9}}}`
	s := startMockSite(t, 3, args...)
	s.send(0, 30, 3)
	post(t, s.openAI+testkit.ChatPath, ofSeries)
	testkit.Eventually(t, 5*time.Second, "all is learned", func() bool { return routertest.ThompsonStats(t, s.app.router).Pending == 0 })
	before := routertest.ThompsonStats(t, s.app.router)
	if err := s.end(); err != nil {
		t.Fatal(err)
	}

	s = startMockSite(t, 3, args...)
	after := routertest.ThompsonStats(t, s.app.router)
	for i, w := range after.Workers {
		if was := before.Workers[i]; w.Worker != was.Worker || math.Abs(w.Alpha-was.Alpha) > 1e-9 || math.Abs(w.Beta-was.Beta) > 1e-9 {
			t.Errorf("before %+v, after the restart %+v", was, w)
		}
	}
	if len(after.Workers) != 3 || after.Series != 1 {
		t.Errorf("%d workers and %d series after the restart, want 3 and 1", len(after.Workers), after.Series)
	}
	post(t, s.openAI+testkit.ChatPath, ofSeries)
	if after = routertest.ThompsonStats(t, s.app.router); after.Stayed+after.Switched != 1 {
		t.Errorf("the series begins anew: %+v", after)
	}
}

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
	got := scrape(s.app.telemetry)
	if n := scrape(s.app.telemetry)["thompson_processor_active_requests"]; n != 0 {
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

func TestThompsonKeepsItsStateAndTraces(t *testing.T) {
	dir := t.TempDir()
	state, traces := filepath.Join(dir, "state.json"), filepath.Join(dir, "traces.jsonl")
	args := []string{"--policy=thompson", "--thompson-state=" + state, "--thompson-traces=" + traces}
	site := startMockSite(t, 2, args...)
	for i := range 6 {
		if _, err := site.chat(t.Context(), []map[string]string{{"role": "user", "content": fmt.Sprintf("question %d", i)}}, true, 8); err != nil {
			t.Fatal(err)
		}
	}
	if err := site.end(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(state)
	if err != nil {
		t.Fatal(err)
	}
	var kept struct {
		Workers   []struct{} `json:"workers"`
		Baselines []struct{} `json:"baselines"`
	}
	if err := json.Unmarshal(data, &kept); err != nil || len(kept.Workers) != 2 || len(kept.Baselines) == 0 {
		t.Errorf("%v: %s", err, data)
	}
	lines, err := os.ReadFile(traces)
	if err != nil {
		t.Fatal(err)
	}
	if decisions, feedbacks := strings.Count(string(lines), `"kind":"decision"`), strings.Count(string(lines), `"kind":"feedback"`); decisions < 6 || feedbacks != decisions {
		t.Errorf("%d decisions and %d feedbacks:\n%s", decisions, feedbacks, lines)
	}
	if told := strings.Count(string(lines), `"finish_reason":"length"`); told < 6 { // the answers are cut at 8 tokens
		t.Errorf("%d of 6 answers have their finish reason:\n%s", told, lines)
	}
	again := startMockSite(t, 2, args...)
	var stats thompson.Stats
	thompson.With(again.app.router.WithPolicy, func(p *thompson.Policy) { stats = p.Stats() })
	if len(stats.Workers) != 2 || stats.Workers[0].Alpha <= 0 {
		t.Errorf("after the restart %+v", stats)
	}
}
