package workers

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/testkit"
)

// TestAnEventEndpointIsOfOneWorker: the blocks of an engine are not those of another one, for which the
// same endpoint is named. The second is followed once the first has left, and not while it is away.
func TestAnEventEndpointIsOfOneWorker(t *testing.T) {
	defer http.DefaultClient.CloseIdleConnections()
	p, own := testkit.NewFakePublisher(t), testkit.NewFakePublisher(t)
	p.Batch(true, testkit.StoredEvent(1, 0, 9))
	own.Batch(true, testkit.StoredEvent(2, 0, 5))
	f := registeredFleet(t, func(f *fakeFleet) { f.cfg.BlockSize = testkit.BlockSize })
	register := func(id uint64, endpoint, replay string) *watchedServer {
		s := newWatchedServer(t, http.StatusOK)
		t.Cleanup(s.end)
		r := registration(s.URL)
		r.ID = id
		r.Sources = []events.Source{{Worker: kv.WorkerKey{Worker: id}, Endpoint: endpoint, Replay: replay, Topic: "kv"}}
		f.register(r)
		return s
	}
	blocks := func(want map[uint64]int, reason string) {
		t.Helper()
		testkit.Settles(t, func() error {
			var reasons []string
			for _, w := range f.Workers() {
				reasons = append(reasons, w.Cache.Reason)
				if n := f.index.Blocks(kv.WorkerKey{Worker: w.ID}); n != want[w.ID] {
					return fmt.Errorf("worker %d has %d blocks, want %d", w.ID, n, want[w.ID])
				}
			}
			if all := strings.Join(reasons, ""); len(f.Workers()) != len(want) || all != reason {
				return fmt.Errorf("%d workers: %q", len(f.Workers()), all)
			}
			return nil
		})
	}
	port := strings.TrimPrefix(p.Pub.Endpoint(), "tcp://127.0.0.1")
	first := register(5, p.Pub.Endpoint(), p.Router.Endpoint())
	register(6, "tcp://localhost"+port, p.Router.Endpoint())
	register(7, own.Pub.Endpoint(), p.Router.Endpoint()) // of which only the live events are its own
	taken := fmt.Sprintf("its KV events endpoint tcp://localhost%s is that of worker 5", port)
	blocks(map[uint64]int{5: 9, 6: 0, 7: 0}, taken)
	if log := f.observed.out.String(); !strings.Contains(log, "worker 6: its KV events endpoint is not used: it is that of worker 5") ||
		!strings.Contains(log, "worker 7: its replay endpoint is not used: it is that of worker 5") {
		t.Errorf("log:\n%s", log)
	}
	first.wantLooks(t, 2)
	first.Close()
	blocks(map[uint64]int{5: 0, 6: 0, 7: 0}, taken)
	if !f.Unregister(7) || !f.Unregister(5) {
		t.Error("a worker is not there")
	}
	blocks(map[uint64]int{6: 9}, "")
	f.stop()
}

// TestClaimsTellHostsApart: other loopback addresses than the usual one can have servers of their own.
func TestClaimsTellHostsApart(t *testing.T) {
	var c claims
	first, second := &worker{id: 1}, &worker{id: 2}
	for _, taken := range []struct {
		endpoint string
		by       *worker
		owner    *worker
	}{
		{"tcp://127.0.0.1:5557", first, nil}, {"tcp://127.0.0.1:5557", first, nil},
		{"tcp://localhost:5557", second, first}, {"tcp://127.0.0.1:5558", second, nil}, {"tcp://127.0.0.2:5557", second, nil},
		{"tcp://GPU-1:5557", first, nil}, {"tcp://gpu-1:5557", second, first},
	} {
		if owner := c.take(taken.endpoint, taken.by); owner != taken.owner {
			t.Errorf("%s for worker %d: taken by %v, want %v", taken.endpoint, taken.by.id, owner, taken.owner)
		}
	}
	c.leave(second, []string{"tcp://127.0.0.1:5557"})
	if c.free("tcp://localhost:5557") {
		t.Error("another worker's endpoint was freed")
	}
	c.leave(first, []string{"tcp://localhost:5557"})
	if !c.free("tcp://127.0.0.1:5557") {
		t.Error("the endpoint was not freed")
	}
}
