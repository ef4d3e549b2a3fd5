package router

import (
	"math"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
)

// expectSaturation compares it, about: the time that an engine takes at first is a guess.
func expectSaturation(t testing.TB, r *Router, when string, least, most float64) {
	t.Helper()
	if got, _ := r.Admission.Saturation(); !(got >= least && got <= most) {
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
	before, _ := r.Admission.Saturation()
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
	if wait, up := r.Admission.Wait(); !up || wait < 0 || wait > time.Hour {
		t.Errorf("%v, %v", wait, up)
	}
}

// TestSaturationOfEachRole: prompts that wait saturate the prefill worker, full caches and late
// tokens the decode workers.
func TestSaturationOfEachRole(t *testing.T) {
	prefill, first, second := testkit.W0, testkit.W1, kv.WorkerKey{Worker: 2}
	newRouter := func(t *testing.T, change ...func(*Settings)) (*Router, *testkit.StandingClock) {
		knobs := testkit.Defaults[Settings]()
		for _, f := range change {
			f(&knobs)
		}
		r, clock := newClockedRouter(t, "work", 0, knobs)
		r.Up(kv.Target{Key: prefill, Disagg: testkit.NixlPrefill, TotalBlocks: 1000})
		r.Up(kv.Target{Key: first, Disagg: testkit.NixlDecode, TotalBlocks: 1000})
		r.Up(kv.Target{Key: second, Disagg: testkit.NixlDecode, TotalBlocks: 1000})
		return r, clock
	}
	want := func(t *testing.T, r *Router, what string, role kv.Role, least, most float64) {
		t.Helper()
		if got, up := r.Admission.SaturationOf(role); !up || !(got >= least && got <= most) {
			t.Errorf("%s: saturation of %v %.4f (up: %v), want %v to %v", what, role, got, up, least, most)
		}
	}
	decodes := func(t *testing.T, r *Router, w kv.WorkerKey, blocks int) *Booking {
		t.Helper()
		b, err := r.Book(Request{Tokens: testkit.Tokens(uint32(w.Worker+1)*100_000, blocks*testkit.BlockSize), Leg: kv.LegDecode}, w)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	t.Run("prompts and caches", func(t *testing.T) {
		r, clock := newRouter(t)
		want(t, r, "idle", kv.RolePrefill, 0, 0)
		want(t, r, "idle", kv.RoleDecode, 0, 0)
		occupy(t, r, 0, 100_000) // 0.02 ms a token
		want(t, r, "a prompt", kv.RolePrefill, 1.9, 2.1)
		want(t, r, "a prompt", kv.RoleDecode, 0, 0)
		b := decodes(t, r, first, 500)
		want(t, r, "half of one cache of two", kv.RoleDecode, 0.25, 0.25)
		want(t, r, "half of one cache of two", kv.RolePrefill, 1.9, 2.1)
		r.Publish(second, policy.Published{Running: 4, Waiting: 4, KVUsage: 0.5, At: clock.Now()})
		want(t, r, "half of each", kv.RoleDecode, 0.5, 0.5)
		r.Publish(second, policy.Published{Running: 4, Waiting: 4, KVUsage: 1, At: clock.Now()})
		want(t, r, "half wait for a full cache", kv.RoleDecode, (0.5+2)/2, (0.5+2)/2)
		for _, foreign := range []policy.Published{{KVUsage: math.NaN()}, {KVUsage: -1}, {KVUsage: math.Inf(1)}, {KVUsage: 1, Running: 1, Waiting: math.MaxInt}} {
			foreign.At = clock.Now()
			r.Publish(second, foreign)
			want(t, r, "foreign numbers", kv.RoleDecode, 0.25, mostDecodeUse)
		}
		b.End()
		r.Down(prefill)
		if _, up := r.Admission.SaturationOf(kv.RolePrefill); up {
			t.Error("no prefill worker is up")
		}
		r.Down(first)
		r.Down(second)
		if _, up := r.Admission.SaturationOf(kv.RoleDecode); up {
			t.Error("no decode worker is up")
		}
	})
	t.Run("an engine that runs few at once", func(t *testing.T) {
		r, _ := newRouter(t)
		at, _ := r.fleet.target(first)
		r.fleet.targetLoads[at].Fill = 2
		decodes(t, r, first, 1)
		decodes(t, r, first, 1)
		want(t, r, "one of two is full", kv.RoleDecode, 0.5, 0.51)
	})
	t.Run("tokens", func(t *testing.T) {
		r, _ := newRouter(t, func(k *Settings) {
			k.ClassTPOT = map[string]time.Duration{"interactive": 20 * time.Millisecond, "batch": time.Minute}
		})
		want(t, r, "idle", kv.RoleDecode, 0, 0)
		b, err := r.Book(Request{NumTokens: 850_000, Leg: kv.LegDecode}, first) // 6 ms and 34 ms
		if err != nil {
			t.Fatal(err)
		}
		want(t, r, "one takes twice as long as it should", kv.RoleDecode, 0.95, 1.05)
		b.End()
	})
	t.Run("requests in the queue", func(t *testing.T) {
		r, _ := newRouter(t, func(k *Settings) { k.RouterQueuePolicy = queueFair })
		for _, w := range []kv.WorkerKey{first, second} {
			decodes(t, r, w, 100)
			r.Publish(w, policy.Published{Running: 1, At: r.now()})
			at, _ := r.fleet.target(w)
			r.fleet.targetLoads[at].Fill = 1
		}
		want(t, r, "each runs one", kv.RoleDecode, 1, 1)
		prompts, _ := r.Admission.SaturationOf(kv.RolePrefill)
		send(t, r, t.Context(), 1, Request{NumTokens: 100_000, Leg: kv.LegDecode})
		want(t, r, "one more waits", kv.RoleDecode, 1.5, 1.5)
		want(t, r, "its prompt is computed", kv.RolePrefill, prompts, prompts)
		r.Down(first)
		r.Down(second)
	})
}
