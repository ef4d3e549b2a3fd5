package selection

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/routertest"
)

func TestReservationIDsAreUsedOnceAtATime(t *testing.T) {
	r := newReservations()
	rt := routertest.New(t, "kv", 0)
	rt.Up(kv.Target{Key: kv.WorkerKey{Worker: 1}})
	book := func(id string) *router.Booking {
		booking, err := rt.Book(router.Request{ID: id, Tokens: testkit.Tokens(1, 8)}, kv.WorkerKey{Worker: 1})
		if err != nil {
			t.Fatal(err)
		}
		return booking
	}
	var taken errReserved
	if err := r.claim("a", "", 2); err != nil {
		t.Fatal(err)
	}
	if err := r.claim("a", "", 2); !errors.As(err, &taken) || r.get("a") != nil {
		t.Errorf("claimed twice: %v", err)
	}
	booking := book("a")
	r.install("a", booking)
	if err := r.claim("a", "", 2); !errors.As(err, &taken) || r.get("a") != booking {
		t.Errorf("claimed while booked: %v", err)
	}
	booking.End() // as an expired one is
	if r.get("a") != nil || r.take("a") != nil {
		t.Error("a booking that has ended is still held")
	}
	if err := r.claim("a", "", 2); err != nil {
		t.Errorf("the id of an ended booking: %v", err)
	}
	r.release("a")

	for i := range 3 * firstReservationsGC { // forgotten ones do not pile up
		id := fmt.Sprint(i)
		if err := r.claim(id, "", 2); err != nil {
			t.Fatal(err)
		}
		booking := book(id)
		r.install(id, booking)
		booking.End()
	}
	if len(r.byID) > firstReservationsGC {
		t.Errorf("%d ended reservations are kept", len(r.byID))
	}
}

// TestReservationsAreBoundedInBlocks over all clients, and one client leaves room for another's;
// those that have ended count no more.
func TestReservationsAreBoundedInBlocks(t *testing.T) {
	const each = maxReservedBlocks / 8
	r := newReservations()
	now := time.Unix(1, 0)
	r.now = func() time.Time { return now }
	rt := routertest.New(t, "kv", 0)
	rt.Up(kv.Target{Key: kv.WorkerKey{Worker: 1}})
	var bookings []*router.Booking
	book := func(client string) error {
		id := fmt.Sprint(len(bookings))
		if err := r.claim(id, client, each); err != nil {
			return err
		}
		booking, err := rt.Book(router.Request{ID: id, Tokens: testkit.Tokens(1, 8)}, kv.WorkerKey{Worker: 1})
		if err != nil {
			t.Fatal(err)
		}
		r.install(id, booking)
		bookings = append(bookings, booking)
		return nil
	}
	for range 7 {
		if err := book("greedy"); err != nil {
			t.Fatal(err)
		}
	}
	if err := book("greedy"); !errors.Is(err, errTooManyBlocks) {
		t.Errorf("the eighth of eight: %v", err)
	}
	if err := book("other"); err != nil {
		t.Errorf("another client: %v", err)
	}
	if err := book("third"); !errors.Is(err, errTooManyBlocks) {
		t.Errorf("beyond the bound: %v", err)
	}
	for _, booking := range bookings[:4] {
		booking.End() // as expired ones do
	}
	now = now.Add(reservationsGCEvery)
	if err := book("third"); err != nil {
		t.Errorf("after the end of others: %v", err)
	}
	for i, booking := range bookings {
		r.release(fmt.Sprint(i))
		booking.End()
	}
	if n := r.blocks.Held(); n != 0 {
		t.Errorf("%d blocks of no reservation", n)
	}
}

func TestPendingSelectionsAreBoundedAndExpire(t *testing.T) {
	p := newPendingSelections()
	now := time.Unix(0, 0)
	p.now = func() time.Time { return now }
	key := func(id string) pendingKey { return pendingKey{events.Partition{Model: "m", Group: "g"}, id} }
	put := func(id string, blocks int) {
		p.put(pendingSelection{key: key(id), request: router.Request{Local: make([]uint64, blocks)}})
	}
	has := func(id string) bool {
		_, ok := p.get(key(id))
		return ok
	}
	put("a", 1)
	put("a", 2)
	if p.blocks != 2 || !has("a") || has("b") {
		t.Errorf("%d blocks are kept", p.blocks)
	}
	now = now.Add(pendingFor)
	if !has("a") {
		t.Error("gone too early")
	}
	now = now.Add(1)
	if has("a") {
		t.Error("kept too long")
	}
	put("b", 1)
	if p.order.Len() != 1 || p.blocks != 1 {
		t.Errorf("%d are kept with %d blocks", p.order.Len(), p.blocks)
	}
	for i := range maxPending {
		put(fmt.Sprint(i), 0)
	}
	if has("b") || !has("0") || p.order.Len() != maxPending {
		t.Errorf("%d are kept", p.order.Len())
	}
	put("long", maxPendingBlocks)
	if !has("long") || !has("1") || p.blocks != maxPendingBlocks {
		t.Errorf("%d blocks are kept", p.blocks)
	}
	put("next", 1)
	if has("long") || p.blocks != 1 || !has("next") {
		t.Errorf("%d blocks are kept", p.blocks)
	}
	p.drop(key("next"))
	if has("next") || p.order.Len() != len(p.byKey) {
		t.Error("dropped, but kept")
	}
}

// TestReservationsEndWithTheirWorker: the policy learns that nobody served them.
func TestReservationsEndWithTheirWorker(t *testing.T) {
	rule := new(policytest.Clerk)
	rt := routertest.New(t, "", 1, routertest.WithPolicy(rule))
	r := newReservations()
	r.install("a", routertest.MustRoute(t, rt, router.Request{ID: "a"}).Booking)
	r.releaseWorker(0)
	if got := rule.Endings(); !slices.Equal(got, []policytest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}) {
		t.Errorf("endings %v", got)
	}
	if r.get("a") != nil {
		t.Error("the reservation is kept")
	}
}
