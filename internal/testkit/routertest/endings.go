package routertest

import (
	"kvrouter/internal/policy"
	"kvrouter/internal/router"
	"testing"
)

// toldEnding is what of a Feedback does not depend on the clock.
type ToldEnding struct {
	Ending    policy.Ending
	TokensOut int
}

func (p *Clerk) Endings() (list []ToldEnding) {
	for _, f := range p.Told() {
		list = append(list, ToldEnding{f.Ending, f.TokensOut})
	}
	return list
}

// inFlight is how many requests are booked.
func InFlight(r *router.Router) (n int) {
	for _, load := range r.Loads() {
		n += load.ActiveRequests
	}
	return n
}

// oncePerDecision checks that every decision with a number was judged, once.
func (p *Clerk) OncePerDecision(t *testing.T) {
	t.Helper()
	judged := map[uint64]int{}
	for _, f := range p.Told() {
		judged[f.Decision]++
		if f.Decision == 0 || f.Now.IsZero() || f.Latency < 0 {
			t.Errorf("feedback %+v", f)
		}
	}
	for _, q := range p.Queries() {
		want := 1
		if q.Decision == 0 {
			want = 0
		}
		if judged[q.Decision] != want {
			t.Errorf("decision %d was judged %d times, want %d", q.Decision, judged[q.Decision], want)
		}
	}
}
