package router

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/radixtest"
)

// newSizedRouter returns a router over workers with blocks of these sizes, tokens.
func newSizedRouter(t testing.TB, rule string, sizes ...int) *Router {
	t.Helper()
	now := time.Now()
	r := New(testkit.Defaults[Settings](), Deps{Index: radix.NewTree(), Policy: policytest.MustPolicy(t, rule), BlockSize: testkit.BlockSize, Seed: 1,
		Now: func() time.Time { return now }})
	for w, size := range sizes {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(w)}, BlockSize: int32(size)})
	}
	return r
}

// holdIn puts the full blocks of a prompt, of size tokens, into worker w's cache.
func holdIn(r *Router, w uint64, size int, tokens []uint32) {
	local := kv.HashBlocks(nil, tokens, size, "", "")
	radixtest.Store(r.Index(), kv.WorkerKey{Worker: w}, 0, false, testkit.Chain(local))
}

func TestUnitDividesAllBlockSizes(t *testing.T) {
	for _, c := range []struct {
		sizes []int
		unit  int
		views int
	}{
		{[]int{64}, 64, 1},
		{[]int{64, 64, 64}, 64, 1},
		{[]int{16, 48, 64}, 16, 3},
		{[]int{64, 16, 16}, 16, 2},
		{[]int{48, 64}, 16, 3}, // policies know prompts in blocks of the unit
		{[]int{1, 640}, 1, 2},
		{[]int{0, 16}, testkit.BlockSize, 2}, // the router's own
		{[]int{kv.MaxBlock + 1}, testkit.BlockSize, 1},
	} {
		r := newSizedRouter(t, "kv", c.sizes...)
		if all := r.fleet.units.Load(); all.unit != c.unit || r.Unit() != c.unit || len(all.sizes) != c.views {
			t.Errorf("%v: unit %d, sizes %v; want %d and %d sizes", c.sizes, all.unit, all.sizes, c.unit, c.views)
		}
		for w := range c.sizes {
			r.Down(kv.WorkerKey{Worker: uint64(w)})
		}
		if last := r.Unit(); last == 0 {
			t.Errorf("%v: no unit without workers", c.sizes)
		}
	}
}

// TestEachWorkerIsMatchedInItsOwnBlocks, and the longest match in tokens wins.
func TestEachWorkerIsMatchedInItsOwnBlocks(t *testing.T) {
	sizes := []int{16, 48, 64}
	for _, c := range []struct {
		prompt int    // tokens
		held   [3]int // leading ones that each worker has computed
		want   [3]int // tokens that it can use of them
		best   uint64
	}{
		{400, [3]int{100, 150, 260}, [3]int{96, 144, 256}, 2},
		{400, [3]int{165, 150, 150}, [3]int{160, 144, 128}, 0},
		{400, [3]int{40, 150, 60}, [3]int{32, 144, 0}, 1},
		{400, [3]int{15, 47, 64}, [3]int{0, 0, 64}, 2},
		{400, [3]int{400, 400, 0}, [3]int{384, 384, 0}, 0},
		{193, [3]int{193, 193, 193}, [3]int{192, 192, 192}, 0},
		{192, [3]int{192, 192, 192}, [3]int{176, 144, 128}, 0}, // the last token is computed
		{20, [3]int{20, 20, 20}, [3]int{16, 0, 0}, 0},
	} {
		t.Run(fmt.Sprintf("%d of %v", c.prompt, c.held), func(t *testing.T) {
			r, prompt := newSizedRouter(t, "work", sizes...), testkit.Tokens(1, c.prompt)
			for w, size := range sizes {
				holdIn(r, uint64(w), size, prompt[:c.held[w]])
			}
			for w, want := range c.want {
				d := MustRoute(t, r, Request{Tokens: prompt, Pinned: &kv.WorkerKey{Worker: uint64(w)}, ChooseOnly: true})
				if d.OverlapTokens != want || d.Predicted.Device != want || d.EffectivePrefillTokens != c.prompt-want || want%sizes[w] != 0 {
					t.Errorf("worker %d: %d cached tokens, %+v, %d to compute; want %d", w, d.OverlapTokens, d.Predicted, d.EffectivePrefillTokens, want)
				}
			}
			d := MustRoute(t, r, Request{Tokens: prompt, Explain: true})
			if best := c.want[c.best]; d.OverlapTokens != best {
				t.Errorf("worker %d with %d tokens, want %d with %d", d.Target.Key.Worker, d.OverlapTokens, c.best, best)
			}
			receipt := d.Receipts[0]
			if receipt.BlockSize != 16 || receipt.Blocks != c.prompt/16 {
				t.Errorf("receipt of %d blocks of %d tokens", receipt.Blocks, receipt.BlockSize)
			}
			for w, line := range receipt.Candidates {
				if tokens := line.Overlap * receipt.BlockSize; tokens != c.want[w] {
					t.Errorf("receipt: worker %d with %d tokens, want %d", w, tokens, c.want[w])
				}
			}
			overlaps, unit, blocks := r.Overlaps(Request{Tokens: prompt})
			for w, o := range overlaps {
				if o.Blocks*unit < c.want[w] || o.Blocks*unit > c.held[w] || blocks != c.prompt/unit {
					t.Errorf("Overlaps: worker %d has %d of %d blocks of %d", w, o.Blocks, blocks, unit)
				}
			}
			if err := r.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestReceiptsSayHowCachesAreKnown: nothing of one that is known exactly.
func TestReceiptsSayHowCachesAreKnown(t *testing.T) {
	r := newSizedRouter(t, "kv")
	for w, known := range []kv.Knowledge{kv.Exact, kv.Approximate, kv.LoadOnly} {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: uint64(w)}, Known: known})
	}
	d := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 9), Explain: true})
	for w, want := range []string{"", `"known":"approximate"`, `"known":"load_only"`} {
		text, err := json.Marshal(d.Receipts[0].Candidates[w])
		if err != nil || !strings.Contains(string(text), want) || want == "" && strings.Contains(string(text), `"known"`) {
			t.Errorf("want %s in %s, %v", want, text, err)
		}
	}
}

// TestAssumedBlocksWeighWhatTheyWere: half of the assumed blocks of a worker have been there of late. Another
// one, of which a little less is known for certain, is the better choice then.
func TestAssumedBlocksWeighWhatTheyWere(t *testing.T) {
	for _, corrected := range []bool{true, false} {
		config := testkit.Defaults[IndexSettings]()
		config.CacheCorrection = corrected
		index, assumer := NewIndex(config, "kv", testkit.Defaults[policy.Settings](), testkit.BlockSize, time.Now)
		r := New(testkit.Defaults[Settings](), Deps{Index: index, Assumer: assumer, Policy: policytest.MustPolicy(t, "kv"), BlockSize: testkit.BlockSize, Seed: 1})
		r.Up(kv.Target{Key: testkit.W0, Known: kv.Approximate})
		pinned := testkit.W0
		blocks := func(n int) int { return n * testkit.BlockSize }
		for seed := range uint32(20) {
			prompt := testkit.Tokens(seed*1000, blocks(10)+1)
			for turn := range 2 {
				d := MustRoute(t, r, Request{Tokens: prompt, Pinned: &pinned})
				if turn == 1 {
					d.Booking.Cached(blocks(5), kv.TierTokens{})
				}
				d.Booking.FirstToken()
				d.Booking.Finish(1)
			}
		}
		prompt := testkit.Tokens(99_000, blocks(10)+1)
		MustRoute(t, r, Request{Tokens: prompt, Pinned: &pinned}).Booking.Finish(1)
		r.Up(kv.Target{Key: testkit.W1})
		holdIn(r, testkit.W1.Worker, testkit.BlockSize, prompt[:blocks(8)])
		d := MustRoute(t, r, Request{Tokens: prompt, QueryOnly: true, Explain: true})
		want, overlap := testkit.W1, 5
		if !corrected {
			want, overlap = testkit.W0, 10
		}
		if got := d.Receipts[0].Candidates[0].Overlap; d.Target.Key != want || got != overlap {
			t.Errorf("corrected %v: %v was chosen, %d blocks counted, want %v, %d", corrected, d.Target.Key, got, want, overlap)
		}
		if d = MustRoute(t, r, Request{Tokens: prompt, Pinned: &pinned, QueryOnly: true}); d.OverlapTokens != blocks(10) {
			t.Errorf("predicted %d tokens, want %d", d.OverlapTokens, blocks(10))
		}
	}
}

// TestSizesMayBeMixed compares a router over workers of several block sizes with one for each worker.
func TestSizesMayBeMixed(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		rule := rapid.SampledFrom([]string{"work", "kv", "standalone", "least-loaded"}).Draw(rt, "policy")
		sizes := rapid.SliceOfN(rapid.SampledFrom([]int{1, 2, 3, 4, 6, 16, 48, 64}), 1, 4).Draw(rt, "sizes")
		mixed := newSizedRouter(t, rule, sizes...)
		alone := make([]*Router, len(sizes))
		target := func(w int) kv.Target {
			return kv.Target{Key: kv.WorkerKey{Worker: uint64(w)}, BlockSize: int32(sizes[w])}
		}
		for w := range sizes {
			alone[w] = newSizedRouter(t, rule)
			alone[w].Up(target(w))
		}
		prompt := rapid.Custom(func(rt *rapid.T) []uint32 { // most begin alike
			tokens := testkit.Tokens(1, rapid.IntRange(1, 200).Draw(rt, "tokens"))
			for i := rapid.IntRange(0, 300).Draw(rt, "differs at"); i < len(tokens); i++ {
				tokens[i] += 5000
			}
			return tokens
		})
		worker := rapid.IntRange(0, len(sizes)-1)
		type booked struct{ mixed, alone *Booking }
		var open []booked
		down := make([]bool, len(sizes))
		rt.Repeat(map[string]func(*rapid.T){
			"hold": func(rt *rapid.T) {
				w, tokens := worker.Draw(rt, "worker"), prompt.Draw(rt, "prompt")
				holdIn(mixed, uint64(w), sizes[w], tokens)
				holdIn(alone[w], uint64(w), sizes[w], tokens)
			},
			"route": func(rt *rapid.T) {
				w := worker.Draw(rt, "worker")
				if down[w] {
					return
				}
				request := Request{Tokens: prompt.Draw(rt, "prompt"), Pinned: &kv.WorkerKey{Worker: uint64(w)}}
				got, want := MustRoute(t, mixed, request), MustRoute(t, alone[w], request)
				open = append(open, booked{got.Booking, want.Booking})
				if got.Predicted != want.Predicted || got.OverlapTokens != want.OverlapTokens || got.OverlapTokens%sizes[w] != 0 {
					rt.Errorf("worker %d, blocks of %d: %+v, alone %+v", w, sizes[w], got.Predicted, want.Predicted)
				}
				if got.EffectivePrefillTokens != want.EffectivePrefillTokens {
					rt.Errorf("worker %d, blocks of %d: %d tokens to compute, alone %d", w, sizes[w], got.EffectivePrefillTokens, want.EffectivePrefillTokens)
				}
			},
			"end": func(rt *rapid.T) {
				if len(open) == 0 {
					return
				}
				i := rapid.IntRange(0, len(open)-1).Draw(rt, "request")
				open[i].mixed.End()
				open[i].alone.End()
				open = append(open[:i], open[i+1:]...)
			},
			"down or up": func(rt *rapid.T) { // the unit changes
				w := worker.Draw(rt, "worker")
				if down[w] = !down[w]; down[w] {
					mixed.Down(target(w).Key)
					alone[w].Down(target(w).Key)
					return
				}
				mixed.Up(target(w))
				alone[w].Up(target(w))
			},
			"": func(rt *rapid.T) {
				if err := mixed.Check(); err != nil {
					rt.Fatal(err)
				}
				for w := range sizes {
					if down[w] {
						continue
					}
					key := target(w).Key
					got, want := mixed.Load(key), alone[w].Load(key)
					if got.PrefillTokens != want.PrefillTokens || got.InFlight != want.InFlight ||
						got.ActiveBlocks*mixed.Unit() != want.ActiveBlocks*alone[w].Unit() {
						rt.Fatalf("worker %d, blocks of %d: %d tokens, %d blocks of %d; alone %d tokens, %d blocks of %d", w, sizes[w],
							got.PrefillTokens, got.ActiveBlocks, mixed.Unit(), want.PrefillTokens, want.ActiveBlocks, alone[w].Unit())
					}
				}
			},
		})
	})
}
