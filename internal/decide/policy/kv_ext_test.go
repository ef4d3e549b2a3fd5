package policy_test

import (
	"errors"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

func TestActiveBlocksAreSharedAndFreed(t *testing.T) {
	r := routertest.New(t, "kv", 1)
	w := kv.WorkerKey{}
	route := func(prompt []uint32) *router.Booking {
		t.Helper()
		d, err := r.Route(t.Context(), router.Request{Tokens: prompt})
		if err != nil {
			t.Fatal(err)
		}
		return d.Booking
	}
	expect := func(want int) {
		t.Helper()
		if got := r.Load(w).ActiveBlocks; got != want {
			t.Errorf("%d active blocks, want %d", got, want)
		}
	}
	shared := testkit.Tokens(1, 4*testkit.BlockSize)
	a := route(shared)
	expect(4)
	b := route(append(shared[:2*testkit.BlockSize:2*testkit.BlockSize], testkit.Tokens(99, testkit.BlockSize)...))
	expect(5)
	a.End()
	expect(3)
	a.End()
	expect(3)
	b.FirstToken()
	expect(3)
	b.End()
	expect(0)
	n := 0
	for _, load := range r.Loads() {
		n += load.PotentialDecodeBlocks
	}
	if n != 0 {
		t.Errorf("%d entries are left", n)
	}
}

func TestSchedulerOverridesOfARequest(t *testing.T) {
	number := func(f float64) *float64 { return &f }
	flag := func(b bool) *bool { return &b }
	// Worker 0 holds half the prompt and has as many tokens queued; worker 1 has
	// one block more in use than worker 0.
	for _, test := range []struct {
		name     string
		override *policy.Override
		want     int // -1: either
	}{
		{"none", nil, 0},
		{"an empty one", &policy.Override{}, 0},
		{"a weight of 0 leaves the blocks in use", &policy.Override{OverlapScoreWeight: number(0)}, 0},
		{"no credit", &policy.Override{OverlapScoreCredit: number(0)}, 1},
		{"more credit", &policy.Override{OverlapScoreCredit: number(2)}, 0},
		{"queued tokens weigh nothing", &policy.Override{PrefillLoadScale: number(0)}, 0},
		{"prompts that are not tracked", &policy.Override{TrackPrefillTokens: flag(false)}, 0},
		{"chance", &policy.Override{RouterTemperature: number(1e9)}, -1},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, _ := routertest.NewClocked(t, 2)
			routertest.Hold(r, 0, testkit.Tokens(1, 40))
			if _, err := r.Book(router.Request{NumTokens: 40}, kv.WorkerKey{Worker: 0}); err != nil {
				t.Fatal(err)
			}
			b, err := r.Book(router.Request{Tokens: testkit.Tokens(900, 4)}, kv.WorkerKey{Worker: 1})
			if err != nil {
				t.Fatal(err)
			}
			b.FirstToken()
			counts := [2]int{}
			for range 200 {
				d := routertest.MustRoute(t, r, router.Request{Tokens: testkit.Tokens(1, 80), Override: test.override, QueryOnly: true})
				counts[d.Target.Key.Worker]++
			}
			if test.want >= 0 && counts[test.want] != 200 {
				t.Errorf("chosen %v times, want always worker %d", counts, test.want)
			}
			if test.want < 0 && (counts[0] < 60 || counts[1] < 60) {
				t.Errorf("chosen %v times, want both", counts)
			}
		})
	}
}

// TestTheTreeOfAWorkerWithoutAMatchCountsAsEmpty: Dynamo 1.0 has the sizes only of
// workers that hold some of the prompt.
func TestTheTreeOfAWorkerWithoutAMatchCountsAsEmpty(t *testing.T) {
	settings := testkit.Defaults[policy.Settings]()
	settings.Ties = "smallest-tree"
	rule, err := policy.New("kv", settings)
	if err != nil {
		t.Fatal(err)
	}
	r := router.New(testkit.Defaults[router.Settings](), router.Deps{Index: radix.NewTree(), Policy: rule, BlockSize: testkit.BlockSize, Seed: 1})
	for i := range uint64(3) {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: i}})
	}
	prompt := testkit.Tokens(1, 20)
	routertest.Hold(r, 0, prompt)
	routertest.Hold(r, 0, testkit.Tokens(500, 8))
	routertest.Hold(r, 1, prompt)
	routertest.Hold(r, 2, testkit.Tokens(900, 400))
	none := 0.0
	for _, test := range []struct {
		name     string
		override *policy.Override
		want     uint64
	}{
		{"of the two that hold the prompt the smaller tree", nil, 1},
		{"of three that cost the same the one without a match", &policy.Override{OverlapScoreCredit: &none}, 2},
	} {
		for range 50 {
			d := routertest.MustRoute(t, r, router.Request{Tokens: prompt, Override: test.override, QueryOnly: true})
			if d.Target.Key.Worker != test.want {
				t.Fatalf("%s: worker %d, want %d", test.name, d.Target.Key.Worker, test.want)
			}
		}
	}
}

func TestSchedulerAllowedIDs(t *testing.T) {
	r, _ := routertest.NewClocked(t, 4)
	routertest.Hold(r, 0, testkit.Tokens(1, 40))
	routertest.Hold(r, 2, testkit.Tokens(1, 20))
	for _, test := range []struct {
		allowed []uint64
		want    uint64
	}{{nil, 0}, {[]uint64{2, 3}, 2}, {[]uint64{3}, 3}, {[]uint64{3, 99}, 3}} {
		if d := routertest.MustRoute(t, r, router.Request{Tokens: testkit.Tokens(1, 41), Allowed: test.allowed, QueryOnly: true}); d.Target.Key.Worker != test.want {
			t.Errorf("of %v worker %d was chosen, want %d", test.allowed, d.Target.Key.Worker, test.want)
		}
	}
	if _, err := r.Route(t.Context(), router.Request{Tokens: testkit.Tokens(1, 41), Allowed: []uint64{}}); !errors.Is(err, router.ErrNoWorker) {
		t.Errorf("none allowed: %v, want ErrNoWorker", err)
	}
}

func TestSchedulerQueriesChangeNothing(t *testing.T) {
	r, _ := routertest.NewClocked(t, 2)
	routertest.Hold(r, 1, testkit.Tokens(1, 8))
	for range 50 {
		d := routertest.MustRoute(t, r, router.Request{ID: "same", Tokens: testkit.Tokens(1, 12), QueryOnly: true})
		if d.Target.Key.Worker != 1 || d.EffectivePrefillTokens != 4 || d.PotentialDecodeBlocks != 3 || d.Booking != nil || len(d.Sequence) != 3 {
			t.Fatalf("%+v", d)
		}
	}
	for _, load := range r.Loads() {
		if load != (router.WorkerLoad{Key: load.Key}) || r.Load(load.Key).Bumped != 0 {
			t.Errorf("a query left %+v", load)
		}
	}
}

func TestSchedulerSwitchesSayWhatIsCounted(t *testing.T) {
	// The loads of one worker with two bookings of 3 equal blocks, 2 of which it
	// holds, and the answer to a third.
	flag := func(b bool) *bool { return &b }
	for _, test := range []struct {
		name                    string
		change                  func(*router.Settings)
		override                *policy.Override
		prefill, blocks         int
		withPrefill, withBlocks int // with one more
	}{
		{"all", func(*router.Settings) {}, nil, 8, 3, 12, 3},
		{"no active blocks", func(k *router.Settings) { k.RouterTrackActiveBlocks = false }, nil, 8, 0, 12, 0},
		{"no prompt tokens", func(k *router.Settings) { k.RouterTrackPrefillTokens = false }, nil, 0, 3, 0, 3},
		{"no reuse", func(k *router.Settings) { k.RouterAssumeKVReuse = false }, nil, 8, 6, 12, 9},
		{"no reuse by override", func(*router.Settings) {}, &policy.Override{AssumeKVReuse: flag(false)}, 8, 6, 12, 9},
		{"reuse by override", func(k *router.Settings) { k.RouterAssumeKVReuse = false }, &policy.Override{AssumeKVReuse: flag(true)}, 8, 3, 12, 3},
		{"no prompt tokens by override", func(*router.Settings) {}, &policy.Override{TrackPrefillTokens: flag(false)}, 0, 3, 0, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			knobs := testkit.Defaults[router.Settings]()
			test.change(&knobs)
			r, _ := routertest.NewClocked(t, 1, routertest.WithSettings(func(s *router.Settings) { *s = knobs }))
			routertest.Hold(r, 0, testkit.Tokens(1, 8))
			request := router.Request{Tokens: testkit.Tokens(1, 12), Override: test.override}
			var bookings []*router.Booking
			for range 2 {
				bookings = append(bookings, routertest.MustRoute(t, r, request).Booking)
			}
			routertest.ExpectLoad(t, r, test.prefill, test.blocks, 2)
			want := router.WorkerLoad{PotentialPrefillTokens: test.withPrefill, PotentialDecodeBlocks: test.withBlocks, ActiveRequests: 2}
			if got := r.PotentialLoads(request); got[0] != want {
				t.Errorf("with one more %+v, want %+v", got[0], want)
			}
			for _, b := range bookings {
				b.End()
			}
			routertest.ExpectLoad(t, r, 0, 0, 0)
		})
	}
}

func TestKVCountsAPromptThatIsCachedAsAWhole(t *testing.T) {
	// Dynamo takes all of it for saved work; what the engine can use is less.
	r, _ := routertest.NewClocked(t, 1)
	routertest.Hold(r, 0, testkit.Tokens(1, 8))
	if d := routertest.MustRoute(t, r, router.Request{Tokens: testkit.Tokens(1, 8)}); d.EffectivePrefillTokens != 0 || d.OverlapTokens != 4 {
		t.Errorf("%d tokens to compute, %d usable in the cache; want 0 and 4", d.EffectivePrefillTokens, d.OverlapTokens)
	}
	routertest.ExpectLoad(t, r, 0, 2, 1)
}
