package router

import (
	"math"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/policies"
	"kvrouter/internal/policy"
	"kvrouter/internal/testkit"
)

// expectSaturation compares it, about: the time that an engine takes at first is a guess.
func expectSaturation(t testing.TB, r *Router, when string, least, most float64) {
	t.Helper()
	if got, _ := r.Saturation(); !(got >= least && got <= most) {
		t.Errorf("%s: saturation %.4f, want %v to %v", when, got, least, most)
	}
}

func TestSaturationFollowsTheLoad(t *testing.T) {
	for _, rule := range policies.Names {
		t.Run(rule, func(t *testing.T) {
			clock := new(testkit.StandingClock)
			r := NewTestRouter(t, rule, 2)
			r.now = clock.Now
			expectSaturation(t, r, "idle", 0, 0)
			first := occupy(t, r, 0, 100_000)
			expectSaturation(t, r, "one worker idle", 0, 0)
			second := occupy(t, r, 1, 50_000) // 0.02 ms a token
			expectSaturation(t, r, "a second's prompts", 0.9, 1.1)
			third := occupy(t, r, 1, 50_000)
			expectSaturation(t, r, "two seconds' prompts", 1.8, 2.2)
			third.End()
			second.FirstToken()
			expectSaturation(t, r, "only answers", 0, 0.05)
			first.End()
			second.Finish(100)
			expectSaturation(t, r, "idle again", 0, 0)
			if err := r.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestAnOverdueFirstTokenIsSaturation: an engine whose batch or cache is full makes
// prompts wait that are soon computed.
func TestAnOverdueFirstTokenIsSaturation(t *testing.T) {
	clock := new(testkit.StandingClock)
	r := NewTestRouter(t, "kv", 1)
	r.now = clock.Now
	running := occupy(t, r, 0, 100)
	running.FirstToken()
	waits := occupy(t, r, 0, 100)
	expectSaturation(t, r, "just sent", 0, 0.1)
	clock.Advance(5 * time.Second)
	expectSaturation(t, r, "overdue by 5 s", 4.9, 5.1)
	waits.FirstToken()
	expectSaturation(t, r, "it has come", 0, 0.1)
}

// TestWhoWaitsForRoomWaitsForAnswersToEnd: three wait for the one that runs, and answers
// take 10 s.
func TestWhoWaitsForRoomWaitsForAnswersToEnd(t *testing.T) {
	for _, rule := range []string{"work", "kv"} {
		clock := new(testkit.StandingClock)
		r := NewTestRouter(t, rule, 1)
		r.now = clock.Now
		past := occupy(t, r, 0, 100)
		clock.Advance(time.Second)
		past.FirstToken()
		clock.Advance(10 * time.Second)
		past.Finish(100)
		occupy(t, r, 0, 100).FirstToken()
		for range 3 {
			occupy(t, r, 0, 100)
		}
		clock.Advance(30 * time.Second)
		expectSaturation(t, r, rule, 35, 35)
	}
}

func TestSaturationCountsTheQueue(t *testing.T) {
	r, clock := newQueueingRouter(t, 1, queueFCFS, 10)
	occupy(t, r, 0, 9)
	before, _ := r.Saturation()
	waits := send(t, r, t.Context(), 1, Request{NumTokens: 50_000})
	expectSaturation(t, r, "a second's prompt in the queue", before+0.9, before+1.1)
	clock.Advance(3 * time.Second)
	expectSaturation(t, r, "it has waited for 3 s, as its worker has for a first token", 3.9, 4.1)
	r.Down(testkit.W0)
	if _, err := waits.get(t); err == nil {
		t.Error("it was served")
	}
}

func TestSaturationOfWorkersThatComputePrompts(t *testing.T) {
	r, _ := newSessionRouter(t, 0, nil)
	r.Up(kv.Target{Key: testkit.W0, Disagg: kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindNIXL}})
	r.Up(kv.Target{Key: testkit.W1, Disagg: kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindNIXL}})
	occupy(t, r, 0, 100_000)
	expectSaturation(t, r, "the decode worker is idle", 1.9, 2.1)
}

// TestForecastsAreBounded: what a worker says of itself is foreign.
func TestForecastsAreBounded(t *testing.T) {
	r := NewTestRouter(t, "work", 1)
	r.Publish(testkit.W0, policy.Published{Running: 1, Waiting: math.MaxInt32, At: r.now()})
	occupy(t, r, 0, kv.MaxTokens)
	if wait, up := r.Wait(); !up || wait < 0 || wait > time.Hour {
		t.Errorf("%v, %v", wait, up)
	}
}
