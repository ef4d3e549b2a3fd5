package main

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/selection"
	"kvrouter/internal/testkit"
)

// scaled is a router without workers, and the file that tells it of some.
type scaled struct {
	*mockSite
	mocks *mockSite
	file  *workersFile
}

// startAtZero starts a router over workers that it does not know yet.
func startAtZero(t *testing.T, mocks *mockSite, args ...string) scaled {
	t.Helper()
	file := &workersFile{t, filepath.Join(t.TempDir(), "workers.yaml")}
	file.write()
	return scaled{mocks.route(append(args, "--discovery=file:"+file.path)...), mocks, file}
}

// entry is worker i in the file.
func (s scaled) entry(i int, more string) string {
	return fmt.Sprintf("{name: w%d, url: %q%s}", i, s.mocks.workerURL(i), more)
}

// held waits until so many requests are held.
func (s scaled) held(n int) {
	s.t.Helper()
	testkit.Eventually(s.t, 20*time.Second, fmt.Sprintf("%d requests are held", n), func() bool {
		_, page := testkit.HTTPGet(s.t, s.openAI+"/metrics")
		return testkit.ReadMetricsPage(string(page))["kvrouter_held_requests"] == float64(n)
	})
}

func TestRequestsWaitForTheFirstWorker(t *testing.T) {
	const requests, leave = 100, 10
	s := startAtZero(t, startMockSite(t, 2), "--hold-when-empty=1m")
	ctx, left := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var mu sync.Mutex
	answered, gone := map[uint64]int{}, 0
	for i := range requests {
		running.Go(func() {
			c := t.Context()
			if i < leave {
				c = ctx
			}
			a, err := s.chat(c, say(fmt.Sprintf("%d asks %s", i, strings.Repeat("and ", 50))), i%2 == 0, 30)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case i < leave && err != nil:
				gone++
			case err != nil || !a.finished || a.broken:
				t.Errorf("request %d: %+v, %v", i, a, err)
			default:
				answered[a.worker]++
			}
		})
	}
	s.held(requests)
	if status, _ := testkit.HTTPGet(t, s.openAI+"/ready"); status != http.StatusOK {
		t.Errorf("/ready is %d while requests are held", status)
	}
	left()
	s.held(requests - leave)
	s.file.write(s.entry(0, ""), s.entry(1, ""))
	running.Wait()
	served := 0 // by the worker that is up first, or by both
	for _, n := range answered {
		served += n
	}
	if gone != leave || served != requests-leave {
		t.Errorf("%d left; answers by worker: %v", gone, answered)
	}
	s.held(0)
	if stats := s.app.tokens.Stats(); stats.None > 0 {
		t.Errorf("%d prompts have no tokens: they were asked for before a worker was up: %v", stats.None, stats.Reasons)
	}
	if n := s.inFlight(); n != 0 {
		t.Errorf("%d requests are booked", n)
	}

	s.file.write() // back to zero, and up again
	s.wantLifecycles()
	done := make(chan error, 1)
	go func() {
		_, err := s.chat(t.Context(), say("again"), false, 2)
		done <- err
	}()
	s.held(1)
	s.file.write(s.entry(0, ""))
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestHeldRequestsThatAreRefused(t *testing.T) {
	mocks := startMockSite(t, 1)
	refused := func(t *testing.T, s scaled) {
		t.Helper()
		response, err := http.Post(s.openAI+testkit.ChatPath, "application/json", strings.NewReader(`{"messages":[{"role":"user","content":"Hi"}]}`))
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" {
			t.Errorf("%s, Retry-After %q", response.Status, response.Header.Get("Retry-After"))
		}
	}
	t.Run("nothing is held unless told", func(t *testing.T) {
		s := startAtZero(t, mocks)
		refused(t, s)
		if status, _ := testkit.HTTPGet(t, s.openAI+"/ready"); status != http.StatusServiceUnavailable {
			t.Errorf("/ready is %d", status)
		}
	})
	t.Run("the time is over", func(t *testing.T) {
		s := startAtZero(t, mocks, "--hold-when-empty=200ms")
		began := time.Now()
		refused(t, s)
		if took := time.Since(began); took < 200*time.Millisecond {
			t.Errorf("after %s", took)
		}
	})
	t.Run("too many wait, or the router ends", func(t *testing.T) {
		s := startAtZero(t, mocks, "--hold-when-empty=1m", "--router-queue-limit=1")
		var waits sync.WaitGroup
		waits.Go(func() { refused(t, s) })
		s.held(1)
		refused(t, s)
		s.held(1)
		s.app.api.Drain()
		waits.Wait()
		refused(t, s)
		if status, _ := testkit.HTTPGet(t, s.openAI+"/ready"); status != http.StatusServiceUnavailable {
			t.Errorf("/ready is %d while the router drains", status)
		}
	})
	t.Run("one that asks for a decision, or names its worker", func(t *testing.T) {
		s := startAtZero(t, mocks, "--hold-when-empty=1m")
		for _, nvext := range []string{`{"annotations":["query_instance_id:"]}`, `{"backend_instance_id":1}`} {
			if status, answer := post(t, s.openAI+testkit.ChatPath, `{"messages":[],"nvext":`+nvext+`}`); status != http.StatusServiceUnavailable {
				t.Errorf("%s: %d %s", nvext, status, answer)
			}
		}
	})
}

// TestHeldRequestsWaitForBothWorkersOfAPair: a prefill worker alone serves nobody.
func TestHeldRequestsWaitForBothWorkersOfAPair(t *testing.T) {
	s := startAtZero(t, startMockPairs(t, kv.KindNIXL, 1, 1), "--hold-when-empty=1m", "--enforce-disagg")
	done := make(chan answer, 1)
	go func() {
		a, err := s.chat(t.Context(), longPrompt(1), true, 8)
		if err != nil {
			t.Error(err)
		}
		done <- a
	}()
	s.held(1)
	s.file.write(s.entry(0, ", role: prefill, kind: nixl"))
	s.wantLifecycles("w0 " + selection.LifecycleSchedulable)
	s.held(1)
	s.file.write(s.entry(0, ", role: prefill, kind: nixl"), s.entry(1, ", role: decode, kind: nixl"))
	if a := <-done; !a.finished || a.prefill == "" {
		t.Errorf("%+v", a)
	}
}

// saturation is that of the metrics page.
func (s *mockSite) saturation(t *testing.T) float64 {
	t.Helper()
	_, page := testkit.HTTPGet(t, s.openAI+"/metrics")
	value, there := testkit.ReadMetricsPage(string(page))["kvrouter_saturation"]
	if !there {
		t.Fatal("the page has no kvrouter_saturation")
	}
	return value
}

// TestSaturationPredictsTheWait compares it with how long first tokens took, under more
// load than the workers bear: of prompts that take long to compute, and of answers that
// fill the batch.
func TestSaturationPredictsTheWait(t *testing.T) {
	for name, test := range map[string]struct {
		flags          []string
		prompt, output int // tokens
	}{
		"prompts": {[]string{"--policy=least-loaded"}, 8000, 2},
		"batch":   {[]string{"--policy=work", "--mock-max-num-seqs=2"}, 100, 80},
	} {
		t.Run(name, func(t *testing.T) {
			s := startMockSite(t, 2, append(test.flags, "--speedup-ratio=1")...)
			if idle := s.saturation(t); idle != 0 {
				t.Errorf("idle: %v", idle)
			}
			ask := func(i int) (first time.Duration) {
				tokens := strings.Repeat(fmt.Sprintf("%d,", 100+i), test.prompt-1) + "7"
				body := fmt.Sprintf(`{"prompt":[%s],"max_tokens":%d,"ignore_eos":true,"stream":true}`, tokens, test.output)
				began := time.Now()
				response, err := http.Post(s.openAI+"/v1/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return 0
				}
				defer response.Body.Close()
				buffer := make([]byte, 1<<10)
				for {
					n, err := response.Body.Read(buffer)
					if first == 0 && n > 0 {
						first = time.Since(began)
					}
					if err != nil {
						return first
					}
				}
			}
			alone := ask(0)
			var mu sync.Mutex
			var running sync.WaitGroup
			var predicted, took, missed, highest float64
			const requests = 40
			for i := range requests {
				saturation, _ := s.app.router.Saturation() // the page takes longer than a request
				highest = max(highest, saturation)
				running.Go(func() {
					wait := max(0, (ask(1+i) - alone).Seconds())
					mu.Lock()
					defer mu.Unlock()
					predicted, took, missed = predicted+saturation, took+wait, missed+max(saturation-wait, wait-saturation)
				})
				<-time.After(20 * time.Millisecond)
			}
			running.Wait()
			t.Logf("mean wait %.2f s, predicted %.2f s; a prediction is off by %.2f s in the mean (%.0f %%); highest saturation %.1f", took/requests, predicted/requests, missed/requests, 100*missed/took, highest)
			testkit.Eventually(t, 20*time.Second, "idle again", func() bool { return s.saturation(t) == 0 })
			if took/requests < 0.5 {
				t.Skip("this machine is too busy to send more than simulated workers bear")
			}
			if highest < 0.5 || missed > took {
				t.Errorf("saturation rose to %.2f only, or predicts nothing", highest)
			}
		})
	}
}
