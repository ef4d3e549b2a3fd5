package test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/testkit"
)

// The tests here run a router process over four workers, of which one or two are
// bad. Twelve clients ask one request after the other. With KVROUTER_CHAOS every
// policy meets every fault, else a sample does.

const (
	badClients = 12
	// goodAnswer is what a well worker takes for an answer.
	goodAnswer = 300 * time.Millisecond
)

// quartet is a router over four fake workers, of which the first are bad. Worker 0
// stands behind a link.
type quartet struct {
	*Router
	workers []*testkit.FakeWorker
	link    *testkit.Link
	bad     int                              // workers that are
	fault   atomic.Pointer[http.HandlerFunc] // how bad ones answer; nil: like all

	mu     sync.Mutex     // guards what follows
	firsts map[string]int // worker that a request went to first, by the request's id
	served []int          // good answers, by worker
}

// newQuartet starts a router with a policy at two ports and waits for its workers.
func newQuartet(t *testing.T, port int, policy string, bad int) *quartet {
	t.Helper()
	q := &quartet{bad: bad, firsts: map[string]int{}, served: make([]int, 4)}
	args := []string{"--engine=none", "--policy=" + policy, "--log-level=info"}
	for i := range q.served {
		worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, r *http.Request) { q.serve(i, w, r) })
		q.workers = append(q.workers, worker)
		url := worker.URL
		if i == 0 {
			q.link = testkit.NewLink(t, strings.TrimPrefix(url, "http://"))
			url = "http://" + q.link.Address()
		}
		args = append(args, fmt.Sprintf("--worker=url=%s,id=%d", url, i))
	}
	q.Router = StartAt(t, Program, port, nil, args...)
	q.WaitReady(len(q.workers), readyLimit)
	return q
}

// serve is worker i.
func (q *quartet) serve(i int, w http.ResponseWriter, r *http.Request) {
	id := r.Header.Get(web.HeaderRequest)
	q.mu.Lock()
	if _, known := q.firsts[id]; !known {
		q.firsts[id] = i
	}
	q.mu.Unlock()
	if fault := q.fault.Load(); fault != nil && i < q.bad {
		(*fault)(w, r)
		return
	}
	select {
	case <-time.After(goodAnswer):
	case <-r.Context().Done():
		return
	}
	if q.workers[i].Hung.Load() {
		q.workers[i].Hang(r)
		return
	}
	q.mu.Lock()
	q.served[i]++
	q.mu.Unlock()
	testkit.StreamOf(testkit.TokenEvent, `{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1}}`, "[DONE]")(w, r)
}

// fails makes the bad workers answer so; nil: they are well.
func (q *quartet) fails(fault http.HandlerFunc) {
	if fault == nil {
		q.fault.Store(nil)
		return
	}
	q.fault.Store(&fault)
}

// asked is how one request went.
type asked struct {
	began time.Time
	took  time.Duration
	ok    bool
}

// ask has the clients ask while more says so, with so much patience, and returns
// how each request went.
func (q *quartet) ask(ctx context.Context, patience time.Duration, more func(n int) bool) (all []asked) {
	var clients sync.WaitGroup
	var mu sync.Mutex // guards all and sent
	sent := 0
	for range badClients {
		clients.Go(func() {
			for {
				mu.Lock()
				n := sent
				sent++
				mu.Unlock()
				if !more(n) || ctx.Err() != nil {
					return
				}
				one := asked{began: time.Now()}
				limited, cancel := context.WithTimeout(ctx, patience)
				a, err := q.Chat(limited, Say(fmt.Sprint("request ", n)), true, 20)
				cancel()
				one.took, one.ok = time.Since(one.began), err == nil && a.Finished && !a.Broken
				mu.Lock()
				all = append(all, one)
				mu.Unlock()
			}
		})
	}
	clients.Wait()
	return all
}

// lost counts the requests without a whole answer.
func lost(all []asked) (n int) {
	for _, one := range all {
		if !one.ok {
			n++
		}
	}
	return n
}

// during asks for d.
func (q *quartet) during(t *testing.T, d, patience time.Duration) []asked {
	end := time.Now().Add(d)
	return q.ask(t.Context(), patience, func(int) bool { return time.Now().Before(end) })
}

// failure is one way to fail at once.
type failure struct {
	name  string
	bad   int              // workers
	serve http.HandlerFunc // nil: nothing listens any more
	limit float64          // share of the requests that may be lost
}

func failures() (all []failure) {
	for _, status := range []int{401, 404, 429, 500, 503, 529} {
		all = append(all, failure{fmt.Sprint(status), 1, answersAt(status), 0.02})
	}
	return append(all,
		failure{"broken stream", 1, breaksOff, 0.03},
		failure{"refused", 1, nil, 0.02},
		failure{"two with 500", 2, answersAt(500), 0.02})
}

// TestOneOfFourWorkersFails pins that a worker which fails at once does not draw
// the requests: it looks idle, and is not.
func TestOneOfFourWorkersFails(t *testing.T) {
	t.Parallel()
	const requests = 240
	kinds := failures()
	type match struct {
		policy string
		failure
	}
	var cases []match
	for p, name := range policies.Names {
		for k, kind := range kinds {
			// In the sample each policy meets two kinds, and together they meet all.
			if chaosAll() || name == "work" || k == 2*p%len(kinds) || k == (2*p+1)%len(kinds) {
				cases = append(cases, match{name, kind})
			}
		}
	}
	beside(t, "policy\tkind\tlost\tfirst attempts at a bad one", len(cases), func(i int) (string, func(t *testing.T, port int) string) {
		c := cases[i]
		return c.policy + "/" + c.name, func(t *testing.T, port int) string {
			q := newQuartet(t, port, c.policy, c.bad)
			if c.serve == nil {
				q.workers[0].Close()
			}
			q.fails(c.serve)
			all := q.ask(t.Context(), 20*time.Second, func(n int) bool { return n < requests })
			at := 0
			q.mu.Lock()
			for _, i := range q.firsts {
				if i < q.bad {
					at++
				}
			}
			q.mu.Unlock()
			if c.serve == nil { // it has not seen them, but the router sent each elsewhere
				_, page := testkit.HTTPGet(t, q.OpenAI+"/metrics")
				at = int(testkit.ReadMetricsPage(string(page))[`kvrouter_retries_total{worker_id="0"}`])
			}
			gone, first := float64(lost(all))/requests, float64(at)/requests/float64(q.bad)
			if gone > c.limit || first >= 0.05 {
				t.Errorf("%.1f %% lost, %.1f %% sent to a bad worker first; want at most %.0f %% and less than 5 %%", 100*gone, 100*first, 100*c.limit)
			}
			return fmt.Sprintf("%s\t%s\t%.1f %%\t%.1f %%", c.policy, c.name, 100*gone, 100*first)
		}
	})
}

// sampled returns the policies that a test is to run.
func sampled() []string {
	if chaosAll() {
		return policies.Names
	}
	return []string{"work"}
}

// TestOneOfFourWorkersIsWellAgain pins the way back: within 30 s.
func TestOneOfFourWorkersIsWellAgain(t *testing.T) {
	t.Parallel()
	const limit, answers = 30 * time.Second, 5
	beside(t, "policy\tback after", len(sampled()), func(i int) (string, func(t *testing.T, port int) string) {
		name := sampled()[i]
		return name, func(t *testing.T, port int) string {
			q := newQuartet(t, port, name, 1)
			q.fails(answersAt(500))
			q.during(t, 6*time.Second, 20*time.Second)
			q.fails(nil)
			well := time.Now()
			var back time.Duration
			q.ask(t.Context(), 20*time.Second, func(int) bool {
				q.mu.Lock()
				defer q.mu.Unlock()
				if q.served[0] >= answers && back == 0 {
					back = time.Since(well)
				}
				return back == 0 && time.Since(well) < limit
			})
			if back == 0 {
				t.Errorf("after %s it has given %d answers", limit, q.served[0])
				return name + "\tnot within 30 s"
			}
			return fmt.Sprintf("%s\t%.1f s", name, back.Seconds())
		}
	})
}

// TestOneOfFourWorkersIsStuck pins what a worker costs that answers /health and
// nothing else, where clients wait for 4 s: it must not draw the requests that its
// clients leave.
func TestOneOfFourWorkersIsStuck(t *testing.T) {
	t.Parallel()
	const patience = 4 * time.Second
	d := 30 * time.Second
	if chaosAll() { // policies that do not look at load send all clients there before it is known
		d = time.Minute
	}
	beside(t, "policy\tclient time lost\trequests lost\tand late", len(sampled()), func(i int) (string, func(t *testing.T, port int) string) {
		name := sampled()[i]
		return name, func(t *testing.T, port int) string {
			q := newQuartet(t, port, name, 1)
			q.fails(func(_ http.ResponseWriter, r *http.Request) { q.workers[0].Hang(r) })
			all := q.during(t, d, patience)
			var wasted, whole time.Duration
			waited := 0
			for _, one := range all {
				whole += one.took
				if !one.ok {
					wasted += one.took
				} else if one.took > 2*goodAnswer { // answered, but it waited
					wasted += one.took - goodAnswer
					waited++
				}
			}
			share := wasted.Seconds() / whole.Seconds()
			if share > 0.08 {
				t.Errorf("%.1f %% of the clients' time lost, want at most 8 %%", 100*share)
			}
			return fmt.Sprintf("%s\t%.1f %%\t%d of %d\t%d", name, 100*share, lost(all), len(all), waited)
		}
	})
}

// TestOneOfFourWorkersIsSilent pins that a worker which hangs whole, or whose
// network swallows all, is known within 10 s, and that what waits for it is
// answered elsewhere within 5 s more.
func TestOneOfFourWorkersIsSilent(t *testing.T) {
	t.Parallel()
	const known, answered = 10 * time.Second, 15 * time.Second
	kinds := []string{"hung", "half-open"}
	policies := sampled()
	beside(t, "policy\tkind\tknown after\tlongest answer\tlost", len(kinds)*len(policies), func(i int) (string, func(t *testing.T, port int) string) {
		name, kind := policies[i/len(kinds)], kinds[i%len(kinds)]
		return name + "/" + kind, func(t *testing.T, port int) string {
			q := newQuartet(t, port, name, 1)
			end := time.Now().Add(2 * time.Minute) // until it is known, below
			var all []asked
			var mu sync.Mutex // guards end
			var clients sync.WaitGroup
			clients.Go(func() {
				all = q.ask(t.Context(), time.Minute, func(int) bool {
					mu.Lock()
					defer mu.Unlock()
					return time.Now().Before(end)
				})
			})
			testkit.Eventually(t, known, "the worker answers", func() bool {
				q.mu.Lock()
				defer q.mu.Unlock()
				return q.served[0] >= 5
			})
			silent := time.Now()
			if kind == "hung" {
				q.workers[0].Hung.Store(true)
			} else {
				q.link.Silence()
			}
			took := time.Duration(0)
			for time.Since(silent) < 3*known && took == 0 {
				w := gjson.GetBytes(q.Get(q.Port+"/workers"), "#(worker_id==0)")
				if w.Get("lifecycle").Str != "schedulable" || w.Get("failures.state").Str == "ejected" || w.Get("failures.state").Str == "silent" {
					took = time.Since(silent)
				}
				<-time.After(50 * time.Millisecond)
			}
			mu.Lock()
			end = time.Now()
			mu.Unlock()
			clients.Wait()
			longest := time.Duration(0)
			for _, one := range all {
				longest = max(longest, one.took)
			}
			if took == 0 || took > known || longest > answered || lost(all) > 0 {
				t.Errorf("known after %s, want %s; the longest of %d answers %s, want %s; %d lost", took, known, len(all), longest, answered, lost(all))
			}
			return fmt.Sprintf("%s\t%s\t%.1f s\t%.1f s\t%d of %d", name, kind, took.Seconds(), longest.Seconds(), lost(all), len(all))
		}
	})
}
