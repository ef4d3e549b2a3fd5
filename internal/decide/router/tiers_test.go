package router

import (
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// holdLower puts blocks from to to of a prompt into a lower tier of worker w.
func holdLower(r *Router, w uint64, tier kv.Tier, tokens []uint32, from, to int) {
	local := kv.HashBlocks(nil, tokens, r.Unit(), "", "")
	var blocks []kv.StoredBlock
	sequence := kv.SequenceHashes(nil, local)
	for i := from; i < to; i++ {
		blocks = append(blocks, kv.StoredBlock{Engine: sequence[i], Local: local[i]})
	}
	parent := uint64(0)
	if from > 0 {
		parent = sequence[from-1]
	}
	radixtest.StoreLower(r.Index(), kv.WorkerKey{Worker: w}, radix.LowerTier{Tier: tier}, parent, from > 0, blocks)
}

func TestDecisionsCountLowerTiers(t *testing.T) {
	const size = testkit.BlockSize
	prompt := testkit.Tokens(1, 10*size)
	for _, test := range []struct {
		name, rule         string
		device             int
		host, disk         [2]int // blocks from, to
		lower              kv.LowerBlocks
		predicted, guessed kv.TierTokens
		effective          int
	}{
		{"host memory continues the device", "work", 3, [2]int{0, 6}, [2]int{}, kv.LowerBlocks{Host: 3}, kv.TierTokens{Device: 3 * size, Host: 3 * size}, kv.TierTokens{}, 4 * size},
		{"the prompt's last block is computed", "work", 3, [2]int{0, 10}, [2]int{}, kv.LowerBlocks{Host: 6}, kv.TierTokens{Device: 3 * size, Host: 6 * size}, kv.TierTokens{}, size},
		{"nothing on the device", "work", 0, [2]int{0, 4}, [2]int{}, kv.LowerBlocks{Host: 4}, kv.TierTokens{Host: 4 * size}, kv.TierTokens{}, 6 * size},
		{"behind a gap nothing counts", "work", 2, [2]int{3, 9}, [2]int{}, kv.LowerBlocks{}, kv.TierTokens{Device: 2 * size}, kv.TierTokens{}, 8 * size},
		{"files are a guess", "work", 2, [2]int{0, 4}, [2]int{0, 6}, kv.LowerBlocks{Host: 2, Disk: 2}, kv.TierTokens{Device: 2 * size, Host: 2 * size}, kv.TierTokens{Disk: 2 * size}, 4 * size},
		{"kv weighs them", "kv", 2, [2]int{0, 4}, [2]int{0, 6}, kv.LowerBlocks{Host: 2, Disk: 2}, kv.TierTokens{Device: 2 * size, Host: 2 * size}, kv.TierTokens{Disk: 2 * size}, 10*size - 2*size - (3*2+2)*size/4},
		{"kv takes the last block", "kv", 3, [2]int{0, 10}, [2]int{}, kv.LowerBlocks{Host: 6}, kv.TierTokens{Device: 3 * size, Host: 6 * size}, kv.TierTokens{}, 7*size - 7*3*size/4},
		{"the others pass them over", "least-loaded", 2, [2]int{0, 4}, [2]int{}, kv.LowerBlocks{Host: 2}, kv.TierTokens{Device: 2 * size, Host: 2 * size}, kv.TierTokens{}, 8 * size},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := NewTestRouter(t, test.rule, 1)
			Hold(r, 0, prompt[:test.device*size])
			holdLower(r, 0, kv.Host, prompt, test.host[0], test.host[1])
			holdLower(r, 0, kv.Disk, prompt, test.disk[0], test.disk[1])
			d := MustRoute(t, r, Request{Tokens: prompt, Explain: true})
			if d.Overlap != test.device || d.Lower != test.lower || d.Predicted != test.predicted || d.Guessed != test.guessed || d.OverlapTokens != test.predicted.Total() || d.EffectivePrefillTokens != test.effective {
				t.Errorf("%+v", d)
			}
			load := r.Load(testkit.W0)
			if load.PrefillTokens != test.effective || len(load.Prefills) != 1 || load.Prefills[0].Loads != test.lower.Tokens(size) {
				t.Errorf("booked %d tokens, %+v", load.PrefillTokens, load.Prefills)
			}
			if c := d.Receipts[0].Candidates[0]; c.Host < int(test.lower.Host) || c.Disk != int(test.lower.Disk) || c.Overlap != test.device {
				t.Errorf("receipt %+v", c)
			}
			if loads := r.PotentialLoads(Request{Tokens: prompt}); loads[0].PotentialPrefillTokens != 2*test.effective && test.rule != "work" {
				t.Errorf("potential %d tokens", loads[0].PotentialPrefillTokens)
			}
			if err := r.Check(); err != nil {
				t.Error(err)
			}
			if d.Booking.FirstToken(); len(r.Load(testkit.W0).Prefills) != 0 {
				t.Error("its load is still booked after the first token")
			}
			d.Booking.Finish(1)
			if err := r.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestBlocksInFlightAreNotLoadedAgain: what a sibling computes or loads is on the device
// by then.
func TestBlocksInFlightAreNotLoadedAgain(t *testing.T) {
	r := NewTestRouter(t, "work", 1)
	prompt := testkit.Tokens(1, 10*testkit.BlockSize+1)
	holdLower(r, 0, kv.Host, prompt, 0, 8)
	first := MustRoute(t, r, Request{Tokens: prompt[:6*testkit.BlockSize+1]})
	second := MustRoute(t, r, Request{Tokens: prompt})
	if first.Lower.Host != 6 || second.Overlap != 6 || second.Lower.Host != 2 {
		t.Errorf("first %d and %+v, second %d and %+v", first.Overlap, first.Lower, second.Overlap, second.Lower)
	}
}

// TestAnswersTellWhetherATierDelivers: within 20 answers a tier that never delivers is worth
// nothing, and a request no longer goes there for it.
func TestAnswersTellWhetherATierDelivers(t *testing.T) {
	const size = testkit.BlockSize
	for _, test := range []struct {
		name   string
		answer func(b *Booking)
		moves  bool
	}{
		{"all is there", func(b *Booking) { b.Cached(9*size, kv.TierTokens{}) }, false},
		{"only the device's", func(b *Booking) { b.Cached(0, kv.TierTokens{}) }, true},
		{"by tier", func(b *Booking) { b.Cached(9*size, kv.TierTokens{Host: 9 * size}) }, false},
		{"from another tier", func(b *Booking) { b.Cached(9*size, kv.TierTokens{External: 9 * size}) }, true},
		{"nothing is reported", func(*Booking) {}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := NewTestRouter(t, "work", 2)
			prompt := testkit.Tokens(1, 10*size)
			holdLower(r, 0, kv.Host, prompt, 0, 10)
			Hold(r, 1, prompt[:2*size])
			for i := range 20 {
				d, err := r.Route(t.Context(), Request{Tokens: prompt, Pinned: &testkit.W0})
				if err != nil || d.Lower.Host != 9 {
					t.Fatal(i, d.Lower, err)
				}
				test.answer(d.Booking)
				test.answer(d.Booking) // a second report of one answer says nothing new
				d.Booking.Finish(1)
			}
			if d := MustRoute(t, r, Request{Tokens: prompt, QueryOnly: true}); (d.Target.Key.Worker == 1) != test.moves {
				t.Errorf("goes to worker %d", d.Target.Key.Worker)
			}
		})
	}
}

func TestAnAnswerSettlesTheDoubtAboutTiers(t *testing.T) {
	const size = testkit.BlockSize
	for name, cached := range map[string]int{"they are still there": 9 * size, "they are gone": 0} {
		t.Run(name, func(t *testing.T) {
			r := NewTestRouter(t, "work", 1)
			prompt := testkit.Tokens(1, 10*size)
			holdLower(r, 0, kv.Host, prompt, 0, 10)
			radixtest.ClearDevice(r.Index(), testkit.W0)
			d := MustRoute(t, r, Request{Tokens: prompt})
			if d.Predicted.Total() != 0 || d.Guessed.Host != 9*size {
				t.Errorf("predicted %+v, guessed %+v", d.Predicted, d.Guessed)
			}
			d.Booking.Cached(cached, kv.TierTokens{})
			d.Booking.Finish(1)
			if d = MustRoute(t, r, Request{Tokens: prompt}); d.Predicted.Total() != cached || d.Guessed.Total() != 0 {
				t.Errorf("then predicted %+v, guessed %+v, want %d", d.Predicted, d.Guessed, cached)
			}
		})
	}
}

// TestAnAnswerSaysNothingOfOtherBlocks: blocks that a tier has stored since its reset are
// predicted at once, and finding them does not show that those before it are still there.
func TestAnAnswerSaysNothingOfOtherBlocks(t *testing.T) {
	const size = testkit.BlockSize
	r := NewTestRouter(t, "work", 1)
	old, fresh := testkit.Tokens(1, 10*size), testkit.Tokens(2, 10*size)
	holdLower(r, 0, kv.Host, old, 0, 10)
	radixtest.ClearDevice(r.Index(), testkit.W0)
	holdLower(r, 0, kv.Host, fresh, 0, 5)
	found := func(prompt []uint32, cached, predicted, guessed int) {
		t.Helper()
		d := MustRoute(t, r, Request{Tokens: prompt})
		if d.Predicted.Total() != predicted*size || d.Guessed.Total() != guessed*size {
			t.Errorf("predicted %+v, guessed %+v, want %d and %d blocks", d.Predicted, d.Guessed, predicted, guessed)
		}
		d.Booking.Cached(cached*size, kv.TierTokens{})
		d.Booking.Finish(1)
	}
	found(fresh, 5, 5, 0)
	found(old, 0, 0, 9) // settles it
	found(old, 0, 0, 0)
	found(fresh, 5, 5, 0)
	if err := r.Check(); err != nil {
		t.Error(err)
	}
}

// TestCountersOfAWorkerReachThePolicy: loads that became slow send requests elsewhere.
func TestCountersOfAWorkerReachThePolicy(t *testing.T) {
	r := NewTestRouter(t, "work", 2)
	prompt := testkit.Tokens(1, 1000*testkit.BlockSize)
	holdLower(r, 0, kv.Host, prompt, 0, 999)
	goes := func() uint64 { return MustRoute(t, r, Request{Tokens: prompt, QueryOnly: true}).Target.Key.Worker }
	for _, test := range []struct {
		seconds float64 // for a million tokens
		want    uint64
	}{{1, 0}, {1e6, 1}} {
		r.Down(testkit.W0)
		r.Up(kv.Target{Key: testkit.W0}) // another incarnation
		r.Transferred(testkit.W0, policy.Transfers{})
		r.Transferred(testkit.W0, policy.Transfers{HostBytes: 1e9, HostSeconds: test.seconds, HostTokens: 1e6})
		if got := goes(); got != test.want {
			t.Errorf("with %v s a million tokens it goes to worker %d", test.seconds, got)
		}
	}
	r.Transferred(kv.WorkerKey{Worker: 7}, policy.Transfers{HostBytes: 1}) // is not up
	if r.fleet.loads.byWorker[kv.WorkerKey{Worker: 7}] != nil {
		t.Error("a late report keeps the books of a worker that is gone")
	}
}

// TestLoadsOfOtherRoutersAreBooked: what another router has a worker load delays loads
// there for this router, too.
func TestLoadsOfOtherRoutersAreBooked(t *testing.T) {
	ours, theirs := NewTestRouter(t, "work", 1), NewTestRouter(t, "work", 1)
	prompt := testkit.Tokens(1, 8*testkit.BlockSize+1)
	holdLower(theirs, 0, kv.Host, prompt, 0, 8)
	d := MustRoute(t, theirs, Request{Tokens: prompt})
	ours.BookRemote(d.Booking.Change(ChangeAdd))
	want := kv.TierTokens{Host: 8 * testkit.BlockSize}
	if got := ours.Load(testkit.W0).Prefills; len(got) != 1 || got[0].Loads != want {
		t.Errorf("%+v, want loads of %+v", got, want)
	}
}
