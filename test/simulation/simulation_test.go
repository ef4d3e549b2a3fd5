package simulation

import (
	"flag"
	"fmt"
	"path/filepath"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"kvrouter/internal/testkit/leaks"
)

var (
	oneSeed  = flag.Uint64("seed", 0, "run this seed alone, and show what happens in it")
	oneFile  = flag.String("scenario", "", "the same with the scenario of this file")
	seeds    = flag.Int("seeds", 0, "number of seeds to run; 0: 10,000, with -short 300")
	fromSeed = flag.Uint64("from", 1, "first seed")
	toFirst  = flag.Bool("first", false, "run the seeds one after the other, up to the first that fails")
	saveIn   = flag.String("save", "", "folder that gets the shrunk scenario of each seed that fails")
)

func TestMain(m *testing.M) {
	leaks.Main(m)
}

// simulate runs a scenario.
func simulate(t *testing.T, s *scenario, d *defaults, bug sabotage, show func(string)) (w *world) {
	w = newWorld(s, d)
	w.sabotage, w.show = bug, show
	defer func() {
		if cause := recover(); cause != nil {
			stacks := make([]byte, 1<<20)
			stacks = stacks[:runtime.Stack(stacks, true)]
			w.fail("panic: %v; open connections: %v\n%s", cause, w.net.open(), stacks)
		}
	}()
	synctest.Test(t, func(*testing.T) { w.run(s.steps) })
	return w
}

// report shrinks a failing scenario and prints it.
func report(t *testing.T, s *scenario, d *defaults, failure string) {
	small := s.shrink(func(s *scenario) bool { return simulate(t, s, d, sound, nil).failure != "" })
	last := simulate(t, small, d, sound, nil).failure
	t.Errorf("seed %d: %s\nreplay it: go test ./test/simulation -run '^TestSimulation$' -v -seed %d\nshrunk: %s\n%s", s.Seed, failure, s.Seed, last, small)
	if *saveIn == "" {
		return
	}
	if err := small.save(filepath.Join(*saveIn, fmt.Sprintf("seed-%d.jsonl", s.Seed))); err != nil {
		t.Error(err)
	}
}

// TestSimulation runs many worlds, each drawn by a seed. It prints the steps of a failing
// one.
func TestSimulation(t *testing.T) {
	d := newDefaults()
	if *oneSeed != 0 || *oneFile != "" {
		s := newScenario(*oneSeed)
		if *oneFile != "" {
			var err error
			if s, err = loadScenario(*oneFile); err != nil {
				t.Fatal(err)
			}
		}
		w := simulate(t, s, &d, sound, func(line string) { t.Log(line) })
		t.Logf("trace %x, %+v", w.trace.Sum64(), w.counts)
		if w.failure != "" {
			t.Fatalf("%s\n%s", w.failure, s)
		}
		return
	}
	n := *seeds
	if n == 0 {
		if n = 10_000; testing.Short() {
			n = 300
		}
	}
	if *toFirst {
		for i := range uint64(n) {
			if w := simulate(t, newScenario(*fromSeed+i), &d, sound, nil); w.failure != "" {
				t.Fatalf("first seed that fails: %d: %s", *fromSeed+i, w.failure)
			}
		}
		return
	}
	began := time.Now()
	var sum [2]counts
	t.Run("seeds", func(t *testing.T) {
		for half := range sum {
			t.Run(fmt.Sprint(half), func(t *testing.T) {
				t.Parallel()
				failed := 0
				for i := half; i < n && failed < 3; i += len(sum) {
					s := newScenario(*fromSeed + uint64(i))
					w := simulate(t, s, &d, sound, nil)
					if sum[half].add(w.counts); w.failure != "" {
						failed++
						report(t, s, &d, w.failure)
					}
				}
			})
		}
	})
	sum[0].add(sum[1])
	t.Logf("%d seeds in %s: %+v", n, time.Since(began).Round(time.Millisecond), sum[0])
}

// TestSimulationOfPastFailures runs saved scenarios that failed in the past.
func TestSimulationOfPastFailures(t *testing.T) {
	d := newDefaults()
	files, err := filepath.Glob("testdata/*.jsonl")
	if err != nil || len(files) == 0 {
		t.Fatal("no scenarios", err)
	}
	for _, file := range files {
		s, err := loadScenario(file)
		if err != nil {
			t.Fatal(err)
		}
		if w := simulate(t, s, &d, sound, nil); w.failure != "" {
			t.Errorf("%s: %s", file, w.failure)
		}
	}
}

// TestSimulationRepeats checks that a simulation depends on its scenario only.
func TestSimulationRepeats(t *testing.T) {
	d := newDefaults()
	for seed := *fromSeed; seed < *fromSeed+uint64(max(50, *seeds)); seed++ {
		first, again := simulate(t, newScenario(seed), &d, sound, nil), simulate(t, newScenario(seed), &d, sound, nil)
		if first.trace.Sum64() != again.trace.Sum64() {
			t.Errorf("seed %d has two traces", seed)
		}
	}
}

// TestSimulationFindsBugs plants bugs and checks that a seed finds each.
func TestSimulationFindsBugs(t *testing.T) {
	d := newDefaults()
	for _, bug := range []sabotage{lostRemoval, doubleFree, unseenGap} {
		found := uint64(0)
		for seed := uint64(1); seed <= 1000 && found == 0; seed++ {
			if w := simulate(t, newScenario(seed), &d, bug, nil); w.failure != "" {
				found = seed
				t.Logf("%s: seed %d: %s", bug, seed, w.failure)
			}
		}
		if found == 0 {
			t.Errorf("%s, and no seed of 1,000 finds it", bug)
		}
	}
}
