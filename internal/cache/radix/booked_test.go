package radix

import (
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/testkit"
)

func TestABookHasWhatAnyWorkerHolds(t *testing.T) {
	book := summary.NewBook()
	x := index{NewTreeWithBook(book), t}
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

// BenchmarkBook measures what a book costs an index of 4,096 workers with 1 M blocks: B/block of
// memory, and ns/block for each that is stored or removed, in prompts of 16 blocks. After each
// 20,000 of these the book is published, as in each interval of a router with 100,000 a second;
// ms/publish is the part of that. Both are CPU time.
func BenchmarkBook(b *testing.B) {
	for _, name := range []string{"without", "with"} {
		b.Run(name, func(b *testing.B) {
			const workers, length, kept, interval = 4096, 16, 1_000_000 / 16, 20_000
			testkit.LiveHeap()
			before := testkit.LiveHeap()
			tree, book := NewTree(), summary.NewBook()
			if name == "with" {
				tree = NewTreeWithBook(book)
			}
			worker := func(prompt int) kv.WorkerKey { return kv.WorkerKey{Worker: uint64(prompt % workers)} }
			blocks, engine := make([]kv.StoredBlock, length), make([]uint64, length)
			next, published := 0, time.Duration(0)
			step := func() {
				for k := range length {
					id := uint64(next)*length + uint64(k) + 1
					blocks[k] = kv.StoredBlock{Engine: id, Local: id * 0x9e3779b97f4a7c15}
				}
				if err := tree.stored(worker(next), 0, false, nil, blocks); err != nil {
					b.Fatal(err)
				}
				if old := next - kept; old >= 0 {
					for k := range length { // the last one first
						engine[length-1-k] = uint64(old)*length + uint64(k) + 1
					}
					tree.removed(worker(old), engine)
				}
				if next++; next%(interval/(2*length)) == 0 && name == "with" {
					began := testkit.CPUTime()
					book.Publish(200 << 10)
					published += testkit.CPUTime() - began
				}
			}
			for range kept {
				step()
			}
			held := float64(testkit.LiveHeap()-before) / (kept * length)
			steps, began := 0, testkit.CPUTime()
			published = 0
			for b.Loop() {
				step()
				steps++
			}
			b.ReportMetric(held, "B/block")
			b.ReportMetric(float64((testkit.CPUTime()-began).Nanoseconds())/float64(steps*2*length), "ns/block")
			b.ReportMetric(published.Seconds()*1000/float64(max(1, steps*2*length/interval)), "ms/publish")
		})
	}
}
