package workers

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// discoveredFleet is a running fleet that follows what a test reports.
type discoveredFleet struct {
	*fakeFleet
	lists chan []kv.Worker
	ended chan struct{} // closed when Follow has returned

	mu      sync.Mutex      // guards the rest
	held    map[uint64]bool // as reported to the router
	working bool            // requests are on their way everywhere
}

func followLists(t *testing.T, change func(*fakeFleet)) *discoveredFleet {
	t.Helper()
	d := &discoveredFleet{lists: make(chan []kv.Worker), ended: make(chan struct{}), held: map[uint64]bool{}}
	d.fakeFleet = newFakeFleet(t, fakeConfig(t, 0))
	if change != nil {
		change(d.fakeFleet)
	}
	d.hooks.Hold = func(worker uint64, hold bool) {
		d.mu.Lock()
		defer d.mu.Unlock()
		if delete(d.held, worker); hold {
			d.held[worker] = true
		}
	}
	d.hooks.Busy = func(uint64) bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.working
	}
	d.start()
	go func() { defer close(d.ended); d.Follow(d.lists) }()
	return d
}

// tell reports which workers there are now.
func (d *discoveredFleet) tell(list ...kv.Worker) {
	d.t.Helper()
	select {
	case d.lists <- list:
	case <-time.After(20 * time.Second):
		d.t.Fatal("nobody listens")
	}
}

func (d *discoveredFleet) work(working bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.working = working
}

// wantHeld waits until the router is told to hold exactly these.
func (d *discoveredFleet) wantHeld(want ...uint64) {
	d.t.Helper()
	testkit.Settles(d.t, func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		if got := slices.Sorted(maps.Keys(d.held)); !slices.Equal(got, want) {
			return fmt.Errorf("held %v, want %v", got, want)
		}
		return nil
	})
}

// wantLog waits for a text of the log.
func (d *discoveredFleet) wantLog(text string) {
	d.t.Helper()
	testkit.Settles(d.t, func() error {
		if !strings.Contains(d.out.String(), text) {
			return fmt.Errorf("no %q in the log:\n%s", text, d.out.Tail())
		}
		return nil
	})
}

// wantGone waits until the fleet has no worker.
func (d *discoveredFleet) wantGone() {
	d.t.Helper()
	testkit.Settles(d.t, func() error {
		if left := d.Workers(); len(left) > 0 {
			return fmt.Errorf("%+v are left", left)
		}
		return nil
	})
}

func (d *discoveredFleet) finish() {
	close(d.lists)
	<-d.ended
	d.stop()
}

// store puts a block into the index of a worker.
func (d *discoveredFleet) store(worker uint64) {
	d.t.Helper()
	if err := radixtest.Store(d.index, kv.WorkerKey{Worker: worker}, 0, false, []kv.StoredBlock{{Engine: 1, Local: 2}}); err != nil {
		d.t.Fatal(err)
	}
}

// startServer starts a worker that reports nothing of its events.
func startServer(t *testing.T) (*attachedServer, kv.Worker) {
	t.Helper()
	a := newAttachedServer(t, "")
	a.start()
	t.Cleanup(func() { a.server.Close() })
	return a, kv.Worker{ID: 1 << 52, Name: "pod-a", URL: "http://" + a.address}
}

const up, down = "up 4503599627370496.0 g1", "down 4503599627370496.0 g1"

func TestDiscoveredWorkersComeAndGo(t *testing.T) {
	_, w := startServer(t)
	d := followLists(t, nil)
	d.tell(w)
	d.wantEvents(up)
	if s := d.Workers()[0]; s.Name != "pod-a" || s.ID != w.ID || !s.Attached || s.Cordon != "" {
		t.Errorf("%+v", s)
	}
	if _, found := d.Remove(w.URL); found {
		t.Error("a client can remove it")
	}
	if _, err := d.Add(t.Context(), w.URL, ""); !errors.Is(err, ErrKnown) {
		t.Errorf("a client can add it again: %v", err)
	}
	d.store(w.ID)
	d.work(true)
	d.tell()
	d.wantHeld(w.ID)
	d.wantLog("(pod-a): no longer discovered: removing it when its in-flight requests have ended")
	d.tell() // again, and many looks later it works still
	if n := d.index.Blocks(kv.WorkerKey{Worker: w.ID}); n != 1 || len(d.Workers()) != 1 || d.Workers()[0].Cordon != kv.CordonDraining {
		t.Errorf("while it works: %d blocks, %+v", n, d.Workers())
	}
	d.tell(w) // it was not meant so
	d.wantHeld()
	d.tell()
	d.wantHeld(w.ID)
	d.work(false)
	d.wantGone()
	d.wantHeld()
	d.wantEvents(up, down)
	if n := d.index.Blocks(kv.WorkerKey{Worker: w.ID}); n != 0 {
		t.Errorf("%d blocks are left of it", n)
	}
	d.finish()
}

// TestANameIsOfWhoHasItNow: of two Pods of a StatefulSet the next one, while the one
// before ends its requests. Names go with their workers.
func TestANameIsOfWhoHasItNow(t *testing.T) {
	_, first := startServer(t)
	_, second := startServer(t)
	second.ID++
	names := new(kv.Names)
	d := followLists(t, func(f *fakeFleet) { f.deps.Names = names })
	wantNames := func(a, b string) {
		t.Helper()
		testkit.Settles(t, func() error {
			if names.Label(first.ID) != a || names.Label(second.ID) != b {
				return fmt.Errorf("%s and %s, want %s and %s", names.Label(first.ID), names.Label(second.ID), a, b)
			}
			return nil
		})
	}
	d.work(true)
	d.tell(first)
	d.wantEvents(up)
	wantNames("pod-a", "4503599627370497")
	d.tell() // it ends what it has begun
	d.wantHeld(first.ID)
	wantNames("pod-a", "4503599627370497")
	d.tell(second)
	d.wantEvents(up, "up 4503599627370497.0 g1")
	wantNames("pod-a#4503599627370496", "pod-a")
	d.work(false)
	testkit.Settles(t, func() error {
		if n := len(d.Workers()); n != 1 {
			return fmt.Errorf("%d workers", n)
		}
		return nil
	})
	wantNames("4503599627370496", "pod-a")
	second.Name = "pod-b"
	d.tell(second)
	wantNames("4503599627370496", "pod-b")
	d.tell()
	d.wantGone()
	testkit.Settles(t, func() error {
		if names.Any() {
			return errors.New("a name is left")
		}
		return nil
	})
	d.finish()
}

func TestRequestsOfAWorkerThatNobodyKnowsHaveALimit(t *testing.T) {
	_, w := startServer(t)
	d := followLists(t, func(f *fakeFleet) { f.timing.leaveLimit = 20 * time.Millisecond })
	d.work(true)
	d.tell(w)
	d.wantEvents(up)
	d.tell()
	d.wantGone()
	d.wantLog("removed\" cut=true")
	d.finish()
}

func TestAPodIsFollowedFromItsFirstReadiness(t *testing.T) {
	_, w := startServer(t)
	other := w
	other.ID, other.URL, other.Cordon = w.ID+1, "http://127.0.0.1:1", kv.CordonDraining
	d := followLists(t, nil)
	starting := w
	starting.Cordon = kv.CordonNotReady
	d.tell(starting, other)
	d.tell(starting, other) // the first has been dealt with
	if n := len(d.Workers()); n != 0 {
		t.Errorf("%d workers", n)
	}
	d.tell(w, other)
	d.wantEvents(up)
	d.tell(starting)
	d.wantHeld(w.ID)
	d.wantLog("(pod-a): not ready: it gets no new requests")
	d.tell(w)
	d.wantHeld()
	d.wantEvents(up) // its cache is what it was
	d.finish()
}

// TestADrainingWorkerMayRefuseConnections: it has closed its door, and ends what it has
// begun. Without a word for long it counts as down all the same.
func TestADrainingWorkerMayRefuseConnections(t *testing.T) {
	a, w := startServer(t)
	d := followLists(t, func(f *fakeFleet) { f.timing.healthLimit = time.Second })
	d.tell(w)
	d.wantEvents(up)
	d.store(w.ID)
	w.Cordon = kv.CordonDraining
	d.tell(w)
	d.wantHeld(w.ID)
	a.server.Close()
	for range 20 {
		d.ReportFailure(w.ID)
		<-time.After(2 * time.Millisecond)
	}
	if got, n := d.seen(), d.index.Blocks(kv.WorkerKey{Worker: w.ID}); len(got) != 1 || n != 1 {
		t.Errorf("events %q, %d blocks", got, n)
	}
	d.tell()
	d.wantGone()
	d.wantEvents(up, down)
	d.finish()
}

// TestARestartWhileDrainingIsAnotherProcess: its cache is empty.
func TestARestartWhileDrainingIsAnotherProcess(t *testing.T) {
	a, w := startServer(t)
	d := followLists(t, nil)
	d.tell(w)
	d.wantEvents(up)
	d.store(w.ID)
	w.Cordon = kv.CordonDraining
	d.tell(w)
	d.wantHeld(w.ID)
	a.server.Close()
	d.ReportFailure(w.ID)
	d.wantLog("(pod-a): refuses new connections")
	d.wantEvents(up)
	a.start()
	d.wantEvents(up, down, strings.Replace(up, "g1", "g2", 1))
	if n := d.index.Blocks(kv.WorkerKey{Worker: w.ID}); n != 0 {
		t.Errorf("%d blocks of the old process", n)
	}
	d.finish()
}

// TestADrainingWorkerIsDownWhereItsAddressIsGone with its Pod.
func TestADrainingWorkerIsDownWhereItsAddressIsGone(t *testing.T) {
	for _, test := range []struct {
		err    error
		missed bool
	}{
		{syscall.ECONNREFUSED, false},
		{&probe.StatusError{Path: "/health", Status: 503}, false},
		{syscall.EHOSTUNREACH, true},
		{syscall.ENETUNREACH, true},
	} {
		if stays := mayDrain(fmt.Errorf("worker does not answer: %w", test.err)); stays == test.missed {
			t.Errorf("%v: stays up is %t", test.err, stays)
		}
	}
}

func TestAnotherRoleIsTakenUpInPlace(t *testing.T) {
	_, w := startServer(t)
	var mu sync.Mutex
	var roles []kv.Disagg
	d := followLists(t, func(f *fakeFleet) {
		note := f.hooks.Up
		f.hooks.Up = func(target kv.Target) {
			mu.Lock()
			roles = append(roles, target.Disagg)
			mu.Unlock()
			note(target)
		}
	})
	d.tell(w)
	d.wantEvents(up)
	d.store(w.ID)
	w.Role = kv.RoleDecode
	d.tell(w)
	d.wantEvents(up, up)
	mu.Lock()
	defer mu.Unlock()
	if want := (kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindNIXL}); roles[1] != want || d.Workers()[0].Disagg != want {
		t.Errorf("%+v", roles)
	}
	if n := d.index.Blocks(kv.WorkerKey{Worker: w.ID}); n != 1 {
		t.Error("its cache was forgotten")
	}
	d.finish()
}

func TestOtherEventEndpointsAreFollowedWithoutCuttingRequests(t *testing.T) {
	_, w := startServer(t)
	d := followLists(t, nil)
	w.KVEvents = "tcp://127.0.0.1:1"
	d.tell(w)
	d.wantEvents(up)
	d.store(w.ID)
	w.KVEvents = "tcp://127.0.0.1:2"
	d.tell(w)
	d.wantEvents(up, up)
	if s := d.Workers()[0]; s.KVEvents != w.KVEvents || d.index.Blocks(kv.WorkerKey{Worker: w.ID}) != 0 || len(d.Streams()) != 1 {
		t.Errorf("%+v", s)
	}
	d.finish()
}

func TestAnAddressHasOneWorker(t *testing.T) {
	_, w := startServer(t)
	d := followLists(t, nil)
	id, err := d.Add(t.Context(), w.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	d.tell(w)
	d.wantLog(fmt.Sprintf("discovered worker pod-a is not used: worker %d has its address", id))
	if _, found := d.Remove(w.URL); !found {
		t.Fatal("not found")
	}
	testkit.Settles(t, func() error {
		if all := d.Workers(); len(all) != 1 || all[0].ID != w.ID || all[0].State != StateReady {
			return fmt.Errorf("%+v", all)
		}
		return nil
	})
	// A pod that has gone, whose request hangs, and another one at its address.
	d.work(true)
	next := w
	next.ID, next.Name = w.ID+1, "pod-b"
	d.tell(next)
	testkit.Settles(t, func() error {
		if all := d.Workers(); len(all) != 1 || all[0].ID != next.ID || all[0].State != StateReady {
			return fmt.Errorf("%+v", all)
		}
		return nil
	})
	// The same pod at another address.
	b := newAttachedServer(t, "")
	b.start()
	t.Cleanup(func() { b.server.Close() })
	next.URL = "http://" + b.address
	d.tell(next)
	testkit.Settles(t, func() error {
		if all := d.Workers(); len(all) != 1 || all[0].URL != next.URL || all[0].State != StateReady {
			return fmt.Errorf("%+v", all)
		}
		return nil
	})
	d.finish()
}

func TestServersWithoutARouteForEventsPublishWhereAllDo(t *testing.T) {
	const pages = "# TYPE vllm:cache_config_info gauge\n" +
		`vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="8"} 1` + "\n" +
		`vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="8"} 1` + "\n"
	for name, test := range map[string]struct {
		sources, metrics string
		want             string
	}{
		"one rank":      {want: "[tcp://127.0.0.1:5557]"},
		"two ranks":     {metrics: pages, want: "[tcp://127.0.0.1:5557 tcp://127.0.0.1:5558]"},
		"it says none":  {sources: "{}", want: "[]"},
		"it says where": {sources: `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:7000"}}`, want: "[tcp://127.0.0.1:7000]"},
	} {
		t.Run(name, func(t *testing.T) {
			a, w := startServer(t)
			a.set(func() { a.sources, a.metrics = test.sources, test.metrics })
			f := newFakeFleet(t, fakeConfig(t, 0))
			w.EventsPort = 5557
			found := []string{}
			for _, source := range f.eventSources(t.Context(), newWorker(serverOf(w, ""), true, false, StateConnecting)) {
				found = append(found, source.Endpoint)
			}
			if got := fmt.Sprint(found); got != test.want {
				t.Errorf("%s, want %s", got, test.want)
			}
		})
	}
}

// TestRanksAreAskedForAgainWhereThePageFails: with rank 0 alone the others would get no
// requests.
func TestRanksAreAskedForAgainWhereThePageFails(t *testing.T) {
	a, w := startServer(t)
	a.metrics = "vllm:cache_config_info is no number\n"
	w.EventsPort = 5557
	f := newFakeFleet(t, fakeConfig(t, 0))
	m := newWorker(serverOf(w, ""), true, false, StateConnecting)
	for _, want := range []int{0, 1} { // at last it has one rank
		if got := f.eventSources(t.Context(), m); len(got) != want {
			t.Errorf("%v, want %d", got, want)
		}
	}
}

// TestEndpointsThatAreNotToldInTimeAreAskedForAgain, for as long as at first.
func TestEndpointsThatAreNotToldInTimeAreAskedForAgain(t *testing.T) {
	a, w := startServer(t)
	d := followLists(t, func(f *fakeFleet) { f.timing.silentAfter = 2 * time.Second })
	d.tell(w)
	d.wantLog("its KV cache is known approximately: no KV events of it are followed")
	a.set(func() { a.sources = "not JSON" })
	w.Load = "tcp://127.0.0.1:1"
	d.tell(w)
	d.wantEvents(up, up)
	a.set(func() { a.sources = twoRanks })
	testkit.Settles(t, func() error {
		if n := len(d.Streams()); n != 2 {
			return fmt.Errorf("%d event streams", n)
		}
		return nil
	})
	d.finish()
}

// TestRemediesNameWhatCanBeDone with such a worker.
func TestRemediesNameWhatCanBeDone(t *testing.T) {
	for name, test := range map[string]struct {
		w    *worker
		want string
	}{
		"--worker":   {&worker{}, ", or set replay= of --worker"},
		"added":      {&worker{follower: &follower{}}, ""},
		"discovered": {&worker{follower: &follower{}, discovered: &discovered{}}, ", or, with --discovery file:, set replay in the file"},
	} {
		if got := (&incarnation{w: test.w}).orName("replay"); got != test.want {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// TestAPublisherThatTwoMayOwnIsFollowedForNeither: its blocks would count for both.
func TestAPublisherThatTwoMayOwnIsFollowedForNeither(t *testing.T) {
	_, first := startServer(t)
	b, second := startServer(t)
	second.ID, second.Name = first.ID+1, "pod-b"
	d := followLists(t, nil)
	first.EventsPort, second.EventsPort = 5557, 5557
	follows := func(want ...uint64) {
		t.Helper()
		testkit.Settles(t, func() error {
			got := []uint64{}
			for key := range d.Streams() {
				got = append(got, key.Worker)
			}
			slices.Sort(got)
			if !slices.Equal(got, want) || len(d.seen()) == 0 {
				return fmt.Errorf("followed are %d, want %d", got, want)
			}
			return nil
		})
	}
	d.tell(first)
	follows(first.ID)
	d.tell(first, second)
	d.wantLog("(pod-b): its KV events are not followed")
	follows()
	d.wantLog("(pod-a): its KV events are not followed")
	second.EventsPort = 5558 // another rank of a Pod
	d.tell(first, second)
	follows(first.ID, second.ID)
	second.EventsPort = 5557
	d.tell(first, second)
	follows()
	second.KVEvents = "tcp://127.0.0.1:7000"
	d.tell(first, second)
	follows(first.ID, second.ID)
	second.KVEvents = "tcp://localhost:5557" // it is the second's
	d.tell(first, second)
	follows(second.ID)
	second.KVEvents = ""
	b.set(func() { b.sources = "{}" })
	d.tell(first, second)
	follows(first.ID)
	d.tell(first)
	follows(first.ID)
	d.finish()
}

// TestAStartedWorkerOwnsItsPort, before it runs, too.
func TestAStartedWorkerOwnsItsPort(t *testing.T) {
	f := newFakeFleet(t, fakeConfig(t, 1))
	_, w := startServer(t)
	for port, want := range map[int]int{f.cfg.Ports.KVEvents: 0, f.cfg.Ports.KVEvents + 1: 1} {
		w.EventsPort = uint16(port)
		if got := f.eventSources(t.Context(), newWorker(serverOf(w, ""), true, false, StateConnecting)); len(got) != want {
			t.Errorf("port %d: %v", port, got)
		}
	}
}

// TestDiscoveredWorkersGetTheKeyOfTheFlags, unlike those that a client adds.
func TestDiscoveredWorkersGetTheKeyOfTheFlags(t *testing.T) {
	_, w := startServer(t)
	d := followLists(t, func(f *fakeFleet) { f.cfg.WorkerKey = "sesame" })
	d.tell(w)
	d.wantEvents(up)
	if m := d.all()[0]; m.bearer() != "sesame" || m.mayFollow(events.Source{Endpoint: "ipc:///run/x"}) {
		t.Errorf("key %q", m.bearer())
	}
	d.finish()
}
