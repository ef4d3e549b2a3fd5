package engine

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit/radixtest"
)

// simRequest makes a request whose blocks of that size have the given local
// hashes; rest tokens follow them.
func simRequest(size int, local []uint64, rest, output int) *Request {
	r := &Request{Prompt: len(local)*size + rest, Output: output}
	for i, h := range kv.SequenceHashes(nil, local) {
		r.Blocks = append(r.Blocks, kv.StoredBlock{Engine: h, Local: local[i]})
	}
	return r
}

// runPass does one pass and returns how long it took.
func runPass(t testing.TB, e *Engine) time.Duration {
	t.Helper()
	d, busy := e.Begin()
	if !busy {
		t.Fatal("the engine has nothing to do")
	}
	e.End()
	return d
}

func smallEngine(blocks int, events func(Event)) *Engine {
	cfg := Settings{Blocks: 16384, BlockSize: 64, MaxSeqs: 256, MaxBatchedTokens: 8192, Timing: DefaultTiming()}
	cfg.Blocks, cfg.BlockSize, cfg.MaxSeqs, cfg.MaxBatchedTokens = blocks, 4, 4, 16
	return New(cfg, events)
}

func TestPassTimeIsTheMockersPolynomial(t *testing.T) {
	timing := DefaultTiming()
	tests := []struct {
		name     string
		prefill  int
		usage    float64
		decoding bool
		want     float64 // ms
	}{
		{"nothing", 0, 0, false, 0},
		{"prefill only", 1000, 0, false, 16.50142 + 15.18344 + 0.4209989},
		{"decode of an empty cache", 0, 0, true, 5.74},
		{"both", 1000, 0.5, true, 16.50142 + 15.18344 + 0.4209989 + 5.74 + 27.005 - 6.435},
		{"usage counts at most as full", 0, 3, true, 5.74 + 54.01 - 25.74},
	}
	for _, test := range tests {
		got := timing.Pass(test.prefill, test.usage, test.decoding)
		if ms := float64(got) / 1e6; ms < test.want-1e-5 || ms > test.want+1e-5 {
			t.Errorf("%s: %v ms, want %v", test.name, ms, test.want)
		}
	}
	timing.Speedup = 10
	if got := timing.Pass(0, 0, true); got != 574*time.Microsecond {
		t.Errorf("ten times as fast: %v, want 574µs", got)
	}
}

func TestALongPromptIsComputedInChunks(t *testing.T) {
	e := smallEngine(64, nil)
	r := simRequest(4, []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9}, 2, 3) // 38 tokens, 16 a pass
	if err := e.Submit(r); err != nil {
		t.Fatal(err)
	}
	for pass, want := range []int{0, 0, 1, 2, 3} {
		runPass(t, e)
		if r.Generated != want {
			t.Fatalf("after pass %d: %d tokens, want %d", pass, r.Generated, want)
		}
	}
	if _, busy := e.Begin(); busy {
		t.Error("the engine is busy after its only request")
	}
}

func TestARepeatedPromptIsComputedOnceExceptItsLastToken(t *testing.T) {
	e := smallEngine(64, nil)
	local := []uint64{1, 2, 3}
	for _, want := range []int{0, 8} { // 12 tokens: the last block is computed again
		r := simRequest(4, local, 0, 1)
		if err := e.Submit(r); err != nil {
			t.Fatal(err)
		}
		runPass(t, e)
		if r.Cached != want {
			t.Errorf("cached %d tokens, want %d", r.Cached, want)
		}
	}
}

func TestOnlyComputedBlocksAreFoundInSGLangsCache(t *testing.T) {
	for caching, want := range map[Caching][3]int{CacheFilled: {0, 8, 12}, CacheComputed: {0, 0, 12}, CacheNothing: {0, 0, 0}} {
		e := smallEngine(64, nil)
		e.Cfg.Caching, e.Cfg.MaxBatchedTokens = caching, 64
		var requests []*Request
		submit := func(rest int) {
			r := simRequest(4, []uint64{1, 2, 3}, rest, 1)
			if err := e.Submit(r); err != nil {
				t.Fatal(err)
			}
			requests = append(requests, r)
		}
		submit(0)
		submit(0) // in the same pass
		if _, uncached := e.Queued(); uncached != 24 {
			t.Errorf("%d tokens are to be computed", uncached)
		}
		runPass(t, e)
		submit(1)
		if tokens, uncached := e.Queued(); tokens != 13 || caching == CacheComputed && uncached != 1 {
			t.Errorf("%d tokens wait, %d are to be computed", tokens, uncached)
		}
		runPass(t, e)
		for i, r := range requests {
			if r.Cached != want[i] {
				t.Errorf("caching %d, request %d: %d cached, want %d", caching, i, r.Cached, want[i])
			}
		}
		if err := e.Check(); err != nil {
			t.Error(err)
		}
	}
}

// TestAnAbortedRequestLeavesWhatItHasComputed: as in SGLang, its blocks are cached.
func TestAnAbortedRequestLeavesWhatItHasComputed(t *testing.T) {
	stored := 0
	e := smallEngine(64, func(event Event) { stored += len(event.Blocks) })
	e.Cfg.Caching = CacheComputed
	r := simRequest(4, []uint64{1, 2, 3, 4, 5, 6}, 0, 9) // its answer's blocks are the last four
	r.Prompt = 8
	if err := e.Submit(r); err != nil {
		t.Fatal(err)
	}
	for pass, want := range []int{2, 2, 2, 2, 2, 2} {
		if runPass(t, e); stored != want {
			t.Errorf("after pass %d: %d blocks, want %d", pass, stored, want)
		}
	}
	e.Abort(r) // 8 and 5 tokens are computed
	if stored != 3 {
		t.Errorf("%d blocks are left, want 3", stored)
	}
}

func TestTheEndOfAChainIsEvictedBeforeItsStart(t *testing.T) {
	var removed []uint64
	e := smallEngine(5, func(event Event) { removed = append(removed, event.Removed...) })
	old := simRequest(4, []uint64{1, 2, 3}, 1, 1)
	fresh := simRequest(4, []uint64{7, 8}, 1, 1) // three blocks: two are free then
	for _, r := range []*Request{old, fresh} {
		if err := e.Submit(r); err != nil {
			t.Fatal(err)
		}
		runPass(t, e)
	}
	if len(removed) != 1 || removed[0] != old.Blocks[2].Engine {
		t.Errorf("removed %v, want the third block %d of the first prompt", removed, old.Blocks[2].Engine)
	}
}

func TestTheLastAdmittedIsPreemptedAndStartsOver(t *testing.T) {
	e := smallEngine(6, nil)
	first, second := simRequest(4, []uint64{1, 2}, 0, 9), simRequest(4, []uint64{8, 9}, 0, 9)
	for _, r := range []*Request{first, second} {
		if err := e.Submit(r); err != nil {
			t.Fatal(err)
		}
	}
	for range 4 { // 11 tokens each
		runPass(t, e)
	}
	if running, waiting, usage := e.Load(); running != 2 || waiting != 0 || usage != 1 {
		t.Fatalf("load %d running, %d waiting, usage %v; want 2, 0, 1", running, waiting, usage)
	}
	runPass(t, e)
	runPass(t, e)
	if running, waiting, _ := e.Load(); running != 1 || waiting != 1 || second.running {
		t.Fatalf("load %d running, %d waiting; want the second request preempted", running, waiting)
	}
	for first.Generated < 9 || second.Generated < 9 {
		runPass(t, e)
	}
	if second.Cached != 0 {
		t.Errorf("cached %d: what a request finds when it starts over does not count", second.Cached)
	}
}

func TestARequestLargerThanTheCacheIsRefused(t *testing.T) {
	e := smallEngine(4, nil)
	if err := e.Submit(simRequest(4, []uint64{1, 2, 3}, 1, 4)); err == nil {
		t.Error("17 tokens went into a cache of 16")
	}
}

// TestEngineAlwaysFinishesAndItsEventsTellItsCache drives an engine at random.
// Prompts are computed there or elsewhere; those come or do not. After every step
// the blocks add up, and an index fed with its events holds what the engine's
// cache does.
func TestEngineAlwaysFinishesAndItsEventsTellItsCache(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		index, w := radix.NewTree(), kv.WorkerKey{Worker: 1}
		var failed error
		e := smallEngine(rapid.IntRange(8, 24).Draw(t, "blocks"), func(event Event) {
			if event.Stored {
				if err := radixtest.Store(index, w, event.Parent, event.HasParent, event.Blocks); err != nil {
					failed = err
				}
				for i, b := range event.Blocks {
					if event.Request.Blocks[event.First+i] != b {
						failed = fmt.Errorf("event block %d is not block %d of its request", i, event.First+i)
					}
				}
			} else if unknown := radixtest.Remove(index, w, event.Removed); unknown > 0 {
				failed = fmt.Errorf("%d removed blocks had not been stored", unknown)
			}
		})
		e.Cfg.Caching = rapid.SampledFrom([]Caching{CacheFilled, CacheComputed, CacheNothing}).Draw(t, "caching")
		var coming []*Request // told of by the engine
		e.Fetch = func(r *Request) { coming = append(coming, r) }
		var open, kept []*Request
		end := func() {
			for _, r := range e.End() {
				if r.Generated > r.Output {
					t.Fatalf("%d tokens of %d", r.Generated, r.Output)
				}
				if r.Generated == r.Output && r.Keep {
					kept = append(kept, r)
				}
			}
		}
		pass := func() {
			if _, busy := e.Begin(); busy {
				end()
			}
		}
		arrive := func(came bool) {
			if len(coming) > 0 {
				e.Fetched(coming[0], came)
				coming = coming[1:]
			}
		}
		verify := func() {
			if failed != nil {
				t.Fatal(failed)
			}
			if err := e.Check(); err != nil {
				t.Fatal(err)
			}
			if held, cached := index.Blocks(w), e.Pool.Keys(); held != cached {
				t.Fatalf("the index holds %d blocks, the cache %d", held, cached)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"submit": func(t *rapid.T) {
				local := rapid.SliceOfN(rapid.Uint64Range(1, 2), 0, 4).Draw(t, "blocks")
				r := simRequest(4, local, rapid.IntRange(0, 3).Draw(t, "rest"), rapid.IntRange(1, 12).Draw(t, "output"))
				r.Prompt = max(1, r.Prompt)
				r.Fetch = rapid.Bool().Draw(t, "fetch")
				r.Keep = !r.Fetch && rapid.Bool().Draw(t, "keep")
				if e.Submit(r) == nil {
					open = append(open, r)
				}
			},
			"pass":          func(*rapid.T) { pass() },
			"prompt comes":  func(*rapid.T) { arrive(true) },
			"does not come": func(*rapid.T) { arrive(false) },
			"comes inside a pass": func(*rapid.T) {
				if _, busy := e.Begin(); busy {
					arrive(true)
					verify()
					end()
				}
			},
			"abort inside a pass": func(t *rapid.T) {
				if len(open) == 0 {
					return
				}
				if _, busy := e.Begin(); busy {
					r := rapid.SampledFrom(open).Draw(t, "which")
					e.Abort(r)
					r.Output = 0
					end()
				}
			},
			"let go": func(*rapid.T) {
				if len(kept) > 0 {
					e.Abort(kept[0])
					kept = kept[1:]
				}
			},
			"abort": func(t *rapid.T) {
				if len(open) > 0 {
					r := rapid.SampledFrom(open).Draw(t, "which")
					e.Abort(r)
					r.Output = 0
				}
			},
			"reset": func(*rapid.T) {
				e.Reset()
				radixtest.Clear(index, w)
			},
			"": func(*rapid.T) { verify() },
		})
		for range 1000 {
			pass()
			arrive(true)
			for _, r := range kept {
				e.Abort(r)
			}
			kept = nil
			verify()
		}
		for _, r := range open {
			if r.Generated < r.Output {
				t.Fatalf("a request stays at %d tokens of %d", r.Generated, r.Output)
			}
		}
		if e.Pool.Active() != 0 {
			t.Fatalf("%d blocks are still in use", e.Pool.Active())
		}
	})
}
