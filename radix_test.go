package main

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
)

var (
	w0 = WorkerKey{Worker: 0}
	w1 = WorkerKey{Worker: 1}
	w2 = WorkerKey{Worker: 2}
)

// index is a Radix whose invariants are checked after every mutation.
type index struct {
	*Radix
	t testing.TB
}

func newIndex(t testing.TB) index { return index{NewRadix(), t} }

func (x index) checked() {
	x.t.Helper()
	if err := x.check(); err != nil {
		x.t.Fatal(err)
	}
}

// store stores the whole prompt and fails the test if that fails.
func (x index) store(w WorkerKey, local ...uint64) {
	x.t.Helper()
	if err := x.Store(w, 0, false, chain(local)); err != nil {
		x.t.Fatal(err)
	}
	x.checked()
}

func (x index) storeErr(w WorkerKey, parent uint64, hasParent bool, blocks []StoredBlock) error {
	x.t.Helper()
	err := x.Store(w, parent, hasParent, blocks)
	x.checked()
	return err
}

func (x index) remove(w WorkerKey, engine ...uint64) (unknown int) {
	x.t.Helper()
	unknown = x.Remove(w, engine)
	x.checked()
	return unknown
}

func (x index) clear(w WorkerKey) {
	x.t.Helper()
	x.Clear(w)
	x.checked()
}

func (x index) forget(worker uint64) {
	x.t.Helper()
	x.Forget(worker)
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
func (x index) wants(local []uint64, want ...Match) {
	x.t.Helper()
	if got := x.Match(local, nil); !slices.Equal(got, want) {
		x.t.Fatalf("match of %d blocks: %v, want %v", len(local), got, want)
	}
}

// wantsCounts fails the test unless w holds so many blocks and the tree has so
// many nodes.
func (x index) wantsCounts(w WorkerKey, blocks, nodes int) {
	x.t.Helper()
	if b, n := x.Blocks(w), x.Nodes(); b != blocks || n != nodes {
		x.t.Fatalf("%v holds %d blocks of %d nodes, want %d of %d", w, b, n, blocks, nodes)
	}
}

// engineHashes are what a vLLM-like engine calls these blocks: hashes of whole
// prefixes.
func engineHashes(local []uint64) []uint64 {
	hashes := SequenceHashes(nil, local)
	for i := range hashes {
		hashes[i] ^= 0xfeed
	}
	return hashes
}

// chain is the store event for a whole prompt.
func chain(local []uint64) []StoredBlock {
	blocks := make([]StoredBlock, len(local))
	for i, e := range engineHashes(local) {
		blocks[i] = StoredBlock{Engine: e, Local: local[i]}
	}
	return blocks
}

// prompt returns n local hashes that differ from those of other seeds.
func prompt(seed uint64, n int) []uint64 {
	rng := rand.New(rand.NewPCG(seed, 0))
	local := make([]uint64, n)
	for i := range local {
		local[i] = rng.Uint64()
	}
	return local
}

// diverging returns p with all blocks from position at on replaced.
func diverging(p []uint64, at int, seed uint64) []uint64 {
	return append(slices.Clone(p[:at]), prompt(seed, len(p)-at)...)
}

// dumpEntry is what Dump yields at once.
type dumpEntry struct {
	Worker    WorkerKey
	Parent    uint64
	HasParent bool
	Block     StoredBlock
}

func dumped(r Index) []dumpEntry {
	var all []dumpEntry
	r.Dump(func(w WorkerKey, parent uint64, hasParent bool, block StoredBlock) bool {
		all = append(all, dumpEntry{w, parent, hasParent, block})
		return true
	})
	return all
}

// restored returns an index made of r's dump.
func restored(t testing.TB, r *Radix) index {
	x := newIndex(t)
	for _, e := range dumped(r) {
		if err := x.Store(e.Worker, e.Parent, e.HasParent, []StoredBlock{e.Block}); err != nil {
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
			x.store(w0, p...)
			if test.want == 0 {
				x.wants(test.query)
			} else {
				x.wants(test.query, Match{w0, test.want})
			}
		})
	}
}

func TestZeroIsAHashLikeOthers(t *testing.T) {
	x := newIndex(t)
	if err := x.storeErr(w0, 0, false, []StoredBlock{{Engine: 0, Local: 0}}); err != nil {
		t.Fatal(err)
	}
	if err := x.storeErr(w0, 0, true, []StoredBlock{{Engine: 1, Local: 0}}); err != nil {
		t.Fatal(err)
	}
	x.wants([]uint64{0, 0, 0}, Match{w0, 2})
	if unknown := x.remove(w0, 0, 1); unknown != 0 {
		t.Errorf("%d unknown", unknown)
	}
	x.wantsCounts(w0, 0, 0)
}

func TestMatchesAreAppendedInOrderOfWorkerAndRank(t *testing.T) {
	x := newIndex(t)
	keys := []WorkerKey{{5, 1}, {0, 0}, {5, 0}, {300, 0}, {2, 7}}
	for i, w := range keys {
		x.store(w, prompt(1, i+1)...)
	}
	kept := Match{WorkerKey{9, 9}, 99}
	got := x.Match(prompt(1, 5), []Match{kept})
	want := []Match{kept, {keys[1], 2}, {keys[4], 5}, {keys[2], 3}, {keys[0], 1}, {keys[3], 4}}
	if !slices.Equal(got, want) {
		t.Errorf("matches %v, want %v", got, want)
	}
	if got, want := x.Workers(), []WorkerKey{{0, 0}, {2, 7}, {5, 0}, {5, 1}, {300, 0}}; !slices.Equal(got, want) {
		t.Errorf("workers %v, want %v", got, want)
	}
}

func TestPromptsOfAllLengthsMatchExactly(t *testing.T) {
	for _, n := range []int{1, 31, 32, 33, 63, 64, 65, 96, 5000} {
		x := newIndex(t)
		p := prompt(1, n)
		x.store(w0, p...)
		x.wants(p, Match{w0, n})
		x.wants(append(slices.Clone(p), 1), Match{w0, n})
		if n > 1 {
			x.wants(p[:n-1], Match{w0, n - 1})
		}
		x.wantsCounts(w0, n, n)
	}
}

func TestPromptsThatDivergeMatchUpToThere(t *testing.T) {
	for _, at := range []int{1, 31, 32, 33, 63, 64, 65, 95, 96, 97} {
		x := newIndex(t)
		a := prompt(1, 128)
		b := diverging(a, at, 2)
		x.store(w0, a...)
		x.wants(b, Match{w0, at})
		x.store(w1, b...)
		x.wants(a, Match{w0, 128}, Match{w1, at})
		x.wants(b, Match{w0, at}, Match{w1, 128})
		x.wants(diverging(a, at, 3), Match{w0, at}, Match{w1, at})
		x.wantsCounts(w0, 128, 2*128-at)
	}
}

func TestManyWorkersHoldDifferentLengths(t *testing.T) {
	for _, workers := range []int{1, 63, 64, 65, 300} {
		x := newIndex(t)
		p := prompt(1, workers)
		var want []Match
		for i := range workers {
			w := WorkerKey{Worker: uint64(i / 3), Rank: uint32(i % 3)}
			if err := x.Store(w, 0, false, chain(p[:i+1])); err != nil {
				t.Fatal(err)
			}
			want = append(want, Match{w, i + 1})
		}
		x.checked()
		x.wants(p, want...)
		if sets := x.sets.len(); sets != workers {
			t.Errorf("%d sets for %d workers", sets, workers)
		}
	}
}

func TestOneSystemPromptWithThousandsOfFollowers(t *testing.T) {
	x := newIndex(t)
	for i := range 10_000 {
		if err := x.Store(w0, 0, false, chain([]uint64{1, 2, uint64(i + 10)})); err != nil {
			t.Fatal(err)
		}
	}
	x.checked()
	x.wantsCounts(w0, 10_002, 10_002)
	for i := range 10_000 {
		x.wants([]uint64{1, 2, uint64(i + 10)}, Match{w0, 3})
	}
	x.wants([]uint64{1, 2, 3}, Match{w0, 2})
	for i := range 10_000 {
		x.Remove(w0, engineHashes([]uint64{1, 2, uint64(i + 10)})[2:])
	}
	x.checked()
	x.wantsCounts(w0, 2, 2)
}

func TestChainsContinueAfterTheirParent(t *testing.T) {
	x := newIndex(t)
	p := prompt(1, 200)
	blocks := chain(p)
	// 20 steps of 10 blocks, each after the last one's end.
	for at := 0; at < len(p); at += 10 {
		var parent uint64
		if at > 0 {
			parent = blocks[at-1].Engine
		}
		if err := x.storeErr(w0, parent, at > 0, blocks[at:at+10]); err != nil {
			t.Fatal(err)
		}
		x.wants(p, Match{w0, at + 10})
	}
	// A second answer to the same turn branches off in the middle.
	other := diverging(p, 50, 2)
	if err := x.storeErr(w0, blocks[49].Engine, true, chain(other)[50:]); err != nil {
		t.Fatal(err)
	}
	x.wants(other, Match{w0, 200})
	x.wants(p, Match{w0, 200})
}

func TestUnknownParentStoresNothing(t *testing.T) {
	x := newIndex(t)
	p := prompt(1, 4)
	blocks := chain(p)
	if err := x.storeErr(w0, blocks[1].Engine, true, blocks[2:]); !errors.Is(err, ErrParentUnknown) {
		t.Fatalf("error %v, want %v", err, ErrParentUnknown)
	}
	if workers := x.Workers(); len(workers) != 0 {
		t.Errorf("workers %v", workers)
	}
	x.wants(p[2:])
	// Another worker's block is no parent either.
	x.store(w1, p[:2]...)
	x.store(w0, p[:1]...)
	if err := x.storeErr(w0, blocks[1].Engine, true, blocks[2:]); !errors.Is(err, ErrParentUnknown) {
		t.Fatalf("error %v, want %v", err, ErrParentUnknown)
	}
	x.wants(p, Match{w0, 1}, Match{w1, 2})
	// Nor is one that was removed, though its node remains for the other.
	x.remove(w0, blocks[0].Engine)
	if err := x.storeErr(w0, blocks[0].Engine, true, blocks[1:]); !errors.Is(err, ErrParentUnknown) {
		t.Fatalf("error %v, want %v", err, ErrParentUnknown)
	}
	x.wants(p, Match{w1, 2})
}

func TestBlockIsNeverItsOwnParent(t *testing.T) {
	x := newIndex(t)
	x.store(w0, 1, 2)
	last := engineHashes([]uint64{1, 2})[1]
	for name, store := range map[string]struct {
		hasParent bool
		blocks    []StoredBlock
	}{
		"after itself":            {true, []StoredBlock{{last, 3}}},
		"twice in a row":          {false, []StoredBlock{{7, 3}, {7, 4}}},
		"twice in a row, at last": {true, []StoredBlock{{7, 3}, {8, 4}, {8, 4}}},
	} {
		t.Run(name, func(t *testing.T) {
			if err := x.storeErr(w0, last, store.hasParent, store.blocks); !errors.Is(err, ErrSelfParent) {
				t.Fatalf("error %v, want %v", err, ErrSelfParent)
			}
			x.wantsCounts(w0, 2, 2)
			x.wants([]uint64{1, 2, 3}, Match{w0, 2})
		})
	}
	// Without a parent, its number is no parent.
	if err := x.storeErr(w0, 9, false, []StoredBlock{{9, 9}}); err != nil {
		t.Fatal(err)
	}
}

func TestStoreOfNothingMakesNoWorker(t *testing.T) {
	x := newIndex(t)
	if err := x.storeErr(w0, 0, false, nil); err != nil {
		t.Fatal(err)
	}
	if workers := x.Workers(); len(workers) != 0 {
		t.Errorf("workers %v", workers)
	}
}

func TestRemovedBlocksNoLongerMatch(t *testing.T) {
	x := newIndex(t)
	p := prompt(1, 100)
	e := engineHashes(p)
	x.store(w0, p...)
	x.store(w1, p...)
	slices.Reverse(e)
	// 79 of 100 go, the last first, as the engine evicts.
	if unknown := x.remove(w0, e[:79]...); unknown != 0 {
		t.Errorf("%d unknown", unknown)
	}
	x.wants(p, Match{w0, 21}, Match{w1, 100})
	x.wantsCounts(w0, 21, 100)
	x.remove(w1, e[:79]...)
	x.wants(p, Match{w0, 21}, Match{w1, 21})
	x.wantsCounts(w1, 21, 21)
	x.remove(w0, e[79:]...)
	x.remove(w1, e[79:]...)
	x.wants(p)
	x.wantsCounts(w0, 0, 0)
	if sets := x.sets.len(); sets != 0 {
		t.Errorf("%d sets in an empty index", sets)
	}
}

func TestUnknownRemovalsAreCountedAndTheRestApplied(t *testing.T) {
	x := newIndex(t)
	p := prompt(1, 4)
	e := engineHashes(p)
	if unknown := x.remove(w0, e...); unknown != 4 {
		t.Errorf("%d unknown of 4 for a worker never seen", unknown)
	}
	x.store(w0, p...)
	x.store(w1, p...)
	if unknown := x.remove(w0, 1, e[3], 2, e[2], e[3]); unknown != 3 {
		t.Errorf("%d unknown, want 3", unknown)
	}
	x.wants(p, Match{w0, 2}, Match{w1, 4})
}

func TestHoleHidesWhatFollowsUntilItIsStoredAgain(t *testing.T) {
	x := newIndex(t)
	p := prompt(1, 6)
	blocks := chain(p)
	x.store(w0, p...)
	x.store(w1, p[:3]...)
	x.remove(w0, blocks[2].Engine)
	x.wants(p, Match{w0, 2}, Match{w1, 3})
	x.remove(w1, blocks[2].Engine)
	x.wants(p, Match{w0, 2}, Match{w1, 2})
	x.wantsCounts(w0, 5, 6)
	if err := x.storeErr(w0, blocks[1].Engine, true, blocks[2:3]); err != nil {
		t.Fatal(err)
	}
	x.wants(p, Match{w0, 6}, Match{w1, 2})
	// Without its first block nothing of the prompt can be used.
	x.remove(w0, blocks[0].Engine)
	x.wants(p, Match{w1, 2})
	// A hole goes with the last block behind it.
	x.remove(w1, blocks[0].Engine, blocks[1].Engine)
	x.wantsCounts(w0, 5, 6)
	x.remove(w0, blocks[5].Engine, blocks[4].Engine, blocks[1].Engine, blocks[2].Engine)
	x.wantsCounts(w0, 1, 4)
	x.remove(w0, blocks[3].Engine)
	x.wantsCounts(w0, 0, 0)
}

func TestEveryCopyMustGo(t *testing.T) {
	x := newIndex(t)
	p := prompt(1, 3)
	e := engineHashes(p)
	x.store(w0, p...)
	x.store(w0, p[:2]...)
	x.store(w0, p[:1]...)
	x.wantsCounts(w0, 3, 3)
	for _, step := range []struct {
		engine  uint64
		matches int
		unknown int
	}{
		{e[2], 2, 0}, {e[2], 2, 1}, {e[1], 2, 0}, {e[0], 2, 0}, {e[1], 1, 0}, {e[0], 1, 0}, {e[0], 0, 0}, {e[0], 0, 1},
	} {
		if unknown := x.remove(w0, step.engine); unknown != step.unknown {
			t.Errorf("%d unknown, want %d", unknown, step.unknown)
		}
		if step.matches == 0 {
			x.wants(p)
		} else {
			x.wants(p, Match{w0, step.matches})
		}
	}
	x.wantsCounts(w0, 0, 0)
	// A copy of another worker is another matter.
	x.store(w0, p...)
	x.store(w1, p...)
	x.remove(w0, e...)
	x.wants(p, Match{w1, 3})
}

func TestEngineHashMovesToTheNewestPlace(t *testing.T) {
	x := newIndex(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(x.storeErr(w0, 0, false, []StoredBlock{{10, 1}, {11, 2}}))
	must(x.storeErr(w0, 0, false, []StoredBlock{{10, 1}})) // a copy
	must(x.storeErr(w0, 0, false, []StoredBlock{{10, 5}}))
	x.wants([]uint64{1, 2})
	x.wants([]uint64{5}, Match{w0, 1})
	if unknown := x.remove(w0, 10, 10); unknown != 1 {
		t.Errorf("%d unknown, want 1: copies start again at the new place", unknown)
	}
	x.wants([]uint64{5})
	// Below itself, which leaves a hole at the top.
	must(x.storeErr(w0, 0, false, []StoredBlock{{20, 6}, {21, 7}, {20, 8}}))
	x.wants([]uint64{6, 7, 8})
	// Up again: what was below the old place may be freed on the way.
	must(x.storeErr(w0, 0, false, []StoredBlock{{20, 6}}))
	x.wants([]uint64{6, 7, 8}, Match{w0, 2})
	// The block that the parent hangs from moves away below it.
	must(x.storeErr(w0, 21, true, []StoredBlock{{22, 9}, {21, 9}, {23, 9}}))
	x.wants([]uint64{6, 7, 9, 9, 9}, Match{w0, 1})
	x.remove(w0, 11, 20, 21, 22, 23)
	x.wantsCounts(w0, 0, 0)
}

func TestNodeOfTwoEngineHashesIsHeldUntilTheLastGoes(t *testing.T) {
	x := newIndex(t)
	for _, engine := range []uint64{10, 11, 12} {
		if err := x.storeErr(w0, 0, false, []StoredBlock{{engine, 1}}); err != nil {
			t.Fatal(err)
		}
	}
	x.store(w1, 1)
	x.wantsCounts(w0, 3, 1)
	x.remove(w0, 11)
	x.wants([]uint64{1}, Match{w0, 1}, Match{w1, 1})
	x.remove(w0, 10)
	x.wants([]uint64{1}, Match{w0, 1}, Match{w1, 1})
	x.remove(w0, 12)
	x.wants([]uint64{1}, Match{w1, 1})
	// Clearing sweeps such a node once.
	for _, engine := range []uint64{10, 11, 12} {
		if err := x.storeErr(w0, 0, false, []StoredBlock{{engine, 2}}); err != nil {
			t.Fatal(err)
		}
	}
	x.clear(w0)
	x.store(w1, 3)
	x.swept()
	x.wantsCounts(w1, 2, 2)
}

func TestClearedWorkerHoldsNothingButStays(t *testing.T) {
	x := newIndex(t)
	p := prompt(1, 500)
	ranks := []WorkerKey{{1, 0}, {1, 1}}
	for _, w := range append(ranks, w0) {
		x.store(w, p...)
	}
	x.clear(w2)
	x.clear(ranks[0])
	x.wants(p, Match{w0, 500}, Match{ranks[1], 500})
	x.wantsCounts(ranks[0], 0, 500)
	if workers := x.Workers(); !slices.Equal(workers, []WorkerKey{w0, ranks[0], ranks[1]}) {
		t.Errorf("workers %v", workers)
	}
	if err := x.storeErr(ranks[0], engineHashes(p)[0], true, []StoredBlock{{1, 1}}); !errors.Is(err, ErrParentUnknown) {
		t.Errorf("store after a cleared parent: %v", err)
	}
	if unknown := x.remove(ranks[0], engineHashes(p)[:3]...); unknown != 3 {
		t.Errorf("%d of 3 cleared blocks unknown", unknown)
	}
	x.store(ranks[0], p[:7]...)
	x.wants(p, Match{w0, 500}, Match{ranks[0], 7}, Match{ranks[1], 500})
	for range 3 {
		for _, w := range append(ranks, w0) {
			x.clear(w)
		}
	}
	x.wants(p)
	x.swept()
	x.wantsCounts(w0, 0, 0)
	if len(x.vacant)+3 != len(x.slots) || x.sets.len() != 0 {
		t.Errorf("%d of %d slots vacant, %d sets", len(x.vacant), len(x.slots), x.sets.len())
	}
}

func TestForgottenWorkerVanishesWithAllRanks(t *testing.T) {
	x := newIndex(t)
	p := prompt(1, 10)
	for _, w := range []WorkerKey{{1, 0}, {1, 1}, {1, 7}, {2, 0}} {
		x.store(w, p...)
	}
	x.forget(1)
	x.forget(9)
	x.wants(p, Match{w2, 10})
	if workers := x.Workers(); !slices.Equal(workers, []WorkerKey{w2}) {
		t.Errorf("workers %v", workers)
	}
	for _, e := range dumped(x.Radix) {
		if e.Worker != w2 {
			t.Errorf("dump yields %+v", e)
		}
	}
	if b := x.Blocks(w1); b != 0 {
		t.Errorf("%d blocks", b)
	}
	x.forget(2)
	x.swept()
	x.wantsCounts(w2, 0, 0)
	x.store(w1, p...)
	x.wants(p, Match{w1, 10})
}

func TestClearedEntriesAreSweptTwiceAsFastAsNewOnesCome(t *testing.T) {
	const held = 20_000
	x := newIndex(t)
	x.store(w0, prompt(1, held)...)
	x.Clear(w0)
	nodes := x.Nodes()
	if nodes != held {
		t.Fatalf("%d nodes after the clear, want %d: it is to take no time", nodes, held)
	}
	const step = 100
	for stored := step; stored <= held/2; stored += step {
		if err := x.Store(w0, 0, false, chain(prompt(uint64(stored), step))); err != nil {
			t.Fatal(err)
		}
		retired := 0
		for _, slot := range x.retired {
			retired += x.slots[slot].blocks.len()
		}
		if want := max(0, held-2*stored); retired > want {
			t.Fatalf("%d blocks retired after %d stored, want at most %d", retired, stored, want)
		}
	}
	x.checked()
	x.wantsCounts(w0, held/2, held/2)
}

func TestMemoryIsReusedUnderChurn(t *testing.T) {
	x := newIndex(t)
	rng := rand.New(rand.NewPCG(1, 1))
	for round := range 2000 {
		w := WorkerKey{Worker: rng.Uint64N(4)}
		p := diverging(prompt(rng.Uint64N(20), 50), 10, uint64(round))
		if err := x.Store(w, 0, false, chain(p)); err != nil {
			t.Fatal(err)
		}
		switch rng.IntN(3) {
		case 0:
			x.Clear(w)
		case 1:
			x.Remove(w, engineHashes(p))
		}
		if x.Blocks(w) > 500 {
			x.Forget(w.Worker)
		}
	}
	x.checked()
	if len(x.slots) > 50 || len(x.sets.sets) > 200 || x.nodes.next > 8000 {
		t.Errorf("%d slots, %d sets, %d nodes for at most 2,000 live blocks", len(x.slots), len(x.sets.sets), x.nodes.next)
	}
	for worker := range uint64(4) {
		x.Forget(worker)
	}
	x.swept()
	if x.Nodes() != 0 || x.sets.len() != 0 || x.branches.len() != 0 {
		t.Errorf("%d nodes, %d sets, %d branches in an empty index", x.Nodes(), x.sets.len(), x.branches.len())
	}
}

func TestRestoredDumpIsEqual(t *testing.T) {
	x := newIndex(t)
	shared := prompt(1, 40)
	for i := range 30 {
		w := WorkerKey{Worker: uint64(i % 5), Rank: uint32(i % 2)}
		x.store(w, diverging(shared, i, uint64(i))...)
	}
	x.store(w1, shared...) // copies
	if err := x.storeErr(w1, 0, false, []StoredBlock{{77, shared[0]}, {78, shared[1]}}); err != nil {
		t.Fatal(err)
	}
	x.clear(w2)
	y := restored(t, x.Radix)
	asSet := func(r *Radix) map[dumpEntry]int {
		set := map[dumpEntry]int{}
		for _, e := range dumped(r) {
			set[e]++
		}
		return set
	}
	if !reflect.DeepEqual(asSet(x.Radix), asSet(y.Radix)) {
		t.Error("the dump of a restored dump differs")
	}
	for _, w := range x.Workers() {
		if x.Blocks(w) != y.Blocks(w) {
			t.Errorf("%v: %d blocks, restored %d", w, x.Blocks(w), y.Blocks(w))
		}
	}
	for i := range 30 {
		p := diverging(shared, i, uint64(i))
		y.wants(p, x.Match(p, nil)...)
	}
	// A copy that was dumped must be removed as often.
	y.remove(w1, engineHashes(shared)[0], 77)
	y.wants(shared[:1], x.Match(shared[:1], nil)...)
}

func TestDumpLeavesOutWhatIsBehindAHole(t *testing.T) {
	x := newIndex(t)
	p := prompt(1, 6)
	e := engineHashes(p)
	x.store(w0, p...)
	x.store(w1, p...)
	x.remove(w0, e[2])
	y := restored(t, x.Radix)
	y.wants(p, Match{w0, 2}, Match{w1, 6})
	y.wantsCounts(w0, 2, 6)
}

func TestDumpStopsWhenTold(t *testing.T) {
	x := newIndex(t)
	x.store(w0, prompt(1, 10)...)
	x.store(w1, prompt(1, 10)...)
	for _, limit := range []int{1, 5, 10, 15} {
		n := 0
		x.Dump(func(WorkerKey, uint64, bool, StoredBlock) bool { n++; return n < limit })
		if n != limit {
			t.Errorf("%d blocks yielded, want %d", n, limit)
		}
	}
}

func TestDumpMayStoreIntoTheSameIndex(t *testing.T) {
	x := newIndex(t)
	p := prompt(1, 10)
	x.store(w0, p...)
	x.Dump(func(w WorkerKey, parent uint64, hasParent bool, b StoredBlock) bool {
		w.Worker++
		return w.Worker > 1 || x.storeErr(w, parent, hasParent, []StoredBlock{b}) == nil
	})
	x.wants(p, Match{w0, 10}, Match{w1, 10})
}

func TestVeryDeepChain(t *testing.T) {
	const depth = 100_000
	x := newIndex(t)
	p := prompt(1, depth)
	x.store(w0, p...)
	x.wants(p, Match{w0, depth})
	y := restored(t, x.Radix)
	y.wants(p, Match{w0, depth})
	e := engineHashes(p)
	// First to last: every node waits for its last descendant, and one removal
	// then frees them all.
	y.Remove(w0, e[:depth-1])
	y.wantsCounts(w0, 1, depth)
	y.remove(w0, e[depth-1])
	y.wantsCounts(w0, 0, 0)
}

func TestMatchDoesNotAllocate(t *testing.T) {
	x := newIndex(t)
	p := prompt(1, 100)
	for i := range 100 {
		if err := x.Store(WorkerKey{Worker: uint64(i)}, 0, false, chain(p[:i+1])); err != nil {
			t.Fatal(err)
		}
	}
	dst := make([]Match, 0, 100)
	if n := testing.AllocsPerRun(1000, func() { dst = x.Match(p, dst[:0]) }); n >= 1 {
		t.Errorf("%v allocations a lookup", n)
	}
}

func TestReadersAndWritersAtOnce(t *testing.T) {
	x := newIndex(t)
	const rounds = 300
	always := prompt(0, 64)
	x.store(WorkerKey{Worker: 100}, always...)
	var writers, readers sync.WaitGroup
	for i := range uint64(4) {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(i, 2))
			w := WorkerKey{Worker: i % 3, Rank: uint32(i / 3)}
			for range rounds {
				p := diverging(always, rng.IntN(64), rng.Uint64N(5))
				switch rng.IntN(8) {
				case 0:
					x.Clear(w)
				case 1:
					x.Forget(w.Worker)
				case 2, 3:
					x.Remove(w, engineHashes(p))
				default:
					// The writer of the other rank may forget the worker between two parts.
					if err := x.Store(w, 0, false, chain(p)); err != nil && !errors.Is(err, ErrParentUnknown) {
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
			var dst []Match
			for {
				select {
				case <-done:
					return
				default:
				}
				dst = x.Match(always, dst[:0])
				if n := len(dst); n == 0 || dst[n-1] != (Match{WorkerKey{Worker: 100}, 64}) {
					t.Errorf("match %v does not end in the worker that always holds all", dst)
					return
				}
				if rng.IntN(50) == 0 {
					dumped(x.Radix)
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
	workers map[WorkerKey]map[uint64]*modelBlock
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

func (m *model) store(w WorkerKey, parent uint64, hasParent bool, blocks []StoredBlock) error {
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

func (m *model) remove(w WorkerKey, engine []uint64) (unknown int) {
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

func (m *model) match(local []uint64) []Match {
	var matches []Match
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
			matches = append(matches, Match{w, n})
		}
	}
	slices.SortFunc(matches, func(a, b Match) int { return a.Worker.Compare(b.Worker) })
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
	r := NewRadix()
	m := &model{workers: map[WorkerKey]map[uint64]*modelBlock{}}
	// Few workers make long stories, many make many sets.
	workers := rapid.Uint64Range(0, 2).Draw(t, "workers")
	ranks := rapid.Uint32Range(0, 1).Draw(t, "ranks")
	worker := rapid.Custom(func(t *rapid.T) WorkerKey {
		return WorkerKey{rapid.Uint64Range(0, workers).Draw(t, "worker"), rapid.Uint32Range(0, ranks).Draw(t, "rank")}
	})
	locals := rapid.SliceOfN(rapid.Uint64Range(0, 2), 1, 6)
	engineHash := rapid.Uint64Range(0, rapid.Uint64Range(1, 12).Draw(t, "engine hashes"))
	type event struct {
		w         WorkerKey
		parent    uint64
		hasParent bool
		blocks    []StoredBlock
	}
	var stored []event
	store := func(w WorkerKey, parent uint64, hasParent bool, blocks []StoredBlock) {
		stored = append(stored, event{w, parent, hasParent, blocks})
		want := m.store(w, parent, hasParent, blocks)
		if err := r.Store(w, parent, hasParent, blocks); !errors.Is(err, want) {
			t.Fatalf("store: error %v, want %v", err, want)
		}
	}
	heldBy := func(w WorkerKey) []uint64 { return slices.Sorted(maps.Keys(m.workers[w])) }
	t.Repeat(map[string]func(*rapid.T){
		"store prompt": func(t *rapid.T) {
			local := locals.Draw(t, "local")
			blocks := chain(local)
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
				store(w, 999, true, chain(local))
				return
			}
			parent := rapid.SampledFrom(held).Draw(t, "parent")
			blocks := make([]StoredBlock, len(local))
			previous := parent
			for i, l := range local {
				blocks[i] = StoredBlock{SequenceHashes(nil, []uint64{previous ^ 0xfeed, l})[1] ^ 0xfeed, l}
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
			if got, want := r.Remove(w, engine), m.remove(w, engine); got != want {
				t.Fatalf("remove of %d: %d unknown, want %d", engine, got, want)
			}
		},
		"clear": func(t *rapid.T) {
			w := worker.Draw(t, "w")
			r.Clear(w)
			if m.workers[w] != nil {
				m.workers[w] = map[uint64]*modelBlock{}
			}
		},
		"forget": func(t *rapid.T) {
			worker := worker.Draw(t, "w").Worker
			r.Forget(worker)
			maps.DeleteFunc(m.workers, func(w WorkerKey, _ map[uint64]*modelBlock) bool { return w.Worker == worker })
		},
		"sweep a little": func(t *rapid.T) { r.sweep(rapid.IntRange(1, 5).Draw(t, "limit")) },
		"sweep all": func(t *rapid.T) {
			r.sweep(1 << 30)
			if got, want := r.Nodes(), m.nodes(); got != want {
				t.Fatalf("%d nodes, want %d", got, want)
			}
		},
		"dump and restore": func(t *rapid.T) {
			copied := NewRadix()
			for _, e := range dumped(r) {
				if err := copied.Store(e.Worker, e.Parent, e.HasParent, []StoredBlock{e.Block}); err != nil {
					t.Fatal(err)
				}
			}
			if err := copied.check(); err != nil {
				t.Fatal(err)
			}
			for range 5 {
				local := locals.Draw(t, "query")
				if got, want := copied.Match(local, nil), m.match(local); !slices.Equal(got, want) {
					t.Fatalf("restored: match of %d: %v, want %v", local, got, want)
				}
			}
		},
		"": func(t *rapid.T) {
			if err := r.check(); err != nil {
				t.Fatal(err)
			}
			if got, want := r.Workers(), slices.SortedFunc(maps.Keys(m.workers), WorkerKey.Compare); !slices.Equal(got, want) {
				t.Fatalf("workers %v, want %v", got, want)
			}
			for w, held := range m.workers {
				if got := r.Blocks(w); got != len(held) {
					t.Fatalf("%v holds %d blocks, want %d", w, got, len(held))
				}
			}
			for range 3 {
				local := locals.Draw(t, "query")
				if got, want := r.Match(local, nil), m.match(local); !slices.Equal(got, want) {
					t.Fatalf("match of %d: %v, want %v", local, got, want)
				}
			}
		},
	})
}
