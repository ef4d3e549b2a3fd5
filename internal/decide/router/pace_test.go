package router

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// paceRun fills seats with answers of these lengths for a time, by a pace or at once, from a begin in which all start
// together. It returns how many ended, and the longest time without an end in the last half.
func paceRun(paced bool, seats int, length func() time.Duration, lasts time.Duration) (ended int, longest time.Duration) {
	p := pace{all: seats}
	start := time.Unix(1000, 0)
	now, last := start, start
	var ends []time.Time
	begin := func() {
		took := length()
		ends = append(ends, now.Add(took))
		slices.SortFunc(ends, time.Time.Compare)
		p.starts(now)
		p.answered(took)
	}
	for range seats {
		begin()
	}
	free := 0
	for now.Sub(start) < lasts {
		next := ends[0]
		if wait := p.wait(now); paced && free > 0 && now.Add(wait).Before(next) {
			next = now.Add(max(wait, 0))
		}
		p.keep(free, seats, next)
		now = next
		if !now.Before(ends[0]) {
			if ends = ends[1:]; now.Sub(start) > lasts/2 {
				longest = max(longest, now.Sub(last))
			}
			ended, free, last = ended+1, free+1, now
		}
		for free > 0 && (!paced || p.wait(now) <= 0) {
			begin()
			free--
		}
		p.keep(free, seats, now)
	}
	return ended, longest
}

// TestAPaceKeepsEndsApart: answers that began together end one after the other soon, at the cost of few seats.
func TestAPaceKeepsEndsApart(t *testing.T) {
	const seats, answer = 16, 320 * time.Millisecond
	random := rand.New(rand.NewPCG(1, 1))
	for _, c := range []struct {
		name    string
		length  func() time.Duration
		longest time.Duration // without an end; 0: whatever it is
	}{
		{"all alike", func() time.Duration { return answer }, 3 * answer / seats},
		{"nearly alike", func() time.Duration { return answer + time.Duration(random.Int64N(int64(answer/20))) }, 4 * answer / seats},
		{"of all lengths", func() time.Duration { return time.Duration(random.ExpFloat64() * float64(answer)) }, 0},
	} {
		free, together := paceRun(false, seats, c.length, 2*time.Minute)
		paced, apart := paceRun(true, seats, c.length, 2*time.Minute)
		t.Logf("%s: %d answers of %d, longest without an end %v, before %v", c.name, paced, free, apart, together)
		if share := float64(paced) / float64(free); share < 1-1.5*mostPaced {
			t.Errorf("%s: %.3f of the answers", c.name, share)
		}
		if c.longest > 0 && (apart > c.longest || together < 2*apart) {
			t.Errorf("%s: %v without an end, at once %v, want at most %v", c.name, apart, together, c.longest)
		}
	}
}

// TestATenantWithItsShareKeepsThePace: it waits beside free seats until a start is due. Another one does not.
func TestATenantWithItsShareKeepsThePace(t *testing.T) {
	r, clock, _ := newReservingRouter(t)
	for w := range uint64(2) {
		r.fleet.targetLoads[w].Fill = 4 // of 8 seats 2 are taken
	}
	MustRoute(t, r, tenant("light", 1)).Booking.Finish(1)
	var flood []*Booking
	for range 4 {
		flood = append(flood, MustRoute(t, r, tenant("flood", 1)).Booking)
	}
	r.Admission.pace = pace{answer: 8, count: 1, at: clock.Now(), seats: 1000, all: 8}
	for range 3 { // one is due at once, two in about 2 s
		r.Admission.pace.starts(clock.Now())
	}
	asked := send(t, r, t.Context(), 1, tenant("flood", 1))
	MustRoute(t, r, tenant("light", 1)).Booking.Finish(1)
	if depth, _ := r.Admission.QueueDepth(); depth != 1 {
		t.Fatalf("%d wait", depth)
	}
	clock.Advance(4 * time.Second)
	flood[0].Finish(1)
	if _, err := asked.get(t); err != nil {
		t.Error(err)
	}
}
