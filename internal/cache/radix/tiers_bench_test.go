package radix

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	"kvrouter/internal/base/kv"
)

// BenchmarkMatchTiers looks up a prompt of 256 blocks that eight workers hold: on the
// device only, or on the device, the host and in a store, a third each.
func BenchmarkMatchTiers(b *testing.B) {
	const length, workers = 256, 8
	for _, c := range []struct {
		name    string
		lowered bool
		parts   kv.MatchParts
	}{{"device", false, 0}, {"three tiers", true, 0}, {"three tiers and staged", true, kv.StagedPart}} {
		b.Run(c.name, func(b *testing.B) {
			r := NewTree()
			blocks := make([]kv.StoredBlock, length)
			local := make([]uint64, length)
			for i := range blocks {
				blocks[i] = kv.StoredBlock{Engine: uint64(i) + 1, Local: uint64(i) + 1000}
				local[i] = blocks[i].Local
			}
			for w := range uint64(workers) {
				key := kv.WorkerKey{Worker: w}
				if err := r.stored(key, 0, false, nil, blocks); err != nil {
					b.Fatal(err)
				}
				if !c.lowered {
					continue
				}
				r.lowerStored(key, LowerTier{Tier: kv.Host}, 0, false, blocks[:2*length/3])
				r.lowerStored(key, LowerTier{Tier: kv.External, Shared: true}, 0, false, blocks)
				var evicted []uint64
				for _, block := range slices.Backward(blocks[length/3:]) {
					evicted = append(evicted, block.Engine)
				}
				r.removed(key, evicted)
			}
			var dst []kv.Match
			b.ReportAllocs()
			for b.Loop() {
				dst = r.Match(local, length-1, c.parts, dst[:0])
			}
			if len(dst) != workers || dst[0].Blocks+dst[0].Lower.Total() < length-1 {
				b.Fatalf("%+v", dst)
			}
		})
	}
}

// BenchmarkLowerMemory stores a million blocks in the disk tier of one worker, in chains
// of 100, and reports the memory of each.
func BenchmarkLowerMemory(b *testing.B) {
	const chains, length = 10_000, 100
	for _, tiers := range [][]kv.Tier{{kv.Disk}, {kv.Host, kv.Disk}} {
		b.Run(fmt.Sprint(tiers), func(b *testing.B) {
			for b.Loop() {
				var before, after runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				r := NewTree()
				engine := uint64(1)
				blocks := make([]kv.StoredBlock, length)
				for range chains {
					for i := range blocks {
						engine += 0x9e3779b97f4a7c15
						blocks[i] = kv.StoredBlock{Engine: engine, Local: engine >> 7}
					}
					for _, tier := range tiers {
						r.lowerStored(kv.WorkerKey{}, LowerTier{Tier: tier}, 0, false, blocks)
					}
				}
				runtime.GC()
				runtime.ReadMemStats(&after)
				b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/chains/length, "B/block")
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/chains/length/float64(len(tiers)), "ns/store")
				runtime.KeepAlive(r)
			}
		})
	}
}
