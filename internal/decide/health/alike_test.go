package health

import (
	"fmt"
	"testing"
	"time"
)

// poisoned sends requests for a time, one a millisecond, a share of which fails everywhere, to
// workers that are in service, or to any if none is. The ill worker fails all; none is if it is
// below 0. It returns the shares of the time in which healthy workers and the ill one were
// out.
func (b *bench) poisoned(lasts time.Duration, share float64, ill int, fail func(i int)) (healthyOut, illOut float64) {
	const workers = 4
	looks := 0.0
	for end := b.now.Add(lasts); b.now.Before(end); {
		var in []int
		for i := range workers {
			if level := b.level(i); level == In || level == Slow {
				in = append(in, i)
			}
			switch out := b.IsOut(key(i), b.now); {
			case out && i == ill:
				illOut++
			case out:
				healthyOut++
			}
		}
		looks++
		i := b.random.IntN(workers)
		if len(in) > 0 {
			i = in[b.random.IntN(len(in))]
		}
		if i == ill || b.random.Float64() < share {
			fail(i)
		} else {
			b.good(i)
		}
	}
	return healthyOut / looks / workers, illOut / looks
}

// healthyBefore has all workers serve requests well for 8 s.
func (b *bench) healthyBefore() {
	for range 400 {
		for i := range 4 {
			b.good(i)
		}
		b.pass(20 * time.Millisecond)
	}
}

// TestRequestsThatFailEverywhereEjectNone has no clients that could be discredited.
func TestRequestsThatFailEverywhereEjectNone(t *testing.T) {
	const most = 0.2
	fails := map[string]func(b *bench, i int){"a pause": func(b *bench, i int) {
		a := b.sent(i)
		b.pass(time.Millisecond)
		b.Pressed(a, time.Minute, b.now)
	}}
	for _, kind := range []Kind{Status, Dropped, Broken, Timeout, Engine} {
		fails[kind.String()] = func(b *bench, i int) { b.fail(i, kind) }
	}
	for name, fail := range fails {
		for _, share := range []float64{0.4, 0.85, 1} {
			for _, healthy := range []bool{false, true} {
				if name == "a pause" && share == 1 {
					continue // they are all overloaded
				}
				t.Run(fmt.Sprintf("%s, %.0f %%, healthy before %v", name, 100*share, healthy), func(t *testing.T) {
					b := newBench(4)
					if healthy {
						b.healthyBefore()
					}
					if out, _ := b.poisoned(20*time.Second, share, -1, func(i int) { fail(b, i) }); out > most {
						t.Errorf("healthy workers are out %.0f %% of the time", 100*out)
					}
				})
			}
		}
	}
}

// TestAnIllWorkerIsFoundAmongRequestsThatFailEverywhere has one worker that fails all.
func TestAnIllWorkerIsFoundAmongRequestsThatFailEverywhere(t *testing.T) {
	for _, share := range []float64{0, 0.1, 0.4, 0.85} {
		for _, healthy := range []bool{false, true} {
			t.Run(fmt.Sprintf("%.0f %%, healthy before %v", 100*share, healthy), func(t *testing.T) {
				b := newBench(4)
				if healthy {
					b.healthyBefore()
				}
				out, ill := b.poisoned(60*time.Second, share, 2, func(i int) { b.fail(i, Status) })
				t.Logf("the ill worker is out %.0f %% of the time, healthy ones %.0f %%", 100*ill, 100*out)
				if ill < 0.9 {
					t.Errorf("the ill worker is out %.0f %% of the time", 100*ill)
				}
			})
		}
	}
}

// TestAPauseIsKeptWhileOthersServe has one worker answer a request of its pause: another one
// serves requests, so the pause is of use.
func TestAPauseIsKeptWhileOthersServe(t *testing.T) {
	b := newBench(2)
	b.Pressed(b.sent(0), time.Minute, b.now)
	b.pass(time.Second)
	b.good(0)
	if b.level(0) != Held {
		t.Error("the pause is over")
	}
	b.Pressed(b.sent(1), time.Minute, b.now)
	b.pass(time.Second)
	b.good(0)
	if b.level(0) != In || b.level(1) != In {
		t.Error("all are paused, and one serves: the pauses are not over")
	}
	b.Pressed(b.sent(1), time.Minute, b.now)
	if b.level(1) != In {
		t.Error("it is paused again at once")
	}
	b.pass(refutedFor)
	b.Pressed(b.sent(1), time.Minute, b.now)
	if b.level(1) != Held {
		t.Error("it is not paused later")
	}
}
