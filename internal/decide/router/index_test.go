package router

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// indexerCase is one of the cases that Dynamo's indexers are tested with, by its
// name there.
type indexerCase struct {
	name string
	run  func(t *testing.T, x radix.Index)
}

// TestIndexerCases runs Dynamo's cases on every index that takes events. Left
// out are: idempotent shutdown, and errors when off-line (an index is no task of
// its own: nothing has to be ended or can be away); a hash-length mismatch (an
// index makes the sequence hashes itself); the rebuilding of a heap of timers (a
// list in the order of use serves for them); start positions in a dump (ours
// names parents). Metric counters are tested with the events, approximate
// indexes in package radix.
func TestIndexerCases(t *testing.T) {
	predictions := testkit.Defaults[IndexSettings]()
	predictions.RouterPredictedTTLSecs = 5
	for kind, config := range map[string]IndexSettings{"exact": testkit.Defaults[IndexSettings](), "exact with predictions": predictions} {
		for _, c := range indexerCases() {
			t.Run(kind+"/"+c.name, func(t *testing.T) {
				x, _ := NewIndex(config, "standalone", testkit.Defaults[policy.Settings](), testkit.BlockSize, time.Now)
				c.run(t, x)
			})
		}
	}
}

// TestATimeToLiveThatIsGivenHoldsForWorkersOfKnownSize: it did nothing there.
func TestATimeToLiveThatIsGivenHoldsForWorkersOfKnownSize(t *testing.T) {
	second := 1.0
	for _, test := range []struct {
		name         string
		ttl          *float64
		after        time.Duration
		sized, other int // blocks that count as cached
	}{
		{"given", &second, time.Second - 1, 6, 6},
		{"given and over", &second, time.Second, 0, 0},
		{"not given", nil, 2*time.Minute - 1, 6, 6},
		{"not given and over", nil, 2 * time.Minute, 6, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			clock := time.Unix(1000, 0)
			config := testkit.Defaults[IndexSettings]()
			config.NoKVEvents, config.RouterTTLSecs = true, test.ttl
			x, routed := NewIndex(config, "kv", testkit.Defaults[policy.Settings](), testkit.BlockSize, func() time.Time { return clock })
			routed.SetCapacity(testkit.W0, 100)
			p := testkit.Prompt(1, 6)
			routed.Routed(testkit.W0, p).End(0, -1)
			routed.Routed(testkit.W1, p).End(0, -1)
			clock = clock.Add(test.after)
			var want []kv.Match
			for w, blocks := range []int{test.sized, test.other} {
				if blocks > 0 {
					want = append(want, kv.Match{Worker: kv.WorkerKey{Worker: uint64(w)}, Blocks: blocks})
				}
			}
			matches(t, x, p, want...)
		})
	}
}

func TestATimeToLiveWithoutEffectIsRefused(t *testing.T) {
	for _, test := range []struct {
		name     string
		settings IndexSettings
		policies []string
		says     string // empty: it is taken
	}{
		{"with events", IndexSettings{}, []string{"work"}, ""},
		{"with trees", IndexSettings{NoKVEvents: true}, []string{"variance", "cache-threshold"}, "--max-tree-size"},
		{"with trees for one of two policies", IndexSettings{NoKVEvents: true}, []string{"variance", "kv"}, ""},
		{"with a guess", IndexSettings{NoKVEvents: true}, []string{"kv"}, ""},
	} {
		ttl := 60.0
		c := testkit.Defaults[IndexSettings]()
		c.NoKVEvents, c.RouterTTLSecs = test.settings.NoKVEvents, &ttl
		err := c.Validate(test.policies...)
		if test.says == "" && err != nil || test.says != "" && (err == nil || !strings.Contains(err.Error(), "--router-ttl-secs") || !strings.Contains(err.Error(), test.says)) {
			t.Errorf("%s: %v, want an error about %q", test.name, err, test.says)
		}
	}
}

func indexerCases() []indexerCase {
	var cases []indexerCase
	add := func(name string, run func(t *testing.T, x radix.Index)) {
		cases = append(cases, indexerCase{name, run})
	}
	p := testkit.Prompt(1, 12)
	rank1 := kv.WorkerKey{Worker: 0, Rank: 1}

	add("store and match", func(t *testing.T, x radix.Index) {
		stores(t, x, testkit.W0, p)
		matches(t, x, p, kv.Match{Worker: testkit.W0, Blocks: 12})
	})
	add("partial match", func(t *testing.T, x radix.Index) {
		stores(t, x, testkit.W0, p[:5])
		matches(t, x, p, kv.Match{Worker: testkit.W0, Blocks: 5})
	})
	add("shared prefix, then divergence", func(t *testing.T, x radix.Index) {
		q := testkit.Diverging(p, 7, 2)
		stores(t, x, testkit.W0, p)
		stores(t, x, testkit.W1, q)
		matches(t, x, p, kv.Match{Worker: testkit.W0, Blocks: 12}, kv.Match{Worker: testkit.W1, Blocks: 7})
		matches(t, x, q, kv.Match{Worker: testkit.W0, Blocks: 7}, kv.Match{Worker: testkit.W1, Blocks: 12})
	})
	add("remove", func(t *testing.T, x radix.Index) {
		stores(t, x, testkit.W0, p)
		radixtest.Remove(x, testkit.W0, testkit.EngineHashes(p)[8:])
		matches(t, x, p, kv.Match{Worker: testkit.W0, Blocks: 8})
	})
	add("remove_worker", func(t *testing.T, x radix.Index) {
		stores(t, x, testkit.W0, p)
		stores(t, x, rank1, p)
		stores(t, x, testkit.W1, p)
		radixtest.Forget(x, 0)
		matches(t, x, p, kv.Match{Worker: testkit.W1, Blocks: 12})
	})
	add("dump, then restore", func(t *testing.T, x radix.Index) {
		stores(t, x, testkit.W0, p)
		stores(t, x, testkit.W0, testkit.Diverging(p, 4, 2))
		stores(t, x, testkit.W1, p[:3])
		other := radix.NewTree()
		for _, w := range x.Workers() {
			for b := range x.DumpOf(w) {
				if err := radixtest.Store(other, w, b.Parent, b.HasParent, []kv.StoredBlock{b.StoredBlock}); err != nil {
					t.Error(err)
				}
			}
		}
		for _, asked := range [][]uint64{p, testkit.Diverging(p, 4, 2), testkit.Diverging(p, 4, 3), p[:2]} {
			matches(t, other, asked, x.Match(asked, len(asked), kv.AllParts, nil)...)
		}
	})
	add("clear", func(t *testing.T, x radix.Index) {
		stores(t, x, testkit.W0, p)
		stores(t, x, rank1, p)
		radixtest.Clear(x, testkit.W0)
		matches(t, x, p, kv.Match{Worker: rank1, Blocks: 12})
		stores(t, x, testkit.W0, p[:2])
		matches(t, x, p, kv.Match{Worker: testkit.W0, Blocks: 2}, kv.Match{Worker: rank1, Blocks: 12})
	})
	add("empty query, and a miss", func(t *testing.T, x radix.Index) {
		stores(t, x, testkit.W0, p)
		matches(t, x, nil)
		matches(t, x, testkit.Prompt(9, 12))
	})
	add("parent chains", func(t *testing.T, x radix.Index) {
		blocks := testkit.Chain(p)
		stores(t, x, testkit.W0, p[:4])
		if err := radixtest.Store(x, testkit.W0, blocks[3].Engine, true, blocks[4:]); err != nil {
			t.Fatal(err)
		}
		matches(t, x, p, kv.Match{Worker: testkit.W0, Blocks: 12})
	})
	add("several dp ranks", func(t *testing.T, x radix.Index) {
		stores(t, x, testkit.W0, p[:2])
		stores(t, x, rank1, p[:9])
		matches(t, x, p, kv.Match{Worker: testkit.W0, Blocks: 2}, kv.Match{Worker: rank1, Blocks: 9})
	})
	add("base model, adapters and cache namespaces", func(t *testing.T, x radix.Index) {
		tokens := testkit.Tokens(1, 40)
		for i, owner := range [][2]string{{"", ""}, {"a", ""}, {"b", ""}, {"", "salt"}, {"a", "salt"}, {"", "other"}} {
			local := kv.HashBlocks(nil, tokens, 4, owner[0], owner[1])
			matches(t, x, local)
			stores(t, x, kv.WorkerKey{Worker: uint64(i)}, local)
			matches(t, x, local, kv.Match{Worker: kv.WorkerKey{Worker: uint64(i)}, Blocks: 10})
		}
	})
	add("79 of 100 removed from the tail", func(t *testing.T, x radix.Index) {
		long := testkit.Prompt(1, 100)
		stores(t, x, testkit.W0, long)
		last := testkit.EngineHashes(long)[21:]
		slices.Reverse(last)
		radixtest.Remove(x, testkit.W0, last)
		matches(t, x, long, kv.Match{Worker: testkit.W0, Blocks: 21})
	})
	for _, n := range []int{31, 32, 33, 63, 64, 65, 96} {
		add(fmt.Sprintf("length %d", n), func(t *testing.T, x radix.Index) {
			stores(t, x, testkit.W0, testkit.Prompt(1, n))
			matches(t, x, testkit.Prompt(1, n), kv.Match{Worker: testkit.W0, Blocks: n})
		})
	}
	for _, at := range []int{31, 32, 33, 63, 64, 65, 95, 96, 97} {
		add(fmt.Sprintf("divergence at %d", at), func(t *testing.T, x radix.Index) {
			long := testkit.Prompt(1, 128)
			stores(t, x, testkit.W0, long)
			matches(t, x, testkit.Diverging(long, at, 2), kv.Match{Worker: testkit.W0, Blocks: at})
		})
	}
	add("20 x 10 deep chain", func(t *testing.T, x radix.Index) {
		long := testkit.Prompt(1, 200)
		blocks := testkit.Chain(long)
		for i := 0; i < 200; i += 10 {
			parent := uint64(0)
			if i > 0 {
				parent = blocks[i-1].Engine
			}
			if err := radixtest.Store(x, testkit.W0, parent, i > 0, blocks[i:i+10]); err != nil {
				t.Fatal(err)
			}
			matches(t, x, long, kv.Match{Worker: testkit.W0, Blocks: i + 10})
		}
	})
	add("ParentBlockNotFound", func(t *testing.T, x radix.Index) {
		stores(t, x, testkit.W1, p)
		if err := radixtest.Store(x, testkit.W0, testkit.EngineHashes(p)[3], true, testkit.Chain(p)[4:]); !errors.Is(err, radix.ErrParentUnknown) {
			t.Error(err)
		}
		matches(t, x, p, kv.Match{Worker: testkit.W1, Blocks: 12})
	})
	add("BlockNotFound", func(t *testing.T, x radix.Index) {
		stores(t, x, testkit.W0, p)
		if unknown := radixtest.Remove(x, testkit.W0, append([]uint64{4711}, testkit.EngineHashes(p)[6:]...)); unknown != 1 {
			t.Errorf("%d unknown blocks", unknown)
		}
		matches(t, x, p, kv.Match{Worker: testkit.W0, Blocks: 6})
	})
	add("InvalidBlockSequence", func(t *testing.T, x radix.Index) {
		stores(t, x, testkit.W0, p[:1])
		block := testkit.Chain(p)[0]
		if err := radixtest.Store(x, testkit.W0, block.Engine, true, []kv.StoredBlock{block}); !errors.Is(err, radix.ErrSelfParent) {
			t.Error(err)
		}
	})
	add("size accounting", func(t *testing.T, x radix.Index) {
		stores(t, x, testkit.W0, p)
		stores(t, x, testkit.W0, testkit.Diverging(p, 4, 2))
		radixtest.Remove(x, testkit.W0, testkit.EngineHashes(p)[10:])
		if n := x.Blocks(testkit.W0); n != 12+8-2 {
			t.Errorf("%d blocks", n)
		}
	})
	return cases
}

func stores(t *testing.T, x radix.Index, w kv.WorkerKey, local []uint64) {
	t.Helper()
	if err := radixtest.Store(x, w, 0, false, testkit.Chain(local)); err != nil {
		t.Fatal(err)
	}
}

func matches(t testing.TB, x radix.Index, local []uint64, want ...kv.Match) {
	t.Helper()
	if got := x.Match(local, len(local), kv.AllParts, nil); !slices.Equal(got, want) {
		t.Fatalf("match of %d blocks: %v, want %v", len(local), got, want)
	}
}
