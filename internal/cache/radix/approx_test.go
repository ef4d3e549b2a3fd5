package radix

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// approxTest is an Approx with a clock of its own, checked after each step.
type approxTest struct {
	*Approx
	t     testing.TB
	clock time.Time
}

func newApproxTest(t testing.TB, ttl time.Duration, maxBlocks int, target float64) *approxTest {
	x := &approxTest{t: t, clock: time.Unix(1000, 0)}
	x.Approx = NewApprox(ttl, maxBlocks, target, func() time.Time { return x.clock })
	return x
}

// route routes a prompt to w and ends it at once.
func (x *approxTest) route(w kv.WorkerKey, local []uint64) {
	x.t.Helper()
	x.Routed(w, local).End(0, -1)
	x.checked()
}

func (x *approxTest) checked() {
	x.t.Helper()
	if err := x.Check(); err != nil {
		x.t.Fatal(err)
	}
}

func (x *approxTest) wants(local []uint64, want ...kv.Match) {
	x.t.Helper()
	matches(x.t, x.Approx, local, want...)
}

func TestApproxDecisionCreatesMatch(t *testing.T) {
	x := newApproxTest(t, time.Minute, 100, 0.8)
	p := testkit.Prompt(1, 10)
	x.wants(p)
	running := x.Routed(testkit.W1, p[:8])
	x.checked()
	x.wants(p, kv.Match{Worker: testkit.W1, Blocks: 8})
	x.route(testkit.W2, p[:3])
	x.wants(p, kv.Match{Worker: testkit.W1, Blocks: 8}, kv.Match{Worker: testkit.W2, Blocks: 3})
	x.wants(testkit.Diverging(p, 2, 9), kv.Match{Worker: testkit.W1, Blocks: 2}, kv.Match{Worker: testkit.W2, Blocks: 2})
	running.End(0, -1)
	x.wants(p, kv.Match{Worker: testkit.W1, Blocks: 8}, kv.Match{Worker: testkit.W2, Blocks: 3})
	x.route(testkit.W1, nil)
	x.wants(nil)
}

func TestApproxTTLExpiry(t *testing.T) {
	x := newApproxTest(t, time.Minute, 100, 0.8)
	p, q := testkit.Prompt(1, 4), testkit.Prompt(2, 4)
	x.route(testkit.W0, p)
	running := x.Routed(testkit.W0, q)
	x.clock = x.clock.Add(time.Minute - 1)
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 4})
	x.clock = x.clock.Add(1)
	x.wants(p)
	x.clock = x.clock.Add(time.Hour)
	x.wants(q, kv.Match{Worker: testkit.W0, Blocks: 4}) // in flight
	running.End(0, -1)
	x.checked()
	x.clock = x.clock.Add(time.Minute)
	x.wants(q)
	x.checked()
	if n := x.Blocks(testkit.W0); n != 0 {
		t.Errorf("%d blocks are left", n)
	}
}

func TestApproxTTLRenewedOnReinsert(t *testing.T) {
	x := newApproxTest(t, time.Minute, 100, 0.8)
	p := testkit.Prompt(1, 4)
	x.route(testkit.W0, p)
	x.clock = x.clock.Add(40 * time.Second)
	x.route(testkit.W0, p[:2])
	x.clock = x.clock.Add(40 * time.Second)
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 2})
	x.clock = x.clock.Add(20 * time.Second)
	x.wants(p)
}

func TestApproxWorkerRemovalCleansTimers(t *testing.T) {
	x := newApproxTest(t, time.Minute, 100, 0.8)
	rank1 := kv.WorkerKey{Worker: 0, Rank: 1}
	p := testkit.Prompt(1, 4)
	x.SetCapacity(rank1, 50)
	running := x.Routed(testkit.W0, p)
	for _, w := range []kv.WorkerKey{rank1, testkit.W1, testkit.W2} {
		x.route(w, p)
	}
	x.Apply(kv.WorkerKey{Worker: 0}, &Change{Kind: Forgotten})
	x.Apply(testkit.W1, &Change{Kind: Cleared})
	x.checked()
	x.wants(p, kv.Match{Worker: testkit.W2, Blocks: 4})
	if len(x.Caches) != 1 || len(x.capacity) != 0 || !slices.Equal(x.Workers(), []kv.WorkerKey{testkit.W1, testkit.W2}) {
		t.Errorf("%d memories, %d sizes and workers %v are left", len(x.Caches), len(x.capacity), x.Workers())
	}
	running.End(3, 0) // of a worker that is gone
	x.checked()
	x.clock = x.clock.Add(time.Minute)
	x.wants(p)
}

func TestApproxPrunesBySize(t *testing.T) {
	x := newApproxTest(t, time.Hour, 20, 0.5)
	x.SetCapacity(testkit.W2, 100)
	x.route(testkit.W2, testkit.Prompt(9, 90)) // does not count: its size is known
	var prompts [][]uint64
	for i := range uint64(5) {
		x.clock = x.clock.Add(time.Second)
		prompts = append(prompts, testkit.Prompt(i, 4))
		x.route([]kv.WorkerKey{testkit.W0, testkit.W1}[i%2], prompts[i])
	}
	x.wants(prompts[0], kv.Match{Worker: testkit.W0, Blocks: 4})
	x.clock = x.clock.Add(time.Second)
	running := x.Routed(testkit.W0, testkit.Prompt(5, 1)) // the 21st: down to 10
	x.checked()
	for i, want := range []int{0, 0, 1, 4, 4} {
		if want == 0 {
			x.wants(prompts[i])
		} else {
			x.wants(prompts[i], kv.Match{Worker: []kv.WorkerKey{testkit.W0, testkit.W1}[i%2], Blocks: want})
		}
	}
	x.wants(testkit.Prompt(9, 90), kv.Match{Worker: testkit.W2, Blocks: 90})
	more := x.Routed(testkit.W1, testkit.Prompt(6, 50)) // all that is in flight stays
	x.checked()
	x.wants(testkit.Prompt(6, 50), kv.Match{Worker: testkit.W1, Blocks: 50})
	more.End(0, -1)
	running.End(0, -1)
	x.checked()
	if n := x.Blocks(testkit.W0) + x.Blocks(testkit.W1); n != 10 {
		t.Errorf("%d blocks are left, want 10", n)
	}
}

func TestApproxKnownSizeForgetsAsTheEngineDoes(t *testing.T) {
	x := newApproxTest(t, time.Second, 1, 0)
	x.SetCapacity(testkit.W0, 10)
	p, q, r := testkit.Prompt(1, 4), testkit.Prompt(2, 4), testkit.Prompt(3, 6)
	x.route(testkit.W0, p)
	x.route(testkit.W0, q)
	x.clock = x.clock.Add(time.Hour) // no time to live, no size but its own
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 4})
	running := x.Routed(testkit.W0, p) // newest now
	x.checked()
	x.route(testkit.W0, r) // takes the last two blocks and all four of q
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 4})
	x.wants(q)
	x.wants(r, kv.Match{Worker: testkit.W0, Blocks: 6})
	running.End(3, -1) // an answer takes memory, the end of a prompt first
	x.checked()
	x.wants(r, kv.Match{Worker: testkit.W0, Blocks: 3})
	whole := x.Routed(testkit.W0, testkit.Prompt(4, 12)) // larger than all memory
	x.checked()
	x.wants(testkit.Prompt(4, 12), kv.Match{Worker: testkit.W0, Blocks: 10})
	whole.End(0, -1)
	x.SetCapacity(testkit.W0, 20)
	x.wants(testkit.Prompt(4, 12))
	x.checked()
}

func TestApproxTTLForAllIsTheEarlierLimit(t *testing.T) {
	x := newApproxTest(t, time.Minute, 1, 0)
	x.SetTTLForAll(true)
	x.SetCapacity(testkit.W0, 10)
	p, q := testkit.Prompt(1, 4), testkit.Prompt(2, 8)
	x.route(testkit.W0, p)
	x.route(testkit.W1, testkit.Prompt(3, 1))
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 4})                    // no number of blocks but its own bounds it,
	x.wants(testkit.Prompt(3, 1), kv.Match{Worker: testkit.W1, Blocks: 1}) // nor does it count with those of others
	x.clock = x.clock.Add(30 * time.Second)
	x.route(testkit.W0, q) // takes two blocks of p
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 2})
	x.clock = x.clock.Add(30 * time.Second)
	x.wants(p)
	x.wants(q, kv.Match{Worker: testkit.W0, Blocks: 8})
	running := x.Routed(testkit.W0, q[:3])
	x.clock = x.clock.Add(30 * time.Second)
	x.wants(q, kv.Match{Worker: testkit.W0, Blocks: 3}) // in flight
	running.End(0, -1)
	x.clock = x.clock.Add(time.Minute)
	x.wants(q)
	x.checked()
	if n := x.Blocks(testkit.W0); n != 0 {
		t.Errorf("%d blocks are left", n)
	}
}

func TestApproxLearnsFromCachedTokens(t *testing.T) {
	for _, test := range []struct {
		name   string
		cached int
		old    int // blocks of the older prompt that are left
		newer  int // of the one used after what was lost
	}{
		{"all found", 6, 4, 4},
		{"not told", -1, 4, 4},
		{"one less is no proof", 5, 4, 4},
		{"two less: what is as old is gone", 4, 0, 4},
		{"nothing found: all used before the prompt's first block is gone", 0, 0, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			x := newApproxTest(t, time.Hour, 1000, 0.8)
			p, old, newer := testkit.Prompt(1, 6), testkit.Prompt(2, 4), testkit.Prompt(3, 4)
			for _, routed := range [][]uint64{old, p, newer, p[:4]} {
				x.clock = x.clock.Add(time.Second)
				x.route(testkit.W0, routed)
			}
			x.clock = x.clock.Add(time.Second)
			running := x.Routed(testkit.W0, p)
			x.clock = x.clock.Add(time.Second)
			x.route(testkit.W0, testkit.Prompt(4, 5)) // later than the routing: no matter what
			running.End(0, test.cached)
			x.checked()
			for _, c := range []struct {
				local []uint64
				want  int
			}{{old, test.old}, {newer, test.newer}, {p, 6}, {testkit.Prompt(4, 5), 5}} {
				if c.want == 0 {
					x.wants(c.local)
				} else {
					x.wants(c.local, kv.Match{Worker: testkit.W0, Blocks: c.want})
				}
			}
		})
	}
}

// A sibling that finds nothing of what is still being computed proves nothing.
func TestApproxSiblingsInFlightProveNothing(t *testing.T) {
	x := newApproxTest(t, time.Hour, 1000, 0.8)
	p, other := testkit.Prompt(1, 6), testkit.Prompt(2, 4)
	x.route(testkit.W0, other)
	first, second := x.Routed(testkit.W0, p), x.Routed(testkit.W0, p)
	first.End(0, 0)
	second.End(0, 0)
	x.checked()
	x.wants(other, kv.Match{Worker: testkit.W0, Blocks: 4})
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 6})
}

func TestAnswersSayWhatShareOfTheAssumedBlocksCame(t *testing.T) {
	x := newApproxTest(t, time.Hour, 1000, 0.8)
	p := testkit.Prompt(1, 8)
	if share, known := (*Assumed)(nil).Came(3); known {
		t.Errorf("of nothing: %v", share)
	}
	running := x.Routed(testkit.W0, p)
	if share, known := running.Came(0); known {
		t.Errorf("nothing was assumed: %v", share)
	}
	sibling := x.Routed(testkit.W0, p)
	if share, known := sibling.Came(3); known || sibling.Expected() != 8 {
		t.Errorf("in flight: %v, expected %d", share, sibling.Expected())
	}
	running.End(0, -1)
	sibling.End(0, -1)
	again := x.Routed(testkit.W0, p)
	defer again.End(0, -1)
	for _, c := range []struct {
		cached int
		share  float64
		known  bool
	}{{-1, 0, false}, {0, 0, true}, {2, 0.25, true}, {7, 1, true}, {8, 1, true}, {100, 1, true}} {
		if share, known := again.Came(c.cached); share != c.share || known != c.known {
			t.Errorf("%d cached: %v, %v; want %v, %v", c.cached, share, known, c.share, c.known)
		}
	}
	x.SetCorrected(false)
	if share, known := again.Came(0); known || again.Expected() != 0 {
		t.Errorf("answers do not count: %v", share)
	}
}

// plainCache is the plainest model of assumedCache: blocks in flight, by their
// users, and a list of the others, oldest first.
type plainCache struct {
	capacity int
	users    map[uint64]int
	idle     []plainBlock
}

type plainBlock struct {
	key  uint64 // of a block of an answer one that no prompt has
	used time.Time
}

func (c *plainCache) find(key uint64) int {
	return slices.IndexFunc(c.idle, func(b plainBlock) bool { return b.key == key })
}

func (c *plainCache) has(key uint64) bool { return c.users[key] > 0 || c.find(key) >= 0 }

// checkMatches holds the matches of prompts in an index against what a model of
// each worker, in their order, has by sequence hash.
func checkMatches(t *rapid.T, x Index, prompts [][]uint64, workers []kv.WorkerKey, has func(w kv.WorkerKey, key uint64) bool) {
	for _, local := range prompts {
		var want []kv.Match
		keys := kv.SequenceHashes(nil, local)
		for _, w := range workers {
			n := 0
			for n < len(keys) && has(w, keys[n]) {
				n++
			}
			if n > 0 {
				want = append(want, kv.Match{Worker: w, Blocks: n})
			}
		}
		if got := x.Match(local, len(local), kv.AllParts, nil); !slices.Equal(got, want) {
			t.Fatalf("match of %v: %v, want %v", local, got, want)
		}
	}
}

// use takes the block, newly if it must, and reports whether there was room.
func (c *plainCache) use(key uint64) bool {
	if i := c.find(key); i >= 0 {
		c.idle = slices.Delete(c.idle, i, i+1)
	} else if c.users[key] == 0 && c.capacity > 0 && len(c.users)+len(c.idle) == c.capacity {
		if len(c.idle) == 0 {
			return false
		}
		c.idle = c.idle[1:]
	}
	c.users[key]++
	return true
}

// leave ends the use of what one request has, its last block first.
func (c *plainCache) leave(keys []uint64, now time.Time) {
	for _, key := range slices.Backward(keys) {
		if c.users[key]--; c.users[key] == 0 {
			delete(c.users, key)
			c.idle = append(c.idle, plainBlock{key, now})
		}
	}
}

// lose drops what was used no later than at.
func (c *plainCache) lose(at time.Time) {
	c.idle = slices.DeleteFunc(c.idle, func(b plainBlock) bool { return !b.used.After(at) })
}

// TestApproxEqualsModel compares with the model after random steps.
func TestApproxEqualsModel(t *testing.T) {
	// All prompts of up to five blocks of two contents each.
	var prompts [][]uint64
	for n := range 6 {
		for bits := range 1 << n {
			p := make([]uint64, n)
			for i := range p {
				p[i] = uint64(1 + bits>>i&1)
			}
			prompts = append(prompts, p)
		}
	}
	const ttl, maxBlocks, target = 20 * time.Second, 12, 0.75
	rapid.Check(t, func(t *rapid.T) {
		clock := time.Unix(1000, 0)
		x := NewApprox(ttl, maxBlocks, target, func() time.Time { return clock })
		ttlForAll := rapid.Bool().Draw(t, "ttl for all")
		x.SetTTLForAll(ttlForAll)
		workers := []kv.WorkerKey{testkit.W0, {Worker: 0, Rank: 1}, testkit.W1}
		model := map[kv.WorkerKey]*plainCache{}
		capacity := map[kv.WorkerKey]int{}
		type running struct {
			assumed *Assumed
			worker  kv.WorkerKey
			cache   *plainCache
			keys    []uint64
			lasts   []time.Time // of those found; zero: in flight then
		}
		var open []*running
		answers := uint64(0)
		tidy := func() {
			total := 0
			type aged struct {
				plainBlock
				cache *plainCache
			}
			var idle []aged
			for _, w := range workers {
				if c := model[w]; c != nil && ttlForAll {
					c.lose(clock.Add(-ttl))
				}
				if c := model[w]; c != nil && c.capacity == 0 {
					c.lose(clock.Add(-ttl))
					total += len(c.users) + len(c.idle)
					for _, b := range c.idle {
						idle = append(idle, aged{b, c})
					}
				}
			}
			if total <= maxBlocks {
				return
			}
			slices.SortStableFunc(idle, func(a, b aged) int { return a.used.Compare(b.used) })
			for ; total > maxBlocks*target && len(idle) > 0; total-- {
				idle[0].cache.idle = idle[0].cache.idle[1:]
				idle = idle[1:]
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"route": func(t *rapid.T) {
				w := rapid.SampledFrom(workers).Draw(t, "worker")
				local := rapid.SampledFrom(prompts).Draw(t, "prompt")
				clock = clock.Add(1)
				tidy()
				c := model[w]
				if c == nil {
					c = &plainCache{capacity: capacity[w], users: map[uint64]int{}}
					model[w] = c
				}
				r := &running{worker: w, cache: c}
				known := true
				for _, key := range kv.SequenceHashes(nil, local) {
					last := time.Time{}
					if i := c.find(key); i >= 0 {
						last = c.idle[i].used
					}
					known = known && c.has(key)
					if !c.use(key) {
						break
					}
					if known {
						r.lasts = append(r.lasts, last)
					}
					r.keys = append(r.keys, key)
				}
				tidy()
				r.assumed = x.Routed(w, local)
				open = append(open, r)
			},
			"end": func(t *rapid.T) {
				if len(open) == 0 {
					return
				}
				i := rapid.IntRange(0, len(open)-1).Draw(t, "which")
				cached := rapid.IntRange(-1, 5).Draw(t, "cached")
				answer := rapid.IntRange(0, 3).Draw(t, "answer")
				r := open[i]
				open = slices.Delete(open, i, i+1)
				clock = clock.Add(1)
				r.assumed.End(answer, cached)
				if model[r.worker] != r.cache {
					return
				}
				if cached >= 0 && cached < len(r.lasts)-1 && !r.lasts[cached].IsZero() {
					r.cache.lose(r.lasts[cached])
				}
				for range answer {
					answers++
					if !r.cache.use(answers << 32) {
						break
					}
					r.keys = append(r.keys, answers<<32)
				}
				r.cache.leave(r.keys, clock)
				tidy()
			},
			"wait": func(t *rapid.T) {
				clock = clock.Add(time.Duration(rapid.IntRange(1, 15).Draw(t, "seconds")) * time.Second)
			},
			"size": func(t *rapid.T) {
				w := rapid.SampledFrom(workers).Draw(t, "worker")
				size := rapid.SampledFrom([]int{0, 1, 5, 9}).Draw(t, "blocks")
				x.SetCapacity(w, size)
				if capacity[w] != size {
					capacity[w] = size
					delete(model, w)
				}
			},
			"clear": func(t *rapid.T) {
				w := rapid.SampledFrom(workers).Draw(t, "worker")
				x.Apply(w, &Change{Kind: Cleared})
				delete(model, w)
			},
			"forget": func(t *rapid.T) {
				x.Apply(kv.WorkerKey{Worker: 0}, &Change{Kind: Forgotten})
				for w := range maps.Clone(capacity) {
					if w.Worker == 0 {
						delete(capacity, w)
					}
				}
				for w := range maps.Clone(model) {
					if w.Worker == 0 {
						delete(model, w)
					}
				}
			},
			"": func(t *rapid.T) {
				for _, c := range model {
					if c.capacity == 0 || ttlForAll {
						c.lose(clock.Add(-ttl))
					}
				}
				checkMatches(t, x, prompts, workers, func(w kv.WorkerKey, key uint64) bool { return model[w] != nil && model[w].has(key) })
				if err := x.Check(); err != nil {
					t.Fatal(err)
				}
			},
		})
	})
}

// TestApproxModelsNoAnswerThatCannotBe: it is the worker that says how long its
// answers are.
func TestApproxModelsNoAnswerThatCannotBe(t *testing.T) {
	for _, capacity := range []int{0, 100, 1 << 62} {
		x := newApproxTest(t, time.Minute, 1000, 0.8)
		x.SetCapacity(testkit.W0, capacity)
		x.Routed(testkit.W0, testkit.Prompt(1, 4)).End(1<<62, 1<<62)
		x.Routed(testkit.W0, testkit.Prompt(1, 4)).End(-1<<62, -1)
		if size := x.Caches[testkit.W0].Pool.Size(); size > 4*maxAnswer {
			t.Errorf("capacity %d: %d blocks are modelled", capacity, size)
		}
		x.checked()
	}
}

// TestApproxNoLieIsWorthMoreThanSilence: whatever a worker says of its cached tokens, no more counts as
// cached there than if it said nothing.
func TestApproxNoLieIsWorthMoreThanSilence(t *testing.T) {
	for name, lie := range map[string]func(r *rand.Rand, found int) int{
		"all":         func(_ *rand.Rand, found int) int { return found },
		"twice":       func(_ *rand.Rand, found int) int { return 2*found + 9 },
		"the most":    func(*rand.Rand, int) int { return math.MaxInt },
		"nothing":     func(*rand.Rand, int) int { return 0 },
		"half":        func(_ *rand.Rand, found int) int { return found / 2 },
		"negative":    func(*rand.Rand, int) int { return math.MinInt },
		"now and now": func(r *rand.Rand, _ int) int { return []int{0, math.MaxInt, math.MinInt, 3}[r.IntN(4)] },
	} {
		for _, capacity := range []int{0, 60} {
			for _, learns := range []bool{false, true} {
				for seed := range uint64(5) {
					r := rand.New(rand.NewPCG(seed, 1))
					liar, silent := newApproxTest(t, time.Hour, 1<<20, 0.8), newApproxTest(t, time.Hour, 1<<20, 0.8)
					prompt := func() []uint64 { return testkit.Diverging(testkit.Prompt(r.Uint64N(8), 12), r.IntN(11), r.Uint64N(4)) }
					for _, x := range []*approxTest{liar, silent} {
						x.learns = learns
						x.SetCapacity(testkit.W0, capacity)
					}
					for range 100 {
						local := prompt()
						for _, x := range []*approxTest{liar, silent} {
							x.clock = x.clock.Add(time.Second)
							said, p := -1, x.Routed(testkit.W0, local)
							if x == liar {
								said = lie(r, p.found)
							}
							p.End(2, said)
							x.checked()
						}
						probe := prompt()
						got, most := liar.Match(probe, 12, 0, nil), silent.Match(probe, 12, 0, nil)
						if len(got) > 0 && (len(most) == 0 || got[0].Blocks > most[0].Blocks) {
							t.Fatalf("%s, capacity %d, learns %t, seed %d: %v, of the silent worker %v", name, capacity, learns, seed, got, most)
						}
					}
				}
			}
		}
	}
}
