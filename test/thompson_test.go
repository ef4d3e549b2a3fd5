package test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/engine"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
)

// sendMany sends that many different chats, a few at a time, and returns how many
// went to each worker, by id.
func (s *Mocks) sendMany(from, requests, atATime int) []int {
	s.T.Helper()
	workers := make([]uint64, requests)
	var group errgroup.Group
	group.SetLimit(atATime)
	for i := range requests {
		group.Go(func() error {
			a, err := s.Chat(s.T.Context(), Say(fmt.Sprint(from+i, " is a number that no other chat has")), true, 8)
			if err == nil && !a.Finished {
				err = fmt.Errorf("answer %+v", a)
			}
			workers[i] = a.Worker
			return err
		})
	}
	if err := group.Wait(); err != nil {
		s.T.Fatal(err)
	}
	counts := make([]int, s.Count)
	for _, w := range workers {
		counts[w]++
	}
	return counts
}

// belief is what the metrics page shows of a worker's distribution.
func (r *Router) belief(worker int) (alpha, beta float64) {
	r.T.Helper()
	key := kv.WorkerKey{Worker: uint64(worker)}
	return r.Gauge("thompson_router_beta_alpha", key), r.Gauge("thompson_router_beta_beta", key)
}

// evidence is what policy thompson has learned of all its workers together: the
// rewards and what they lack of 1, without the two that it starts with.
func (s *Mocks) evidence() (rewards, losses float64) {
	s.T.Helper()
	for i := range s.Count {
		alpha, beta := s.belief(i)
		rewards += alpha - 1
		losses += beta - 1
	}
	return rewards, losses
}

// pending is how many decisions are still to be learned from.
func (r *Router) pending() float64 { return r.Metrics()["thompson_router_pending_decisions"] }

// TestThompsonLearnsWhichWorkerIsSlow has a worker that takes three times as
// long as the two others, and becomes as fast as they are after 700 requests. One
// request is in flight at a time, so that load says nothing about the workers.
func TestThompsonLearnsWhichWorkerIsSlow(t *testing.T) {
	t.Parallel()
	start := func(t *testing.T, fixes string) *Mocks {
		return StartMocks(t, 3, "--policy=thompson", "--thompson.override=fixes="+fixes, "--speedup-ratio=6", "--mock=slow-worker=0=3")
	}
	t.Run("mended", func(t *testing.T) {
		t.Parallel()
		s := start(t, "all")
		s.sendMany(0, 500, 1)
		slow := s.sendMany(500, 200, 1)[0]
		if slow >= 30 {
			t.Errorf("after 500 requests %d of 200 go to the slow worker, want less than 15 %%", slow)
		}
		s.Rank(kv.WorkerKey{}).Do(func(e *engine.Engine) { e.Cfg.Timing.Speedup *= 3 })
		s.sendMany(700, 300, 1)
		recovered := s.sendMany(1000, 200, 1)[0]
		if recovered < 30 {
			t.Errorf("after 300 requests more, since when it is as fast as the others, %d of 200 go to the worker, want 15 %% at least", recovered)
		}
		t.Logf("of 200 requests each, %d while it is slow, %d when it is fast again", slow, recovered)
	})
	t.Run("as it was", func(t *testing.T) {
		t.Parallel()
		s := start(t, "none")
		slow := s.sendMany(0, 500, 1)[0]
		t.Logf("of 500 requests, %d", slow)
		if slow < 100 {
			t.Errorf("%d of 500 requests went to the slow worker, want about a third: it is compared with itself", slow)
		}
		for i := range s.Count {
			alpha, beta := s.belief(i)
			if mean := alpha / (alpha + beta); mean < 0.44 || mean > 0.56 {
				t.Errorf("worker %d is believed to earn %.2f, want about 0.5 for all", i, mean)
			}
		}
	})
}

func TestThompsonLearnsNothingFromClientsThatLeave(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--policy=thompson", "--speedup-ratio=1")
	for range 6 {
		ctx, leave := context.WithCancel(t.Context())
		request, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.OpenAI+testkit.ChatPath, strings.NewReader(`{"messages":[{"role":"user","content":"Hi"}],"max_tokens":5000,"ignore_eos":true,"stream":true}`))
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		io.ReadFull(response.Body, make([]byte, 100))
		leave()
		response.Body.Close()
	}
	testkit.Eventually(t, 20*time.Second, "all are off the books", func() bool {
		return s.InFlight() == 0 && s.pending() == 0
	})
	if rewards, losses := s.evidence(); rewards != 0 || losses != 0 {
		t.Errorf("rewards of %v and losses of %v were learned", rewards, losses)
	}
	s.sendMany(0, 1, 1)
	testkit.Eventually(t, 5*time.Second, "a whole answer is learned from", func() bool {
		rewards, losses := s.evidence()
		return rewards == 0.5 && losses == 0.5
	})
}

func TestThompsonLearnsFromWorkersThatFail(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--policy=thompson", "--mock=error-rate=1")
	if status, answer := Post(t, s.OpenAI+testkit.ChatPath, `{"messages":[{"role":"user","content":"Hi"}]}`); status != 500 {
		t.Fatalf("%d %s", status, answer)
	}
	testkit.Eventually(t, 5*time.Second, "both attempts are off the books", func() bool { return s.pending() == 0 })
	rewards, losses := s.evidence()
	if rewards > 0 || losses < 1.9 || losses > 2 { // the first of them has faded a little
		t.Errorf("rewards of %v and losses of %v were learned, want those of two failures", rewards, losses)
	}
}

func TestWhatThompsonLearnedSurvivesARestart(t *testing.T) {
	t.Parallel()
	args := []string{"--policy=thompson", "--thompson-state=" + filepath.Join(t.TempDir(), "state.json")}
	ofSeries := `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1,"nvext":{"agent_hints":{"prefix_id":"p","total_requests":9}}}`
	w := StartWorkers(t, 3)
	s := StartOver(t, w, args...)
	s.sendMany(0, 30, 3)
	Post(t, s.OpenAI+testkit.ChatPath, ofSeries)
	testkit.Eventually(t, 5*time.Second, "all is learned", func() bool { return s.pending() == 0 })
	var before [3][2]float64
	for i := range before {
		before[i][0], before[i][1] = s.belief(i)
	}
	s.Stop()

	s = StartOver(t, w, args...)
	for i, was := range before {
		if alpha, beta := s.belief(i); alpha == 0 || math.Abs(alpha-was[0]) > 1e-9 || math.Abs(beta-was[1]) > 1e-9 {
			t.Errorf("worker %d: before %v, after the restart %v and %v", i, was, alpha, beta)
		}
	}
	if n := s.Metrics()["thompson_router_prefix_state_size"]; n != 1 {
		t.Errorf("%v series after the restart, want 1", n)
	}
	Post(t, s.OpenAI+testkit.ChatPath, ofSeries)
	page := s.Metrics()
	if stayed, switched := page["thompson_router_sticky_decisions_total"], page["thompson_router_switch_decisions_total"]; stayed+switched != 1 {
		t.Errorf("the series begins anew: stayed %v times, switched %v", stayed, switched)
	}
}

func TestThompsonMetricsShowDecisions(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--policy=thompson")
	const requests = 6
	for range requests {
		status, answer := Post(t, s.OpenAI+testkit.ChatPath, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":5,"ignore_eos":true,"nvext":{"agent_hints":{"prefix_id":"p","total_requests":6}}}`)
		if status != 200 {
			t.Fatalf("%s", answer)
		}
	}
	Post(t, s.OpenAI+testkit.ChatPath, `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":-5}`) // the engine's 400
	Post(t, s.OpenAI+testkit.ChatPath, `{"messages":`)                                                  // refused here: not a request to it
	testkit.Eventually(t, 5*time.Second, "the requests are over", func() bool { return s.InFlight() == 0 })
	got := s.Metrics()
	for name, want := range map[string]float64{
		"thompson_router_pending_decisions":           0,
		"thompson_router_timeout_penalties_total":     0,
		"thompson_router_prefix_state_size":           0,
		`thompson_router_reuse_budget_bucket{le="0"}`: 2, // the last one, and the one without hints
		`thompson_router_reuse_budget_bucket{le="5"}`: requests + 1,
		"thompson_router_tokens_per_request_count":    requests + 1,
	} {
		if value, found := got[name]; !found || value != want {
			t.Errorf("%s is %v (%t), want %v", name, value, found, want)
		}
	}
	moves := got["thompson_router_sticky_decisions_total"] + got["thompson_router_switch_decisions_total"]
	if moves != requests-1 {
		t.Errorf("%v decisions for a series that had a worker, want %d", moves, requests-1)
	}
	var decided, learned, evidence float64
	for worker := range 2 {
		rank := fmt.Sprintf(`{dp_rank="0",worker_id="%d"}`, worker)
		decided += got["thompson_router_decisions_total"+rank]
		learned += got["thompson_router_feedback_latency_seconds_count"+rank]
		evidence += got["thompson_router_beta_alpha"+rank] + got["thompson_router_beta_beta"+rank]
		for _, name := range []string{"kv_overlap", "reward"} {
			if value, found := got["thompson_router_"+name+rank]; !found || value < 0 || value > 1 {
				t.Errorf("%s%s is %v (%t)", name, rank, value, found)
			}
		}
	}
	if decided != requests+1 || learned != requests || evidence <= 4 {
		t.Errorf("%v decided, %v learned from, evidence %v", decided, learned, evidence)
	}
}

func TestThompsonKeepsItsStateAndTraces(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	state, traces := filepath.Join(dir, "state.json"), filepath.Join(dir, "router_traces.jsonl")
	args := []string{"--policy=thompson", "--thompson-state=" + state, "--thompson.override=debug.traces_enabled=true,debug.trace_dir=" + dir}
	w := StartWorkers(t, 2)
	site := StartOver(t, w, args...)
	for i := range 6 {
		if _, err := site.Chat(t.Context(), []map[string]string{{"role": "user", "content": fmt.Sprintf("question %d", i)}}, true, 8); err != nil {
			t.Fatal(err)
		}
	}
	site.Stop()
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
	again := StartOver(t, w, args...)
	for i := range 2 {
		if alpha, beta := again.belief(i); alpha <= 0 || beta <= 0 {
			t.Errorf("after the restart worker %d has %v and %v", i, alpha, beta)
		}
	}
}
