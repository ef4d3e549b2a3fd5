package replica

import (
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// member returns the only other router that r knows of.
func (r *testReplica) member(t *testing.T) Member {
	t.Helper()
	s := r.Status()
	if len(s.Members) != 1 {
		t.Fatalf("%+v", s)
	}
	return s.Members[0]
}

func TestStatusShowsTheOtherRouters(t *testing.T) {
	began := time.Now()
	all := startReplicas(t, 2, nil)
	a, b := all[0], all[1]
	b.Router.Up(kv.Target{Key: kv.WorkerKey{Worker: 7}, Generation: 1}) // which a has not
	book := func(w uint64) *router.Booking {
		t.Helper()
		booking, err := b.Book(router.Request{Tokens: testkit.PromptTokens(int(w), 3)}, kv.WorkerKey{Worker: w})
		if err != nil {
			t.Fatal(err)
		}
		return booking
	}
	open := []*router.Booking{book(0), book(1), book(7)}
	testkit.Eventually(t, 20*time.Second, "all is known", func() bool {
		m := a.member(t)
		return m.Kvrouter && m.InFlight == 2 && m.Homeless == 1 && m.Differs == 0
	})
	s, m := a.Status(), a.member(t)
	if s.ID == m.ID || s.ID == "" || !s.Connected || s.Counts.Received != a.Received.Load() || s.Counts.Unsent != 3 || s.Counts.Missed != 4 {
		t.Errorf("%+v", s)
	}
	if m.Since.Before(began) || m.Since.After(time.Now()) || m.Lag < 0 || m.Lag > a.timing.silence.Seconds() {
		t.Errorf("%+v", m)
	}
	for _, booking := range open {
		booking.End()
	}
	testkit.Eventually(t, 20*time.Second, "all has ended", func() bool {
		m := a.member(t)
		return m.InFlight == 0 && m.Homeless == 0
	})
	b.stop()
	testkit.Eventually(t, 20*time.Second, "it has left", func() bool { return len(a.Status().Members) == 0 })
}

// TestStatusShowsWhatIsRepaired: digests in a row that differ are counted until one does not.
func TestStatusShowsWhatIsRepaired(t *testing.T) {
	rt := routertest.New(t, "kv", 1)
	mesh := testMesh(rt)
	mesh.members, mesh.link = map[string]*otherRouter{}, &testLink{}
	take := func(m ownMessage) {
		t.Helper()
		m.Router = 9
		if err := mesh.Take("peer", replicaTopic, encode(&m)); err != nil {
			t.Fatal(err)
		}
	}
	sums := make([]uint64, buckets)
	for i, want := range []int{1, 2, 3, 0, 1} {
		sums[0], sums[1] = 1, 1
		if want == 0 {
			sums[0], sums[1] = 0, 0
		}
		if i == 2 {
			sums[1] = 0 // a part of it is repaired
		}
		take(ownMessage{Kind: kindDigest, Sums: sums})
		if got := mesh.Status().Members[0].Differs; got != want {
			t.Errorf("%d: %d digests differ, want %d", i, got, want)
		}
	}
}

// TestStatusLeavesOutWhoIsNoRouter: who has said nothing that makes sense is counted, not shown.
func TestStatusLeavesOutWhoIsNoRouter(t *testing.T) {
	mesh := testMesh(routertest.New(t, "kv", 1))
	mesh.members, mesh.link = map[string]*otherRouter{}, &testLink{}
	for range 3 {
		if mesh.Take("liar", SlotTopic, []byte{0xc1}) == nil {
			t.Fatal("taken")
		}
	}
	if s := mesh.Status(); len(s.Members) != 0 || s.Counts.Refused != 3 {
		t.Errorf("%+v", s)
	}
}
