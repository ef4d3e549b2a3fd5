package router

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
)

// TestAReserveIsAsLargeAsTrafficNeeds: whatever the seats that arrivals find taken by others, about mayWait of them
// wait, and the reserve stays within its bounds.
func TestAReserveIsAsLargeAsTrafficNeeds(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var k kept
		seats := rapid.IntRange(10, 200).Draw(rt, "seats")
		usual := rapid.IntRange(1, seats/5).Draw(rt, "usual") // of the seats that an arrival needs free
		random := rapid.Uint64().Draw(rt, "random")
		most := mostReserved * float64(seats)
		waited, come := 0, 0
		const learns, all = 10_000, 40_000
		for i := range all {
			random = random*6364136223846793005 + 1442695040888963407 // Knuth's MMIX
			waits := float64(random>>33%uint64(2*usual)) >= float64(k)
			if k.learn(waits, true, most); i >= learns {
				if come++; waits {
					waited++
				}
			}
			if k < 0 || float64(k) > most {
				rt.Fatalf("%v of %d seats are kept", k, seats)
			}
		}
		if share := float64(waited) / float64(come); share > 2*mayWait {
			rt.Errorf("%v of the requests wait, want %v", share, mayWait)
		}
		for range 100 * seats {
			k.learn(false, true, most)
		}
		if k > 0 {
			rt.Errorf("%v seats are kept for nobody", k)
		}
	})
}

func TestAReserveIsKeptForEarlierClassesOnly(t *testing.T) {
	var s reserve
	if s.classes[fair.Standard.Place()].learn(true, false, 8); s.before(fair.Batch) != 0 {
		t.Errorf("nothing of a later class runs: %v seats are kept", s.before(fair.Batch))
	}
	s.classes[fair.Standard.Place()].learn(true, true, 8)
	s.classes[fair.Batch.Place()].learn(true, true, 8)
	for class, want := range map[fair.Class]float64{fair.Interactive: 0, fair.Standard: 0, fair.Batch: 1} {
		if got := s.before(class); got != want {
			t.Errorf("%v seats are kept from class %v, want %v", got, class, want)
		}
	}
}

// TestASeatIsKeptForATenantWithinItsShare: once one has waited beside a tenant with more than its share. That one
// takes it while an engine is due to be tried with one request more, and when the other one has ended for a minute.
func TestASeatIsKeptForATenantWithinItsShare(t *testing.T) {
	r, clock, _ := newReservingRouter(t)
	fill := func(seats int) {
		for w := range uint64(2) {
			r.fleet.targetLoads[w].Fill, r.fleet.targetLoads[w].growsFrom = seats, clock.Now().Add(time.Hour)
		}
	}
	fill(8) // of 16 seats two are taken
	var flood []*Booking
	for range 14 {
		flood = append(flood, MustRoute(t, r, tenant("flood", 1)).Booking)
	}
	light := park(t, r, tenant("light", 1))
	flood[0].Finish(1)
	taken, err := light[0].get(t)
	if err != nil {
		t.Fatal(err)
	}
	waits := park(t, r, tenant("flood", 1), tenant("flood", 1))
	depth := func(want int, when string) {
		t.Helper()
		if n, _ := r.Admission.QueueDepth(); n != want {
			t.Fatalf("%s: %d wait, want %d", when, n, want)
		}
	}
	taken.Booking.Finish(1)
	depth(2, "its seat is free")
	flood[1].Finish(1)
	depth(1, "another one is free, too")
	r.fleet.targetLoads[1].growsFrom = clock.Now()
	flood[2].Finish(1)
	depth(0, "an engine is to be tried")
	fill(8)
	MustRoute(t, r, tenant("light", 1)).Booking.Finish(1)
	waits = append(waits, park(t, r, tenant("flood", 1))...)
	clock.Advance(activeFor)
	fill(8)
	flood[4].Finish(1)
	for _, w := range waits {
		if _, err := w.get(t); err != nil {
			t.Error(err)
		}
	}
}

// TestACordonedWorkerThatIsDueToBeTriedTakesNoKeptSeat, nor does one whose load is not fresh.
func TestACordonedWorkerThatIsDueToBeTriedTakesNoKeptSeat(t *testing.T) {
	r, clock, run := newReservingRouter(t)
	if err := r.Health.Cordon(1); err != nil {
		t.Fatal(err)
	}
	flood, light := fair.Tenant{Name: "flood"}, tenant("light", 1)
	r.fleet.targetLoads[0].Fill, r.fleet.targetLoads[0].growsFrom = 16, clock.Now().Add(time.Hour)
	for range 14 { // with the one that runs one seat is free
		MustRoute(t, r, tenant("flood", 1))
	}
	r.Admission.reserve.tenants[fair.Standard.Place()] = 1
	MustRoute(t, r, light).Booking.Finish(1)
	kept := func(when string, want bool) {
		t.Helper()
		if got := r.Admission.sharesAreKept(flood, fair.Standard, &seats{}, clock.Now()); got != want {
			t.Errorf("%s: a seat is kept: %v", when, got)
		}
	}
	kept("no worker is due", true)
	r.fleet.targetLoads[1].growsFrom = clock.Now()
	kept("the cordoned worker is due", true)
	r.fleet.targetLoads[0].growsFrom = clock.Now()
	kept("the other worker is due", false)
	for _, b := range run {
		b.End()
	}
}

// TestFewSeatsAreKeptForTenants: at most one of sharedOf, however many wait.
func TestFewSeatsAreKeptForTenants(t *testing.T) {
	for all, want := range map[int]int{0: 0, 7: 0, 8: 1, 16: 1, 23: 1, 24: 2, 512: 32} {
		if got := mostShared(all); got != want {
			t.Errorf("%d of %d seats, want %d", got, all, want)
		}
	}
}

// newReservingRouter returns a fair router over two workers that run one of two requests each, and
// these. Two seats are free.
func newReservingRouter(t testing.TB, change ...func(*Settings)) (r *Router, clock *testkit.StandingClock, run []*Booking) {
	t.Helper()
	r, clock = newFairRouter(t, 2, change...)
	for w := range uint64(2) {
		b := occupy(t, r, w, 1)
		b.FirstToken()
		r.Publish(kv.WorkerKey{Worker: w}, policy.Published{Running: 1, At: clock.Now()})
		r.fleet.targetLoads[w].Fill = 2
		run = append(run, b)
	}
	return r, clock, run
}

// TestBatchLeavesTheSeatsThatAreKept: a request of class batch waits while no more seats are free
// than are kept, an interactive one does not, and a worker with nothing to do takes any.
func TestBatchLeavesTheSeatsThatAreKept(t *testing.T) {
	r, _, full := newReservingRouter(t)
	batch, chat := tenant("a", 1), tenant("b", 1)
	batch.Class, chat.Class = fair.Batch, fair.Interactive
	r.Admission.reserve.classes[fair.Interactive.Place()] = 1.5
	first := MustRoute(t, r, batch) // two are free
	waits := park(t, r, batch)
	d := MustRoute(t, r, chat)
	if depth, _ := r.Admission.QueueDepth(); depth != 1 {
		t.Fatalf("%d wait", depth)
	}
	d.Booking.Finish(1)
	if depth, _ := r.Admission.QueueDepth(); depth != 1 {
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

// floodBehindKeptSeats has n requests of class batch of one tenant wait for seats that are kept.
// Each has a session of its own, so that none says what the others need.
func floodBehindKeptSeats(t testing.TB, r *Router, n int) {
	t.Helper()
	r.Admission.reserve.classes[fair.Interactive.Place()] = 2
	for i := range n {
		request := tenant("flood", 1)
		request.Class, request.Session = fair.Batch, uint64(i+1)
		_, waiting, err := r.RouteOrWait(request, func(Decision, error) {})
		if err != nil || waiting == nil {
			t.Fatalf("request %d does not wait: %v", i, err)
		}
	}
}

// TestEventsDoNotLookAtAllThatWaitForKeptSeats: neither an arrival nor an end looks for a worker
// for requests that have to leave all free seats to an earlier class.
func TestEventsDoNotLookAtAllThatWaitForKeptSeats(t *testing.T) {
	r, _, _ := newReservingRouter(t, func(k *Settings) { k.RouterQueueLimit = 1000 })
	floodBehindKeptSeats(t, r, 1000)
	const unseen = -1
	r.Admission.eachWaiting(func(w *waiter) { w.prompt.workers = unseen })
	chat := tenant("light", 1)
	chat.Class = fair.Interactive
	r.Admission.reserve.classes[fair.Interactive.Place()] = 2.5
	MustRoute(t, r, chat).Booking.Finish(1)
	waits, seen := 0, 0
	r.Admission.eachWaiting(func(w *waiter) {
		if waits++; w.prompt.workers != unseen {
			seen++
		}
	})
	if waits != 1000 || seen != 0 {
		t.Errorf("%d wait, for %d of them a worker was looked for", waits, seen)
	}
	r.Admission.reserve = reserve{}
	r.mu.Lock()
	r.Admission.dispatch(r.now())
	r.mu.Unlock()
	if depth, _ := r.Admission.QueueDepth(); depth != 998 {
		t.Errorf("no seat is kept, and %d of 1000 wait for two seats", depth)
	}
}

// TestLateRequestsAreShedBehindKeptSeats: also those that no event looks at.
func TestLateRequestsAreShedBehindKeptSeats(t *testing.T) {
	r, clock, _ := newReservingRouter(t)
	floodBehindKeptSeats(t, r, 5)
	late := tenant("other", 1)
	late.Class, late.Deadline, late.Sheddable = fair.Batch, clock.Now().Add(loadFreshFor/2), true
	asked := send(t, r, t.Context(), 6, late)
	var refreshed error
	_, waiting, err := r.RouteOrWait(late, func(_ Decision, err error) { refreshed = err })
	if err != nil || waiting == nil {
		t.Fatalf("it does not wait: %v", err)
	}
	clock.Advance(loadFreshFor/2 + time.Second)
	if _, err := asked.get(t); !errors.Is(err, ErrShed) {
		t.Errorf("%v, want to be shed", err)
	}
	if waiting.Refresh(); !errors.Is(refreshed, ErrShed) {
		t.Errorf("%v after Refresh, want to be shed", refreshed)
	}
}

// BenchmarkArrivalBehindKeptSeats is an interactive request that comes and ends while so many of
// class batch of one tenant wait for seats that are kept.
func BenchmarkArrivalBehindKeptSeats(b *testing.B) {
	for _, n := range []int{10, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			r, _, _ := newReservingRouter(b, func(k *Settings) { k.RouterQueueLimit = n })
			floodBehindKeptSeats(b, r, n)
			chat := tenant("light", 1)
			chat.Class = fair.Interactive
			b.ReportAllocs()
			for b.Loop() {
				r.Admission.reserve.classes[fair.Interactive.Place()] = 2.5
				MustRoute(b, r, chat).Booking.Finish(1)
			}
		})
	}
}
