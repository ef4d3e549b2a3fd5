package policy

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestSampledDepthsAreEightAnOctave(t *testing.T) {
	var depths []int
	for depth := 1; depth <= 100_000; depth++ {
		if sampled := depthsUpTo(depth); sampled > len(depths) {
			depths = append(depths, depth)
		}
		if sampled := depthsUpTo(depth); sampled != len(depths) || sampledDepth(sampled-1) != depths[sampled-1] {
			t.Fatalf("up to %d: %d sampled, the last at %d; want %d, %d", depth, sampled, sampledDepth(sampled-1), len(depths), depths[len(depths)-1])
		}
	}
	first := []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 30, 32, 36}
	if !slices.Equal(depths[:len(first)], first) || len(depths) != depthsUpTo(100_000) || len(depths) > 16+8*13 {
		t.Errorf("%d depths, the first are %v", len(depths), depths[:len(first)])
	}
	if depthsUpTo(0) != 0 {
		t.Errorf("%d depths of nothing", depthsUpTo(0))
	}
}

// sequenceOf is a prompt of so many blocks whose first ones, shared, are those of all
// prompts, the others its own.
func sequenceOf(prompt uint64, shared, blocks int) []uint64 {
	sequence := make([]uint64, blocks)
	for i := range sequence {
		sequence[i] = uint64(i) + 1
		if i >= shared {
			sequence[i] += (prompt + 1) << 32
		}
	}
	return sequence
}

// TestOthersPayByUses compares with a count of every hash.
func TestOthersPayByUses(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var counts reuseCounts
		exact := map[uint64]float64{}
		workers := rapid.IntRange(1, 64).Draw(t, "workers")
		for prompt := range uint64(rapid.IntRange(1, 30).Draw(t, "prompts")) {
			blocks := rapid.IntRange(0, 200).Draw(t, "blocks")
			sequence := sequenceOf(prompt, rapid.IntRange(0, blocks).Draw(t, "shared"), blocks)
			count := rapid.Bool().Draw(t, "count")
			counts.look(sequence, float64(workers), count)
			for from := 0; from <= blocks+1; from++ {
				want, depth := 0.0, 0
				for at := from; at < blocks; at++ {
					for depth <= at { // the next deeper sampled one
						depth = sampledDepth(depthsUpTo(depth))
					}
					if depth <= blocks {
						uses := exact[sequence[depth-1]]
						want += uses / (uses + float64(workers))
					}
				}
				if got := counts.others(from); math.Abs(got-want) > 1e-4*(1+want) {
					t.Fatalf("others pay for %v blocks from %d of %d on, want %v", got, from, blocks, want)
				}
			}
			for _, h := range sequence {
				if count {
					exact[h]++
				}
			}
			if passed := rapid.SampledFrom([]float64{0, 0.3, 40}).Draw(t, "turnovers"); passed > 0 {
				counts.pass(passed)
				for h := range exact {
					exact[h] *= math.Exp(-passed)
				}
			}
		}
	})
}

// TestCountsOfWhatIsUsedStay: a table that overflows with prompts nobody asks for
// again forgets those, and stays as it is in size.
func TestCountsOfWhatIsUsedStay(t *testing.T) {
	var counts reuseCounts
	const shared, blocks = 16, 32
	for prompt := range uint64(30_000) {
		counts.look(sequenceOf(prompt, shared, blocks), 8, true)
		counts.pass(1.0 / 1000)
	}
	if got := counts.others(0); got < 0.99*shared || got > shared {
		t.Errorf("others pay for %v of %d hot blocks", got, shared)
	}
	if counts.look(sequenceOf(0, 0, blocks), 8, false); counts.others(0) > 0.1 {
		t.Errorf("others pay for %v blocks that nobody asks for", counts.others(0))
	}
	if len(counts.buckets) != reuseBuckets {
		t.Errorf("%d buckets, want %d", len(counts.buckets), reuseBuckets)
	}
}

// BenchmarkUseCounts looks prompts up whose hashes have just been computed, as the
// router has them, in a table that is full.
func BenchmarkUseCounts(b *testing.B) {
	for _, blocks := range []int{62, 1500} {
		b.Run(fmt.Sprintf("blocks=%d", blocks), func(b *testing.B) {
			var counts reuseCounts
			for prompt := range uint64(4000) {
				counts.look(sequenceOf(prompt, blocks/2, blocks), 8, true)
			}
			var prompts [16][]uint64
			for i := range prompts {
				prompts[i] = sequenceOf(uint64(i), blocks/2, blocks)
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				counts.look(prompts[i%len(prompts)], 8, true)
				i++
			}
		})
	}
}
