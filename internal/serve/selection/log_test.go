package selection

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/eventstest"
	"kvrouter/internal/testkit/routertest"
)

// peerOf serves what a stream keeps for other routers, and returns its address.
func peerOf(t *testing.T, f *eventstest.Follower) string {
	t.Helper()
	selection := New(Settings{}, testDeps(routertest.New(t, "round-robin", 0), nil))
	selection.history = func(key kv.WorkerKey) *events.Log {
		if key != testkit.EventWorker {
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
func followAlone(t *testing.T, p *testkit.FakePublisher, peers ...string) *eventstest.Follower {
	t.Helper()
	src := eventstest.SourceOf(p)
	src.Replay = ""
	before := 0
	p.Locked(func() { before = len(p.Subs) })
	f := eventstest.Follow(t, src, func(s *events.Stream) { s.Peers = events.NewPeers(peers, "", nil) })
	f.Until(t, func() bool {
		p.Mu.Lock()
		defer p.Mu.Unlock()
		return len(p.Subs) > before
	}, func() string { return "no subscription" })
	return f
}

func TestEventStreamTakesAGapFromAnotherRouter(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	whole := eventstest.Follow(t, eventstest.SourceOf(p), nil)
	whole.Subscribed(t, p)
	f := followAlone(t, p, peerOf(t, whole))
	p.Batch(false, testkit.StoredEvent(1, 0, 2))
	f.Holds(t, 1, 5, 2)
	p.Batch(true, testkit.StoredEvent(1, 2, 4), testkit.StoredEvent(2, 0, 1))
	p.Batch(true, testkit.RemovedEvent(1, 3, 4))
	p.Batch(false, testkit.StoredEvent(3, 0, 1))
	for _, f := range []*eventstest.Follower{whole, f} {
		f.Holds(t, 1, 5, 3)
		f.Holds(t, 2, 1, 1)
		f.Holds(t, 3, 1, 1)
	}
	f.Reaches(t, map[string]uint64{"duplicates": 1})
	f.Has(t, map[string]uint64{"gaps": 1, "peer_events": 4, "peer_dumps": 0, "cold": 0, "last_seq": 3})
	p.Batch(false, testkit.Event{"cleared": true})
	f.Holds(t, 1, 5, 0)
	f.Has(t, map[string]uint64{"gaps": 1, "cold": 0, "last_seq": 4})
}

func TestEventStreamTakesAllBlocksFromAnotherRouter(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	whole := eventstest.Follow(t, eventstest.SourceOf(p), nil)
	whole.Subscribed(t, p)
	for i := range 20 {
		p.Batch(false, testkit.StoredEvent(i, 0, 3))
	}
	p.Batch(false, testkit.StoredEvent(0, 0, 3)) // a second copy
	whole.Reaches(t, map[string]uint64{"batches": 21})
	f := followAlone(t, p, "http://127.0.0.1:1", peerOf(t, whole)) // the first does not answer
	p.Batch(false, testkit.RemovedEvent(0, 2, 3), testkit.RemovedEvent(1, 2, 3))
	for i := range 20 {
		f.Holds(t, i, 3, map[bool]int{true: 2, false: 3}[i == 1])
	}
	f.Has(t, map[string]uint64{"gaps": 0, "peer_dumps": 1, "cold": 0})
	// It continues from the batch that the dump is of, not from the dump's own ids.
	for i := range 5 {
		p.Batch(false, testkit.StoredEvent(30+i, 0, 1))
	}
	f.Holds(t, 34, 1, 1)
	f.Has(t, map[string]uint64{"gaps": 0, "peer_dumps": 1, "last_seq": 26, "batches": 5})
}

func TestEventStreamTakesAllBlocksWhereAPeersEventsBeginTooLate(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	whole := eventstest.Follow(t, eventstest.SourceOf(p), nil)
	whole.Subscribed(t, p)
	f := followAlone(t, p, peerOf(t, whole))
	p.Batch(false, testkit.StoredEvent(1, 0, 2))
	f.Holds(t, 1, 2, 2)
	for i := range events.LoggedBatches + 1 {
		p.Batch(true, testkit.StoredEvent(2+i%50, i/50, i/50+1))
	}
	p.Batch(false, testkit.RemovedEvent(1, 0, 2))
	f.Holds(t, 2, 30, (events.LoggedBatches+1+49)/50)
	f.Holds(t, 1, 2, 0)
	f.Has(t, map[string]uint64{"peer_dumps": 1, "cold": 0})
}

func TestEventStreamTakesNothingFromAStranger(t *testing.T) {
	p, other := testkit.NewFakePublisher(t), testkit.NewFakePublisher(t)
	stranger := eventstest.Follow(t, eventstest.SourceOf(other), nil)
	stranger.Subscribed(t, other)
	f := followAlone(t, p, peerOf(t, stranger))
	for range 5 { // the same numbers, of another worker
		other.Batch(false, testkit.StoredEvent(9, 0, 2))
	}
	stranger.Holds(t, 9, 2, 2)
	p.Batch(false, testkit.StoredEvent(1, 0, 2))
	f.Holds(t, 1, 2, 2)
	p.Batch(true, testkit.RemovedEvent(1, 0, 2))
	p.Batch(false, testkit.StoredEvent(2, 0, 2))
	f.Holds(t, 2, 2, 2)
	f.Holds(t, 1, 2, 0)
	f.Holds(t, 9, 2, 0)
	f.Has(t, map[string]uint64{"gaps": 1, "peer_dumps": 0, "peer_events": 0, "cold": 1})
}

func TestEventStreamTakesNothingFromARouterThatIsColdItself(t *testing.T) {
	p := testkit.NewFakePublisher(t)
	p.Batch(true, testkit.StoredEvent(1, 0, 2))
	cold := followAlone(t, p)
	p.Batch(false, testkit.StoredEvent(2, 0, 2))
	cold.Holds(t, 2, 2, 2)
	f := followAlone(t, p, peerOf(t, cold))
	p.Batch(false, testkit.StoredEvent(3, 0, 2))
	f.Holds(t, 3, 2, 2)
	f.Holds(t, 2, 2, 0)
	f.Has(t, map[string]uint64{"peer_dumps": 0, "cold": 1})
}

func TestEventsRouteRefusesWhatMakesNoSense(t *testing.T) {
	f := eventstest.Applied(t, testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 2)))
	url := peerOf(t, f)
	known := fmt.Sprintf("/events?worker_id=%d&dp_rank=%d", testkit.EventWorker.Worker, testkit.EventWorker.Rank)
	for query, want := range map[string]int{
		known: 200, known + "&start=0": 200, known + "&start=0&end=0&check=0": 200, known + "&start=2&end=1": 400, known + "&start=-1": 400,
		"/events": 400, "/events?worker_id=x": 400, "/events?worker_id=3&dp_rank=4294967296": 400, "/events?worker_id=3": 404,
	} {
		status, body := testkit.HTTPGet(t, url+query)
		if status != want || (want != 200) != gjson.GetBytes(body, "error").Exists() {
			t.Errorf("%s: %d %s", query, status, body)
		}
	}
	_, body := testkit.HTTPGet(t, url+known+"&start=0&check=0")
	want := fmt.Sprintf(`{"event_id":0,"data":{"stored":{"parent_hash":null,"start_position":null,"blocks":[{"block_hash":%d,"tokens_hash":%d},`,
		testkit.BlockIDs(1, 0, 1)[0], kv.HashBlocks(nil, testkit.PromptTokens(1, 1), testkit.BlockSize, "", "")[0])
	if a := gjson.ParseBytes(body); a.Get("kind").Str != "events" || a.Get("block_size").Int() != testkit.BlockSize || a.Get("events.0").Raw[:len(want)] != want ||
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

// TestDumpsAreWrittenAFewAtATime: four of 2 million blocks took 600 MB.
func TestDumpsAreWrittenAFewAtATime(t *testing.T) {
	f := eventstest.Applied(t, testkit.Payload(t, 1, testkit.StoredEvent(1, 0, 2)))
	s := New(Settings{}, testDeps(routertest.New(t, "round-robin", 0), nil))
	s.history = func(kv.WorkerKey) *events.Log { return f.History() }
	handler := s.Handler()
	answered := make(chan int, 1)
	get := func() {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/events?worker_id=3&dp_rank=1", nil))
		answered <- w.Code
	}
	for range maxDumps {
		s.dumps <- struct{}{}
	}
	go get() // ends with its answer
	select {
	case status := <-answered:
		t.Errorf("answered with %d while others are written", status)
	case <-time.After(20 * time.Millisecond):
	}
	<-s.dumps
	if status := <-answered; status != 200 {
		t.Errorf("answered with %d", status)
	}
	<-s.dumps
}
