package router

import (
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

// bookSome books so many requests on a worker until the test ends.
func bookSome(t *testing.T, r *Router, worker uint64, requests int) {
	t.Helper()
	for i := range requests {
		b, err := r.Book(Request{Tokens: testkit.Tokens(uint32(1000*worker)+uint32(i), 640)}, kv.WorkerKey{Worker: worker})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(b.End)
	}
}

// alternativesOf routes a request and returns the chosen worker and the others.
func alternativesOf(t *testing.T, r *Router, q Request) (chosen uint64, others []uint64) {
	t.Helper()
	d, err := r.Route(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	d.Booking.End()
	for _, a := range d.Alternatives {
		others = append(others, a.Key.Worker)
	}
	return d.Target.Key.Worker, others
}

func TestAlternatives(t *testing.T) {
	tokens := testkit.Tokens(1, 256)
	tests := map[string]struct {
		prepare func(r *Router)
		request Request
		chosen  uint64
		want    []uint64
	}{
		"none are asked for": {request: Request{Tokens: tokens}, chosen: 0},
		"the least busy come first": {
			prepare: func(r *Router) { bookSome(t, r, 1, 3); bookSome(t, r, 2, 1); bookSome(t, r, 3, 2) },
			request: Request{Tokens: tokens, Alternatives: 3}, chosen: 0, want: []uint64{2, 3, 1},
		},
		"no more than are asked for": {
			prepare: func(r *Router) { bookSome(t, r, 1, 3); bookSome(t, r, 2, 1); bookSome(t, r, 3, 2) },
			request: Request{Tokens: tokens, Alternatives: 1}, chosen: 0, want: []uint64{2},
		},
		"only workers that may serve it": {
			prepare: func(r *Router) { bookSome(t, r, 1, 1); bookSome(t, r, 3, 2) },
			request: Request{Tokens: tokens, Alternatives: 3, Allowed: []uint64{0, 3}}, chosen: 0, want: []uint64{3},
		},
		"none of a request that names its worker": {
			request: Request{Tokens: tokens, Alternatives: 3, Pinned: &kv.WorkerKey{Worker: 2}}, chosen: 2,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			r := NewTestRouter(t, "work", 4)
			if test.prepare != nil {
				test.prepare(r)
			}
			chosen, others := alternativesOf(t, r, test.request)
			if test.prepare != nil && chosen != test.chosen {
				t.Errorf("chosen: %d, want %d", chosen, test.chosen)
			}
			if len(others) != len(test.want) {
				t.Fatalf("alternatives %v, want %v", others, test.want)
			}
			for i := range others {
				if others[i] != test.want[i] {
					t.Errorf("alternatives %v, want %v", others, test.want)
				}
			}
		})
	}
}

// TestARequestStaysAtItsHome pins that a home is kept like a session, and left when
// the worker is gone.
func TestARequestStaysAtItsHome(t *testing.T) {
	r := NewTestRouter(t, "work", 4)
	home := uint64(2)
	for range 8 {
		d, err := r.Route(t.Context(), Request{Tokens: testkit.Tokens(1, 64), Home: &home})
		if err != nil || d.Target.Key.Worker != home {
			t.Fatalf("worker %d (%v), want %d", d.Target.Key.Worker, err, home)
		}
		defer d.Booking.End()
	}
	r.Down(kv.WorkerKey{Worker: home})
	d, err := r.Route(t.Context(), Request{Tokens: testkit.Tokens(1, 64), Home: &home})
	if err != nil || d.Target.Key.Worker == home {
		t.Fatalf("worker %d (%v), want another one than %d, which is gone", d.Target.Key.Worker, err, home)
	}
	d.Booking.End()
}

// TestRebookMovesTheLoad pins that a request that a fallback has taken counts there.
func TestRebookMovesTheLoad(t *testing.T) {
	r := NewTestRouter(t, "work", 4)
	q := Request{Tokens: testkit.Tokens(1, 256)}
	first, err := r.Route(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	taken := kv.WorkerKey{Worker: (first.Target.Key.Worker + 1) % 4}
	first.Booking.End()
	second, err := r.Rebook(q, first, taken)
	if err != nil || second.Target.Key != taken {
		t.Fatalf("rebooked on %v (%v), want %v", second.Target.Key, err, taken)
	}
	if n := r.Load(first.Target.Key).InFlight; n != 0 {
		t.Errorf("%d in flight on the worker that did not take it", n)
	}
	if n := r.Load(taken).InFlight; n != 1 {
		t.Errorf("%d in flight on the worker that took it, want 1", n)
	}
	second.Booking.End()
	if _, err := r.Rebook(q, second, kv.WorkerKey{Worker: 9}); err == nil {
		t.Error("rebooked on a worker that is not there")
	}
}
