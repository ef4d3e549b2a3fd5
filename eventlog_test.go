package main

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// peerOf serves what a stream keeps for other routers, and returns its address.
func peerOf(t *testing.T, f *following) string {
	t.Helper()
	selection := NewSelection(SelectionSettings{}, newTestRouter(t, "round-robin", 0), NewRadix(), nil, slog.New(slog.DiscardHandler))
	selection.history = func(key WorkerKey) *EventLog {
		if key != testWorker {
			return nil
		}
		return f.History()
	}
	server := httptest.NewServer(selection.Handler())
	t.Cleanup(server.Close)
	return server.URL
}

// followAlone follows a publisher without its replay socket, but with the help
// of peers.
func followAlone(t *testing.T, p *fakePublisher, peers ...string) *following {
	t.Helper()
	src := sourceOf(p)
	src.Replay = ""
	before := 0
	p.locked(func() { before = len(p.subs) })
	f := followStream(t, src, func(s *EventStream) { s.Peers = NewEventPeers(peers, "") })
	f.until(t, func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.subs) > before
	}, func() string { return "no subscription" })
	return f
}

func TestEventStreamTakesAGapFromAnotherRouter(t *testing.T) {
	p := newFakePublisher(t)
	whole := followStream(t, sourceOf(p), nil)
	whole.subscribed(t, p)
	f := followAlone(t, p, peerOf(t, whole))
	p.batch(false, storedEvent(1, 0, 2))
	f.holds(t, 1, 5, 2)
	p.batch(true, storedEvent(1, 2, 4), storedEvent(2, 0, 1))
	p.batch(true, removedEvent(1, 3, 4))
	p.batch(false, storedEvent(3, 0, 1))
	for _, f := range []*following{whole, f} {
		f.holds(t, 1, 5, 3)
		f.holds(t, 2, 1, 1)
		f.holds(t, 3, 1, 1)
	}
	f.reaches(t, map[string]uint64{"duplicates": 1})
	f.has(t, map[string]uint64{"gaps": 1, "peer_events": 4, "peer_dumps": 0, "cold": 0, "last_seq": 3})
	p.batch(false, testEvent{"cleared": true})
	f.holds(t, 1, 5, 0)
	f.has(t, map[string]uint64{"gaps": 1, "cold": 0, "last_seq": 4})
}

func TestEventStreamTakesAllBlocksFromAnotherRouter(t *testing.T) {
	p := newFakePublisher(t)
	whole := followStream(t, sourceOf(p), nil)
	whole.subscribed(t, p)
	for i := range 20 {
		p.batch(false, storedEvent(i, 0, 3))
	}
	p.batch(false, storedEvent(0, 0, 3)) // a second copy
	whole.reaches(t, map[string]uint64{"batches": 21})
	f := followAlone(t, p, "http://127.0.0.1:1", peerOf(t, whole)) // the first does not answer
	p.batch(false, removedEvent(0, 2, 3), removedEvent(1, 2, 3))
	for i := range 20 {
		f.holds(t, i, 3, map[bool]int{true: 2, false: 3}[i == 1])
	}
	f.has(t, map[string]uint64{"gaps": 0, "peer_dumps": 1, "cold": 0})
	// It goes on from the batch that the dump is of, not from the dump's own ids.
	for i := range 5 {
		p.batch(false, storedEvent(30+i, 0, 1))
	}
	f.holds(t, 34, 1, 1)
	f.has(t, map[string]uint64{"gaps": 0, "peer_dumps": 1, "last_seq": 26, "batches": 5})
}

func TestEventStreamTakesAllBlocksWhereAPeersEventsBeginTooLate(t *testing.T) {
	p := newFakePublisher(t)
	whole := followStream(t, sourceOf(p), nil)
	whole.subscribed(t, p)
	f := followAlone(t, p, peerOf(t, whole))
	p.batch(false, storedEvent(1, 0, 2))
	f.holds(t, 1, 2, 2)
	for i := range loggedBatches + 1 {
		p.batch(true, storedEvent(2+i%50, i/50, i/50+1))
	}
	p.batch(false, removedEvent(1, 0, 2))
	f.holds(t, 2, 30, (loggedBatches+1+49)/50)
	f.holds(t, 1, 2, 0)
	f.has(t, map[string]uint64{"peer_dumps": 1, "cold": 0})
}

func TestEventStreamTakesNothingFromAStranger(t *testing.T) {
	p, other := newFakePublisher(t), newFakePublisher(t)
	stranger := followStream(t, sourceOf(other), nil)
	stranger.subscribed(t, other)
	f := followAlone(t, p, peerOf(t, stranger))
	for range 5 { // the same numbers, of another worker
		other.batch(false, storedEvent(9, 0, 2))
	}
	stranger.holds(t, 9, 2, 2)
	p.batch(false, storedEvent(1, 0, 2))
	f.holds(t, 1, 2, 2)
	p.batch(true, removedEvent(1, 0, 2))
	p.batch(false, storedEvent(2, 0, 2))
	f.holds(t, 2, 2, 2)
	f.holds(t, 1, 2, 0)
	f.holds(t, 9, 2, 0)
	f.has(t, map[string]uint64{"gaps": 1, "peer_dumps": 0, "peer_events": 0, "cold": 1})
}

func TestEventStreamTakesNothingFromARouterThatIsColdItself(t *testing.T) {
	p := newFakePublisher(t)
	p.batch(true, storedEvent(1, 0, 2))
	cold := followAlone(t, p)
	p.batch(false, storedEvent(2, 0, 2))
	cold.holds(t, 2, 2, 2)
	f := followAlone(t, p, peerOf(t, cold))
	p.batch(false, storedEvent(3, 0, 2))
	f.holds(t, 3, 2, 2)
	f.holds(t, 2, 2, 0)
	f.has(t, map[string]uint64{"peer_dumps": 0, "cold": 1})
}

func TestEventLogAnswersRangesAndElseAllBlocks(t *testing.T) {
	f := appliedStream(t)
	from := func(n uint64) *uint64 { return &n }
	if a := f.History().Query(nil, nil, nil); a.Kind != kindDump || a.Last != nil || len(a.Events) != 0 {
		t.Errorf("nothing yet: %+v", a)
	}
	for i := range loggedBatches + 10 {
		f.apply(uint64(i), payloadOf(t, float64(i), storedEvent(i, 0, 2), removedEvent(i, 1, 2)), true)
	}
	const newest, oldest = loggedBatches + 9, 10
	for _, c := range []struct {
		start, end       *uint64
		kind             string
		events           int
		first, last      uint64
		before, complete bool
	}{
		{nil, nil, kindDump, loggedBatches + 10, 0, newest, false, true},
		{from(0), nil, kindDump, loggedBatches + 10, 0, newest, false, true},
		{from(oldest - 1), nil, kindDump, loggedBatches + 10, 0, newest, false, true},
		{from(oldest), nil, kindEvents, 2 * loggedBatches, oldest, newest, false, true},
		{from(newest), nil, kindEvents, 2, newest, newest, true, true},
		{from(newest - 1), from(newest - 1), kindEvents, 2, newest - 1, newest - 1, true, true},
		{from(newest - 1), from(newest + 50), kindEvents, 4, newest - 1, newest, true, true},
		{from(newest + 1), nil, kindTooNew, 0, 0, newest, true, true},
		{from(newest + 9), nil, kindTooNew, 0, 0, newest, false, true},
	} {
		a := f.History().Query(c.start, c.end, nil)
		if a.Kind != c.kind || len(a.Events) != c.events || *a.Last != c.last || a.LastDigest == nil || (a.BeforeDigest != nil) != c.before || a.Complete != c.complete {
			t.Errorf("%v to %v: %s, %d events, last %d, %v", c.start, c.end, a.Kind, len(a.Events), *a.Last, a)
		}
		if c.events > 0 && a.Events[0].ID != c.first {
			t.Errorf("%v to %v begins at %d", c.start, c.end, a.Events[0].ID)
		}
	}
	if n := len(f.History().batches); n != loggedBatches {
		t.Errorf("%d batches kept", n)
	}

	// A few large batches push out many small ones.
	large := testEvent{"removed": make([]uint64, loggedBlocks/2)}
	f.apply(newest+1, payloadOf(t, 1, large), true)
	f.apply(newest+2, payloadOf(t, 1, large), true)
	f.apply(newest+3, payloadOf(t, 1, large), true)
	if n, blocks := len(f.History().batches), f.History().blocks; n != 2 || blocks != loggedBlocks {
		t.Errorf("%d batches with %d blocks kept", n, blocks)
	}

	// What was forgotten is not vouched for.
	f.forget("a test")
	if a := f.History().Query(from(newest), nil, nil); a.Kind != kindDump || a.Last != nil || a.Complete {
		t.Errorf("after all was forgotten: %+v", a)
	}
}

func TestEventsRouteRefusesWhatMakesNoSense(t *testing.T) {
	f := appliedStream(t, payloadOf(t, 1, storedEvent(1, 0, 2)))
	url := peerOf(t, f)
	known := fmt.Sprintf("/events?worker_id=%d&dp_rank=%d", testWorker.Worker, testWorker.Rank)
	for query, want := range map[string]int{
		known: 200, known + "&start=0": 200, known + "&start=0&end=0&check=0": 200, known + "&start=2&end=1": 400, known + "&start=-1": 400,
		"/events": 400, "/events?worker_id=x": 400, "/events?worker_id=3&dp_rank=4294967296": 400, "/events?worker_id=3": 404,
	} {
		status, body := get(t, url+query)
		if status != want || (want != 200) != gjson.GetBytes(body, "error").Exists() {
			t.Errorf("%s: %d %s", query, status, body)
		}
	}
	_, body := get(t, url+known+"&start=0&check=0")
	want := fmt.Sprintf(`{"event_id":0,"data":{"stored":{"parent_hash":null,"start_position":null,"blocks":[{"block_hash":%d,"tokens_hash":%d},`,
		blockIDs(1, 0, 1)[0], HashBlocks(nil, promptTokens(1, 1), testBlockSize, "", "")[0])
	if a := gjson.ParseBytes(body); a.Get("kind").Str != "events" || a.Get("block_size").Int() != testBlock || a.Get("events.0").Raw[:len(want)] != want ||
		a.Get("check_digest").Uint() == 0 || a.Get("check_digest").Raw != a.Get("last_digest").Raw {
		t.Errorf("%s", body)
	}
	response, err := http.Post(url+known, "application/json", nil)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusMethodNotAllowed && response.StatusCode != http.StatusNotFound {
		t.Errorf("POST: %s", response.Status)
	}
}

func TestReplaysAreAskedForAgainEverMoreSeldom(t *testing.T) {
	timing := NewEventStream(EventSource{}, NewRadix(), slog.New(slog.DiscardHandler)).timing
	for failures, want := range map[int]time.Duration{0: 200 * time.Millisecond, 1: 400 * time.Millisecond, 7: 25600 * time.Millisecond, 8: 30 * time.Second, 1000: 30 * time.Second} {
		if got := timing.retryPause(failures); got != want {
			t.Errorf("after %d failures %s, want %s", failures, got, want)
		}
	}
}

func TestRouterTakesFromItsPeerWhatAWorkerCannotReplay(t *testing.T) {
	farm := startMockSite(t, 1)
	key := WorkerKey{}
	chat := func(i int) {
		t.Helper()
		if _, err := farm.chat(t.Context(), say(strings.Repeat(fmt.Sprint("chat ", i, " "), 60)), false, 1); err != nil {
			t.Fatal(err)
		}
	}
	chat(1)
	farm.settle()
	before := farm.rooms.index.Blocks(key)
	second := startBeside(t, farm, ",replay=tcp"+deadURL(t)[len("http"):], "--indexer-peers="+farm.selection)
	eventually(t, 20*time.Second, "events followed", func() bool {
		stats := second.rooms.fleet.Streams()[key]
		return stats != nil && stats.Connected.Load() && farm.rank(key).events.pub.Subscribers() == 2
	})
	chat(2)
	farm.settle()
	all := farm.rooms.index.Blocks(key)
	eventually(t, 20*time.Second, "all blocks taken over", func() bool { return second.rooms.index.Blocks(key) == all })
	stats := second.rooms.fleet.Streams()[key]
	if before == 0 || all <= before || stats.PeerDumps.Load() == 0 || stats.Cold.Load() {
		t.Errorf("%d blocks, then %d; %v", before, all, stats.Counts())
	}
}
