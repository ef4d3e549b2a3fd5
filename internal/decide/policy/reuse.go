package policy

import (
	"math"
	"math/bits"
)

const (
	// reuseBuckets times reusePerBucket counts of 8 bytes are 1 MB: those of the
	// prompts that about 3,000 requests of 12,000 tokens put in.
	reuseBuckets   = 1 << 14
	reusePerBucket = 8 // one line of the processor's cache
	// reuseRescale is the time, in turnovers, after which counts are written again:
	// e^32 times a count is far from what a float32 can hold.
	reuseRescale = 32
)

// reuseCounts estimates how often prompts begin with the same blocks: it counts the
// requests that had a sequence hash, each the less the longer ago it came. Time is
// counted in turnovers: one has passed when as many tokens were put into the
// workers' caches as these hold together, which is about how long a block stays
// without requests. A request that came t turnovers ago counts e^−t.
//
// Only eight depths an octave are counted. The table is of fixed size: in a full
// bucket a new hash takes the place of the one that counts least. A count is
// stored times e^clock (forward decay, Cormode et al. 2009), so that time passing
// changes no count. It has no lock.
type reuseCounts struct {
	buckets [][reusePerBucket]reuseCount // none before the first prompt
	clock   float64                      // turnovers since the counts were last rescaled
	rest    []float64                    // of the last prompt, see look
	asked   int                          // depth of the last call of others since then; -1: none
	answer  float64                      // of that
}

type reuseCount struct {
	tag   uint32
	value float32 // 0: nothing is stored here
}

// pass advances by that many turnovers.
func (u *reuseCounts) pass(turnovers float64) {
	u.clock += turnovers
	if u.clock < reuseRescale {
		return
	}
	scale := float32(math.Exp(-u.clock))
	for i := range u.buckets {
		for k := range u.buckets[i] {
			u.buckets[i][k].value *= scale
		}
	}
	u.clock = 0
}

// look counts the uses of the prompt's blocks, for expected.
// With count its use counts from now on.
func (u *reuseCounts) look(sequence []uint64, workers float64, count bool) {
	if u.buckets == nil && len(sequence) > 0 {
		u.buckets = make([][reusePerBucket]reuseCount, reuseBuckets)
	}
	depths := depthsUpTo(len(sequence))
	u.rest, u.asked = append(u.rest[:0], make([]float64, depths+1)...), -1
	added := float32(0)
	if count {
		added = float32(math.Exp(u.clock))
	}
	now := math.Exp(-u.clock)
	for k := range depths {
		uses := float64(u.use(sequence[sampledDepth(k)-1], added)) * now
		u.rest[k] = uses / (uses + workers)
	}
	for k, depth := depths-1, sampledDepth(depths-1); k >= 0; k-- {
		above := 0
		if k > 0 {
			above = sampledDepth(k - 1)
		}
		u.rest[k] = u.rest[k]*float64(depth-above) + u.rest[k+1]
		depth = above
	}
}

// use returns the stored count of a hash and adds to it.
func (u *reuseCounts) use(hash uint64, add float32) float32 {
	hash *= 0x9E3779B97F4A7C15 // clients may send hashes that are none
	bucket := &u.buckets[hash>>(64-14)]
	tag := uint32(hash >> 16)
	least := 0
	for i := range bucket {
		if c := &bucket[i]; c.tag == tag && c.value > 0 {
			before := c.value
			c.value += add
			return before
		}
		if bucket[i].value < bucket[least].value {
			least = i
		}
	}
	if add > 0 {
		bucket[least] = reuseCount{tag, add}
	}
	return 0
}

// others is how many of the prompt's blocks from that depth on later requests will
// pay for, by their shares. Of thousands of workers most have the same depth as the one
// before.
func (u *reuseCounts) others(from int) float64 {
	if from != u.asked {
		u.asked, u.answer = from, u.from(from)
	}
	return u.answer
}

func (u *reuseCounts) from(from int) float64 {
	k := depthsUpTo(from)
	if k >= len(u.rest)-1 {
		return 0
	}
	above := 0
	if k > 0 {
		above = sampledDepth(k - 1)
	}
	depth := sampledDepth(k)
	return u.rest[k+1] + (u.rest[k]-u.rest[k+1])*float64(depth-from)/float64(depth-above)
}

// sampledDepth is the k-th depth that is counted: 1, 2, .. 16, 18, .. 32, 36, ..
func sampledDepth(k int) int {
	if k < 16 {
		return k + 1
	}
	k -= 7 // 16 is the 8th step of its octave
	return (8 + k&7) << (k >> 3)
}

// depthsUpTo is the number of depths that are counted up to depth blocks.
func depthsUpTo(depth int) int {
	if depth < 16 {
		return max(0, depth)
	}
	octave := bits.Len(uint(depth)) - 4
	return octave<<3 + depth>>octave
}
