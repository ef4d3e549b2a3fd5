package router

import (
	"testing"

	"pgregory.net/rapid"

	"kvrouter/internal/fair"
	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
)

// TestAReserveIsAsLargeAsTrafficNeeds: whatever the seats that arrivals of a class find taken by
// later classes, about mayWait of them wait, and the reserve stays within its bounds.
func TestAReserveIsAsLargeAsTrafficNeeds(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var s reserve
		seats := rapid.IntRange(10, 200).Draw(rt, "seats")
		usual := rapid.IntRange(1, seats/5).Draw(rt, "usual") // of the seats that an arrival needs free
		class := rapid.SampledFrom([]fair.Class{fair.Interactive, fair.Standard}).Draw(rt, "class")
		random := rapid.Uint64().Draw(rt, "random")
		waited, come := 0, 0
		const learns, all = 10_000, 40_000
		for i := range all {
			random = random*6364136223846793005 + 1442695040888963407 // Knuth's MMIX
			waits := float64(random>>33%uint64(2*usual)) >= s.before(fair.Batch)
			if s.learn(class, waits, 1, seats); i >= learns {
				if come++; waits {
					waited++
				}
			}
			if kept := s[class.Place()]; kept < 0 || kept > mostReserved*float64(seats) {
				rt.Fatalf("%v of %d seats are kept", kept, seats)
			}
		}
		if share := float64(waited) / float64(come); share > 2*mayWait {
			rt.Errorf("%v of the requests wait, want %v", share, mayWait)
		}
		for range 100 * seats {
			s.learn(class, false, 0, seats)
		}
		if s.before(fair.Batch) > 0 {
			rt.Errorf("%v seats are kept for nobody", s.before(fair.Batch))
		}
	})
}

func TestAReserveIsKeptForEarlierClassesOnly(t *testing.T) {
	var s reserve
	if s.learn(fair.Standard, true, 0, 16); s.before(fair.Batch) != 0 {
		t.Errorf("nothing of a later class runs: %v seats are kept", s.before(fair.Batch))
	}
	s.learn(fair.Standard, true, 1, 16)
	s.learn(fair.Batch, true, 1, 16)
	for class, want := range map[fair.Class]float64{fair.Interactive: 0, fair.Standard: 0, fair.Batch: 1} {
		if got := s.before(class); got != want {
			t.Errorf("%v seats are kept from class %v, want %v", got, class, want)
		}
	}
}

// TestBatchLeavesTheSeatsThatAreKept: a request of class batch waits while no more seats are free
// than are kept, an interactive one does not, and a worker with nothing to do takes any.
func TestBatchLeavesTheSeatsThatAreKept(t *testing.T) {
	r, clock := newFairRouter(t, 2)
	batch, chat := tenant("a", 1), tenant("b", 1)
	batch.Class, chat.Class = fair.Batch, fair.Interactive
	full := []*Booking{occupy(t, r, 0, 1), occupy(t, r, 1, 1)}
	for w := range full {
		full[w].FirstToken()
		r.Publish(kv.WorkerKey{Worker: uint64(w)}, policy.Published{Running: 1, At: clock.Now()})
		r.targetLoads[w].Fill = 2
	}
	r.reserve[fair.Interactive.Place()] = 1.5
	first := MustRoute(t, r, batch) // two are free
	waits := park(t, r, batch)
	d := MustRoute(t, r, chat)
	if depth, _ := r.QueueDepth(); depth != 1 {
		t.Fatalf("%d wait", depth)
	}
	d.Booking.Finish(1)
	if depth, _ := r.QueueDepth(); depth != 1 {
		t.Fatalf("one seat is free and kept, %d wait", depth)
	}
	first.Booking.Finish(1)
	second, err := waits[0].get(t)
	if err != nil {
		t.Fatal(err)
	}
	third := park(t, r, batch)
	full[1-second.Target.Key.Worker].Finish(1) // that worker is idle now
	last, err := third[0].get(t)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []*Booking{full[0], full[1], second.Booking, last.Booking} {
		b.End()
	}
	if err := r.Check(); err != nil {
		t.Error(err)
	}
}
