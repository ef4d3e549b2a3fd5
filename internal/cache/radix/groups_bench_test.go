package radix

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// benchLayouts are one group of full attention, and groups of Gemma 3: five with a
// window of 1,024 tokens to one of full attention.
var benchLayouts = map[string]string{
	"groups=1": "0:full_attention/16",
	"groups=6": "5:full_attention/16 0:sliding_window=1024/16 1:sliding_window=1024/16 2:sliding_window=1024/16 3:sliding_window=1024/16 4:sliding_window=1024/16",
}

// groupIndex returns an index of prompts of depth blocks, all held by each worker; other
// groups than the first hold the window at a prompt's end, and at its middle.
func groupIndex(b *testing.B, text string, depth, workers, prompts int) (*Tree, [][]uint64) {
	b.Helper()
	layout, err := kv.ParseLayout(text)
	if err != nil {
		b.Fatal(err)
	}
	r := NewTree()
	all := make([][]uint64, prompts)
	for w := range workers {
		r.layoutSet(kv.WorkerKey{Worker: uint64(w)}, layout, 16)
	}
	for i := range all {
		all[i] = testkit.Prompt(uint64(i), depth)
		chain := testkit.Chain(all[i])
		for w := range workers {
			key := kv.WorkerKey{Worker: uint64(w)}
			if err := r.stored(key, 0, false, nil, chain); err != nil {
				b.Fatal(err)
			}
			for g := 1; g < len(layout.Groups); g++ {
				for _, end := range []int{depth / 2, depth} {
					for _, block := range chain[max(0, end-64):end] {
						r.held(key, g, []uint64{block.Engine})
					}
				}
			}
		}
	}
	return r, all
}

// BenchmarkGroupMatch looks up prompts of 1,000 blocks that all workers hold.
func BenchmarkGroupMatch(b *testing.B) {
	const depth = 1000
	for _, name := range []string{"groups=1", "groups=6"} {
		for _, workers := range []int{1, 8, 64} {
			b.Run(fmt.Sprintf("%s/workers=%d", name, workers), func(b *testing.B) {
				r, prompts := groupIndex(b, benchLayouts[name], depth, workers, 200)
				rng := rand.New(rand.NewPCG(1, 1))
				dst := make([]kv.Match, 0, workers)
				b.ReportAllocs()
				b.ResetTimer()
				for b.Loop() {
					dst = r.Match(prompts[rng.IntN(len(prompts))], depth, 0, dst[:0])
				}
				b.StopTimer()
				if len(dst) != workers || dst[workers-1].Blocks != depth {
					b.Fatalf("%d matches, the last %+v", len(dst), dst[len(dst)-1])
				}
			})
		}
	}
}

// BenchmarkGroupMemory measures the memory of a block of the first group, with what other
// groups hold beside it: their windows in prompts of 1,000 blocks.
func BenchmarkGroupMemory(b *testing.B) {
	const depth, prompts = 1000, 400
	for _, name := range []string{"groups=1", "groups=6"} {
		b.Run(name, func(b *testing.B) {
			var total uint64
			held := 0
			for range b.N {
				before := testkit.LiveHeap()
				r, all := groupIndex(b, benchLayouts[name], depth, 1, prompts)
				clear(all)
				all = nil
				total += testkit.LiveHeap() - before
				held = r.AllBlocks(testkit.W0)
			}
			b.ReportMetric(float64(total)/float64(b.N)/(depth*prompts), "bytes/block")
			b.ReportMetric(float64(total)/float64(b.N)/float64(held), "bytes/held")
			b.ReportMetric(0, "ns/op")
		})
	}
}
