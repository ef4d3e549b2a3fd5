// Package radixtest changes indexes in the tests of several packages; only tests import it.
package radixtest

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// Store stores blocks on the device.
func Store(x radix.Applier, w kv.WorkerKey, parent uint64, hasParent bool, blocks []kv.StoredBlock) error {
	_, err := x.Apply(w, &radix.Change{Kind: radix.Stored, Parent: parent, HasParent: hasParent, Blocks: blocks})
	return err
}

// StoreLower stores blocks in a lower tier.
func StoreLower(x radix.Applier, w kv.WorkerKey, at radix.LowerTier, parent uint64, hasParent bool, blocks []kv.StoredBlock) {
	_, _ = x.Apply(w, &radix.Change{Kind: radix.Stored, LowerTier: at, Parent: parent, HasParent: hasParent, Blocks: blocks}) // cannot fail
}

// Remove removes blocks of the device's first group.
func Remove(x radix.Applier, w kv.WorkerKey, engine []uint64) (unknown int) {
	done, _ := x.Apply(w, &radix.Change{Kind: radix.Removed, Hashes: engine}) // cannot fail
	return done.Unknown
}

// Clear empties w.
func Clear(x radix.Applier, w kv.WorkerKey) {
	_, _ = x.Apply(w, &radix.Change{Kind: radix.Cleared}) // cannot fail
}

// Forget removes a worker.
func Forget(x radix.Applier, worker uint64) {
	_, _ = x.Apply(kv.WorkerKey{Worker: worker}, &radix.Change{Kind: radix.Forgotten}) // cannot fail
}

// SetLayout sets the KV-cache groups of w.
func SetLayout(x radix.Applier, w kv.WorkerKey, layout kv.Layout, block int) {
	_, _ = x.Apply(w, &radix.Change{Kind: radix.LayoutSet, Set: &radix.Setting{Layout: layout, BlockSize: block}}) // cannot fail
}

// ClearDevice empties the device of w.
func ClearDevice(x radix.Applier, w kv.WorkerKey) {
	_, _ = x.Apply(w, &radix.Change{Kind: radix.DeviceCleared}) // cannot fail
}

// Settle settles a doubt about the lower tiers of w.
func Settle(x radix.Applier, w kv.WorkerKey, doubt uint32, held bool) (settled bool) {
	done, _ := x.Apply(w, &radix.Change{Kind: radix.DoubtSettled, Set: &radix.Setting{Doubt: doubt, Held: held}}) // cannot fail
	return done.Settled
}

// EachKind returns changes of all kinds, in an order in which a rank can make them: each has an
// effect.
func EachKind() []radix.Change {
	lower := radix.LowerTier{Tier: kv.External, Shared: true, Store: "s", Partial: true}
	blocks := func(from, to uint64) (all []kv.StoredBlock) {
		for i := from; i < to; i++ {
			all = append(all, kv.StoredBlock{Engine: 100 + i, Local: i})
		}
		return all
	}
	layout := kv.Layout{Groups: []kv.CacheGroup{{Block: 4}, {Index: 1, Attention: kv.SlidingWindow, Window: 8, Block: 4}}}
	return []radix.Change{
		{Kind: radix.LayoutSet, Set: &radix.Setting{Layout: layout, BlockSize: 4}},
		{Kind: radix.LookaheadStored, Set: &radix.Setting{Lookahead: kv.Lookahead{Tokens: 2, Cut: 1}}},
		{Kind: radix.Stored, Blocks: blocks(0, 3)},
		{Kind: radix.Stored, Parent: 102, HasParent: true, Blocks: blocks(3, 5)},
		{Kind: radix.Stored, Parent: 104, HasParent: true, Skipped: []uint64{5, 6}, Blocks: blocks(7, 9)},
		{Kind: radix.Held, Group: 1, Hashes: []uint64{101, 102, 777}},
		{Kind: radix.Removed, Group: 1, Hashes: []uint64{101}},
		{Kind: radix.Removed, Hashes: []uint64{104}},
		{Kind: radix.LayoutSet, Set: &radix.Setting{BlockSize: 4}},
		{Kind: radix.Stored, Blocks: blocks(0, 3)},
		{Kind: radix.ChunkSet, Set: &radix.Setting{Chunk: 2}},
		{Kind: radix.Stored, LowerTier: lower, Parent: 102, HasParent: true, Blocks: blocks(3, 7)},
		{Kind: radix.Held, LowerTier: radix.LowerTier{Tier: kv.Host, Again: true}, Hashes: []uint64{100, 101, 102, 103, 555}},
		{Kind: radix.Removed, LowerTier: lower, Hashes: []uint64{106}},
		{Kind: radix.DeviceCleared},
		{Kind: radix.DoubtSettled, Set: &radix.Setting{Doubt: 1, Held: true}},
		{Kind: radix.Stored, Blocks: blocks(0, 3)},
		{Kind: radix.DeviceCleared, Host: true},
		{Kind: radix.LowerRestored, Set: &radix.Setting{Chunk: 3, Doubtful: true, Stores: []string{"t"}}},
		{Kind: radix.Cleared},
		{Kind: radix.Stored, Blocks: blocks(0, 2)},
		{Kind: radix.Forgotten},
	}
}

// PassesEachKind checks that an empty index becomes by each kind of change what a Tree becomes.
func PassesEachKind(t *testing.T, index radix.Index) {
	t.Helper()
	tree, w := radix.NewTree(), kv.WorkerKey{Worker: 3, Rank: 1}
	missing := map[radix.Kind]bool{}
	for kind := radix.Stored; kind < radix.KindsEnd; kind++ {
		missing[kind] = true
	}
	for i, c := range EachKind() {
		delete(missing, c.Kind)
		before, copied := Contents(tree), c.Clone()
		want, wantErr := tree.Apply(w, &copied)
		got, err := index.Apply(w, &c)
		if got != want || err != nil || wantErr != nil {
			t.Errorf("change %d of kind %d: %+v, %v; want %+v, %v", i, c.Kind, got, err, want, wantErr)
		}
		after := Contents(tree)
		if slices.Equal(before, after) {
			t.Errorf("change %d of kind %d has no effect", i, c.Kind)
		}
		if diff := cmp.Diff(after, Contents(index)) + cmp.Diff(tree.Workers(), index.Workers()); diff != "" {
			t.Errorf("contents and workers after change %d of kind %d (-want +got):\n%s", i, c.Kind, diff)
		}
	}
	if len(missing) > 0 {
		t.Errorf("there is no change of the kinds %v", missing)
	}
}

// Contents returns all that an index holds as sorted lines, none of a rank that holds nothing.
func Contents(x radix.Reader) (lines []string) {
	for _, l := range x.Lookaheads() {
		lines = append(lines, fmt.Sprintf("%+v", l))
	}
	for _, w := range x.Workers() {
		if x.AllBlocks(w) == 0 && len(x.LayoutOf(w).Groups) == 0 && x.LowerOf(w) == (radix.LowerState{}) {
			continue
		}
		lines = append(lines, fmt.Sprintf("%v layout %v, %d blocks, lower tiers %+v", w, x.LayoutOf(w), x.AllBlocks(w), x.LowerOf(w)))
		for b := range x.DumpOf(w) {
			lines = append(lines, fmt.Sprintf("%v %+v", w, b))
		}
		for _, b := range x.HeldOf(w) {
			lines = append(lines, fmt.Sprintf("%v %+v", w, b))
		}
		lower := x.DumpLowerOf(w)
		lines = append(lines, fmt.Sprintf("%v stores %q", w, lower.Stores))
		if !lower.Empty() {
			for b := range lower.Blocks {
				lines = append(lines, fmt.Sprintf("%v %+v", w, b))
			}
		}
	}
	slices.Sort(lines)
	return lines
}
