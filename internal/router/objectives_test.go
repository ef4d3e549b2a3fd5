package router

import (
	"testing"
	"time"

	"kvrouter/internal/kv"
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
					if excluded := c.Excluded == excludedObjective; excluded != (c.Score == nil && !test.pinned) {
						t.Errorf("worker %d: excluded %q, score %v", c.Worker, c.Excluded, c.Score)
					}
				}
				d.Booking.End()
			}
		})
	}
}
