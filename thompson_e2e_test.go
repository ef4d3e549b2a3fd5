package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/engine"
	"kvrouter/internal/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"

	"golang.org/x/sync/errgroup"
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
	counts := make([]int, s.rooms.config.NumWorkers)
	for _, w := range workers {
		counts[w]++
	}
	return counts
}

// evidence is what policy thompson has learned of all its workers together: the
// rewards and what they lack of 1, without the two that it starts with.
func (s *mockSite) evidence() (rewards, losses float64) {
	for _, w := range routertest.ThompsonStats(s.t.(*testing.T), s.rooms.router).Workers {
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
		for _, w := range routertest.ThompsonStats(t, s.rooms.router).Workers {
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
		return s.inFlight() == 0 && routertest.ThompsonStats(t, s.rooms.router).Pending == 0
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
	testkit.Eventually(t, 5*time.Second, "both attempts are off the books", func() bool { return routertest.ThompsonStats(t, s.rooms.router).Pending == 0 })
	rewards, losses := s.evidence()
	if rewards > 0 || losses < 1.9 || losses > 2 { // the first of them has faded a little
		t.Errorf("rewards of %v and losses of %v were learned, want those of two failures", rewards, losses)
	}
	page := scrape(s.rooms.telemetry)
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
	testkit.Eventually(t, 5*time.Second, "all is learned", func() bool { return routertest.ThompsonStats(t, s.rooms.router).Pending == 0 })
	before := routertest.ThompsonStats(t, s.rooms.router)
	if err := s.end(); err != nil {
		t.Fatal(err)
	}

	s = startMockSite(t, 3, args...)
	after := routertest.ThompsonStats(t, s.rooms.router)
	for i, w := range after.Workers {
		if was := before.Workers[i]; w.Worker != was.Worker || math.Abs(w.Alpha-was.Alpha) > 1e-9 || math.Abs(w.Beta-was.Beta) > 1e-9 {
			t.Errorf("before %+v, after the restart %+v", was, w)
		}
	}
	if len(after.Workers) != 3 || after.Series != 1 {
		t.Errorf("%d workers and %d series after the restart, want 3 and 1", len(after.Workers), after.Series)
	}
	post(t, s.openAI+testkit.ChatPath, ofSeries)
	if after = routertest.ThompsonStats(t, s.rooms.router); after.Stayed+after.Switched != 1 {
		t.Errorf("the series begins anew: %+v", after)
	}
}
