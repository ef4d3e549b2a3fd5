package router

import (
	"math"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
)

// sharing returns a router over two workers whose bindings go to told.
func sharing(t *testing.T) (r *Router, clock *testkit.StandingClock, told *[]SessionBinding) {
	t.Helper()
	r, clock, told = New(testkit.Defaults[Settings](), Deps{Index: radix.NewTree(), Policy: policytest.MustPolicy(t, "round-robin"), BlockSize: testkit.BlockSize, Seed: 1}), new(testkit.StandingClock), new([]SessionBinding)
	r.now, r.settings.SessionHeader = clock.Now, "x-session-id"
	for i := range uint64(2) {
		r.Up(kv.Target{Key: kv.WorkerKey{Worker: i}})
	}
	r.Share(&Sharing{Writer: 5, Booking: func(string, *Booking) {}, Session: func(b SessionBinding) { *told = append(*told, b) }, Ejection: func(kv.WorkerKey, time.Duration) {}})
	return r, clock, told
}

func TestOthersAreToldWhereASessionIs(t *testing.T) {
	r, clock, told := sharing(t)
	ask := func(owner, name string) kv.WorkerKey {
		d, err := r.Route(t.Context(), Request{NumTokens: 1, Session: r.SessionOf(owner, name), SessionID: SessionID(owner, name)})
		if err != nil {
			t.Fatal(err)
		}
		d.Booking.End()
		return d.Target.Key
	}
	first := ask("", "a")
	ask("", "a") // it is known where it is
	if len(*told) != 1 || (*told)[0].ID != "a" || (*told)[0].Worker != first || (*told)[0].Writer != 5 || (*told)[0].Sequence != uint64(clock.Now().UnixNano()) {
		t.Fatalf("%+v", *told)
	}
	clock.Advance(r.settings.SessionTTL / 2)
	ask("", "a") // others would forget it
	ask("someone", "a")
	if len(*told) != 3 || (*told)[1].Worker != first || (*told)[2].ID != "someone\x00a" || (*told)[2].Sequence <= (*told)[1].Sequence {
		t.Errorf("%+v", *told)
	}
	ask("", strings.Repeat("x", maxSessionID))
	ask("", "\xff")
	if len(*told) != 3 {
		t.Errorf("a session without a name for others was told: %+v", (*told)[3:])
	}
}

func TestTheLaterBindingOfASessionHolds(t *testing.T) {
	r, clock, _ := sharing(t)
	now := uint64(clock.Now().UnixNano())
	zero, one := kv.WorkerKey{Worker: 0}, kv.WorkerKey{Worker: 1}
	where := func() (w kv.WorkerKey) {
		if s := r.sessions.at(r.SessionOf("", "a"), r.settings.SessionTTL, clock.Now()); s != nil {
			return s.worker
		}
		return kv.WorkerKey{Worker: math.MaxUint64}
	}
	for _, test := range []struct {
		name    string
		binding SessionBinding
		want    kv.WorkerKey
		took    bool
	}{
		{"the first", SessionBinding{ID: "a", Worker: zero, Sequence: now, Writer: 5}, zero, true},
		{"an earlier one", SessionBinding{ID: "a", Worker: one, Sequence: now - 1, Writer: 9}, zero, false},
		{"of the same time by a lower writer", SessionBinding{ID: "a", Worker: one, Sequence: now, Writer: 4}, zero, false},
		{"by a higher one", SessionBinding{ID: "a", Worker: one, Sequence: now, Writer: 6}, one, true},
		{"of a worker that is not up", SessionBinding{ID: "a", Worker: kv.WorkerKey{Worker: 7}, Sequence: now + 1}, one, false},
		{"of a rank that is not", SessionBinding{ID: "a", Worker: kv.WorkerKey{Rank: 3}, Sequence: now + 1}, one, false},
		{"of any rank", SessionBinding{ID: "a", Worker: kv.WorkerKey{Rank: 3}, AnyRank: true, Sequence: now + 1}, zero, true},
		{"of a time that would win for ever", SessionBinding{ID: "a", Worker: one, Sequence: math.MaxUint64}, zero, false},
		{"of no session", SessionBinding{Worker: one, Sequence: now + 2}, zero, false},
		{"of a name too long", SessionBinding{ID: strings.Repeat("a", maxSessionID+1), Worker: one, Sequence: now + 2}, zero, false},
	} {
		if took := r.TakeSession(test.binding); took != test.took || where() != test.want {
			t.Errorf("%s: %v, at %v; want %v, %v", test.name, took, where(), test.took, test.want)
		}
		if err := r.Check(); err != nil {
			t.Errorf("%s: %v", test.name, err)
		}
	}
	clock.Advance(r.settings.SessionTTL)
	if !r.TakeSession(SessionBinding{ID: "a", Worker: one, Sequence: 1}) || where() != one {
		t.Error("a forgotten session is not bound anew")
	}
	for i := range r.settings.SessionLimit + 10 {
		r.TakeSession(SessionBinding{ID: time.Duration(i).String(), Worker: one, Sequence: now})
	}
	if known, _ := r.Sessions(); known != r.settings.SessionLimit {
		t.Errorf("%d sessions", known)
	}
}
