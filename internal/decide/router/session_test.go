package router

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
)

// newSessionRouter returns a router whose policy takes workers in turns, so that only
// a session makes requests stay where they are.
func newSessionRouter(t testing.TB, workers int, change func(*Settings)) (*Router, *testkit.StandingClock) {
	t.Helper()
	knobs := testkit.Defaults[Settings]()
	knobs.SessionHeader = "x-session-id"
	if change != nil {
		change(&knobs)
	}
	if err := knobs.Validate(); err != nil {
		t.Fatal(err)
	}
	return newClockedRouter(t, "round-robin", workers, knobs)
}

// turn routes a request of a session, ends it and returns its worker.
func turn(t testing.TB, r *Router, request Request) uint64 {
	t.Helper()
	d := MustRoute(t, r, request)
	if d.Booking != nil {
		d.Booking.Finish(1)
	}
	return d.Target.Key.Worker
}

func expectSessions(t testing.TB, r *Router, known int, want SessionCounts) {
	t.Helper()
	if n, counts := r.Sessions(); n != known || counts != want {
		t.Errorf("%d sessions, %+v; want %d, %+v", n, counts, known, want)
	}
	if err := r.Check(); err != nil {
		t.Error(err)
	}
}

func TestASessionStaysAndOthersTakeTurns(t *testing.T) {
	r, _ := newSessionRouter(t, 3, nil)
	a, b := r.SessionOf("", "a"), r.SessionOf("", "b")
	for range 4 {
		if got := [2]uint64{turn(t, r, Request{Session: a}), turn(t, r, Request{Session: b})}; got != [2]uint64{0, 1} {
			t.Errorf("sessions went to %v", got)
		}
	}
	if first, second := turn(t, r, Request{}), turn(t, r, Request{}); first == second {
		t.Errorf("requests without a session both went to %d", first)
	}
	expectSessions(t, r, 2, SessionCounts{New: 2, Kept: 6})
}

func TestSessionsOfTwoOwnersAreApart(t *testing.T) {
	r, _ := newSessionRouter(t, 1, nil)
	if r.SessionOf("team a", "1") == r.SessionOf("team b", "1") || r.SessionOf("a", "b1") == r.SessionOf("ab", "1") {
		t.Error("they are one")
	}
	if one, again := r.SessionOf("team a", "1"), r.SessionOf("team a", "1"); one != again || r.SessionOf("team a", "") != 0 {
		t.Error("one session has two hashes, or none has one")
	}
}

// TestAFinishedSessionIsForgotten: its next request is the first of one of that name.
func TestAFinishedSessionIsForgotten(t *testing.T) {
	r, _ := newSessionRouter(t, 3, nil)
	a, b := r.SessionOf("", "a"), r.SessionOf("", "b")
	turn(t, r, Request{Session: a})
	turn(t, r, Request{Session: b})
	if !r.EndSession(a) || r.EndSession(a) || r.EndSession(r.SessionOf("other", "b")) {
		t.Error("a session was not forgotten, or another one was")
	}
	expectSessions(t, r, 1, SessionCounts{New: 2})
	turn(t, r, Request{Session: a})
	turn(t, r, Request{Session: b})
	expectSessions(t, r, 2, SessionCounts{New: 3, Kept: 1})
}

func TestWhatBreaksASession(t *testing.T) {
	const s = 42
	for name, test := range map[string]struct {
		settings func(*Settings)
		breaks   func(t *testing.T, r *Router, clock *testkit.StandingClock)
		request  Request
		want     SessionCounts // beside the first request's
	}{
		"nothing": {want: SessionCounts{Kept: 1}},
		"a retry": {request: Request{Exclude: []uint64{0}}, want: SessionCounts{Moved: 1}},
		"another model": {request: Request{Model: "other"}, breaks: func(_ *testing.T, r *Router, _ *testkit.StandingClock) {
			r.Up(kv.Target{Key: testkit.W1, Models: []string{"other"}})
		}, want: SessionCounts{Moved: 1}},
		"a rest": {breaks: func(t *testing.T, r *Router, _ *testkit.StandingClock) {
			if err := r.Health.Cordon(0); err != nil {
				t.Fatal(err)
			}
		}, want: SessionCounts{Moved: 1}},
		"draining":  {breaks: func(_ *testing.T, r *Router, _ *testkit.StandingClock) { r.Health.CordonDiscovered(0, true) }, want: SessionCounts{Moved: 1}},
		"its death": {breaks: func(_ *testing.T, r *Router, _ *testkit.StandingClock) { r.Down(testkit.W0) }, want: SessionCounts{Moved: 1}},
		"its restart": {breaks: func(_ *testing.T, r *Router, _ *testkit.StandingClock) {
			r.Up(kv.Target{Key: testkit.W0, Generation: 1})
		}, want: SessionCounts{Moved: 1}},
		"an ejection": {breaks: func(t *testing.T, r *Router, _ *testkit.StandingClock) {
			for range 3 {
				occupy(t, r, 0, 1).Report(policy.Feedback{Ending: policy.Failed})
			}
		}, want: SessionCounts{Moved: 1}},
		"its time": {breaks: func(_ *testing.T, _ *Router, clock *testkit.StandingClock) { clock.Advance(30 * time.Minute) }, want: SessionCounts{New: 1}},
		"not yet its time": {breaks: func(_ *testing.T, _ *Router, clock *testkit.StandingClock) {
			clock.Advance(30*time.Minute - time.Second)
		}, want: SessionCounts{Kept: 1}},
		"a long prompt there":      {breaks: func(t *testing.T, r *Router, _ *testkit.StandingClock) { occupy(t, r, 0, 2*sessionFloor) }, want: SessionCounts{Moved: 1}},
		"a prompt below the floor": {breaks: func(t *testing.T, r *Router, _ *testkit.StandingClock) { occupy(t, r, 0, sessionFloor/2) }, want: SessionCounts{Kept: 1}},
		"many requests there, which decode": {breaks: func(t *testing.T, r *Router, _ *testkit.StandingClock) {
			for range 33 {
				occupy(t, r, 0, 1).FirstToken()
			}
		}, want: SessionCounts{Kept: 1}},
		"a wait that its prompt is not worth": {request: Request{Tokens: testkit.Tokens(1, 4*sessionFloor)}, breaks: func(t *testing.T, r *Router, _ *testkit.StandingClock) {
			Hold(r, 0, testkit.Tokens(1, 4*sessionFloor))
			occupy(t, r, 0, 4*sessionFloor)
		}, want: SessionCounts{Kept: 1}},
		"a wait that its prompt is worth": {request: Request{Tokens: testkit.Tokens(1, 4*sessionFloor)}, breaks: func(t *testing.T, r *Router, _ *testkit.StandingClock) {
			Hold(r, 0, testkit.Tokens(1, 4*sessionFloor))
			occupy(t, r, 0, 8*sessionFloor)
		}, want: SessionCounts{Moved: 1}},
		"as much work elsewhere": {breaks: func(t *testing.T, r *Router, _ *testkit.StandingClock) {
			occupy(t, r, 0, 2*sessionFloor)
			occupy(t, r, 1, 2*sessionFloor)
			occupy(t, r, 2, sessionFloor)
		}, want: SessionCounts{Kept: 1}},
		"far less elsewhere": {breaks: func(t *testing.T, r *Router, _ *testkit.StandingClock) {
			occupy(t, r, 0, 4*sessionFloor)
			occupy(t, r, 1, 2*sessionFloor)
			occupy(t, r, 2, sessionFloor)
		}, want: SessionCounts{Moved: 1}},
		"other sessions": {settings: func(k *Settings) { k.SessionLimit = 2 }, breaks: func(t *testing.T, r *Router, _ *testkit.StandingClock) {
			turn(t, r, Request{Session: 1})
			turn(t, r, Request{Session: 2})
			r.sessions.counts = SessionCounts{New: 1}
		}, want: SessionCounts{New: 1}},
		"a named worker": {request: Request{Pinned: &kv.WorkerKey{Worker: 2}}, want: SessionCounts{Moved: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			r, clock := newSessionRouter(t, 3, test.settings)
			if first := turn(t, r, Request{Session: s}); first != 0 {
				t.Fatalf("the first request went to %d", first)
			}
			if test.breaks != nil {
				test.breaks(t, r, clock)
			}
			request := test.request
			request.Session = s
			asked := request
			asked.QueryOnly = true
			told := turn(t, r, asked)
			got := turn(t, r, request)
			if kept := test.want.Kept > 0; kept != (got == 0) && test.want.Moved > 0 {
				t.Errorf("it went to %d", got)
			}
			if test.want.Kept > 0 && told != got {
				t.Errorf("a dry run told %d, and %d was chosen", told, got)
			}
			known, counts := r.Sessions()
			if want := (SessionCounts{New: 1 + test.want.New, Kept: test.want.Kept, Moved: test.want.Moved}); counts != want {
				t.Errorf("counts %+v, want %+v", counts, want)
			}
			if test.want.Moved > 0 {
				request.Exclude = nil
				if again := turn(t, r, request); again != got {
					t.Errorf("it moved to %d, and then to %d", got, again)
				}
			}
			if known > r.settings.SessionLimit {
				t.Errorf("%d sessions", known)
			}
			if err := r.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestASessionWaitsForNoWorkerWithoutRoom: where the queue is on, a worker without room
// is overloaded.
func TestASessionWaitsForNoWorkerWithoutRoom(t *testing.T) {
	threshold := 1.0
	r, _ := newSessionRouter(t, 0, func(k *Settings) { k.RouterQueueThreshold = &threshold })
	for i := range 2 {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, MaxBatchedTokens: 100})
	}
	turn(t, r, Request{Session: 7})
	occupy(t, r, 0, 101)
	if got := turn(t, r, Request{Session: 7}); got != 1 {
		t.Errorf("it went to %d", got)
	}
}

// TestAnEjectedWorkerMakesNoOtherOneOverloaded: it has no work, but takes none either.
func TestAnEjectedWorkerMakesNoOtherOneOverloaded(t *testing.T) {
	r, _ := newSessionRouter(t, 3, nil)
	for _, session := range []uint64{1, 2, 3} { // one for each worker, in turn
		turn(t, r, Request{Session: session})
	}
	occupy(t, r, 0, 21_000)
	occupy(t, r, 1, 20_000)
	for range 3 {
		occupy(t, r, 2, 1).Report(policy.Feedback{Ending: policy.Failed})
	}
	for range 3 {
		if got := turn(t, r, Request{Session: 1}); got != 0 {
			t.Errorf("it went to %d, though the only other worker that is well has as much work", got)
		}
	}
}

// TestAnEjectedWorkerIsTriedThoughAllRequestsHaveSessions: the one that is tried does
// not move its session.
func TestAnEjectedWorkerIsTriedThoughAllRequestsHaveSessions(t *testing.T) {
	r, clock := newSessionRouter(t, 2, nil)
	turn(t, r, Request{})
	if got := turn(t, r, Request{Session: 5}); got != 1 {
		t.Fatalf("the session began on %d", got)
	}
	for range 3 {
		occupy(t, r, 0, 1).Report(policy.Feedback{Ending: policy.Failed})
	}
	clock.Advance(r.settings.EjectionTime + trialOverdue/2)
	if got := turn(t, r, Request{Session: 5}); got != 1 {
		t.Error("it went on trial at once, where others may come that have no session")
	}
	clock.Advance(trialOverdue)
	if got := turn(t, r, Request{Session: 5}); got != 0 {
		t.Error("the ejected worker is not tried")
	}
	for range 3 {
		if got := turn(t, r, Request{Session: 5}); got != 1 {
			t.Error("the session moved to the worker on trial")
		}
	}
	expectSessions(t, r, 1, SessionCounts{New: 1, Kept: 4})
}

// TestAllPoliciesKeepSessions: a policy gets the session's worker as its only choice,
// and learns from it as from any other.
func TestAllPoliciesKeepSessions(t *testing.T) {
	for _, rule := range policies.Names {
		t.Run(rule, func(t *testing.T) {
			r := NewTestRouter(t, rule, 4)
			r.Receipts.Last(0)
			first := turn(t, r, Request{Session: 9, Tokens: testkit.Tokens(1, 20)})
			for i := range 20 {
				if got := turn(t, r, Request{Session: 9, Tokens: testkit.Tokens(uint32(100*i), 20)}); got != first {
					t.Fatalf("turn %d went to %d, the first to %d", i, got, first)
				}
			}
			expectSessions(t, r, 1, SessionCounts{New: 1, Kept: 20})
			receipts, _ := r.Receipts.Last(1)
			if len(receipts) != 1 || receipts[0].Session != SessionKept || *receipts[0].Worker != first {
				t.Fatalf("receipt %+v", receipts[0])
			}
			for _, c := range receipts[0].Candidates {
				if c.Worker != first && c.Excluded != excludedSession.String() {
					t.Errorf("worker %d is left out as %q", c.Worker, c.Excluded)
				}
			}
		})
	}
}

// TestASessionHasAWorkerForEachLeg: the one that computes prompts and the one that
// answers, which takes whole requests, too.
func TestASessionHasAWorkerForEachLeg(t *testing.T) {
	r, _ := newSessionRouter(t, 0, nil)
	for i, role := range []kv.Role{kv.RolePrefill, kv.RolePrefill, kv.RolePrefill, kv.RoleDecode, kv.RoleDecode, kv.RoleDecode} {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Disagg: kv.Disagg{Role: role, Kind: kv.KindNIXL}})
	}
	var first [2]uint64
	for i := range 4 {
		pair, err := r.RoutePair(t.Context(), Request{Session: 5, NumTokens: 100}, PairRule{})
		if err != nil || pair.Whole != "" {
			t.Fatal(pair.Whole, err)
		}
		got := [2]uint64{pair.Prefill.Target.Key.Worker, pair.Decode.Target.Key.Worker}
		pair.End()
		if i == 0 {
			first = got
		} else if got != first {
			t.Errorf("turn %d went to %v, the first to %v", i, got, first)
		}
	}
	if got := turn(t, r, Request{Session: 5}); got != first[1] {
		t.Errorf("a whole request went to %d, answers come from %d", got, first[1])
	}
	expectSessions(t, r, 2, SessionCounts{New: 2, Kept: 7})
}

// TestASessionStaysWherePairsFail: a prefill worker that gets no prompt because there is no
// worker for the answer has nothing of the session.
func TestASessionStaysWherePairsFail(t *testing.T) {
	r, clock := newSessionRouter(t, 0, nil)
	for i, role := range []kv.Role{kv.RolePrefill, kv.RolePrefill, kv.RoleDecode} {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Disagg: kv.Disagg{Role: role, Kind: kv.KindNIXL}})
	}
	ask := func(exclude ...uint64) (Pair, error) {
		return r.RoutePair(t.Context(), Request{Session: 5, NumTokens: 100, Exclude: exclude}, PairRule{})
	}
	first, err := ask()
	if err != nil {
		t.Fatal(err)
	}
	home := first.Prefill.Target.Key.Worker
	first.Prefill.Booking.End()
	first.Decode.Booking.Press(time.Minute)
	if pair, err := ask(home); !errors.Is(err, ErrNoWorker) {
		t.Fatalf("%+v, %v", pair, err)
	}
	expectSessions(t, r, 2, SessionCounts{New: 2})
	clock.Advance(2 * time.Minute)
	for _, step := range []struct {
		exclude []uint64
		want    uint64
	}{{nil, home}, {[]uint64{home}, 1 - home}, {nil, 1 - home}} {
		pair, err := ask(step.exclude...)
		if err != nil {
			t.Fatal(err)
		}
		pair.End()
		if got := pair.Prefill.Target.Key.Worker; got != step.want {
			t.Errorf("without %v its prompt went to %d, want %d", step.exclude, got, step.want)
		}
	}
	expectSessions(t, r, 2, SessionCounts{New: 2, Kept: 5, Moved: 1})
}

func TestSessionSettingsAreChecked(t *testing.T) {
	for _, test := range []struct {
		change func(*Settings)
		says   string
	}{
		{func(k *Settings) { k.SessionTTL = 0 }, "--session-ttl 0s: give more than 0"},
		{func(k *Settings) { k.SessionLimit = 0 }, "--session-limit 0: give at least 1"},
		{func(k *Settings) { k.SessionHeader = "x id" }, `--session-header "x id": give the name of a header, such as x-session-id`},
		{func(k *Settings) { k.SessionCookie = "a=b" }, "--session-cookie: give the name of a cookie, letters, digits, - and _"},
		{func(k *Settings) { k.HoldWhenEmpty = -1 }, "--hold-when-empty -1ns: give a time, such as 2m; 0 disables it"},
		{func(k *Settings) { k.HoldWhenEmpty, k.RouterQueueLimit = 1, 0 }, "--router-queue-limit 0: give at least 1, or leave out --hold-when-empty"},
		{func(k *Settings) { k.SaturationTarget = 0 }, "--saturation-target 0s: give more than 0, such as 1s"},
	} {
		knobs := testkit.Defaults[Settings]()
		test.change(&knobs)
		if err := knobs.Validate(); err == nil || err.Error() != test.says {
			t.Errorf("%v, want %s", err, test.says)
		}
	}
}

// TestSessionsAgainstAModel holds the table against a list, the session used longest
// ago first.
func TestSessionsAgainstAModel(t *testing.T) {
	type entry struct {
		session    uint64
		worker     uint64
		generation int
		used       time.Time
	}
	rapid.Check(t, func(t *rapid.T) {
		const limit, ttl, workers = 4, 20 * time.Second, 3
		knobs := testkit.Defaults[Settings]()
		knobs.SessionLimit, knobs.SessionTTL = limit, ttl
		clock := new(testkit.StandingClock)
		r := New(knobs, Deps{Index: radix.NewTree(), Policy: &policy.RoundRobin{}, BlockSize: testkit.BlockSize, Seed: 1})
		r.now = clock.Now
		generations, rests := [workers]int{}, [workers]bool{}
		for i := range workers {
			r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}})
		}
		var model []entry
		var want SessionCounts
		t.Repeat(map[string]func(*rapid.T){
			"route": func(t *rapid.T) {
				request := Request{Session: rapid.Uint64Range(1, 6).Draw(t, "session"), QueryOnly: rapid.IntRange(0, 4).Draw(t, "dry run") == 0}
				if rapid.IntRange(0, 4).Draw(t, "retry") == 0 {
					request.Exclude = []uint64{rapid.Uint64Range(0, workers-1).Draw(t, "exclude")}
				}
				d, err := r.Route(t.Context(), request)
				if err != nil {
					return // all rest, or are excluded
				}
				if d.Booking != nil {
					d.Booking.Finish(1)
				}
				got := d.Target.Key.Worker
				at := slices.IndexFunc(model, func(e entry) bool { return e.session == request.Session })
				result := &want.New
				if at >= 0 && clock.Now().Sub(model[at].used) < ttl {
					e := model[at]
					result = &want.Moved
					if e.worker == got && e.generation == generations[got] {
						result = &want.Kept
					}
					if stays := !rests[e.worker] && e.generation == generations[e.worker] && !slices.Contains(request.Exclude, e.worker); stays && got != e.worker {
						t.Fatalf("session %d went to %d, and its worker %d is well", request.Session, got, e.worker)
					}
				}
				if request.QueryOnly {
					return
				}
				*result++
				if at >= 0 {
					model = slices.Delete(model, at, at+1)
				}
				model = append(model, entry{request.Session, got, generations[got], clock.Now()})
				for len(model) > limit || clock.Now().Sub(model[0].used) >= ttl {
					model = model[1:]
				}
			},
			"time": func(t *rapid.T) { clock.Advance(time.Duration(rapid.IntRange(1, 15).Draw(t, "seconds")) * time.Second) },
			"rest": func(t *rapid.T) {
				w := rapid.IntRange(0, workers-1).Draw(t, "worker")
				rests[w] = !rests[w]
				r.Health.CordonDiscovered(uint64(w), rests[w])
			},
			"restart": func(t *rapid.T) {
				w := rapid.IntRange(0, workers-1).Draw(t, "worker")
				generations[w]++
				r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(w)}, Generation: generations[w]})
			},
			"": func(t *rapid.T) {
				if known, counts := r.Sessions(); known != len(model) || counts != want {
					t.Fatalf("%d sessions, %+v; want %d, %+v", known, counts, len(model), want)
				}
				for _, e := range model {
					known := r.sessions.at(e.session, ttl, e.used)
					if known == nil || *known != (session{hash: e.session, worker: kv.WorkerKey{Worker: e.worker}, generation: e.generation, used: e.used}) {
						t.Fatalf("session %+v is known as %+v", e, known)
					}
				}
				if err := r.Check(); err != nil {
					t.Fatal(err)
				}
			},
		})
	})
}

// BenchmarkSessions measures what a decision costs more for a session that is known
// among as many as are remembered.
func BenchmarkSessions(b *testing.B) {
	for _, named := range []bool{false, true} {
		b.Run(fmt.Sprintf("named=%v", named), func(b *testing.B) {
			r := NewTestRouter(b, "least-loaded", 8)
			names := make([]string, r.settings.SessionLimit)
			for i := range names {
				names[i] = fmt.Sprintf("session-%d", i)
			}
			i := 0
			b.ReportAllocs()
			for b.Loop() {
				request := Request{NumTokens: 100}
				if named {
					request.Session = r.SessionOf("", names[i%len(names)])
				}
				MustRoute(b, r, request).Booking.End()
				i += 7919
			}
		})
	}
}
