package simulate

import (
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/radixtest"
	"kvrouter/internal/tools/engine"
)

// TestReplayInvariants takes the first 1,000 lines of a trace through the index:
// no worker stores a block that it has, none removes one that it has not, and
// when all that is left has been removed, nothing is left.
func TestReplayInvariants(t *testing.T) {
	s := simulation(loadTraces(t)["conversation"][:1000], "kv", 64)
	s.Engine.Blocks = 2048 // so that blocks are evicted too
	run := newSimulator(s, policytest.MustPolicy(t, "kv"))
	held := make([]map[uint64]bool, s.Workers)
	removed := 0
	for i := range run.workers {
		held[i] = map[uint64]bool{}
		run.workers[i].engine = engine.New(s.Engine, func(event engine.Event) {
			for _, b := range event.Blocks {
				if held[i][b.Engine] {
					t.Fatalf("worker %d stores block %x a second time", i, b.Engine)
				}
				held[i][b.Engine] = true
			}
			for _, h := range event.Removed {
				delete(held[i], h)
				removed++
			}
			run.cacheChanged(i, event)
		})
	}
	if err := run.loop(); err != nil { // as a removal of an unknown block does
		t.Fatal(err)
	}
	if removed == 0 {
		t.Error("nothing was evicted")
	}
	for i, blocks := range held {
		key := kv.WorkerKey{Worker: uint64(i)}
		if n := run.indexes[0].Blocks(key); n != len(blocks) {
			t.Errorf("worker %d: %d blocks in the index, %d in its cache", i, n, len(blocks))
		}
		left := make([]uint64, 0, len(blocks))
		for h := range blocks {
			left = append(left, h)
		}
		if unknown := radixtest.Remove(run.indexes[0], key, left); unknown > 0 {
			t.Errorf("worker %d: the index did not know %d blocks", i, unknown)
		}
	}
	if dump := radixtest.Contents(run.indexes[0]); len(dump) > 0 {
		t.Errorf("%d blocks are left in the index", len(dump))
	}
}
