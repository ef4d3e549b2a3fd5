package radix

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// Sizes of the index that the benchmarks run on, in blocks.
const (
	benchBlocks = 1_000_000
	benchHot    = 200_000 // of these, in prompts that are looked up and stored
)

// benchIndex returns an index of benchBlocks distinct blocks and its hot prompts
// of depth blocks each. Worker i of n holds the first (i+1)/n of every hot
// prompt; the other prompts have 1,000 blocks and one holder each.
func benchIndex(b *testing.B, depth, workers int) (*Tree, [][]uint64) {
	b.Helper()
	r := NewTree()
	store := func(w int, local []uint64) {
		if err := r.stored(kv.WorkerKey{Worker: uint64(w)}, 0, false, nil, testkit.Chain(local)); err != nil {
			b.Fatal(err)
		}
	}
	hot := make([][]uint64, benchHot/depth)
	for i := range hot {
		hot[i] = testkit.Prompt(uint64(i), depth)
		for w := range workers {
			store(w, hot[i][:max(1, depth*(w+1)/workers)])
		}
	}
	for i := range (benchBlocks - benchHot) / 1000 {
		store(i%workers, testkit.Prompt(uint64(i)+1<<32, 1000))
	}
	return r, hot
}

// eachBenchIndex runs a benchmark at all depths and numbers of workers.
func eachBenchIndex(b *testing.B, run func(b *testing.B, depth, workers int)) {
	for _, depth := range []int{1, 100, 1_000, 10_000} {
		for _, workers := range []int{1, 8, 64} {
			b.Run(fmt.Sprintf("depth=%d/workers=%d", depth, workers), func(b *testing.B) { run(b, depth, workers) })
		}
	}
}

// BenchmarkRadixMatch looks up prompts that all workers hold, each to another
// length, in random order.
func BenchmarkRadixMatch(b *testing.B) {
	eachBenchIndex(b, func(b *testing.B, depth, workers int) {
		r, hot := benchIndex(b, depth, workers)
		rng := rand.New(rand.NewPCG(1, 1))
		dst := make([]kv.Match, 0, workers)
		b.ReportAllocs()
		b.ResetTimer()
		for b.Loop() {
			dst = r.Match(hot[rng.IntN(len(hot))], depth, 0, dst[:0])
		}
		b.StopTimer()
		if len(dst) != workers || dst[workers-1].Blocks != depth {
			b.Fatalf("%d matches, the last %+v", len(dst), dst[len(dst)-1])
		}
	})
}

// BenchmarkRadixStore stores whole prompts for one more worker, the hot ones in
// turn; workers is how many hold the prompt then, so that workers=1 makes new
// nodes. An iteration is one round over all prompts, ns/op is one prompt.
func BenchmarkRadixStore(b *testing.B) {
	eachBenchIndex(b, func(b *testing.B, depth, workers int) { benchChange(b, depth, workers, true) })
}

// BenchmarkRadixRemove is the opposite: one event a prompt, the last block first.
func BenchmarkRadixRemove(b *testing.B) {
	eachBenchIndex(b, func(b *testing.B, depth, workers int) { benchChange(b, depth, workers, false) })
}

func benchChange(b *testing.B, depth, workers int, timeStore bool) {
	r, hot := benchIndex(b, depth, max(1, workers-1))
	if workers == 1 {
		for i := range hot {
			hot[i] = testkit.Prompt(uint64(i)+1<<40, depth)
		}
	}
	w := kv.WorkerKey{Worker: 1 << 20}
	stores, removes := make([][]kv.StoredBlock, len(hot)), make([][]uint64, len(hot))
	for i, p := range hot {
		stores[i], removes[i] = testkit.Chain(p), testkit.EngineHashes(p)
		slices.Reverse(removes[i])
	}
	// One round stores and removes all hot prompts; only one half is timed.
	var timed time.Duration
	var change Change // reused, as by a stream
	rounds := 0
	for ; b.Loop(); rounds++ {
		start := time.Now()
		for _, blocks := range stores {
			change = Change{Kind: Stored, Blocks: blocks}
			if _, err := r.Apply(w, &change); err != nil {
				b.Fatal(err)
			}
		}
		middle := time.Now()
		for _, engine := range removes {
			change = Change{Kind: Removed, Hashes: engine}
			if done, _ := r.Apply(w, &change); done.Unknown != 0 {
				b.Fatal("unknown blocks")
			}
		}
		if timeStore {
			timed += middle.Sub(start)
		} else {
			timed += time.Since(middle)
		}
	}
	prompts := float64(rounds * len(stores))
	b.ReportMetric(float64(timed.Nanoseconds())/prompts, "ns/op")
	b.ReportMetric(float64(timed.Nanoseconds())/prompts/float64(depth), "ns/block")
}

// BenchmarkRadixMatchUnderWrites looks up prompts of 1,000 blocks and 64 workers
// on all cores while one writer stores and removes prompts of 100 blocks as fast
// as it can.
func BenchmarkRadixMatchUnderWrites(b *testing.B) {
	r, hot := benchIndex(b, 1000, 64)
	var stop atomic.Bool
	done := make(chan int)
	go func() { // ends when stop is set
		p := testkit.Prompt(1<<50, 100)
		blocks, engine := testkit.Chain(p), testkit.EngineHashes(p)
		n := 0
		for ; !stop.Load(); n++ {
			w := kv.WorkerKey{Worker: uint64(n % 64)}
			if err := r.stored(w, 0, false, nil, blocks); err != nil {
				b.Error(err)
			}
			r.removed(w, engine)
		}
		done <- n
	}()
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		dst := make([]kv.Match, 0, 64)
		for i := 0; pb.Next(); i++ {
			dst = r.Match(hot[i%len(hot)], len(hot[i%len(hot)]), 0, dst[:0])
		}
	})
	b.StopTimer()
	stop.Store(true)
	b.ReportMetric(float64(200*<-done)/b.Elapsed().Seconds(), "writes/s")
}

// BenchmarkRadixMemory measures the memory of benchBlocks blocks that one worker
// holds, in prompts of the given length.
func BenchmarkRadixMemory(b *testing.B) {
	for _, depth := range []int{1, 10, 1000} {
		for _, blocks := range []int{benchBlocks, benchBlocks * 8 / 5} {
			b.Run(fmt.Sprintf("depth=%d/blocks=%d", depth, blocks), func(b *testing.B) {
				var total uint64
				for range b.N {
					before := testkit.LiveHeap()
					r := NewTree()
					for i := range blocks / depth {
						if err := r.stored(testkit.W0, 0, false, nil, testkit.Chain(testkit.Prompt(uint64(i), depth))); err != nil {
							b.Fatal(err)
						}
					}
					total += testkit.LiveHeap() - before
					if r.Blocks(testkit.W0) != blocks {
						b.Fatalf("%d blocks", r.Blocks(testkit.W0))
					}
				}
				b.ReportMetric(float64(total)/float64(b.N)/float64(blocks), "bytes/block")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// BenchmarkRadixClear clears a worker of benchBlocks blocks; sweep-ns/block is
// what later events then pay for each of them.
func BenchmarkRadixClear(b *testing.B) {
	var clearing, sweeping time.Duration
	for range b.N {
		r := NewTree()
		for i := range benchBlocks / 1000 {
			if err := r.stored(testkit.W0, 0, false, nil, testkit.Chain(testkit.Prompt(uint64(i), 1000))); err != nil {
				b.Fatal(err)
			}
		}
		start := time.Now()
		r.cleared(testkit.W0)
		clearing += time.Since(start)
		if r.Match(testkit.Prompt(0, 1), 1, 0, nil) != nil {
			b.Fatal("a cleared block matches")
		}
		start = time.Now()
		r.sweep(1 << 30)
		sweeping += time.Since(start)
	}
	b.ReportMetric(float64(clearing.Nanoseconds())/float64(b.N), "ns/op")
	b.ReportMetric(float64(sweeping.Nanoseconds())/float64(b.N)/benchBlocks, "sweep-ns/block")
}
