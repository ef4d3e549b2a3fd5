package replica

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// testMesh returns a mesh that is not connected.
func testMesh(rt *router.Router) *Mesh {
	return &Mesh{router: rt, id: 1, log: slog.New(slog.DiscardHandler), queue: make(chan message, 100), heard: map[uint64]*otherRouter{}}
}

// testReplica is a router that shares its books with others.
type testReplica struct {
	*router.Router
	*Mesh
	stop func()
}

// hub connects the routers of a test.
type hub struct {
	*testing.T

	mu    sync.Mutex // guards the rest
	links []*testLink
	count int
}

// newHub returns a hub without routers. No goroutine of those may be left.
func newHub(t *testing.T) *hub {
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, before) })
	return &hub{T: t}
}

// hubQueue is how many messages wait for a router; those beyond are lost.
const hubQueue = 10_000

// testLink is the Link of one router.
type testLink struct {
	hub   *hub
	name  string
	lose  func() bool // this message is lost; nil: none is
	inbox chan testLetter
}

// testLetter is a message on its way.
type testLetter struct {
	from, topic string
	text        []byte
}

// Publish implements Link.
func (l *testLink) Publish(topic string, text []byte) {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	for _, to := range l.hub.links {
		if to == l || to.lose != nil && to.lose() {
			continue
		}
		select {
		case to.inbox <- testLetter{l.name, topic, text}:
		default:
		}
	}
}

// Limit implements Link.
func (l *testLink) Limit() int { return 1 << 20 }

// Followed implements Link.
func (l *testLink) Followed() bool { return true }

// Joined implements Link.
func (l *testLink) Joined() uint64 { return 0 }

// Network implements Link.
func (l *testLink) Network() Network {
	return Network{ID: l.name, Connected: true, Unsent: 3, Missed: 4}
}

// Run implements Link.
func (l *testLink) Run(ctx context.Context, ears Ears) {
	for {
		select {
		case <-ctx.Done():
			return
		case m := <-l.inbox:
			_ = ears.Take(m.from, m.topic, m.text)
		}
	}
}

// Close implements Link.
func (l *testLink) Close() {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	l.hub.links = slices.DeleteFunc(l.hub.links, func(other *testLink) bool { return other == l })
}

// startReplicas starts n routers over the same two workers, and waits until they hear each other.
func startReplicas(t *testing.T, n int, tweak func(*Mesh), options ...routertest.Option) (all []*testReplica) {
	t.Helper()
	h := newHub(t)
	for range n {
		all = append(all, h.start(nil, tweak, options...))
	}
	hear(t, all...)
	return all
}

// hear waits until all hear all others.
func hear(t *testing.T, all ...*testReplica) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, "all routers hear all others", func() bool {
		return !slices.ContainsFunc(all, func(r *testReplica) bool { return r.Counts().Peers < len(all)-1 })
	})
}

// start starts one more router, which loses messages.
func (h *hub) start(lose func() bool, tweak func(*Mesh), options ...routertest.Option) *testReplica {
	h.Helper()
	named := routertest.WithSettings(func(s *router.Settings) { s.SessionHeader = "x-session-id" })
	rt := routertest.New(h.T, "kv", 2, append(options, named)...)
	h.mu.Lock()
	h.count++
	link := &testLink{hub: h, name: fmt.Sprint("router ", h.count), lose: lose, inbox: make(chan testLetter, hubQueue)}
	h.links = append(h.links, link)
	h.mu.Unlock()
	replicas := New(Deps{Router: rt, Link: link, Log: slog.New(slog.DiscardHandler)})
	replicas.timing.tick = 10 * time.Millisecond
	if tweak != nil {
		tweak(replicas)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		replicas.Run(ctx)
	}()
	stop := func() {
		cancel()
		<-done
	}
	h.Cleanup(stop)
	return &testReplica{rt, replicas, stop}
}

// sees waits until a router's books are these.
func (r *testReplica) sees(t *testing.T, what string, want []router.WorkerLoad) {
	t.Helper()
	r.seesWithin(t, 20*time.Second, what, func() []router.WorkerLoad { return want })
}

// seesWithin waits for so long at most until a router's books are what want returns.
func (r *testReplica) seesWithin(t *testing.T, limit time.Duration, what string, want func() []router.WorkerLoad) {
	t.Helper()
	var got, other []router.WorkerLoad
	defer func() {
		if t.Failed() {
			t.Logf("books are %+v, want %+v; %+v", got, other, r.Counts())
		}
	}()
	testkit.Eventually(t, limit, what, func() bool {
		got, other = r.Loads(), want()
		return slices.Equal(got, other)
	})
	if err := r.Router.Check(); err != nil {
		t.Error(err)
	}
}

func (r *testReplica) book(t *testing.T, tokens []uint32) router.Decision {
	t.Helper()
	d, err := r.Route(t.Context(), router.Request{Tokens: tokens})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestReplicasCountEachOthersRequests(t *testing.T) {
	all := startReplicas(t, 2, nil)
	a, b := all[0], all[1]
	idle := a.Loads()
	prompt := testkit.PromptTokens(1, 5)
	first := a.book(t, prompt)
	b.sees(t, "the other's request", a.Loads())
	second := b.book(t, testkit.PromptTokens(2, 3))
	if first.Target.Key == second.Target.Key {
		t.Errorf("both chose %v", first.Target.Key)
	}
	a.sees(t, "both requests", b.Loads())
	first.Booking.FirstToken()
	b.sees(t, "the prompt computed", a.Loads())
	if load := b.Load(first.Target.Key); load.PrefillTokens != 0 || load.InFlight != 1 || load.ActiveBlocks != 5 {
		t.Errorf("%+v", load)
	}
	first.Booking.End()
	second.Booking.Finish(7)
	for _, r := range all {
		r.sees(t, "nothing in flight", idle)
	}
	// Of its own a router hears nothing: it would count itself twice.
	if a.Received.Load() != 2 || b.Received.Load() != 3 || a.Dropped.Load()+b.Dropped.Load()+a.Refused.Load()+b.Refused.Load() != 0 {
		t.Errorf("%+v and %+v", a.Counts(), b.Counts())
	}
}

// TestReplicasLearnWhichLegARequestIs: what only decodes is no prompt to be
// computed there, nor is its prompt forgotten.
func TestReplicasLearnWhichLegARequestIs(t *testing.T) {
	all := startReplicas(t, 2, nil)
	prefill, decode := kv.WorkerKey{Worker: 20}, kv.WorkerKey{Worker: 21}
	for _, r := range all {
		for key, role := range map[kv.WorkerKey]kv.Role{prefill: kv.RolePrefill, decode: kv.RoleDecode} {
			r.Up(kv.Target{Key: key, Disagg: kv.Disagg{Role: role, Kind: kv.KindNIXL}})
		}
	}
	pair, err := all[0].RoutePair(t.Context(), router.Request{Tokens: testkit.PromptTokens(1, 5)}, router.PairRule{LeastUncached: 1})
	if err != nil || pair.Prefill.Target.Key != prefill || pair.Decode.Target.Key != decode {
		t.Fatalf("%+v, %v", pair, err)
	}
	same := func(what string) {
		t.Helper()
		for _, w := range []kv.WorkerKey{prefill, decode} {
			testkit.Eventually(t, 20*time.Second, what, func() bool {
				own, told := all[0].Load(w), all[1].Load(w)
				return own.InFlight == told.InFlight && own.PrefillTokens == told.PrefillTokens && own.AwaitedTokens == told.AwaitedTokens
			})
		}
	}
	same("both legs")
	if load := all[1].Load(decode); load.AwaitedTokens == 0 || load.PrefillTokens != 0 || len(load.Prefills) != 0 {
		t.Errorf("the decode worker has %+v", load)
	}
	pair.Prefill.Booking.Finish(1)
	pair.Decode.Booking.FirstToken()
	same("the answer begun")
	pair.End()
	same("nothing")
	if load := all[1].Load(decode); load.InFlight != 0 || load.AwaitedTokens != 0 {
		t.Errorf("the decode worker has %+v", load)
	}
}

func TestReplicasForgetARouterThatIsGone(t *testing.T) {
	all := startReplicas(t, 3, nil)
	idle := all[0].Loads()
	d := all[0].book(t, testkit.PromptTokens(1, 40))
	for _, r := range all {
		r.sees(t, "one request", all[0].Loads())
	}
	own := all[1].book(t, testkit.PromptTokens(2, 40)) // on the other worker
	for _, r := range all {
		r.sees(t, "both requests", all[1].Loads())
	}
	all[0].stop()
	testkit.Eventually(t, 20*time.Second, "its request forgotten", func() bool {
		return all[1].Load(d.Target.Key).InFlight == 0 && all[2].Load(d.Target.Key).InFlight == 0
	})
	if all[1].Load(own.Target.Key).InFlight != 1 || all[2].Load(own.Target.Key).InFlight != 1 {
		t.Error("another router's request was forgotten, too")
	}
	own.Booking.End()
	for _, r := range all[1:] {
		r.sees(t, "nothing in flight", idle)
		if r.Lost.Load() != 1 || r.Held.Load() != 0 {
			t.Errorf("%d lost, %d held", r.Lost.Load(), r.Held.Load())
		}
	}

	// The next one starts with nothing, and is heard.
	again := all[0].link.(*testLink).hub.start(nil, nil)
	hear(t, again, all[1], all[2])
	d = again.book(t, testkit.PromptTokens(3, 40))
	for _, r := range all[1:] {
		testkit.Eventually(t, 20*time.Second, "its request known", func() bool { return r.Load(d.Target.Key).InFlight == 1 })
	}
	d.Booking.End()
	for _, r := range all[1:] {
		r.sees(t, "nothing in flight", idle)
	}
}

// TestReplicasForgetARouterThatHangs: it says nothing, and does not leave.
func TestReplicasForgetARouterThatHangs(t *testing.T) {
	h := newHub(t)
	r := h.start(nil, func(m *Mesh) { m.timing.silence = 100 * time.Millisecond })
	mute := &testLink{hub: h, name: "mute"}
	mute.Publish(replicaTopic, encode(&ownMessage{Router: 9, Kind: kindAsk}))
	mute.Publish(SlotTopic, slotMessage(t, fields{"kvrouter": fields{"prompt_tokens": 100, "prefill_tokens": 60}}, fields{"data": fields{"AddRequest": fields{"token_sequence": []uint64{1}}}}))
	testkit.Eventually(t, 20*time.Second, "it is forgotten", func() bool { return r.Load(kv.WorkerKey{Worker: 1}).InFlight == 0 && r.Lost.Load() > 0 })
	if r.Received.Load() != 1 {
		t.Errorf("%+v", r.Counts())
	}
}

// takeChange takes a change as router 2 says it.
func (p *otherRouter) takeChange(c router.Change) {
	if p.is(2) {
		p.take(decoded{2, c})
	}
}

func TestReplicasTakeOnlyWhatMakesSense(t *testing.T) {
	rt := routertest.New(t, "kv", 2)
	p := newOther(testMesh(rt))
	one := kv.WorkerKey{Worker: 1}
	p.takeChange(router.Change{Kind: router.ChangeFree, Request: "4", Worker: one})
	p.takeChange(router.Change{Kind: router.ChangePrefill, Request: "4", Worker: one})
	p.takeChange(router.Change{Kind: router.ChangeAdd, Request: "5", Worker: kv.WorkerKey{Worker: 7}, Tokens: 9}) // no such worker yet
	p.takeChange(router.Change{Kind: router.ChangeAdd, Request: "8", Worker: one, Tokens: 100})
	p.takeChange(router.Change{Kind: router.ChangeAdd, Request: "8", Worker: one, Tokens: 100}) // again
	p.takeChange(router.Change{Kind: router.ChangeFree, Request: "8"})                          // of another worker
	p.takeChange(router.Change{Kind: router.ChangeAdd, Request: "9", Worker: one, Tokens: 9, Sequence: []uint64{1}, BlockSize: testkit.BlockSize + 1})
	if load := rt.Load(one); load.InFlight != 2 || load.ActiveBlocks != 0 {
		t.Errorf("blocks of another size than the worker's count: %+v", load)
	}
	p.takeChange(router.Change{Kind: router.ChangeFree, Request: "9", Worker: one})
	if load := rt.Load(one); load.InFlight != 1 || load.PrefillTokens != 0 || load.ActiveBlocks != 0 || p.mesh.Dropped.Load() != 0 {
		t.Errorf("%+v, %+v", load, p.mesh.Counts())
	}
	rt.Up(kv.Target{Key: kv.WorkerKey{Worker: 7}})
	if p.retry(time.Now()); rt.Load(kv.WorkerKey{Worker: 7}).InFlight != 1 {
		t.Error("a booking whose worker came later is not counted")
	}
	p.takeChange(router.Change{Kind: router.ChangeAdd, Request: "8", Worker: kv.WorkerKey{Worker: 0}, Tokens: 100}) // its end was lost
	if rt.Load(one).InFlight != 0 || rt.Load(kv.WorkerKey{Worker: 0}).InFlight != 1 {
		t.Error("a request that came again elsewhere is still where it was")
	}
	if err := p.check(); err != nil {
		t.Error(err)
	}
	p.is(3) // another router answers now
	if load := rt.Load(kv.WorkerKey{Worker: 0}); load.InFlight != 0 || p.mesh.Held.Load() != 0 {
		t.Errorf("%+v", load)
	}
}

// TestReplicasDropBookingsThatCannotBe: one of 2^62 tokens stopped the router.
func TestReplicasDropBookingsThatCannotBe(t *testing.T) {
	rt := routertest.New(t, "work", 2)
	p := newOther(testMesh(rt))
	for i, change := range []router.Change{
		{Tokens: kv.MaxTokens + 1}, {Tokens: 1 << 62, Uncached: 1 << 62}, {Tokens: 10, Uncached: 11}, {Uncached: 1 << 62}, {Tokens: -1, Uncached: 1},
		{Tokens: 1, Sequence: make([]uint64, 2)}, {Sequence: make([]uint64, 1)}, {Tokens: 5, Leg: kv.LegDecode + 1},
		{Tokens: 5, Loads: kv.TierTokens{Host: 3, Disk: 3}}, {Loads: kv.TierTokens{External: kv.MaxTokens}},
	} {
		change.Kind, change.Request, change.Worker.Worker = router.ChangeAdd, fmt.Sprint(i), 1
		p.takeChange(change)
	}
	if load := rt.Load(kv.WorkerKey{Worker: 1}); load.InFlight != 0 || p.mesh.Dropped.Load() != 10 {
		t.Errorf("%+v, %d dropped", load, p.mesh.Dropped.Load())
	}
	// The largest that can be are counted, and cost no time.
	for i := range uint64(100) {
		p.takeChange(router.Change{Kind: router.ChangeAdd, Request: fmt.Sprint(100 + i), Worker: kv.WorkerKey{Worker: i % 2}, Tokens: kv.MaxTokens, Uncached: kv.MaxTokens})
	}
	d, err := rt.Route(t.Context(), router.Request{Tokens: testkit.PromptTokens(1, 5)})
	if err != nil {
		t.Fatal(err)
	}
	d.Booking.End()
	if err := p.check(); err != nil {
		t.Error(err)
	}
	p.forget()
	if load := rt.Load(kv.WorkerKey{Worker: 1}); load.InFlight != 0 || load.PrefillTokens != 0 {
		t.Errorf("%+v", load)
	}
}

func TestReplicasBoundWhatTheyKeepOfAnother(t *testing.T) {
	rt := routertest.New(t, "random", 2) // which counts no blocks: that would take long
	p := newOther(testMesh(rt))
	sequence := make([]uint64, hashLimit/4)
	add := func(number uint64) {
		p.takeChange(router.Change{Kind: router.ChangeAdd, Request: fmt.Sprint(number), Worker: kv.WorkerKey{Worker: 1}, Tokens: kv.MaxTokens, Sequence: sequence})
	}
	for number := range uint64(5) {
		add(number)
	}
	if len(p.open) != 4 || p.hashes != hashLimit || p.mesh.Dropped.Load() != 1 {
		t.Errorf("%d bookings with %d hashes, %d dropped", len(p.open), p.hashes, p.mesh.Dropped.Load())
	}
	p.takeChange(router.Change{Kind: router.ChangeFree, Request: "1", Worker: kv.WorkerKey{Worker: 1}})
	add(9)
	if len(p.open) != 4 || p.hashes != hashLimit {
		t.Errorf("%d bookings with %d hashes after one has gone", len(p.open), p.hashes)
	}
	p.forget()
	if p.hashes != 0 || p.mesh.Held.Load() != 0 {
		t.Errorf("%d hashes, %d held", p.hashes, p.mesh.Held.Load())
	}
}

// lossy loses a share of the messages, in percent. The hub is locked where it is called.
func lossy(seed uint64, percent int) func() bool {
	random := rand.New(rand.NewPCG(seed, 1))
	return func() bool { return random.IntN(100) < percent }
}

// operate does that many random things at the routers: requests begin, compute their
// prompts, and end. It returns what is in flight.
func operate(t *testing.T, all []*testReplica, seed uint64, operations int) (open []router.Decision) {
	t.Helper()
	random := rand.New(rand.NewPCG(seed, 2))
	for i := range operations {
		at := random.IntN(max(1, len(open)))
		switch n := random.IntN(5); {
		case len(open) < 20 || n < 2:
			open = append(open, all[random.IntN(len(all))].book(t, testkit.PromptTokens(i%40, 1+random.IntN(30))))
		case n < 3:
			open[at].Booking.FirstToken()
		default:
			open[at].Booking.Finish(random.IntN(50))
			open = slices.Delete(open, at, at+1)
		}
	}
	return open
}

func TestReplicasConverge(t *testing.T) {
	h := newHub(t)
	var all []*testReplica
	for i := range 3 {
		all = append(all, h.start(lossy(uint64(i), 3), nil))
	}
	hear(t, all...)
	open := operate(t, all, 7, 1000)
	for _, r := range all[1:] {
		r.seesWithin(t, 5*time.Second, "the loads of the first", all[0].Loads)
	}
	if all[0].Held.Load()+all[1].Held.Load()+all[2].Held.Load() != int64(2*len(open)) {
		t.Errorf("%d are in flight, held are %d, %d and %d", len(open), all[0].Held.Load(), all[1].Held.Load(), all[2].Held.Load())
	}
	if all[0].Resent.Load()+all[1].Resent.Load()+all[2].Resent.Load() == 0 {
		t.Error("nothing was told again: nothing was lost")
	}

	// A late one learns what is in flight.
	late := h.start(lossy(9, 3), nil)
	late.seesWithin(t, 5*time.Second, "what was in flight before it came", all[0].Loads)

	// Of one that is gone nothing is left.
	all[2].stop()
	for _, d := range open {
		d.Booking.End()
	}
	for _, r := range []*testReplica{all[0], all[1], late} {
		testkit.Eventually(t, 10*time.Second, "nothing in flight", func() bool {
			return !slices.ContainsFunc(r.Loads(), func(l router.WorkerLoad) bool { return l.ActiveRequests != 0 || l.PotentialPrefillTokens != 0 })
		})
	}
}

// TestALateReplicaLearnsOfMoreThanAQueueHolds: what is reported at once is bounded, else the
// same part would be lost each time.
func TestALateReplicaLearnsOfMoreThanAQueueHolds(t *testing.T) {
	h := newHub(t)
	early := h.start(nil, nil)
	var open []router.Decision
	for i := range 3 * hubQueue / 2 {
		open = append(open, early.book(t, testkit.PromptTokens(i, 20)))
		if i%2 == 0 {
			open[i].Booking.FirstToken()
		}
	}
	late := h.start(nil, nil)
	late.sees(t, "all that is in flight", early.Loads())
	for _, d := range open {
		d.Booking.End()
	}
	late.sees(t, "nothing in flight", early.Loads())
}

func TestSessionsFollowToOtherRouters(t *testing.T) {
	all := startReplicas(t, 2, nil)
	ask := func(r *testReplica, owner, name string) kv.WorkerKey {
		t.Helper()
		d, err := r.Route(t.Context(), router.Request{Tokens: testkit.PromptTokens(1, 5), Session: r.SessionOf(owner, name), SessionID: router.SessionID(owner, name)})
		if err != nil {
			t.Fatal(err)
		}
		d.Booking.End()
		return d.Target.Key
	}
	for i := range 20 {
		owner, name := []string{"", "someone"}[i%2], fmt.Sprint("session ", i)
		at := ask(all[0], owner, name)
		testkit.Eventually(t, 20*time.Second, "the session is known", func() bool {
			known, _ := all[1].Sessions()
			return known == i+1
		})
		if to := ask(all[1], owner, name); to != at {
			t.Errorf("%s of %q is at %v and at %v", name, owner, at, to)
		}
	}
	if _, counts := all[1].Sessions(); counts.Kept != 20 {
		t.Errorf("%+v", counts)
	}
}

// TestReservationsMayEndAtAnyRouter: clients behind a balancer reach another router with
// each call.
func TestReservationsMayEndAtAnyRouter(t *testing.T) {
	all := startReplicas(t, 3, nil)
	idle := all[0].Loads()
	d, err := all[0].Route(t.Context(), router.Request{Tokens: testkit.PromptTokens(1, 5), ID: "reservation"})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range all[1:] {
		r.sees(t, "the reservation", all[0].Loads())
	}
	if all[1].Pass(router.ChangeFree, "unknown") || all[0].Pass(router.ChangeFree, "reservation") {
		t.Error("a reservation that no other router has made was passed on")
	}
	for _, kind := range []string{router.ChangePrefill, router.ChangeFree} {
		before := all[0].Load(d.Target.Key)
		if !all[1].Pass(kind, "reservation") {
			t.Fatal("it is not known")
		}
		testkit.Eventually(t, 20*time.Second, kind+" has come to whom it is of", func() bool {
			now := all[0].Load(d.Target.Key)
			return now.PrefillTokens != before.PrefillTokens || now.InFlight != before.InFlight
		})
		for _, r := range all[1:] {
			r.seesWithin(t, 20*time.Second, "the same", all[0].Loads)
		}
	}
	if !d.Booking.Ended() {
		t.Error("it is still booked")
	}
	for _, r := range all {
		r.sees(t, "nothing in flight", idle)
	}
}

func TestEjectionsAreHintsToOtherRouters(t *testing.T) {
	all := startReplicas(t, 2, nil)
	for range 3 {
		d := all[0].book(t, testkit.PromptTokens(1, 5))
		for d.Target.Key.Worker != 0 {
			d.Booking.End()
			d = all[0].book(t, testkit.PromptTokens(rand.IntN(1000), 5))
		}
		d.Booking.FailAs(health.Refused, "it is not there")
	}
	testkit.Eventually(t, 20*time.Second, "the other router holds the worker", func() bool {
		records, _ := all[1].Health.Records()
		return slices.ContainsFunc(records, func(r health.Record) bool { return r.Worker.Worker == 0 && r.State == health.StateHeld })
	})
	if records, _ := all[1].Health.Records(); records[0].Until.After(time.Now().Add(testkit.Defaults[health.Settings]().EjectionTime)) {
		t.Errorf("it is held until %v", records[0].Until)
	}
	// Not of so many workers that too few are left.
	if all[1].Health.TakeEjection(kv.WorkerKey{Worker: 1}, time.Hour) {
		t.Error("all workers are held")
	}
}

// TestARouterThatJoinsHearsOfStoredResponses sends more than one message takes.
func TestARouterThatJoinsHearsOfStoredResponses(t *testing.T) {
	var mu sync.Mutex // guards heard
	heard := map[string][2]uint64{}
	all := startReplicas(t, 2, func(m *Mesh) {
		m.stored = func(response string, worker, owner uint64) {
			mu.Lock()
			defer mu.Unlock()
			heard[response] = [2]uint64{worker, owner}
		}
		m.eachStored = func(take func(worker, owner uint64, responses []string)) {
			ids := make([]string, storedAtOnce+1)
			for i := range ids {
				ids[i] = fmt.Sprint("resp_", i)
			}
			take(1, 7, ids)
			take(2, 0, []string{"resp_other"})
		}
	})
	testkit.Eventually(t, 20*time.Second, "all responses are known", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(heard) == storedAtOnce+2 && heard["resp_4096"] == [2]uint64{1, 7} && heard["resp_other"] == [2]uint64{2, 0}
	})
	for _, r := range all {
		r.stop()
	}
}
