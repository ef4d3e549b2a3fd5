package radix

import (
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// treesTest are Trees with a clock of their own, checked after each step.
type treesTest struct {
	*Trees
	t     testing.TB
	clock time.Time
}

func newTreesTest(t testing.TB, blocks int, every time.Duration) *treesTest {
	x := &treesTest{t: t, clock: time.Unix(1000, 0)}
	x.Trees = NewTrees(blocks, every, func() time.Time { return x.clock })
	return x
}

// answer routes a prompt to w, whose engine finds so many blocks cached.
func (x *treesTest) answer(w kv.WorkerKey, local []uint64, cached int) {
	x.t.Helper()
	x.clock = x.clock.Add(1)
	p := x.Routed(w, local)
	x.clock = x.clock.Add(1)
	p.End(0, cached)
	if err := x.Check(); err != nil {
		x.t.Fatal(err)
	}
}

// has expects so many blocks of the prompt in w's tree.
func (x *treesTest) has(w kv.WorkerKey, local []uint64, want int) {
	x.t.Helper()
	got := 0
	for _, m := range x.Match(local, len(local), kv.AllParts, nil) {
		if m.Worker == w {
			got = m.Blocks
		}
	}
	if got != want {
		x.t.Errorf("%v has %d blocks, want %d", w, got, want)
	}
}

func TestATreeHasAPromptBeforeItIsSent(t *testing.T) {
	x := newTreesTest(t, 100, time.Minute)
	p := testkit.Prompt(1, 5)
	twin := x.Routed(testkit.W0, p)
	x.has(testkit.W0, p, 5)
	x.has(testkit.W1, p, 0)
	x.Routed(testkit.W0, p).End(0, -1)
	twin.End(0, -1)
	x.has(testkit.W0, p, 5)
	x.clock = x.clock.Add(1000 * time.Hour) // there is no time to live
	x.has(testkit.W0, p, 5)
}

func TestTreesAreEvictedByIntervalOldestFirst(t *testing.T) {
	x := newTreesTest(t, 10, time.Minute)
	x.SetCapacity(testkit.W0, 3) // the size of the engine's memory is no matter
	for i := range uint64(5) {
		x.answer(testkit.W0, testkit.Prompt(i, 4), -1)
	}
	running := x.Routed(testkit.W1, testkit.Prompt(7, 15))
	if n := x.Blocks(testkit.W0); n != 20 {
		t.Fatalf("%d blocks before the eviction, want all 20", n)
	}
	x.clock = x.clock.Add(time.Minute)
	x.answer(testkit.W2, testkit.Prompt(9, 1), -1) // whoever comes next
	for i, want := range []int{0, 0, 2, 4, 4} {
		x.has(testkit.W0, testkit.Prompt(uint64(i), 4), want)
	}
	x.has(testkit.W1, testkit.Prompt(7, 15), 15) // in flight
	running.End(0, -1)
}

func TestTreesAreBoundedBetweenEvictions(t *testing.T) {
	x := newTreesTest(t, 100, time.Hour)
	for i := range uint64(1000) {
		p := x.Routed(testkit.W0, testkit.Prompt(i, 7))
		if n := x.Blocks(testkit.W0); n > 200 {
			t.Fatalf("%d blocks, want at most twice 100", n)
		}
		p.End(3, -1)
	}
	whole := x.Routed(testkit.W0, testkit.Prompt(5000, 300)) // larger than any tree
	x.has(testkit.W0, testkit.Prompt(5000, 300), 200)
	x.has(testkit.W0, testkit.Prompt(999, 7), 0)
	whole.End(0, -1)
	c := x.Caches[testkit.W0]
	if n := c.Pool.Size(); n > 200 || len(c.used) != n+1 || len(c.answers) != n+1 {
		t.Errorf("memory for %d blocks, %d times, %d answers", n, len(c.used), len(c.answers))
	}
	if err := x.Check(); err != nil {
		t.Error(err)
	}
	x.Apply(kv.WorkerKey{Worker: 0}, &Change{Kind: Forgotten})
	if len(x.Caches) != 0 || len(x.capacity) != 0 {
		t.Error("a worker that is gone has left something")
	}
}

func TestATreeLearnsHowMuchItsWorkerHolds(t *testing.T) {
	x := newTreesTest(t, 1000, time.Hour)
	for i := range uint64(20) {
		x.answer(testkit.W0, testkit.Prompt(i, 10), 0)
	}
	x.answer(testkit.W0, testkit.Prompt(9, 10), 0) // lost: so were 0 to 8; 10 to 19 and this one may be there
	for i := range uint64(9) {
		x.has(testkit.W0, testkit.Prompt(i, 10), 0)
	}
	x.has(testkit.W0, testkit.Prompt(10, 10), 10)
	x.answer(testkit.W0, testkit.Prompt(30, 10), 0) // as much as this takes must be gone now
	x.has(testkit.W0, testkit.Prompt(10, 10), 0)
	x.has(testkit.W0, testkit.Prompt(11, 10), 10)
	x.answer(testkit.W0, testkit.Prompt(10, 10), 10) // it was there after all
	x.has(testkit.W0, testkit.Prompt(11, 10), 0)     // which showed only then
	x.answer(testkit.W0, testkit.Prompt(31, 9), 0)   // so there is room for more
	x.has(testkit.W0, testkit.Prompt(12, 10), 10)
}

func TestABlockOfTheAnswerBeforeIsNoSurprise(t *testing.T) {
	x := newTreesTest(t, 1000, time.Hour)
	for i := range uint64(5) {
		x.answer(testkit.W0, testkit.Prompt(i, 10), 0)
	}
	x.answer(testkit.W0, testkit.Prompt(2, 10), 0)
	learned := x.Caches[testkit.W0].learned
	p := testkit.Prompt(7, 20)
	x.Routed(testkit.W0, p[:10]).End(8, 0)
	x.answer(testkit.W0, p, 18) // the prompt before and its answer
	if got := x.Caches[testkit.W0].learned; got != learned || learned == 0 {
		t.Errorf("it is taken to hold %d blocks, %d before", got, learned)
	}
}

func TestAPromptThatItsWorkerFailedIsNotCached(t *testing.T) {
	x := newTreesTest(t, 100, time.Hour)
	p := testkit.Prompt(1, 8)
	x.answer(testkit.W0, p[:3], -1)
	x.Routed(testkit.W0, p).Fail()
	x.has(testkit.W0, p, 3) // what another one has computed stays
	first, second := x.Routed(testkit.W0, p), x.Routed(testkit.W0, p)
	first.Fail()
	x.has(testkit.W0, p, 8)
	second.Fail()
	x.has(testkit.W0, p, 3)
	first, second = x.Routed(testkit.W0, p), x.Routed(testkit.W0, p)
	second.End(0, -1)
	first.Fail()
	x.has(testkit.W0, p, 8) // the twin's answer came
	if err := x.Check(); err != nil {
		t.Error(err)
	}
	var none *Assumed
	none.Fail()
}

// plainTree is the plainest model of a worker's tree.
type plainTree struct {
	plainCache
	learned  int
	finished map[uint64]bool
	answers  map[uint64]int // by the last block of a prompt
}

func (c *plainTree) held() int { return len(c.users) + len(c.idle) }

// enter takes a block and reports whether there was room.
func (c *plainTree) enter(key uint64) bool {
	if !c.has(key) {
		delete(c.finished, key)
		delete(c.answers, key)
		for c.learned > 0 && c.held() >= c.learned && len(c.idle) > 0 {
			c.idle = c.idle[1:]
		}
	}
	return c.use(key)
}

// TestPrefixTreesEqualModel compares with the model after random steps.
func TestPrefixTreesEqualModel(t *testing.T) {
	var prompts [][]uint64 // all of up to six blocks of two contents each
	for n := range 7 {
		for bits := range 1 << n {
			p := make([]uint64, n)
			for i := range p {
				p[i] = uint64(1 + bits>>i&1)
			}
			prompts = append(prompts, p)
		}
	}
	const size, every = 7, 20 * time.Second
	rapid.Check(t, func(t *rapid.T) {
		clock := time.Unix(1000, 0)
		corrects := rapid.Bool().Draw(t, "corrects")
		x := NewTrees(size, every, func() time.Time { return clock })
		x.corrected = corrects
		due := clock.Add(every)
		workers := []kv.WorkerKey{testkit.W0, {Worker: 0, Rank: 1}, testkit.W1}
		model := map[kv.WorkerKey]*plainTree{}
		type running struct {
			assumed  *Assumed
			worker   kv.WorkerKey
			tree     *plainTree
			keys     []uint64
			lasts    []time.Time // of those found; zero: in flight then
			answered int
		}
		var open []*running
		finish := func(t *rapid.T) (r *running, live bool) {
			if len(open) == 0 {
				return nil, false
			}
			i := rapid.IntRange(0, len(open)-1).Draw(t, "which")
			r = open[i]
			open = slices.Delete(open, i, i+1)
			clock = clock.Add(1)
			return r, model[r.worker] == r.tree
		}
		answers := uint64(0)
		t.Repeat(map[string]func(*rapid.T){
			"route": func(t *rapid.T) {
				w := rapid.SampledFrom(workers).Draw(t, "worker")
				local := rapid.SampledFrom(prompts).Draw(t, "prompt")
				clock = clock.Add(1)
				if !clock.Before(due) {
					due = clock.Add(every)
					for _, c := range model {
						for c.held() > size && len(c.idle) > 0 {
							c.idle = c.idle[1:]
						}
					}
				}
				c := model[w]
				if c == nil {
					c = &plainTree{plainCache{2 * size, map[uint64]int{}, nil}, 0, map[uint64]bool{}, map[uint64]int{}}
					model[w] = c
				}
				r := &running{worker: w, tree: c}
				known := true
				for _, key := range kv.SequenceHashes(nil, local) {
					last := time.Time{}
					if i := c.find(key); i >= 0 {
						last = c.idle[i].used
					}
					known = known && c.has(key)
					answered := c.answers[key]
					if !c.enter(key) {
						break
					}
					if known {
						r.lasts, r.answered = append(r.lasts, last), answered
					}
					r.keys = append(r.keys, key)
				}
				r.assumed = x.Routed(w, local)
				open = append(open, r)
			},
			"end": func(t *rapid.T) {
				cached := rapid.IntRange(-1, 7).Draw(t, "cached")
				answer := rapid.IntRange(0, 3).Draw(t, "answer")
				r, live := finish(t)
				if r == nil {
					return
				}
				r.assumed.End(answer, cached)
				if !live {
					return
				}
				c := r.tree
				lost := cached >= 0 && cached < len(r.lasts)-1 && !r.lasts[cached].IsZero()
				if more := cached - len(r.lasts) - r.answered - 1; corrects && lost {
					c.lose(r.lasts[cached])
					c.learned = c.held()
				} else if corrects && more > 0 && c.learned > 0 {
					c.learned += more
				}
				if n := len(r.keys); n > 0 {
					c.answers[r.keys[n-1]] = max(c.answers[r.keys[n-1]], answer)
				}
				for range answer {
					answers++
					if !c.enter(answers << 32) {
						break
					}
					r.keys = append(r.keys, answers<<32)
				}
				for _, key := range r.keys {
					c.finished[key] = true
				}
				c.leave(r.keys, clock)
			},
			"fail": func(t *rapid.T) {
				r, live := finish(t)
				if r == nil {
					return
				}
				r.assumed.Fail()
				if !live {
					return
				}
				r.tree.leave(r.keys, clock)
				r.tree.idle = slices.DeleteFunc(r.tree.idle, func(b plainBlock) bool { return !r.tree.finished[b.key] })
			},
			"wait": func(t *rapid.T) {
				clock = clock.Add(time.Duration(rapid.IntRange(1, 15).Draw(t, "seconds")) * time.Second)
			},
			"clear": func(t *rapid.T) {
				w := rapid.SampledFrom(workers).Draw(t, "worker")
				x.Apply(w, &Change{Kind: Cleared})
				delete(model, w)
			},
			"forget": func(*rapid.T) {
				x.Apply(kv.WorkerKey{Worker: 0}, &Change{Kind: Forgotten})
				delete(model, workers[0])
				delete(model, workers[1])
			},
			"": func(t *rapid.T) {
				checkMatches(t, x, prompts, workers, func(w kv.WorkerKey, key uint64) bool { return model[w] != nil && model[w].has(key) })
				for w, c := range model {
					if held := x.Caches[w].Pool.Held(); held != c.held() || held > 2*size {
						t.Fatalf("%v holds %d blocks, want %d", w, held, c.held())
					}
				}
				if err := x.Check(); err != nil {
					t.Fatal(err)
				}
			},
		})
	})
}

// TestTreesBesideLookups runs lookups beside changes, for the race detector.
func TestTreesBesideLookups(t *testing.T) {
	x := NewTrees(50, time.Nanosecond, time.Now)
	var group sync.WaitGroup
	for g := range uint64(4) {
		group.Go(func() {
			for i := range uint64(200) {
				p := x.Routed(kv.WorkerKey{Worker: i % 3}, testkit.Prompt(i%20, 9))
				x.Match(testkit.Prompt((i+g)%20, 12), 12, kv.AllParts, nil)
				if i%7 == g {
					p.Fail()
				} else {
					p.End(2, int(i%10)-1)
				}
			}
		})
	}
	group.Wait()
	if err := x.Check(); err != nil {
		t.Error(err)
	}
}
