package router

import (
	"context"
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
)

// overlap is how much of a prompt the router expects on the only worker, without a booking.
func overlap(t testing.TB, r *Router, prompt []uint32) int {
	t.Helper()
	d, err := r.Route(context.Background(), Request{Tokens: prompt, QueryOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	return d.OverlapTokens
}

func TestMatchesAreGoneFromWhenAResetIsSent(t *testing.T) {
	r := NewTestRouter(t, "standalone", 1)
	prompt := testkit.Tokens(1, 42)
	Hold(r, 0, prompt)
	ended := r.Health.Control(0, kv.EngineChange{Resets: true})
	if got := overlap(t, r, prompt); got != 0 {
		t.Errorf("%d tokens are expected while a reset is under way", got)
	}
	ended(false)
	if got := overlap(t, r, prompt); got != 40 {
		t.Errorf("%d tokens are expected after a reset that was refused, want 40", got)
	}
	ended = r.Health.Control(0, kv.EngineChange{Resets: true})
	ended(true)
	if got := overlap(t, r, prompt); got != 0 {
		t.Errorf("%d tokens are expected after a reset of which no event has told", got)
	}
	r.Health.Cleared(kv.WorkerKey{}) // the index has what was stored since
	if got := overlap(t, r, prompt); got != 40 {
		t.Errorf("%d tokens are expected after its event, want those of the index, 40", got)
	}
}

func TestAnEngineThatWorksAndTellsOfNoResetIsBelieved(t *testing.T) {
	now := time.Now()
	r := NewTestRouter(t, "standalone", 1)
	r.now = func() time.Time { return now }
	prompt := testkit.Tokens(1, 42)
	Hold(r, 0, prompt)
	r.Health.Control(0, kv.EngineChange{Resets: true})(true)
	now = now.Add(time.Hour) // it is idle: its event comes with its next batch
	if got := overlap(t, r, prompt); got != 0 {
		t.Errorf("%d tokens are expected", got)
	}
	for range 3 {
		r.Health.Lives(0, 0)
		now = now.Add(resetTold * 2 / 3)
	}
	if got := overlap(t, r, prompt); got != 40 {
		t.Errorf("%d tokens are expected, want 40", got)
	}
}

func TestACallIsKnownBetterThanAReport(t *testing.T) {
	r := NewTestRouter(t, "standalone", 1)
	state := func() kv.EngineState { s, _ := r.Engine(kv.WorkerKey{}); return s }
	version := func() string { _, v := r.Engine(kv.WorkerKey{}); return v }
	report := func(asked time.Time, s kv.EngineState) {
		r.Health.EngineReports(0, 0, asked, kv.EngineReport{Knows: kv.Paused | kv.Asleep, State: s, Version: "7"})
	}
	ended := r.Health.Control(0, kv.EngineChange{Set: kv.Paused, Meanwhile: kv.Updating, Version: "8"})
	before := time.Now()
	if report(before, 0); state() != kv.Paused|kv.Updating {
		t.Errorf("state %s while a call is under way", state())
	}
	ended(true)
	if report(before, 0); state() != kv.Paused || version() != "8" {
		t.Errorf("state %s, version %s after a report of before the call's end", state(), version())
	}
	if report(time.Now().Add(time.Second), 0); state() != 0 || version() != "7" {
		t.Errorf("state %s, version %s after a report of after it", state(), version())
	}
	if r.Health.EngineReports(0, 5, time.Now().Add(time.Second), kv.EngineReport{Knows: kv.Paused, State: kv.Paused}); state() != 0 {
		t.Errorf("state %s after a report of another incarnation", state())
	}
}

func TestTheLaterEndOfTwoCallsCounts(t *testing.T) {
	for name, c := range map[string]struct {
		ends []int // of the calls pause, resume and a rolling one, in this order
		bad  int   // of them, one that fails; -1: none
		want kv.EngineState
	}{
		"pause last": {[]int{1, 0, 2}, -1, kv.Paused}, "resume last": {[]int{0, 1, 2}, -1, 0}, "the rolling one last": {[]int{1, 2, 0}, -1, kv.Paused},
		"a pause that fails": {[]int{1, 0, 2}, 0, 0}, "a resume that fails": {[]int{0, 1, 2}, 1, kv.Paused},
	} {
		r := NewTestRouter(t, "standalone", 1)
		var ended []func(bool)
		for _, change := range []kv.EngineChange{{Set: kv.Paused}, {Clear: kv.Paused}, {Meanwhile: kv.Paused}} {
			ended = append(ended, r.Health.Control(0, change))
		}
		for _, call := range c.ends {
			ended[call](call != c.bad)
		}
		if got, _ := r.Engine(kv.WorkerKey{}); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

func TestRequestsWaitWhileAllEnginesRest(t *testing.T) {
	r := NewTestRouter(t, "standalone", 2)
	for worker := range uint64(2) {
		r.Health.Control(worker, kv.EngineChange{Set: kv.Paused})(true)
	}
	answers := make(chan Decision, 3)
	for range cap(answers) {
		go func() {
			d, err := r.Route(t.Context(), Request{Tokens: testkit.Tokens(1, 42)})
			if err != nil {
				t.Error(err)
			}
			answers <- d
		}()
	}
	testkit.Eventually(t, 10*time.Second, "all wait", func() bool { n, _ := r.Admission.QueueDepth(); return n == cap(answers) })
	if _, err := r.Route(t.Context(), Request{Beside: true}); !errors.Is(err, ErrBusy) {
		t.Errorf("a request that is sent elsewhere: %v, want %v", err, ErrBusy)
	}
	r.Health.Control(1, kv.EngineChange{Clear: kv.Paused})(true)
	for range cap(answers) {
		if d := <-answers; d.Target.Key.Worker != 1 {
			t.Errorf("worker %d, which is paused", d.Target.Key.Worker)
		}
	}
}

// TestEngineStates does calls, reports and events in a random order: a call leaves nothing behind that it has not done.
func TestEngineStates(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := New(testkit.Defaults[Settings](), Deps{Index: radix.NewTree(), Policy: policytest.MustPolicy(t, "standalone"), BlockSize: testkit.BlockSize, Seed: 1})
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: 0}, URL: "http://worker", Generation: 1})
		type call struct {
			change kv.EngineChange
			ended  func(bool)
		}
		var calls []call
		resets := 0 // that succeeded, of which no event has told
		t.Repeat(map[string]func(*rapid.T){
			"begin": func(t *rapid.T) {
				change := kv.EngineChange{Meanwhile: kv.EngineState(rapid.IntRange(0, 7).Draw(t, "meanwhile")), Resets: rapid.Bool().Draw(t, "resets")}
				calls = append(calls, call{change, r.Health.Control(0, change)})
			},
			"end": func(t *rapid.T) {
				if len(calls) == 0 {
					t.Skip("none")
				}
				at, ok := rapid.IntRange(0, len(calls)-1).Draw(t, "call"), rapid.Bool().Draw(t, "ok")
				calls[at].ended(ok)
				if ok && calls[at].change.Resets {
					resets++
				}
				calls = append(calls[:at:at], calls[at+1:]...)
			},
			"event": func(*rapid.T) {
				r.Health.Cleared(kv.WorkerKey{})
				resets = max(0, resets-1)
			},
			"": func(t *rapid.T) {
				r.mu.Lock()
				defer r.mu.Unlock()
				e := r.fleet.loads.of(kv.WorkerKey{}).engine
				if len(e.calls) != len(calls) || e.resets < 0 {
					t.Fatalf("%+v beside %d calls", e, len(calls))
				}
				if len(calls) == 0 && (e.resets > resets || r.fleet.targetLoads[0].State != 0) {
					t.Fatalf("%+v, state %s: %d resets are not told", e, r.fleet.targetLoads[0].State, resets)
				}
			},
		})
	})
}
