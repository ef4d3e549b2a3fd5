package router

import (
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
)

// TestAdaptersAreBookedAndReleased: a worker in whose slots requests run with other adapters
// gets none of a further one, until they end or the worker is another incarnation.
func TestAdaptersAreBookedAndReleased(t *testing.T) {
	r := NewTestRouter(t, "work", 2)
	for _, w := range []kv.WorkerKey{testkit.W0, testkit.W1} {
		r.ShowAdapters(w, policy.AdapterReport{Slots: 1})
	}
	ask := func(adapter string, on ...uint64) Request {
		return Request{Tokens: testkit.Tokens(1, 10*testkit.BlockSize), LoRA: adapter, Model: "", Allowed: on}
	}
	goes := func(adapter string) uint64 {
		request := ask(adapter)
		request.QueryOnly = true
		return MustRoute(t, r, request).Target.Key.Worker
	}
	first, second := MustRoute(t, r, ask("a", 0)), MustRoute(t, r, ask("b", 1))
	if goes("a") != 0 || goes("b") != 1 {
		t.Error("requests do not go where their adapter is in use")
	}
	if load := r.Load(testkit.W0); load.Adapters.Slots() != 1 || !load.Adapters.Resident("a") {
		t.Errorf("%+v", load.Adapters)
	}
	if counts := r.Load(testkit.W0).Adapters.Counts(); counts[policy.AdapterLoads] != 1 {
		t.Errorf("counts %v", counts)
	}
	first.Booking.FirstToken()
	first.Booking.Finish(1)
	if goes("c") != 0 {
		t.Error("a further adapter does not go where a slot is free")
	}
	if goes("a") != 0 {
		t.Error("an adapter does not stay where it is loaded")
	}
	r.Down(testkit.W0)
	r.Up(kv.Target{Key: testkit.W0})
	if load := r.Load(testkit.W0); load.Adapters.Resident("a") {
		t.Error("a new incarnation has the adapters of the old one")
	}
	second.Booking.End()
	second.Booking.End()
	third := MustRoute(t, r, ask("b", 1))
	third.Booking.End()
	if !r.Load(testkit.W1).Adapters.Resident("b") {
		t.Error("an idle adapter is not loaded any more")
	}
	r.ShowAdapters(kv.WorkerKey{Worker: 7}, policy.AdapterReport{Slots: 1}) // is not up
	if r.fleet.loads.byWorker[kv.WorkerKey{Worker: 7}] != nil {
		t.Error("a late report keeps the books of a worker that is gone")
	}
	if err := r.Check(); err != nil {
		t.Error(err)
	}
}

// TestOtherRoutersAdaptersCount: a booking of another router holds a slot too.
func TestOtherRoutersAdaptersCount(t *testing.T) {
	r := NewTestRouter(t, "work", 2)
	for _, w := range []kv.WorkerKey{testkit.W0, testkit.W1} {
		r.ShowAdapters(w, policy.AdapterReport{Slots: 1})
	}
	remote := r.BookRemote(Change{Kind: ChangeAdd, Worker: testkit.W1, Tokens: 64, Uncached: 64, LoRA: "a"})
	if d := MustRoute(t, r, Request{Tokens: testkit.Tokens(1, 64), LoRA: "a", QueryOnly: true}); d.Target.Key != testkit.W1 {
		t.Errorf("goes to %v, want where another router's request has the adapter", d.Target.Key)
	}
	remote.End()
	if err := r.Check(); err != nil {
		t.Error(err)
	}
}
