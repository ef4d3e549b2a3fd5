package router

import (
	"context"
	"errors"
	"testing"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/radixtest"
)

// pairRouter returns a router over workers 0, 1, ... with those parts.
func pairRouter(t testing.TB, policy string, parts ...kv.Disagg) *Router {
	t.Helper()
	r := NewTestRouter(t, policy, 0)
	for i, d := range parts {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Models: []string{"m"}, Disagg: d})
	}
	return r
}

// TestPromptGoesWhereItIsCachedAndAnswerWhereThereIsRoom: the decode worker's
// cache does not count, nor does the prompt as something it has to compute.
func TestPromptGoesWhereItIsCachedAndAnswerWhereThereIsRoom(t *testing.T) {
	for _, policy := range []string{"work", "kv"} {
		r := pairRouter(t, policy, testkit.NixlPrefill, testkit.NixlPrefill, testkit.NixlDecode, testkit.NixlDecode)
		prompt := testkit.Tokens(1, 40*testkit.BlockSize+1)
		hashes := kv.HashBlocks(nil, prompt, testkit.BlockSize, "", "")
		for _, w := range []uint64{1, 2} {
			blocks := make([]kv.StoredBlock, 20)
			for i := range blocks {
				blocks[i] = kv.StoredBlock{Engine: uint64(i + 1), Local: hashes[i]}
			}
			if err := radixtest.Store(r.Index(), kv.WorkerKey{Worker: w}, 0, false, blocks); err != nil {
				t.Fatal(err)
			}
		}
		busy := MustRoute(t, r, Request{Tokens: testkit.Tokens(5000, 8*testkit.BlockSize), Pinned: &kv.WorkerKey{Worker: 2}})
		busy.Booking.FirstToken()
		pair, err := r.RoutePair(t.Context(), Request{Tokens: prompt}, PairRule{})
		if err != nil {
			t.Fatal(err)
		}
		if p := pair.Prefill; p.Target.Key.Worker != 1 || p.OverlapTokens != 20*testkit.BlockSize {
			t.Errorf("%s: prefill on %d with %d cached", policy, p.Target.Key.Worker, p.OverlapTokens)
		}
		if d := pair.Decode; d.Target.Key.Worker != 3 || d.OverlapTokens != 0 {
			t.Errorf("%s: decode on %d with %d cached", policy, d.Target.Key.Worker, d.OverlapTokens)
		}
		if load := r.Load(kv.WorkerKey{Worker: 1}); load.PrefillTokens != 20*testkit.BlockSize+1 {
			t.Errorf("%s: %d prompt tokens to compute on the prefill worker", policy, load.PrefillTokens)
		}
		if load := r.Load(kv.WorkerKey{Worker: 3}); load.PrefillTokens != 0 || load.ActiveBlocks != 40 || load.InFlight != 1 {
			t.Errorf("%s: decode worker has %+v", policy, load)
		}
		pair.Prefill.Booking.Finish(1)
		if load := r.Load(kv.WorkerKey{Worker: 1}); load.InFlight != 0 || load.PrefillTokens != 0 {
			t.Errorf("%s: prefill worker has %+v", policy, load)
		}
		pair.Decode.Booking.Finish(5)
		busy.Booking.Finish(5)
		pair.End()
		for w := range uint64(4) {
			if load := r.Load(kv.WorkerKey{Worker: w}); load.InFlight != 0 || load.ActiveBlocks != 0 {
				t.Errorf("%s: worker %d is left with %+v", policy, w, load)
			}
		}
	}
}

// TestLegsOfOneRequest pins what the policy is asked for each leg, and what is
// booked: the answer is the request, and carries its name.
func TestLegsOfOneRequest(t *testing.T) {
	r := pairRouter(t, "round-robin", testkit.NixlPrefill, testkit.NixlDecode)
	policy := new(policytest.Clerk)
	r.decider.policy = policy
	request := Request{ID: "r", Tokens: testkit.Tokens(1, 40), ExpectedOutput: 500, AnsweredWhole: true, Prefix: hints.Prefix{ID: "p"}}
	pair, err := r.RoutePair(t.Context(), request, PairRule{})
	if err != nil {
		t.Fatal(err)
	}
	defer pair.End()
	asked := policy.Queries()
	if len(asked) != 2 {
		t.Fatalf("asked %+v", asked)
	}
	if q := asked[0]; q.Leg != kv.LegPrefill || q.FreePrefill || q.Prefix.ID != "p" {
		t.Errorf("asked for the prefill leg: %+v", q)
	}
	if q := asked[1]; q.Leg != kv.LegDecode || !q.FreePrefill || q.Prefix != (hints.Prefix{}) {
		t.Errorf("asked for the decode leg: %+v", q)
	}
	if b := pair.Prefill.Booking; b.id != "" || b.expected != 1 || b.answeredWhole || b.leg != kv.LegPrefill {
		t.Errorf("booked for the prefill leg: %+v", b)
	}
	if b := pair.Decode.Booking; b != r.Booking("r") || b.expected != 500 || !b.answeredWhole || b.leg != kv.LegDecode {
		t.Errorf("booked for the decode leg: %+v", b)
	}
}

// TestBlocksOfADecodeLegAreItsOwn: they were fetched, whatever requests beside it
// have the same prompt.
func TestBlocksOfADecodeLegAreItsOwn(t *testing.T) {
	r := pairRouter(t, "kv", testkit.NixlPrefill, testkit.NixlDecode)
	for n := 1; n <= 3; n++ {
		pair, err := r.RoutePair(t.Context(), Request{Tokens: testkit.Tokens(1, 10*testkit.BlockSize)}, PairRule{})
		if err != nil {
			t.Fatal(err)
		}
		defer pair.End()
		if blocks := r.Load(kv.WorkerKey{Worker: 1}).ActiveBlocks; blocks != 10*n {
			t.Errorf("%d blocks of %d answers", blocks, n)
		}
	}
}

func TestPromptOfUnknownLengthIsShared(t *testing.T) {
	r := pairRouter(t, "kv", testkit.NixlPrefill, testkit.NixlDecode)
	pair, err := r.RoutePair(t.Context(), Request{}, PairRule{LeastUncached: 256})
	if err != nil || pair.Whole != "" {
		t.Errorf("whole %q, %v", pair.Whole, err)
	}
	pair.End()
}

// TestPrefillLegIsNotBookedWithoutADecodeLeg: all decode workers are busy.
func TestPrefillLegIsNotBookedWithoutADecodeLeg(t *testing.T) {
	r := pairRouter(t, "kv", testkit.NixlPrefill, testkit.SglangDecode, testkit.NixlDecode)
	limit := 0.5
	r.Admission.thresholds.ActiveDecodeBlocksThreshold = &limit
	r.Up(kv.Target{Key: kv.WorkerKey{Worker: 2}, TotalBlocks: 10, Disagg: testkit.NixlDecode})
	busy := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 8*testkit.BlockSize), Pinned: &kv.WorkerKey{Worker: 2}})
	defer busy.Booking.End()
	if pair, err := r.RoutePair(t.Context(), Request{Tokens: testkit.Tokens(5000, 100)}, PairRule{}); !errors.Is(err, ErrBusy) {
		t.Errorf("%+v, %v", pair, err)
	}
	if n := r.Load(kv.WorkerKey{}).InFlight; n != 0 {
		t.Errorf("%d prompts are booked", n)
	}
}

func TestTimesOfAPairAreThoseOfBoth(t *testing.T) {
	pair := Pair{Prefill: Decision{Tokens: 7, ScheduleTime: 1, QueueTime: 2}, Decode: Decision{ScheduleTime: 30, QueueTime: 40}}
	if got := pair.Took(); got.Tokens != 7 || got.ScheduleTime != 31 || got.QueueTime != 42 {
		t.Errorf("%+v", got)
	}
	pair.Whole = WholeShort
	if got := pair.Took(); got.Tokens != 0 || got.ScheduleTime != 30 || got.QueueTime != 40 {
		t.Errorf("whole: %+v", got)
	}
}

// TestPairsKeepTheBooks: whatever comes and goes, every pair has two workers that
// may share it, and nothing is left once all have ended.
func TestPairsKeepTheBooks(t *testing.T) {
	parts := []kv.Disagg{testkit.Plain, testkit.NixlBoth, testkit.NixlPrefill, testkit.NixlDecode, testkit.SglangPrefill, testkit.SglangDecode, testkit.SglangUnknown, testkit.MooncakeDecode}
	rapid.Check(t, func(t *rapid.T) {
		policy := policytest.MustPolicy(t, rapid.SampledFrom(policies.Names).Draw(t, "policy"))
		r := New(testkit.Defaults[Settings](), Deps{Index: radix.NewTree(), Policy: policy, BlockSize: testkit.BlockSize, Seed: 1})
		roles := map[uint64]kv.Disagg{}
		var open []Pair
		t.Repeat(map[string]func(*rapid.T){
			"up": func(t *rapid.T) {
				id, d := rapid.Uint64Range(0, 5).Draw(t, "worker"), rapid.SampledFrom(parts).Draw(t, "part")
				roles[id] = d
				r.Up(kv.Target{Key: kv.WorkerKey{Worker: id}, Disagg: d})
			},
			"down": func(t *rapid.T) {
				id := rapid.Uint64Range(0, 5).Draw(t, "worker")
				delete(roles, id)
				r.Down(kv.WorkerKey{Worker: id})
			},
			"route": func(t *rapid.T) {
				rule := PairRule{LeastUncached: rapid.IntRange(0, 20).Draw(t, "least"), Enforce: rapid.Bool().Draw(t, "enforce")}
				pair, err := r.RoutePair(context.Background(), Request{Tokens: testkit.Tokens(rapid.Uint32Range(1, 3).Draw(t, "prompt"), rapid.IntRange(1, 20).Draw(t, "tokens"))}, rule)
				if err != nil {
					if pair.Prefill.Booking != nil || pair.Decode.Booking != nil {
						t.Fatalf("%v with a booking", err)
					}
					return
				}
				p, d := roles[pair.Prefill.Target.Key.Worker], roles[pair.Decode.Target.Key.Worker]
				if pair.Whole == "" {
					if !p.Takes(kv.LegPrefill) || !d.Takes(kv.LegDecode) || p.Kind != d.Kind || pair.Prefill.Target.Key == pair.Decode.Target.Key {
						t.Fatalf("pair of %+v and %+v", p, d)
					}
				} else if !d.Takes(kv.LegWhole) || pair.Prefill.Booking != nil || rule.Enforce && pair.Whole == WholeNoPair {
					t.Fatalf("whole (%s) to %+v", pair.Whole, d)
				}
				open = append(open, pair)
			},
			"end": func(t *rapid.T) {
				if len(open) == 0 {
					t.Skip()
				}
				pair := open[len(open)-1]
				open = open[:len(open)-1]
				if pair.Prefill.Booking != nil && rapid.Bool().Draw(t, "prefilled") {
					pair.Prefill.Booking.FirstToken()
					pair.Prefill.Booking.Finish(1)
				}
				if rapid.Bool().Draw(t, "answered") {
					pair.Decode.Booking.FirstToken()
					pair.Decode.Booking.Finish(7)
				}
				pair.End()
			},
			"": func(t *rapid.T) {
				want := 0
				for _, pair := range open {
					for _, b := range []*Booking{pair.Prefill.Booking, pair.Decode.Booking} {
						if b != nil {
							want++
						}
					}
				}
				got := 0
				for _, l := range r.Loads() {
					got += l.ActiveRequests
				}
				if got != want {
					t.Fatalf("%d bookings, want %d", got, want)
				}
				if err := r.Check(); err != nil {
					t.Fatal(err)
				}
			},
		})
	})
}

// TestOnlyWholeRequestsTeachWhatIsUsual: a decode worker's first token waits for
// another worker, and a prefill worker's answer is one token.
func TestOnlyWholeRequestsTeachWhatIsUsual(t *testing.T) {
	whole, legs := policy.NewWork(), policy.NewWork()
	learn := func(p *policy.Work, o policy.Outcome) {
		o.FirstToken, o.Decode, o.Alone = 50e6, 500e6, true
		p.Learn(o)
	}
	for range 50 {
		o := policy.Outcome{Uncached: 100, Output: 40, Before: policy.Meanwhile{Prompts: 1, Tokens: 100}, During: policy.Meanwhile{Context: 100}}
		learn(whole, o)
		learn(legs, o)
		learn(legs, policy.Outcome{Leg: kv.LegPrefill, Uncached: 100, Output: 1, Before: policy.Meanwhile{Prompts: 1, Tokens: 100}})
		learn(legs, policy.Outcome{Leg: kv.LegDecode, Output: 40, During: policy.Meanwhile{Context: 100}})
	}
	if whole.Output.Value != legs.Output.Value {
		t.Errorf("usual output %v, want %v", legs.Output.Value, whole.Output.Value)
	}
	if a, b := whole.Timing.Prefill(1000), legs.Timing.Prefill(1000); b < a/2 || b > a*2 {
		t.Errorf("1000 tokens take %g ms, want about %g", b, a)
	}
}
