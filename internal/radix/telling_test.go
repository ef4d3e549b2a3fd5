package radix

import (
	"testing"

	"kvrouter/internal/kv"
	"kvrouter/internal/summary"
	"kvrouter/internal/testkit"
)

func TestABookHasWhatAnyWorkerHolds(t *testing.T) {
	book := summary.NewBook()
	x := index{NewTellingTree(book), t}
	a, b := kv.WorkerKey{Worker: 1}, kv.WorkerKey{Worker: 2}
	sequence := kv.SequenceHashes(nil, []uint64{1, 2, 3})
	holds := func(want ...int) {
		t.Helper()
		for i, n := range want {
			if got := book.Holders(sequence[i]); got != n {
				t.Errorf("block %d has %d holders, want %d", i, got, n)
			}
		}
	}
	x.store(a, 1, 2, 3)
	x.store(b, 1, 2)
	holds(1, 1, 1)
	x.remove(a, testkit.Chain([]uint64{1, 2, 3})[2].Engine)
	holds(1, 1, 0)
	x.clear(a)
	holds(1, 1, 0)
	x.clear(b)
	for x.Tidy(1 << 10) {
	}
	x.checked()
	holds(0, 0, 0)
}
