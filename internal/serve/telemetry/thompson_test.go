package telemetry

import (
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

func scrape(t *Metrics) testkit.MetricsLines {
	w := httptest.NewRecorder()
	t.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	return testkit.ReadMetricsPage(w.Body.String())
}

func TestThompsonMetricsAreOfThatPolicyAndTheFleet(t *testing.T) {
	other := New(Deps{Thompson: routertest.New(t, "kv", 1), Fleet: func() []uint64 { return nil }})
	for name := range scrape(other) {
		if strings.HasPrefix(name, "thompson_") {
			t.Errorf("%s with policy kv", name)
		}
	}

	rt := routertest.New(t, "thompson", 0)
	fleet := []uint64{0, 1}
	telemetry := New(Deps{Thompson: rt, Fleet: func() []uint64 { return fleet }})
	ofWorker := func(page testkit.MetricsLines, worker int) (n int) {
		for name := range page {
			if strings.HasPrefix(name, "thompson_") && strings.Contains(name, fmt.Sprintf(`worker_id="%d"`, worker)) {
				n++
			}
		}
		return n
	}
	for _, key := range []kv.WorkerKey{{Worker: 0}, {Worker: 0, Rank: 1}, {Worker: 1}} {
		rt.Up(kv.Target{Key: key})
		d := routertest.MustRoute(t, rt, router.Request{Tokens: testkit.Tokens(1, 8)})
		d.Booking.Finish(1)
		rt.Down(key)
	}
	page := scrape(telemetry)
	both, one := ofWorker(page, 0), ofWorker(page, 1)
	if one == 0 || both != 2*one {
		t.Errorf("%d series of worker 0 with two ranks, %d of worker 1", both, one)
	}
	fleet = fleet[1:]
	page = scrape(telemetry)
	if gone, stays := ofWorker(page, 0), ofWorker(page, 1); gone != 0 || stays != one {
		t.Errorf("%d series of a worker that is gone, %d of the other, want %d", gone, stays, one)
	}
}
