package proxy

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/testkit"
)

// poisons are the ways in which a request can fail at every worker.
var poisons = map[string]http.HandlerFunc{
	"500":              says(500),
	"503":              says(503),
	"503, Retry-After": says(503, "Retry-After", "60"),
	"429":              says(429),
	"429, Retry-After": says(429, "Retry-After", "60"),
	"reset":            func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	"cut stream":       breaks,
	"cut answer": func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, wholeAnswer[:20])
		panic(http.ErrAbortHandler)
	},
	"hung": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
	"slow": after(4 * time.Second),
}

// crowd is two clients before a fleet: the requests of one fail at every worker.
type crowd struct {
	*failingFleet
	attempts atomic.Int64 // of the client that fails
	met      atomic.Int64 // failures of ill workers that the other met
	bad      tallied      // requests of that client
	good     tallied
}

// tallied counts requests and those without a good answer.
type tallied struct{ all, lost atomic.Int64 }

// newCrowd returns four workers, of which the first so many answer nothing but 500.
func newCrowd(t *testing.T, rule string, ill int) *crowd {
	c := new(crowd)
	var serve []http.HandlerFunc
	for i := range 4 {
		serve = append(serve, func(w http.ResponseWriter, r *http.Request) {
			kind := r.Header.Get(headerKind)
			if kind != "" {
				c.attempts.Add(1)
			}
			if !pause(r.Context(), 2*time.Millisecond) {
				return
			}
			switch {
			case i < ill:
				if kind == "" {
					c.met.Add(1)
				}
				says(500)(w, r)
			case kind != "":
				poisons[kind](w, r)
			default:
				after(time.Duration(20+rand.IntN(20))*time.Millisecond)(w, r)
			}
		})
	}
	c.failingFleet = newMemoryFleet(t, rule, serve...)
	return c
}

// pause waits, unless ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// ask has a client send requests of that kind one after the other until ctx ends, with a
// pause between them, and so much patience for each.
func (c *crowd) ask(ctx context.Context, client, kind string, count *tallied, between, patience time.Duration) {
	for pause(ctx, between) {
		limited, leave := context.WithTimeoutCause(context.WithoutCancel(ctx), patience, context.Canceled)
		w, err := c.forward(limited, client, kind, 2, &Exchange{})
		leave()
		count.all.Add(1)
		if err != nil || w.Code != http.StatusOK || strings.Contains(w.Body.String(), `"error"`) {
			count.lost.Add(1)
		}
	}
}

// TestOneClientsFailuresStayWithThatClient is the table of all that a client's requests can
// do at every worker, under all policies, with and without a worker that is ill: the other client
// loses next to nothing, and workers that are well are in.
func TestOneClientsFailuresStayWithThatClient(t *testing.T) {
	const lasts = 6 * time.Second
	rules := policies.Names
	if testing.Short() || testkit.RaceDetector {
		rules = []string{"work", "round-robin"}
	}
	for kind := range poisons {
		for _, rule := range rules {
			for ill := range 2 {
				t.Run(fmt.Sprintf("%s/%s/%d ill", kind, rule, ill), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						c := newCrowd(t, rule, ill)
						ctx, stop := context.WithTimeout(t.Context(), lasts)
						defer stop()
						var all sync.WaitGroup
						for range 4 {
							all.Go(func() { c.ask(ctx, "good", "", &c.good, 0, 20*time.Second) })
						}
						for range 3 {
							all.Go(func() { c.ask(ctx, "bad", kind, &c.bad, 15*time.Millisecond, 10*time.Second) })
						}
						out := 0
						for pause(ctx, 100*time.Millisecond) {
							records, _ := c.router.Health.Records()
							for _, r := range records[ill:] {
								if r.State == health.StateOut || r.State == health.StateHeld {
									out++
								}
							}
						}
						records, _ := c.router.Health.Records()
						all.Wait()
						requests, each := c.bad.all.Load(), float64(c.attempts.Load())/float64(c.bad.all.Load())
						t.Logf("good: %d of %d lost; bad: %d requests, %.2f attempts each, %d denied; well workers out %.1f %% of the time", c.good.lost.Load(), c.good.all.Load(), requests, each, c.denied.Load(), 100*float64(out)/60/float64(4-ill))
						if c.good.lost.Load()*100 > c.good.all.Load() || c.good.all.Load() < 300 {
							t.Errorf("%d of %d requests of the good client were lost", c.good.lost.Load(), c.good.all.Load())
						}
						if most := 1.4 + float64(health.BudgetLeast)/float64(requests); requests > 100 && each > most {
							t.Errorf("%.2f attempts for each of %d requests that fail everywhere, want at most %.2f", each, requests, most)
						}
						if share := float64(out) / 60 / float64(4-ill); share > 0.1 {
							t.Errorf("workers that are well were out %.0f %% of the time", 100*share)
						}
						for i, r := range records {
							if i >= ill && (r.State == health.StateOut || r.State == health.StateHeld) {
								t.Errorf("worker %d is %s in the end (%s)", i, r.State, r.Why)
							}
							if i < ill && len(r.Ejections) == 0 && c.met.Load() > 5 {
								t.Errorf("worker %d was never ejected, and failed %d requests of the good client", i, c.met.Load())
							}
						}
					})
				})
			}
		}
	}
}

// TestAttemptsAreBoundedWhereAllWorkersFail: on the whole, and for each client, however much
// or little it asks for.
func TestAttemptsAreBoundedWhereAllWorkersFail(t *testing.T) {
	const lasts, most = 30 * time.Second, 1.4
	for kind := range poisons {
		if kind == "hung" || kind == "slow" || strings.HasPrefix(kind, "cut") && testing.Short() {
			continue
		}
		t.Run(kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				attempts := map[string]*atomic.Int64{"often": {}, "now and then": {}}
				serve := func(w http.ResponseWriter, r *http.Request) {
					attempts[r.Header.Get(headerKind)].Add(1)
					if pause(r.Context(), 2*time.Millisecond) {
						poisons[kind](w, r)
					}
				}
				c := &crowd{failingFleet: newMemoryFleet(t, "round-robin", serve, serve, serve, serve)}
				ctx, stop := context.WithTimeout(t.Context(), lasts)
				defer stop()
				var all sync.WaitGroup
				for range 4 {
					all.Go(func() { c.ask(ctx, "often", "often", &c.bad, 10*time.Millisecond, time.Minute) })
				}
				all.Go(func() { c.ask(ctx, "now and then", "now and then", &c.good, 50*time.Millisecond, time.Minute) })
				all.Wait()
				sent, tried, windows := 0.0, 0.0, lasts.Seconds()/health.BudgetSeconds
				for client, count := range map[string]*tallied{"often": &c.bad, "now and then": &c.good} {
					n, each := float64(count.all.Load()), float64(attempts[client].Load())
					sent, tried = sent+n, tried+each
					if each > most*n+health.BudgetLeast*windows {
						t.Errorf("%s: %.0f attempts at %.0f requests", client, each, n)
					}
				}
				if t.Logf("%.0f attempts at %.0f requests", tried, sent); tried > most*sent {
					t.Errorf("%.0f attempts at %.0f requests", tried, sent)
				}
			})
		})
	}
}
