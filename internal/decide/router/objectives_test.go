package router

import (
	"errors"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// TestWorkersThatKeepTheObjectivesComeFirst: worker 0 has so much to compute, and worker 1 so much
// to decode, that objectives of 400 ms to the first token and of 20 ms to each further one are
// missed there.
func TestWorkersThatKeepTheObjectivesComeFirst(t *testing.T) {
	const computes, decodes = 0, 1 // and worker 2 is idle
	first, further := 400*time.Millisecond, 20*time.Millisecond
	for name, test := range map[string]struct {
		first, further time.Duration
		leg            kv.Leg
		pinned         bool
		want           []uint64 // of the next three requests, in any order
	}{
		"none":                                {0, 0, kv.LegWhole, false, []uint64{0, 1, 2}},
		"the first token":                     {first, 0, kv.LegWhole, false, []uint64{1, 2, 1}},
		"further tokens":                      {0, further, kv.LegWhole, false, []uint64{0, 2, 0}},
		"both":                                {first, further, kv.LegWhole, false, []uint64{2, 2, 2}},
		"none can keep it":                    {time.Millisecond, 0, kv.LegWhole, false, []uint64{0, 1, 2}},
		"none can keep one of them":           {first, time.Millisecond, kv.LegWhole, false, []uint64{0, 1, 2}},
		"all can":                             {time.Hour, time.Hour, kv.LegWhole, false, []uint64{0, 1, 2}},
		"one that has passed is none":         {-time.Second, further, kv.LegWhole, false, []uint64{0, 2, 0}},
		"a prefill worker: the first token":   {first, further, kv.LegPrefill, false, []uint64{1, 2, 1}},
		"a decode worker: the further tokens": {first, further, kv.LegDecode, false, []uint64{0, 2, 0}},
		"a pinned worker":                     {first, further, kv.LegWhole, true, []uint64{0, 0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			r, clock := newClockedRouter(t, "round-robin", 3, testkit.Defaults[Settings]())
			for _, target := range r.Targets() {
				target.Disagg = map[kv.Leg]kv.Disagg{kv.LegPrefill: testkit.NixlPrefill, kv.LegDecode: testkit.NixlDecode}[test.leg]
				r.Up(target)
			}
			for _, on := range []struct {
				worker uint64
				tokens int
				begun  bool
			}{{computes, 100_000, false}, {decodes, 1_000_000, true}} {
				b, err := r.Book(Request{NumTokens: on.tokens}, kv.WorkerKey{Worker: on.worker})
				if err != nil {
					t.Fatal(err)
				}
				defer b.End()
				if on.begun {
					b.FirstToken()
				}
			}
			for _, want := range test.want {
				request := Request{NumTokens: 100, Leg: test.leg, TPOT: test.further}
				if test.first != 0 {
					request.Deadline = clock.Now().Add(test.first)
				}
				if test.pinned {
					request.Pinned = &kv.WorkerKey{}
				}
				request.Explain = true
				d := MustRoute(t, r, request)
				if got := d.Target.Key.Worker; got != want {
					t.Errorf("worker %d, want %d", got, want)
				}
				for _, c := range d.Receipts[0].Candidates {
					if excluded := c.Excluded == excludedObjective.String(); excluded != (c.Score == nil && !test.pinned) {
						t.Errorf("worker %d: excluded %q, score %v", c.Worker, c.Excluded, c.Score)
					}
				}
				d.Booking.End()
			}
		})
	}
}

// TestOnlyWhatWouldBeLateIsShed sends requests with a deadline in 3 s to a busy worker, which
// computes a prompt of 80,000 tokens in 1.7 s. The router judges them on arrival, by the work ahead
// that is served however late, and at dispatch, by what the worker has to compute then.
func TestOnlyWhatWouldBeLateIsShed(t *testing.T) {
	const long, longer = 80_000, 160_000 // tokens
	const shed, served = "shed", "served"
	for name, test := range map[string]struct {
		tokens int
		ahead  []int         // tokens of the requests ahead
		stays  bool          // those are served however late
		room   time.Duration // until the worker has room; below 0: it has room on arrival
		idle   bool          // the worker is idle then
		comes  string        // result on arrival; empty: it waits
		goes   string        // result at dispatch
	}{
		"the worker has room":                         {tokens: longer, room: -1, comes: served},
		"late even as the first in the queue":         {tokens: longer, comes: shed},
		"in time":                                     {tokens: long, goes: served},
		"late at dispatch":                            {tokens: long, room: 2 * time.Second, goes: shed},
		"late at dispatch, but the worker is idle":    {tokens: long, room: 2 * time.Second, idle: true, goes: served},
		"the requests ahead are shed":                 {tokens: 1, ahead: []int{long, long, long}, room: 2 * time.Second, goes: served},
		"the requests ahead are served, however late": {tokens: 1, ahead: []int{long, long, long}, stays: true, comes: shed},
	} {
		t.Run(name, func(t *testing.T) {
			r, clock := newFairRouter(t, 1)
			due := clock.Now().Add(3 * time.Second)
			send := func(tokens int, stays bool) (what *string) {
				what = new(string)
				decided := func(_ Decision, err error) {
					if *what = served; err != nil {
						*what = shed
					}
					if err != nil && !errors.Is(err, ErrShed) {
						t.Error(err)
					}
				}
				request := tenant("a", tokens)
				request.Deadline, request.Sheddable = due, !stays
				if d, waiting, err := r.RouteOrWait(request, decided); waiting == nil {
					decided(d, err)
				}
				return what
			}
			pending := 16
			if test.room < 0 {
				pending = 1
			}
			busy := occupy(t, r, 0, pending)
			for _, tokens := range test.ahead {
				send(tokens, test.stays)
			}
			got := send(test.tokens, false)
			if *got != test.comes {
				t.Errorf("when it comes it is %q, want %q", *got, test.comes)
			}
			if test.comes != "" {
				return
			}
			clock.Advance(test.room)
			if test.idle {
				busy.End()
			} else {
				busy.FirstToken()
			}
			if *got != test.goes {
				t.Errorf("when there is room it is %q, want %q", *got, test.goes)
			}
			if err := r.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}
