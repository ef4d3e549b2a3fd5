package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// pairRouter returns a router over workers 0, 1, ... with those parts.
func pairRouter(t testing.TB, policy string, parts ...Disagg) *Router {
	t.Helper()
	r := newTestRouter(t, policy, 0)
	for i, d := range parts {
		r.Up(Target{Key: WorkerKey{Worker: uint64(i)}, Models: []string{"m"}, Disagg: d})
	}
	return r
}

var (
	nixlPrefill    = Disagg{Role: RolePrefill, Kind: KindNIXL}
	nixlDecode     = Disagg{Role: RoleDecode, Kind: KindNIXL}
	nixlBoth       = Disagg{Kind: KindNIXL}
	sglangPrefill  = Disagg{Role: RolePrefill, Kind: KindSGLang, Bootstrap: Bootstrap{"h", 8998}}
	sglangDecode   = Disagg{Role: RoleDecode, Kind: KindSGLang}
	sglangUnknown  = Disagg{Role: RolePrefill, Kind: KindSGLang}
	mooncakeDecode = Disagg{Role: RoleDecode, Kind: KindMooncake}
	plain          = Disagg{}
)

func TestWhoSharesARequest(t *testing.T) {
	tests := []struct {
		name            string
		parts           []Disagg
		rule            PairRule
		kinds           Kinds
		prefill, decode []uint64 // who may be chosen; no prefill: it stays whole
		why             string
		err             error
	}{
		{name: "one of each", parts: []Disagg{nixlPrefill, nixlDecode}, prefill: []uint64{0}, decode: []uint64{1}},
		{name: "nobody has a role", parts: []Disagg{plain, plain}, decode: []uint64{0, 1}, why: wholeNoPair},
		{name: "workers for both parts alone", parts: []Disagg{nixlBoth, nixlBoth}, decode: []uint64{0, 1}, why: wholeNoPair},
		{name: "no prefill worker", parts: []Disagg{nixlDecode, plain}, decode: []uint64{0, 1}, why: wholeNoPair},
		{name: "no decode worker", parts: []Disagg{nixlPrefill}, err: ErrNoWorker},
		{name: "a worker for both parts decodes", parts: []Disagg{nixlPrefill, nixlBoth}, prefill: []uint64{0}, decode: []uint64{1}},
		{name: "a worker for both parts does not prefill alone", parts: []Disagg{nixlBoth, nixlDecode}, decode: []uint64{0, 1}, why: wholeNoPair},
		{name: "a plain worker takes no leg", parts: []Disagg{nixlPrefill, plain}, decode: []uint64{1}, why: wholeNoPair},
		{name: "kinds do not mix", parts: []Disagg{nixlPrefill, sglangDecode, mooncakeDecode}, decode: []uint64{2}, why: wholeNoPair},
		{name: "only a kind that has both parts", parts: []Disagg{nixlPrefill, sglangPrefill, sglangDecode}, prefill: []uint64{1}, decode: []uint64{2}},
		{name: "no bootstrap server known", parts: []Disagg{sglangUnknown, sglangDecode}, err: ErrNoWorker},
		{name: "enforced", parts: []Disagg{nixlDecode, nixlDecode}, rule: PairRule{Enforce: true}, err: ErrNoPair},
		{name: "whole by rule", parts: []Disagg{nixlPrefill, nixlDecode}, rule: PairRule{Whole: wholeAnswers, Enforce: true}, decode: []uint64{1}, why: wholeAnswers},
		{name: "whole by rule where nobody takes it whole", parts: []Disagg{sglangPrefill, sglangDecode}, rule: PairRule{Whole: wholeAnswers}, kinds: kindsOf(KindSGLang), prefill: []uint64{0}, decode: []uint64{1}},
		{name: "whole by rule where nobody does that either", parts: []Disagg{sglangPrefill}, rule: PairRule{Whole: wholeAnswers, Enforce: true}, err: ErrNoWorker},
		{name: "whole by rule where only other kinds share it", parts: []Disagg{sglangPrefill, sglangDecode}, rule: PairRule{Whole: wholeOwn}, kinds: kindsOf(KindNone), err: ErrNoWorker},
		{name: "short", parts: []Disagg{nixlPrefill, nixlDecode}, rule: PairRule{LeastUncached: 13}, decode: []uint64{1}, why: wholeShort},
		{name: "just not short", parts: []Disagg{nixlPrefill, nixlDecode}, rule: PairRule{LeastUncached: 12}, prefill: []uint64{0}, decode: []uint64{1}},
		{name: "short where nobody takes it whole", parts: []Disagg{sglangPrefill, sglangDecode}, rule: PairRule{LeastUncached: 13}, prefill: []uint64{0}, decode: []uint64{1}},
	}
	for _, test := range tests {
		for _, policy := range []string{"work", "kv", "round-robin", "random"} {
			r := pairRouter(t, policy, test.parts...)
			for range 5 {
				pair, err := r.RoutePair(t.Context(), Request{Tokens: count(1, 12), Kinds: test.kinds}, test.rule)
				if !errors.Is(err, test.err) || pair.Whole != test.why {
					t.Fatalf("%s: whole %q, %v", test.name, pair.Whole, err)
				}
				if err != nil {
					continue
				}
				if !slices.Contains(test.decode, pair.Decode.Target.Key.Worker) || pair.Decode.Booking == nil {
					t.Errorf("%s: decode %+v", test.name, pair.Decode)
				}
				if shared := pair.Prefill.Booking != nil; shared != (test.why == "") || shared && !slices.Contains(test.prefill, pair.Prefill.Target.Key.Worker) {
					t.Errorf("%s: prefill %+v", test.name, pair.Prefill)
				}
				pair.End()
			}
			for _, l := range r.Loads() {
				if l.ActiveRequests != 0 {
					t.Errorf("%s: %+v is left", test.name, l)
				}
			}
		}
	}
}

// TestPromptGoesWhereItIsCachedAndAnswerWhereThereIsRoom: the decode worker's
// cache does not count, nor does the prompt as something it has to compute.
func TestPromptGoesWhereItIsCachedAndAnswerWhereThereIsRoom(t *testing.T) {
	for _, policy := range []string{"work", "kv"} {
		r := pairRouter(t, policy, nixlPrefill, nixlPrefill, nixlDecode, nixlDecode)
		prompt := count(1, 40*testBlock+1)
		hashes := HashBlocks(nil, prompt, testBlock, "", "")
		for _, w := range []uint64{1, 2} {
			blocks := make([]StoredBlock, 20)
			for i := range blocks {
				blocks[i] = StoredBlock{uint64(i + 1), hashes[i]}
			}
			if err := r.Index().Store(WorkerKey{Worker: w}, 0, false, blocks); err != nil {
				t.Fatal(err)
			}
		}
		busy := mustRoute(t, r, Request{Tokens: count(5000, 8*testBlock), Pinned: &WorkerKey{Worker: 2}})
		busy.Booking.FirstToken()
		pair, err := r.RoutePair(t.Context(), Request{Tokens: prompt}, PairRule{})
		if err != nil {
			t.Fatal(err)
		}
		if p := pair.Prefill; p.Target.Key.Worker != 1 || p.OverlapTokens != 20*testBlock {
			t.Errorf("%s: prefill on %d with %d cached", policy, p.Target.Key.Worker, p.OverlapTokens)
		}
		if d := pair.Decode; d.Target.Key.Worker != 3 || d.OverlapTokens != 0 {
			t.Errorf("%s: decode on %d with %d cached", policy, d.Target.Key.Worker, d.OverlapTokens)
		}
		if load := r.Load(WorkerKey{Worker: 1}); load.PrefillTokens != 20*testBlock+1 {
			t.Errorf("%s: %d prompt tokens to compute on the prefill worker", policy, load.PrefillTokens)
		}
		if load := r.Load(WorkerKey{Worker: 3}); load.PrefillTokens != 0 || load.ActiveBlocks != 40 || load.InFlight != 1 {
			t.Errorf("%s: decode worker has %+v", policy, load)
		}
		pair.Prefill.Booking.Finish(1)
		if load := r.Load(WorkerKey{Worker: 1}); load.InFlight != 0 || load.PrefillTokens != 0 {
			t.Errorf("%s: prefill worker has %+v", policy, load)
		}
		pair.Decode.Booking.Finish(5)
		busy.Booking.Finish(5)
		pair.End()
		for w := range uint64(4) {
			if load := r.Load(WorkerKey{Worker: w}); load.InFlight != 0 || load.ActiveBlocks != 0 {
				t.Errorf("%s: worker %d is left with %+v", policy, w, load)
			}
		}
	}
}

// TestLegsOfOneRequest pins what the policy is asked for each leg, and what is
// booked: the answer is the request, and carries its name.
func TestLegsOfOneRequest(t *testing.T) {
	r := pairRouter(t, "round-robin", nixlPrefill, nixlDecode)
	policy := new(clerk)
	r.policy = policy
	request := Request{ID: "r", Tokens: count(1, 40), ExpectedOutput: 500, Silent: true, Prefix: PrefixHints{ID: "p"}}
	pair, err := r.RoutePair(t.Context(), request, PairRule{})
	if err != nil {
		t.Fatal(err)
	}
	defer pair.End()
	asked := policy.queries()
	if len(asked) != 2 {
		t.Fatalf("asked %+v", asked)
	}
	if q := asked[0]; q.Leg != LegPrefill || q.Untracked || q.Prefix.ID != "p" {
		t.Errorf("asked for the prefill leg: %+v", q)
	}
	if q := asked[1]; q.Leg != LegDecode || !q.Untracked || q.Prefix != (PrefixHints{}) {
		t.Errorf("asked for the decode leg: %+v", q)
	}
	if b := pair.Prefill.Booking; b.id != "" || b.expected != 1 || b.silent || b.leg != LegPrefill {
		t.Errorf("booked for the prefill leg: %+v", b)
	}
	if b := pair.Decode.Booking; b != r.Booking("r") || b.expected != 500 || !b.silent || b.leg != LegDecode {
		t.Errorf("booked for the decode leg: %+v", b)
	}
}

// TestBlocksOfADecodeLegAreItsOwn: they were fetched, whatever requests beside it
// have the same prompt.
func TestBlocksOfADecodeLegAreItsOwn(t *testing.T) {
	r := pairRouter(t, "kv", nixlPrefill, nixlDecode)
	for n := 1; n <= 3; n++ {
		pair, err := r.RoutePair(t.Context(), Request{Tokens: count(1, 10*testBlock)}, PairRule{})
		if err != nil {
			t.Fatal(err)
		}
		defer pair.End()
		if blocks := r.Load(WorkerKey{Worker: 1}).ActiveBlocks; blocks != 10*n {
			t.Errorf("%d blocks of %d answers", blocks, n)
		}
	}
}

func TestPromptOfUnknownLengthIsShared(t *testing.T) {
	r := pairRouter(t, "kv", nixlPrefill, nixlDecode)
	pair, err := r.RoutePair(t.Context(), Request{}, PairRule{LeastUncached: 256})
	if err != nil || pair.Whole != "" {
		t.Errorf("whole %q, %v", pair.Whole, err)
	}
	pair.End()
}

// TestPrefillLegIsNotBookedWithoutADecodeLeg: all decode workers are busy.
func TestPrefillLegIsNotBookedWithoutADecodeLeg(t *testing.T) {
	r := pairRouter(t, "kv", nixlPrefill, sglangDecode, nixlDecode)
	limit := 0.5
	r.knobs.BusyThresholds.ActiveDecodeBlocksThreshold = &limit
	r.Up(Target{Key: WorkerKey{Worker: 2}, TotalBlocks: 10, Disagg: nixlDecode})
	busy := mustRoute(t, r, Request{Tokens: count(1, 8*testBlock), Pinned: &WorkerKey{Worker: 2}})
	defer busy.Booking.End()
	if pair, err := r.RoutePair(t.Context(), Request{Tokens: count(5000, 100)}, PairRule{}); !errors.Is(err, ErrBusy) {
		t.Errorf("%+v, %v", pair, err)
	}
	if n := r.Load(WorkerKey{}).InFlight; n != 0 {
		t.Errorf("%d prompts are booked", n)
	}
}

func TestTimesOfAPairAreThoseOfBoth(t *testing.T) {
	pair := Pair{Prefill: Decision{Tokens: 7, ScheduleTime: 1, QueueTime: 2}, Decode: Decision{ScheduleTime: 30, QueueTime: 40}}
	if got := pair.took(); got.Tokens != 7 || got.ScheduleTime != 31 || got.QueueTime != 42 {
		t.Errorf("%+v", got)
	}
	pair.Whole = wholeShort
	if got := pair.took(); got.Tokens != 0 || got.ScheduleTime != 30 || got.QueueTime != 40 {
		t.Errorf("whole: %+v", got)
	}
}

// TestPairsKeepTheBooks: whatever comes and goes, every pair has two workers that
// may share it, and nothing is left once all have ended.
func TestPairsKeepTheBooks(t *testing.T) {
	parts := []Disagg{plain, nixlBoth, nixlPrefill, nixlDecode, sglangPrefill, sglangDecode, sglangUnknown, mooncakeDecode}
	rapid.Check(t, func(t *rapid.T) {
		policy, err := NewPolicy(rapid.SampledFrom(PolicyNames).Draw(t, "policy"))
		if err != nil {
			t.Fatal(err)
		}
		r := NewRouter(NewRadix(), policy, testBlock, 1)
		roles := map[uint64]Disagg{}
		var open []Pair
		t.Repeat(map[string]func(*rapid.T){
			"up": func(t *rapid.T) {
				id, d := rapid.Uint64Range(0, 5).Draw(t, "worker"), rapid.SampledFrom(parts).Draw(t, "part")
				roles[id] = d
				r.Up(Target{Key: WorkerKey{Worker: id}, Disagg: d})
			},
			"down": func(t *rapid.T) {
				id := rapid.Uint64Range(0, 5).Draw(t, "worker")
				delete(roles, id)
				r.Down(WorkerKey{Worker: id})
			},
			"route": func(t *rapid.T) {
				rule := PairRule{LeastUncached: rapid.IntRange(0, 20).Draw(t, "least"), Enforce: rapid.Bool().Draw(t, "enforce")}
				pair, err := r.RoutePair(context.Background(), Request{Tokens: count(rapid.Uint32Range(1, 3).Draw(t, "prompt"), rapid.IntRange(1, 20).Draw(t, "tokens"))}, rule)
				if err != nil {
					if pair.Prefill.Booking != nil || pair.Decode.Booking != nil {
						t.Fatalf("%v with a booking", err)
					}
					return
				}
				p, d := roles[pair.Prefill.Target.Key.Worker], roles[pair.Decode.Target.Key.Worker]
				if pair.Whole == "" {
					if !p.takes(LegPrefill) || !d.takes(LegDecode) || p.Kind != d.Kind || pair.Prefill.Target.Key == pair.Decode.Target.Key {
						t.Fatalf("pair of %+v and %+v", p, d)
					}
				} else if !d.takes(LegWhole) || pair.Prefill.Booking != nil || rule.Enforce && pair.Whole == wholeNoPair {
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
				if err := r.check(); err != nil {
					t.Fatal(err)
				}
			},
		})
	})
}

// TestOnlyWholeRequestsTeachWhatIsUsual: a decode worker's first token waits for
// another worker, and a prefill worker's answer is one token.
func TestOnlyWholeRequestsTeachWhatIsUsual(t *testing.T) {
	whole, legs := newWork(), newWork()
	random := rand.New(rand.NewPCG(1, 1))
	learn := func(p *work, o Outcome) {
		o.FirstToken, o.Decode, o.Alone = 50e6, 500e6, true
		p.Learn(o)
	}
	for range 50 {
		o := Outcome{Uncached: 100, Output: 40, Before: Meanwhile{Prompts: 1, Tokens: 100}, During: Meanwhile{Context: 100}}
		learn(whole, o)
		learn(legs, o)
		learn(legs, Outcome{Leg: LegPrefill, Uncached: 100, Output: 1, Before: Meanwhile{Prompts: 1, Tokens: 100}})
		learn(legs, Outcome{Leg: LegDecode, Output: 40, During: Meanwhile{Context: 100}})
	}
	for _, p := range []*work{whole, legs} {
		candidates := []Candidate{{}, {}}
		p.Choose(Query{Tokens: 100, BlockSize: testBlock}, candidates, random)
		p.Choose(Query{Tokens: 100000, BlockSize: testBlock, Leg: LegDecode}, candidates, random)
	}
	if fmt.Sprint(whole.output.value, whole.uncached) != fmt.Sprint(legs.output.value, legs.uncached) {
		t.Errorf("usual output %v and prompt %v, want %v and %v", legs.output, legs.uncached, whole.output, whole.uncached)
	}
	if a, b := whole.timing.Prefill(1000), legs.timing.Prefill(1000); b < a/2 || b > a*2 {
		t.Errorf("1000 tokens take %g ms, want about %g", b, a)
	}
}
