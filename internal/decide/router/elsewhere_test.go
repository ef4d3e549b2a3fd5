package router

import (
	"math/rand/v2"
	"testing"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/testkit"
)

// site is two routers over one worker, which runs one request at a time. Each hears of the other's
// requests at once.
type site struct {
	t       *testing.T
	routers [2]*Router
	told    [2]*Elsewhere // by the other one

	owner   int // of the request that runs
	running *Booking
	remote  *Booking // the same at the other router
	went    []*Booking
	served  map[string]int
}

// waits lets n requests of a tenant wait at a router.
func (s *site) waits(at int, name string, n int) {
	s.t.Helper()
	for range n {
		_, waiting, err := s.routers[at].RouteOrWait(tenant(name, 20), func(d Decision, err error) {
			if err == nil {
				s.went = append(s.went, d.Booking)
				s.served[name]++
			}
		})
		if err != nil || waiting == nil {
			s.t.Fatalf("%s does not wait at router %d: %v", name, at, err)
		}
	}
}

// takeTurn ends the request that runs. The router that hears of it first sends its next one.
func (s *site) takeTurn(first int) {
	s.t.Helper()
	ended, remote := s.running, s.remote
	if first == s.owner {
		ended.Finish(1)
	} else {
		remote.End()
	}
	if len(s.went) != 1 {
		s.t.Fatalf("%d requests go", len(s.went))
	}
	s.owner, s.running, s.went = first, s.went[0], nil
	s.remote = s.routers[1-first].BookRemote(s.running.Change(ChangeAdd))
	ended.Finish(1)
	remote.End()
	if len(s.went) != 0 {
		s.t.Fatal("a second request goes")
	}
}

// TestATenantHasItsShareOnce: of two tenants, the one that sends to both routers is served as much as
// the one that sends to one of them. Without being told, the routers serve it three times as much.
func TestATenantHasItsShareOnce(t *testing.T) {
	const turns, tellEvery = 400, 3
	for name, test := range map[string]struct {
		tells       bool
		least, most float64 // share of the tenant at one router
	}{
		"told":     {true, 0.45, 0.55},
		"not told": {false, 0.2, 0.3},
	} {
		t.Run(name, func(t *testing.T) {
			s := &site{t: t, served: map[string]int{}}
			for i := range s.routers {
				s.routers[i], _ = newFairRouter(t, 1, func(k *Settings) { k.RouterQueueLimit = 2 * turns })
				s.told[i] = s.routers[i].Admission.Elsewhere()
			}
			var err error
			if s.running, err = s.routers[0].Book(tenant("first", 20), testkit.W0); err != nil {
				t.Fatal(err)
			}
			s.remote = s.routers[1].BookRemote(s.running.Change(ChangeAdd))
			s.waits(0, "both", turns)
			s.waits(0, "one", turns)
			s.waits(1, "both", turns)
			random := rand.New(rand.NewPCG(1, 1))
			for turn := range turns {
				s.takeTurn(random.IntN(2))
				if test.tells && turn%tellEvery == 0 {
					for i := range s.routers {
						s.told[i].Take(s.routers[1-i].Admission.Service())
					}
				}
			}
			for i, r := range s.routers {
				if err := r.Check(); err != nil {
					t.Errorf("router %d: %v", i, err)
				}
			}
			if share := float64(s.served["one"]) / turns; share < test.least || share > test.most {
				t.Errorf("the tenant at one router has a share of %.2f, want %v to %v: %v", share, test.least, test.most, s.served)
			}
		})
	}
}

// TestServiceElsewhereWithoutAFairQueue: what is reported counts nowhere.
func TestServiceElsewhereWithoutAFairQueue(t *testing.T) {
	r := NewTestRouter(t, "kv", 1)
	e := r.Admission.Elsewhere()
	e.Take([]fair.Service{{Tenant: "a", Received: 5, Running: 5}})
	e.End()
	if got := r.Admission.Service(); got != nil {
		t.Errorf("%+v", got)
	}
}
