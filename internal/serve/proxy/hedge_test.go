package proxy

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// streams answers with a stream after so long, which says from which worker it is.
func streams(from string, wait time.Duration, ended *atomic.Int64) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		http.NewResponseController(w).Flush() // headers are no sign of life
		if pause(r.Context(), wait) {
			fmt.Fprintf(w, "data: {\"id\":%q,\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n", from)
			return
		}
		if ended != nil {
			ended.Add(1)
		}
	}
}

// hedges counts attempts beside the first by result.
type hedges struct {
	testkit.SilentObserver
	results chan string
}

func (h hedges) Hedged(result string) { h.results <- result }

// streamed sends a stream; x tells of it.
func (f *failingFleet) streamed(ctx context.Context, x *Exchange, retries int, pinned *kv.WorkerKey) (*httptest.ResponseRecorder, error) {
	w := httptest.NewRecorder()
	u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Route: testkit.ChatPath, Header: http.Header{web.HeaderRequest: {"r"}}, EndMarked: true, MaxRetries: retries}
	return w, f.proxy.Forward(ctx, w, u, x, chooseOne(func(exclude []uint64) (router.Decision, error) {
		request := router.Request{Exclude: exclude, Beside: len(exclude) > 0}
		if len(exclude) == 0 {
			request.Pinned = pinned
		}
		return f.router.Route(ctx, request)
	}))
}

// TestAttemptsSideBySide holds who answers a request that worker 0 has first and leaves without
// a byte, and that no worker is to blame.
func TestAttemptsSideBySide(t *testing.T) {
	const usual = 100 * time.Millisecond
	later := func(serve http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if pause(r.Context(), 5*time.Second) {
				serve(w, r)
			}
		}
	}
	for name, c := range map[string]struct {
		first, second http.HandlerFunc
		from          string // whose answer the client gets; empty: an error
		worker        string
		took          time.Duration // at most, about
		result        string
		row           [2]int // failures
	}{
		"the second answers first": {streams("0", time.Hour, nil), streams("1", usual, nil), "1", "1", 4 * time.Second, HedgeWon, [2]int{}},
		"the first answers first":  {streams("0", 5*time.Second, nil), streams("1", time.Hour, nil), "0", "0", 5 * time.Second, HedgeLost, [2]int{}},
		"the second fails":         {streams("0", 6*time.Second, nil), says(500), "0", "0", 6 * time.Second, HedgeFailed, [2]int{0, 1}},
		"the first fails":          {later(says(500)), streams("1", 3*time.Second, nil), "1", "1", 7 * time.Second, HedgeWon, [2]int{1, 0}},
		"the second is paused":     {streams("0", 6*time.Second, nil), says(429, "Retry-After", "9"), "0", "0", 6 * time.Second, HedgeFailed, [2]int{}},
		"the second refuses":       {streams("0", 6*time.Second, nil), says(404), "0", "0", 6 * time.Second, HedgeFailed, [2]int{}},
		"both fail":                {later(says(500)), says(500), "", "0", 6 * time.Second, HedgeFailed, [2]int{0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var first, second atomic.Pointer[http.HandlerFunc]
				serve := func(p *atomic.Pointer[http.HandlerFunc]) http.HandlerFunc {
					well := http.HandlerFunc(streams("well", usual, nil))
					p.Store(&well)
					return func(w http.ResponseWriter, r *http.Request) { (*p.Load())(w, r) }
				}
				f := newMemoryFleet(t, "round-robin", serve(&first), serve(&second))
				results := make(chan string, 9)
				f.proxy.observer = hedges{results: results}
				for range 10 {
					if _, err := f.streamed(t.Context(), &Exchange{}, 2, nil); err != nil {
						t.Fatal(err)
					}
				}
				first.Store(&c.first)
				second.Store(&c.second)
				x, began := &Exchange{}, time.Now()
				w, err := f.streamed(t.Context(), x, 2, &kv.WorkerKey{})
				if took := time.Since(began); took > c.took+time.Second {
					t.Errorf("it took %s", took)
				}
				if c.from != "" && (err != nil || strings.Count(w.Body.String(), fmt.Sprintf(`"id":%q`, c.from)) != 1 || strings.Count(w.Body.String(), "[DONE]") != 1) {
					t.Errorf("%v: %s", err, w.Body)
				}
				if c.from == "" && w.Code != 500 {
					t.Errorf("%d, %v", w.Code, err)
				}
				if x.Worker != c.worker || w.Header().Get(web.HeaderWorker) != c.worker {
					t.Errorf("worker %s answered, by its header %s", x.Worker, w.Header().Get(web.HeaderWorker))
				}
				if got := <-results; got != c.result || len(results) > 0 {
					t.Errorf("the second attempt %s", got)
				}
				records, _ := f.router.Health.Records()
				for i, r := range records {
					if r.Row != c.row[i] || len(r.Ejections) > 0 {
						t.Errorf("worker %d: %+v", i, r)
					}
				}
				if n := routertest.InFlight(f.router); n != 0 {
					t.Errorf("%d requests are booked", n)
				}
			})
		})
	}
}

// TestAttemptsBesideHaveABudget: where it is used up, or nothing may be sent again, the first
// runs on.
func TestAttemptsBesideHaveABudget(t *testing.T) {
	for _, retries := range []int{0, 2} {
		synctest.Test(t, func(t *testing.T) {
			slow := time.Duration(0)
			var sent atomic.Int64
			serve := func(w http.ResponseWriter, r *http.Request) { sent.Add(1); streams("x", slow, nil)(w, r) }
			f := newMemoryFleet(t, "round-robin", serve, serve)
			for range 10 {
				f.streamed(t.Context(), &Exchange{}, retries, nil)
			}
			f.proxy.budget = health.NewBudget(0)
			for f.proxy.budget.Take("", time.Now()) == "" {
			}
			slow = 8 * time.Second
			sent.Store(0)
			if _, err := f.streamed(t.Context(), &Exchange{}, retries, nil); err != nil || sent.Load() != 1 {
				t.Errorf("%v: sent %d times", err, sent.Load())
			}
			if want := min(1, int64(retries)); f.denied.Load() != want {
				t.Errorf("denied %d times, want %d", f.denied.Load(), want)
			}
		})
	}
}

// TestAClientThatLeavesEndsAllAttempts waits for both.
func TestAClientThatLeavesEndsAllAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ended atomic.Int64
		slow := 10 * time.Millisecond
		serve := func(w http.ResponseWriter, r *http.Request) { streams("x", slow, &ended)(w, r) }
		f := newMemoryFleet(t, "round-robin", serve, serve)
		for range 10 {
			f.streamed(t.Context(), &Exchange{}, 2, nil)
		}
		slow = time.Hour
		ctx, leave := context.WithCancel(t.Context())
		time.AfterFunc(5*time.Second, leave)
		if _, err := f.streamed(ctx, &Exchange{}, 2, nil); err == nil {
			t.Error("no error")
		}
		synctest.Wait()
		if ended.Load() != 2 {
			t.Errorf("%d of 2 attempts ended", ended.Load())
		}
		records, _ := f.router.Health.Records()
		for _, r := range records {
			if r.Row != 0 || len(r.Ejections) > 0 {
				t.Errorf("%+v", r)
			}
		}
	})
}

// blocked is the side of a client that takes nothing for a while.
type blocked struct {
	*httptest.ResponseRecorder
	wait func()
}

func (b blocked) Write(p []byte) (int, error) {
	b.wait()
	return b.ResponseRecorder.Write(p)
}

// TestAClientThatDoesNotReadSaysNothingOfItsWorker, which the router does not read from
// meanwhile.
func TestAClientThatDoesNotReadSaysNothingOfItsWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newMemoryFleet(t, "round-robin", streams("0", 0, nil), streams("1", 0, nil))
		f.proxy.settings.RequestTimeout = 0
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Second):
					f.streamed(t.Context(), &Exchange{}, 2, &kv.WorkerKey{Worker: 1})
				}
			}
		}()
		w := blocked{httptest.NewRecorder(), func() { time.Sleep(3 * time.Minute) }}
		u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Route: testkit.ChatPath, Header: http.Header{web.HeaderRequest: {"r"}}, EndMarked: true, MaxRetries: 2}
		done := make(chan error, 1)
		go func() {
			done <- f.proxy.Forward(t.Context(), w, u, &Exchange{}, chooseOne(func([]uint64) (router.Decision, error) {
				return f.router.Route(t.Context(), router.Request{Pinned: new(kv.WorkerKey)})
			}))
		}()
		for range 170 {
			time.Sleep(time.Second)
			if records, _ := f.router.Health.Records(); records[0].State != health.StateIn {
				t.Fatalf("the worker is %s", records[0].State)
			}
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		close(stop)
		<-stopped
	})
}

// TestAPairInDoubtBeginsAsAnother: its prefill worker is stuck, and not ejected. Both bookings of
// each attempt end.
func TestAPairInDoubtBeginsAsAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var stuck, prompts atomic.Int64
		prefill := func(worker int64) http.HandlerFunc {
			return func(w http.ResponseWriter, r *http.Request) {
				prompts.Add(1)
				if stuck.Load() == worker {
					<-r.Context().Done()
					return
				}
				time.Sleep(20 * time.Millisecond)
				fmt.Fprint(w, `{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"remote_host":"h"}}`)
			}
		}
		f := newMemoryFleet(t, "round-robin", prefill(1), prefill(2), streams("d", 20*time.Millisecond, nil))
		for i, target := range f.router.Targets() {
			target.Disagg = []kv.Disagg{testkit.NixlPrefill, testkit.NixlPrefill, testkit.NixlDecode}[i]
			f.router.Up(target)
		}
		send := func(x *Exchange) (*httptest.ResponseRecorder, error) {
			w := httptest.NewRecorder()
			body, _ := jsonbody.Parse([]byte(`{"messages":[],"stream":true}`))
			u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Route: testkit.ChatPath, Header: http.Header{web.HeaderRequest: {"r"}}, Body: body, EndMarked: true, MaxRetries: 2, Paired: true}
			return w, f.proxy.Forward(t.Context(), w, u, x, &fleetChooser{router: f.router, ctx: t.Context(), request: router.Request{Tokens: testkit.Tokens(1, 64)}, hedged: true})
		}
		for range 10 {
			if _, err := send(&Exchange{}); err != nil {
				t.Fatal(err)
			}
		}
		stuck.Store(1)
		for prompts.Store(0); prompts.Load() < 2; { // until the stuck one has been asked
			prompts.Store(0)
			x, began := &Exchange{}, time.Now()
			w, err := send(x)
			if took := time.Since(began); err != nil || took > 5*time.Second || strings.Count(w.Body.String(), "[DONE]") != 1 || x.Shared == nil || x.Shared.Worker != w.Header().Get(HeaderPrefillWorker) {
				t.Fatalf("after %s: %v, %s", took, err, w.Body)
			}
			if prompts.Load() == 2 && x.Shared.Worker != "1" {
				t.Errorf("worker %s has computed the prompt", x.Shared.Worker)
			}
		}
		records, _ := f.router.Health.Records()
		if records[0].State != health.StateSilent || len(records[0].Ejections) > 0 || records[0].Row > 0 || records[1].State != health.StateIn || records[2].State != health.StateIn {
			t.Errorf("%+v", records)
		}
	})
}

// TestTheAnswerThatWonIsTheOneThatIsContinued: all that follows reads its state.
func TestTheAnswerThatWonIsTheOneThatIsContinued(t *testing.T) {
	body := parsed(t, `{"stream":true,"messages":[]}`)
	first := &sending{Upstream: &Upstream{Body: body, Migration: NewMigration(chatRoute, body, []uint32{1}, true, false, nil)}, chooser: chooseOne(nil)}
	tried := &tries{proxy: newTestProxy(t, 0), u: first, x: &Exchange{}}
	won := &lane{number: firstLane + 1, u: first.beside(), x: &Exchange{}, done: make(chan struct{})}
	close(won.done)
	tried.lanes = []*lane{won}
	tried.hedged.Store(true)
	tried.won.Store(won.number)
	if err := tried.join(t.Context(), first, errOutrun); err != nil || tried.u.Migration != won.u.Migration || tried.u.lane != won.number {
		t.Errorf("%v: it is continued from %p of lane %d, not %p", err, tried.u.Migration, tried.u.lane, won.u.Migration)
	}
}
