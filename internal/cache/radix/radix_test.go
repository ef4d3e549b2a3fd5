package radix

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/testkit"
)

// index is a Tree whose invariants are checked after every mutation.
type index struct {
	*Tree
	t testing.TB
}

func newIndex(t testing.TB) index { return index{NewTreeWithBook(summary.NewBook()), t} }

func (x index) checked() {
	x.t.Helper()
	if err := x.Check(); err != nil {
		x.t.Fatal(err)
	}
}

// store stores the whole prompt and fails the test if that fails.
func (x index) store(w kv.WorkerKey, local ...uint64) {
	x.t.Helper()
	if err := x.Tree.stored(w, 0, false, nil, testkit.Chain(local)); err != nil {
		x.t.Fatal(err)
	}
	x.checked()
}

func (x index) storeErr(w kv.WorkerKey, parent uint64, hasParent bool, blocks []kv.StoredBlock) error {
	x.t.Helper()
	err := x.Tree.stored(w, parent, hasParent, nil, blocks)
	x.checked()
	return err
}

func (x index) remove(w kv.WorkerKey, engine ...uint64) (unknown int) {
	x.t.Helper()
	unknown = x.Tree.removed(w, engine)
	x.checked()
	return unknown
}

func (x index) clear(w kv.WorkerKey) {
	x.t.Helper()
	x.Tree.cleared(w)
	x.checked()
}

func (x index) forget(worker uint64) {
	x.t.Helper()
	x.Tree.forgotten(worker)
	x.checked()
}

// swept sweeps all that cleared workers left behind.
func (x index) swept() {
	x.t.Helper()
	x.mu.Lock()
	x.sweep(1 << 30)
	x.mu.Unlock()
	x.checked()
}

// wants fails the test unless the prompt matches exactly these workers.
func (x index) wants(local []uint64, want ...kv.Match) {
	x.t.Helper()
	if got := x.Match(local, len(local), kv.AllParts, nil); !slices.Equal(got, want) {
		x.t.Fatalf("match of %d blocks: %v, want %v", len(local), got, want)
	}
}

// wantsCounts fails the test unless w holds so many blocks and the tree has so
// many nodes.
func (x index) wantsCounts(w kv.WorkerKey, blocks, nodes int) {
	x.t.Helper()
	if b, n := x.Blocks(w), x.Nodes(); b != blocks || n != nodes {
		x.t.Fatalf("%v holds %d blocks of %d nodes, want %d of %d", w, b, n, blocks, nodes)
	}
}

// restored returns an index made of r's dump.
func restored(t testing.TB, r *Tree) index {
	x := newIndex(t)
	for _, e := range dumped(r) {
		if err := x.Tree.stored(e.Worker, e.Parent, e.HasParent, nil, []kv.StoredBlock{e.Block}); err != nil {
			t.Fatal(err)
		}
	}
	x.checked()
	return x
}

func TestPromptMatchesWhatWasStored(t *testing.T) {
	p := []uint64{1, 2, 3}
	for name, test := range map[string]struct {
		query []uint64
		want  int
	}{
		"empty query":                 {nil, 0},
		"whole prompt":                {[]uint64{1, 2, 3}, 3},
		"beginning of it":             {[]uint64{1, 2}, 2},
		"longer prompt":               {[]uint64{1, 2, 3, 4}, 3},
		"other end":                   {[]uint64{1, 2, 9}, 2},
		"other middle":                {[]uint64{1, 9, 3}, 1},
		"other beginning":             {[]uint64{9, 2, 3}, 0},
		"end without the beginning":   {[]uint64{2, 3}, 0},
		"same block over and over":    {[]uint64{1, 1, 1}, 1},
		"nothing of it":               {[]uint64{7, 8, 9}, 0},
		"hash zero, which is a value": {[]uint64{0}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			x := newIndex(t)
			x.wants(test.query)
			x.store(testkit.W0, p...)
			if test.want == 0 {
				x.wants(test.query)
			} else {
				x.wants(test.query, kv.Match{Worker: testkit.W0, Blocks: test.want})
			}
		})
	}
}

func TestZeroIsAHashLikeOthers(t *testing.T) {
	x := newIndex(t)
	if err := x.storeErr(testkit.W0, 0, false, []kv.StoredBlock{{Engine: 0, Local: 0}}); err != nil {
		t.Fatal(err)
	}
	if err := x.storeErr(testkit.W0, 0, true, []kv.StoredBlock{{Engine: 1, Local: 0}}); err != nil {
		t.Fatal(err)
	}
	x.wants([]uint64{0, 0, 0}, kv.Match{Worker: testkit.W0, Blocks: 2})
	if unknown := x.remove(testkit.W0, 0, 1); unknown != 0 {
		t.Errorf("%d unknown", unknown)
	}
	x.wantsCounts(testkit.W0, 0, 0)
}

func TestMatchesAreAppendedInOrderOfWorkerAndRank(t *testing.T) {
	x := newIndex(t)
	keys := []kv.WorkerKey{{Worker: 5, Rank: 1}, {Worker: 0, Rank: 0}, {Worker: 5, Rank: 0}, {Worker: 300, Rank: 0}, {Worker: 2, Rank: 7}}
	for i, w := range keys {
		x.store(w, testkit.Prompt(1, i+1)...)
	}
	kept := kv.Match{Worker: kv.WorkerKey{Worker: 9, Rank: 9}, Blocks: 99}
	got := x.Match(testkit.Prompt(1, 5), 5, kv.AllParts, []kv.Match{kept})
	want := []kv.Match{kept, {Worker: keys[1], Blocks: 2}, {Worker: keys[4], Blocks: 5}, {Worker: keys[2], Blocks: 3}, {Worker: keys[0], Blocks: 1}, {Worker: keys[3], Blocks: 4}}
	if !slices.Equal(got, want) {
		t.Errorf("matches %v, want %v", got, want)
	}
	if got, want := x.Workers(), []kv.WorkerKey{{Worker: 0, Rank: 0}, {Worker: 2, Rank: 7}, {Worker: 5, Rank: 0}, {Worker: 5, Rank: 1}, {Worker: 300, Rank: 0}}; !slices.Equal(got, want) {
		t.Errorf("workers %v, want %v", got, want)
	}
}

func TestPromptsOfAllLengthsMatchExactly(t *testing.T) {
	for _, n := range []int{1, 31, 32, 33, 63, 64, 65, 96, 5000} {
		x := newIndex(t)
		p := testkit.Prompt(1, n)
		x.store(testkit.W0, p...)
		x.wants(p, kv.Match{Worker: testkit.W0, Blocks: n})
		x.wants(append(slices.Clone(p), 1), kv.Match{Worker: testkit.W0, Blocks: n})
		if n > 1 {
			x.wants(p[:n-1], kv.Match{Worker: testkit.W0, Blocks: n - 1})
		}
		x.wantsCounts(testkit.W0, n, n)
	}
}

func TestPromptsThatDivergeMatchUpToThere(t *testing.T) {
	for _, at := range []int{1, 31, 32, 33, 63, 64, 65, 95, 96, 97} {
		x := newIndex(t)
		a := testkit.Prompt(1, 128)
		b := testkit.Diverging(a, at, 2)
		x.store(testkit.W0, a...)
		x.wants(b, kv.Match{Worker: testkit.W0, Blocks: at})
		x.store(testkit.W1, b...)
		x.wants(a, kv.Match{Worker: testkit.W0, Blocks: 128}, kv.Match{Worker: testkit.W1, Blocks: at})
		x.wants(b, kv.Match{Worker: testkit.W0, Blocks: at}, kv.Match{Worker: testkit.W1, Blocks: 128})
		x.wants(testkit.Diverging(a, at, 3), kv.Match{Worker: testkit.W0, Blocks: at}, kv.Match{Worker: testkit.W1, Blocks: at})
		x.wantsCounts(testkit.W0, 128, 2*128-at)
	}
}

func TestManyWorkersHoldDifferentLengths(t *testing.T) {
	for _, workers := range []int{1, 63, 64, 65, 300} {
		x := newIndex(t)
		p := testkit.Prompt(1, workers)
		var want []kv.Match
		for i := range workers {
			w := kv.WorkerKey{Worker: uint64(i / 3), Rank: uint32(i % 3)}
			if err := x.Tree.stored(w, 0, false, nil, testkit.Chain(p[:i+1])); err != nil {
				t.Fatal(err)
			}
			want = append(want, kv.Match{Worker: w, Blocks: i + 1})
		}
		x.checked()
		x.wants(p, want...)
		if sets := x.sets.Len(); sets != workers {
			t.Errorf("%d sets for %d workers", sets, workers)
		}
	}
}

// TestFewOfManyWorkersMatch: matches are found in another way then.
func TestFewOfManyWorkersMatch(t *testing.T) {
	const workers = 5 * fewShare
	x, random := newIndex(t), rand.New(rand.NewPCG(1, 1))
	for _, i := range random.Perm(workers) {
		if err := x.Tree.stored(kv.WorkerKey{Worker: uint64(i / 2), Rank: uint32(i % 2)}, 0, false, nil, testkit.Chain([]uint64{uint64(i + 1)})); err != nil {
			t.Fatal(err)
		}
	}
	for seed := range uint64(60) {
		p := testkit.Prompt(1000+seed, 12)
		var want []kv.Match
		for _, i := range random.Perm(workers)[:seed%12] {
			w, blocks := kv.WorkerKey{Worker: uint64(i / 2), Rank: uint32(i % 2)}, 1+random.IntN(len(p))
			if err := x.Tree.stored(w, 0, false, nil, testkit.Chain(p[:blocks])); err != nil {
				t.Fatal(err)
			}
			if seed%3 == 0 && blocks%2 == 0 { // it gets another slot
				x.Tree.cleared(w)
				continue
			}
			want = append(want, kv.Match{Worker: w, Blocks: blocks})
		}
		slices.SortFunc(want, func(a, b kv.Match) int { return a.Worker.Compare(b.Worker) })
		x.wants(p, want...)
	}
	x.checked()
}

func TestOneSystemPromptWithThousandsOfFollowers(t *testing.T) {
	x := newIndex(t)
	for i := range 10_000 {
		if err := x.Tree.stored(testkit.W0, 0, false, nil, testkit.Chain([]uint64{1, 2, uint64(i + 10)})); err != nil {
			t.Fatal(err)
		}
	}
	x.checked()
	x.wantsCounts(testkit.W0, 10_002, 10_002)
	for i := range 10_000 {
		x.wants([]uint64{1, 2, uint64(i + 10)}, kv.Match{Worker: testkit.W0, Blocks: 3})
	}
	x.wants([]uint64{1, 2, 3}, kv.Match{Worker: testkit.W0, Blocks: 2})
	for i := range 10_000 {
		x.Tree.removed(testkit.W0, testkit.EngineHashes([]uint64{1, 2, uint64(i + 10)})[2:])
	}
	x.checked()
	x.wantsCounts(testkit.W0, 2, 2)
}

func TestChainsContinueAfterTheirParent(t *testing.T) {
	x := newIndex(t)
	p := testkit.Prompt(1, 200)
	blocks := testkit.Chain(p)
	// 20 steps of 10 blocks, each after the last one's end.
	for at := 0; at < len(p); at += 10 {
		var parent uint64
		if at > 0 {
			parent = blocks[at-1].Engine
		}
		if err := x.storeErr(testkit.W0, parent, at > 0, blocks[at:at+10]); err != nil {
			t.Fatal(err)
		}
		x.wants(p, kv.Match{Worker: testkit.W0, Blocks: at + 10})
	}
	// A second answer to the same turn branches off in the middle.
	other := testkit.Diverging(p, 50, 2)
	if err := x.storeErr(testkit.W0, blocks[49].Engine, true, testkit.Chain(other)[50:]); err != nil {
		t.Fatal(err)
	}
	x.wants(other, kv.Match{Worker: testkit.W0, Blocks: 200})
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 200})
}

func TestUnknownParentStoresNothing(t *testing.T) {
	x := newIndex(t)
	p := testkit.Prompt(1, 4)
	blocks := testkit.Chain(p)
	if err := x.storeErr(testkit.W0, blocks[1].Engine, true, blocks[2:]); !errors.Is(err, ErrParentUnknown) {
		t.Fatalf("error %v, want %v", err, ErrParentUnknown)
	}
	if workers := x.Workers(); len(workers) != 0 {
		t.Errorf("workers %v", workers)
	}
	x.wants(p[2:])
	// Another worker's block is no parent either.
	x.store(testkit.W1, p[:2]...)
	x.store(testkit.W0, p[:1]...)
	if err := x.storeErr(testkit.W0, blocks[1].Engine, true, blocks[2:]); !errors.Is(err, ErrParentUnknown) {
		t.Fatalf("error %v, want %v", err, ErrParentUnknown)
	}
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 1}, kv.Match{Worker: testkit.W1, Blocks: 2})
	// Nor is one that was removed, though its node remains for the other.
	x.remove(testkit.W0, blocks[0].Engine)
	if err := x.storeErr(testkit.W0, blocks[0].Engine, true, blocks[1:]); !errors.Is(err, ErrParentUnknown) {
		t.Fatalf("error %v, want %v", err, ErrParentUnknown)
	}
	x.wants(p, kv.Match{Worker: testkit.W1, Blocks: 2})
}

func TestBlockIsNeverItsOwnParent(t *testing.T) {
	x := newIndex(t)
	x.store(testkit.W0, 1, 2)
	last := testkit.EngineHashes([]uint64{1, 2})[1]
	for name, store := range map[string]struct {
		hasParent bool
		blocks    []kv.StoredBlock
	}{
		"after itself":            {true, []kv.StoredBlock{{Engine: last, Local: 3}}},
		"twice in a row":          {false, []kv.StoredBlock{{Engine: 7, Local: 3}, {Engine: 7, Local: 4}}},
		"twice in a row, at last": {true, []kv.StoredBlock{{Engine: 7, Local: 3}, {Engine: 8, Local: 4}, {Engine: 8, Local: 4}}},
	} {
		t.Run(name, func(t *testing.T) {
			if err := x.storeErr(testkit.W0, last, store.hasParent, store.blocks); !errors.Is(err, ErrSelfParent) {
				t.Fatalf("error %v, want %v", err, ErrSelfParent)
			}
			x.wantsCounts(testkit.W0, 2, 2)
			x.wants([]uint64{1, 2, 3}, kv.Match{Worker: testkit.W0, Blocks: 2})
		})
	}
	// Without a parent, its number is no parent.
	if err := x.storeErr(testkit.W0, 9, false, []kv.StoredBlock{{Engine: 9, Local: 9}}); err != nil {
		t.Fatal(err)
	}
}

func TestStoreOfNothingMakesNoWorker(t *testing.T) {
	x := newIndex(t)
	if err := x.storeErr(testkit.W0, 0, false, nil); err != nil {
		t.Fatal(err)
	}
	if workers := x.Workers(); len(workers) != 0 {
		t.Errorf("workers %v", workers)
	}
}

func TestRemovedBlocksNoLongerMatch(t *testing.T) {
	x := newIndex(t)
	p := testkit.Prompt(1, 100)
	e := testkit.EngineHashes(p)
	x.store(testkit.W0, p...)
	x.store(testkit.W1, p...)
	slices.Reverse(e)
	// 79 of 100 go, the last first, as the engine evicts.
	if unknown := x.remove(testkit.W0, e[:79]...); unknown != 0 {
		t.Errorf("%d unknown", unknown)
	}
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 21}, kv.Match{Worker: testkit.W1, Blocks: 100})
	x.wantsCounts(testkit.W0, 21, 100)
	x.remove(testkit.W1, e[:79]...)
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 21}, kv.Match{Worker: testkit.W1, Blocks: 21})
	x.wantsCounts(testkit.W1, 21, 21)
	x.remove(testkit.W0, e[79:]...)
	x.remove(testkit.W1, e[79:]...)
	x.wants(p)
	x.wantsCounts(testkit.W0, 0, 0)
	if sets := x.sets.Len(); sets != 0 {
		t.Errorf("%d sets in an empty index", sets)
	}
}

func TestUnknownRemovalsAreCountedAndTheRestApplied(t *testing.T) {
	x := newIndex(t)
	p := testkit.Prompt(1, 4)
	e := testkit.EngineHashes(p)
	if unknown := x.remove(testkit.W0, e...); unknown != 4 {
		t.Errorf("%d unknown of 4 for a worker never seen", unknown)
	}
	x.store(testkit.W0, p...)
	x.store(testkit.W1, p...)
	if unknown := x.remove(testkit.W0, 1, e[3], 2, e[2], e[3]); unknown != 3 {
		t.Errorf("%d unknown, want 3", unknown)
	}
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 2}, kv.Match{Worker: testkit.W1, Blocks: 4})
}

func TestHoleHidesWhatFollowsUntilItIsStoredAgain(t *testing.T) {
	x := newIndex(t)
	p := testkit.Prompt(1, 6)
	blocks := testkit.Chain(p)
	x.store(testkit.W0, p...)
	x.store(testkit.W1, p[:3]...)
	x.remove(testkit.W0, blocks[2].Engine)
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 2}, kv.Match{Worker: testkit.W1, Blocks: 3})
	x.remove(testkit.W1, blocks[2].Engine)
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 2}, kv.Match{Worker: testkit.W1, Blocks: 2})
	x.wantsCounts(testkit.W0, 5, 6)
	if err := x.storeErr(testkit.W0, blocks[1].Engine, true, blocks[2:3]); err != nil {
		t.Fatal(err)
	}
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 6}, kv.Match{Worker: testkit.W1, Blocks: 2})
	// Without its first block nothing of the prompt can be used.
	x.remove(testkit.W0, blocks[0].Engine)
	x.wants(p, kv.Match{Worker: testkit.W1, Blocks: 2})
	// A hole goes with the last block behind it.
	x.remove(testkit.W1, blocks[0].Engine, blocks[1].Engine)
	x.wantsCounts(testkit.W0, 5, 6)
	x.remove(testkit.W0, blocks[5].Engine, blocks[4].Engine, blocks[1].Engine, blocks[2].Engine)
	x.wantsCounts(testkit.W0, 1, 4)
	x.remove(testkit.W0, blocks[3].Engine)
	x.wantsCounts(testkit.W0, 0, 0)
}

func TestEveryCopyMustGo(t *testing.T) {
	x := newIndex(t)
	p := testkit.Prompt(1, 3)
	e := testkit.EngineHashes(p)
	x.store(testkit.W0, p...)
	x.store(testkit.W0, p[:2]...)
	x.store(testkit.W0, p[:1]...)
	x.wantsCounts(testkit.W0, 3, 3)
	for _, step := range []struct {
		engine  uint64
		matches int
		unknown int
	}{
		{e[2], 2, 0}, {e[2], 2, 1}, {e[1], 2, 0}, {e[0], 2, 0}, {e[1], 1, 0}, {e[0], 1, 0}, {e[0], 0, 0}, {e[0], 0, 1},
	} {
		if unknown := x.remove(testkit.W0, step.engine); unknown != step.unknown {
			t.Errorf("%d unknown, want %d", unknown, step.unknown)
		}
		if step.matches == 0 {
			x.wants(p)
		} else {
			x.wants(p, kv.Match{Worker: testkit.W0, Blocks: step.matches})
		}
	}
	x.wantsCounts(testkit.W0, 0, 0)
	// A copy of another worker is another matter.
	x.store(testkit.W0, p...)
	x.store(testkit.W1, p...)
	x.remove(testkit.W0, e...)
	x.wants(p, kv.Match{Worker: testkit.W1, Blocks: 3})
}

func TestEngineHashMovesToTheNewestPlace(t *testing.T) {
	x := newIndex(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(x.storeErr(testkit.W0, 0, false, []kv.StoredBlock{{Engine: 10, Local: 1}, {Engine: 11, Local: 2}}))
	must(x.storeErr(testkit.W0, 0, false, []kv.StoredBlock{{Engine: 10, Local: 1}})) // a copy
	must(x.storeErr(testkit.W0, 0, false, []kv.StoredBlock{{Engine: 10, Local: 5}}))
	x.wants([]uint64{1, 2})
	x.wants([]uint64{5}, kv.Match{Worker: testkit.W0, Blocks: 1})
	if unknown := x.remove(testkit.W0, 10, 10); unknown != 1 {
		t.Errorf("%d unknown, want 1: copies start again at the new place", unknown)
	}
	x.wants([]uint64{5})
	// Below itself, which leaves a hole at the top.
	must(x.storeErr(testkit.W0, 0, false, []kv.StoredBlock{{Engine: 20, Local: 6}, {Engine: 21, Local: 7}, {Engine: 20, Local: 8}}))
	x.wants([]uint64{6, 7, 8})
	// Up again: what was below the old place may be freed on the way.
	must(x.storeErr(testkit.W0, 0, false, []kv.StoredBlock{{Engine: 20, Local: 6}}))
	x.wants([]uint64{6, 7, 8}, kv.Match{Worker: testkit.W0, Blocks: 2})
	// The block that the parent hangs from moves away below it.
	must(x.storeErr(testkit.W0, 21, true, []kv.StoredBlock{{Engine: 22, Local: 9}, {Engine: 21, Local: 9}, {Engine: 23, Local: 9}}))
	x.wants([]uint64{6, 7, 9, 9, 9}, kv.Match{Worker: testkit.W0, Blocks: 1})
	x.remove(testkit.W0, 11, 20, 21, 22, 23)
	x.wantsCounts(testkit.W0, 0, 0)
}

func TestNodeOfTwoEngineHashesIsHeldUntilTheLastGoes(t *testing.T) {
	x := newIndex(t)
	for _, engine := range []uint64{10, 11, 12} {
		if err := x.storeErr(testkit.W0, 0, false, []kv.StoredBlock{{Engine: engine, Local: 1}}); err != nil {
			t.Fatal(err)
		}
	}
	x.store(testkit.W1, 1)
	x.wantsCounts(testkit.W0, 3, 1)
	x.remove(testkit.W0, 11)
	x.wants([]uint64{1}, kv.Match{Worker: testkit.W0, Blocks: 1}, kv.Match{Worker: testkit.W1, Blocks: 1})
	x.remove(testkit.W0, 10)
	x.wants([]uint64{1}, kv.Match{Worker: testkit.W0, Blocks: 1}, kv.Match{Worker: testkit.W1, Blocks: 1})
	x.remove(testkit.W0, 12)
	x.wants([]uint64{1}, kv.Match{Worker: testkit.W1, Blocks: 1})
	// Clearing sweeps such a node once.
	for _, engine := range []uint64{10, 11, 12} {
		if err := x.storeErr(testkit.W0, 0, false, []kv.StoredBlock{{Engine: engine, Local: 2}}); err != nil {
			t.Fatal(err)
		}
	}
	x.clear(testkit.W0)
	x.store(testkit.W1, 3)
	x.swept()
	x.wantsCounts(testkit.W1, 2, 2)
}

func TestClearedWorkerHoldsNothingButStays(t *testing.T) {
	x := newIndex(t)
	p := testkit.Prompt(1, 500)
	ranks := []kv.WorkerKey{{Worker: 1, Rank: 0}, {Worker: 1, Rank: 1}}
	for _, w := range append(ranks, testkit.W0) {
		x.store(w, p...)
	}
	x.clear(testkit.W2)
	x.clear(ranks[0])
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 500}, kv.Match{Worker: ranks[1], Blocks: 500})
	x.wantsCounts(ranks[0], 0, 500)
	if workers := x.Workers(); !slices.Equal(workers, []kv.WorkerKey{testkit.W0, ranks[0], ranks[1]}) {
		t.Errorf("workers %v", workers)
	}
	if err := x.storeErr(ranks[0], testkit.EngineHashes(p)[0], true, []kv.StoredBlock{{Engine: 1, Local: 1}}); !errors.Is(err, ErrParentUnknown) {
		t.Errorf("store after a cleared parent: %v", err)
	}
	if unknown := x.remove(ranks[0], testkit.EngineHashes(p)[:3]...); unknown != 3 {
		t.Errorf("%d of 3 cleared blocks unknown", unknown)
	}
	x.store(ranks[0], p[:7]...)
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 500}, kv.Match{Worker: ranks[0], Blocks: 7}, kv.Match{Worker: ranks[1], Blocks: 500})
	for range 3 {
		for _, w := range append(ranks, testkit.W0) {
			x.clear(w)
		}
	}
	x.wants(p)
	x.swept()
	x.wantsCounts(testkit.W0, 0, 0)
	if len(x.vacant)+3 != len(x.slots) || x.sets.Len() != 0 {
		t.Errorf("%d of %d slots vacant, %d sets", len(x.vacant), len(x.slots), x.sets.Len())
	}
}

func TestForgottenWorkerVanishesWithAllRanks(t *testing.T) {
	x := newIndex(t)
	p := testkit.Prompt(1, 10)
	for _, w := range []kv.WorkerKey{{Worker: 1, Rank: 0}, {Worker: 1, Rank: 1}, {Worker: 1, Rank: 7}, {Worker: 2, Rank: 0}} {
		x.store(w, p...)
	}
	x.forget(1)
	x.forget(9)
	x.wants(p, kv.Match{Worker: testkit.W2, Blocks: 10})
	if workers := x.Workers(); !slices.Equal(workers, []kv.WorkerKey{testkit.W2}) {
		t.Errorf("workers %v", workers)
	}
	for _, e := range dumped(x.Tree) {
		if e.Worker != testkit.W2 {
			t.Errorf("dump yields %+v", e)
		}
	}
	if b := x.Blocks(testkit.W1); b != 0 {
		t.Errorf("%d blocks", b)
	}
	x.forget(2)
	x.swept()
	x.wantsCounts(testkit.W2, 0, 0)
	x.store(testkit.W1, p...)
	x.wants(p, kv.Match{Worker: testkit.W1, Blocks: 10})
}

func TestClearedEntriesAreSweptTwiceAsFastAsNewOnesCome(t *testing.T) {
	const held = 20_000
	x := newIndex(t)
	x.store(testkit.W0, testkit.Prompt(1, held)...)
	x.Tree.cleared(testkit.W0)
	nodes := x.Nodes()
	if nodes != held {
		t.Fatalf("%d nodes after the clear, want %d: it is to take no time", nodes, held)
	}
	const step = 100
	for stored := step; stored <= held/2; stored += step {
		if err := x.Tree.stored(testkit.W0, 0, false, nil, testkit.Chain(testkit.Prompt(uint64(stored), step))); err != nil {
			t.Fatal(err)
		}
		retired := 0
		for _, slot := range x.retired {
			retired += x.slots[slot].blocks.Len()
		}
		if want := max(0, held-2*stored); retired > want {
			t.Fatalf("%d blocks retired after %d stored, want at most %d", retired, stored, want)
		}
	}
	x.checked()
	x.wantsCounts(testkit.W0, held/2, held/2)
}

func TestMemoryIsReusedUnderChurn(t *testing.T) {
	x := newIndex(t)
	rng := rand.New(rand.NewPCG(1, 1))
	for round := range 2000 {
		w := kv.WorkerKey{Worker: rng.Uint64N(4)}
		p := testkit.Diverging(testkit.Prompt(rng.Uint64N(20), 50), 10, uint64(round))
		if err := x.Tree.stored(w, 0, false, nil, testkit.Chain(p)); err != nil {
			t.Fatal(err)
		}
		switch rng.IntN(3) {
		case 0:
			x.Tree.cleared(w)
		case 1:
			x.Tree.removed(w, testkit.EngineHashes(p))
		}
		if x.Blocks(w) > 500 {
			x.Tree.forgotten(w.Worker)
		}
	}
	x.checked()
	if len(x.slots) > 50 || x.sets.Len() > 200 || x.nodes.next > 8000 {
		t.Errorf("%d slots, %d sets, %d nodes for at most 2,000 live blocks", len(x.slots), x.sets.Len(), x.nodes.next)
	}
	for worker := range uint64(4) {
		x.Tree.forgotten(worker)
	}
	x.swept()
	if x.Nodes() != 0 || x.sets.Len() != 0 || x.branches.Len() != 0 {
		t.Errorf("%d nodes, %d sets, %d branches in an empty index", x.Nodes(), x.sets.Len(), x.branches.Len())
	}
}

func TestRestoredDumpIsEqual(t *testing.T) {
	x := newIndex(t)
	shared := testkit.Prompt(1, 40)
	for i := range 30 {
		w := kv.WorkerKey{Worker: uint64(i % 5), Rank: uint32(i % 2)}
		x.store(w, testkit.Diverging(shared, i, uint64(i))...)
	}
	x.store(testkit.W1, shared...) // copies
	if err := x.storeErr(testkit.W1, 0, false, []kv.StoredBlock{{Engine: 77, Local: shared[0]}, {Engine: 78, Local: shared[1]}}); err != nil {
		t.Fatal(err)
	}
	x.clear(testkit.W2)
	y := restored(t, x.Tree)
	asSet := func(r *Tree) map[dumpEntry]int {
		set := map[dumpEntry]int{}
		for _, e := range dumped(r) {
			set[e]++
		}
		return set
	}
	if !reflect.DeepEqual(asSet(x.Tree), asSet(y.Tree)) {
		t.Error("the dump of a restored dump differs")
	}
	for _, w := range x.Workers() {
		if x.Blocks(w) != y.Blocks(w) {
			t.Errorf("%v: %d blocks, restored %d", w, x.Blocks(w), y.Blocks(w))
		}
	}
	for i := range 30 {
		p := testkit.Diverging(shared, i, uint64(i))
		y.wants(p, x.Match(p, len(p), kv.AllParts, nil)...)
	}
	// A copy that was dumped must be removed as often.
	y.remove(testkit.W1, testkit.EngineHashes(shared)[0], 77)
	y.wants(shared[:1], x.Match(shared[:1], len(shared[:1]), kv.AllParts, nil)...)
}

func TestDumpLeavesOutWhatIsBehindAHole(t *testing.T) {
	x := newIndex(t)
	p := testkit.Prompt(1, 6)
	e := testkit.EngineHashes(p)
	x.store(testkit.W0, p...)
	x.store(testkit.W1, p...)
	x.remove(testkit.W0, e[2])
	y := restored(t, x.Tree)
	y.wants(p, kv.Match{Worker: testkit.W0, Blocks: 2}, kv.Match{Worker: testkit.W1, Blocks: 6})
	y.wantsCounts(testkit.W0, 2, 6)
}

func TestDumpStopsWhenTold(t *testing.T) {
	x := newIndex(t)
	x.store(testkit.W0, testkit.Prompt(1, 10)...)
	x.store(testkit.W1, testkit.Prompt(1, 10)...)
	for _, limit := range []int{1, 5, 10} {
		n := 0
		x.DumpOf(testkit.W0)(func(PlacedBlock) bool { n++; return n < limit })
		if n != limit {
			t.Errorf("%d blocks yielded, want %d", n, limit)
		}
	}
}

func TestDumpMayStoreIntoTheSameIndex(t *testing.T) {
	x := newIndex(t)
	p := testkit.Prompt(1, 10)
	x.store(testkit.W0, p...)
	for b := range x.DumpOf(testkit.W0) {
		if err := x.storeErr(testkit.W1, b.Parent, b.HasParent, []kv.StoredBlock{b.StoredBlock}); err != nil {
			t.Fatal(err)
		}
	}
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: 10}, kv.Match{Worker: testkit.W1, Blocks: 10})
}

func TestVeryDeepChain(t *testing.T) {
	const depth = 100_000
	x := newIndex(t)
	p := testkit.Prompt(1, depth)
	x.store(testkit.W0, p...)
	x.wants(p, kv.Match{Worker: testkit.W0, Blocks: depth})
	y := restored(t, x.Tree)
	y.wants(p, kv.Match{Worker: testkit.W0, Blocks: depth})
	e := testkit.EngineHashes(p)
	// First to last: every node waits for its last descendant, and one removal
	// then frees them all.
	y.Tree.removed(testkit.W0, e[:depth-1])
	y.wantsCounts(testkit.W0, 1, depth)
	y.remove(testkit.W0, e[depth-1])
	y.wantsCounts(testkit.W0, 0, 0)
}

func TestMatchDoesNotAllocate(t *testing.T) {
	x := newIndex(t)
	p := testkit.Prompt(1, 100)
	for i := range 100 {
		if err := x.Tree.stored(kv.WorkerKey{Worker: uint64(i)}, 0, false, nil, testkit.Chain(p[:i+1])); err != nil {
			t.Fatal(err)
		}
	}
	dst := make([]kv.Match, 0, 100)
	if n := testing.AllocsPerRun(1000, func() { dst = x.Match(p, len(p), kv.AllParts, dst[:0]) }); n >= 1 {
		t.Errorf("%v allocations a lookup", n)
	}
}

func TestReadersAndWritersAtOnce(t *testing.T) {
	x := newIndex(t)
	const rounds = 300
	always := testkit.Prompt(0, 64)
	x.store(kv.WorkerKey{Worker: 100}, always...)
	var writers, readers sync.WaitGroup
	for i := range uint64(4) {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(i, 2))
			w := kv.WorkerKey{Worker: i % 3, Rank: uint32(i / 3)}
			for range rounds {
				p := testkit.Diverging(always, rng.IntN(64), rng.Uint64N(5))
				switch rng.IntN(8) {
				case 0:
					x.Tree.cleared(w)
				case 1:
					x.Tree.forgotten(w.Worker)
				case 2, 3:
					x.Tree.removed(w, testkit.EngineHashes(p))
				default:
					// The writer of the other rank may forget the worker between two parts.
					if err := x.Tree.stored(w, 0, false, nil, testkit.Chain(p)); err != nil && !errors.Is(err, ErrParentUnknown) {
						t.Error(err)
					}
				}
			}
		})
	}
	done := make(chan struct{})
	for i := range uint64(4) {
		readers.Go(func() {
			rng := rand.New(rand.NewPCG(i, 3))
			var dst []kv.Match
			for {
				select {
				case <-done:
					return
				default:
				}
				dst = x.Match(always, len(always), kv.AllParts, dst[:0])
				if n := len(dst); n == 0 || dst[n-1] != (kv.Match{Worker: kv.WorkerKey{Worker: 100}, Blocks: 64}) {
					t.Errorf("match %v does not end in the worker that always holds all", dst)
					return
				}
				if rng.IntN(50) == 0 {
					dumped(x.Tree)
					x.Nodes()
					for _, w := range x.Workers() {
						x.Blocks(w)
					}
				}
			}
		})
	}
	writers.Wait()
	close(done)
	readers.Wait()
	x.checked()
}

// model is the index as one would write it without caring for time or memory:
// for each worker, the path and the copies of every engine hash it holds.
type model struct {
	workers map[kv.WorkerKey]map[uint64]*modelBlock
}

type modelBlock struct {
	path   string // local hashes from the first block on
	copies int
}

// extend returns the path of a child.
func extend(path string, local uint64) string {
	if path == "" {
		return fmt.Sprintf("%03d", local)
	}
	return path + " " + fmt.Sprintf("%03d", local)
}

func (m *model) store(w kv.WorkerKey, parent uint64, hasParent bool, blocks []kv.StoredBlock) error {
	path, previous, hasPrevious := "", parent, hasParent
	for _, b := range blocks {
		if hasPrevious && previous == b.Engine {
			return ErrSelfParent
		}
		previous, hasPrevious = b.Engine, true
	}
	if hasParent {
		at := m.workers[w][parent]
		if at == nil {
			return ErrParentUnknown
		}
		path = at.path
	}
	for _, b := range blocks {
		path = extend(path, b.Local)
		if m.workers[w] == nil {
			m.workers[w] = map[uint64]*modelBlock{}
		}
		if held := m.workers[w][b.Engine]; held != nil && held.path == path {
			held.copies++
		} else {
			m.workers[w][b.Engine] = &modelBlock{path, 1}
		}
	}
	return nil
}

func (m *model) remove(w kv.WorkerKey, engine []uint64) (unknown int) {
	for _, e := range engine {
		held := m.workers[w][e]
		if held == nil {
			unknown++
			continue
		}
		if held.copies--; held.copies == 0 {
			delete(m.workers[w], e)
		}
	}
	return unknown
}

func (m *model) match(local []uint64) []kv.Match {
	var matches []kv.Match
	for w, held := range m.workers {
		paths := map[string]bool{}
		for _, b := range held {
			paths[b.path] = true
		}
		n, path := 0, ""
		for _, l := range local {
			if path = extend(path, l); !paths[path] {
				break
			}
			n++
		}
		if n > 0 {
			matches = append(matches, kv.Match{Worker: w, Blocks: n})
		}
	}
	slices.SortFunc(matches, func(a, b kv.Match) int { return a.Worker.Compare(b.Worker) })
	return matches
}

// nodes returns how many distinct prefixes are held or lead to a held one.
func (m *model) nodes() int {
	prefixes := map[string]bool{}
	for _, held := range m.workers {
		for _, b := range held {
			for end := len(b.path); end > 0; end -= min(end, 4) {
				prefixes[b.path[:end]] = true
			}
		}
	}
	return len(prefixes)
}

// TestIndexEqualsModel runs random events over few local hashes, workers and
// engine hashes, so that holes, copies, moves and aliases are common, and
// compares the index with the model after each. An honest engine's hashes name
// prefixes; a confused one's name anything.
func TestIndexEqualsModel(t *testing.T) {
	for round := range 4 {
		for _, honest := range []bool{true, false} {
			t.Run(fmt.Sprintf("honest=%v/%d", honest, round), func(t *testing.T) {
				rapid.Check(t, func(t *rapid.T) { compareWithModel(t, honest) })
			})
		}
	}
}

func compareWithModel(t *rapid.T, honest bool) {
	r := NewTreeWithBook(summary.NewBook())
	m := &model{workers: map[kv.WorkerKey]map[uint64]*modelBlock{}}
	// Few workers make long stories, many make many sets.
	workers := rapid.Uint64Range(0, 2).Draw(t, "workers")
	ranks := rapid.Uint32Range(0, 1).Draw(t, "ranks")
	worker := rapid.Custom(func(t *rapid.T) kv.WorkerKey {
		return kv.WorkerKey{Worker: rapid.Uint64Range(0, workers).Draw(t, "worker"), Rank: rapid.Uint32Range(0, ranks).Draw(t, "rank")}
	})
	locals := rapid.SliceOfN(rapid.Uint64Range(0, 2), 1, 6)
	engineHash := rapid.Uint64Range(0, rapid.Uint64Range(1, 12).Draw(t, "engine hashes"))
	type event struct {
		w         kv.WorkerKey
		parent    uint64
		hasParent bool
		blocks    []kv.StoredBlock
	}
	var stored []event
	store := func(w kv.WorkerKey, parent uint64, hasParent bool, blocks []kv.StoredBlock) {
		stored = append(stored, event{w, parent, hasParent, blocks})
		want := m.store(w, parent, hasParent, blocks)
		if err := r.stored(w, parent, hasParent, nil, blocks); !errors.Is(err, want) {
			t.Fatalf("store: error %v, want %v", err, want)
		}
	}
	heldBy := func(w kv.WorkerKey) []uint64 { return slices.Sorted(maps.Keys(m.workers[w])) }
	t.Repeat(map[string]func(*rapid.T){
		"store prompt": func(t *rapid.T) {
			local := locals.Draw(t, "local")
			blocks := testkit.Chain(local)
			if !honest {
				for i := range blocks {
					blocks[i].Engine = engineHash.Draw(t, "engine")
				}
			}
			store(worker.Draw(t, "w"), 0, false, blocks)
		},
		"store after a parent": func(t *rapid.T) {
			w := worker.Draw(t, "w")
			held := heldBy(w)
			local := locals.Draw(t, "local")
			if len(held) == 0 || rapid.IntRange(0, 9).Draw(t, "unknown parent") == 0 {
				store(w, 999, true, testkit.Chain(local))
				return
			}
			parent := rapid.SampledFrom(held).Draw(t, "parent")
			blocks := make([]kv.StoredBlock, len(local))
			previous := parent
			for i, l := range local {
				blocks[i] = kv.StoredBlock{Engine: kv.SequenceHashes(nil, []uint64{previous ^ 0xfeed, l})[1] ^ 0xfeed, Local: l}
				if !honest {
					blocks[i].Engine = engineHash.Draw(t, "engine")
				}
				previous = blocks[i].Engine
			}
			store(w, parent, true, blocks)
		},
		"store again": func(t *rapid.T) {
			if len(stored) > 0 {
				e := rapid.SampledFrom(stored).Draw(t, "store")
				store(e.w, e.parent, e.hasParent, e.blocks)
			}
		},
		"remove": func(t *rapid.T) {
			w := worker.Draw(t, "w")
			engine := rapid.SliceOfN(rapid.SampledFrom(append(heldBy(w), 999)), 1, 5).Draw(t, "engine")
			if got, want := r.removed(w, engine), m.remove(w, engine); got != want {
				t.Fatalf("remove of %d: %d unknown, want %d", engine, got, want)
			}
		},
		"clear": func(t *rapid.T) {
			w := worker.Draw(t, "w")
			r.cleared(w)
			if m.workers[w] != nil {
				m.workers[w] = map[uint64]*modelBlock{}
			}
		},
		"forget": func(t *rapid.T) {
			worker := worker.Draw(t, "w").Worker
			r.forgotten(worker)
			maps.DeleteFunc(m.workers, func(w kv.WorkerKey, _ map[uint64]*modelBlock) bool { return w.Worker == worker })
		},
		"sweep a little": func(t *rapid.T) { r.sweep(rapid.IntRange(1, 5).Draw(t, "limit")) },
		"sweep all": func(t *rapid.T) {
			r.sweep(1 << 30)
			if got, want := r.Nodes(), m.nodes(); got != want {
				t.Fatalf("%d nodes, want %d", got, want)
			}
		},
		"dump and restore": func(t *rapid.T) {
			copied := NewTree()
			for _, e := range dumped(r) {
				if err := copied.stored(e.Worker, e.Parent, e.HasParent, nil, []kv.StoredBlock{e.Block}); err != nil {
					t.Fatal(err)
				}
			}
			if err := copied.Check(); err != nil {
				t.Fatal(err)
			}
			for range 5 {
				local := locals.Draw(t, "query")
				if got, want := copied.Match(local, len(local), kv.AllParts, nil), m.match(local); !slices.Equal(got, want) {
					t.Fatalf("restored: match of %d: %v, want %v", local, got, want)
				}
			}
		},
		"": func(t *rapid.T) {
			if err := r.Check(); err != nil {
				t.Fatal(err)
			}
			if got, want := r.Workers(), slices.SortedFunc(maps.Keys(m.workers), kv.WorkerKey.Compare); !slices.Equal(got, want) {
				t.Fatalf("workers %v, want %v", got, want)
			}
			for w, held := range m.workers {
				if got := r.Blocks(w); got != len(held) {
					t.Fatalf("%v holds %d blocks, want %d", w, got, len(held))
				}
			}
			for range 3 {
				local := locals.Draw(t, "query")
				if got, want := r.Match(local, len(local), kv.AllParts, nil), m.match(local); !slices.Equal(got, want) {
					t.Fatalf("match of %d: %v, want %v", local, got, want)
				}
			}
		},
	})
}

// Nodes returns how many distinct prefixes the index has nodes for, among them
// those kept for their descendants only and those of cleared workers that are
// not swept yet.
func (r *Tree) Nodes() int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.nodes.used - 1
}

func TestDumpOfAWorkerIsOfTheMomentItWasAskedFor(t *testing.T) {
	x := newIndex(t)
	x.store(testkit.W0, 1, 2, 3)
	x.store(testkit.W1, 1, 2)
	before := x.DumpOf(testkit.W1)
	x.store(testkit.W1, 7, 8)
	x.clear(testkit.W1)
	for range 2 { // it may be read again
		blocks := slices.Collect(before)
		if len(blocks) != 2 || blocks[0].HasParent || blocks[0].Local != 1 || blocks[1].Local != 2 || blocks[1].Parent != blocks[0].Engine || !blocks[1].HasParent {
			t.Errorf("%+v", blocks)
		}
	}
	for range before {
		break
	}
	if blocks := slices.Collect(x.DumpOf(testkit.W1)); len(blocks) != 0 {
		t.Errorf("after it was cleared: %+v", blocks)
	}
	if blocks := slices.Collect(x.DumpOf(kv.WorkerKey{Worker: 99})); len(blocks) != 0 {
		t.Errorf("of an unknown worker: %+v", blocks)
	}
}

// dumpEntry is one block of an index dump.
type dumpEntry struct {
	Worker    kv.WorkerKey
	Parent    uint64
	HasParent bool
	Block     kv.StoredBlock
}

// dumped returns what DumpOf yields of all workers.
func dumped(r *Tree) (all []dumpEntry) {
	for _, w := range r.Workers() {
		for b := range r.DumpOf(w) {
			all = append(all, dumpEntry{w, b.Parent, b.HasParent, b.StoredBlock})
		}
	}
	return all
}
