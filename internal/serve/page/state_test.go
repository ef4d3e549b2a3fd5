package page

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/metrics"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/fleet/workers"
)

func TestStatesOfWorkers(t *testing.T) {
	tests := []struct {
		state  string
		models []string
		want   string
	}{
		{workers.StateReady, nil, StateReady},
		{workers.StateStarting, nil, StateStarting},
		{workers.StateConnecting, nil, StateStarting},
		{workers.StateConnecting, []string{"m"}, StateDown},
		{workers.StateDown, []string{"m"}, StateUnhealthy},
		{workers.StateRestarting, []string{"m"}, StateDown},
		{workers.StateStopped, []string{"m"}, StateDown},
	}
	for _, test := range tests {
		if got := stateOf(workers.Status{State: test.state, Models: test.models}); got != test.want {
			t.Errorf("%s with models %v: %s, want %s", test.state, test.models, got, test.want)
		}
		if got := stateOf(workers.Status{State: test.state, Models: test.models, Cordon: kv.CordonDraining}); got != StateDraining {
			t.Errorf("%s, draining: %s", test.state, got)
		}
		if test.want == StateReady {
			test.want = StateNotReady
		}
		if got := stateOf(workers.Status{State: test.state, Models: test.models, Cordon: kv.CordonNotReady}); got != test.want {
			t.Errorf("%s, not ready: %s, want %s", test.state, got, test.want)
		}
	}
}

func TestAWorkerThatIsHeldSaysWhy(t *testing.T) {
	for want, status := range map[string]workers.Status{
		"draining: finishes its in-flight requests and gets no new ones":                     {State: workers.StateReady, Cordon: kv.CordonDraining},
		"draining: finishes its in-flight requests and gets no new ones; connection refused": {State: workers.StateDown, Cordon: kv.CordonDraining, LastError: "connection refused"},
		"gets no new requests: discovery reports it as not ready":                            {State: workers.StateReady, Cordon: kv.CordonNotReady},
		"connection refused": {State: workers.StateDown, Cordon: kv.CordonNotReady, LastError: "connection refused"},
	} {
		status.Since, status.CordonedSince = time.Unix(4000, 0), time.Unix(4500, 0)
		if w := worker(workers.Sample{}, status, time.Unix(5000, 0)); w.Why != want || (w.Since == 4500) != (w.State == StateDraining || w.State == StateNotReady) {
			t.Errorf("%+v: %q, since %v", status, w.Why, w.Since)
		}
	}
}

func TestAWorkerIsShownWithItsLoadAndItsTrouble(t *testing.T) {
	now := time.Unix(5000, 0)
	sample := workers.Sample{Worker: kv.WorkerKey{Worker: 3, Rank: 1}, Restarts: 2, Blocks: 9, Lag: -1, Load: policy.Load{InFlight: 4, Published: policy.Published{Running: 3, Waiting: 2, KVUsage: 0.5}, Fresh: true}}
	if w := worker(sample, workers.Status{State: workers.StateStarting}, now); w.Known != "" || w.KnownWhy != "" {
		t.Errorf("before it is attached: %+v", w)
	}
	status := workers.Status{State: workers.StateReady, Since: now.Add(-time.Second), Restarts: 2,
		Cache: workers.CacheState{Known: kv.Approximate, BlockSize: 16, Reason: "no events", Remedy: "add them"}, Models: []string{"m"}, Disagg: kv.Disagg{Role: kv.RolePrefill}}
	w := worker(sample, status, now)
	if w.Running != 3 || w.Waiting != 2 || *w.KVUsage != 0.5 || !w.LoadKnown || w.Role != "prefill" || w.Why == "" || w.EventLag != nil || w.Model != "m" || w.Rank != 1 || w.Known != "approximate" || w.KnownWhy != "no events: add them" || w.BlockSize != 16 {
		t.Errorf("%+v", w)
	}
	sample.Load.Fresh, sample.Lag = false, time.Millisecond
	status.Since = now.Add(-time.Hour)
	if w = worker(sample, status, now); w.KVUsage != nil || w.LoadKnown || w.Running != 0 || w.Why != "" || *w.EventLag != 0.001 {
		t.Errorf("nothing recent is known: %+v", w)
	}
	status.State, status.LastError = workers.StateDown, "connection refused"
	if w = worker(sample, status, now); w.State != StateUnhealthy || w.Why != "connection refused" {
		t.Errorf("%+v", w)
	}
}

// TestTheFleetIsShownByRank has workers that were never reached: what the router notes
// of them counts only once they are ready.
func TestTheFleetIsShownByRank(t *testing.T) {
	b := newBench(t)
	for range 3 {
		d, err := b.router.Route(t.Context(), router.Request{Pinned: &kv.WorkerKey{Worker: 1}})
		if err != nil {
			t.Fatal(err)
		}
		d.Booking.FailAs(health.Status, "answered 500")
	}
	b.router.Health.Cordon(0)
	totals := metrics.Totals{Workers: map[string]metrics.WorkerTotals{"1": {Requests: 7, ComparedTokens: 100, CachedTokens: 25}}}
	list := b.fleet(totals, time.Now())
	if len(list) != 2 || list[0].Worker != 0 || list[0].State != StateStarting || !list[0].Cordoned || list[1].Cordoned || list[0].HitRate != nil || list[1].Requests != 7 || *list[1].HitRate != 0.25 {
		t.Errorf("%+v", list)
	}
	b.router.Names().Set([]kv.Worker{{ID: 0, Name: "pod-b"}, {ID: 1, Name: "pod-a"}})
	totals = metrics.Totals{Workers: map[string]metrics.WorkerTotals{"pod-b": {Requests: 5}}}
	if list := b.fleet(totals, time.Now()); list[0].Name != "pod-a" || list[0].Worker != 1 || list[1].Requests != 5 {
		t.Errorf("with names: %+v", list)
	}
	records, _ := b.router.Health.Records()
	if records[1].Why == "" || records[1].State != health.StateOut {
		t.Errorf("why it is out is not told: %+v", records[1])
	}
}

func TestTheBusiestTenantsAreShown(t *testing.T) {
	b := newBench(t)
	if all, more := b.tenants(); len(all) != 0 || all == nil || more != 0 {
		t.Errorf("without accounts: %v, %d more", all, more)
	}
	b.deps.Tenants = func() (all []Tenant) {
		for i := range maxTenants {
			all = append(all, Tenant{Tenant: fmt.Sprint("t", i), Requests: uint64(i)})
		}
		return append(all, Tenant{Tenant: "runs", Running: 1}, Tenant{Tenant: strings.Repeat("é", maxTenant), Waiting: Waiting{Batch: 2}})
	}
	all, more := b.tenants()
	if len(all) != maxTenants || more != 2 || all[0].Tenant != strings.Repeat("é", maxTenant/2) || all[1].Tenant != "runs" || all[2].Tenant != fmt.Sprint("t", maxTenants-1) {
		t.Errorf("%d and %d more: %+v", len(all), more, all[:3])
	}
}

func TestWaitingIsCountedByClass(t *testing.T) {
	var w Waiting
	for i, class := range fair.Classes {
		w.Add(class, i+1)
	}
	if w != (Waiting{Interactive: 1, Standard: 2, Batch: 3}) || w.All() != 6 {
		t.Errorf("%+v", w)
	}
}
