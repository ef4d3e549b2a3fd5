package hours

import (
	"flag"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"
)

var (
	oneSeed  = flag.Uint64("seed", 0, "run this seed alone, and show what happens in it")
	seeds    = flag.Int("seeds", 0, "number of seeds to run; 0: 20")
	fromSeed = flag.Uint64("from", 1, "first seed")
)

// TestWorkersThatWorkAreLeftAlone runs many worlds, each drawn by a seed.
func TestWorkersThatWorkAreLeftAlone(t *testing.T) {
	simulate := func(seed uint64, show func(string)) *figures {
		w := newWorld(seed, show)
		synctest.Test(t, func(*testing.T) { w.run() })
		return w.figures
	}
	if *oneSeed != 0 {
		f := simulate(*oneSeed, func(line string) { t.Log(line) })
		t.Log("\n" + f.table())
		return
	}
	n := *seeds
	if n == 0 {
		n = 20
	}
	began, parts := time.Now(), runtime.GOMAXPROCS(0)
	sums := make([]*figures, parts)
	t.Run("seeds", func(t *testing.T) {
		for part := range parts {
			sums[part] = newFigures()
			t.Run(fmt.Sprint(part), func(t *testing.T) {
				t.Parallel()
				for i := part; i < n; i += parts {
					w := newWorld(*fromSeed+uint64(i), nil)
					synctest.Test(t, func(*testing.T) { w.run() })
					sums[part].add(w.figures)
				}
			})
		}
	})
	all := newFigures()
	for _, f := range sums {
		all.add(f)
	}
	t.Logf("%s\n%s", time.Since(began).Round(time.Millisecond), all.table())
	for _, line := range all.Bad[:min(len(all.Bad), 20)] {
		t.Error(line)
	}
}
