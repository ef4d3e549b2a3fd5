package proxy

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
)

// silent sends no byte until its client leaves.
func silent(w http.ResponseWriter, r *http.Request) {
	http.NewResponseController(w).Flush()
	<-r.Context().Done()
}

func TestWhatADownWorkerHasIsAborted(t *testing.T) {
	hangs := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	stream := func(w http.ResponseWriter, r *http.Request) {
		testkit.StreamOf(testkit.TokenEvent)(w, r)
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
	for _, test := range []struct {
		name    string
		serve   http.HandlerFunc
		retries int
		want    string // in the answer; empty: an error
	}{
		{"before the headers", hangs, 2, `"stop"`},
		{"before the first byte", silent, 2, `"stop"`},
		{"in the stream", stream, 2, "worker 0 failed during its answer"},
		{"which is not to be tried elsewhere", hangs, 0, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newMemoryFleet(t, "round-robin", test.serve, after(0))
				f.proxy.budget = health.NewBudget(0)
				for f.proxy.budget.Take("", time.Now()) == "" { // it does not count
				}
				type result struct {
					w   *httptest.ResponseRecorder
					err error
				}
				done := make(chan result, 1)
				go func() {
					w, err := f.send(t.Context(), test.retries)
					done <- result{w, err}
				}()
				testkit.Eventually(t, 5*time.Second, "the request is there", func() bool { return f.router.Load(kv.WorkerKey{}).InFlight == 1 })
				if test.name == "in the stream" {
					testkit.Eventually(t, 5*time.Second, "the stream has begun", func() bool { return f.router.Load(kv.WorkerKey{}).ContextTokens >= 0 && begun(f.proxy) })
				}
				f.proxy.Abort(0, 2, "another incarnation")
				select {
				case <-done:
					t.Fatal("a request of another incarnation was aborted")
				case <-time.After(50 * time.Millisecond):
				}
				f.router.Down(kv.WorkerKey{})
				began := time.Now()
				f.proxy.Abort(0, 1, "it does not answer")
				r := <-done
				if took := time.Since(began); took > flows+2*time.Second {
					t.Errorf("it took %s", took)
				}
				if (r.err == nil) != (test.want == `"stop"`) || !strings.Contains(r.w.Body.String(), test.want) || strings.Count(r.w.Body.String(), `"error"`) > 1 {
					t.Errorf("%s, %v", r.w.Body, r.err)
				}
				records, _ := f.router.Health.Records()
				if len(records) != 1 || records[0].Row != 0 {
					t.Errorf("%+v", records)
				}
			})
		})
	}
}

// begun tells whether a byte of an answer has come.
func begun(p *Proxy) bool {
	p.inflights.mu.Lock()
	defer p.inflights.mu.Unlock()
	for _, l := range p.inflights.workers {
		for f := range l.requests {
			if f.heard.Load() != 0 {
				return true
			}
		}
	}
	return false
}

// TestAnAnswerThatFlowsIsNotCut: a worker that ends in good order refuses new
// connections but answers to the end what it has begun.
func TestAnAnswerThatFlowsIsNotCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMemoryFleet(t, "round-robin", func(w http.ResponseWriter, r *http.Request) {
			for range 8 {
				testkit.StreamOf(testkit.TokenEvent)(w, r)
				http.NewResponseController(w).Flush()
				time.Sleep(flows / 4)
			}
			testkit.StreamOf("[DONE]")(w, r)
		}, after(0))
		done := make(chan string, 1)
		go func() {
			w, err := f.send(t.Context(), 2)
			done <- fmt.Sprint(w.Body, err)
		}()
		testkit.Eventually(t, 5*time.Second, "the stream has begun", func() bool { return begun(f.proxy) })
		f.router.Down(kv.WorkerKey{})
		f.proxy.Abort(0, 1, "nothing listens there")
		if got := <-done; strings.Contains(got, "error") || !strings.Contains(got, "[DONE]") {
			t.Errorf("got %s", got)
		}
	})
}

// TestARequestThatComesTooLateIsAborted: its worker goes down between the decision and
// the sending.
func TestARequestThatComesTooLateIsAborted(t *testing.T) {
	f := newFailingFleet(t, "round-robin", silent, after(0))
	w := httptest.NewRecorder()
	u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Header: http.Header{web.HeaderRequest: {"r"}}, MaxRetries: 1}
	err := f.proxy.Forward(t.Context(), w, u, &Exchange{}, chooseOne(func(exclude []uint64) (router.Decision, error) {
		d, err := f.router.Route(t.Context(), router.Request{Exclude: exclude})
		f.router.Down(kv.WorkerKey{})
		return d, err
	}))
	if err != nil || w.Body.String() != wholeAnswer {
		t.Errorf("%s, %v", w.Body, err)
	}
}

// TestAStuckWorkerIsLeft: /health answers, requests hang.
func TestAStuckWorkerIsLeft(t *testing.T) {
	rules, lasts := policies.Names, 20*time.Second
	if testing.Short() {
		rules, lasts = []string{"work", "round-robin"}, 8*time.Second
	}
	for _, rule := range rules {
		t.Run(rule, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const clients, patience = 12, 4 * time.Second
				f := newMemoryFleet(t, rule, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, after(300*time.Millisecond), after(300*time.Millisecond), after(300*time.Millisecond))
				var all sync.WaitGroup
				var lost, answered, slow atomic.Int64
				ends := time.Now().Add(lasts)
				for range clients {
					all.Go(func() {
						for time.Now().Before(ends) {
							began := time.Now()
							ctx, leave := context.WithTimeoutCause(t.Context(), patience, context.Canceled)
							w, err := f.send(ctx, 2)
							leave()
							switch took := time.Since(began); {
							case err != nil || w.Code != http.StatusOK:
								lost.Add(int64(took))
							default:
								answered.Add(1)
								slow.Add(int64(max(0, took-400*time.Millisecond)))
							}
						}
					})
				}
				all.Wait()
				total := clients * float64(lasts)
				t.Logf("answered %d, time lost %.1f %%, waited longer than usual %.1f %%", answered.Load(), 100*float64(lost.Load())/total, 100*float64(slow.Load())/total)
				// Less than half of that on a quiet machine (make chaos holds 8 %); four fifths
				// if nothing knew that the worker is stuck.
				if share := float64(lost.Load()) / total; share > 0.16 {
					t.Errorf("clients lost %.1f %% of their time", 100*share)
				}
			})
		})
	}
}

// TestAnswersThatAStuckWorkerHasBegunEnd: nothing else would end them.
func TestAnswersThatAStuckWorkerHasBegunEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMemoryFleet(t, "round-robin", func(w http.ResponseWriter, r *http.Request) {
			testkit.StreamOf(testkit.TokenEvent)(w, r)
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}, after(20*time.Millisecond), after(20*time.Millisecond))
		done, unmoved := make(chan string, 1), make(chan error, 1)
		request, end := context.WithTimeout(t.Context(), 80*time.Second)
		defer end()
		go func() {
			w, _ := f.send(request, 2)
			done <- w.Body.String()
		}()
		testkit.Eventually(t, 5*time.Second, "the stream has begun", func() bool { return begun(f.proxy) })
		hangs := roundTrip(func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, context.Cause(r.Context())
		})
		usual := f.proxy.client.Transport
		gate := f.router.Targets()[0].URL
		f.proxy.client.Transport = roundTrip(func(r *http.Request) (*http.Response, error) {
			if "http://"+r.URL.Host == gate {
				return hangs(r)
			}
			return usual.RoundTrip(r)
		})
		ctx, stop := context.WithTimeout(t.Context(), 80*time.Second)
		var others sync.WaitGroup
		for range 4 {
			others.Go(func() {
				for ctx.Err() == nil {
					f.send(ctx, 2)
				}
			})
		}
		go func() { // to the worker that is stuck, and nowhere else
			u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Header: http.Header{web.HeaderRequest: {"r"}}}
			unmoved <- f.proxy.Forward(request, httptest.NewRecorder(), u, &Exchange{}, chooseOne(func([]uint64) (router.Decision, error) {
				return f.router.Route(request, router.Request{Pinned: new(kv.WorkerKey)})
			}))
		}()
		got := <-done
		if ctx.Err() != nil || strings.Count(got, `"error"`) != 1 {
			t.Errorf("%v, got %s", ctx.Err(), got)
		}
		if err := <-unmoved; err == nil || request.Err() != nil {
			t.Errorf("the request that may not be moved: %v, %v", err, request.Err())
		}
		stop()
		others.Wait()
	})
}
