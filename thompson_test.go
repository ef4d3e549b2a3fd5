package main

import (
	"context"
	"testing"
	"time"
)

// thompsonWorld are workers of given speeds in virtual time: a closed loop of
// requests, each to the first token and then so many tokens.
type thompsonWorld struct {
	now     time.Time
	router  *Router
	policy  *thompson
	slow    []float64 // by worker: how many times as long all takes
	sent    []int     // by worker
	flights []thompsonFlight
	hints   func() PrefixHints
}

type thompsonFlight struct {
	at      time.Time
	first   bool // its first token comes then; else its end
	booking *Booking
	rest    time.Duration
}

func newThompsonWorld(t testing.TB, fixes string, seed uint64, slow ...float64) *thompsonWorld {
	w := &thompsonWorld{now: simEpoch, policy: mustThompson(t, fixes), slow: slow, sent: make([]int, len(slow))}
	w.router = NewRouter(NewRadix(), w.policy, 16, seed)
	w.router.now = func() time.Time { return w.now }
	for i := range slow {
		w.router.Up(Target{Key: WorkerKey{Worker: uint64(i)}, Generation: 1})
	}
	return w
}

func mustThompson(t testing.TB, fixes string) *thompson {
	t.Helper()
	config := defaultThompsonConfig()
	var err error
	if config.fixes, err = parseThompsonFixes(fixes); err != nil {
		t.Fatal(err)
	}
	return newThompson(config)
}

// run sends so many requests, some in flight at a time, and returns how many
// each worker got of them.
func (w *thompsonWorld) run(t testing.TB, requests, inFlight int) []int {
	before := append([]int(nil), w.sent...)
	for range requests {
		for len(w.flights) >= inFlight {
			w.step()
		}
		request := Request{NumTokens: 400}
		if w.hints != nil {
			request.Prefix = w.hints()
		}
		d, err := w.router.Route(context.Background(), request)
		if err != nil {
			t.Fatal(err)
		}
		i := d.Target.Key.Worker
		w.sent[i]++
		unit := time.Duration(w.slow[i] * float64(time.Millisecond))
		w.flights = append(w.flights, thompsonFlight{at: w.now.Add(50 * unit), first: true, booking: d.Booking, rest: 20 * 10 * unit})
	}
	got := make([]int, len(w.sent))
	for i := range got {
		got[i] = w.sent[i] - before[i]
	}
	return got
}

// step lets happen what is next.
func (w *thompsonWorld) step() {
	next := 0
	for i, f := range w.flights {
		if f.at.Before(w.flights[next].at) {
			next = i
		}
	}
	f := &w.flights[next]
	w.now = f.at
	if f.first {
		f.booking.FirstToken()
		f.first, f.at = false, f.at.Add(f.rest)
		return
	}
	f.booking.Finish(21)
	w.flights = append(w.flights[:next], w.flights[next+1:]...)
}

func TestThompsonLearnsASlowWorkerAndForgetsIt(t *testing.T) {
	for seed := uint64(1); seed <= 20; seed++ {
		for _, inFlight := range []int{1, 8} {
			w := newThompsonWorld(t, "all", seed, 1, 1, 3)
			all := w.run(t, 500, inFlight)
			late := w.run(t, 200, inFlight)
			w.slow[2] = 1
			var recover []int
			for range 4 {
				recover = append(recover, w.run(t, 100, inFlight)[2])
			}
			t.Log(seed, inFlight, all, late, recover)
		}
	}
	for _, inFlight := range []int{1, 8} {
		w := newThompsonWorld(t, "none", 1, 1, 1, 3)
		t.Log("none", w.run(t, 500, inFlight), w.run(t, 500, inFlight))
	}
}

func BenchmarkThompsonDecision(b *testing.B) {
	for _, fixes := range []string{"all", "none"} {
		b.Run(fixes, func(b *testing.B) {
			w := newThompsonWorld(b, fixes, 1, 1, 1, 1, 1, 1, 1, 1, 1)
			w.run(b, 500, 64)
			b.ReportAllocs()
			b.ResetTimer()
			w.run(b, b.N, 64)
		})
	}
}
