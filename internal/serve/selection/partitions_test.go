package selection

import (
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/testkit/routertest"
)

// TestPartitionsOfWorkers: peer routers and dumps name a worker by its model and group.
func TestPartitionsOfWorkers(t *testing.T) {
	rt := routertest.New(t, "kv", 0)
	rt.Up(kv.Target{Key: kv.WorkerKey{Worker: 1}, Models: []string{"m", "alias"}})
	rt.Up(kv.Target{Key: kv.WorkerKey{Worker: 2}, Models: []string{"other"}})
	p := NewPartitions("m", routertest.Models(rt))
	model, group := "registered", "g"
	if !p.put(registeredWorker{id: 3, spec: workerSpec{ModelName: &model, RoutingGroup: &group}}) {
		t.Fatal("not stored")
	}
	for worker, want := range map[uint64]events.Partition{
		1: {Model: "m", Group: events.DefaultGroup}, 2: {Model: "other", Group: events.DefaultGroup}, 3: {Model: model, Group: group},
		4: {Model: "m", Group: events.DefaultGroup}, // unknown
	} {
		if model, group := p.Of(worker); (events.Partition{Model: model, Group: group}) != want {
			t.Errorf("worker %d: %s %s, want %s", worker, model, group, want)
		}
	}
	p.SetRecovered(events.Recovered{Partition: map[uint64]events.Partition{3: {Model: "old", Group: "h"}, 5: {Model: "old", Group: "h"}}})
	parts := p.dumpParts([]kv.WorkerKey{{Worker: 3}, {Worker: 5}, {Worker: 5, Rank: 1}})
	if len(parts) != 2 || parts[0].Name != (events.Partition{Model: model, Group: group}).DumpName() || len(parts[1].Workers) != 2 {
		t.Errorf("dump in parts %+v", parts)
	}
	if !p.grouped() || p.group(3) != group || p.group(5) != events.DefaultGroup {
		t.Errorf("groups %v, %q, %q", p.grouped(), p.group(3), p.group(5))
	}
	p.remove(3)
	if model, _ := p.Of(3); model != "m" || p.grouped() {
		t.Errorf("removed: model %s, groups %v", model, p.grouped())
	}
}
