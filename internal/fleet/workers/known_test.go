package workers

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// TestHowACacheIsKnown: exactly only while all events since the worker's start have been followed.
func TestHowACacheIsKnown(t *testing.T) {
	follows := Settings{KVEvents: true, Assumes: true}
	const late = time.Minute // longer than unheardAfter
	for name, c := range map[string]struct {
		settings Settings
		silent   bool          // no events are followed
		age      time.Duration // of the incarnation
		stats    func(*events.Stats)
		want     kv.Knowledge
		reason   string // its beginning
	}{
		"connected, with the whole history": {settings: follows, age: late, stats: func(s *events.Stats) { s.Connected.Store(true); s.Batches.Store(3) }, want: kv.Exact},
		"connected, nothing published yet":  {settings: follows, age: late, stats: func(s *events.Stats) { s.Connected.Store(true) }, want: kv.Exact},
		"connecting":                        {settings: follows, want: kv.Exact},
		"not connected for long":            {settings: follows, age: late, want: kv.Approximate, reason: "no connection to its KV events at tcp://"},
		"the history is incomplete": {settings: follows, age: late, stats: func(s *events.Stats) { s.Connected.Store(true); s.Cold.Store(true); s.Batches.Store(3) },
			want: kv.Approximate, reason: "its KV events do not go back"},
		"the history is not known yet": {settings: follows, age: late, stats: func(s *events.Stats) { s.Connected.Store(true); s.Cold.Store(true) }, want: kv.Exact},
		"blocks of another size": {settings: follows, age: late, stats: func(s *events.Stats) {
			s.Connected.Store(true)
			s.Cold.Store(true)
			s.Batches.Store(3)
			s.BlockSizeMismatch.Store(1)
		}, want: kv.Approximate, reason: "the blocks of its KV events"},
		"blocks of another size, known again": {settings: follows, age: late, stats: func(s *events.Stats) {
			s.Connected.Store(true)
			s.Batches.Store(3)
			s.BlockSizeMismatch.Store(1)
		}, want: kv.Exact},
		"no events":                      {settings: follows, silent: true, want: kv.Approximate, reason: "no KV events of it"},
		"events are off":                 {settings: Settings{Assumes: true}, want: kv.Approximate, reason: "the router does not follow KV events"},
		"the policy uses no prefixes":    {settings: Settings{}, want: kv.LoadOnly, reason: "the policy does not use"},
		"events without what is assumed": {settings: Settings{KVEvents: true}, silent: true, want: kv.Approximate, reason: "no KV events of it"},
	} {
		t.Run(name, func(t *testing.T) {
			var log testkit.LogBuffer
			f, key, _ := comparedFleet(t, &log)
			c.settings.BlockSize = testkit.BlockSize
			f.cfg = c.settings
			w := f.workers[0]
			if w.streams[key].Src.Endpoint = "tcp://127.0.0.1:1"; c.silent {
				clear(w.streams)
			} else if c.stats != nil {
				c.stats(w.streams[key].Stats())
			}
			in := &incarnation{f: f, w: w, began: time.Now().Add(-c.age), blockSize: 16, targets: []kv.Target{{Key: key}}}
			known, reason := in.knows(key)
			if known != c.want || !strings.HasPrefix(reason, c.reason) || (reason == "") != (c.want == kv.Exact) {
				t.Errorf("%s: %q; want %s: %q", known, reason, c.want, c.reason)
			}
			if changed := in.reviseTargets(); changed != (c.want != kv.Exact) || in.targets[0].Known != c.want {
				t.Errorf("target known %s, changed: %t", in.targets[0].Known, changed)
			}
			shown := f.Workers()[0].Cache
			if shown.Known != c.want || shown.Reason != reason || shown.BlockSize != 16 || (shown.Remedy != "") != (c.want == kv.Approximate && c.settings.KVEvents) {
				t.Errorf("status %+v", shown)
			}
			if in.reviseTargets() || f.Workers()[0].Cache != shown {
				t.Errorf("nothing has changed, but %+v", f.Workers()[0].Cache)
			}
		})
	}
}

// TestAWorkerIsKnownAsItsLeastKnownRank, while each rank is routed to as it is known itself.
func TestAWorkerIsKnownAsItsLeastKnownRank(t *testing.T) {
	var log testkit.LogBuffer
	f, key, _ := comparedFleet(t, &log)
	f.cfg.KVEvents, f.cfg.Assumes = true, true
	w := f.workers[0]
	w.streams[key].Stats().Connected.Store(true)
	other := kv.WorkerKey{Worker: key.Worker, Rank: 1} // of which no events are followed
	in := &incarnation{f: f, w: w, began: time.Now(), blockSize: 16, targets: []kv.Target{{Key: key}, {Key: other}}}
	in.reviseTargets()
	if in.targets[0].Known != kv.Exact || in.targets[1].Known != kv.Approximate || f.Workers()[0].Cache.Known != kv.Approximate {
		t.Errorf("%+v, %+v", in.targets, f.Workers()[0].Cache)
	}
}

// TestAdviceForAnUnknownEngine: vLLM's flags are advised as vLLM's where nothing shows that it runs.
func TestAdviceForAnUnknownEngine(t *testing.T) {
	var log testkit.LogBuffer
	f, _, _ := comparedFleet(t, &log)
	in := &incarnation{f: f, w: f.workers[0]}
	in.w.attached = true
	if remedy := in.eventsRemedy(); !strings.HasPrefix(remedy, "if it runs vLLM, start it with --kv-events-config") {
		t.Error(remedy)
	}
	in.reported.Engines = 1
	if remedy := in.eventsRemedy(); !strings.HasPrefix(remedy, "start it with --kv-events-config") {
		t.Error(remedy)
	}
}

// TestEventsSayTheBlockSizeOfEveryWorker, also of one that the router has started, or that was registered
// with another one.
func TestEventsSayTheBlockSizeOfEveryWorker(t *testing.T) {
	const given = testkit.BlockSize * 3 / 2
	for name, begin := range map[string]func(*testing.T, *testkit.FakePublisher) (*fakeFleet, kv.WorkerKey){
		"started": func(t *testing.T, p *testkit.FakePublisher) (*fakeFleet, kv.WorkerKey) {
			config := fakeConfig(t, 1)
			config.fleet.Ports.KVEvents, config.fleet.Ports.KVReplay = portOf(t, p.Pub), portOf(t, p.Router)
			config.fleet.BlockSize = given
			f := newFakeFleet(t, config)
			f.start()
			return f, kv.WorkerKey{}
		},
		"registered": func(t *testing.T, p *testkit.FakePublisher) (*fakeFleet, kv.WorkerKey) {
			a := newAttachedServer(t, "")
			a.start()
			t.Cleanup(func() { a.server.Close() })
			f := registeredFleet(t, nil)
			r, key := registration("http://"+a.address), kv.WorkerKey{Worker: 5}
			r.BlockSize = given
			r.Sources = []events.Source{{Worker: key, Endpoint: p.Pub.Endpoint(), Replay: p.Router.Endpoint(), Topic: "kv"}}
			f.register(r)
			return f, key
		},
	} {
		t.Run(name, func(t *testing.T) {
			defer http.DefaultClient.CloseIdleConnections()
			p := testkit.NewFakePublisher(t)
			p.Batch(true, testkit.StoredEvent(1, 0, 9))
			f, key := begin(t, p)
			testkit.Settles(t, func() error {
				if c := f.Workers()[0].Cache; c.Known != kv.Exact || c.BlockSize != testkit.BlockSize || f.index.Blocks(key) != 9 {
					return fmt.Errorf("%+v with %d blocks", c, f.index.Blocks(key))
				}
				return nil
			})
			f.stop()
		})
	}
}

func portOf(t *testing.T, l *zmq.Listener) int {
	t.Helper()
	u, err := url.Parse(l.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.Atoi(u.Port())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// TestEventsOfEverOtherSizesAreFollowedAnewMoreAndMoreRarely: each time costs the history of the worker.
func TestEventsOfEverOtherSizesAreFollowedAnewMoreAndMoreRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log testkit.LogBuffer
		f, _, _ := comparedFleet(t, &log)
		in := &incarnation{f: f, w: f.workers[0], blockSize: 16}
		var times []time.Duration
		for began, size := time.Now(), 17; time.Since(began) < time.Hour; time.Sleep(100 * time.Millisecond) {
			in.noteBlockSize(size)
			if in.resized() {
				times, in.blockSize, size = append(times, time.Since(began)), size, size^1
			}
		}
		if len(times) < 60 || len(times) > 70 || times[1] < time.Second || times[3] < 7*time.Second {
			t.Errorf("%d times, at %v", len(times), times)
		}
		if woken := len(in.w.wake); woken != 1 {
			t.Errorf("%d health checks are due", woken)
		}
	})
}

// TestAnUnseenRestartEmptiesWhatIsAssumed: a server that is back before the next health check has lost its
// cache, and its counters began again.
func TestAnUnseenRestartEmptiesWhatIsAssumed(t *testing.T) {
	defer http.DefaultClient.CloseIdleConnections()
	a := newAttachedServer(t, "")
	a.metrics = counterPage(900)
	a.start()
	f := attachedFleet(t, a, "")
	f.start()
	f.wantEvents("up 3.0 g1")
	key := kv.WorkerKey{Worker: 3}
	if err := radixtest.Store(f.index, key, 0, false, []kv.StoredBlock{{Engine: 1, Local: 2}}); err != nil {
		t.Fatal(err)
	}
	tokens := int64(900)
	testkit.Settles(t, func() error {
		tokens--
		a.set(func() { a.metrics = counterPage(tokens) })
		if n := f.index.Blocks(key); n != 0 {
			return fmt.Errorf("%d blocks are left", n)
		}
		return nil
	})
	f.wantEvents("up 3.0 g1")
	f.stop()
	a.server.Close()
}

// TestASlowStartIsNoLossOfEvents: a worker that has started for minutes has had no time to publish.
func TestASlowStartIsNoLossOfEvents(t *testing.T) {
	defer http.DefaultClient.CloseIdleConnections()
	a := newAttachedServer(t, "")
	a.start()
	defer a.server.Close()
	f := newFakeFleet(t, fakeConfig(t, 1))
	f.members, f.listener = fakeMembers{f}, fakeListener{&f.hooks}
	w := f.workers[0]
	w.spec.URL = "http://" + a.address
	in := f.begin(t.Context(), w)
	defer in.end("the test is over")
	in.followStarted()
	in.began = time.Now().Add(-2 * f.timing.unheardAfter)
	if known, _ := in.knows(kv.WorkerKey{}); known != kv.Approximate {
		t.Errorf("%s before it was ready", known)
	}
	if !f.becomeReady(in) {
		t.Fatal("it is not ready")
	}
	if c := f.Workers()[0].Cache; c.Known != kv.Exact {
		t.Errorf("%+v", c)
	}
}
