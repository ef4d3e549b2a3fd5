package replica

import (
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// fairly gives a router a fair queue.
var fairly = routertest.WithSettings(func(s *router.Settings) { s.RouterQueuePolicy = "fair" })

// wholePass is a prompt that leaves a worker no room.
const wholePass = 10_000

// occupies books a prompt of a tenant that leaves worker w no room.
func (r *testReplica) occupies(t *testing.T, name string, w uint64) *router.Booking {
	t.Helper()
	b, err := r.Book(router.Request{Tenant: fair.Tenant{Name: name}, NumTokens: wholePass, ExpectedOutput: 1}, kv.WorkerKey{Worker: w})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// waits lets a request of a tenant wait, which is named in went, with its booking, once it goes.
func (r *testReplica) waits(t *testing.T, name string, went chan<- gone) {
	t.Helper()
	request := router.Request{Tenant: fair.Tenant{Name: name}, NumTokens: wholePass, ExpectedOutput: 1}
	d, waiting, err := r.RouteOrWait(request, func(d router.Decision, err error) {
		if err == nil {
			went <- gone{name, d.Booking}
		}
	})
	if err != nil || waiting == nil {
		t.Fatalf("%s does not wait: %+v, %v", name, d.Target, err)
	}
}

// gone is a request that has waited.
type gone struct {
	tenant  string
	booking *router.Booking
}

// state returns a tenant's as a router sees it.
func (r *testReplica) state(name string) (state fair.State) {
	for _, s := range r.Admission.Tenants() {
		if s.Tenant == name {
			state = s
		}
	}
	return state
}

// sees waits until the state of a tenant is as wanted.
func (r *testReplica) seesTenant(t *testing.T, name, what string, want func(fair.State) bool) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, what, func() bool { return want(r.state(name)) })
	if err := r.Router.Check(); err != nil {
		t.Error(err)
	}
}

// TestATenantHasItsShareOnceOverAllRouters: one that is served at another router is behind one
// that is not.
func TestATenantHasItsShareOnceOverAllRouters(t *testing.T) {
	all := startReplicas(t, 2, nil, fairly)
	a, b := all[0], all[1]
	full := []*router.Booking{a.occupies(t, "full", 0), a.occupies(t, "full", 1)}
	went := make(chan gone, 4)
	a.waits(t, "both", went)
	a.waits(t, "here", went)

	elsewhere := b.occupies(t, "both", 1)
	a.seesTenant(t, "both", "it runs elsewhere", func(s fair.State) bool { return s.Elsewhere > 0 && s.Behind == 0 })
	if s := a.state("here"); s.Elsewhere != 0 {
		t.Errorf("another tenant runs nothing elsewhere: %+v", s)
	}
	elsewhere.FirstToken()
	elsewhere.Finish(1)
	a.seesTenant(t, "both", "it has been served elsewhere", func(s fair.State) bool { return s.Elsewhere == 0 && s.Behind > 0 })

	for i, want := range []string{"here", "both"} {
		full[i].Finish(1)
		select {
		case next := <-went:
			if next.tenant != want {
				t.Errorf("%d: %s goes, want %s", i, next.tenant, want)
			}
			full = append(full, next.booking)
		case <-time.After(20 * time.Second):
			t.Fatal("nobody goes")
		}
	}
	for _, b := range full {
		b.End()
	}
}

// TestAPeerThatLeavesTakesWhatRunsThere: nobody is behind for requests that are gone.
func TestAPeerThatLeavesTakesWhatRunsThere(t *testing.T) {
	all := startReplicas(t, 2, nil, fairly)
	a, b := all[0], all[1]
	full := []*router.Booking{a.occupies(t, "full", 0), a.occupies(t, "full", 1)}
	a.waits(t, "both", make(chan gone, 1))
	b.occupies(t, "both", 1)
	a.seesTenant(t, "both", "it runs elsewhere", func(s fair.State) bool { return s.Elsewhere > 0 })
	b.stop()
	a.seesTenant(t, "both", "nothing of it runs elsewhere", func(s fair.State) bool { return s.Elsewhere == 0 && s.Behind == 0 })
	for _, b := range full {
		b.End()
	}
}

// TestAPeerStopsATenantForTheDebtAtMost, whatever it reports.
func TestAPeerStopsATenantForTheDebtAtMost(t *testing.T) {
	rt := routertest.New(t, "kv", 1, fairly)
	r := &testReplica{Router: rt}
	full := r.occupies(t, "full", 0)
	r.waits(t, "told", make(chan gone, 1))
	r.waits(t, "other", make(chan gone, 1))
	p := newOther(testMesh(rt))
	var services []tenantService
	for range fair.MostReported {
		services = append(services, tenantService{"told", "standard", 1 << 63, 1 << 63})
	}
	for range 5 {
		if err := p.message(replicaTopic, encode(&ownMessage{Router: 9, Kind: kindDigest, Service: services})); err != nil {
			t.Fatal(err)
		}
		if s := r.state("told"); s.Behind+s.Elsewhere > fair.MostDebt || s.Behind <= 0 {
			t.Errorf("%+v", s)
		}
	}
	p.forget()
	if err := rt.Check(); err != nil {
		t.Error(err)
	}
	full.End()
}

// TestLongNamesAreNotTold: a message with them would be refused.
func TestLongNamesAreNotTold(t *testing.T) {
	long := fair.Service{Tenant: strings.Repeat("x", idLimit+1), Received: 1}
	if got := servicesOf([]fair.Service{long, {Tenant: "a", Class: fair.Batch, Received: 1e300, Running: 2}}); len(got) != 1 || got[0] != (tenantService{"a", "batch", maxService, 2}) {
		t.Errorf("%+v", got)
	}
}
