package events

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// reachable is vLLM's rule for a model of sliding windows only, without a drafter, in its
// own words: SlidingWindowManager.reachable_block_mask and replay_boundaries (v1/core of
// vLLM 0.32). It returns the blocks that are kept of those from start to end.
func reachable(w window, start, end, prompt, block int) (mask []bool) {
	mask = make([]bool, end-start)
	if w.every > 0 {
		perSegment := w.every
		for i := start; i < end; i++ {
			mask[i-start] = w.need >= perSegment || i%perSegment >= perSegment-w.need
		}
	}
	boundary := (prompt - 1) / block
	for j := max(start, boundary-w.need); j < min(end, boundary); j++ {
		mask[j-start] = true
	}
	return mask
}

// TestBlocksThatAnEngineKeepsHaveTheirPlaces: of a prompt that is computed in chunks, and of
// its answer. If there are two possibilities, both are named.
func TestBlocksThatAnEngineKeepsHaveTheirPlaces(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const block = 4
		w := window{need: rapid.IntRange(1, 6).Draw(t, "need"), every: rapid.SampledFrom([]int{0, 1, 5, 8, 12, 40}).Draw(t, "every")}
		prompt := rapid.IntRange(1, 40*block).Draw(t, "prompt")
		total := prompt/block + rapid.IntRange(0, 10).Draw(t, "blocks of the answer")
		for start := rapid.IntRange(0, prompt/block).Draw(t, "found"); start < total; {
			end := start + rapid.IntRange(1, 12).Draw(t, "step")
			if start < prompt/block {
				end = min(end, prompt/block) // the answer comes after the prompt
			}
			end = min(end, total)
			var want []int
			for i, kept := range reachable(w, start, end, prompt, block) {
				if kept {
					want = append(want, i)
				}
			}
			places := w.keptBlocks(start, end-start, len(want))
			if !slices.ContainsFunc(places, func(p []int) bool { return slices.Equal(p, want) }) {
				t.Fatalf("blocks %d to %d of a prompt of %d tokens, %+v: at %v, want %v", start, end, prompt, w, places, want)
			}
			start = end
		}
	})
}

func TestKeptBlocks(t *testing.T) {
	for name, c := range map[string]struct {
		w                window
		start, all, kept int
		want             string
	}{
		"all":                                   {window{8, 0}, 3, 4, 4, "[[0 1 2 3]]"},
		"the last of a prompt, or those before": {window{2, 0}, 0, 5, 2, "[[3 4] [2 3]]"},
		"one less than the window":              {window{3, 0}, 0, 3, 2, "[[0 1] [1 2]]"},
		"multiples and the last":                {window{2, 8}, 0, 13, 4, "[[6 7 11 12] [6 7 10 11]]"},
		"a multiple just before the last":       {window{2, 8}, 0, 9, 3, "[[6 7 8]]"},
		"multiples further on":                  {window{2, 8}, 13, 12, 5, "[[1 2 9 10 11]]"},
		"an answer":                             {window{2, 8}, 13, 8, 2, "[[1 2]]"},
		"a chunk shortly before the last":       {window{3, 0}, 0, 6, 1, "[[5]]"},
		"a window longer than the interval":     {window{9, 8}, 1, 4, 4, "[[0 1 2 3]]"},
		"more than any prompt keeps":            {window{2, 0}, 0, 9, 5, "[]"},
		"a window without end":                  {window{1 << 40, 0}, 1 << 40, 3, 2, "[[0 1] [1 2]]"},
	} {
		if got := fmt.Sprint(c.w.keptBlocks(c.start, c.all, c.kept)); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}
