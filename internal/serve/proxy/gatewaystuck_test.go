package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// gatewayFleet is a proxy whose requests a gateway sends.
type gatewayFleet struct {
	proxy  *Proxy
	router *router.Router
	send   func(kv.Target, context.Context) (*http.Response, string, error)
}

// newGatewayFleet returns one over so many workers, from which the gateway gets what send
// returns.
func newGatewayFleet(t *testing.T, workers int, send func(kv.Target, context.Context) (*http.Response, string, error)) *gatewayFleet {
	t.Helper()
	g := &gatewayFleet{router: routertest.New(t, "round-robin", 0), send: send}
	for i := range workers {
		g.router.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: fmt.Sprintf("http://10.0.0.%d:8000", i), Generation: 1})
	}
	settings := testkit.Defaults[Settings]()
	g.proxy = New(settings, Deps{Observer: testkit.SilentObserver{}, Failed: func(uint64) {}})
	t.Cleanup(func() {
		g.proxy.Close()
		g.proxy.inflights.mu.Lock()
		defer g.proxy.inflights.mu.Unlock()
		if n := len(g.proxy.inflights.workers); n != 0 || routertest.InFlight(g.router) != 0 {
			t.Errorf("%d workers still have requests on their way, %d are booked", n, routertest.InFlight(g.router))
		}
	})
	return g
}

// forward sends a request to one of some workers.
func (g *gatewayFleet) forward(ctx context.Context, workers ...uint64) (*httptest.ResponseRecorder, error) {
	request := router.Request{Tokens: testkit.Tokens(1, 64), Alternatives: 3, Allowed: workers, AnsweredWhole: true, Work: router.Work{Output: 100}}
	w := httptest.NewRecorder()
	u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Body: &jsonbody.Body{Raw: []byte(`{}`)}, Route: testkit.ChatPath, EndMarked: true, Header: http.Header{}}
	u.Gateway = &Gateway{Send: func(to Routed) (*http.Response, string, error) { return g.send(to.Target, to.Request.Context()) }}
	return w, g.proxy.Forward(ctx, w, u, &Exchange{}, rebooks{
		chooseOne: func([]uint64) (router.Decision, error) { return g.router.Route(ctx, request) },
		rebook: func(d router.Decision, to kv.WorkerKey) (router.Decision, error) {
			return g.router.Rebook(request, d, to)
		},
	})
}

// busy has other workers than 0 answer until stop is called.
func (g *gatewayFleet) busy(t *testing.T) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for _, worker := range []uint64{1, 2} {
		all.Go(func() {
			for ctx.Err() == nil {
				if _, err := g.forward(t.Context(), worker); err != nil {
					t.Error(err)
				}
			}
		})
	}
	return func() {
		cancel()
		all.Wait()
	}
}

// answersAfter answers well after so long, as far as ctx goes.
func answersAfter(ctx context.Context, wait time.Duration) (*http.Response, string, error) {
	if !pause(ctx, wait) {
		return nil, "", context.Cause(ctx)
	}
	return answered(200, "application/json", wholeAnswer), "", nil
}

// hangs answers nothing, as far as ctx goes.
func hangs(ctx context.Context) (*http.Response, string, error) {
	<-ctx.Done()
	return nil, "", context.Cause(ctx)
}

// fleetWith is a fleet in a bubble of time whose worker 0 answers so, while two others
// answer well until stop is called. What an answer takes is known.
func fleetWith(t *testing.T, answer func(ctx context.Context) (*http.Response, string, error)) (g *gatewayFleet, stop func()) {
	g = newGatewayFleet(t, 3, func(to kv.Target, ctx context.Context) (*http.Response, string, error) {
		if to.Key.Worker > 0 {
			return answersAfter(ctx, 20*time.Millisecond)
		}
		return answer(ctx)
	})
	stop = g.busy(t)
	time.Sleep(time.Second)
	return g, stop
}

// givenUp is when the requests of a fleet's hung worker end: 100 tokens of an answer explain
// 2.5 s.
const givenUp = 62*time.Second + 500*time.Millisecond

// TestBehindAGatewayAStuckWorkerIsLeft: /health answers, requests hang. New ones avoid it soon,
// clients that leave eject it not, and what nobody ends ends late.
func TestBehindAGatewayAStuckWorkerIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, stop := fleetWith(t, hangs)
		var all sync.WaitGroup
		for range 2 {
			all.Go(func() {
				began := time.Now()
				if _, err := g.forward(t.Context(), 0); err == nil || time.Since(began) < givenUp || time.Since(began) > givenUp+3*time.Second {
					t.Errorf("a request at the stuck worker ended after %s: %v", time.Since(began), err)
				}
			})
		}
		for range 3 {
			ctx, leave := context.WithTimeoutCause(t.Context(), 9*time.Second, context.Canceled)
			g.forward(ctx, 0)
			if leave(); ctx.Err() == nil {
				t.Error("a request ended before its client left")
			}
			if records, _ := g.router.Health.Records(); records[0].State != health.StateSilent {
				t.Errorf("the stuck worker is %s", records[0].State)
			}
		}
		all.Wait()
		if records, _ := g.router.Health.Records(); records[0].State != health.StateOut {
			t.Errorf("in the end the stuck worker is %s", records[0].State)
		}
		stop()
	})
}

// TestBehindAGatewayAnAnswerThatStallsEnds: its worker is stuck in the midst of it.
func TestBehindAGatewayAnAnswerThatStallsEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, stop := fleetWith(t, func(ctx context.Context) (*http.Response, string, error) {
			body, begun := io.Pipe() // nothing but its Close ends a read
			go io.WriteString(begun, "data: "+testkit.TokenEvent+"\n\n")
			return &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: body}, "", nil
		})
		began := time.Now()
		w, err := g.forward(t.Context(), 0)
		if took := time.Since(began); err == nil || took > givenUp+time.Second || strings.Count(w.Body.String(), `"error"`) != 1 {
			t.Errorf("the answer ended after %s, %v: %s", took, err, w.Body)
		}
		stop()
	})
}

// TestBehindAGatewayALongAnswerIsWaitedFor: it cannot be had elsewhere.
func TestBehindAGatewayALongAnswerIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, stop := fleetWith(t, func(ctx context.Context) (*http.Response, string, error) { return answersAfter(ctx, time.Minute) })
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				if w, err := g.forward(t.Context(), 0); err != nil || w.Body.String() != wholeAnswer {
					t.Errorf("%v: %s", err, w.Body)
				}
			})
		}
		all.Wait()
		stop()
	})
}

// TestBehindAGatewayRequestsAtAWorkerThatIsDownEnd: at the one that has them, which the
// gateway may have chosen.
func TestBehindAGatewayRequestsAtAWorkerThatIsDownEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		picked := make(chan uint64, 1) // and the other one serves
		g := newGatewayFleet(t, 3, func(to kv.Target, ctx context.Context) (*http.Response, string, error) {
			if to.Key.Worker < 2 {
				picked <- to.Key.Worker
				body, begun := io.Pipe()
				go io.WriteString(begun, "data: "+testkit.TokenEvent+"\n\n")
				return &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: body}, fmt.Sprintf("10.0.0.%d:8000", 1-to.Key.Worker), nil
			}
			<-ctx.Done()
			return nil, "", context.Cause(ctx)
		})
		ended := make(chan int, 2)
		for i, workers := range [][]uint64{{0, 1}, {2}} {
			go func() {
				if _, err := g.forward(t.Context(), workers...); err == nil {
					t.Error("no error")
				}
				ended <- i
			}()
		}
		time.Sleep(3 * time.Second) // the stream no longer flows
		first := <-picked
		for worker, want := range map[uint64]int{first: -1, 1 - first: 0, 2: 1} {
			g.proxy.Abort(worker, 1, "down")
			synctest.Wait()
			got := -1
			if len(ended) > 0 {
				got = <-ended
			}
			if got != want {
				t.Errorf("with worker %d ended request %d, want %d", worker, got, want)
			}
		}
	})
}

// TestBehindAGatewayAnotherWorkersAnswerIsWaitedFor: the gateway could not reach the picked
// worker, which is down, and reports only with the answer that another one has the request.
func TestBehindAGatewayAnotherWorkersAnswerIsWaitedFor(t *testing.T) {
	for takes, whole := range map[time.Duration]bool{5 * time.Second: true, time.Minute: false} {
		t.Run(takes.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				picked := make(chan uint64, 1)
				g := newGatewayFleet(t, 2, func(to kv.Target, ctx context.Context) (*http.Response, string, error) {
					picked <- to.Key.Worker
					answer, _, err := answersAfter(ctx, takes)
					return answer, fmt.Sprintf("10.0.0.%d:8000", 1-to.Key.Worker), err
				})
				go func() {
					first := <-picked
					time.Sleep(time.Second)
					g.router.Down(kv.WorkerKey{Worker: first})
					g.proxy.Abort(first, 1, "down")
				}()
				began := time.Now()
				_, err := g.forward(t.Context(), 0, 1)
				if took := time.Since(began); (err == nil) != whole || took > elsewhereFor+time.Second {
					t.Errorf("ended after %s: %v", took, err)
				}
			})
		})
	}
}
