package main

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
)

// indexerCase is one of the cases that Dynamo's indexers are tested with, by its
// name there.
type indexerCase struct {
	name string
	run  func(t *testing.T, x Index)
}

// TestIndexerCases runs Dynamo's cases on every index that takes events. Left
// out are: idempotent shutdown, and errors when off-line (an index is no task of
// its own: nothing has to be ended or can be away); a hash-length mismatch (an
// index makes the sequence hashes itself); the rebuilding of a heap of timers (a
// list in the order of use serves for them); start positions in a dump (ours
// names parents). Metric counters are tested with the events, approximate
// indexes in approx_test.go.
func TestIndexerCases(t *testing.T) {
	predictions := DefaultIndexConfig()
	predictions.RouterPredictedTTLSecs = 5
	for kind, config := range map[string]IndexConfig{"exact": DefaultIndexConfig(), "exact with predictions": predictions} {
		for _, c := range indexerCases() {
			t.Run(kind+"/"+c.name, func(t *testing.T) {
				c.run(t, NewIndex(config, "standalone", DefaultPolicyKnobs(), testBlock, time.Now))
			})
		}
	}
}

func indexerCases() []indexerCase {
	var cases []indexerCase
	add := func(name string, run func(t *testing.T, x Index)) {
		cases = append(cases, indexerCase{name, run})
	}
	p := prompt(1, 12)
	rank1 := WorkerKey{Worker: 0, Rank: 1}

	add("store and match", func(t *testing.T, x Index) {
		stores(t, x, w0, p)
		matches(t, x, p, Match{w0, 12})
	})
	add("partial match", func(t *testing.T, x Index) {
		stores(t, x, w0, p[:5])
		matches(t, x, p, Match{w0, 5})
	})
	add("shared prefix, then divergence", func(t *testing.T, x Index) {
		q := diverging(p, 7, 2)
		stores(t, x, w0, p)
		stores(t, x, w1, q)
		matches(t, x, p, Match{w0, 12}, Match{w1, 7})
		matches(t, x, q, Match{w0, 7}, Match{w1, 12})
	})
	add("remove", func(t *testing.T, x Index) {
		stores(t, x, w0, p)
		x.Remove(w0, engineHashes(p)[8:])
		matches(t, x, p, Match{w0, 8})
	})
	add("remove_worker", func(t *testing.T, x Index) {
		stores(t, x, w0, p)
		stores(t, x, rank1, p)
		stores(t, x, w1, p)
		x.Forget(0)
		matches(t, x, p, Match{w1, 12})
	})
	add("dump, then restore", func(t *testing.T, x Index) {
		stores(t, x, w0, p)
		stores(t, x, w0, diverging(p, 4, 2))
		stores(t, x, w1, p[:3])
		other := NewRadix()
		x.Dump(func(w WorkerKey, parent uint64, hasParent bool, block StoredBlock) bool {
			if err := other.Store(w, parent, hasParent, []StoredBlock{block}); err != nil {
				t.Error(err)
			}
			return true
		})
		for _, asked := range [][]uint64{p, diverging(p, 4, 2), diverging(p, 4, 3), p[:2]} {
			matches(t, other, asked, x.Match(asked, nil)...)
		}
	})
	add("clear", func(t *testing.T, x Index) {
		stores(t, x, w0, p)
		stores(t, x, rank1, p)
		x.Clear(w0)
		matches(t, x, p, Match{rank1, 12})
		stores(t, x, w0, p[:2])
		matches(t, x, p, Match{w0, 2}, Match{rank1, 12})
	})
	add("empty query, and a miss", func(t *testing.T, x Index) {
		stores(t, x, w0, p)
		matches(t, x, nil)
		matches(t, x, prompt(9, 12))
	})
	add("parent chains", func(t *testing.T, x Index) {
		blocks := chain(p)
		stores(t, x, w0, p[:4])
		if err := x.Store(w0, blocks[3].Engine, true, blocks[4:]); err != nil {
			t.Fatal(err)
		}
		matches(t, x, p, Match{w0, 12})
	})
	add("several dp ranks", func(t *testing.T, x Index) {
		stores(t, x, w0, p[:2])
		stores(t, x, rank1, p[:9])
		matches(t, x, p, Match{w0, 2}, Match{rank1, 9})
	})
	add("base model, adapters and cache namespaces", func(t *testing.T, x Index) {
		tokens := count(1, 40)
		for i, owner := range [][2]string{{"", ""}, {"a", ""}, {"b", ""}, {"", "salt"}, {"a", "salt"}, {"", "other"}} {
			local := HashBlocks(nil, tokens, 4, owner[0], owner[1])
			matches(t, x, local)
			stores(t, x, WorkerKey{Worker: uint64(i)}, local)
			matches(t, x, local, Match{WorkerKey{Worker: uint64(i)}, 10})
		}
	})
	add("79 of 100 removed from the tail", func(t *testing.T, x Index) {
		long := prompt(1, 100)
		stores(t, x, w0, long)
		last := engineHashes(long)[21:]
		slices.Reverse(last)
		x.Remove(w0, last)
		matches(t, x, long, Match{w0, 21})
	})
	for _, n := range []int{31, 32, 33, 63, 64, 65, 96} {
		add(fmt.Sprintf("length %d", n), func(t *testing.T, x Index) {
			stores(t, x, w0, prompt(1, n))
			matches(t, x, prompt(1, n), Match{w0, n})
		})
	}
	for _, at := range []int{31, 32, 33, 63, 64, 65, 95, 96, 97} {
		add(fmt.Sprintf("divergence at %d", at), func(t *testing.T, x Index) {
			long := prompt(1, 128)
			stores(t, x, w0, long)
			matches(t, x, diverging(long, at, 2), Match{w0, at})
		})
	}
	add("20 x 10 deep chain", func(t *testing.T, x Index) {
		long := prompt(1, 200)
		blocks := chain(long)
		for i := 0; i < 200; i += 10 {
			parent := uint64(0)
			if i > 0 {
				parent = blocks[i-1].Engine
			}
			if err := x.Store(w0, parent, i > 0, blocks[i:i+10]); err != nil {
				t.Fatal(err)
			}
			matches(t, x, long, Match{w0, i + 10})
		}
	})
	add("ParentBlockNotFound", func(t *testing.T, x Index) {
		stores(t, x, w1, p)
		if err := x.Store(w0, engineHashes(p)[3], true, chain(p)[4:]); !errors.Is(err, ErrParentUnknown) {
			t.Error(err)
		}
		matches(t, x, p, Match{w1, 12})
	})
	add("BlockNotFound", func(t *testing.T, x Index) {
		stores(t, x, w0, p)
		if unknown := x.Remove(w0, append([]uint64{4711}, engineHashes(p)[6:]...)); unknown != 1 {
			t.Errorf("%d unknown blocks", unknown)
		}
		matches(t, x, p, Match{w0, 6})
	})
	add("InvalidBlockSequence", func(t *testing.T, x Index) {
		stores(t, x, w0, p[:1])
		block := chain(p)[0]
		if err := x.Store(w0, block.Engine, true, []StoredBlock{block}); !errors.Is(err, ErrSelfParent) {
			t.Error(err)
		}
	})
	add("size accounting", func(t *testing.T, x Index) {
		stores(t, x, w0, p)
		stores(t, x, w0, diverging(p, 4, 2))
		x.Remove(w0, engineHashes(p)[10:])
		if n := x.Blocks(w0); n != 12+8-2 {
			t.Errorf("%d blocks", n)
		}
	})
	return cases
}

func stores(t *testing.T, x Index, w WorkerKey, local []uint64) {
	t.Helper()
	if err := x.Store(w, 0, false, chain(local)); err != nil {
		t.Fatal(err)
	}
}

func matches(t testing.TB, x Index, local []uint64, want ...Match) {
	t.Helper()
	if got := x.Match(local, nil); !slices.Equal(got, want) {
		t.Fatalf("match of %d blocks: %v, want %v", len(local), got, want)
	}
}
