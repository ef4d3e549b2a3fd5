package router

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
)

// newQueueingRouter returns a router whose requests wait while their workers
// have more than 8 prompt tokens to compute.
func newQueueingRouter(t testing.TB, workers int, policy string, limit int) (*Router, *testkit.StandingClock) {
	t.Helper()
	threshold := 0.5
	knobs := testkit.Defaults[Settings]()
	knobs.QueueSettings = QueueSettings{RouterQueueThreshold: &threshold, RouterQueuePolicy: policy, RouterQueueTimeout: time.Minute, RouterQueueLimit: limit}
	if err := knobs.Validate(); err != nil {
		t.Fatal(err)
	}
	r, clock := NewClockedRouter(t, 0, knobs)
	for i := range workers {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Models: []string{"m"}, MaxBatchedTokens: 16})
	}
	return r, clock
}

// queued is a request that was sent and has perhaps to wait.
type queued struct {
	decision Decision
	err      error
	done     chan struct{}
}

// send routes a request that is expected to wait behind depth - 1 others.
func send(t testing.TB, r *Router, ctx context.Context, depth int, request Request) *queued {
	t.Helper()
	q := &queued{done: make(chan struct{})}
	go func() {
		defer close(q.done)
		q.decision, q.err = r.Route(ctx, request)
	}()
	expectDepth(t, r, depth)
	return q
}

func expectDepth(t testing.TB, r *Router, depth int) {
	t.Helper()
	testkit.Eventually(t, 5*time.Second, fmt.Sprintf("%d requests wait", depth), func() bool { n, _ := r.Admission.QueueDepth(); return n == depth })
}

// get waits for the decision.
func (q *queued) get(t testing.TB) (Decision, error) {
	t.Helper()
	select {
	case <-q.done:
	case <-time.After(5 * time.Second):
		t.Fatal("a request waits that should not")
	}
	return q.decision, q.err
}

func (q *queued) waits() bool {
	select {
	case <-q.done:
		return false
	default:
		return true
	}
}

// occupy gives a worker so many prompt tokens to compute.
func occupy(t testing.TB, r *Router, w uint64, tokens int) *Booking {
	t.Helper()
	b, err := r.Book(Request{NumTokens: tokens}, kv.WorkerKey{Worker: w})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestQueueParksAndDrainsAtTheThreshold(t *testing.T) {
	r, clock := newQueueingRouter(t, 1, queueFCFS, 10)
	full := occupy(t, r, 0, 8)
	MustRoute(t, r, Request{NumTokens: 1}).Booking.End() // 8 tokens are no more than the threshold
	more := occupy(t, r, 0, 1)
	first := send(t, r, t.Context(), 1, Request{NumTokens: 20})
	second := send(t, r, t.Context(), 2, Request{NumTokens: 30})
	if n, tokens := r.Admission.QueueDepth(); n != 2 || tokens != 50 {
		t.Errorf("%d requests of %d tokens wait, want 2 of 50", n, tokens)
	}
	if d := MustRoute(t, r, Request{NumTokens: 1, QueryOnly: true}); d.Booking != nil {
		t.Error("a query was booked")
	}
	clock.Advance(3 * time.Second)
	more.FirstToken()
	d, err := first.get(t)
	if err != nil || d.QueueTime != 3*time.Second || d.Tokens != 20 {
		t.Fatalf("%+v, %v", d, err)
	}
	full.End()
	if !second.waits() {
		t.Error("the second went although the first has filled the worker")
	}
	d.Booking.End()
	if d, err := second.get(t); err != nil || d.Target.Key.Worker != 0 {
		t.Fatal(d, err)
	}
	expectDepth(t, r, 0)
	if err := r.Check(); err != nil {
		t.Error(err)
	}
}

func TestQueueOrders(t *testing.T) {
	// Three requests come a second apart and go one after the other.
	tests := []struct {
		name, policy string
		requests     [3]Request
		want         [3]int
	}{
		{"fcfs by arrival", queueFCFS, [3]Request{{}, {}, {}}, [3]int{0, 1, 2}},
		{"fcfs with jump", queueFCFS, [3]Request{{}, {PriorityJump: 0.5}, {PriorityJump: 1.7}}, [3]int{0, 2, 1}},
		{"a negative jump is none", queueFCFS, [3]Request{{PriorityJump: -9}, {}, {}}, [3]int{0, 1, 2}},
		{"lcfs by arrival", queueLCFS, [3]Request{{}, {}, {}}, [3]int{2, 1, 0}},
		{"lcfs with jump", queueLCFS, [3]Request{{PriorityJump: 5}, {}, {}}, [3]int{0, 2, 1}},
		{"strict priority goes before any jump", queueFCFS, [3]Request{{PriorityJump: 1000}, {StrictPriority: 1}, {StrictPriority: 2}}, [3]int{2, 1, 0}},
		{"strict priority goes before the shorter", queueWSPT, [3]Request{{NumTokens: 1}, {NumTokens: 900, StrictPriority: 1}, {NumTokens: 2}}, [3]int{1, 0, 2}},
		{"wspt shorter first", queueWSPT, [3]Request{{NumTokens: 900}, {NumTokens: 20}, {NumTokens: 90}}, [3]int{1, 2, 0}},
		{"wspt with jump", queueWSPT, [3]Request{{NumTokens: 20}, {NumTokens: 90, PriorityJump: 9}, {NumTokens: 30}}, [3]int{1, 0, 2}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			r, clock := newQueueingRouter(t, 1, test.policy, 10)
			full := occupy(t, r, 0, 9)
			var waiting [3]*queued
			for i, request := range test.requests {
				request.NumTokens = max(request.NumTokens, 20)
				if test.policy == queueWSPT {
					request.NumTokens = max(test.requests[i].NumTokens, 9)
				}
				waiting[i] = send(t, r, t.Context(), i+1, request)
				clock.Advance(time.Second)
			}
			for _, next := range test.want {
				full.End()
				d, err := waiting[next].get(t)
				if err != nil {
					t.Fatal(err)
				}
				full = d.Booking
			}
		})
	}
}

func TestQueueScoreOfWSPT(t *testing.T) {
	for _, test := range []struct {
		name   string
		tokens int
		held   [2]int // tokens of the prompt that workers 0 and 1 have
		pinned *kv.WorkerKey
		want   float64
	}{
		{"no overlap", 512, [2]int{}, nil, 1.0 / 512},
		{"overlap reduces cost", 1024, [2]int{960}, nil, 1.0 / 64},
		{"the best overlap counts", 1024, [2]int{160, 960}, nil, 1.0 / 64},
		{"a pinned worker's overlap counts", 1024, [2]int{960, 16}, &kv.WorkerKey{Worker: 1}, 1.0 / 1008},
		{"a pinned worker without overlap", 1024, [2]int{960, 0}, &kv.WorkerKey{Worker: 1}, 1.0 / 1024},
		{"a full overlap clamps to 1", 512, [2]int{512}, nil, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, _ := newQueueingRouter(t, 2, queueWSPT, 10)
			prompt := testkit.Tokens(1, test.tokens)
			for w, n := range test.held {
				Hold(r, uint64(w), prompt[:n])
				occupy(t, r, uint64(w), 9)
			}
			ctx, cancel := context.WithCancel(t.Context())
			q := send(t, r, ctx, 1, Request{Tokens: prompt, Pinned: test.pinned})
			r.mu.Lock()
			got := r.Admission.waiting[0].score
			r.mu.Unlock()
			if got != test.want {
				t.Errorf("score 1/%v, want 1/%v", 1/got, 1/test.want)
			}
			cancel()
			q.get(t)
		})
	}
}

func TestQueueIsNotOvertaken(t *testing.T) {
	r, _ := newQueueingRouter(t, 2, queueFCFS, 10)
	busy := []*Booking{occupy(t, r, 0, 9), occupy(t, r, 1, 9)}
	pinned := send(t, r, t.Context(), 1, Request{NumTokens: 20, Pinned: &kv.WorkerKey{Worker: 1}})
	free := send(t, r, t.Context(), 2, Request{NumTokens: 20})
	busy[0].End() // the pinned one, which is first, cannot use it
	if d, err := free.get(t); err != nil || d.Target.Key.Worker != 0 {
		t.Fatal(d, err)
	}
	late := send(t, r, t.Context(), 2, Request{NumTokens: 1, Allowed: []uint64{1}})
	busy[1].FirstToken()
	if d, err := pinned.get(t); err != nil || d.Target.Key.Worker != 1 {
		t.Fatal(d, err)
	}
	if !late.waits() {
		t.Error("the late one went first")
	}
	pinned.decision.Booking.End()
	late.get(t)
}

func TestQueueLeftByAClientThatIsGone(t *testing.T) {
	r, _ := newQueueingRouter(t, 1, queueFCFS, 10)
	full := occupy(t, r, 0, 9)
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := send(t, r, ctx, 1, Request{ID: "a", NumTokens: 20})
	stays := send(t, r, t.Context(), 2, Request{NumTokens: 20})
	if _, err := r.Route(t.Context(), Request{ID: "a", NumTokens: 20}); !errors.Is(err, ErrDuplicate) {
		t.Errorf("the id of one that waits was taken: %v", err)
	}
	cause := errors.New("client gone")
	cancel(cause)
	if _, err := gone.get(t); !errors.Is(err, cause) {
		t.Errorf("error %v, want the context's cause", err)
	}
	expectDepth(t, r, 1)
	full.End()
	stays.get(t)
}

// TestQueueRollsBackIfTheCallerIsGone lets a decision and the end of its context
// come together: whichever is seen, the books are even in the end.
func TestQueueRollsBackIfTheCallerIsGone(t *testing.T) {
	for range 200 {
		r, _ := newQueueingRouter(t, 1, queueFCFS, 10)
		full := occupy(t, r, 0, 9)
		ctx, cancel := context.WithCancel(t.Context())
		q := send(t, r, ctx, 1, Request{NumTokens: 20})
		go cancel()
		full.End()
		if d, err := q.get(t); err == nil {
			d.Booking.End()
		}
		expectLoad(t, r, 0, 0, 0)
	}
}

func TestQueueIsBounded(t *testing.T) {
	r, _ := newQueueingRouter(t, 1, queueFCFS, 2)
	full := occupy(t, r, 0, 9)
	first := send(t, r, t.Context(), 1, Request{NumTokens: 1})
	second := send(t, r, t.Context(), 2, Request{NumTokens: 1})
	if _, err := r.Route(t.Context(), Request{NumTokens: 1}); !errors.Is(err, ErrQueueFull) {
		t.Errorf("a third: %v, want ErrQueueFull", err)
	}
	full.End()
	first.get(t)
	second.get(t)
}

// TestAFullQueueIsSharedByClients: those of the client with the most give way, the last first.
func TestAFullQueueIsSharedByClients(t *testing.T) {
	r, _ := newQueueingRouter(t, 1, queueFCFS, 4)
	full := occupy(t, r, 0, 9)
	var flood []*queued
	for i := range 4 {
		flood = append(flood, send(t, r, t.Context(), i+1, Request{NumTokens: 1, Client: "greedy"}))
	}
	other := send(t, r, t.Context(), 4, Request{NumTokens: 1, Client: "other"})
	third := send(t, r, t.Context(), 4, Request{NumTokens: 1, Client: "third"})
	for _, q := range flood[2:] {
		if _, err := q.get(t); !errors.Is(err, ErrQueueFull) {
			t.Errorf("one of the client with the most: %v, want ErrQueueFull", err)
		}
	}
	for _, client := range []string{"greedy", "other", "third"} {
		if _, err := r.Route(t.Context(), Request{NumTokens: 1, Client: client}); !errors.Is(err, ErrQueueFull) {
			t.Errorf("one more of %s: %v, want ErrQueueFull", client, err)
		}
	}
	full.End()
	for _, q := range append(flood[:2], other, third) {
		if _, err := q.get(t); err != nil {
			t.Error(err)
		}
	}
}

func TestQueueWaitsHaveALimit(t *testing.T) {
	r, _ := newQueueingRouter(t, 1, queueFCFS, 2)
	r.settings.RouterQueueTimeout = time.Millisecond
	full := occupy(t, r, 0, 9)
	if _, err := r.Route(t.Context(), Request{NumTokens: 1}); !errors.Is(err, ErrQueueTimeout) {
		t.Errorf("error %v, want ErrQueueTimeout", err)
	}
	expectDepth(t, r, 0)
	full.End()
	expectLoad(t, r, 0, 0, 0)
}

func TestQueueAsksForRoomOnlyWhereItsWorkersAreKnown(t *testing.T) {
	r, _ := newQueueingRouter(t, 1, queueFCFS, 2)
	r.Up(kv.Target{Key: kv.WorkerKey{Worker: 7}})
	occupy(t, r, 0, 9)
	occupy(t, r, 7, 1_000_000)
	if d := MustRoute(t, r, Request{NumTokens: 1, Pinned: &kv.WorkerKey{Worker: 7}}); d.Target.Key.Worker != 7 {
		t.Error(d)
	}
}

func TestQueueEndsWithItsWorkers(t *testing.T) {
	r, _ := newQueueingRouter(t, 1, queueFCFS, 2)
	occupy(t, r, 0, 9)
	q := send(t, r, t.Context(), 1, Request{NumTokens: 1})
	r.Down(kv.WorkerKey{})
	if _, err := q.get(t); !errors.Is(err, ErrNoWorker) {
		t.Errorf("error %v, want ErrNoWorker", err)
	}
	full := occupyAfter(t, r)
	q = send(t, r, t.Context(), 1, Request{NumTokens: 1})
	r.Up(kv.Target{Key: kv.WorkerKey{Worker: 1}})
	if d, err := q.get(t); err != nil || d.Target.Key.Worker != 1 {
		t.Error(d, err)
	}
	full.End()
}

// occupyAfter brings worker 0 back and fills it.
func occupyAfter(t *testing.T, r *Router) *Booking {
	r.Up(kv.Target{Key: kv.WorkerKey{}, MaxBatchedTokens: 16})
	return occupy(t, r, 0, 9)
}

func TestQueueLooksItsPromptsUpAgain(t *testing.T) {
	r, _ := newQueueingRouter(t, 2, queueFCFS, 2)
	full := []*Booking{occupy(t, r, 0, 9), occupy(t, r, 1, 9)}
	prompt := testkit.Tokens(1, 40)
	q := send(t, r, t.Context(), 1, Request{Tokens: prompt, Pinned: &kv.WorkerKey{Worker: 1}})
	Hold(r, 1, prompt[:20])
	r.mu.Lock()
	w := r.Admission.waiting[0]
	r.mu.Unlock()
	r.Admission.lookUpAgain(w)
	full[1].End()
	if d, err := q.get(t); err != nil || d.OverlapTokens != 20 {
		t.Errorf("%d cached tokens, want 20, %v", d.OverlapTokens, err)
	}
	full[0].End()
}

// TestQueueServesEverybody drives the queue at random: requests come, are left,
// get their first token and end; nobody waits in the end who has a worker with
// room, and the books are even.
func TestQueueServesEverybody(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		threshold := 0.5
		knobs := testkit.Defaults[Settings]()
		knobs.QueueSettings = QueueSettings{RouterQueueThreshold: &threshold, RouterQueuePolicy: rapid.SampledFrom([]string{queueFCFS, queueWSPT, queueLCFS}).Draw(t, "policy"), RouterQueueTimeout: time.Minute, RouterQueueLimit: 6}
		r := New(knobs, Deps{Index: radix.NewTree(), Policy: policytest.MustPolicy(t, "kv"), BlockSize: testkit.BlockSize, Seed: 1})
		for w := range uint64(3) {
			r.Up(kv.Target{Key: kv.WorkerKey{Worker: w}, MaxBatchedTokens: 16})
		}
		var running []*Booking
		var parked []*waiter
		t.Repeat(map[string]func(*rapid.T){
			"come": func(t *rapid.T) {
				request := Request{NumTokens: rapid.IntRange(1, 30).Draw(t, "tokens"), StrictPriority: rapid.Uint32Range(0, 2).Draw(t, "priority"), PriorityJump: rapid.Float64Range(0, 5).Draw(t, "jump")}
				if rapid.Bool().Draw(t, "choosy") {
					request.Allowed = []uint64{rapid.Uint64Range(0, 2).Draw(t, "allowed")}
				}
				p, d := r.lookUp(request, &workspace{})
				w, err := r.schedule(&p, &d)
				switch {
				case errors.Is(err, ErrQueueFull) && len(parked) == 6:
				case err != nil:
					t.Fatal(err)
				case w != nil:
					parked = append(parked, w)
				default:
					running = append(running, d.Booking)
				}
			},
			"leave": func(t *rapid.T) {
				if len(parked) > 0 {
					i := rapid.IntRange(0, len(parked)-1).Draw(t, "which")
					r.Admission.leave(parked[i])
					parked = append(parked[:i], parked[i+1:]...)
				}
			},
			"first token": func(t *rapid.T) {
				if len(running) > 0 {
					rapid.SampledFrom(running).Draw(t, "which").FirstToken()
				}
			},
			"end": func(t *rapid.T) {
				if len(running) > 0 {
					i := rapid.IntRange(0, len(running)-1).Draw(t, "which")
					running[i].End()
					running = append(running[:i], running[i+1:]...)
				}
			},
			"": func(t *rapid.T) {
				still := parked[:0]
				for _, w := range parked {
					select {
					case result := <-w.decided:
						if result.err != nil {
							t.Fatal(result.err)
						}
						running = append(running, result.decision.Booking)
					default:
						still = append(still, w)
					}
				}
				parked = still
				if n, _ := r.Admission.QueueDepth(); n != len(parked) {
					t.Fatalf("%d wait, want %d", n, len(parked))
				}
				for _, w := range parked {
					for _, load := range r.Loads() {
						if w.prompt.Allowed != nil && w.prompt.Allowed[0] != load.Key.Worker {
							continue
						}
						if load.PotentialPrefillTokens <= 8 {
							t.Fatalf("a request waits although %v has room", load.Key)
						}
					}
				}
				if err := r.Check(); err != nil {
					t.Fatal(err)
				}
			},
		})
	})
}

// TestACallerWithAClockOfItsOwnIsToldOnceItNeedNotWait holds RouteOrWait, with
// which a request waits without blocking.
func TestACallerWithAClockOfItsOwnIsToldOnceItNeedNotWait(t *testing.T) {
	r, clock := newQueueingRouter(t, 1, queueFCFS, 2)
	told := map[int]Decision{}
	ask := func(i int) (Decision, *Waiting, error) {
		return r.RouteOrWait(Request{NumTokens: 20}, func(d Decision, err error) {
			if err != nil {
				t.Error(err)
			}
			told[i] = d
		})
	}
	first, waiting, err := ask(0)
	if err != nil || waiting != nil || first.Booking == nil {
		t.Fatal(first, waiting, err)
	}
	_, second, _ := ask(1)
	_, third, _ := ask(2)
	if second == nil || third == nil || len(told) > 0 {
		t.Fatal("a request does not wait that must")
	}
	if _, _, err := ask(3); err != ErrQueueFull {
		t.Errorf("a fourth request: %v", err)
	}
	if !second.Leave() || second.Leave() {
		t.Error("a request leaves the queue once")
	}
	third.Refresh()
	clock.Advance(2 * time.Second)
	if len(told) > 0 {
		t.Error("one is decided while the worker is full")
	}
	first.Booking.FirstToken()
	if d := told[2]; len(told) != 1 || d.Booking == nil || d.QueueTime != 2*time.Second {
		t.Errorf("told of %+v", told)
	}
	if third.Leave() {
		t.Error("a request that was decided has left")
	}
	first.Booking.End()
	told[2].Booking.End()
	expectDepth(t, r, 0)
	if err := r.Check(); err != nil {
		t.Error(err)
	}
}
