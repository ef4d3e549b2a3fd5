package replica

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// TestDigestsFindWhatWasLost has one side publish random changes, of which the other
// loses many: their sums are equal exactly where their bookings are, and telling the
// buckets that differ again makes them equal.
func TestDigestsFindWhatWasLost(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	rt := routertest.New(t, "kv", 3)
	var changes []message
	rt.Share(&router.Sharing{
		Booking:  func(kind string, b *router.Booking) { changes = append(changes, message{kind: kind, booking: b}) },
		Session:  func(router.SessionBinding) {},
		Ejection: func(kv.WorkerKey, time.Duration) {},
	})
	other := routertest.New(t, "kv", 2) // one worker is not up there
	p := newOther(testMesh(other))
	var books ownBooks
	var open []router.Decision
	tell := func(kind string, b *router.Booking, request string) {
		event := slotEvent{BlockSize: testkit.BlockSize, Event: slotOf(b.Change(kind), request, 2)}
		if kind == router.ChangeAdd {
			event.Detail = detailOf(b.Change(kind))
		}
		if err := p.message(SlotTopic, encode(&event)); err != nil {
			t.Fatal(err)
		}
	}
	for round := range 60 {
		for range 40 {
			at := random.IntN(max(1, len(open)))
			switch n := random.IntN(4); {
			case len(open) == 0 || n < 2:
				request := router.Request{Tokens: testkit.PromptTokens(random.IntN(9), 1+random.IntN(9))}
				if n == 0 && rt.Booking(fmt.Sprint(round%7)) == nil {
					request.ID = fmt.Sprint(round % 7) // names that come again
				}
				d, err := rt.Route(t.Context(), request)
				if err != nil {
					t.Fatal(err)
				}
				open = append(open, d)
			case n == 2:
				open[at].Booking.FirstToken()
			default:
				open[at].Booking.End()
				open = slices.Delete(open, at, at+1)
			}
		}
		lost := 0
		for _, m := range changes {
			request := books.apply(m.kind, m.booking, 2)
			if random.IntN(10) == 0 {
				lost++
				continue
			}
			tell(m.kind, m.booking, request)
		}
		changes = nil
		ask := p.compare(books.sums[:])
		if lost > 0 && round == 0 && ask == 0 {
			t.Fatal("what was lost is not found")
		}
		for i := range uint64(buckets) {
			if ask&(1<<i) == 0 {
				continue
			}
			p.keep(i, slices.Collect(maps.Keys(books.buckets[i])))
			for request, held := range books.buckets[i] {
				tell(router.ChangeAdd, held.Booking, request)
				if held.computed {
					tell(router.ChangePrefill, held.Booking, request)
				}
			}
		}
		if ask := p.compare(books.sums[:]); ask != 0 || len(p.open) != len(open) || len(books.names) != len(open) {
			t.Fatalf("round %d: buckets %b still differ; %d are held, %d told, %d in flight", round, ask, len(p.open), len(books.names), len(open))
		}
		for w := range uint64(2) {
			if a, b := rt.Load(kv.WorkerKey{Worker: w}), other.Load(kv.WorkerKey{Worker: w}); a.InFlight != b.InFlight || a.PrefillTokens != b.PrefillTokens || a.ActiveBlocks != b.ActiveBlocks || a.ContextTokens != b.ContextTokens {
				t.Fatalf("round %d: worker %d has %+v and %+v", round, w, a, b)
			}
		}
		if err := p.check(); err != nil {
			t.Fatal(err)
		}
		if err := other.Check(); err != nil {
			t.Fatal(err)
		}
	}
	p.forget()
	if load := other.Load(testkit.W0); load.InFlight != 0 {
		t.Errorf("%+v", load)
	}
}

// TestReplicasTellTheEndOfWhatTheirQueueLost: an end that was lost on its way to the
// wire would be in flight for ever.
func TestReplicasTellTheEndOfWhatTheirQueueLost(t *testing.T) {
	all := startReplicas(t, 2, func(m *Mesh) { m.queue = make(chan message, 2) })
	for i := 0; i < 300 || all[0].Dropped.Load() == 0; i++ {
		d := all[0].book(t, testkit.PromptTokens(i, 1))
		d.Booking.FirstToken()
		d.Booking.End()
	}
	all[1].sees(t, "nothing in flight", all[0].Loads())
}

// TestAskingInVainBecomesRare: a router that never reports what is missing is not asked
// for ever.
func TestAskingInVainBecomesRare(t *testing.T) {
	p := newOther(testMesh(routertest.New(t, "kv", 1)))
	asked := 0
	for range 1000 {
		if p.compare([]uint64{1}) != 0 {
			asked++
		}
	}
	if asked < askAtOnce || asked > askAtOnce+1000/askSeldom {
		t.Errorf("asked %d times", asked)
	}
	if p.compare(nil); p.compare([]uint64{2}) == 0 {
		t.Error("what is missing later is not asked for")
	}
}

// check reports the first count that does not hold.
func (p *otherRouter) check() error {
	var want sums
	hashes, waiting := 0, 0
	for request, held := range p.open {
		if request != held.change.Request || held.sum != sumOf(request, &held.change, held.computed) {
			return fmt.Errorf("booking %q does not match its sum", request)
		}
		want[bucketOf(request)] += held.sum
		hashes += len(held.change.Sequence)
		if held.Booking == nil && !held.refused {
			waiting++
		}
	}
	if want != p.sums || hashes != p.hashes || waiting != p.waiting {
		return fmt.Errorf("%d hashes and %d waiting are noted, there are %d and %d; sums hold: %v", p.hashes, p.waiting, hashes, waiting, want == p.sums)
	}
	return nil
}

// BenchmarkForget ends 100,000 bookings of a router that has left.
func BenchmarkForget(b *testing.B) {
	rt := routertest.New(b, "kv", 4)
	for b.Loop() {
		b.StopTimer()
		p := newOther(testMesh(rt))
		for i := range uint64(100_000) {
			p.takeChange(router.Change{Kind: router.ChangeAdd, Request: fmt.Sprint(i), Worker: kv.WorkerKey{Worker: i % 4}, Tokens: 100})
		}
		b.StartTimer()
		p.forget()
	}
}
