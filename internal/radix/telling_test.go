package radix

import (
	"slices"
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

// BenchmarkTelling stores and removes prompts of 16 blocks beside 500,000 blocks, with a book and
// without; ns/op is for 32 block operations.
func BenchmarkTelling(b *testing.B) {
	for name, tree := range map[string]*Tree{"without": NewTree(), "with": NewTellingTree(summary.NewBook())} {
		b.Run(name, func(b *testing.B) {
			const length, kept = 16, 500_000 / 16
			w := kv.WorkerKey{Worker: 1}
			prompt := func(i int) (blocks []kv.StoredBlock, engine []uint64) {
				for k := range length {
					id := uint64(i)*length + uint64(k) + 1
					blocks, engine = append(blocks, kv.StoredBlock{Engine: id, Local: id * 0x9e3779b97f4a7c15}), append(engine, id)
				}
				return blocks, engine
			}
			next := 0
			step := func() {
				blocks, _ := prompt(next)
				if err := tree.Store(w, 0, false, blocks); err != nil {
					b.Fatal(err)
				}
				if _, old := prompt(next - kept); next >= kept {
					slices.Reverse(old)
					tree.Remove(w, old)
				}
				next++
			}
			for range kept {
				step()
			}
			b.ResetTimer()
			for range b.N {
				step()
			}
		})
	}
}
