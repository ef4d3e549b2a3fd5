package health

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestTheBaselineIsOfTheLastValues, compared with sorting them.
func TestTheBaselineIsOfTheLastValues(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	var r ring
	var all []time.Duration
	for i := range 5 * baselineSize {
		d := time.Duration(random.IntN(50))
		r.add(d)
		all = append(all, d)
		last := slices.Sorted(slices.Values(all[max(0, len(all)-baselineSize):]))
		most, highest := r.high()
		if most != last[(len(last)-1)*95/100] || highest != last[len(last)-1] {
			t.Fatalf("after %d values: %d, %d", i+1, most, highest)
		}
	}
}
