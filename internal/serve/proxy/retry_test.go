package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// failingFleet is a proxy over fake workers.
type failingFleet struct {
	router *router.Router
	proxy  *Proxy
	first  []atomic.Int64 // first attempts, by worker
	denied atomic.Int64   // retries
}

// counter counts what the proxy says beside what is relayed.
type counter struct {
	testkit.SilentObserver
	denied *atomic.Int64
}

func (c counter) RetryDenied(string) { c.denied.Add(1) }

// newFailingFleet starts a worker for each handler; nil: nothing listens.
func newFailingFleet(t testing.TB, rule string, serve ...http.HandlerFunc) *failingFleet {
	t.Helper()
	var urls []string
	for _, handler := range serve {
		url := "http://127.0.0.1:1"
		if handler != nil {
			url = testkit.NewFakeWorker(t, handler).URL
		}
		urls = append(urls, url)
	}
	return newFleetOver(t, rule, nil, urls)
}

// newMemoryFleet is newFailingFleet in memory, for a synctest bubble.
func newMemoryFleet(t testing.TB, rule string, serve ...http.HandlerFunc) *failingFleet {
	t.Helper()
	var urls []string
	workers := memory{}
	for i, handler := range serve {
		host := fmt.Sprint("worker-", i)
		workers[host] = handler
		urls = append(urls, "http://"+host)
	}
	return newFleetOver(t, rule, workers, urls)
}

// newFleetOver returns a proxy over the workers at urls.
func newFleetOver(t testing.TB, rule string, transport http.RoundTripper, urls []string) *failingFleet {
	t.Helper()
	recorded := routertest.WithSettings(func(s *router.Settings) { s.RecordDecisions = true })
	f := &failingFleet{router: routertest.New(t, rule, 0, recorded), first: make([]atomic.Int64, len(urls))}
	for i, url := range urls {
		f.router.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, URL: url, Generation: 1})
	}
	settings := testkit.Defaults[Settings]()
	settings.RequestTimeout = time.Minute
	f.proxy = New(settings, Deps{Observer: counter{denied: &f.denied}, Failed: func(uint64) {}, Transport: transport})
	t.Cleanup(func() {
		f.proxy.Close()
		if n := routertest.InFlight(f.router); n != 0 {
			t.Errorf("%d requests are still booked", n)
		}
		if err := f.router.Check(); err != nil {
			t.Error(err)
		}
		f.proxy.inflights.mu.Lock()
		defer f.proxy.inflights.mu.Unlock()
		if n := len(f.proxy.inflights.workers); n != 0 {
			t.Errorf("%d workers still have requests on their way", n)
		}
	})
	return f
}

// send forwards one request.
func (f *failingFleet) send(ctx context.Context, retries int) (*httptest.ResponseRecorder, error) {
	return f.exchange(ctx, retries, &Exchange{})
}

// exchange is send that describes the request in x.
func (f *failingFleet) exchange(ctx context.Context, retries int, x *Exchange) (*httptest.ResponseRecorder, error) {
	return f.forward(ctx, "a", "", retries, x)
}

// headerKind says what a request is like, for workers that treat requests differently.
const headerKind = "X-Kind"

// forward is exchange of a client, for a request of that kind.
func (f *failingFleet) forward(ctx context.Context, client, kind string, retries int, x *Exchange) (*httptest.ResponseRecorder, error) {
	w := httptest.NewRecorder()
	u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Route: testkit.ChatPath, Header: http.Header{web.HeaderRequest: {"r"}, headerKind: {kind}}, Client: client, EndMarked: true, MaxRetries: retries}
	err := f.proxy.Forward(ctx, w, u, x, chooseOne(func(exclude []uint64) (router.Decision, error) {
		d, err := f.router.Route(ctx, router.Request{Client: client, Exclude: exclude, AnsweredWhole: true})
		if err == nil && len(exclude) == 0 {
			f.first[d.Target.Key.Worker].Add(1)
		}
		return d, err
	}))
	return w, err
}

// roundTrip is a transport of one function.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// errNoDescriptors is what dialing ends with where no file descriptor is left.
var errNoDescriptors = &net.OpError{Op: "dial", Err: os.NewSyscallError("socket", syscall.EMFILE)}

const wholeAnswer = `{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":20}}`

// after answers well after so long.
func after(wait time.Duration) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(wait):
			io.WriteString(w, wholeAnswer)
		case <-r.Context().Done():
		}
	}
}

// says answers with a status and headers (name, value).
func says(status int, headers ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i+1 < len(headers); i += 2 {
			w.Header().Set(headers[i], headers[i+1])
		}
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"error":"status %d"}`, status)
	}
}

// breaks streams one event and breaks off.
func breaks(w http.ResponseWriter, r *http.Request) {
	testkit.StreamOf(testkit.TokenEvent)(w, r)
	http.NewResponseController(w).Flush()
	panic(http.ErrAbortHandler)
}

// TestAWorkerThatFailsFastDoesNotDrawTheTraffic is the table of all kinds of failure
// under all policies.
func TestAWorkerThatFailsFastDoesNotDrawTheTraffic(t *testing.T) {
	const requests, clients = 240, 12
	rules := policies.Names
	if testing.Short() || testkit.RaceDetector {
		rules = []string{"work", "standalone"}
	}
	for _, kind := range []struct {
		name string
		bad  []http.HandlerFunc
		lost float64 // share that may be
	}{
		{"401", []http.HandlerFunc{says(401)}, 0.02},
		{"404", []http.HandlerFunc{says(404)}, 0.02},
		{"429", []http.HandlerFunc{says(429)}, 0.02},
		{"429, Retry-After", []http.HandlerFunc{says(429, "Retry-After", "5")}, 0.02},
		{"500", []http.HandlerFunc{says(500)}, 0.02},
		{"503", []http.HandlerFunc{says(503)}, 0.02},
		{"503, Retry-After", []http.HandlerFunc{says(503, "Retry-After", "5")}, 0.02},
		{"529", []http.HandlerFunc{says(529)}, 0.02},
		{"refused", []http.HandlerFunc{nil}, 0.02},
		{"stream breaks", []http.HandlerFunc{breaks}, 0.03},
		{"two of four 500", []http.HandlerFunc{says(500), says(500)}, 0.02},
		{"three of four 500", []http.HandlerFunc{says(500), says(500), says(500)}, 0.08}, // before they are known all three tries may meet one
	} {
		for _, rule := range rules {
			t.Run(kind.name+"/"+rule, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					serve := slices.Clone(kind.bad)
					for len(serve) < 4 {
						serve = append(serve, after(10*time.Millisecond))
					}
					f := newMemoryFleet(t, rule, serve...)
					var lost, next atomic.Int64
					var all sync.WaitGroup
					for range clients {
						all.Go(func() {
							for next.Add(1) <= requests {
								if w, err := f.send(t.Context(), 2); err != nil || w.Code != http.StatusOK || strings.Contains(w.Body.String(), `"error"`) {
									lost.Add(1)
								}
							}
						})
					}
					all.Wait()
					first := int64(0)
					for i := range kind.bad {
						first += f.first[i].Load()
					}
					if t.Logf("lost %d, first attempts at the bad ones %d of %d", lost.Load(), first, requests); float64(lost.Load()) > kind.lost*requests {
						t.Errorf("%d of %d requests were lost", lost.Load(), requests)
					}
					if first > requests*int64(len(kind.bad))/20 {
						t.Errorf("%d of %d requests went to a bad worker first", first, requests)
					}
				})
			})
		}
	}
}

// TestWhatTheClientGets is about requests that no worker takes.
func TestWhatTheClientGets(t *testing.T) {
	for _, test := range []struct {
		name    string
		workers []http.HandlerFunc // tried in this order
		retries int
		want    int // status; 0: an error
		tried   int
	}{
		{"the client's mistake", []http.HandlerFunc{says(400), says(200), says(200)}, 2, 400, 1},
		{"what all call unknown", []http.HandlerFunc{says(404), says(404), says(404)}, 2, 404, 2},
		{"what one calls unknown", []http.HandlerFunc{says(404), says(200), says(200)}, 2, 200, 2},
		{"what one forbids and others fail", []http.HandlerFunc{says(403), says(500), says(500)}, 2, 403, 3},
		{"no key anywhere, another status each", []http.HandlerFunc{says(401), says(403), says(404)}, 2, 401, 3},
		{"all have too much to do", []http.HandlerFunc{says(429, "X-Mine", "1"), says(503, "Retry-After", "7"), says(529)}, 2, 529, 3},
		{"all fail", []http.HandlerFunc{says(500), says(502), says(503)}, 2, 503, 3},
		{"all fail, the last without an answer", []http.HandlerFunc{says(500), says(502), nil}, 2, 0, 3},
		{"more fail than are tried", []http.HandlerFunc{says(500), says(502), says(200)}, 1, 502, 2},
		{"no retries", []http.HandlerFunc{says(500), says(200)}, 0, 500, 1},
		{"no retries, a pause", []http.HandlerFunc{says(429), says(200)}, 0, 429, 1},
		{"what no worker can", []http.HandlerFunc{says(501), says(200)}, 2, 501, 1},
		{"timed out behind the worker", []http.HandlerFunc{says(504), says(200)}, 2, 200, 2},
		{"two pauses, then an answer", []http.HandlerFunc{says(429), says(529), says(200)}, 2, 200, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			var tried atomic.Int64
			var serve []http.HandlerFunc
			for _, handler := range test.workers {
				if handler == nil {
					handler = func(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) }
				}
				serve = append(serve, func(w http.ResponseWriter, r *http.Request) { tried.Add(1); handler(w, r) })
			}
			f := newFailingFleet(t, "round-robin", serve...)
			x := &Exchange{}
			w, err := f.exchange(t.Context(), test.retries, x)
			if (err != nil) != (test.want == 0) || err == nil && (w.Code != test.want || w.Body.String() != fmt.Sprintf(`{"error":"status %d"}`, test.want)) {
				t.Errorf("%d %s, %v; want %d", w.Code, w.Body, err, test.want)
			}
			if n := tried.Load(); int(n) != test.tried {
				t.Errorf("%d workers were tried, want %d", n, test.tried)
			}
			if len(x.Receipts) != test.tried {
				t.Errorf("%d receipts of %d tries", len(x.Receipts), test.tried)
			}
		})
	}
}

func TestWhoIsMisconfigured(t *testing.T) {
	for _, test := range []struct {
		name   string
		others http.HandlerFunc
		want   string // state of the first
	}{
		{"others accept", says(200), health.StateOut},
		{"others say the same", says(401), health.StateIn},
		{"others fail", says(500), health.StateIn},
	} {
		t.Run(test.name, func(t *testing.T) {
			f := newFailingFleet(t, "round-robin", says(401), test.others, test.others)
			f.send(t.Context(), 2)
			records, _ := f.router.Health.Records()
			if records[0].State != test.want || test.want == health.StateOut && records[0].Reason != health.Misconfigured {
				t.Errorf("it is %s (%s), want %s", records[0].State, records[0].Reason, test.want)
			}
		})
	}
	t.Run("what only its worker knows", func(t *testing.T) {
		if r := refusalOf(404, http.Header{}, "/v1/responses", time.Now()); r != (refusal{}) {
			t.Errorf("%+v", r)
		}
	})
}

func TestAMistakeOfAllIsForgiven(t *testing.T) {
	f := newFailingFleet(t, "round-robin", says(500), says(500), says(500))
	for range 4 { // within the budget
		if w, err := f.send(t.Context(), 2); err != nil || w.Code != http.StatusInternalServerError {
			t.Fatalf("%d, %v", w.Code, err)
		}
	}
	records, _ := f.router.Health.Records()
	for _, r := range records {
		if r.State != health.StateIn || r.Row != 0 {
			t.Errorf("%+v", r)
		}
	}
}

func TestRetriesOfAFleetHaveABudget(t *testing.T) {
	bad := func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) }
	f := newFailingFleet(t, "round-robin", bad, bad, bad, bad)
	tried := 0
	for range 200 {
		f.send(t.Context(), 2)
	}
	for i := range f.first {
		tried += int(f.first[i].Load())
	}
	if f.denied.Load() == 0 {
		t.Error("all workers fail and every request is repeated")
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 11, 22, 7, 0, 0, 0, time.UTC)
	for text, want := range map[string]time.Duration{
		"": 0, "5": 5 * time.Second, "0.5": 500 * time.Millisecond, "0": 0, "-3": 0, "soon": 0, "NaN": 0,
		"86400": health.LongestPause, "1e300": health.LongestPause, "Inf": health.LongestPause,
		"Sun, 22 Nov 2026 07:00:09 GMT": 9 * time.Second, "Sun, 22 Nov 2026 06:00:00 GMT": 0, "Sun, 22 Nov 2099 06:00:00 GMT": health.LongestPause,
	} {
		pause, given := retryAfter(http.Header{"Retry-After": {text}}, now)
		if pause != want || given != (text != "") {
			t.Errorf("%q: %s, %v; want %s", text, pause, given, want)
		}
	}
}

func FuzzRetryAfter(f *testing.F) {
	for _, text := range []string{"", "5", "-1", "1e999", "NaN", "Sun, 22 Nov 2026 07:00:09 GMT"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if pause, _ := retryAfter(http.Header{"Retry-After": {text}}, time.Unix(0, math.MaxInt64)); pause < 0 || pause > health.LongestPause {
			t.Errorf("%q: %s", text, pause)
		}
	})
}

// TestAnAnswerThatIsStoppedIsGivenElsewhere: a vLLM that shuts down stops what it has.
func TestAnAnswerThatIsStoppedIsGivenElsewhere(t *testing.T) {
	stops := func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, strings.Replace(wholeAnswer, "stop", "abort", 1))
	}
	f := newFailingFleet(t, "round-robin", stops, after(0))
	for range 4 {
		if w, err := f.send(t.Context(), 2); err != nil || w.Body.String() != wholeAnswer {
			t.Errorf("%s, %v", w.Body, err)
		}
	}
	stopped := 0
	for range 2 {
		w, err := f.send(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		stopped += strings.Count(w.Body.String(), "abort")
	}
	if stopped != 1 {
		t.Errorf("without retries %d of 2 answers were stopped", stopped)
	}
}

// TestALongAnswerIsBegunOnce: it comes whole, so that its worker is silent meanwhile.
func TestALongAnswerIsBegunOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		long := after(15 * time.Second)
		var n atomic.Int64
		serve := func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("X-Long") != "" {
				n.Add(1)
				long(w, r)
				return
			}
			after(10*time.Millisecond)(w, r)
		}
		f := newMemoryFleet(t, "round-robin", serve, serve, serve)
		for range 20 {
			if _, err := f.send(t.Context(), 2); err != nil {
				t.Fatal(err)
			}
		}
		w := httptest.NewRecorder()
		u := Upstream{Method: http.MethodPost, Path: testkit.ChatPath, Header: http.Header{web.HeaderRequest: {"r"}, "X-Long": {"1"}}, MaxRetries: 2}
		err := f.proxy.Forward(t.Context(), w, u, &Exchange{}, chooseOne(func(exclude []uint64) (router.Decision, error) {
			return f.router.Route(t.Context(), router.Request{Exclude: exclude, AnsweredWhole: true})
		}))
		if err != nil || w.Body.String() != wholeAnswer || n.Load() > 1 {
			t.Errorf("%s, %v, sent %d times", w.Body, err, n.Load())
		}
	})
}

func TestOutOfDescriptorsIsNobodysFault(t *testing.T) {
	f := newFailingFleet(t, "round-robin", after(0), after(0))
	f.proxy.client = &http.Client{Transport: roundTrip(func(*http.Request) (*http.Response, error) { return nil, errNoDescriptors })}
	for range 5 {
		if _, err := f.send(t.Context(), 2); !errors.Is(err, errNoDescriptors) {
			t.Fatal(err)
		}
	}
	records, _ := f.router.Health.Records()
	for _, r := range records {
		if r.State != health.StateIn || r.Row != 0 {
			t.Errorf("%+v", r)
		}
	}
}
